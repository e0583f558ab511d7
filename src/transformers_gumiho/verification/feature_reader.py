"""The target's hidden states that the drafter reads, and those that its predictions are compared with."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..internals import without_layer
from ..model.target_shape import TargetLayers
from ..user_errors import UserValueError


# Where the layers before the projection stand beside it in the target: in ELECTRA, and in ModernBERT's decoder.
_BESIDE_THE_PROJECTION = ("generator_predictions", "lm_head")
# The last states `(B, n, H)` of a pass, and the number and states of each hooked layer.
CapturedPass = tuple[torch.Tensor, tuple[tuple[int, torch.Tensor], ...]]


@dataclass(frozen=True)
class TargetStates:
    """
    Target hidden states. For most drafters both are one tensor.

    Attributes:
        drafter_input (`(B, T, H_in)`): What the drafter reads: the last states, or those of its `target_layer_ids`
            side by side.
        last (`(B, T, H)`): What the output projection reads, mostly after the final norm. The drafter's predictions
            are compared with these.
    """

    drafter_input: torch.Tensor
    last: torch.Tensor

    @classmethod
    def from_last(cls, last: torch.Tensor) -> "TargetStates":
        """Returns the states for a drafter that reads the last ones `(B, T, H)`."""
        return cls(drafter_input=last, last=last)

    def newest(self, num_tokens: int) -> "TargetStates":
        """Returns the states of the last `num_tokens` tokens."""
        start = self.last.shape[1] - num_tokens
        return self._map(lambda states: states[:, start:])

    def to(self, device: torch.device) -> "TargetStates":
        """Returns the states on `device`."""
        return self._map(lambda states: states.to(device))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TargetStates":
        last = function(self.last)
        return TargetStates(last if self.drafter_input is self.last else function(self.drafter_input), last)


def projected_states(target: PreTrainedModel, last_hidden_states: torch.Tensor) -> Any:
    """
    Returns the input `(..., H)` of the target's output projection. After the decoder of BERT, RoBERTa and ELECTRA
    comes a dense layer with a norm, which may change the width. It runs here, so that the projection alone turns
    states, and a drafter's features, into logits. `last_hidden_states` `(B, T, ...)` are what the decoder returns.
    """
    projection = target.get_output_embeddings()
    parent = next((module for module in target.modules() if any(m is projection for m in module.children())), target)
    if not isinstance(parent, PreTrainedModel):
        # The `forward` of its class: one that was put on the object would run all of the head.
        states = type(parent).forward(without_layer(parent, projection), last_hidden_states)
        return states[0] if isinstance(states, tuple) else states  # XLM's head returns a tuple
    for name in _BESIDE_THE_PROJECTION:
        beside = getattr(parent, name, None)
        if isinstance(beside, nn.Module) and beside is not projection:
            return beside(last_hidden_states)
    return last_hidden_states


def find_decoder(target: PreTrainedModel) -> nn.Module:
    """
    Returns the module that ends with the final norm. `get_decoder` returns the target itself where its class names a
    module that it lacks (Llama 4 without images), and the output head where that is called "decoder" (ModernBERT);
    then it is the target's only submodel.
    """
    decoder = target.get_decoder()
    submodels = [module for module in target.children() if isinstance(module, PreTrainedModel)]
    is_other = decoder is target or decoder is target.get_output_embeddings()
    return submodels[0] if is_other and len(submodels) == 1 else decoder


def find_layers(target: PreTrainedModel, layers: TargetLayers) -> dict[int, nn.Module]:
    """
    Returns these layers of a target's decoder by number. The last layer is left out if its state is read after the
    final norm.

    Raises:
        ValueError: The target lacks these layers, or they cannot be found.
    """
    name, num_layers = type(target).__name__, target.config.get_text_config(decoder=True).num_hidden_layers
    if max(layers.ids) >= num_layers:
        raise UserValueError(
            f"This Gumiho drafter reads the layers {list(layers.ids)} (`target_layer_ids`), and {name} has "
            f"{num_layers}, 0 to {num_layers - 1}. Use a drafter that was trained for this target."
        )
    lists = [module for module in find_decoder(target).children() if isinstance(module, nn.ModuleList)]
    modules = next((found for found in lists if len(found) == num_layers), None)
    if modules is None:
        raise UserValueError(
            f"The {num_layers} layers of {name} were not found in one list of its decoder, so their states cannot be "
            f"read. Use a drafter without `target_layer_ids`."
        )
    num_hooked = num_layers - 1 if layers.is_last_normed else num_layers
    return {number: modules[number] for number in layers.ids if number < num_hooked}


class FeatureReader:
    """
    Reads the states of a target: of texts that it runs through the decoder, or of passes that others make. Only the
    layers that a drafter reads get hooks.

    Raises:
        ValueError: The target does not have these layers.
    """

    def __init__(self, target: PreTrainedModel, layers: TargetLayers | None = None):
        self.target = target
        self.layers = layers
        self._modules = {} if layers is None else find_layers(target, layers)

    def read(self, input_ids: torch.Tensor, **kwargs: Any) -> TargetStates:
        """
        Runs the decoder on `input_ids` `(B, T)` and further arguments, without output projection and cache.
        """
        if self.layers is None:
            return TargetStates.from_last(projected_states(self.target, self._run(input_ids, **kwargs)))
        with self.listening():
            begin_capture()
            self._run(input_ids, **kwargs)
            return self.collect(end_capture())

    def _run(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return find_decoder(self.target)(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Returns a context in which passes between `begin_capture` and `end_capture` are recorded."""
        with ExitStack() as hooks:
            for number, layer in self._modules.items():
                hooks.callback(layer.register_forward_hook(_layer_keeper(number)).remove)
            hooks.callback(find_decoder(self.target).register_forward_hook(keep_states).remove)
            try:
                yield
            finally:
                _passes.states, _passes.layers = None, ()  # of a pass that failed

    def collect(self, captured: Sequence[CapturedPass]) -> TargetStates:
        """
        Returns the states of one or several consecutive passes (a prompt that is read in chunks).

        Raises:
            RuntimeError: The passes did not go through the decoder as a module.
            ValueError: A layer's states have another shape than the last ones.
        """
        if not captured:
            raise RuntimeError(
                f"{type(self.target).__name__} did not run its decoder as a module, so its last hidden states could "
                f"not be read. Make its `forward` call the decoder instead of a part of it."
            )
        last = projected_states(self.target, _joined([last for last, _ in captured]))
        if self.layers is None:
            return TargetStates.from_last(last)
        fused = []
        for number in self.layers.ids:
            states = last
            if number in self._modules:
                states = _joined([dict(layers)[number] for _, layers in captured]).to(last.device)
            if states.shape != last.shape:
                raise UserValueError(
                    f"Layer {number} of {type(self.target).__name__} returns states of shape {tuple(states.shape)}, "
                    f"which cannot be fused with its last states {tuple(last.shape)}. Use a drafter without "
                    f"`target_layer_ids`."
                )
            fused.append(states)
        return TargetStates(torch.cat(fused, dim=-1), last)


def _joined(states: list[torch.Tensor]) -> torch.Tensor:
    return states[0] if len(states) == 1 else torch.cat(states, dim=1)


# Each thread's own: generations in several threads run the same decoder, with the hooks of all of them.
_passes = threading.local()


def begin_capture() -> None:
    """Starts recording the states of this thread's passes, where a [`FeatureReader`] has set hooks."""
    _passes.states, _passes.layers = (), ()


def end_capture() -> tuple[CapturedPass, ...]:
    """Stops recording; returns the states of each pass."""
    states: tuple[CapturedPass, ...] = _passes.states
    _passes.states = None
    return states


def keep_states(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook for a decoder. It records a pass once, however many generations have registered it."""
    states = getattr(_passes, "states", None)
    if states is not None and not any(known is output[0] for known, _ in states):
        _passes.states = (*states, (output[0], _passes.layers))
        _passes.layers = ()


@functools.cache
def _layer_keeper(number: int) -> Callable[[nn.Module, Any, Any], None]:
    """Returns the forward hook for the layer of this number: one object, as compiled functions guard on it."""

    def keep_layer(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(_passes, "states", None) is not None and all(known != number for known, _ in _passes.layers):
            states = output[0] if isinstance(output, tuple) else output
            _passes.layers = (*_passes.layers, (number, states))

    return keep_layer
