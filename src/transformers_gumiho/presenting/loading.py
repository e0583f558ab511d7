"""The pair that a command shows, with the drafter's settings that its options give."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafting.settings import DraftingSettings
from ..measuring.loading import load_pair
from ..model.decoding_settings import override_settings
from ..model.modeling_gumiho import GumihoModel
from ..pairs.known import report_progress, resolve_pair
from .arguments import PairArguments


def load(args: PairArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GumihoModel]:
    """
    Loads the target, its tokenizer and the drafter. Progress is written to standard error.

    Raises:
        ImportError: A library that the pair needs is not installed.
        OSError: A model is missing and cannot be downloaded.
        ValueError: The options do not name both models, or name an unknown pair or precision.
    """
    target, assistant, dtype = resolve_pair(args.pair, args.target, args.assistant, args.dtype, report_progress)
    loaded = load_pair(target, assistant, dtype, args.device_map)
    names = ("num_assistant_tokens", "branching_factor", "draft_temperature")
    override_settings(loaded[2].generation_config, **{name: getattr(args, name) for name in names})
    return loaded


def describe_temperatures(drafter: GumihoModel) -> str:
    """Returns the draft temperatures of a drafter's settings as text."""
    settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)
    shown = [f"{temperature:.2g}" for temperature in settings.temperatures]
    return shown[0] if len(set(shown)) == 1 else f"{', '.join(shown)} (from depth 1 down)"
