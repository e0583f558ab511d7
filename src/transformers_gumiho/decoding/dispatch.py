"""How `generate(assistant_model=<GumihoModel>)` gets to the loop: in all classes of transformers, or in a mixin."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode

from ..internals import DECODING_STEP, VALIDATION_STEP, generation_step, replace_generation_step
from ..model.modeling_gumiho import unwrap_drafter
from ..target import grouped_attention
from ..target.requirements import check_request
from .loop import decode_with_tree


def _validate_generation_mode(
    plain: Callable[..., None],
    target: PreTrainedModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Checks a call of `generate()`; `plain` does so for every other assistant."""
    assistant = unwrap_drafter(generation_mode_kwargs.get("assistant_model"))
    if assistant is not None:
        check_request(target, assistant, generation_mode, generation_config, generation_mode_kwargs)
        # What is left to check is what the target would refuse without an assistant, too.
        generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        generation_mode_kwargs = {name: v for name, v in generation_mode_kwargs.items() if name != "assistant_model"}
    plain(generation_mode, generation_config, generation_mode_kwargs)


def _assisted_decoding(
    plain: Callable[..., Any], target: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Decodes with an assistant; `plain` does so with every other one."""
    assistant = unwrap_drafter(kwargs.get("assistant_model"))
    if assistant is None:
        return plain(input_ids, *args, **kwargs)
    if not assistant.config.has_embedding:
        assistant.share_embedding(target)
    for name in ("inputs_tensor", "tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    return decode_with_tree(target, input_ids, *args, **kwargs | {"assistant_model": assistant})


# On a step that has been replaced.
_MARK = "dispatches_to_gumiho"
_DISPATCHERS: dict[str, Callable[..., Any]] = {
    VALIDATION_STEP: _validate_generation_mode,
    DECODING_STEP: _assisted_decoding,
}


class GumihoGenerationMixin(GenerationMixin):
    """
    `generate()` with draft trees, for classes that replace transformers' decoding methods by their own.

    Stock classes need not inherit from this: `import transformers_gumiho` gives the same to all of them.
    """

    @functools.wraps(generation_step(VALIDATION_STEP))
    def _validate_generation_mode(self, *args: Any, **kwargs: Any) -> None:
        _validate_generation_mode(super()._validate_generation_mode, self, *args, **kwargs)

    @functools.wraps(generation_step(DECODING_STEP))
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return _assisted_decoding(super()._assisted_decoding, self, *args, **kwargs)


def install() -> None:
    """
    Makes every generating class of transformers dispatch on a Gumiho assistant, and attention on whether it is part
    of a pass of this package. Every other call takes transformers' own path. Calling this again changes nothing.
    """
    for name, dispatcher in _DISPATCHERS.items():
        plain = generation_step(name)
        if not hasattr(plain, _MARK):
            replace_generation_step(name, _dispatching(plain, dispatcher))
    grouped_attention.install()


def _dispatching(plain: Callable[..., Any], dispatcher: Callable[..., Any]) -> Callable[..., Any]:
    # `generate()` reads the signature of the method it calls; `wraps` passes the original's on.
    @functools.wraps(plain)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return dispatcher(functools.partial(plain, self), self, *args, **kwargs)

    setattr(method, _MARK, True)
    return method
