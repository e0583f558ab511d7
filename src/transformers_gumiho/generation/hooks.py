"""Leads `generate(assistant_model=<GumihoModel>)` to the loop, by steps of transformers that are extended."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin, GenerationMode
from transformers.utils import logging

from ..commands import UserValueError
from ..files import PLACES
from ..internals import (
    DECODING_STEP,
    LOADING_STEP,
    PLAIN_STEP,
    VALIDATION_STEP,
    default_settings,
    extend_generation_step,
    generation_step,
    given_in_call,
)
from ..model.decoding_settings import DECODING_SETTINGS, SETTINGS_OF_CALLS
from ..model.loading import misread_drafter
from ..model.modeling_gumiho import GumihoModel, unwrap_drafter
from .attach import AttachedDrafter, named_drafter, warn_of_plain_decoding
from .loop import decode_with_tree
from .observers import observers_of_call
from .sequences import max_length_of
from .verification.requirements import check_inputs, check_request
from .verification.target_memory import memory_of
from .verification.traits import Unsupported


logger = logging.get_logger(__name__)

# Settings that a drafter does not read. Its own ones it reads from its config alone.
_OF_OTHER_ASSISTANTS = (
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
)  # fmt: skip


def _drafter_in(assistant: Any) -> GumihoModel | None:
    """Returns the drafter that an `assistant_model` stands for; `None` for other assistants."""
    return assistant.drafter if isinstance(assistant, AttachedDrafter) else unwrap_drafter(assistant)


def _validate_generation_mode(
    plain: Callable[..., None],
    target: PreTrainedModel,
    /,
    generation_mode: GenerationMode,
    generation_config: GenerationConfig,
    generation_mode_kwargs: dict[str, Any],
) -> None:
    """Checks a call of `generate()`, and loads an assistant that is given by name. `plain` checks other assistants."""
    assistant = generation_mode_kwargs.get("assistant_model")
    if isinstance(assistant, (str, os.PathLike)):
        assistant = named_drafter(target, assistant)
        # `generate()` hands these arguments on to the decoding step.
        generation_mode_kwargs["assistant_model"] = assistant
    drafter = _drafter_in(assistant)
    if drafter is None and (name := misread_drafter(assistant)):
        raise UserValueError(
            f"The assistant is a {type(assistant).__name__} from the files of the drafter {name!r}, some of which it "
            f"does not read. Load them with `GumihoModel.from_pretrained`, or pass the name as `assistant_model`."
        )
    if drafter is not None:
        if not isinstance(assistant, AttachedDrafter):  # or the call was checked before it got one
            traits = check_request(target, drafter, generation_config, generation_mode_kwargs)
            # They travel with the call.
            generation_mode_kwargs["traits"] = traits
        _warn_of_unused_settings(target, drafter, generation_config)
        # `plain` checks the rest as for a call without an assistant.
        is_sampled = generation_config.do_sample
        generation_mode = GenerationMode.SAMPLE if is_sampled else GenerationMode.GREEDY_SEARCH
        generation_mode_kwargs = dict(generation_mode_kwargs)
        for name in ("assistant_model", "traits"):
            generation_mode_kwargs.pop(name, None)
    plain(generation_mode, generation_config, generation_mode_kwargs)


def _warn_of_unused_settings(
    target: PreTrainedModel, drafter: GumihoModel, generation_config: GenerationConfig
) -> None:
    """Warns of settings of assistants where they have no effect: the drafter's in a call, and others anywhere."""
    defaults, settings = default_settings(), drafter.generation_config
    for name in (*_OF_OTHER_ASSISTANTS, *DECODING_SETTINGS):
        value, is_others = given_in_call(target, generation_config, name), name in _OF_OTHER_ASSISTANTS
        if is_others and getattr(settings, name, None) not in (None, defaults.get(name)):
            value = getattr(settings, name)
        if value is None or name in SETTINGS_OF_CALLS:
            continue
        advice = "a Gumiho drafter has no such setting. Leave it out."
        if not is_others:
            advice = f"it is a setting of the drafter. Set `assistant_model.generation_config.{name} = {value!r}`."
        logger.warning_once(f"`{name}={value!r}` has no effect: {advice}")


def _assisted_decoding(
    plain: Callable[..., Any], target: PreTrainedModel, /, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Decodes with a Gumiho assistant. Calls with any other assistant go to `plain`."""
    assistant = kwargs.get("assistant_model")
    drafter = _drafter_in(assistant)
    if drafter is None:
        return plain(input_ids, *args, **kwargs)
    if not drafter.config.has_embedding:
        drafter.share_embedding(target)
    for name in ("inputs_tensor", "tokenizer", "assistant_tokenizer"):
        kwargs.pop(name, None)
    # What the prompt and its cache do not allow is known only now. Nothing has run yet.
    config = kwargs["generation_config"]
    # An attached drafter was checked before the target's own `generate`.
    traits = assistant.traits if isinstance(assistant, AttachedDrafter) else kwargs.pop("traits")
    prompt_length = input_ids.shape[1]
    max_new_tokens = max_length_of(kwargs["stopping_criteria"], config, prompt_length) - prompt_length
    try:
        check_inputs(target, traits, input_ids, config, kwargs, max_new_tokens)
    except Unsupported as reason:
        if not isinstance(assistant, AttachedDrafter):
            raise
        warn_of_plain_decoding(target, str(reason))
        del kwargs["assistant_model"]
        return getattr(target, PLAIN_STEP)(input_ids, *args, **kwargs)
    kwargs |= {"assistant_model": drafter, "traits": traits, "observers": observers_of_call(target, drafter)}
    return decode_with_tree(target, input_ids, *args, **kwargs)


def _note_places(plain: Callable[..., None], target: PreTrainedModel, /, *args: Any, **kwargs: Any) -> None:
    """Notes where a model is loaded from. `assistant_model="mtp"` reads its MTP layers there."""
    given = inspect.signature(plain).bind(*args, **kwargs).arguments
    memory_of(target).places = {name: given[name] for name in PLACES if given.get(name) not in (None, "")}
    plain(*args, **kwargs)


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
    Extends two steps of transformers' `generate()` for Gumiho drafters, and the end of `from_pretrained`, which notes
    where a target is from. Calls without such a drafter run transformers' own code. Repeating it changes nothing.
    """
    extend_generation_step(VALIDATION_STEP, _validate_generation_mode)
    extend_generation_step(DECODING_STEP, _assisted_decoding)
    extend_generation_step(LOADING_STEP, _note_places)
