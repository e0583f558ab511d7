"""Finding the tree that decodes prompts fastest: fit, measure, rank, and let the best of them compete."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..drafting.settings import DRAFT_TEMPERATURE
from ..model.modeling_gumiho import GumihoModel
from .acceptance import AcceptanceProfile, profile_acceptance
from .answers import decode_answers
from .arguments import TuningArguments
from .calibration import cross_fitted, measure_draft_losses
from .contest import measure_in_turns
from .contexts import typical_context
from .costs import CycleCosts, measure_costs, tree_capacity
from .result import TuningResult
from .search import Candidate, DraftTemperature, TreeSettings, choose_contenders, rank_trees
from .vocabulary import choose_vocabulary


# Sizes at which cycles are timed; what is between them is interpolated.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BRANCHING_FACTORS = (1, 2, 4, 8, 14)
# Below 1, scores rank nodes more sharply than the drafter's probabilities.
DRAFT_TEMPERATURES = (0.3, 0.4, 0.5, 2 / 3, 1.0)
# Trees that compete on the prompts. What is expected of them differs by less than it is known.
NUM_CONTENDERS = 5
# Tokens over which a cycle is timed.
TIMED_TOKENS = 32


@dataclass(frozen=True)
class _Variant:
    """
    Trees that are profiled together, because they differ in size and depth alone.

    Attributes:
        branching_factor: Of all of them.
        draft_temperature: Of all of them, as it is written where they win.
        of_prompts: The draft temperature to profile each prompt with, where it is not that one.
    """

    branching_factor: int
    draft_temperature: DraftTemperature
    of_prompts: Sequence[DraftTemperature] | None = None

    def settings(self, num_prompts: int, size: int, depth: int) -> list[dict[str, Any]]:
        """Returns the decoding settings for each prompt."""
        temperatures = self.of_prompts or [self.draft_temperature] * num_prompts
        return [TreeSettings(size, self.branching_factor, depth, t).as_dict() for t in temperatures]


@torch.inference_mode()
def find_best_tree(
    target: PreTrainedModel, drafter: GumihoModel, prompts: Sequence[torch.Tensor], args: TuningArguments
) -> TuningResult:
    """
    Returns the tree that decodes `prompts` fastest, and the tokens to draft it from; the drafter's settings stay as
    they are.

    Args:
        target: The target.
        drafter: The drafter.
        prompts: Token ids `(T,)` of each prompt.
        args: What to try, and for which temperature.

    Raises:
        ValueError: The texts end before anything is drafted, or with their first token.
    """
    config = drafter.config
    sampling: dict[str, Any] = {}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
    default = _settings_of(drafter)
    sizes = [size for size in SIZES if size <= args.max_tree_size]
    # What the drafter did so far is told of as well, however large its trees.
    known_sizes = sorted({*sizes, default.num_assistant_tokens})

    answers = decode_answers(target, drafter, prompts, args.max_new_tokens, **sampling)
    fitted, of_prompts = cross_fitted(measure_draft_losses(target, drafter, answers))
    variants = _variants(default, fitted, of_prompts)
    num_timed = min(args.max_new_tokens, TIMED_TOKENS)
    costs = measure_costs(
        target, drafter, typical_context(answers, num_timed), known_sizes,
        sorted({variant.branching_factor for variant in variants}), num_timed, args.repeats, **sampling,
    )  # fmt: skip
    profiles: dict[tuple[int, DraftTemperature], AcceptanceProfile] = {}
    for variant in tqdm(variants, desc="measuring acceptance", unit="shape"):
        settings = variant.settings(len(prompts), max(known_sizes), config.max_draft_depth)
        profiles[variant.branching_factor, variant.draft_temperature] = profile_acceptance(
            target, drafter, prompts, args.max_new_tokens, settings, **sampling
        )
    sizes_to_rank = range(1, max(sizes) + 1)
    text_length = sum(len(answer.new_tokens) - 1 for answer in answers) / len(answers)
    ranked = rank_trees(profiles, costs, sizes_to_rank, config.num_serial_tokens, config.max_draft_depth, text_length)
    expected_default = _expect(default, profiles, costs, config.num_serial_tokens, text_length)

    contenders = choose_contenders(ranked, NUM_CONTENDERS)
    trees = [candidate.settings for candidate in (*contenders, expected_default)]
    speeds = measure_in_turns(target, drafter, prompts, trees, args.max_new_tokens, **sampling)
    competing = {candidate.settings: candidate for candidate in contenders}
    if default.num_assistant_tokens <= args.max_tree_size:
        competing.setdefault(default, expected_default)
    measured = sorted(((c, speeds[tree]) for tree, c in competing.items()), key=lambda pair: -pair[1])
    best, best_speed = measured[0]
    vocabulary = None
    if args.tune_vocabulary:
        vocabulary = choose_vocabulary(
            target, drafter, prompts, answers, best.settings, args.max_new_tokens, args.repeats, **sampling
        )
    by_size: dict[int, Candidate] = {}
    for candidate in ranked:
        by_size.setdefault(candidate.settings.num_assistant_tokens, candidate)
    return TuningResult(
        best=best,
        default=expected_default,
        measured={"best": best_speed, "default": speeds[default], "plain": speeds[None]},
        contenders=measured,
        calibrated=next(c for c in ranked if c.settings.draft_temperature == fitted),
        constant=next(c for c in ranked if not isinstance(c.settings.draft_temperature, tuple)),
        by_size=[by_size[size] for size in sizes if size in by_size],
        costs=costs,
        vocabulary=vocabulary,
    )


def _settings_of(drafter: GumihoModel) -> TreeSettings:
    now = drafter.generation_config
    given = DRAFT_TEMPERATURE if now.draft_temperature is None else now.draft_temperature
    return TreeSettings(
        now.num_assistant_tokens,
        now.branching_factor,
        now.tree_depth,
        tuple(given) if isinstance(given, (list, tuple)) else given,
    )


def _variants(
    default: TreeSettings, fitted: tuple[float, ...], of_prompts: Sequence[tuple[float, ...]]
) -> list[_Variant]:
    """Returns all that is to be profiled; that of the drafter's own settings is always among them."""
    # A chain is the same under every temperature.
    chain = [_Variant(1, DRAFT_TEMPERATURE)]
    others = []
    for factor in sorted({*BRANCHING_FACTORS, default.branching_factor} - {1}):
        constants = dict.fromkeys((*DRAFT_TEMPERATURES, default.draft_temperature))
        others += [_Variant(factor, constant) for constant in constants]
        others.append(_Variant(factor, fitted, of_prompts))
    return chain + others


def _expect(
    tree: TreeSettings,
    profiles: dict[tuple[int, DraftTemperature], AcceptanceProfile],
    costs: CycleCosts,
    num_serial_tokens: int,
    text_length: float,
) -> Candidate:
    """Returns what is expected of the settings that a drafter has; a chain may be profiled under others."""
    factor, depth = tree.branching_factor, tree.tree_depth
    profile = profiles.get((factor, tree.draft_temperature)) or next(
        p for (f, _), p in profiles.items() if f == factor
    )
    size = int(min(tree.num_assistant_tokens, tree_capacity(factor, depth, num_serial_tokens)))
    seconds = costs.cycle_seconds(size, factor, depth)
    return Candidate(tree, profile.tau(size, depth), seconds, costs.setup / text_length)
