"""The decoding settings of a drafter, which live in its `generation_config` and come and go with its files."""

from typing import Any

from transformers import GenerationConfig

from .configuration_gumiho import GumihoConfig
from .damaged_files import DamagedFileError, damaged_json_named
from .released_configs import find_packaged_folder


# Decoding settings that live in `GumihoModel.generation_config`, with their defaults. `None`: see DraftingSettings.
DECODING_DEFAULTS: dict[str, Any] = {
    "num_assistant_tokens": 63,
    "branching_factor": 14,
    "tree_depth": None,
    "full_tree_attention": True,
    "draft_temperature": None,
    "draft_vocabulary": None,
    "cycle_costs": None,
}


class DecodingSettingsMixin:
    """Keeps a `generation_config` with a drafter, although it does not generate by itself; for `PreTrainedModel`s."""

    config: GumihoConfig
    generation_config: GenerationConfig

    @classmethod
    def can_generate(cls) -> bool:
        """True: the drafter carries a `generation_config`, which is loaded and saved with it."""
        return True

    def adjust_generation_fn(
        self,
        generation_config: GenerationConfig | None,
        from_auto_class: bool,
        from_pipeline: str | None,
        pretrained_model_name_or_path: Any,
        trust_remote_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads `generation_config.json` for `from_pretrained`. The arguments are those of `GenerationMixin`."""
        if generation_config is not None:
            self.generation_config = generation_config
        elif pretrained_model_name_or_path is not None:
            try:
                with damaged_json_named("generation_config.json", pretrained_model_name_or_path):
                    self.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
            except DamagedFileError:
                raise
            except OSError:  # there is no such file: without a packaged one that fits, the defaults stay
                if packaged := find_packaged_folder(pretrained_model_name_or_path):
                    settings = GenerationConfig.from_pretrained(packaged)
                    if (getattr(settings, "tree_depth", None) or 0) <= self.config.max_draft_depth:
                        self.generation_config = settings
        self.complete_generation_config()

    def complete_generation_config(self) -> None:
        """Makes the generation config one of the drafter's own, in which every decoding setting has a value."""
        # Without transformers' notes in it (`_...`): one asks to derive the settings from the model's config again.
        settings = {name: v for name, v in self.generation_config.to_dict().items() if not name.startswith("_")}
        for name, default in (DECODING_DEFAULTS | {"tree_depth": self.config.max_draft_depth}).items():
            if settings.get(name) is None:
                settings[name] = default
        self.generation_config = GenerationConfig(**settings)


__all__ = ["DECODING_DEFAULTS", "DecodingSettingsMixin"]
