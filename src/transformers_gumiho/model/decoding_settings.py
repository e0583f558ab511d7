"""
The decoding settings of a drafter: kept in its `generation_config`, which comes and goes with its files, and read and
checked for each call.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import GenerationConfig

from ..commands import UserError, UserValueError
from ..files import PLACES, damaged_files_named
from .configuration_gumiho import GumihoConfig
from .draft_vocabulary import vocabulary_fault
from .loading import find_packaged_folder


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
# Of these, what a call of `generate()` may set for itself.
SETTINGS_OF_CALLS = ("num_assistant_tokens",)
# A `break_even` under which no drafter pauses: every cycle commits a token.
NEVER_PAUSES = 1.0
# The draft vocabulary that was found right last, and the size of the whole: to compare is faster than to check again.
_right_vocabulary: list[tuple[int, Any]] = []

# Below 1, because the target takes the most likely token (under the noise of its draw when sampling), which the
# drafter ranks first more often than its probability says.
DRAFT_TEMPERATURE = 2 / 3

# On a CPU, each node of each row adds to the time of a pass.
_CPU_NODES, _CPU_BRANCHING = {"1": 12, "4": 4, "8": 2}, 4
_ACCELERATOR_NODES, _ACCELERATOR_BRANCHING = 63, 14
# On an accelerator for targets with recurrent layers, where more nodes gain less than they cost.
_STATE_NODES = 16
# Of drafters without parallel heads, as EAGLE's. Each level costs a pass, and each of its nodes a slot in a cache.
_SERIAL_DEPTH, _SERIAL_BRANCHING = 5, 10
_WHERE = "Set it in the drafter's `generation_config`."
_KINDS_OF_DECODING = ("greedy", "sampled")
# Settings of prompt lookup, which a call may set as well, and their smallest values.
LOOKUP_SETTINGS = {"prompt_lookup_num_tokens": 0, "max_matching_ngram_size": 1}
_INTEGERS = {"num_assistant_tokens": 1, "branching_factor": 1, "tree_depth": 1} | LOOKUP_SETTINGS


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
            where = {argument: loading[argument] for argument in (*PLACES, "force_download") if argument in loading}
            try:
                with damaged_files_named(name, where, "generation_config.json"):
                    self.set_generation_config(GenerationConfig.from_pretrained(name, **where))
            except UserError:
                raise
            except OSError:  # there is no such file: without a packaged one that fits, the defaults stay
                if packaged := find_packaged_folder(name):
                    settings = GenerationConfig.from_pretrained(packaged)
                    if (getattr(settings, "tree_depth", None) or 0) <= self.config.max_draft_depth:
                        self.set_generation_config(settings)

    def set_generation_config(self, generation_config: GenerationConfig) -> None:
        """Copies a generation config, with every decoding setting; each is `None` unless it is set."""
        # Without transformers' notes in it (`_...`): one asks to derive the settings from the model's config again.
        settings: dict[str, Any] = dict.fromkeys(DECODING_SETTINGS)
        for name, value in generation_config.to_dict().items():
            if not name.startswith("_"):
                settings[name] = value
        self.generation_config = GenerationConfig(**settings)


def override_settings(generation_config: GenerationConfig, **values: Any) -> None:
    """
    Sets the values that are not `None`. If there are any, `break_even`, which was measured without them, is removed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        generation_config.update(break_even=None, **given)


def overridden(generation_config: GenerationConfig, **values: Any) -> GenerationConfig:
    """Returns a copy with the values that are not `None`, as [`override_settings`] sets them."""
    generation_config = copy(generation_config)
    override_settings(generation_config, **values)
    return generation_config


@dataclass(frozen=True)
class DraftingSettings:
    """
    The decoding settings of a drafter for one call of `generate()`, read from its `generation_config`.

    There, `num_assistant_tokens` and `break_even` may be a number, or a mapping from rows of a batch to numbers, such
    as `{"1": 12, "4": 4, "8": 2}`. The largest key that does not exceed the number of rows applies; if all keys
    exceed it, the smallest one does. Rows are counted after `num_return_sequences`.

    Attributes:
        num_assistant_tokens: Draft tokens verified per cycle. By default 63 on an accelerator, 16 there for targets
            with recurrent layers, and `{"1": 12, "4": 4, "8": 2}` on a CPU. A call may set it, too.
        branching_factor: Tokens kept at each serial step. With 1 the tree is a chain. By default 14 on an accelerator,
            and 4 on a CPU and for targets with recurrent layers. Without parallel heads, at most 10.
        tree_depth: Longest drafted path in tokens, at most `num_assistant_tokens`. By default all serial tokens and
            parallel heads, or the block; 5 where each level costs a pass.
        full_tree_attention: Choose nodes among all recombinations of the heads' tokens (default `True`). With `False`,
            extend the `branching_factor` best nodes of each depth alone, as EAGLE-2 does.
        draft_temperature: Temperature of the draft scores, 2/3 by default: a number, or a list with one for each
            depth from 1 on, whose last one holds below.
        draft_vocabulary: Ids of the tokens that may be drafted, as a list; by default (`None`) all.
        break_even: Tokens per row that a drafted cycle must commit to be as fast as plain decoding. The drafter pauses
            while it commits fewer. A number, a mapping from rows to numbers, or one of these for each of `greedy` and
            `sampled`. By default (`None`) estimated from the sizes of target and drafter; `gumiho tune` measures it.
        sampling_temperature: Temperature of the target, `None` if greedy. Not a setting of the drafter.
        prompt_lookup_num_tokens: Tokens to draft by prompt lookup; 0 by default. A call may set it, too.
        max_matching_ngram_size: Newest tokens to look up: 2 by default, at most 8. A call may set it, too.
    """

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    full_tree_attention: bool
    draft_temperature: float | tuple[float, ...]
    draft_vocabulary: Sequence[int] | None = None
    break_even: float | None = None
    sampling_temperature: float | None = None
    prompt_lookup_num_tokens: int = 0
    max_matching_ngram_size: int = 2

    @classmethod
    def from_generation_config(
        cls,
        generation_config: GenerationConfig,
        config: GumihoConfig,
        sampling_temperature: float | None,
        num_rows: int = 1,
        device_type: str = "cpu",
        has_states: bool = False,
    ) -> "DraftingSettings":
        """
        Reads and checks the settings for a batch.

        Args:
            generation_config: The drafter's generation config.
            config: The drafter's config.
            sampling_temperature: Temperature of the target, `None` if greedy.
            num_rows: Rows of the batch.
            device_type: Type of the target's device.
            has_states: Whether the target's layers keep states.

        Raises:
            ValueError: A setting is out of range.
        """

        def read(name: str, default: Any) -> Any:
            value = getattr(generation_config, name, None)
            return default if value is None else value

        on_cpu = device_type == "cpu"
        is_small = on_cpu or has_states
        depth = config.max_draft_depth
        branching = _CPU_BRANCHING if is_small else _ACCELERATOR_BRANCHING
        if config.drafts_serially:
            depth = min(depth, _SERIAL_DEPTH)
            branching = min(branching, _SERIAL_BRANCHING)
        break_even = read("break_even", None)
        if isinstance(break_even, Mapping) and not break_even.keys().isdisjoint(_KINDS_OF_DECODING):
            break_even = break_even.get(_KINDS_OF_DECODING[sampling_temperature is not None])
        default = _STATE_NODES if has_states else _ACCELERATOR_NODES
        nodes = read("num_assistant_tokens", _CPU_NODES if on_cpu else default)
        temperature = read("draft_temperature", DRAFT_TEMPERATURE)
        settings = cls(
            num_assistant_tokens=_for_rows("num_assistant_tokens", nodes, num_rows),
            branching_factor=read("branching_factor", branching),
            tree_depth=read("tree_depth", depth),
            full_tree_attention=read("full_tree_attention", True),
            draft_temperature=tuple(temperature) if isinstance(temperature, list) else temperature,
            draft_vocabulary=read("draft_vocabulary", None),
            break_even=_for_rows("break_even", break_even, num_rows),
            sampling_temperature=sampling_temperature,
            prompt_lookup_num_tokens=read("prompt_lookup_num_tokens", 0),
            max_matching_ngram_size=read("max_matching_ngram_size", 2),
        )
        settings._validate(config)
        # No path has more nodes than the tree.
        return replace(settings, tree_depth=min(settings.tree_depth, settings.num_assistant_tokens))

    def as_chain(self) -> "DraftingSettings":
        """Returns the same settings for a chain."""
        return replace(self, branching_factor=1, num_assistant_tokens=self.tree_depth)

    @cached_property
    def longest_path(self) -> int:
        """Most drafted tokens on a path, including those of prompt lookup."""
        if self.branching_factor == 1:
            return self.tree_depth
        return max(self.tree_depth, min(self.prompt_lookup_num_tokens, self.num_assistant_tokens))

    def _validate(self, config: GumihoConfig) -> None:
        for name, smallest in _INTEGERS.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                where = "" if name in LOOKUP_SETTINGS else f" {_WHERE}"  # a call may have set it
                raise UserValueError(f"`{name}` must be an integer of at least {smallest}, got {value!r}.{where}")
        if self.tree_depth > config.max_draft_depth:
            parts = f"{config.num_serial_tokens} serial ones and {config.num_parallel_heads} parallel heads"
            raise UserValueError(
                f"`tree_depth` is {self.tree_depth}, but this drafter drafts at most {config.max_draft_depth} tokens: "
                f"{'those of its block' if config.is_block else parts}. {_WHERE}"
            )
        if self.break_even is not None and not _is_positive(self.break_even):
            raise UserValueError(f"`break_even` must be a positive number or None, got {self.break_even!r}. {_WHERE}")
        if not isinstance(self.full_tree_attention, bool):
            raise UserValueError(
                f"`full_tree_attention` must be True or False, got {self.full_tree_attention!r}. {_WHERE}"
            )
        given = self.draft_temperature
        temperatures = given if isinstance(given, tuple) else (given,)
        if not temperatures or not all(map(_is_positive, temperatures)):
            raise UserValueError(
                f"`draft_temperature` must be a positive number, a list of positive numbers (one for each depth, from "
                f"depth 1 down) or None, got {list(given) if isinstance(given, tuple) else given!r}. {_WHERE}"
            )
        vocab_size, vocabulary = config.get_text_config().vocab_size, self.draft_vocabulary
        if vocabulary is None or _right_vocabulary == [(vocab_size, vocabulary)]:
            return
        if fault := vocabulary_fault(vocabulary, vocab_size):
            raise UserValueError(
                f"`draft_vocabulary` must be None or a list of distinct token ids from 0 to {vocab_size - 1}, but "
                f"{fault}. {_WHERE}"
            )
        _right_vocabulary[:] = [(vocab_size, list(vocabulary))]

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The draft temperature of each depth, from depth 1 down to `tree_depth`."""
        given = self.draft_temperature
        if not isinstance(given, tuple):
            given = (given,)
        return (*given, *[given[-1]] * self.tree_depth)[: self.tree_depth]

    @cached_property
    def beam(self) -> int:
        """Below the serial tokens: how many nodes of a depth are extended, each by as many tokens."""
        # A beam as wide as the tree holds every node that can be among its best.
        is_full = self.full_tree_attention and self.branching_factor > 1
        return self.num_assistant_tokens if is_full else self.branching_factor


def _for_rows(name: str, value: Any, num_rows: int) -> Any:
    try:
        return value_for_rows(value, num_rows)
    except ValueError as error:
        raise UserValueError(f"`{name}` is {value!r}, but {error}. {_WHERE}") from None


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def value_for_rows(value: Any, num_rows: int) -> Any:
    """
    Returns a setting's value for a batch of `num_rows`. Of a mapping from rows to values it is that of the largest key
    not above them, else that of the smallest. Keys are integers, or strings as in JSON.

        >>> value_for_rows({"1": 12, "4": 4, "8": 2}, 5)
        4
    """
    if not isinstance(value, Mapping):
        return value
    by_rows = {_rows(key): item for key, item in value.items()}
    if not by_rows:
        raise UserValueError("a mapping from rows to values must not be empty")
    fitting = [rows for rows in by_rows if rows <= num_rows]
    return by_rows[max(fitting) if fitting else min(by_rows)]


def _rows(key: Any) -> int:
    text = key.strip() if isinstance(key, str) else key
    if isinstance(key, bool) or not str(text).isdecimal() or int(text) < 1:
        raise UserValueError(f"{key!r} is not a number of rows")
    return int(text)
