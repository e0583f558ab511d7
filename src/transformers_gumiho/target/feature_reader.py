"""Which of the target's hidden states the drafter reads, and which its predictions are compared with."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .prediction_head import projected_states


@dataclass(frozen=True)
class TargetStates:
    """
    What the target tells of each token it read. Today both are one tensor.

    Attributes:
        drafter_input (`(B, T, H_in)`): What the drafter reads.
        last (`(B, T, H)`): What the output projection reads, mostly behind the final norm, and what predictions are
            compared with.
    """

    drafter_input: torch.Tensor
    last: torch.Tensor

    @classmethod
    def from_last(cls, last: torch.Tensor) -> "TargetStates":
        """Returns the states for a drafter that reads the last ones `(B, T, H)`."""
        return cls(drafter_input=last, last=last)

    def newest(self, num_tokens: int) -> "TargetStates":
        """Returns the states of the last `num_tokens` tokens."""
        last = self.last[:, self.last.shape[1] - num_tokens :]
        is_one = self.drafter_input is self.last
        return TargetStates(last if is_one else self.drafter_input[:, self.last.shape[1] - num_tokens :], last)

    def to(self, device: torch.device) -> "TargetStates":
        """Returns the states on `device`."""
        last = self.last.to(device)
        is_one = self.drafter_input is self.last
        return TargetStates(last if is_one else self.drafter_input.to(device), last)


def find_decoder(target: PreTrainedModel) -> nn.Module:
    """
    Returns the module that ends with the final norm. `get_decoder` returns the whole target where its class names
    another module than it has (Llama 4 without images), and the output head where that is called so (ModernBERT's
    decoder); then its only submodel is the one.
    """
    decoder = target.get_decoder()
    submodels = [module for module in target.children() if isinstance(module, PreTrainedModel)]
    is_other = decoder is target or decoder is target.get_output_embeddings()
    return submodels[0] if is_other and len(submodels) == 1 else decoder


class FeatureReader:
    """
    Reads the states of a target: of texts that it runs through the decoder, or of passes that somebody else makes.

    Args:
        target: The target.
    """

    def __init__(self, target: PreTrainedModel):
        self.target = target

    def read(self, input_ids: torch.Tensor, **kwargs: Any) -> TargetStates:
        """
        Runs the decoder, without its output projection and without a cache.

        Args:
            input_ids (`(B, T)`): The texts.
            **kwargs: Further arguments of the decoder.
        """
        states = find_decoder(self.target)(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
        return TargetStates.from_last(projected_states(self.target, states))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the states of passes are kept between `begin_capture` and `end_capture`."""
        handle = find_decoder(self.target).register_forward_hook(keep_states)
        try:
            yield
        finally:
            handle.remove()
            _passes.states = None  # of a pass that failed

    def collect(self, captured: Sequence[torch.Tensor]) -> TargetStates:
        """
        Returns the states of the tokens of one or several passes in a row (a prompt that is read in chunks).

        Raises:
            RuntimeError: The passes did not go through the decoder as a module.
        """
        if not captured:
            raise RuntimeError(
                f"{type(self.target).__name__} did not run its decoder as a module, so its last hidden states could "
                f"not be read. If its forward pass is compiled, pass the model that is not."
            )
        states = captured[0] if len(captured) == 1 else torch.cat(tuple(captured), dim=1)
        return TargetStates.from_last(projected_states(self.target, states))


# Each thread's own: generations in several threads run the same decoder, with the hooks of all of them.
_passes = threading.local()


def begin_capture() -> None:
    """From here on the states of this thread's passes are kept, where a [`FeatureReader`] listens."""
    _passes.states = ()


def end_capture() -> tuple[torch.Tensor, ...]:
    """Returns what was kept, one tensor `(B, n, H)` for each pass, and keeps no more."""
    states: tuple[torch.Tensor, ...] = _passes.states
    _passes.states = None
    return states


def keep_states(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook for a decoder. Where several generations have registered it, it still keeps a pass once."""
    states = getattr(_passes, "states", None)
    if states is not None and not any(known is output[0] for known in states):
        _passes.states = (*states, output[0])
