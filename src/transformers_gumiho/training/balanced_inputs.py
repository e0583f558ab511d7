"""An untrained drafter whose inputs count alike: the token that is known, and the state before it."""

import itertools
from typing import Any

import torch
from transformers import Trainer

from ..model.modeling_gumiho import GumihoModel


# Of the training data, what sizes are measured on.
NUM_ROWS = 4
# What `fc` makes of either input, relative to the states. As no norm stands behind the serial head, what is larger
# there drowns what the layers learn to add: 0.5 of the states was as good as not balancing, in the serial head's loss.
SHARE = 0.15


@torch.no_grad()
def balance_inputs(drafter: GumihoModel, input_ids: torch.Tensor, states: torch.Tensor, share: float = SHARE) -> None:
    """
    Scales both parts of an untrained drafter's `fc`, so that what it makes of token embeddings and what it makes of
    states have the same size, `share` of that of the states; sizes are root mean squares.

    Embeddings are often much smaller than last hidden states, a fourteenth of them in SmolLM2-135M. A new drafter then
    hardly sees the token that comes before the one it drafts.

    Args:
        drafter: A drafter without training. Its `fc` is changed in place.
        input_ids (`(N,)`): Tokens of the training data.
        states (`(N, H)`): What `fc` reads next to them.
        share: Of the states' size, that of either part of the output.

    Raises:
        ValueError: There are no tokens, or the drafter makes nothing of their embeddings or of the states.
    """
    weight: Any = drafter.fc.weight
    embeddings, states = drafter.embed_tokens(input_ids.to(weight.device)).to(weight), states.to(weight)
    width = embeddings.shape[-1]
    size = share * _size(states)
    for columns, inputs in ((slice(width), embeddings), (slice(width, None), states)):
        made = _size(inputs @ weight[:, columns].T)
        if not made > 0:  # not-a-number, where there are no tokens
            raise ValueError(
                "Inputs cannot be balanced: the first rows have no answers, or the drafter makes nothing of the "
                "embeddings or of the states there. Train without `balance_inputs`."
            )
        weight[:, columns] *= size / made


@torch.no_grad()
def balance_on_first_rows(trainer: Trainer, drafter: GumihoModel) -> None:
    """Balances the inputs of a trainer's drafter on the answers of its first rows, the same in every process."""
    own: Any = trainer  # of this package, whose module imports this one
    rows: Any = trainer.train_dataset
    if isinstance(rows, torch.utils.data.IterableDataset):
        first = list(itertools.islice(rows, NUM_ROWS))
    else:
        first = [rows[index] for index in range(min(NUM_ROWS, len(rows)))]
    batch: Any = trainer.data_collator(first)
    inputs = {name: values.to(trainer.args.device) for name, values in batch.items()}
    states = own.drafter_input(own.target_features.states(inputs))
    read = drafter.read_target(states.to(drafter.fc.weight))
    counts = inputs["loss_mask"].bool()
    balance_inputs(drafter, inputs["input_ids"][counts], read[counts.to(read.device)])


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.pow(2).mean().sqrt()
