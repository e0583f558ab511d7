"""
The precision of a trial. In 16 bits rounding would hide what is wrong, so every operation computes in float32. Where
PyTorch may round products of float32 (to TF32, on GPUs), they are computed in float64. Neither the target nor a
setting of the process changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import conv1d, conv2d, linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ...internals import TorchDispatchMode, is_in_place, map_tree


NARROW = (torch.float16, torch.bfloat16)
# Numbers of a weight that are converted at a time, 256 MB of float32. Output heads may have more.
MAX_CONVERTED = 1 << 26

_aten = torch.ops.aten
# They hand on a part of a weight, or another view of it. It is converted where it is multiplied.
_VIEWS = {
    _aten.t, _aten.transpose, _aten.permute, _aten.view, _aten.select, _aten.slice, _aten.split, _aten.detach,
    _aten.alias,
}  # fmt: skip
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.linear, _aten.bmm, _aten.baddbmm, _aten.matmul}
_CONVOLUTIONS = (conv1d, conv2d)


@contextmanager
def computing_precisely() -> Iterator[None]:
    """
    Within the block, PyTorch operations on 16-bit floats compute and return float32, with products that are not
    rounded. Weights are converted one at a time, large ones in parts. Kernels outside of PyTorch are not affected.
    """
    with _WideOperations(), _WideFunctions():
        yield


def rounds_products(device: torch.device) -> bool:
    """Whether PyTorch may round products of float32 on this device, by either of its switches."""
    if device.type == "mps":
        return False
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Since PyTorch 2.9. It no longer says what the older switch is after a new one was set.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


class _WideOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation, kwargs = func.overloadpacket, kwargs or {}
        if operation in _VIEWS:
            return func(*args, **kwargs)
        if operation is _aten.embedding:
            return _widen(func(*args, **kwargs))  # the rows that are read, and not all of them
        if operation in _PRODUCTS:
            return _compute(func, args, kwargs)
        kept = 1 if is_in_place(func) else 0  # an operation in place writes into its first argument
        return func(*args[:kept], *map_tree(_widen, args[kept:]), **map_tree(_widen, kwargs))


class _WideFunctions(TorchFunctionMode):
    """Functions that compare the dtypes of their arguments, or choose a kernel by them, before the operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is linear and len(args) > 1 and args[1].numel() > MAX_CONVERTED:
            return _compute_in_parts(*args, **kwargs)
        wide = (*_CONVOLUTIONS, scaled_dot_product_attention)
        return _compute(func, args, kwargs) if func in wide else func(*args, **kwargs)


def _compute_in_parts(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes a linear layer with some rows of its large weight at a time."""
    size = max(MAX_CONVERTED // weight.shape[1], 1)
    weights = weight.split(size)
    biases = [None] * len(weights) if bias is None else bias.split(size)
    return torch.cat([linear(states, *part) for part in zip(weights, biases, strict=True)], dim=-1)


def _compute(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Computes products without rounding. Returns float32, or float64 if an argument had it."""
    device = args[0].device
    # By default, PyTorch may round convolutions on GPUs, and nothing else.
    may_round = rounds_products(device) or (func in _CONVOLUTIONS and device.type == "cuda")
    dtype = torch.float64 if may_round else torch.float32

    def convert(value: Any) -> Any:
        is_narrower = isinstance(value, torch.Tensor) and value.dtype in (*NARROW, torch.float32)
        return value.to(dtype) if is_narrower else value

    result: torch.Tensor = func(*map_tree(convert, args), **map_tree(convert, kwargs))
    has_float64 = any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in args)
    return result if has_float64 else result.to(torch.float32)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in NARROW:
        return value.to(torch.float32)
    return torch.float32 if value is torch.float16 or value is torch.bfloat16 else value
