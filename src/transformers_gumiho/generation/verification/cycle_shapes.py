"""What is compiled: `cache_implementation="static"` selects cycles of fixed shapes, whose stages are compiled once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any, TypeVar

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

from ...internals import CACHE_NAME, would_compile


# Caches grow by at least this many slots, and by a quarter, so that longer texts run the compiled stages of others.
CAPACITY_STEP = 64

Function = TypeVar("Function", bound=Callable[..., Any])
StageCompiler = Callable[[Function], Function]


def no_compile(function: Function) -> Function:
    """Returns the function itself: a [`StageCompiler`] that does not compile."""
    return function


@dataclass(frozen=True)
class CycleShapes:
    """
    The shapes of a cycle's stages, and the `compiler` of a stage. Fixed shapes have a least `capacity` (slots in the
    target's cache); it is `None` if shapes grow with the text.
    """

    capacity: int | None = None
    compiler: StageCompiler = no_compile

    @property
    def are_fixed(self) -> bool:
        """Whether all cycles have the same shapes."""
        return self.capacity is not None

    @property
    def are_compiled(self) -> bool:
        """Whether stages are compiled."""
        return self.compiler is not no_compile

    def compiled(self, function: Function, num_nodes: int) -> Function:
        """Returns a stage for passes over `num_nodes` nodes, compiled separately for each number if stages are."""
        return self.compiler(_specialized_copy(function, num_nodes)) if self.are_compiled else function

    def slots_for(self, num_slots: int) -> int:
        """Returns the capacity of a cache with fixed shapes that must hold `num_slots`."""
        if self.capacity is None or self.capacity >= num_slots:
            return self.capacity or num_slots
        # Powers of two and three steps between them.
        step = max(CAPACITY_STEP, 1 << max(num_slots.bit_length() - 3, 0))
        return -(-num_slots // step) * step


def cycle_shapes(
    target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any], num_nodes: int
) -> CycleShapes:
    """
    Returns the shapes for trees of `num_nodes`, root included: fixed with a static cache, and compiled if plain
    `generate()` would compile the target.
    """
    if generation_config.cache_implementation != "static":
        return CycleShapes()
    cache: StaticCache = model_kwargs[CACHE_NAME]
    # `generate()` makes it as long as the longest text so far, so that shapes seldom change.
    capacity = CycleShapes(0).slots_for(cache.get_max_length() + num_nodes)
    if not would_compile(target, model_kwargs, generation_config):
        return CycleShapes(capacity)
    config = generation_config.compile_config or CompileConfig()
    # `to_dict` copies a backend that is an object, and `torch.compile` caches by the object.
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    if options.get("dynamic") is None:
        # Otherwise a second length of text would recompile every stage for all lengths, and make all of them slower.
        options["dynamic"] = False
    return CycleShapes(capacity, functools.partial(_compiled, options=_Options(options)))


@functools.cache
def _specialized_copy(function: Function, num_nodes: int) -> Function:
    """
    Returns a copy of a function with its own code object for each number of nodes: PyTorch counts recompilations per
    code object, and stops after a few.
    """
    plain: Any = function
    code = plain.__code__.replace(co_name=f"{plain.__name__}_of_{num_nodes}")
    copy: Any = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    return copy


class _Options(dict):
    """Options of `torch.compile` as a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


@functools.cache  # one object for all generations, because it holds the compiled code
def _compiled(function: Function, options: _Options) -> Function:
    compiled: Any = torch.compile(function, **options)
    return compiled
