"""Reading the MTP layers of a target's checkpoint: only the files that hold them, and eight bits by their scales."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from ..commands import UserValueError
from ..files import PLACES, damaged_files_named
from .checkpoint_files import cached, tensor_files
from .mtp_layouts import mtp_fields, mtp_names


# Stands for the MTP layers in the checkpoint of the target itself.
OWN_MTP_LAYERS = "mtp"
# The first rows of an output head that came with the layer, under this name. The target's are compared with them.
HEAD_ROWS, _NUM_HEAD_ROWS = "head_rows", 64
# How the scales of a tensor in eight bits are called, after the tensor's name.
_SCALES = ("_scale_inv", "_scale")
# Scales of what layers compute. They are of no use for weights in 16 bits.
_SCALES_OF_STATES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".output_scale")


def has_mtp_layers(name_or_path: Any, options: Mapping[str, Any]) -> bool:
    """
    Whether a folder or a name on the Hub is that of a target with MTP layers in its checkpoint. Raises `ValueError`
    where they are not available here.
    """
    places = {name: options[name] for name in PLACES if options.get(name) is not None}
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name_or_path, **places)
    except (OSError, ValueError, TypeError):  # there is no config, or this is no name
        return False
    return mtp_fields(fields, lambda: tensor_files(name_or_path, options), name_or_path) is not None


def check_mtp_layers(name: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` where the checkpoint of a target has no MTP layers, or such that are not available here."""
    if not name or not has_mtp_layers(name, options):
        raise UserValueError(
            f"The target's checkpoint ({name!r}) has no MTP layers. They are often missing where a model was trained "
            f"further, merged or quantized. Name the original model instead: its layers serve this target, too. If "
            f"the target is from a `revision` or a `subfolder`, import `transformers_gumiho` before you load it."
        )


def read_mtp_layers(name_or_path: Any, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """
    Reads the MTP layers of a target, by the drafter's names. The first rows of an output head that came with the layer
    are among them, as `HEAD_ROWS`. `options` are the arguments of `from_pretrained`. Raises `ValueError` for layers
    that are packed, or lack scales.
    """
    places = {name: options[name] for name in PLACES if options.get(name) is not None}
    fields, _ = PreTrainedConfig.get_config_dict(name_or_path, **places)
    files = tensor_files(name_or_path, options)
    own_names, own_head = mtp_names(fields, files)
    tensors: dict[str, torch.Tensor] = {}
    head_rows: dict[str, torch.Tensor] = {}
    with damaged_files_named(name_or_path, options):
        for file in sorted({files[name] for name in own_names}):
            with safe_open(cached(name_or_path, file, options), framework="pt") as stored:
                names = [name for name in own_names if files[name] == file]
                tensors |= {own_names[name]: stored.get_tensor(name) for name in names}
        if own_head is not None:
            with safe_open(cached(name_or_path, files[own_head], options), framework="pt") as stored:
                head_rows[HEAD_ROWS] = stored.get_slice(own_head)[:_NUM_HEAD_ROWS]
    quantization: dict[str, Any] = {}
    for level in (fields.get("text_config") or {}, fields):
        quantization |= level.get("quantization_config") or {}
    return dequantized(tensors, quantization, name_or_path) | head_rows


def dequantized(
    tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any], name_or_path: Any
) -> dict[str, torch.Tensor]:
    """
    Returns the tensors of a layer, those in eight bits times their scales, in bfloat16, as published tools make them.
    Scales are among the tensors: one for a matrix, for each of its rows, or for each block of the size
    `weight_block_size` in `quantization`, the target's `quantization_config`.
    """
    packed = sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    if packed:
        raise UserValueError(
            f"The MTP layers of {str(name_or_path)!r} are quantized in a packed form ({packed[0]}), which is not "
            f"available here. Name the original checkpoint instead: its layers also serve a quantized target."
        )
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(_SCALES)}
    found = {}
    for name, tensor in tensors.items():
        if name in scales or name.endswith(_SCALES_OF_STATES):
            continue
        scale = next((scales[name + end] for end in _SCALES if name + end in scales), None)
        if scale is None and tensor.element_size() == 1:
            raise UserValueError(f"The tensor {name!r} of the MTP layers of {str(name_or_path)!r} has no scales.")
        found[name] = tensor if scale is None else _scaled(name, tensor, scale, quantization)
    return found


def _scaled(name: str, tensor: torch.Tensor, scale: torch.Tensor, quantization: Mapping[str, Any]) -> torch.Tensor:
    """Returns a tensor `(..., rows, columns)` times its scales."""
    scale = scale.float()
    if scale.numel() > 1 and scale.ndim < tensor.ndim:
        scale = scale[..., None]  # one for each row
    if scale.numel() > 1:
        sizes = quantization.get("weight_block_size") or (None, None)
        for dim, given in zip((-2, -1), sizes, strict=True):
            number, blocks = tensor.shape[dim], scale.shape[dim]
            if blocks in (1, number):  # one for all, or each its own
                continue
            size = given or number // blocks
            if -(-number // size) != blocks:
                raise UserValueError(
                    f"The scales of {name!r} are for {blocks} blocks, which does not fit {number} numbers in blocks "
                    f"of {size}, as `weight_block_size` of the target's `quantization_config` says."
                )
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, number)
    return (tensor.float() * scale).to(torch.bfloat16)
