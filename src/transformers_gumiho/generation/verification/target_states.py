"""The target's hidden states that the drafter reads, and the output head: logits of states and features."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel

from ...commands import UserValueError
from ...internals import runs_as_defined, without_layer
from ...model.modeling_gumiho import GumihoModel
from ...model.target_shape import TargetLayers
from .target_memory import memory_of


# Where the layers before the projection stand beside it in the target: in ELECTRA, and in ModernBERT's decoder.
_BESIDE_THE_PROJECTION = ("generator_predictions", "lm_head")
# The last states `(B, n, H)` of a pass, and the number and states of each hooked layer.
CapturedPass = tuple[torch.Tensor, tuple[tuple[int, torch.Tensor], ...]]
ReadTarget = Callable[[torch.Tensor], torch.Tensor]
# In place of the number of a layer: what the drafter made of all layers.
_READ = -1


@dataclass(frozen=True)
class TargetStates:
    """
    Target hidden states. For most drafters both are one tensor.

    Attributes:
        target_states (`(B, T, H_in)`): What the drafter reads: the last states, or those of its `target_layer_ids`
            side by side.
        last (`(B, T, H)`): What the output projection reads, mostly after the final norm. The drafter's predictions
            are compared with these.
        are_read: Whether `target_states` are what the drafter made of them pass by pass, `(B, T, H)`.
    """

    target_states: torch.Tensor
    last: torch.Tensor
    are_read: bool = False

    @classmethod
    def from_last(cls, last: torch.Tensor) -> "TargetStates":
        """Returns the states for a drafter that reads the last ones `(B, T, H)`."""
        return cls(target_states=last, last=last)

    def newest(self, num_tokens: int) -> "TargetStates":
        """Returns the states of the last `num_tokens` tokens."""
        start = self.last.shape[1] - num_tokens
        return self.map(lambda states: states[:, start:])

    def to(self, device: torch.device) -> "TargetStates":
        """Returns the states on `device`."""
        return self.map(lambda states: states.to(device))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TargetStates":
        """Returns what a function makes of both, called once where they are one tensor."""
        last = function(self.last)
        return TargetStates(last if self.target_states is self.last else function(self.target_states), last)


def projected_states(target: PreTrainedModel, last_hidden_states: torch.Tensor) -> Any:
    """
    Returns the input `(..., H)` of the target's output projection, which alone turns it, or a drafter's features, into
    logits. `last_hidden_states` `(B, T, ...)` are what the decoder returns.
    """
    # After the decoder of BERT, RoBERTa and ELECTRA comes a dense layer with a norm, which may change the width.
    projection = target.get_output_embeddings()
    parents = (module for module in target.modules() if any(child is projection for child in module.children()))
    parent = next(parents, target)
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
    """Returns the module that ends with the final norm."""
    # `get_decoder` returns the target itself where its class names a module that it lacks (Llama 4 without images),
    # and the output head where that is called "decoder" (ModernBERT). Then it is the target's only submodel.
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
            f"{num_layers}, 0 to {num_layers - 1}. Name layers that it has, or use a drafter that was trained for it."
        )
    lists = [module for module in find_decoder(target).children() if isinstance(module, nn.ModuleList)]
    modules = next((found for found in lists if len(found) == num_layers), None)
    if modules is None:
        raise UserValueError(
            f"The {num_layers} layers of {name} were not found in one list of its decoder, so their states cannot be "
            f"read. Use a drafter without `target_layer_ids`."
        )
    return {number: modules[number] for number in layers.besides_last_states(target.config)}


class FeatureReader:
    """
    Reads the states of a target, of texts that it runs through the decoder, or of passes that others make. Only the
    layers that a drafter reads get hooks. `read_target` is the drafter's, where it reads a prompt on its own.
    """

    def __init__(
        self, target: PreTrainedModel, layers: TargetLayers | None = None, read_target: ReadTarget | None = None
    ):
        self.target = target
        self.layers = layers
        self.read_target = read_target
        self._modules = {} if layers is None else find_layers(target, layers)

    def read(self, input_ids: torch.Tensor, **kwargs: Any) -> TargetStates:
        """Runs the decoder on `input_ids` `(B, T)` and further arguments, without output projection and cache."""
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
                _capture.states, _capture.layers = None, ()  # of a pass that failed

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
        if all(_READ in dict(layers) for _, layers in captured):
            return TargetStates(_joined([dict(layers)[_READ] for _, layers in captured]), last, are_read=True)
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

    def read_pass(self, captured: CapturedPass) -> CapturedPass:
        """Replaces the states of all layers by what the drafter makes of them, so that a long prompt holds fewer."""
        states = self.collect([captured])
        made = states.target_states if self.read_target is None else self.read_target(states.target_states)
        return captured[0], ((_READ, made),)


def _joined(states: list[torch.Tensor]) -> torch.Tensor:
    return states[0] if len(states) == 1 else torch.cat(states, dim=1)


# Each thread's own: generations in several threads run the same decoder, with the hooks of all of them.
_capture = threading.local()


def begin_capture(read_pass: Callable[[CapturedPass], CapturedPass] | None = None) -> None:
    """
    Starts recording the states of this thread's passes, where a [`FeatureReader`] has set hooks, or what `read_pass`
    makes of them.
    """
    _capture.states, _capture.layers, _capture.read = (), (), read_pass


def end_capture() -> tuple[CapturedPass, ...]:
    """Stops recording; returns the states of each pass."""
    states: tuple[CapturedPass, ...] = _capture.states
    _capture.states = None
    return states


def keep_states(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook for a decoder. It records a pass once, however many generations have registered it."""
    states = getattr(_capture, "states", None)
    if states is not None and not any(known is output[0] for known, _ in states):
        captured = output[0], _capture.layers
        _capture.layers = ()
        _capture.states = (*states, captured if _capture.read is None else _capture.read(captured))


@functools.cache
def _layer_keeper(number: int) -> Callable[[nn.Module, Any, Any], None]:
    """Returns the forward hook for the layer of this number: one object, as compiled functions guard on it."""

    def keep_layer(module: nn.Module, args: Any, output: Any) -> None:
        if getattr(_capture, "states", None) is None:
            return
        if all(known != number for known, _ in _capture.layers):
            states = output[0] if isinstance(output, tuple) else output
            _capture.layers = (*_capture.layers, (number, states))

    return keep_layer


class OutputHead:
    """
    The function from states `(..., H)`, as a [`FeatureReader`] returns them, to logits `(..., V)`, or to those `(...,
    K)` of `token_ids` `(K,)` alone, by the output projection `module`.

    A plain linear head is cut to the rows of these tokens: a copy of the weights, which is kept while they stay the
    same. Of any other head (quantized, offloaded, with an adapter or a hook) the logits are cut, which saves nothing.
    The `target_config` may ask for scaling and capping of the logits. `place`: device and dtype of the states that the
    projection reads.
    """

    def __init__(
        self,
        module: Any,
        target_config: PreTrainedConfig | None = None,
        token_ids: torch.Tensor | None = None,
        place: tuple[torch.device, torch.dtype] | None = None,
    ):
        self._module, self._token_ids, self._place = module, token_ids, place
        self._is_plain = is_plain_linear(module)
        self._rows: Sequence[torch.Tensor] = ()  # the weight of these tokens, and their bias if there is one
        if token_ids is not None and self._is_plain:
            whole = [parameter.detach() for parameter in (module.weight, module.bias) if parameter is not None]
            rows = token_ids.to(module.weight.device)
            self._rows = memory_of(module).derive(
                "cut head", module, whole, (token_ids,), lambda: [own.index_select(0, rows) for own in whole]
            )
        config = None if target_config is None else target_config.get_text_config(decoder=True)
        self._scale = getattr(config, "logit_scale", None) or 1
        for name in ("logits_scaling", "logits_mup_width_multiplier"):
            self._scale = self._scale / (getattr(config, name, None) or 1)
        self._cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "output_logit_soft_cap", None)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        # 1. The states, in the dtype of the weight, as the target's `forward` reads them.
        if self._place is not None:
            features = features.to(*self._place)
        weight = self._rows[0] if self._rows else getattr(self._module, "weight", None)
        # The dtype of eight bits and less is not the one to read.
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() > 1:
            features = features.to(weight.dtype)
        # 2. The projection.
        if self._is_plain:
            # The parallel heads' features are strided; PyTorch would multiply them batch by batch, and copy them.
            flat = features.reshape(-1, features.shape[-1])
            logits = linear(flat, *self._rows) if self._rows else self._module(flat)
            logits = logits.view(*features.shape[:-1], logits.shape[-1])
        else:
            logits = self._module(features)
            if self._token_ids is not None:
                logits = logits.index_select(-1, self._token_ids.to(logits.device))
        # 3. What some decoders do with the logits.
        if self._scale != 1:
            logits = logits * self._scale
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits


def output_head(target: PreTrainedModel, token_ids: torch.Tensor | None = None) -> OutputHead:
    """Returns the target's [`OutputHead`]."""
    return OutputHead(target.get_output_embeddings(), target.config, token_ids)


def head_for_drafting(
    target: PreTrainedModel,
    drafter: GumihoModel,
    draft_vocabulary: Sequence[int] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[OutputHead, torch.Tensor | None]:
    """
    Returns the function from the states `(..., H)` that a drafter predicts, on any device, to the logits of the tokens
    that may be drafted, and the ids of these, `(K,)`; `None` where they are all. The target's output head reads states
    of this device and dtype. A drafter with an output head of its own needs no other.

    Raises:
        ValueError: The draft vocabulary has tokens that the drafter's own output head does not score.
    """
    if drafter.config.owns_head:
        return _own_head(drafter, draft_vocabulary)
    token_ids = None
    if draft_vocabulary is not None:
        owner, ids = target.get_output_embeddings(), list(draft_vocabulary)
        (token_ids,) = memory_of(owner).derive(
            "draft vocabulary", owner, (), (ids, device), lambda: [torch.tensor(ids, device=device)]
        )
    return OutputHead(target.get_output_embeddings(), target.config, token_ids, (device, dtype)), token_ids


def _own_head(drafter: GumihoModel, draft_vocabulary: Sequence[int] | None) -> tuple[OutputHead, torch.Tensor | None]:
    """Does the same with the drafter's own output head, cut to the rows of the draft vocabulary."""
    head, own = drafter.lm_head, drafter.own_tokens()
    if draft_vocabulary is None:
        if own is not None:  # the same tensor in each call, as what others keep depends on it
            made = own
            (own,) = memory_of(head).derive("own tokens", head, (drafter.d2t,), (), lambda: [made])
        return OutputHead(head), own
    ids, device = list(draft_vocabulary), head.weight.device

    def find_rows() -> list[torch.Tensor]:
        token_ids = rows = torch.tensor(ids, device=device)
        if own is not None:
            row_of = token_ids.new_full((drafter.config.get_text_config().vocab_size,), -1)
            row_of[own] = torch.arange(len(own), device=device)
            rows = row_of[token_ids]
            if unscored := token_ids[rows < 0].tolist():
                raise UserValueError(
                    f"`draft_vocabulary` has {len(unscored)} tokens that the drafter's own output head does not "
                    f"score, such as {unscored[0]}. It scores {len(own)} tokens (`d2t`). Leave the others out."
                )
        return [token_ids, rows]

    mapped = () if own is None else (drafter.d2t,)
    token_ids, rows = memory_of(head).derive("draft vocabulary", head, mapped, (ids, device), find_rows)
    return OutputHead(head, token_ids=rows), token_ids


def is_plain_linear(head: nn.Module) -> bool:
    """Whether the head multiplies with its weight, adds its bias, and does nothing else."""
    return (
        type(head) is nn.Linear
        and type(head.weight) is nn.Parameter
        and head.weight.is_floating_point()
        and runs_as_defined(head)
    )


def num_scored(head: Any) -> int:
    """Returns how many tokens an output head scores; 0 where it does not say."""
    # An adapter may give the width of its features as `out_features`. A quantized weight has another shape.
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
        return weight.shape[0]
    return getattr(head, "out_features", 0)
