"""`target.generate(custom_generate=<repository of a drafter>)`: what the code in such a repository runs."""

import inspect
import os
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationMixin, PreTrainedModel

from .model.modeling_gumiho import GumihoModel
from .target.placement import drafter_device


# Arguments of `generate()` that say how a repository is read; they are for the drafter as for the code next to it.
_LOADING = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")

# For each target the drafters that it was called with, by where they came from.
_drafters: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, Any], GumihoModel]] = WeakKeyDictionary()


def generate(model: PreTrainedModel, assistant_model: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """
    Generates with the drafter of the repository that was given as `custom_generate`. It is loaded in the first call,
    to the target's device and dtype, and lives as long as the target.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`PreTrainedModel`, *optional*): A drafter to use instead of the repository's.
        **kwargs: The other arguments of `generate()`.

    Returns:
        What `model.generate(assistant_model=<the drafter>, **kwargs)` returns.
    """
    loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    if assistant_model is None:
        assistant_model = _drafter_for(model, _repository_of_call(), loading)
    # Not `model.generate`: a target whose own folder holds a `custom_generate` has that in its place.
    return type(model).generate(model, assistant_model=assistant_model, **kwargs)


def _drafter_for(target: PreTrainedModel, repository: str, loading: dict[str, Any]) -> GumihoModel:
    """Returns the drafter of a repository for `target`; the same one in every call."""
    source = os.path.abspath(repository) if os.path.isdir(repository) else repository
    loaded = _drafters.setdefault(target, {})
    key, device = (source, loading.get("revision")), drafter_device(target)
    if key not in loaded or (loaded[key].device, loaded[key].dtype) != (device, target.dtype):
        loaded[key] = GumihoModel.from_pretrained(repository, dtype=target.dtype, device_map=device, **loading)
        loaded[key].share_embedding(target)
    return loaded[key]


def _repository_of_call() -> str:
    """
    Returns the `custom_generate` of the `generate()` that is running.

    transformers hands all arguments of the call on but this one, and from a local folder it runs a copy of the code
    that does not know where it came from. The name is left in the frame that made the call.
    """
    frame = inspect.currentframe()
    while frame is not None:
        is_generate = frame.f_code is inspect.unwrap(GenerationMixin.generate).__code__
        if is_generate and isinstance(name := frame.f_locals.get("custom_generate"), str):
            return name
        frame = frame.f_back
    raise ValueError(
        "This function was not called by `target.generate(custom_generate=<name or folder of a Gumiho drafter>, "
        "trust_remote_code=True)`, so there is no repository to load a drafter from. Call it so, or pass "
        "`assistant_model=GumihoModel.from_pretrained(...)`."
    )


__all__ = ["generate"]
