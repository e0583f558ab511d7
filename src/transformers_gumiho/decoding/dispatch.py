"""Leads `generate(assistant_model=<GumihoModel>)` to the loop, in all classes of transformers or in a mixin."""

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode
from transformers.utils import logging

from ..internals import (
    DECODING_STEP,
    PLAIN_STEP,
    VALIDATION_STEP,
    generation_step,
    named_arguments,
    prepared_request,
    replace_generation_step,
)
from ..model.attaching import ATTACHMENT_CHECKS, attached_drafter
from ..model.modeling_gumiho import GumihoModel, unwrap_drafter
from ..verification import attention
from ..verification.continuation import check_multi_token_decode
from ..verification.prompt import check_prompt_pass
from ..verification.requirements import (
    Unsupported,
    check_pair,
    check_request,
    check_target,
    reason_against,
)
from ..verification.traits import TargetTraits
from ..verification.without_graphs import without_graphs
from .loop import check_inputs, decode_with_tree
from .named_drafters import named_drafter


logger = logging.get_logger(__name__)

_TREE_SIZE = "num_assistant_tokens"

# The target whose attached drafter is used in the running call of `generate()`.
_attached_call: ContextVar[PreTrainedModel | None] = ContextVar("gumiho_attached_call", default=None)


def _generate(plain: Callable[..., Any], target: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Loads an assistant that is given by name. Without an assistant, uses the attached drafter, if any."""
    given = named_arguments(args, kwargs)
    drafter = None
    if "assistant_model" in given:
        name = given["assistant_model"]
        if isinstance(name, (str, os.PathLike)):
            given["assistant_model"] = named_drafter(target, name) or name
    elif given.get("custom_generate") is None and given.get("cache_implementation") != "paged":
        drafter = attached_drafter(target)
    if drafter is not None:
        if reason := reason_against(check_request, target, drafter, *prepared_request(target, given)):
            _warn_of_plain_decoding(reason)
            drafter = None
        else:
            given["assistant_model"] = drafter
    if unwrap_drafter(given.get("assistant_model")) is not None:
        _warn_of_drafter_settings(given)
    token = _attached_call.set(None if drafter is None else target)
    try:
        return plain(**given)
    finally:
        _attached_call.reset(token)


def _generate_batch(plain: Callable[..., Any], target: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Drops an assistant with a warning, because continuous batching supports none."""
    if kwargs.pop("assistant_model", None) is not None:
        logger.warning_once("`generate_batch` takes no `assistant_model`: it decodes without a drafter.")
    return plain(*args, **kwargs)


def _warn_of_drafter_settings(given: dict[str, Any]) -> None:
    """Warns of a setting of assistants in a call. As in transformers, only that of the assistant has an effect."""
    value = given.get(_TREE_SIZE, getattr(given.get("generation_config"), _TREE_SIZE, None))
    if value is not None:
        logger.warning_once(
            f"`{_TREE_SIZE}={value!r}` in a call of `generate()` has no effect: it is a setting of the drafter. Set "
            f"`assistant_model.generation_config.{_TREE_SIZE} = {value!r}`."
        )


def _warn_of_plain_decoding(reason: str) -> None:
    logger.warning_once(f"Decoding without the attached Gumiho drafter: {reason}")


def _validate_generation_mode(
    plain: Callable[..., None],
    target: PreTrainedModel,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Checks a call of `generate()`. Calls with any other assistant go to `plain`."""
    assistant = unwrap_drafter(generation_mode_kwargs.get("assistant_model"))
    if assistant is not None:
        if _attached_call.get() is not target:  # attached drafters are checked in `_generate`
            check_request(target, assistant, generation_config, generation_mode_kwargs)
        # `plain` checks the rest as for a call without an assistant.
        generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        generation_mode_kwargs = {name: v for name, v in generation_mode_kwargs.items() if name != "assistant_model"}
    plain(generation_mode, generation_config, generation_mode_kwargs)


def _assisted_decoding(
    plain: Callable[..., Any], target: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Decodes with a Gumiho assistant. Calls with any other assistant go to `plain`."""
    assistant = unwrap_drafter(kwargs.get("assistant_model"))
    if assistant is None:
        return plain(input_ids, *args, **kwargs)
    if not assistant.config.has_embedding:
        assistant.share_embedding(target)
    for name in ("inputs_tensor", "tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    # What the prompt and its cache do not allow is known only now. Nothing has run yet.
    verifier = without_graphs(target, assistant.config.layers_read(target.config))
    traits = TargetTraits.of(verifier)
    reason = reason_against(check_inputs, verifier, traits, input_ids, kwargs)
    if reason is None:
        kwargs |= {"assistant_model": assistant, "traits": traits}
        return decode_with_tree(verifier, input_ids, *args, **kwargs)
    if _attached_call.get() is not target:
        raise Unsupported(reason)
    _warn_of_plain_decoding(reason)
    del kwargs["assistant_model"]
    return getattr(target, PLAIN_STEP)(input_ids, *args, **kwargs)


def _check_attachment(target: PreTrainedModel, drafter: GumihoModel) -> None:
    """
    Raises `ValueError` for a target that a drafter cannot be attached to. What only a pass can say is tried with a few
    tokens: for chains, and for a `forward` that transformers does not bring.
    """
    traits = check_target(target)
    check_pair(target, drafter)
    verifier = without_graphs(target, drafter.config.layers_read(target.config))
    if traits.is_chain:
        check_multi_token_decode(verifier, traits, None, batch_size=1)
    elif not type(target).__module__.startswith("transformers."):
        check_prompt_pass(verifier, traits, drafter.config.layers_read(target.config))


# Attribute of a step that was replaced.
_MARK = "dispatches_to_gumiho"
_DISPATCHERS: dict[str, Callable[..., Any]] = {
    VALIDATION_STEP: _validate_generation_mode,
    DECODING_STEP: _assisted_decoding,
    "generate": _generate,
    "generate_batch": _generate_batch,
}


class GumihoGenerationMixin(GenerationMixin):
    """
    `generate()` with draft trees, for classes that override transformers' decoding methods.

    Classes of transformers do not need this mixin: `import transformers_gumiho` extends all of them.
    """

    @functools.wraps(generation_step(VALIDATION_STEP))
    def _validate_generation_mode(self, *args: Any, **kwargs: Any) -> None:
        _validate_generation_mode(super()._validate_generation_mode, self, *args, **kwargs)

    @functools.wraps(generation_step(DECODING_STEP))
    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return _assisted_decoding(super()._assisted_decoding, self, *args, **kwargs)


def install() -> None:
    """
    Extends `generate()` and the attention functions of transformers for Gumiho drafters. Calls without such a drafter
    run transformers' own code. Calling this again changes nothing.
    """
    for name, dispatcher in _DISPATCHERS.items():
        plain = generation_step(name)
        if not hasattr(plain, _MARK):
            replace_generation_step(name, _dispatching(plain, dispatcher))
    if _check_attachment not in ATTACHMENT_CHECKS:
        ATTACHMENT_CHECKS.append(_check_attachment)
    attention.install()


def _dispatching(plain: Callable[..., Any], dispatcher: Callable[..., Any]) -> Callable[..., Any]:
    # `generate()` reads the signature of the methods it calls; `wraps` keeps the original one.
    @functools.wraps(plain)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return dispatcher(functools.partial(plain, self), self, *args, **kwargs)

    setattr(method, _MARK, True)
    return method
