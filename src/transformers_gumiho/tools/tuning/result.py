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
        vocabularies: The fastest tree with each vocabulary, the fastest first; empty if none was chosen.
        chosen: The fastest tree for each number of rows. These trees differ only in size.
        counted: Ids of the tokens that were counted.
        finals: Results of the chosen trees on prompts that are in no contest, by "greedy" or "sampled" and by rows.
        refused: Numbers of rows for which the target cannot verify drafts, with the reason.
    """

    own: Tree
    trees: Mapping[Tree, Standing]
    vocabularies: Mapping[Tree, Standing]
    chosen: Mapping[int, Tree]
    counted: list[int]
    finals: Mapping[tuple[str, int], Standing]
    refused: Mapping[int, str]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were found, as fields of a generation config."""
        winner = next(iter(self.chosen.values()))
        by_rows = {str(rows): tree.num_assistant_tokens for rows, tree in self.chosen.items()}
        break_even: dict[str, dict[str, float]] = {}
        for (kind, rows), standing in self.finals.items():
            break_even.setdefault(kind, {})[str(rows)] = round(standing.break_even, 3)
        found = winner.settings | {"num_assistant_tokens": by_rows, "break_even": break_even}
        if winner.vocabulary != "own":
            found["draft_vocabulary"] = self.counted if winner.vocabulary == "counted" else None
        return found

    @property
    def losing(self) -> list[tuple[str, int]]:
        """The cases in which plain decoding was faster, as far as it is shown: "greedy" or "sampled", and the rows."""
        return [where for where, standing in self.finals.items() if round(standing.speedup, 2) < 1]


def describe(result: TuningResult) -> str:
    """Returns the text that `gumiho tune` prints for a `result`."""
    vocabularies = {"all": "all tokens", "own": "the drafter's", "counted": f"{len(result.counted)} counted"}
    trees = []
    for tree, standing in result.trees.items():
        shape = tree.num_assistant_tokens, tree.branching_factor, tree.tree_depth
        given = tree.draft_temperature
        temperature = "by depth" if isinstance(given, tuple) else f"{given:.2f}"
        remark = "(the drafter's own)" if tree == result.own else ""
        trees.append((*shape, temperature, *_numbers(standing), remark))
    lines = _table(("drafted", "branching", "depth", "temperature", *_NUMBERS, ""), trees)
    if result.vocabularies:
        won = [(vocabularies[tree.vocabulary], *_numbers(standing)) for tree, standing in result.vocabularies.items()]
        lines += ["", *_table(("draft vocabulary", *_NUMBERS), won)]
    finals = [
        (rows, kind, result.chosen[rows].num_assistant_tokens, *_numbers(standing))
        for (kind, rows), standing in result.finals.items()
    ]
    lines += ["", "the fastest, on prompts that were not in the contests, without prompt lookup"]
    lines += _table(("rows", "decoding", "drafted", *_NUMBERS), finals)
    lines += ["", "tau: tokens per cycle; cycle: in steps of plain decoding; speed-up: tau / cycle"]
    lines += [f"not tuned for {rows} rows: {reason}" for rows, reason in result.refused.items()]
    for kind, rows in result.losing:
        speedup = f"{result.finals[kind, rows].speedup:.2f} times its speed"
        lines.append(f"PLAIN DECODING IS FASTER with {rows} row{'s' * (rows > 1)}, {kind}: the drafter has {speedup}.")
    return "\n".join(lines + ["Leave `assistant_model` out in these cases."] * bool(result.losing))


_NUMBERS = ("tau", "cycle", "speed-up", "turns")


def _numbers(standing: Standing) -> tuple[str, str, str, int]:
    return f"{standing.tau:.2f}", f"{standing.break_even:.2f}", f"{standing.speedup:.2f}", standing.num_turns


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table whose columns end at the same place."""
    cells = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
