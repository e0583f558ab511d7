"""Drafters given to `generate()` by name or folder, loaded once per target."""

import os
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ..model.modeling_gumiho import GumihoModel
from ..model.released_configs import find_packaged_folder, is_of_drafter
from ..user_errors import UserValueError
from ..verification.placement import drafter_device


# The drafters of each target, by their source and revision.
_drafters: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, Any], GumihoModel]] = WeakKeyDictionary()


def is_drafter(name: str | os.PathLike) -> bool:
    """
    Whether a folder or a name on the Hub is that of a drafter, judged by its config and the names of its tensors. Runs
    no code from there.

    Raises:
        ValueError: No config can be read there.
    """
    if find_packaged_folder(str(name)):
        return True
    try:
        config, _ = PreTrainedConfig.get_config_dict(str(name))
    except OSError as error:
        raise UserValueError(
            f"No drafter can be read from {str(name)!r} ({error}). Give a Gumiho drafter, or its folder or name."
        ) from error
    return is_of_drafter(config, name)


def named_drafter(target: PreTrainedModel, name: str | os.PathLike) -> GumihoModel | None:
    """
    Returns the drafter with this name or folder, or `None` if it is another model.

    Raises:
        ValueError: No config can be read there.
    """
    # A loaded drafter needs no request to the Hub.
    is_known = (_source(name), None) in _drafters.get(target, {})
    return load_drafter(target, name) if is_known or is_drafter(name) else None


def _source(name: str | os.PathLike) -> str:
    return os.path.abspath(name) if os.path.isdir(name) else str(name)


def load_drafter(target: PreTrainedModel, name: str | os.PathLike, **loading: Any) -> GumihoModel:
    """
    Returns the drafter of a folder or a name on the Hub, on the device of the target's output head and in the target's
    dtype. Later calls return the same drafter.

    Args:
        target: The target.
        name: The folder or name.
        **loading: Arguments of `from_pretrained`.
    """
    loaded = _drafters.setdefault(target, {})
    key, device = (_source(name), loading.get("revision")), drafter_device(target)
    if key not in loaded or (loaded[key].device, loaded[key].dtype) != (device, target.dtype):
        loaded[key] = GumihoModel.from_pretrained(name, dtype=target.dtype, device_map=device, **loading)
        loaded[key].share_embedding(target)
    return loaded[key]
