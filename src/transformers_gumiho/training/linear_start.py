"""An untrained drafter that begins as the best linear guess of the target's next state."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer

from ..commands import UserValueError
from ..model.modeling_gumiho import GumihoModel
from .data.target_runs import why_not_finite


# Tokens that the guess is fitted on. On SmolLM2-135M-Instruct 48,000 were as good as 750,000: the target's own choice
# was guessed for 32.1% of unseen tokens, and for 32.5%.
NUM_TOKENS = 50_000
# Relative to each input's diagonal entry, as embeddings may be hundreds of times smaller than states.
RIDGE = 1e-4
# Next to the mean of the diagonal, for inputs that are always zero.
_MIN_RIDGE = 1e-12


class LinearFit:
    """The least squares fit of `H` outputs to `D` inputs, from batches of both, in float64 where the device has it."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._squares = torch.zeros(num_inputs, num_inputs, device=device, dtype=dtype)
        self._products = torch.zeros(num_inputs, num_outputs, device=device, dtype=dtype)
        self.count = 0

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds inputs `(N, D)` and the outputs `(N, H)` that belong to them, in float32."""
        self._squares += inputs.T @ inputs
        self._products += inputs.T @ outputs
        self.count += len(inputs)

    def solve(self) -> torch.Tensor:
        """Returns the weight `(H, D)`."""
        squares = self._squares.clone()
        diagonal = squares.diagonal()
        diagonal += RIDGE * diagonal + _MIN_RIDGE * diagonal.mean()
        return torch.linalg.solve(squares, self._products).T.float()


@torch.no_grad()
def start_linearly(trainer: Trainer, drafter: GumihoModel) -> None:
    """
    Makes the serial head of an untrained drafter the linear map that best guesses the target's next state from the
    token before it and the state before that: `fc` is the least squares fit to the first answers of the training data,
    and what the layers add begins at zero. (Random weights first have to learn the scale of embeddings and states.)

    Raises:
        ValueError: The first rows have no answers, or the target's states are not finite.
    """
    weight, bias = drafter.fc.weight, drafter.fc.bias
    fit = LinearFit(weight.shape[1] + (bias is not None), weight.shape[0], weight.device)
    for inputs, states in _first_answers(trainer, drafter):
        ones = inputs.new_ones(len(inputs), 0 if bias is None else 1)
        fit.add(torch.cat((inputs, ones), dim=1).float(), states.float())
        if fit.count >= NUM_TOKENS:
            break
    if not fit.count:
        raise UserValueError("There are no answers to begin with in the first rows. Train without `linear_start`.")
    solution = fit.solve()
    weight.copy_(solution[:, : weight.shape[1]])
    if bias is not None:
        bias.copy_(solution[:, -1])
    layers: Any = drafter.serial_layers
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _first_answers(trainer: Any, drafter: GumihoModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields what `fc` reads `(N, E + H)` and the states `(N, H)` it should make of it, row by row."""
    dataset = trainer.train_dataset
    if not isinstance(dataset, torch.utils.data.IterableDataset):
        dataset = map(dataset.__getitem__, range(len(dataset)))
    # No more rows than tokens are needed: where few have answers, this ends, too.
    for row in itertools.islice(dataset, NUM_TOKENS):
        batch = {name: values.to(trainer.args.device) for name, values in trainer.data_collator([row]).items()}
        states = trainer.target_features.states(batch)
        if not torch.isfinite(states.last).all():
            raise UserValueError(why_not_finite(states.last.dtype))
        read = drafter.read_target(trainer.drafter_input(states).to(drafter.fc.weight))
        counts = batch["loss_mask"][:, 1:].bool()
        if "position_ids" in batch:  # a text's first token has no state before it
            counts &= batch["position_ids"][:, 1:] > 0
        embeddings = drafter.embed_tokens(batch["input_ids"][:, 1:][counts].to(read.device))
        counts = counts.to(read.device)
        inputs = torch.cat((embeddings.to(read), read[:, :-1][counts]), dim=-1)
        yield inputs, states.last.to(read)[:, 1:][counts]
