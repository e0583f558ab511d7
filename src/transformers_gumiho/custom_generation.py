"""Entry points for the code in folders that `gumiho attach` writes, and in repositories of drafters."""

import types
from collections.abc import Mapping
from typing import Any, NoReturn

from transformers import PreTrainedModel

from .commands import UserValueError
from .generation.attach import attached_drafter, generate_where_possible, named_drafter
from .internals import ARGUMENTS_OF_GENERATE


def generate(model: PreTrainedModel, **kwargs: Any) -> NoReturn:
    """Says what replaces `custom_generate=<repository of a drafter>`. Raises `ValueError`."""
    raise UserValueError(
        "A drafter is no `custom_generate`. Give its name or folder as `assistant_model`: "
        "`target.generate(..., assistant_model='owner/drafter')`, after `import transformers_gumiho`."
    )


def generate_attached(
    drafter: str,
    /,
    *args: Any,
    model: PreTrainedModel,
    record_in: str | None = None,
    recording: Mapping[str, float] | None = None,
    **kwargs: Any,
) -> Any:
    """
    Generates with a drafter where that is possible, and else plainly. Folders that `gumiho attach` writes call this.

    Args:
        drafter: The drafter's folder or its name on the Hub.
        *args, **kwargs: The arguments of `generate()`.
        model: The target.
        record_in: The folder of a recording, which the first call begins.
        recording: Its `max_gigabytes` and `share`, as in `record`.
    """
    if record_in is not None:
        from .training.recording import record_once

        record_once(model, record_in, **recording or {})
    # `generate(custom_generate=...)` passes `None` for what was not given.
    passes_all = kwargs.keys() >= {*ARGUMENTS_OF_GENERATE} - {"custom_generate"}
    if passes_all and kwargs["assistant_model"] is None:
        del kwargs["assistant_model"]
    # Not `model.generate`, which is the `generate` of this folder.
    plain = types.MethodType(type(model).generate, model)
    if attached_drafter(model) is not None:  # it goes first
        return plain(*args, **kwargs)
    return generate_where_possible(plain, model, lambda: named_drafter(model, drafter), args, kwargs)


__all__ = ["generate", "generate_attached"]
