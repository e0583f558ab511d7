"""Models inside of wrappers: compiled, in data parallelism, or with an adapter of PEFT."""

from typing import Any

from torch import nn

from ..internals import uncompiled
from .modeling_gumiho import GumihoModel


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


def unwrap_drafter(model: Any) -> GumihoModel | None:
    """Returns the drafter that `model` is or wraps; `None` where it is none."""
    model = unwrap_model(model)
    return model if isinstance(model, GumihoModel) else None
