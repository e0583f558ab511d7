"""`transformers_gumiho.attach`, which also takes a drafter by name, and wrapped models."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..model.attaching import attached_drafter, unwrap_model
from ..model.modeling_gumiho import GumihoModel, unwrap_drafter
from ..user_errors import UserValueError
from .named_drafters import named_drafter


def attach(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> GumihoModel:
    """
    Makes `target.generate(...)` use a drafter in every call, for callers that cannot pass `assistant_model`. See
    [`GumihoModel.attach`].

    Args:
        target: The target, or a wrapper of it: a `PeftModel`, a compiled model, or one in data parallelism.
        drafter: The drafter, or its folder or name on the Hub. Then it is loaded to the target's device and dtype.

    Returns:
        The drafter.

    Raises:
        ValueError: `drafter` is no Gumiho drafter, it does not fit the target, or the target cannot verify drafts.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from transformers_gumiho import attach, detach

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> target = AutoModelForCausalLM.from_pretrained("examples/demo_pair/target", dtype="float32")
    >>> gumiho = attach(target, "examples/demo_pair/gumiho")
    >>> inputs = tokenizer("def read(self):", return_tensors="pt")
    >>> output = target.generate(**inputs, max_new_tokens=16, return_dict_in_generate=True)
    >>> len(output.accepted_lengths[0]) < 16  # passes of the target after the prompt's
    True
    >>> detach(target)

    ```
    """
    found = _find_drafter(target, drafter)
    found.attach(target)
    return found


def detach(target: nn.Module) -> None:
    """Undoes [`attach`]. Does nothing if `target` has no drafter."""
    if (drafter := attached_drafter(target)) is not None:
        drafter.detach(target)


@contextmanager
def attached(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> Iterator[GumihoModel]:
    """
    Attaches a drafter to `target` within a `with` block, and restores the former attachment afterwards. See
    [`attach`] for the arguments.
    """
    found = _find_drafter(target, drafter)
    with found.attached(target):
        yield found


def _find_drafter(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> GumihoModel:
    if isinstance(drafter, (str, os.PathLike)):
        found, what = named_drafter(unwrap_model(target), drafter), repr(str(drafter))
    else:
        found, what = unwrap_drafter(drafter), f"a {type(unwrap_model(drafter)).__name__}"
    if found is None:
        raise UserValueError(f"No Gumiho drafter: {what}. Pass a `GumihoModel`, or its folder or name.")
    return found


__all__ = ["attach", "attached", "detach"]
