"""Models inside of wrappers: compiled, in data parallelism, or with an adapter of PEFT."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..commands import UserValueError
from ..internals import uncompiled
from .configuration_gumiho import GumihoConfig


def unwrap_model(model: Any) -> Any:
    """Returns the model inside of a compiled module, of data parallelism, or of a `PeftModel`, in any nesting."""
    while True:
        inner: Any = uncompiled(model) if isinstance(model, nn.Module) else model
        if isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        # Adapters are inside the layers of the base model.
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        if inner is model:
            return model
        model = inner


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Returns a context in which a model is in eval mode, where it draws no random numbers."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def as_target(model: Any) -> PreTrainedModel:
    """
    Returns the target that `model` is or wraps.

    Raises:
        ValueError: It is a drafter, or no model of transformers: one of another runtime, or a module around a model.
    """
    inner = unwrap_model(model)
    name = type(inner).__name__
    if isinstance(getattr(inner, "config", None), GumihoConfig):
        raise UserValueError(f"A target is needed, and this {name} is a drafter. Give the model that it drafts for.")
    if isinstance(inner, PreTrainedModel):
        return inner
    fix = "Load the target with `AutoModelForCausalLM.from_pretrained`."
    parts = {**getattr(inner, "__dict__", {}), **getattr(inner, "_modules", {})}
    for part, value in parts.items():
        model = unwrap_model(value)
        if isinstance(model, PreTrainedModel):
            fix = f"It holds a {type(model).__name__} as `{part}`: give that."
            break
    raise UserValueError(f"A target is a `PreTrainedModel` of transformers, and {name} is none. {fix}")
