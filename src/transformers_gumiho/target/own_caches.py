"""The cache that a target keeps where the caller gives none: an ordinary one, or one of a class of its own."""

import inspect
from typing import Any, get_args

from transformers import DynamicCache, PreTrainedModel

from ..internals import cache_argument, keeps_dynamic_cache
from .feature_reader import find_decoder


def cache_class(target: PreTrainedModel) -> type[DynamicCache] | None:
    """
    Returns `DynamicCache`, or the class derived from it that the target's decoder says it takes; `None` for a target
    that takes neither.
    """
    name = cache_argument(target)
    if name not in inspect.signature(target.forward).parameters:
        return None
    if keeps_dynamic_cache(target):
        return DynamicCache
    parameter = inspect.signature(find_decoder(target).forward).parameters.get(name)
    kinds = get_args(parameter.annotation) if parameter is not None else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, DynamicCache)), None)


def make_cache(target: PreTrainedModel) -> DynamicCache:
    """Returns an empty cache, as `generate()` makes it, or the target itself where it has a class of its own."""
    kind = cache_class(target)
    if kind is None or kind is DynamicCache:
        return DynamicCache(config=target.config.get_text_config(decoder=True))
    own: Any = kind
    cache: DynamicCache = own()
    return cache
