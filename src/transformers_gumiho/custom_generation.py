"""Entry points for the code in repositories of drafters, and of targets that bring a drafter."""

import types
from typing import Any

from transformers import PreTrainedModel

from .commands import UserValueError
from .generation.attach import generate_where_possible, load_drafter
from .internals import repository_of_call


# Arguments of `generate()` that say how a repository is read. They apply to the drafter and to the code next to it.
_LOADING = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def generate(model: PreTrainedModel, assistant_model: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """
    Generates with the drafter of the repository that was given as `custom_generate`. The first call loads the drafter,
    to the device of the target's output head and in the target's dtype. It is kept as long as the target.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`PreTrainedModel`, *optional*): A drafter to use instead of the repository's.
        **kwargs: The other arguments of `generate()`.

    Returns:
        What `model.generate(assistant_model=<the drafter>, **kwargs)` returns.
    """
    loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    if assistant_model is None:
        if not (repository := repository_of_call(model)):
            raise UserValueError(
                "This function was not called by `target.generate(custom_generate=<name or folder of a Gumiho "
                "drafter>, trust_remote_code=True)`, so there is no repository to load a drafter from. Call it so, or "
                "pass `assistant_model=GumihoModel.from_pretrained(...)`."
            )
        assistant_model = load_drafter(model, repository, **loading)
    # Not `model.generate`: if the target's own folder holds a `custom_generate`, that has replaced it.
    return type(model).generate(model, assistant_model=assistant_model, **kwargs)


def generate_attached(
    drafter: str, /, *args: Any, model: PreTrainedModel, record_in: str | None = None, **kwargs: Any
) -> Any:
    """
    Generates with a drafter where that is possible, and else plainly. Folders that `gumiho attach` writes call this.

    Args:
        drafter: The drafter's folder or its name on the Hub.
        *args, **kwargs: The arguments of `generate()`.
        model: The target.
        record_in: The folder of a recording, which the first call begins.
    """
    if record_in is not None:
        from .training.recording import record_once

        record_once(model, record_in)
    # `generate(custom_generate=<this folder>)` passes every argument, and `None` for those that were not given.
    if kwargs.get("assistant_model") is None and repository_of_call(model):
        kwargs.pop("assistant_model", None)
    # Not `model.generate`, which is the `generate` of this folder.
    plain = types.MethodType(type(model).generate, model)
    return generate_where_possible(plain, model, drafter, args, kwargs)


__all__ = ["generate", "generate_attached"]
