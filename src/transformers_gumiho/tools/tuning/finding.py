"""The contests in their order, from some fifteen trees to the settings that are saved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...commands import UserValueError, option
from ...model.decoding_settings import NEVER_PAUSES
from ...model.modeling_gumiho import GumihoModel
from ..measuring.modes import PLAIN, DecodingMode, Runner
from ..measuring.timing import DecodingTime
from ..pairs import PairArguments, prompts_field
from .contest import Standing, find_fastest
from .result import TuningResult
from .trees import Tree, list_sizes, list_vocabularies, num_counted


# Numbers of turns after which trees are removed. Fewer trees decode more prompts in the same time.
ROUNDS = (3, 6, 12)
# Turns in which the winners are timed again.
FINAL_TURNS = 6
Prompts = Sequence[Sequence[int]]


@dataclass(kw_only=True)
class TuningArguments(PairArguments):
    """The options of `gumiho tune`; [`tune`] takes them, too. They name a pair, or a target and an assistant."""

    prompts: str | None = prompts_field(without=" Without it, the target samples its own prompts.")
    output_dir: str | None = option("Receives `generation_config.json` (default: the drafter's folder).")
    num_prompts: int = option("Number of prompts: two thirds choose the tree, one third times the winner.", 18)
    max_new_tokens: int = option("Maximum number of tokens per prompt.", 64)
    batch_sizes: list[int] = option("Numbers of rows for which to choose a tree size.", [1, 4, 8])
    temperature: float = option("Sampling temperature to tune for; 0 is greedy.", 0.0)
    tune_vocabulary: bool = option("Also choose the tokens that may be drafted.", True)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.temperature < math.inf:
            raise UserValueError(f"--temperature must be 0 (greedy) or a positive number, got {self.temperature}.")


def find_settings(
    runner: Runner, drafter: GumihoModel, trees: Sequence[Tree], prompts: Prompts, args: TuningArguments
) -> TuningResult:
    """
    Compares trees, then vocabularies, then sizes for more rows, and times the winners on other prompts.

    Args:
        runner: Decodes and times the turns.
        drafter: Has its own settings again after each turn.
        trees: The trees to compare. The first one is the drafter's own.
        prompts: Token ids of each prompt. At least two prompts.
        args: Rows, temperature, and whether to choose a vocabulary.

    Raises:
        ValueError: There are fewer than two prompts, no batch sizes, or all texts end with their first token.
    """
    if len(prompts) < 2:
        raise UserValueError(
            f"Tuning needs two prompts, to choose settings on one and time them on the other, got {len(prompts)}. "
            f"Give more, or raise `num_prompts`."
        )
    if min(args.batch_sizes, default=0) < 1:
        raise UserValueError(f"`batch_sizes` must be one or more numbers of at least 1, got {list(args.batch_sizes)}.")
    contests = _Contests(runner, drafter)
    # Two thirds of the prompts are for the contests.
    num_seen = min(math.ceil(len(prompts) * 2 / 3), len(prompts) - 1)
    seen, unseen = prompts[:num_seen], prompts[num_seen:]
    first, *further = sorted(set(args.batch_sizes))
    by_tree = contests.hold("trees", trees, seen, first, args.temperature)
    winner = next(iter(by_tree))
    by_vocabulary: dict[Tree, Standing] = {}
    vocabularies = list_vocabularies(winner, contests.vocab_size)
    # A drafter's own output head scores a part of the vocabulary already, and no other tokens.
    has_choice = len(vocabularies) > 1 and drafter.config.draft_vocab_size is None
    if args.tune_vocabulary and has_choice and len(seen) > 1:
        # A list is counted on the first half of the prompts and compared on the second half, because it loses no
        # tokens on the texts that it was counted on. What is saved is counted on both halves.
        half = len(seen) // 2
        contests.count(seen[:half])
        by_vocabulary = contests.hold("vocabularies", vocabularies, seen[half:], first, args.temperature)
        winner = next(iter(by_vocabulary))
        contests.count(seen)
    chosen, refused = {first: winner}, {}
    for rows in further:
        try:
            of_rows = contests.hold(f"{rows} rows", list_sizes(winner), seen, rows, args.temperature)
            chosen[rows] = next(iter(of_rows))
        except ValueError as error:  # some targets cannot verify drafts in padded batches
            refused[rows] = str(error)
    finals = {}
    for kind, temperature in (("greedy", 0.0), ("sampled", args.temperature or 1.0)):
        for rows, tree in chosen.items():
            name = f"{rows} rows, {kind}"
            # `break_even` is the time of a cycle that drafts. In runs of prompt lookup the drafter does not draft.
            lookup = {"prompt_lookup_num_tokens": 0}
            finals[kind, rows] = contests.hold(name, [tree], unseen, rows, temperature, [FINAL_TURNS], lookup)[tree]
    return TuningResult(trees[0], by_tree, by_vocabulary, chosen, contests.counted, finals, refused)


class _Contests:
    """Contests of the trees of a drafter; `counted` are the tokens that trees with a counted vocabulary may draft."""

    def __init__(self, runner: Runner, drafter: GumihoModel):
        self._runner, self._drafter = runner, drafter
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self.vocab_size = drafter.config.get_text_config().vocab_size
        self.counted: list[int] = []

    def hold(
        self, name: str, trees: Sequence[Tree], prompts: Prompts, rows: int, temperature: float,
        ends: Sequence[int] | None = None, settings: Mapping[str, Any] | None = None,
    ) -> dict[Tree, Standing]:  # fmt: skip
        """
        Lets trees compete on prompts, of which each turn decodes the next `rows` as a batch, by default in `ROUNDS`.
        `settings` are further ones of the drafter.
        """

        def decode(competing: Sequence[Tree], turn: int) -> list[DecodingTime]:
            # After the last prompt follows the first one.
            batch = [prompts[(turn * rows + row) % len(prompts)] for row in range(rows)]
            modes = [PLAIN, *(self._mode(tree, settings or {}) for tree in competing)]
            taken = self._runner.compare(modes, batch, temperature, seed=turn)
            self._texts.update(zip(map(tuple, batch), taken[0].texts, strict=True))
            return taken

        return find_fastest(trees, decode, ends or ROUNDS, name)

    def count(self, prompts: Prompts) -> None:
        """Counts the tokens that occur most often in the texts of prompts; the most frequent come first."""
        tokens = [token for prompt in prompts for token in self._texts.get(tuple(prompt), [])]
        counts = torch.bincount(torch.tensor(tokens, device="cpu"), minlength=self.vocab_size)[: self.vocab_size]
        self.counted = counts.argsort(descending=True, stable=True)[: num_counted(self.vocab_size)].tolist()

    def _mode(self, tree: Tree, settings: Mapping[str, Any]) -> DecodingMode:
        # With pauses, cycles without drafts would be timed.
        of_mode = {**tree.settings, "break_even": NEVER_PAUSES, **settings}
        if tree.vocabulary != "own":
            of_mode["draft_vocabulary"] = self.counted if tree.vocabulary == "counted" else None
        return DecodingMode(str(tree), {"assistant_model": self._drafter}, of_mode)
