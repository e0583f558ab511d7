"""What the stages of a run share: its options, its target, the drafter's config, and the rows of its data."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ...commands import as_user_errors
from ...files import damaged_files_named
from ...model.configuration_gumiho import GumihoConfig
from ...model.target_shape import TargetLayers, resolve_layer_ids
from .. import GumihoTrainingArguments
from ..checks import check_is_trained_here
from ..feature_cache import TARGET_FOLDER, FeatureDataset, manifest_of_cache
from .arguments import RecipeArguments
from .options import Options, recipe_of
from .target import load_rows, load_target, load_tokenizer, row_length, say


class RunContext:
    """
    What the stages of a run share. Its `folder` receives the drafter; `fields` are those of the drafter's config that
    options and recipe decide.
    """

    def __init__(self, options: Options, folder: Path):
        self.options, self.args, self.phases = options, options.run, options.phases
        self.folder, self.work = folder, folder / "work"
        self.training_args = next(iter(self.phases.values()))
        self.seed, self.is_main = self.training_args.seed, self.training_args.process_index == 0
        self._target: PreTrainedModel | None = None
        self.fields = _drafter_fields(self.args)
        if (layers := self.fields.get("target_layer_ids")) is not None:
            self.fields |= {"target_layer_ids": resolve_layer_ids(self.target_config, layers)}
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
            return GumihoConfig.from_pretrained(self.args.drafter, **self.fields)

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


def _drafter_fields(args: RecipeArguments) -> dict[str, Any]:
    names = ("num_parallel_heads", "transition_rank", "target_layer_ids")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.drafter is None:
        return recipe_of(args)["config"] | given
    with as_user_errors():
        own = GumihoConfig.from_pretrained(args.drafter)
        check_is_trained_here(own)
    if args.num_parallel_heads is None or own.num_parallel_heads:
        return given
    # An EAGLE head gets its first parallel heads: they begin where a Gumiho drafter's do.
    new = {"num_serial_tokens": min(own.num_serial_tokens, GumihoConfig.num_serial_tokens)}
    return recipe_of(args)["config"] | new | given


@contextmanager
def unsplit_models(args: GumihoTrainingArguments) -> Iterator[None]:
    """Keeps DeepSpeed's ZeRO-3 from splitting models as they are made: the trainer splits the drafter alone."""
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if args.deepspeed_plugin is not None:
            args.deepspeed_plugin.set_deepspeed_weakref()
