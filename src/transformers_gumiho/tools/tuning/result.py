"""The result of tuning, and its text."""

from collections.abc import Mapping
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
        """The cases in which plain decoding was faster: "greedy" or "sampled", and the rows."""
        return [where for where, standing in self.finals.items() if standing.speedup < 1]


def describe(result: TuningResult) -> str:
    """Returns the text that `gumiho tune` prints for a `result`."""
    vocabularies = {"all": "all tokens", "own": "the drafter's", "counted": f"{len(result.counted)} counted"}
    lines = ["drafted  branching  depth  temperature    tau  cycle  speed-up  turns"]
    lines += [_tree_row(tree, standing, result.own) for tree, standing in result.trees.items()]
    if result.vocabularies:
        lines += ["", "draft vocabulary    tau  cycle  speed-up  turns"]
    lines += [f"{vocabularies[tree.vocabulary]:>16}  {_numbers(won)}" for tree, won in result.vocabularies.items()]
    lines += ["", "the fastest, on prompts that were not in the contests, without prompt lookup"]
    lines += ["rows  decoding  drafted    tau  cycle  speed-up  turns"]
    for (kind, rows), standing in result.finals.items():
        size = result.chosen[rows].num_assistant_tokens
        lines.append(f"{rows:4d}  {kind:<8}  {size:7d}  {_numbers(standing)}")
    lines += ["", "tau: tokens per cycle; cycle: in steps of plain decoding; speed-up: tau / cycle"]
    lines += [f"not tuned for {rows} rows: {reason}" for rows, reason in result.refused.items()]
    for kind, rows in result.losing:
        speedup = f"{result.finals[kind, rows].speedup:.2f} times its speed"
        lines.append(f"PLAIN DECODING IS FASTER with {rows} row{'s' * (rows > 1)}, {kind}: the drafter has {speedup}.")
    return "\n".join(lines + ["Leave `assistant_model` out in these cases."] * bool(result.losing))


def _tree_row(tree: Tree, standing: Standing, own: Tree) -> str:
    given = tree.draft_temperature
    temperature = "by depth" if isinstance(given, tuple) else f"{given:.2f}"
    remark = "  (the drafter's own)" if tree == own else ""
    return (
        f"{tree.num_assistant_tokens:7d}  {tree.branching_factor:9d}  {tree.tree_depth:5d}  {temperature:>11}  "
        f"{_numbers(standing)}{remark}"
    )


def _numbers(standing: Standing) -> str:
    return f"{standing.tau:5.2f}  {standing.break_even:5.2f}  {standing.speedup:8.2f}  {standing.num_turns:5d}"
