"""Muon for the matrices of a drafter, AdamW for its other parameters."""

from collections.abc import Iterable
from typing import Any

import torch

from ..commands import UserValueError
from .arguments import GumihoTrainingArguments


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Updates matrices with Muon (arXiv 2502.16982) and all other parameters with AdamW, at one learning rate: Muon's
    updates are scaled to the size of AdamW's. The groups of parameters have a `weight_decay` each.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in params:
            for found, is_matrix in ((matrices, True), (others, False)):
                chosen = [parameter for parameter in group["params"] if (parameter.ndim == 2) == is_matrix]
                found.extend([group | {"params": chosen}] if chosen else [])
        self._inner: dict[bool, torch.optim.Optimizer] = {}
        if matrices:
            self._inner[True] = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        if others:
            self._inner[False] = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)
        super().__init__([*matrices, *others], {"lr": lr})
        # The groups of both hold what schedulers change and checkpoints keep.
        for uses_muon, inner in self._inner.items():
            for group in inner.param_groups:
                group["uses_muon"] = uses_muon
        self.param_groups = [group for inner in self._inner.values() for group in inner.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # trainers give no closure
        """Updates all parameters once."""
        for uses_muon, inner in self._inner.items():
            # A checkpoint that was loaded replaced both.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group["uses_muon"] == uses_muon]
            inner.step()


def muon_of(args: GumihoTrainingArguments) -> tuple[type[MuonWithAdamW], dict[str, Any]] | None:
    """
    Returns the optimizer for `muon=True`, as `Trainer` takes it, else `None`. Raises `ValueError` for DeepSpeed, which
    splits the parameters into vectors.
    """
    if not args.muon:
        return None
    if args.deepspeed_plugin is not None:
        raise UserValueError(
            "`muon=True` needs full matrices, and DeepSpeed splits them. Use DDP, FSDP, or `muon=False`."
        )
    betas = (args.adam_beta1, args.adam_beta2)
    return MuonWithAdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
