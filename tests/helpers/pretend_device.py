"""
A pretend accelerator, to test on a CPU what a program asks of a real one.

    with pretending() as machine:
        target.to("cuda:0")
        target.generate(...)
    print(machine.waits)

Tensors stay ordinary CPU tensors. Which device they pretend to be on is noted on their storage, which views share.
[`PretendMachine`] sees every call of a PyTorch function, and answers as a machine with "cuda:0", "cuda:1" and "mps"
would: it raises [`MixedDevices`], refuses float64 on "mps" and what no device computes in deterministic mode, and
writes down where the host waits for a device.

It does not see what PyTorch calls within one of its own functions, nor the backward pass. Kernels, numbers and memory
are those of the CPU, and all devices share its random generator.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import transformers_gumiho


CPU = torch.device("cpu")
_NOTE = "_pretended_device"
_PINNED = "_is_pretended_to_be_pinned"
_COPIED_AT = "_pretended_waits_before_its_copy"
_PACKAGE = str(Path(transformers_gumiho.__file__).parent)
# What reads a tensor's numbers, or must know how many there are before it goes on.
_WAITING = {
    "__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere", "bincount",
    "equal", "item", "masked_select", "nonzero", "numpy", "tolist", "unique", "unique_consecutive",
}  # fmt: skip
_COPYING = {"__setitem__", "as_tensor", "asarray", "copy_", "cpu", "cuda", "new_tensor", "tensor", "to"}
# Several devices are no fault here.
_ACROSS_DEVICES = _COPYING | {"_has_compatible_shallow_copy_type", "__set__"}
# Elsewhere a CPU tensor without dimensions stands for a number.
_STRICT = {"cat", "embedding", "gather", "index_copy_", "index_select", "linear", "matmul", "scatter", "stack"}


class MixedDevices(RuntimeError):
    """An operation on tensors of two devices."""


class ReadTooEarly(RuntimeError):
    """A copy to the host that was only queued is read, and the host has not waited for the device since."""


class PretendMachine(TorchFunctionMode):
    """
    A machine with pretend accelerators.

    Attributes:
        waits: For each time the host waited for a device: the function, and the line of the package that called it.
        largest: The numbers of the largest tensor for which an accelerator has memory.
    """

    def __init__(self, largest: float = float("inf")) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = largest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__.__name__ in ("device", "is_cuda", "is_cpu", "is_mps"):
            return _answer(func.__self__.__name__, device_of(args[0]))
        if name in ("device", "_parse_to"):  # what names a device only
            return func(*args, **kwargs)
        if name == "pin_memory":
            pinned = args[0].clone()
            setattr(pinned.untyped_storage(), _PINNED, True)
            return pinned
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if name not in ("__get__", "size", "dim", "__len__"):
            for tensor in tensors:
                if getattr(tensor.untyped_storage(), _COPIED_AT, None) == len(self.waits):
                    raise ReadTooEarly(f"{name} in {_calling_line()}")
        if name == "cumsum" and torch.are_deterministic_algorithms_enabled() and tensors[0].is_floating_point():
            assert device_of(tensors[0]) == CPU, f"cumsum has no deterministic implementation ({_calling_line()})"
        source = CPU if name == "__set__" else _common_device(name, args, tensors)
        target = _asked_device(name, args, kwargs) or source
        self._note_waits(name, args, kwargs, source, target)
        result = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if (
            target != source
            and tensors
            and result.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()
        ):
            result = result.clone()
        if target.type == "cpu":
            if name == "to" and source.type != "cpu" and kwargs.get("non_blocking"):
                setattr(result.untyped_storage(), _COPIED_AT, len(self.waits))
            return result
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and device_of(value) == CPU:
                if value.numel() > self.largest:
                    raise torch.OutOfMemoryError(f"{value.numel()} numbers in {_calling_line()}")
                setattr(value.untyped_storage(), _NOTE, target)
                if target.type == "mps" and value.dtype == torch.float64:
                    raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({name} in {_calling_line()})")
        return result

    def note_wait(self, what: str) -> None:
        """Writes down that the host waits here."""
        self.waits.append(f"{what} in {_calling_line()}")

    def _note_waits(self, name: str, args: Any, kwargs: Any, source: torch.device, target: torch.device) -> None:
        if name in _COPYING:
            if name in ("copy_", "__setitem__"):
                source = device_of(args[-1]) if isinstance(args[-1], torch.Tensor) else target
            elif name == "new_tensor" or not isinstance(args[0], torch.Tensor):
                source = CPU
            # Between two accelerators, from pinned memory, and to memory that PyTorch pins for it, a copy waits in
            # the stream alone.
            is_upload = source.type == "cpu" and target.type != "cpu"
            is_asynchronous = kwargs.get("non_blocking") and (_is_pinned(args) if is_upload else name == "to")
            if source != target and CPU in (source, target) and not is_asynchronous:
                self.note_wait(f"{name} ({'upload' if is_upload else 'download'})")
        elif source.type != "cpu" and (name in _WAITING or _has_unknown_size(name, kwargs)):
            self.note_wait(name)
        if target.type != "cpu" and name in ("__getitem__", "__setitem__") and _reads_index(args[1]):
            self.note_wait(f"{name} (index)")


def device_of(tensor: torch.Tensor) -> torch.device:
    """Returns the device that a tensor pretends to be on."""
    return getattr(tensor.untyped_storage(), _NOTE, CPU) if tensor.device.type == "cpu" else tensor.device


def _answer(question: str, device: torch.device) -> Any:
    return device if question == "device" else device.type == question.removeprefix("is_")


def _common_device(name: str, args: Any, tensors: list[torch.Tensor]) -> torch.device:
    """Returns the device of all tensors; numbers, and indices, may be on the CPU."""
    if name == "__getitem__":
        tensors = [tensors[0], *(tensor for tensor in tensors[1:] if device_of(tensor) != CPU)]
    devices = [device_of(tensor) for tensor in tensors]
    if name not in _ACROSS_DEVICES:
        counted = {
            device
            for tensor, device in zip(tensors, devices, strict=True)
            if tensor.ndim > 0 or device != CPU or name in _STRICT
        }
        if len(counted) > 1:
            raise MixedDevices(f"{name} got tensors on {', '.join(sorted(map(str, counted)))} in {_calling_line()}")
    if name in _COPYING:
        return devices[0] if devices else CPU
    return next((device for device in devices if device != CPU), CPU)


def _asked_device(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """Returns the device that a call names for its result."""
    if name in ("cpu", "cuda"):
        return _normal(name)
    given = [kwargs.get("device")]
    if name == "to":
        given += [kwargs.get("other"), *args[1:]]
    for value in given:
        if isinstance(value, torch.Tensor):
            return device_of(value)
        if isinstance(value, (str, torch.device)):
            return _normal(value)
    return None


def _normal(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda:0") if device.type == "cuda" and device.index is None else device


def _on_host(value: Any) -> Any:
    """Returns an argument as the CPU gets it."""
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cuda", "mps"))
    return CPU if is_device and torch.device(value).type != "meta" else value


def _is_pinned(args: Any) -> bool:
    return any(isinstance(arg, torch.Tensor) and hasattr(arg.untyped_storage(), _PINNED) for arg in args)


def _has_unknown_size(name: str, kwargs: Any) -> bool:
    return name == "repeat_interleave" and "output_size" not in kwargs


def _reads_index(index: Any) -> bool:
    """Whether an index is a mask, which is counted, or comes from the host, which is uploaded."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list) or (
            isinstance(part, torch.Tensor) and part.ndim > 0 and (part.dtype == torch.bool or device_of(part) == CPU)
        ):
            return True
    return False


def _calling_line() -> str:
    frame: Any = inspect.currentframe()
    names = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            return f"{name.removeprefix(_PACKAGE + '/')}:{frame.f_lineno}"
        if name != __file__ and "/torch/" not in name:
            names.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return names[0]


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")


class _Event:
    """An event of a device, for a stream of that device."""

    def __init__(self, device: Any, machine: PretendMachine):
        self._device, self._machine = _normal(device), machine

    def record(self, stream: torch.device | None = None) -> None:
        if (stream or _normal("cuda")) != self._device:
            raise MixedDevices(f"an event on {self._device} got a stream on {stream} in {_calling_line()}")

    def synchronize(self) -> None:
        self._machine.note_wait(f"synchronize with {self._device}")


@contextmanager
def pretending(largest: float = float("inf")) -> Iterator[PretendMachine]:
    """Within it this thread has pretend accelerators, each with memory for tensors of at most `largest` numbers."""
    machine = PretendMachine(largest)
    with (
        patch.object(torch, "Generator", _Generator),
        patch.object(torch, "Event", partial(_Event, machine=machine)),
        patch.object(torch.accelerator, "current_stream", _normal),
        patch.multiple(
            torch.cuda,
            get_rng_state=lambda device: torch.get_rng_state(),
            set_rng_state=lambda state, device: torch.set_rng_state(state),
            get_device_name=lambda device: "pretend",
            max_memory_allocated=lambda device: 2e9,
            reset_peak_memory_stats=lambda device: None,
            synchronize=lambda *_: machine.note_wait("synchronize"),
        ),
        patch.object(torch.accelerator, "synchronize", lambda *_: machine.note_wait("synchronize")),
        machine,
    ):
        yield machine
