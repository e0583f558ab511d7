"""The pretend accelerators find the faults that are planted here, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretend_device import MixedDevices, ReadTooEarly, pretending
from torch import nn


ON_HOST = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, other: x + other,
        lambda x, other: x.add_(other),
        lambda x, other: torch.cat((x, other)),
        lambda x, other: torch.where(x > 0, x, other),
        lambda x, other: nn.functional.linear(x, other),
        lambda x, other: other[(x > 0)],
        lambda x, other: torch.stack((x[0, 0], other[0, 0])),
    ],
)
@pytest.mark.parametrize("second", ["cpu", "cuda:1"])
def test_mixed_devices_raise(mix: Callable[..., Any], second: str) -> None:
    with pretending():
        x, other = ON_HOST.to("cuda:0"), ON_HOST.to(second)
        mix(x, x)
        with pytest.raises(MixedDevices, match=rf"tensors on {second}, cuda:0|tensors on cuda:0, {second}"):
            mix(x, other)


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "upload of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "upload of a tensor": lambda x: ON_HOST.to(x.device),
    "upload that only looks asynchronous": lambda x: ON_HOST.to(x.device, non_blocking=True),
    "upload into a tensor": lambda x: x.copy_(ON_HOST),
    "upload into a part": lambda x: x.__setitem__(0, ON_HOST[0]),
    "upload of an index": lambda x: x[[0, 1]],
    "download": lambda x: x.cpu(),
    "download by its device": lambda x: x.to("cpu"),
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "mask": lambda x: x[x > 2],
    "nonzero": lambda x: x.nonzero(),
    "comparison": lambda x: torch.equal(x, x),
    "unknown size": lambda x: x.repeat_interleave(torch.ones_like(x[0], dtype=torch.long), dim=1),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


def test_a_queued_download_is_no_wait_and_read_after_one() -> None:
    with pretending() as machine:
        x = ON_HOST.to("cuda:0") * 2
        machine.waits.clear()
        copy = x.to("cpu", non_blocking=True)
        assert not machine.waits
        assert copy.shape == x.shape
        with pytest.raises(ReadTooEarly, match="tolist"):
            copy.tolist()
        torch.accelerator.synchronize(x.device)
        assert copy.tolist() == (ON_HOST * 2).tolist()


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_waits_are_written_down(wait: Callable[[torch.Tensor], Any]) -> None:
    with pretending() as machine:
        x = torch.ones(2, 3, device="cuda:0")
        assert not machine.waits
        wait(x)
        assert len(machine.waits) == 1
        assert __file__ in machine.waits[0], "the line that waits"


def test_what_does_not_wait_is_not_written_down() -> None:
    with pretending() as machine:
        x = torch.zeros(2, 3, device="cuda")
        x += torch.arange(3, device=x.device) * 2 + torch.tensor(1.0)
        x[:, 1:] = x[:, :2].clone().view(2, 2)
        x[0] = 3.0
        x.index_select(1, x[0].long().clamp(max=2)).to("cuda:1").to(x.device).to(x)
        ON_HOST.pin_memory().to(x.device, non_blocking=True)
        ON_HOST[ON_HOST > 2].tolist()
        assert not machine.waits
