"""Attaching a drafter to a target: from then on every call of the target's `generate()` drafts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from ..internals import uncompiled


# Beside the models, so that no copy, checkpoint or parameter list of a target includes its drafter.
_drafters: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
# Raise `ValueError` for a target that a drafter cannot be attached to.
ATTACHMENT_CHECKS: list[Callable[[PreTrainedModel, Any], None]] = []


class AttachingMixin:
    """Lets a drafter be attached to targets, where a caller of `generate()` has no place for an assistant."""

    def attach(self, target: nn.Module) -> None:
        """
        Makes `target.generate(...)` draft with this drafter.

        An `assistant_model` in a call takes precedence, also `None`. A call that cannot be drafted (beam search, for
        example) decodes plainly, with one warning for each reason. Copies of the target are not attached.

        Args:
            target: The target. A `PeftModel`, a compiled model or one in data parallelism stands for the model inside.

        Raises:
            ValueError: The drafter does not fit the target, or the target cannot verify drafts.

        Example:

            >>> gumiho.attach(target)  # doctest: +SKIP
            >>> target.generate(**inputs)  # doctest: +SKIP
        """
        inner = unwrap_model(target)
        for check in ATTACHMENT_CHECKS:
            check(inner, self)
        _drafters[inner] = self

    def detach(self, target: nn.Module) -> None:
        """Undoes [`attach`]. A target without this drafter stays as it is."""
        inner = unwrap_model(target)
        if _drafters.get(inner) is self:
            del _drafters[inner]

    @contextmanager
    def attached(self, target: nn.Module) -> Iterator[None]:
        """Attaches the drafter within a `with` block; what was attached before is attached again afterwards."""
        before = attached_drafter(target)
        self.attach(target)
        try:
            yield
        finally:
            self.detach(target)
            if before is not None:
                _drafters[unwrap_model(target)] = before


def attached_drafter(target: nn.Module) -> Any:
    """Returns the drafter that is attached to a target; `None` if there is none."""
    return _drafters.get(unwrap_model(target))


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
