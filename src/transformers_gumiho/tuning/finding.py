"""The contests in their order, from some fifteen trees to the settings that are saved."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from ..measuring.timing import DecodingTime
from ..user_errors import UserValueError
from .arguments import TuningArguments
from .contest import Contest, Decode, Standing, compare, find_fastest, num_measured
from .result import TuningResult
from .trees import NUM_SIZES, Tree, list_sizes, list_vocabularies, num_counted


# Turns in which the winners are timed again.
FINAL_TURNS = 6
Prompts = Sequence[Sequence[int]]


def find_settings(
    decode: Decode, trees: Sequence[Tree], prompts: Prompts, vocab_size: int, args: TuningArguments
) -> TuningResult:
    """
    Compares trees, then vocabularies, then sizes for more rows, and times the winners on other prompts.

    Args:
        decode: Decodes and times a turn.
        trees: The trees to compare. The first one is the drafter's own.
        prompts: Token ids of each prompt. At least two prompts.
        vocab_size: Number of tokens of the target.
        args: Rows, temperature, and whether to choose a vocabulary.

    Raises:
        ValueError: There are fewer than two prompts, no batch sizes, or all texts end with their first token.
    """
    seen, unseen = _split(prompts)
    first, *further = _check_rows(args.batch_sizes)
    contest, texts = Contest(seen, first, args.temperature), dict[int, Sequence[int]]()
    with tqdm(total=_max_measured(trees, vocab_size, len(further), args), desc="tuning", unit="batch") as bar:

        def decode_turn(asked: Contest, competing: Sequence[Tree], turn: int) -> list[DecodingTime]:
            taken = decode(asked, competing, turn)
            bar.update(len(taken))
            if asked is contest:
                texts.update(zip(asked.indices(turn), taken[0].texts, strict=True))
            return taken

        by_tree = find_fastest(trees, contest, decode_turn)
        winner = next(iter(by_tree))
        by_vocabulary: dict[Tree, Standing] = {}
        counted: list[int] = []
        vocabularies = list_vocabularies(winner, vocab_size)
        if args.tune_vocabulary and len(seen) > 1 and len(vocabularies) > 1:
            # A list is counted on the first half of the prompts and compared on the second half, because it loses no
            # tokens on the texts that it was counted on. What is saved is counted on both halves.
            half = len(seen) // 2
            of_half = _count([text for index, text in texts.items() if index < half], vocab_size)
            by_vocabulary = find_fastest(
                vocabularies, replace(contest, prompts=seen[half:], counted=of_half), decode_turn
            )
            winner, counted = next(iter(by_vocabulary)), _count(texts.values(), vocab_size)
        chosen, refused = {first: winner}, {}
        for rows in further:
            of_rows = Contest(seen, rows, args.temperature, counted)
            try:
                chosen[rows] = next(iter(find_fastest(list_sizes(winner), of_rows, decode_turn)))
            except ValueError as error:  # some targets cannot verify drafts in padded batches
                refused[rows] = str(error)
        finals = {}
        for kind, temperature in (("greedy", 0.0), ("sampled", args.temperature or 1.0)):
            for rows, tree in chosen.items():
                # `break_even` is the time of a cycle that drafts. In runs of prompt lookup the drafter does not draft.
                final = Contest(unseen, rows, temperature, counted, drafter_alone=True)
                turns = [decode_turn(final, [tree], turn) for turn in range(FINAL_TURNS)]
                finals[kind, rows] = compare([(drafted, plain) for plain, drafted in turns])
        bar.total = bar.n  # fewer sizes may have competed than the maximum
    return TuningResult(trees[0], by_tree, by_vocabulary, chosen, counted, finals, refused)


def _count(texts: Iterable[Sequence[int]], vocab_size: int) -> list[int]:
    """Returns the ids of the tokens that occur most often in texts, the most frequent first."""
    tokens = torch.tensor([token for text in texts for token in text], device="cpu")
    counts = torch.bincount(tokens, minlength=vocab_size)[:vocab_size]
    return counts.argsort(descending=True, stable=True)[: num_counted(vocab_size)].tolist()


def _split(prompts: Prompts) -> tuple[Prompts, Prompts]:
    """Returns the prompts of the contests, two thirds of all, and the prompts on which the winners are timed."""
    if len(prompts) < 2:
        raise UserValueError(
            f"Tuning needs two prompts, to choose settings on one and time them on the other, got {len(prompts)}. "
            f"Give more, or raise `num_prompts`."
        )
    num_seen = min(math.ceil(len(prompts) * 2 / 3), len(prompts) - 1)
    return prompts[:num_seen], prompts[num_seen:]


def _check_rows(batch_sizes: Sequence[int]) -> list[int]:
    if not batch_sizes or min(batch_sizes) < 1:
        raise UserValueError(f"`batch_sizes` must be one or more numbers of at least 1, got {list(batch_sizes)}.")
    return sorted(set(batch_sizes))


def _max_measured(trees: Sequence[Tree], vocab_size: int, num_further: int, args: TuningArguments) -> int:
    """Returns the maximum number of measurements."""
    num_vocabularies = len(list_vocabularies(trees[0], vocab_size)) if args.tune_vocabulary else 0
    contests = [len(trees), *[num_vocabularies] * (num_vocabularies > 1), *[NUM_SIZES] * num_further]
    return sum(map(num_measured, contests)) + 2 * 2 * FINAL_TURNS * (1 + num_further)
