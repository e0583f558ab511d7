"""The result of tuning, and its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contest import Standing
from .trees import Tree


@dataclass(frozen=True)
class TuningResult:
    """
    Attributes:
        own: The drafter's own tree.
        trees: The trees that competed, the fastest first.
        vocabularies: The fastest tree with the draft vocabulary and with all tokens.
        chosen: The fastest tree for each number of rows. These trees differ only in size.
        finals: The chosen trees on prompts of no contest, by "greedy" or "sampled" and by rows.
    """

    own: Tree
    trees: Mapping[Tree, Standing]
    vocabularies: Mapping[Tree, Standing]
    chosen: Mapping[int, Tree]
    finals: Mapping[tuple[str, int], Standing]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were found, as fields of a generation config."""
        winner = next(iter(self.chosen.values()))
        by_rows = {str(rows): tree.num_assistant_tokens for rows, tree in self.chosen.items()}
        break_even: dict[str, dict[str, float]] = {}
        for (kind, rows), standing in self.finals.items():
            break_even.setdefault(kind, {})[str(rows)] = round(standing.break_even, 3)
        return winner.settings | {"num_assistant_tokens": by_rows, "break_even": break_even}


def describe(result: TuningResult) -> str:
    """Returns the text that `gumiho tune` prints for a `result`."""
    contests = []
    for tree, standing in [*result.trees.items(), *result.vocabularies.items()]:
        temperature = tree.draft_temperature
        shown = "by depth" if isinstance(temperature, tuple) else f"{temperature:.2f}"
        remark = "(all tokens)" if tree.drafts_all_tokens else "(the drafter's own)" * (tree == result.own)
        shape = tree.num_assistant_tokens, tree.branching_factor, tree.tree_depth
        contests.append((*shape, shown, *_numbers(standing), remark))
    lines = _table(("drafted", "branching", "depth", "temperature", *_NUMBERS, ""), contests)
    finals = [
        (rows, kind, result.chosen[rows].num_assistant_tokens, *_numbers(standing))
        for (kind, rows), standing in result.finals.items()
    ]
    lines += ["", "the fastest, on prompts that were not in the contests, without prompt lookup"]
    lines += _table(("rows", "decoding", "drafted", *_NUMBERS), finals)
    lines += ["", "tau: tokens per cycle; cycle: in steps of plain decoding; speed-up: tau / cycle"]
    lines += [
        f"PLAIN DECODING IS FASTER with {rows} row{'s' * (rows > 1)}, {kind}. Leave `assistant_model` out there."
        for (kind, rows), standing in result.finals.items()
        if round(standing.speedup, 2) < 1  # as it is shown
    ]
    return "\n".join(lines)


_NUMBERS = ("tau", "cycle", "speed-up")


def _numbers(standing: Standing) -> list[str]:
    return [f"{number:.2f}" for number in (standing.tau, standing.break_even, standing.speedup)]


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table whose columns end at the same place."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
