"""Matrices are trained with Muon, all other parameters with AdamW."""

from pathlib import Path

import pytest
import torch
from trainers import make_args

from transformers_gumiho.training.muon import MuonWithAdamW, muon_of


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this release of PyTorch has no Muon")
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


def make_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (6,), (5, 3), (2, 3, 4)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_each_parameter_is_updated_as_by_its_own_optimizer() -> None:
    ours, theirs = make_parameters(), make_parameters()
    groups = [{"params": ours[:2], "weight_decay": 0.1}, {"params": ours[2:], "weight_decay": 0.0}]
    both = MuonWithAdamW(groups, lr=0.01, **ADAMW)
    schedule = torch.optim.lr_scheduler.StepLR(both, step_size=1, gamma=0.5)
    alone = [
        torch.optim.Muon([theirs[0]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon([theirs[2]], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs[1]], lr=0.01, weight_decay=0.1, **ADAMW),
        torch.optim.AdamW([theirs[3]], lr=0.01, weight_decay=0.0, **ADAMW),
    ]
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        both.step()
        schedule.step()
        for optimizer in alone:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kept", [slice(0, 3, 2), slice(1, 2)])
def test_there_may_be_matrices_alone_or_none(kept: slice) -> None:
    parameters = make_parameters()[kept]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = MuonWithAdamW([{"params": parameters, "weight_decay": 0.0}], lr=0.01, **ADAMW)
    set_gradients(parameters, 0)
    optimizer.step()
    assert all((old != new).all() for old, new in zip(before, parameters, strict=True))


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    args = make_args(tmp_path, muon=True)
    args.deepspeed_plugin = object()
    with pytest.raises(ValueError, match=r"DeepSpeed splits them\. Use DDP, FSDP, or `muon=False`"):
        muon_of(args)
