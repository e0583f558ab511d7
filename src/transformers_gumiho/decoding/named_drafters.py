"""Drafters that a call of `generate()` names: loaded once for each target."""

import os
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ..model.configuration_gumiho import GumihoConfig
from ..model.modeling_gumiho import GumihoModel
from ..model.released_configs import find_packaged_folder
from ..target.placement import drafter_device


# For each target the drafters that it was called with, by where they came from.
_drafters: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, Any], GumihoModel]] = WeakKeyDictionary()


def is_drafter(name: str | os.PathLike) -> bool:
    """Whether a folder or a name on the Hub is that of a Gumiho drafter, by its config. No code of it is run."""
    if find_packaged_folder(str(name)):
        return True
    try:
        config, _ = PreTrainedConfig.get_config_dict(str(name))
    except OSError:
        return False
    return config.get("model_type") == GumihoConfig.model_type


def load_drafter(target: PreTrainedModel, name: str | os.PathLike, **loading: Any) -> GumihoModel:
    """
    Returns the drafter of a folder or a name on the Hub, on the target's device and in its dtype; the same one in
    every call, as long as the target lives.

    Args:
        target: The target.
        name: The folder or name.
        **loading: For `from_pretrained`.
    """
    source = os.path.abspath(name) if os.path.isdir(name) else str(name)
    loaded = _drafters.setdefault(target, {})
    key, device = (source, loading.get("revision")), drafter_device(target)
    if key not in loaded or (loaded[key].device, loaded[key].dtype) != (device, target.dtype):
        loaded[key] = GumihoModel.from_pretrained(name, dtype=target.dtype, device_map=device, **loading)
        loaded[key].share_embedding(target)
    return loaded[key]
