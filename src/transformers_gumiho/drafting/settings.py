"""The decoding settings of a drafter, read from its `generation_config` and checked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from ..model.configuration_gumiho import GumihoConfig
from ..model.cycle_costs import CycleCostTable
from ..model.decoding_settings import DECODING_DEFAULTS
from ..model.draft_vocabulary import find_fault


# Ranking nodes more sharply than the drafter's own probabilities pays: the target takes the most likely token (under
# the noise of its draw when sampling), which the drafter ranks first more often than its probability says.
DRAFT_TEMPERATURE = 2 / 3

_WHERE = "Set it in the drafter's `generation_config`."
_LEAST_OF_LOOKUP = {"prompt_lookup_num_tokens": 0, "max_matching_ngram_size": 1}


@dataclass(frozen=True)
class DraftingSettings:
    """
    The decoding settings of a drafter, read from its `generation_config` at every call of `generate()`.

    Attributes:
        num_assistant_tokens: Drafted tokens verified per cycle (default 63).
        branching_factor: Tokens kept at each serial step (default 14). 1 makes the tree a chain.
        tree_depth: Longest drafted path in tokens (default and maximum: serial tokens + parallel heads). Read from a
            `generation_config`, it is at most `num_assistant_tokens`.
        full_tree_attention: Choose nodes among all recombinations of the heads' tokens (default `True`), or extend
            only the `branching_factor` best nodes of each depth, each by its own best `branching_factor` tokens.
        draft_temperature: Temperature under which draft scores rank nodes: one for all depths, or one for each from
            depth 1 down, of which the last goes on below. By default (`None`) 2/3.
        draft_vocabulary: Ids of the tokens that may be drafted; by default (`None`) all.
        cycle_costs: What cycles cost here: each then verifies as many drafted tokens as make the most of its time, at
            most `num_assistant_tokens` but for runs, or none. By default (`None`) all of them.
        sampling_temperature: That of the target, `None` at greedy; no setting of the drafter's.
        prompt_lookup_num_tokens: The most tokens that are drafted from the context, by how it went on where its newest
            tokens stood before; 0 (the default) for none. Where they were right, more of them follow, in runs. A call
            of `generate()` may say otherwise.
        max_matching_ngram_size: How many of the newest tokens are looked up (default 2), at most 8; fewer where those
            stood nowhere. A call may say otherwise, too.
    """

    num_assistant_tokens: int
    branching_factor: int
    tree_depth: int
    full_tree_attention: bool
    draft_temperature: float | tuple[float, ...]
    draft_vocabulary: Sequence[int] | None = None
    cycle_costs: CycleCostTable | None = None
    sampling_temperature: float | None = None
    prompt_lookup_num_tokens: int = 0
    max_matching_ngram_size: int = 2

    @classmethod
    def from_generation_config(
        cls, generation_config: GenerationConfig, config: GumihoConfig, sampling_temperature: float | None
    ) -> "DraftingSettings":
        """
        Reads and checks the settings.

        Args:
            generation_config: The drafter's.
            config: The drafter's.
            sampling_temperature: The temperature the target samples at, `None` at greedy.

        Raises:
            ValueError: A setting is out of range.
        """

        def read(name: str, default: Any) -> Any:
            value = getattr(generation_config, name, None)
            return default if value is None else value

        settings = cls(
            num_assistant_tokens=read("num_assistant_tokens", DECODING_DEFAULTS["num_assistant_tokens"]),
            branching_factor=read("branching_factor", DECODING_DEFAULTS["branching_factor"]),
            tree_depth=read("tree_depth", config.max_draft_depth),
            full_tree_attention=read("full_tree_attention", DECODING_DEFAULTS["full_tree_attention"]),
            draft_temperature=_as_tuple(read("draft_temperature", DRAFT_TEMPERATURE)),
            draft_vocabulary=read("draft_vocabulary", DECODING_DEFAULTS["draft_vocabulary"]),
            cycle_costs=_parse_costs(read("cycle_costs", DECODING_DEFAULTS["cycle_costs"])),
            sampling_temperature=sampling_temperature,
            prompt_lookup_num_tokens=read("prompt_lookup_num_tokens", 0),
            max_matching_ngram_size=read("max_matching_ngram_size", 2),
        )
        settings._validate(config)
        # No path is longer than the tree has nodes; what would be drafted below is not drafted at all.
        return replace(settings, tree_depth=min(settings.tree_depth, settings.num_assistant_tokens))

    def as_chain(self) -> "DraftingSettings":
        """Returns the settings under which the tree is its best path alone."""
        return replace(self, branching_factor=1, num_assistant_tokens=self.tree_depth)

    def looking_up(self, generation_config: GenerationConfig) -> "DraftingSettings":
        """
        Returns the settings with those for drafts from the context that a call of `generate()` was given, if any.

        Args:
            generation_config: Of the call.

        Raises:
            ValueError: One of them is no number of tokens.
        """
        given = {name: getattr(generation_config, name) for name in _LEAST_OF_LOOKUP}
        settings = replace(self, **{name: value for name, value in given.items() if value is not None})
        _check_lookup(settings, "It was given to `generate()`.")
        return settings

    @property
    def longest_path(self) -> int:
        """The most drafted tokens on a path, those from the context included."""
        if self.branching_factor == 1:
            return self.tree_depth
        return max(self.tree_depth, min(self.prompt_lookup_num_tokens, self.num_assistant_tokens))

    def _validate(self, config: GumihoConfig) -> None:
        for name in ("num_assistant_tokens", "branching_factor", "tree_depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}. {_WHERE}")
        if self.tree_depth > config.max_draft_depth:
            raise ValueError(
                f"`tree_depth` is {self.tree_depth}, but this drafter drafts at most {config.max_draft_depth} tokens: "
                f"{config.num_serial_tokens} serial ones and {config.num_parallel_heads} parallel heads. {_WHERE}"
            )
        if not isinstance(self.full_tree_attention, bool):
            raise ValueError(
                f"`full_tree_attention` must be True or False, got {self.full_tree_attention!r}. {_WHERE}"
            )
        self._validate_temperature()
        _check_lookup(self, _WHERE)
        vocab_size = config.get_text_config().vocab_size
        if self.draft_vocabulary is not None and (fault := find_fault(self.draft_vocabulary, vocab_size)):
            raise ValueError(
                f"`draft_vocabulary` must be None or a list of distinct token ids from 0 to {vocab_size - 1}, but "
                f"{fault}. {_WHERE}"
            )

    def _validate_temperature(self) -> None:
        given = self.draft_temperature
        values = given if isinstance(given, tuple) else (given,)
        if not values or not all(map(_is_temperature, values)):
            shown = list(given) if isinstance(given, tuple) else given
            raise ValueError(
                f"`draft_temperature` must be a positive number, a list of positive numbers (one for each depth, from "
                f"depth 1 down) or None, got {shown!r}. {_WHERE}"
            )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The draft temperature of each depth, from depth 1 down to `tree_depth`."""
        given = self.draft_temperature if isinstance(self.draft_temperature, tuple) else (self.draft_temperature,)
        return (*given, *[given[-1]] * self.tree_depth)[: self.tree_depth]

    @property
    def extension(self) -> tuple[int, int]:
        """Below the serial tokens: how many nodes of a depth are extended, and by how many tokens each."""
        if self.full_tree_attention and self.branching_factor > 1:
            # As wide as the budget, a per-depth beam holds every node that can be among the best of the budget.
            return self.num_assistant_tokens, self.num_assistant_tokens
        return self.branching_factor, self.branching_factor

    @property
    def recombines(self) -> bool:
        """Whether the tree is the best of all recombinations of `extension`'s tokens. A chain is the only one."""
        return self.full_tree_attention or self.branching_factor == 1


def _parse_costs(value: Any) -> CycleCostTable | None:
    if value is None:
        return None
    try:
        return CycleCostTable.parse(value)
    except ValueError as error:
        raise ValueError(
            f"`cycle_costs` must be None or a table as `gumiho tune` writes it, but {error}. {_WHERE}"
        ) from None


def _check_lookup(settings: DraftingSettings, where: str) -> None:
    for name, least in _LEAST_OF_LOOKUP.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"`{name}` must be an integer of at least {least}, got {value!r}. {where} With "
                f"`prompt_lookup_num_tokens` 0 nothing is drafted from the context."
            )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _is_temperature(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
