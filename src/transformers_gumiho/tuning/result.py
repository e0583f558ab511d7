"""What tuning found, and how it is printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .contest import Standing
from .trees import Tree


@dataclass(frozen=True)
class TuningResult:
    """
    Attributes:
        trees: The trees that competed, the fastest first.
        own: The tree that the drafter had, one of them.
        vocabularies: The fastest tree with each vocabulary, the fastest first; empty where none was chosen.
        chosen: The fastest tree for each number of rows. They differ in size only.
        counted: The tokens that were counted.
        finals: How the chosen trees did on prompts that no contest had, by "greedy" or "sampled" and by rows.
        refused: Numbers of rows in which the target cannot verify drafts, and why.
        temperature: The temperature that was tuned for; 0 is greedy.
    """

    trees: Mapping[Tree, Standing]
    own: Tree
    vocabularies: Mapping[Tree, Standing]
    chosen: Mapping[int, Tree]
    counted: list[int]
    finals: Mapping[tuple[str, int], Standing]
    refused: Mapping[int, str]
    temperature: float = 0.0

    @property
    def winner(self) -> Tree:
        """The tree of the fewest rows, whose settings besides the size are those of all."""
        return next(iter(self.chosen.values()))

    @property
    def settings(self) -> dict[str, Any]:
        """What was found, as fields of a generation config."""
        by_rows = {str(rows): tree.num_assistant_tokens for rows, tree in self.chosen.items()}
        break_even: dict[str, dict[str, float]] = {}
        for (kind, rows), standing in self.finals.items():
            break_even.setdefault(kind, {})[str(rows)] = round(standing.break_even, 3)
        vocabulary: dict[str, Any] = {}
        if self.winner.vocabulary != "own":
            is_counted = self.winner.vocabulary == "counted"
            vocabulary = {"draft_vocabulary": self.counted if is_counted else None}
        return self.winner.settings | {"num_assistant_tokens": by_rows, "break_even": break_even} | vocabulary

    @property
    def losing(self) -> list[tuple[str, int]]:
        """Where plain decoding was measured to be faster: "greedy" or "sampled", and the rows."""
        return [where for where, standing in self.finals.items() if standing.speedup < 1]


def describe(result: TuningResult) -> str:
    """Returns what `gumiho tune` prints of a `result`."""
    kind = f"sampled at {result.temperature:g}" if result.temperature else "greedy"
    lines = [
        f"trees, {kind}, {min(result.chosen)} rows at once; tau: tokens per cycle; cycle: in steps of plain decoding",
        "drafted  branching  depth  temperature    tau  cycle  speed-up  turns",
        *[_tree_row(tree, standing, result) for tree, standing in result.trees.items()],
        "",
    ]
    if result.vocabularies:
        lines += ["draft vocabulary    tau  cycle  speed-up", *_vocabulary_rows(result), ""]
    lines += [
        "the fastest, timed on prompts that were not in the contests",
        "rows  decoding  drafted    tau  cycle  speed-up",
        *[
            f"{rows:4d}  {kind:<8}  {result.chosen[rows].num_assistant_tokens:7d}  {_numbers(standing)}"
            for (kind, rows), standing in result.finals.items()
        ],
        *[f"not tuned for {rows} rows: {refusal}" for rows, refusal in result.refused.items()],
        *[_warning(kind, rows, result.finals[kind, rows]) for kind, rows in result.losing],
    ]
    return "\n".join(lines)


def _tree_row(tree: Tree, standing: Standing, result: TuningResult) -> str:
    given = tree.draft_temperature
    temperature = f"{given:.2f}" if isinstance(given, float | int) else "by depth"
    own = "  (the drafter's)" if tree == result.own else ""
    return (
        f"{tree.num_assistant_tokens:7d}  {tree.branching_factor:9d}  {tree.tree_depth:5d}  {temperature:>11}  "
        f"{_numbers(standing)}  {standing.num_turns:5d}{own}"
    )


def _vocabulary_rows(result: TuningResult) -> list[str]:
    names = {"own": "the drafter's", "all": "all tokens", "counted": f"{len(result.counted)} counted"}
    if len({"own", "all"} & {tree.vocabulary for tree in result.vocabularies}) == 1:
        names["own"] = names["all"]
    return [f"{names[tree.vocabulary]:>16}  {_numbers(standing)}" for tree, standing in result.vocabularies.items()]


def _numbers(standing: Standing) -> str:
    return f"{standing.tau:5.2f}  {standing.break_even:5.2f}  {standing.speedup:8.2f}"


def _warning(kind: str, rows: int, standing: Standing) -> str:
    return (
        f"PLAIN DECODING IS FASTER with {rows} rows, {kind}: with the drafter {standing.speedup:.2f} times its speed. "
        f"Leave `assistant_model` out there."
    )
