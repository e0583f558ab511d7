"""The decoding settings of a drafter, which live in its `generation_config` and come and go with its files."""

from collections import Counter
from typing import Any

from transformers import GenerationConfig

from .configuration_gumiho import GumihoConfig
from .damaged_files import DamagedFileError, damaged_json_named
from .released_configs import find_packaged_folder


# Decoding settings that live in `GumihoModel.generation_config`. `None`, which they are unless set, stands for the
# default of `DraftingSettings`, which may depend on the device and on the number of rows.
DECODING_SETTINGS = (
    "num_assistant_tokens",
    "branching_factor",
    "tree_depth",
    "full_tree_attention",
    "draft_temperature",
    "draft_vocabulary",
    "break_even",
)
# A `break_even` under which no drafter pauses: every cycle commits a token.
NEVER_PAUSES = 1.0
# The draft vocabulary that was found right last, and the size of the whole: to compare is faster than to check again.
_right_vocabulary: list[tuple[int, list[int]]] = []
# Of earlier releases; ignored.
_DROPPED_SETTINGS = ("cycle_costs",)


def override_settings(generation_config: GenerationConfig, **values: Any) -> None:
    """
    Sets the values that are not `None`. If there are any, `break_even`, which was measured without them, is removed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        generation_config.update(break_even=None, **given)


def vocabulary_fault(token_ids: Any, vocab_size: int) -> str | None:
    """
    Returns why `token_ids` is no list (or tuple) of distinct token ids below `vocab_size`, at least one, as the end of
    a sentence; `None` where it is one.
    """
    if _right_vocabulary == [(vocab_size, token_ids)]:
        return None
    if not isinstance(token_ids, (list, tuple)):
        return f"it is of type {type(token_ids).__name__}"
    if not token_ids:
        return "it is empty"
    # Each check is one pass in C: they run in every call of `generate()`, over tens of thousands of tokens.
    if set(map(type, token_ids)) != {int}:
        return f"it holds {next(token for token in token_ids if type(token) is not int)!r}"
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            return f"it holds {extreme}"
    if len(set(token_ids)) < len(token_ids):
        return f"it holds {Counter(token_ids).most_common(1)[0][0]} more than once"
    _right_vocabulary[:] = [(vocab_size, list(token_ids))]
    return None


# Arguments of `from_pretrained` that say where a file is read.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class DecodingSettingsMixin:
    """Keeps decoding settings with a drafter, which does not generate by itself; for `PreTrainedModel`s."""

    config: GumihoConfig
    generation_config: GenerationConfig

    def load_generation_config(self, loading: dict[str, Any]) -> None:
        """
        Loads `generation_config.json` from where the drafter was loaded. `loading` are the arguments of
        `from_pretrained`; a `generation_config` among them is taken instead.
        """
        name, given = self.name_or_path, loading.get("generation_config")  # type: ignore[attr-defined]
        if given is not None:
            self.set_generation_config(given)
        elif name is not None:
            where = {argument: loading[argument] for argument in _WHERE if argument in loading}
            try:
                with damaged_json_named("generation_config.json", name):
                    self.set_generation_config(GenerationConfig.from_pretrained(name, **where))
            except DamagedFileError:
                raise
            except OSError:  # there is no such file: without a packaged one that fits, the defaults stay
                if packaged := find_packaged_folder(name):
                    settings = GenerationConfig.from_pretrained(packaged)
                    if (getattr(settings, "tree_depth", None) or 0) <= self.config.max_draft_depth:
                        self.set_generation_config(settings)

    def set_generation_config(self, generation_config: GenerationConfig) -> None:
        """Copies a generation config, with every decoding setting; each is `None` unless it is set."""
        # Without transformers' notes in it (`_...`): one asks to derive the settings from the model's config again.
        settings = {
            name: value
            for name, value in generation_config.to_dict().items()
            if not name.startswith("_") and name not in _DROPPED_SETTINGS
        }
        self.generation_config = GenerationConfig(**dict.fromkeys(DECODING_SETTINGS) | settings)
