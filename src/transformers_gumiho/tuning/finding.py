"""The order of contests, from some sixteen trees to the settings that are written."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tqdm import tqdm

from .arguments import TuningArguments
from .contest import PLAIN, ROUNDS, Measure, Measurement, Standing, decode_in_turns, find_fastest, num_measurements
from .journal import Journal
from .result import TuningResult
from .trees import NUM_SIZES, Tree, list_sizes
from .turns import Decode, Stage
from .vocabularies import Vocabularies


# Turns in which the winner is timed again.
FINAL_TURNS = 6
# The temperature at which the winner is timed where greedy decoding is tuned.
SAMPLING_TEMPERATURE = 1.0


def find_settings(
    decode: Decode,
    trees: Sequence[Tree],
    prompts: Sequence[Sequence[int]],
    vocabularies: Vocabularies,
    journal: Journal,
    args: TuningArguments,
) -> TuningResult:
    """
    Lets trees compete, then vocabularies, then sizes for more rows, and times the winners on other prompts.

    Args:
        decode: Decodes and times a turn.
        trees: Those to compete; the first one is the drafter's own.
        prompts: Token ids of each, two at least.
        vocabularies: What may be drafted from.
        journal: Keeps what is measured, and knows what an earlier run measured.
        args: Rows, temperature, and whether to choose a vocabulary.

    Raises:
        ValueError: There are too few prompts or no rows, or texts end with their first token.
    """
    seen, unseen = _split(prompts)
    first, *further = _check_rows(args.batch_sizes)
    total = _num_measurements(len(trees), vocabularies, len(further), args)
    with tqdm(total=total, initial=len(journal), desc="decoding in turns", unit="text") as bar:

        def recorded(stage: Stage) -> Measure:
            def measure(tree: Tree | None, turn: int) -> Measurement:
                num_before = len(journal)
                taken = journal.look_up_or(_key(stage, tree, turn), lambda: decode(stage, tree, turn))
                bar.update(len(journal) - num_before)
                return taken

            return measure

        stage = Stage("trees", seen, first, args.temperature)
        of_trees = find_fastest(trees, recorded(stage))
        winner = next(iter(of_trees))
        of_vocabularies: dict[Tree, Standing] = {}
        counted: list[int] = []
        if args.tune_vocabulary and len(vocabularies.list_trees(winner)) > 1 and len(seen) > 1:
            of_vocabularies, counted = _choose_vocabulary(winner, vocabularies, stage, recorded)
            winner = next(iter(of_vocabularies))
        chosen, refused = {first: winner}, {}
        for rows in further:
            stage = Stage("sizes", seen, rows, args.temperature, counted)
            try:
                chosen[rows] = next(iter(find_fastest(list_sizes(winner), recorded(stage))))
            except ValueError as error:  # some targets cannot verify drafts in padded batches
                refused[rows] = str(error)
        finals = {}
        for kind, temperature in (("greedy", 0.0), ("sampled", args.temperature or SAMPLING_TEMPERATURE)):
            for rows, tree in chosen.items():
                measure = recorded(Stage("final", unseen, rows, temperature, counted))
                finals[kind, rows] = _time_again(tree, measure)
    return TuningResult(of_trees, trees[0], of_vocabularies, chosen, counted, finals, refused, args.temperature)


def _choose_vocabulary(
    winner: Tree, vocabularies: Vocabularies, stage: Stage, recorded: Callable[[Stage], Measure]
) -> tuple[dict[Tree, Standing], list[int]]:
    """
    Lets vocabularies compete; returns how they did, and the list that was counted. What a list loses does not show on
    the texts that it was counted on: it is counted on the first half of the prompts, and competes on the second. The
    one that is kept is counted on both.
    """
    texts = _plain_texts(stage, recorded(stage))
    half = len(stage.prompts) // 2
    of_half = vocabularies.count([text for index, text in texts.items() if index < half])
    other_half = replace(stage, name="vocabularies", prompts=stage.prompts[half:], counted=of_half)
    standings = find_fastest(vocabularies.list_trees(winner), recorded(other_half))
    return standings, vocabularies.count(list(texts.values()))


def _plain_texts(stage: Stage, measure: Measure) -> Mapping[int, Sequence[int]]:
    """Returns the target's own text for each prompt that has been decoded."""
    texts: dict[int, Sequence[int]] = {}
    for turn in range(ROUNDS[-1]):
        texts |= zip(stage.indices(turn), measure(PLAIN, turn).texts, strict=True)
    return texts


def _time_again(tree: Tree, measure: Measure) -> Standing:
    return Standing.of([decode_in_turns([tree], turn, measure)[tree] for turn in range(FINAL_TURNS)])


def _key(stage: Stage, tree: Tree | None, turn: int) -> dict[str, object]:
    """Returns what a measurement is known by. What is counted follows from what was measured before it."""
    way = None if tree is None else tree.settings | {"vocabulary": tree.vocabulary}
    return {"stage": stage.name, "rows": stage.rows, "temperature": stage.temperature, "turn": turn, "tree": way}


def _split(prompts: Sequence[Sequence[int]]) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """Returns the prompts of the contests, two thirds of all, and those that the winner is timed on."""
    if len(prompts) < 2:
        raise ValueError(
            f"Tuning needs at least two prompts, to choose settings on one and time them on the other, got "
            f"{len(prompts)}. Give more, or raise `num_prompts`."
        )
    num_seen = min(math.ceil(len(prompts) * 2 / 3), len(prompts) - 1)
    return prompts[:num_seen], prompts[num_seen:]


def _check_rows(batch_sizes: Sequence[int]) -> list[int]:
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"`batch_sizes` must be one or more numbers of at least 1, got {list(batch_sizes)}.")
    return sorted(set(batch_sizes))


def _num_measurements(num_trees: int, vocabularies: Vocabularies, num_further: int, args: TuningArguments) -> int:
    """Returns the most measurements there can be."""
    num_vocabularies = len(vocabularies.list_trees(Tree(1, 1, 1))) if args.tune_vocabulary else 1
    of_vocabularies = num_measurements(num_vocabularies) if num_vocabularies > 1 else 0
    of_finals = 2 * 2 * FINAL_TURNS * (1 + num_further)
    return num_measurements(num_trees) + of_vocabularies + num_further * num_measurements(NUM_SIZES) + of_finals
