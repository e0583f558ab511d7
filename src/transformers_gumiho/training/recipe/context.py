"""What the stages of a run share: its options, its target, the drafter's config, and the rows of its data."""

import gc
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ...commands import as_user_errors
from ...files import damaged_files_named
from ...model.configuration_gumiho import GumihoConfig
from ...model.target_shape import TargetLayers
from ..feature_cache import TARGET_FOLDER, FeatureDataset, manifest_of_cache
from .options import Options
from .phases import drafter_fields, resolved, unsplit_models
from .target import load_rows, load_target, load_tokenizer, row_length, say


class RunContext:
    """
    What the stages of a run share.

    Args:
        options: What is asked for.
        folder: Receives the drafter.
    """

    def __init__(self, options: Options, folder: Path):
        self.options, self.args, self.phases = options, options.run, options.phases
        self.folder, self.work = folder, folder / "work"
        self.training_args = next(iter(self.phases.values()))
        self._target: PreTrainedModel | None = None
        self.fields = drafter_fields(self.args)
        options.fit_to_target(self.target_config)
        if self.args.drafter is not None:  # whose positions may be fewer than the target's
            positions = self.drafter_config.get_text_config().max_position_embeddings
            self.args.max_length = min(self.args.max_length, positions)

    @property
    def target(self) -> PreTrainedModel:
        """The target, loaded when it is first needed."""
        if self._target is None:
            with unsplit_models(self.training_args):
                self._target = load_target(self.args)
        return self._target

    def release_target(self) -> None:
        """Lets the target go, so that a process never holds two."""
        self._target = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @cached_property
    def target_config(self) -> Any:
        """The target's config."""
        folders = self.args.features
        for folder in folders or ():
            manifest_of_cache(Path(folder))
        name = Path(folders[0]) / TARGET_FOLDER if folders else self.args.target
        with as_user_errors(), damaged_files_named(name):
            return AutoConfig.from_pretrained(name)

    @cached_property
    def drafter_config(self) -> GumihoConfig:
        """The config of the drafter."""
        if self.args.drafter is None:
            return GumihoConfig.from_target(self.target_config, **self.fields)
        with as_user_errors():
            return GumihoConfig.from_pretrained(self.args.drafter, **resolved(self.fields, self.target_config))

    @property
    def layers(self) -> TargetLayers | None:
        """The target's layers that the drafter reads, if not the last states alone."""
        return self.drafter_config.layers_read(self.target_config)

    @cached_property
    def rows(self) -> Any:
        """The rows of the data that can be used; `None` where there is no data to read."""
        args = self.args
        if args.writes_prompts or args.features is not None:
            return None
        rows, report = load_rows(
            args, load_tokenizer(args), self.target_config, answered=not args.regenerate, num_proc=args.num_proc
        )
        say(report)
        return rows

    @property
    def has_accelerator(self) -> bool:
        """Whether memory is tried, as a device says what is too much; on a CPU the system ends the process."""
        return self.training_args.device.type != "cpu"

    @property
    def is_cached(self) -> bool:
        """Whether the drafter is trained on states that are kept."""
        return self.args.features is not None or self.args.cache_features == "true"

    @cached_property
    def longest_row(self) -> int:
        """The most tokens that a row may have."""
        if self.args.features is not None:
            return max(max(FeatureDataset(folder).lengths) for folder in self.args.features)
        return row_length(self.args, self.target_config)
