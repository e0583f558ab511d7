"""The cache that a target keeps where the caller gives none: an ordinary one, one of its own class, or bare states."""

import inspect
from types import UnionType
from typing import Any, Union, get_args, get_origin

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..internals import cache_argument, forward_parameters, keeps_dynamic_cache
from .feature_reader import find_decoder


class BareStates:
    """
    Tensors that a target takes and returns without a cache around them (RWKV), in the place of one. It writes to them
    where they lie.

    Attributes:
        tensors: The target's own list.
    """

    def __init__(self, tensors: list[Any]):
        self.tensors = tensors


def cache_class(target: PreTrainedModel) -> type | None:
    """
    Returns `DynamicCache`, or what else the target's decoder says it takes: a class derived from it, for states alone
    a class of its own or `list`. `None` for a target that keeps nothing of this.
    """
    name = cache_argument(target)
    parameter = forward_parameters(target).get(name)
    # XLM has had a dictionary of this name since before there were caches.
    if parameter is None or dict in _kinds(parameter):
        return None
    if keeps_dynamic_cache(target):
        return DynamicCache
    parameter = inspect.signature(find_decoder(target).forward).parameters.get(name)
    kinds = () if parameter is None else _kinds(parameter)
    return next((kind for kind in kinds if _is_derived(kind) or _holds_states(kind)), None)


def _kinds(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """Returns what the annotation of a parameter allows."""
    is_union = get_origin(parameter.annotation) in (Union, UnionType)
    kinds = get_args(parameter.annotation) if is_union else (parameter.annotation,)
    return tuple(get_origin(kind) or kind for kind in kinds)


def _is_derived(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, DynamicCache)


def _holds_states(kind: Any) -> bool:
    # Not an annotation that is a string, or says nothing.
    says_nothing = kind in (Any, inspect.Parameter.empty) or not isinstance(kind, type)
    return not (says_nothing or issubclass(kind, (Cache, type(None))))


def make_cache(target: PreTrainedModel) -> DynamicCache | None:
    """
    Returns an empty cache, as `generate()` makes it, or the target itself where it has a class of its own; `None`
    where the first pass makes what holds states.
    """
    kind = cache_class(target)
    if kind is None or kind is DynamicCache:
        return DynamicCache(config=target.config.get_text_config(decoder=True))
    own: Any = kind
    return own() if _is_derived(kind) else None


def as_cache(kept: Any) -> Any:
    """Returns what a target keeps as a cache whose attributes can be kept and put back."""
    return BareStates(kept) if isinstance(kept, list) else kept


def as_argument(cache: Any) -> Any:
    """Returns a cache as the target takes it."""
    return cache.tensors if isinstance(cache, BareStates) else cache
