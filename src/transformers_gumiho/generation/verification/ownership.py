"""
Whose code the passes of a target run. Draft trees are for transformers' own code, which computes each node by its mask
and its position. Other code (remote code, subclasses, patches, registered functions) may do anything else, so it
verifies chains, as far as a trial says.
"""

import inspect
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import BuiltinFunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel, masking_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.integrations import sdpa_attention

from ...internals import (
    COMPILED_FROM,
    DECODING_STEP,
    PLAIN_STEP,
    STEPS_OF_LOOP,
    generation_step,
    modules_of,
)


class ForeignFunction(NamedTuple):
    """A function of another package. It holds no reference to the function, which could keep a target alive."""

    name: str
    key: int
    code: Any


# Packages whose code in a pass counts as transformers' own: those around it, and those that it puts into its models
# itself (layers of quantized weights, kernels of recurrent layers, towers for images).
KNOWN_PACKAGES = frozenset(sys.stdlib_module_names) | {
    "accelerate", "peft", "torch", "transformers", "transformers_gumiho",
    "aqlm", "auto_round", "bitsandbytes", "causal_conv1d", "compressed_tensors", "detectron2", "eetq", "fla", "flute",
    "fouroversix", "fp_quant", "gptqmodel", "hqq", "mamba_ssm", "mambapy", "optimum", "quark", "sinq", "spqr_quant",
    "timm", "torchao", "vptq", "xlstm",
}  # fmt: skip
# Classes of transformers whose update step hands on what the next pass reads: sound, or the number of the step.
READ_PER_TOKEN = ("Moshi", "Qwen2_5OmniTalker", "Qwen3OmniMoeTalker", "VoxtralRealtime")
# Where decorators, bound methods and partial objects have the function that they call.
_WRAPPED = ("__wrapped__", "__func__", "func", COMPILED_FROM)
# What passes call of a cache and its layers.
_METHODS_OF_CACHES = (
    "update", "update_conv_state", "update_recurrent_state", "update_indexer", "lazy_initialization",
    "get_mask_sizes", "get_seq_length",
)  # fmt: skip
# The files of classes that look up functions for attention, masks and positions.
_FILES_OF_MODELS = "transformers.models."
_STATIC_CACHES = (StaticCache, StaticLayer, StaticSlidingWindowLayer)

# Functions that were opened before, as each call asks for some hundred.
_known: WeakSet[Any] = WeakSet()


def foreign_code(target: PreTrainedModel, registered: Iterable[Any] = ()) -> frozenset[ForeignFunction]:
    """
    Returns the functions in a target's passes that are not transformers' own: of its modules, of the files of their
    classes, of its cache, and those that are `registered` for its attention.
    """
    modules = modules_of(target)
    kinds: set[Any] = set(map(type, modules))
    # 1. What the modules run.
    functions = [vars(module)["forward"] for module in modules if "forward" in vars(module)]
    functions += [method for kind in kinds for method in _methods_of_passes(kind)]
    prepare = target.prepare_inputs_for_generation
    functions.append(getattr(prepare, "__func__", prepare))
    # 2. What they look up by name: in the files of their classes, and for masks and attention.
    names = {
        base.__module__ for kind in kinds for base in kind.__mro__ if base.__module__.startswith(_FILES_OF_MODELS)
    }
    files = (sys.modules[name] for name in names if name in sys.modules)
    for file in (*files, masking_utils, sdpa_attention):
        values = tuple(vars(file).values())
        functions += [value for value in values if callable(value) and not isinstance(value, (type, nn.Module))]
    functions.append(functional.scaled_dot_product_attention)
    # 3. What writes and reads the cache.
    caches = {DynamicCache, *_STATIC_CACHES, *DYNAMIC_LAYER_TYPE_MAPPING.values()}
    functions += [getattr(kind, name, None) for kind in caches for name in _METHODS_OF_CACHES]
    # 4. The parts that stand elsewhere.
    asked = [function for function in functions if function is not None]
    parts = [foreign_part(function) for function in asked if function not in _known]
    parts += registered
    return frozenset(_described(part) for part in parts if part is not None)


def _methods_of_passes(kind: Any) -> list[Any]:
    """Returns the methods of a class of modules that a pass runs: `forward`, and those that it calls by name."""
    methods = [kind.__call__, kind.forward]
    names: set[str] = set()
    for method in methods:  # grows while it is read
        code = getattr(inspect.unwrap(method), "__code__", None)
        new = set(getattr(code, "co_names", ())) - names
        names |= new
        # Methods that all models have are no part of a pass: tensors have some of their names (`to`, `float`).
        found = [getattr(kind, name, None) for name in sorted(new) if not hasattr(PreTrainedModel, name)]
        methods += filter(inspect.isroutine, found)
    return methods


def foreign_part(function: Any) -> Any:
    """
    Returns the function of another package, among `function` and all that it wraps; `None` if all are of known ones.

    What counts is where the code stands: `functools.wraps` copies names such as `__module__`. A decorator of a known
    package may have another function inside, so each one is opened.
    """
    found, seen = [function], {id(function)}
    for part in found:  # grows while it is read
        if package_of(part) not in KNOWN_PACKAGES:
            return part
        new = [inner for inner in _wrapped_by(part) if id(inner) not in seen]
        seen.update(map(id, new))
        found += new
    with suppress(TypeError):  # some callables take no weak reference
        _known.add(function)
    return None


def own_step_of_decoding(target: PreTrainedModel) -> str | None:
    """Returns the name of a step of decoding that is the target's own, and that no drafted call runs."""
    if getattr(type(target), PLAIN_STEP) is not generation_step(PLAIN_STEP):
        return PLAIN_STEP
    for name in (PLAIN_STEP, DECODING_STEP, *STEPS_OF_LOOP):
        step = getattr(type(target), name) if name not in vars(target) else vars(target)[name]
        reads_more = getattr(step, "__qualname__", "").startswith(READ_PER_TOKEN)
        if reads_more or (step not in _known and foreign_part(step) is not None):
            return name
    return None


def package_of(function: Any) -> str:
    """Returns the package that a function's code stands in; for other callables, that of their class."""
    # A bound method has the globals of its function.
    if (names := getattr(function, "__globals__", None)) is not None:
        name = names.get("__name__")
    elif isinstance(function, BuiltinFunctionType):
        name = function.__module__ or "builtins"
    else:
        name = type(function).__module__
    return str(name).partition(".")[0]


def _wrapped_by(function: Any) -> list[Any]:
    """Returns what a function, a bound method, a partial object or a decorated function calls."""
    found = [getattr(function, name, None) for name in _WRAPPED]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is not filled yet
            continue
    # Classes and modules are looked at by themselves.
    others = [inner for inner in found if inner is not None and not isinstance(inner, (type, nn.Module))]
    return [inner for inner in others if callable(inner) or hasattr(inner, "func")]


def _described(function: Any) -> ForeignFunction:
    code = getattr(function, "__code__", None)
    name = getattr(code, "co_name", None) or getattr(function, "__name__", type(function).__name__)
    where = (getattr(function, "__globals__", None) or {}).get("__name__") or package_of(function)
    return ForeignFunction(f"`{name}` of `{where}`", id(function), code)
