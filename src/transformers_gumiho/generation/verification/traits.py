"""The properties of a target that decide how it verifies drafts."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ...commands import UserValueError
from ...internals import (
    CACHE_NAME,
    COUNT_OF_SLOTS,
    execution_device,
    is_stateful,
    keeps_dynamic_cache,
    modules_of,
)
from .attention_kind import AttentionKind, attention_kind
from .mixers import holds_tree, names_in_code
from .ownership import ForeignFunction, foreign_code


class Unsupported(UserValueError):
    """A call of `generate()` that cannot be drafted. With an attached drafter, such a call decodes plainly instead."""


# Kinds of attention whose mask can hold a tree.
TREE_ATTENTION = {"full_attention", "sliding_attention"}
# Kinds of layers with states, and those with both, whose attention sees all.
STATE_KINDS = {"linear_attention", "conv"}
_HYBRID = "hybrid"
# Kinds of layers with neither.
_STATELESS = {"moe", "mlp"}
# With them come losses of a mixture of experts.
_UNUSED_OUTPUTS = ("output_router_logits",)


@dataclass(frozen=True)
class TargetTraits:
    """
    The properties of a target in one call of `generate()`. Its attention and its adapters may change between calls.

    Attributes:
        name: Name of its class.
        config: Config of its text decoder.
        attention: The attention of its layers.
        windows: For each kind of attention layer, as in `layer_types`, the number of tokens that a token attends to;
            `None` for all.
        cache_argument: Name of the argument of `forward` that takes the cache.
        takes_cache: Whether it takes and returns a `DynamicCache`, which drafts are verified against.
        unused_outputs: Arguments of `forward` that turn off outputs which decoding does not read. A config may ask for
            them, and some are computed from a mask of padding, which passes over trees have not.
        foreign: The [`foreign_code`] in its passes, with which it verifies chains, as far as a trial says.
        has_states: Whether layers keep states.
        tree_obstacle: Why it cannot verify draft trees, as a clause that follows its name. It then verifies chains.
            `None` if it can.
    """

    name: str
    config: PreTrainedConfig
    attention: AttentionKind
    windows: dict[str, int | None]
    cache_argument: str
    takes_cache: bool
    unused_outputs: dict[str, bool]
    foreign: frozenset[ForeignFunction]
    has_states: bool
    tree_obstacle: str | None

    @classmethod
    def of(cls, target: PreTrainedModel) -> "TargetTraits":
        """Returns the traits of a decoder-only target."""
        config = target.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
        kinds = {"full_attention" if kind == _HYBRID else kind for kind in kinds} - _STATELESS
        windows = {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds - STATE_KINDS)}
        attention = attention_kind(target, config, has_windows=any(windows.values()))
        parameters, cache_name = _forward_parameters(target), cache_argument(target)
        foreign = foreign_code(target, attention.registered)
        has_states = is_stateful(target) or not kinds.isdisjoint(STATE_KINDS)
        obstacle = _tree_obstacle(target, config, kinds, has_states) or attention.tree_obstacle
        if foreign and obstacle is None:  # with any code of others, the promise to the token ends
            first = min(function.name for function in foreign)
            obstacle = f"runs code that is not transformers' own ({first})"
        return cls(
            name=type(target).__name__,
            config=config,
            attention=attention,
            windows=windows,
            cache_argument=cache_name,
            takes_cache=_takes_cache(target, parameters.get(cache_name)),
            unused_outputs={name: False for name in _UNUSED_OUTPUTS if name in parameters},
            foreign=foreign,
            has_states=has_states,
            tree_obstacle=obstacle,
        )

    @property
    def is_chain(self) -> bool:
        """Whether it verifies chains, with ordinary causal passes and its own cache."""
        return self.tree_obstacle is not None

    def make_cache(self) -> DynamicCache:
        """Returns an empty cache, as `generate()` makes it."""
        return DynamicCache(config=self.config)

    def check_is_whole(self, cache: DynamicCache) -> None:
        """Raises [`Unsupported`] for a tree's cache some of whose layers lack tokens that are in their window."""
        filled = filled_layers(cache)
        length = cache.get_seq_length() if filled else 0  # states alone count no tokens
        held = [layer.keys.shape[2] for layer in filled]
        needed = [min(length, getattr(layer, "sliding_window", length + 1) - 1) for layer in filled]
        if any(not least <= number <= length for least, number in zip(needed, held, strict=True)):
            raise Unsupported(
                f"The layers of {self.name} hold {held} tokens of a text of {length} in their cache, and drafts are "
                f"verified against all of them. Leave out what removes tokens from the cache, or generate without "
                f"`assistant_model`."
            )


def _forward_parameters(target: PreTrainedModel) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a target's `forward` by name; with `**kwargs`, also those of one that it overrides."""
    found: dict[str, inspect.Parameter] = {}
    overridden = (vars(kind)["forward"] for kind in type(target).__mro__ if "forward" in vars(kind))
    for forward in (target.forward, *overridden):
        parameters = inspect.signature(forward).parameters
        found = {**parameters, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def cache_argument(target: PreTrainedModel) -> str:
    """Returns the name of the cache in the target's arguments and outputs, which depended on its class before 5.24."""
    names = _forward_parameters(target)
    if CACHE_NAME == "cache":
        return CACHE_NAME if CACHE_NAME in names or "state" not in names else "state"
    if "mamba" in type(target).__name__.lower():
        return "cache_params"
    return next((name for name in (CACHE_NAME, "cache_params", "state") if name in names), CACHE_NAME)


def input_device(target: PreTrainedModel) -> torch.device:
    """Returns the device for a target's inputs; if its first parameters are offloaded, the one that computes."""
    return target.device if target.device.type != "meta" else execution_device(target) or torch.device("cpu")


def drafter_device(target: PreTrainedModel) -> torch.device:
    """Returns the device for a drafter: that of the target's output head, which runs in each of its passes."""
    head = target.get_output_embeddings()
    weight = None if head is None else next(head.parameters(), None)
    return input_device(target) if weight is None or weight.is_meta else weight.device


def filled_layers(cache: Any) -> list[Any]:
    """Returns the layers of a cache that hold keys and values."""
    return [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None]


def _tree_obstacle(target: PreTrainedModel, config: Any, kinds: set[str], has_states: bool) -> str | None:
    unsupported = sorted(kinds - TREE_ATTENTION - STATE_KINDS)
    if unsupported or (has_states and not holds_tree(target.get_decoder())):
        what = f"layers of type {', '.join(unsupported)}" if unsupported else "a recurrent state"
        return f"has {what}, whose state cannot hold the branches of a draft tree"
    if kinds <= STATE_KINDS:
        return None
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters
    if not takes_positions or getattr(config, "alibi", False) or not _hands_on_positions(target):
        return (
            "counts the positions of its tokens itself (its `forward` gets no `position_ids`, or it uses ALiBi), so "
            "the branches of a draft tree cannot share positions"
        )
    if any(COUNT_OF_SLOTS in names_in_code(kind) for kind in set(map(type, modules_of(target.get_decoder())))):
        return "reads positions off the slots of its cache"
    if config.model_type == "git" and CACHE_NAME != "cache":
        return "takes no mask of a draft tree before transformers 5.24"
    if config.model_type == "doge" and config.is_moe:
        return "routes the tokens of a pass to experts by each other"
    if getattr(config, "cross_attention_layers", None):
        return "has layers that attend to an image instead of the text, which take no draft tree"
    if getattr(config, "attention_layers", None):  # GPT-Neo
        return "masks its attention by cache slot"
    if getattr(config, "attn_temperature_tuning", False):  # of Llama 4; with chunks it verifies chains anyway
        return "scales its attention by cache slot, not by position"
    if getattr(config, "recurrent_kv_cache_mode", None) == "last_loop" and config.n_recurrent_loops > 1:
        return "has loops of layers that read what the last loop wrote out of the cache themselves"
    return None


def _takes_cache(target: PreTrainedModel, parameter: inspect.Parameter | None) -> bool:
    if parameter is None or not keeps_dynamic_cache(target):
        return False
    # XLM has an older argument of this name, which is a dictionary.
    return re.search(r"\bdict\b", str(parameter.annotation), re.IGNORECASE) is None


def _hands_on_positions(target: PreTrainedModel) -> bool:
    """Whether the `position_ids` of a pass reach the target's `forward`. Some classes drop them (EXAONE 4.5)."""
    prepare: Any = type(target).prepare_inputs_for_generation
    if prepare is GenerationMixin.prepare_inputs_for_generation:
        return True
    tokens = torch.zeros(1, 2, dtype=torch.long, device="cpu")
    kwargs = {cache_argument(target): DynamicCache(), "attention_mask": torch.ones_like(tokens), "use_cache": True}
    try:
        positions = prepare(target, tokens, position_ids=tokens, **kwargs).get("position_ids")
    except Exception:  # it needs arguments that only a call has; a trial judges it
        return True
    return positions is not None and positions.shape[-1] == tokens.shape[-1]
