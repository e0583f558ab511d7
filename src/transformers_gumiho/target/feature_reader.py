"""Which of the target's hidden states the drafter reads, and which its predictions are compared with."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .prediction_head import projected_states


# The last states `(B, n, H)` of a pass, and for each layer that was listened to its number and its states.
CapturedPass = tuple[torch.Tensor, tuple[tuple[int, torch.Tensor], ...]]


@dataclass(frozen=True)
class TargetStates:
    """
    What the target tells of each token it read. For most drafters both are one tensor.

    Attributes:
        drafter_input (`(B, T, H_in)`): What the drafter reads: the last states, or those of its `target_layer_ids`
            side by side.
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


def find_layers(target: PreTrainedModel, layer_ids: Sequence[int]) -> dict[int, nn.Module]:
    """
    Returns these layers of a target's decoder, but for its last one, whose state the drafter reads after the norm.

    Raises:
        ValueError: The target has not so many layers, or none that can be found.
    """
    name, num_layers = type(target).__name__, target.config.get_text_config(decoder=True).num_hidden_layers
    if max(layer_ids) >= num_layers:
        raise ValueError(
            f"This Gumiho drafter reads the layers {list(layer_ids)} (`target_layer_ids`), and {name} has "
            f"{num_layers}, 0 to {num_layers - 1}. Use a drafter that was trained for this target."
        )
    lists = [module for module in find_decoder(target).children() if isinstance(module, nn.ModuleList)]
    layers = next((found for found in lists if len(found) == num_layers), None)
    if layers is None:
        raise ValueError(
            f"The {num_layers} layers of {name} were not found in one list of its decoder, so their states cannot be "
            f"read. Use a drafter without `target_layer_ids`."
        )
    return {number: layers[number] for number in layer_ids if number < num_layers - 1}


class FeatureReader:
    """
    Reads the states of a target: of texts that it runs through the decoder, or of passes that somebody else makes.

    Args:
        target: The target.
        layer_ids: The `target_layer_ids` of a drafter that reads several layers. Only these are listened to: no other
            layer's states are kept.

    Raises:
        ValueError: The target does not have these layers.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int] | None = None):
        self.target = target
        self.layer_ids = layer_ids
        self._layers = {} if layer_ids is None else find_layers(target, layer_ids)

    def read(self, input_ids: torch.Tensor, **kwargs: Any) -> TargetStates:
        """
        Runs the decoder, without its output projection and without a cache.

        Args:
            input_ids (`(B, T)`): The texts.
            **kwargs: Further arguments of the decoder.
        """
        if self.layer_ids is None:
            return TargetStates.from_last(projected_states(self.target, self._run(input_ids, **kwargs)))
        with self.listening():
            begin_capture()
            self._run(input_ids, **kwargs)
            return self.collect(end_capture())

    def _run(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return find_decoder(self.target)(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it the states of passes are kept between `begin_capture` and `end_capture`."""
        with ExitStack() as hooks:
            for number, layer in self._layers.items():
                hooks.callback(layer.register_forward_hook(_layer_keeper(number)).remove)
            hooks.callback(find_decoder(self.target).register_forward_hook(keep_states).remove)
            try:
                yield
            finally:
                _passes.states, _passes.layers = None, ()  # of a pass that failed

    def collect(self, captured: Sequence[CapturedPass]) -> TargetStates:
        """
        Returns the states of the tokens of one or several passes in a row (a prompt that is read in chunks).

        Raises:
            RuntimeError: The passes did not go through the decoder as a module.
            ValueError: A layer's states are no vectors of the size of the last ones.
        """
        if not captured:
            raise RuntimeError(
                f"{type(self.target).__name__} did not run its decoder as a module, so its last hidden states could "
                f"not be read. Make its `forward` call the decoder instead of a part of it."
            )
        last = projected_states(self.target, _joined([last for last, _ in captured]))
        if self.layer_ids is None:
            return TargetStates.from_last(last)
        fused = []
        for number in self.layer_ids:
            states = last
            if number in self._layers:
                states = _joined([dict(layers)[number] for _, layers in captured]).to(last.device)
            if states.shape != last.shape:
                raise ValueError(
                    f"Layer {number} of {type(self.target).__name__} returns states of shape {tuple(states.shape)}, "
                    f"and its last states are {tuple(last.shape)}: they cannot be fused. Use a drafter without "
                    f"`target_layer_ids`."
                )
            fused.append(states)
        return TargetStates(torch.cat(fused, dim=-1), last)


def _joined(states: list[torch.Tensor]) -> torch.Tensor:
    return states[0] if len(states) == 1 else torch.cat(states, dim=1)


# Each thread's own: generations in several threads run the same decoder, with the hooks of all of them.
_passes = threading.local()


def begin_capture() -> None:
    """From here on the states of this thread's passes are kept, where a [`FeatureReader`] listens."""
    _passes.states, _passes.layers = (), ()


def end_capture() -> tuple[CapturedPass, ...]:
    """Returns what was kept of each pass, and keeps no more."""
    states: tuple[CapturedPass, ...] = _passes.states
    _passes.states = None
    return states


def keep_states(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook for a decoder. Where several generations have registered it, it still keeps a pass once."""
    states = getattr(_passes, "states", None)
    if states is not None and not any(known is output[0] for known, _ in states):
        _passes.states = (*states, (output[0], _passes.layers))
        _passes.layers = ()


@functools.cache
def _layer_keeper(number: int) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook for the layer of this number: always the same, as compiled functions are told of it."""

    def keep_layer(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(_passes, "states", None) is not None and all(known != number for known, _ in _passes.layers):
            states = output[0] if isinstance(output, tuple) else output
            _passes.layers = (*_passes.layers, (number, states))

    return keep_layer
