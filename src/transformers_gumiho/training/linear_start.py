"""An untrained drafter that begins as the best linear guess of the target's next state."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer

from ..model.modeling_gumiho import GumihoModel
from .target_features import why_not_finite


# Of the training data, what the guess is fitted on. On SmolLM2-135M-Instruct 48,000 tokens were as good as 750,000:
# the target's own choice was guessed for 32.1% of unseen tokens, and for 32.5%.
NUM_TOKENS = 50_000
# Of what each input has on the diagonal, as embeddings may be hundreds of times smaller than states: enough for inputs
# that depend on each other.
RIDGE = 1e-4
# Next to the mean of the diagonal, for inputs that are always zero.
_LEAST = 1e-12
_MAX_ROWS_PER_READING = 8


class LinearFit:
    """
    The least squares fit of outputs to inputs, with a constant, from batches of both.

    Args:
        num_inputs: `D`.
        num_outputs: `H`.
        device: Of the sums, which are in float64 where the device has it.
    """

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._squares = torch.zeros(num_inputs + 1, num_inputs + 1, device=device, dtype=dtype)
        self._products = torch.zeros(num_inputs + 1, num_outputs, device=device, dtype=dtype)
        self.count = 0

    def add(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Adds inputs `(N, D)` and the outputs `(N, H)` that belong to them."""
        inputs = torch.cat((inputs.float(), torch.ones_like(inputs[:, :1], dtype=torch.float32)), dim=1)
        self._squares += inputs.T @ inputs
        self._products += inputs.T @ outputs.float()
        self.count += len(inputs)

    def solve(self, constant: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weight `(H, D)` and the bias `(H,)`, which is zero without a `constant`."""
        size = len(self._squares) - (not constant)
        squares = self._squares[:size, :size].clone()
        diagonal = squares.diagonal()
        diagonal += RIDGE * diagonal + _LEAST * diagonal.mean()
        solution = torch.linalg.solve(squares, self._products[:size]).T.float()
        if not constant:
            return solution, solution.new_zeros(len(solution))
        return solution[:, :-1], solution[:, -1]


@torch.no_grad()
def start_linearly(trainer: Trainer, drafter: GumihoModel) -> None:
    """
    Makes the serial head of an untrained drafter the linear map that guesses the target's next state best, from the
    token before it and the state before that: `fc` is the least squares fit to the first answers of the training data,
    and what the layers add to it begins at zero. The same in every process.

    A drafter whose weights are random first has to learn how large its inputs and outputs are: embeddings are often
    much smaller than states, and no norm stands at either end of the serial head.

    Raises:
        ValueError: The first rows have no answers, or the target's states are not finite.
    """
    weight: Any = drafter.fc.weight
    fit = LinearFit(weight.shape[1], weight.shape[0], weight.device)
    for inputs, states in _first_answers(trainer, drafter):
        fit.add(inputs, states)
        if fit.count >= NUM_TOKENS:
            break
    if not fit.count:
        raise ValueError("There are no answers to begin with in the first rows. Train without `linear_start`.")
    new_weight, new_bias = fit.solve(drafter.fc.bias is not None)
    weight.copy_(new_weight)
    if drafter.fc.bias is not None:
        drafter.fc.bias.copy_(new_bias)
    layers: Any = drafter.layers
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _first_answers(trainer: Trainer, drafter: GumihoModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields what `fc` reads `(N, E + H)` and the states `(N, H)` it should make of it, over some rows at a time."""
    own: Any = trainer  # of this package, whose module imports this one
    for rows in _first_rows(trainer.train_dataset, min(trainer.args.train_batch_size, _MAX_ROWS_PER_READING)):
        batch: Any = trainer.data_collator(rows)
        batch = {name: values.to(trainer.args.device) for name, values in batch.items()}
        states = own.target_features.states(batch)
        if not torch.isfinite(states.last).all():
            raise ValueError(why_not_finite(states.last.dtype))
        read = drafter.read_target(own.drafter_input(states).to(drafter.fc.weight))
        counts = batch["loss_mask"][:, 1:].bool()
        if "position_ids" in batch:  # a text's first token has no state before it
            counts &= batch["position_ids"][:, 1:] > 0
        embeddings = drafter.embed_tokens(batch["input_ids"][:, 1:][counts].to(read.device))
        counts = counts.to(read.device)
        yield torch.cat((embeddings.to(read), read[:, :-1][counts]), dim=-1), states.last.to(read)[:, 1:][counts]


def _first_rows(dataset: Any, at_a_time: int) -> Iterator[list[Any]]:
    streams = isinstance(dataset, torch.utils.data.IterableDataset)
    rows = iter(dataset) if streams else (dataset[index] for index in range(len(dataset)))
    # No more rows than tokens are needed: where few have answers, this ends, too.
    rows = itertools.islice(rows, NUM_TOKENS)
    while some := list(itertools.islice(rows, at_a_time)):
        yield some
