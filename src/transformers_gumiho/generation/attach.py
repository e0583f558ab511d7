"""The drafters of a target: the attached one, with which every call drafts, and those that were given by name."""

import copy
import functools
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from ..commands import UserValueError
from ..files import damaged_files_named
from ..internals import named_arguments, prepared_request
from ..model.loading import find_packaged_folder, is_of_drafter
from ..model.modeling_gumiho import GumihoModel
from ..model.wrappers import unwrap_drafter, unwrap_model
from .verification.cycle_shapes import with_eager_decoder
from .verification.placement import drafter_device
from .verification.requirements import check_pair, check_request, check_target, unsupported_reason
from .verification.trial import check_multi_token_decode


logger = logging.get_logger(__name__)

Source = tuple[str, Any]  # a folder or name, and the revision


@dataclass
class _Drafters:
    """The drafters of one target, and why calls decoded plainly, as far as it was logged, without numbers."""

    attached: GumihoModel | None = None
    # Those that were given by folder or name, each with the state of its files when it was loaded.
    named: dict[Source, tuple[GumihoModel, Any]] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)


# Beside the models: no copy, checkpoint or parameter list of a target includes its drafters, which are freed with it.
_drafters: weakref.WeakKeyDictionary[nn.Module, _Drafters] = weakref.WeakKeyDictionary()


def attach(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> GumihoModel:
    """
    Makes `target.generate(...)` draft with a drafter in every call, for callers that cannot pass `assistant_model`.

    An `assistant_model` in a call takes precedence, also `None`. A call that cannot be drafted (beam search, for
    example) decodes plainly, with one warning for each reason. Copies of the target are not attached. The drafter is
    set as `generate` on the target itself: `type(target).generate(target, ...)` decodes plainly.

    Args:
        target: The target, or a wrapper of it: a `PeftModel`, a compiled model, or one in data parallelism.
        drafter: The drafter, or its folder or name on the Hub. Then it is loaded to the target's device and dtype.

    Returns:
        The drafter.

    Raises:
        ValueError: `drafter` is no Gumiho drafter, it does not fit the target, the target cannot verify drafts, or its
            `generate` takes no `assistant_model`.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from transformers_gumiho import attach, detach

    >>> tokenizer = AutoTokenizer.from_pretrained("examples/demo_pair/target")
    >>> target = AutoModelForCausalLM.from_pretrained("examples/demo_pair/target", dtype="float32")
    >>> gumiho = attach(target, "examples/demo_pair/gumiho")
    >>> inputs = tokenizer("def read(self):", return_tensors="pt")
    >>> output = target.generate(**inputs, max_new_tokens=16, return_dict_in_generate=True)
    >>> len(output.accepted_lengths[0]) < 16  # passes of the target after the prompt's
    True
    >>> detach(target)

    ```
    """
    inner = unwrap_model(target)
    if isinstance(drafter, (str, os.PathLike)):
        found, what = named_drafter(inner, drafter), repr(str(drafter))
    else:
        found, what = unwrap_drafter(drafter), f"a {type(unwrap_model(drafter)).__name__}"
    if found is None:
        raise UserValueError(f"No Gumiho drafter: {what}. Pass a `GumihoModel`, or its folder or name.")
    _check_attachment(inner, found)
    _set_attached(inner, found)
    return found


def detach(target: nn.Module) -> None:
    """
    Undoes [`attach`], and forgets the drafters that were loaded by name for this target: the next call that names one
    reads its files again.
    """
    inner = unwrap_model(target)
    _set_attached(inner, None)
    _drafters.pop(inner, None)


@contextmanager
def attached(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> Iterator[GumihoModel]:
    """
    Attaches a drafter to `target` within a `with` block, and restores the former attachment afterwards. See
    [`attach`] for the arguments.
    """
    inner = unwrap_model(target)
    drafters = _drafters_of(inner)
    before, named_before = drafters.attached, drafters.named.copy()
    try:
        yield attach(inner, drafter)
    finally:
        _set_attached(inner, before)
        _drafters_of(inner).named = named_before


def attached_drafter(target: nn.Module) -> GumihoModel | None:
    """Returns the drafter that is attached to a target; `None` if there is none."""
    return _drafters_of(unwrap_model(target)).attached


def _drafters_of(target: nn.Module) -> _Drafters:
    return _drafters.setdefault(target, _Drafters())


def _set_attached(target: Any, drafter: GumihoModel | None) -> None:
    """Makes this the target's drafter, and sets or restores the target's `generate`."""
    _drafters_of(target).attached = drafter
    own = vars(target).get("generate")
    if not isinstance(own, AttachedGenerate):
        if drafter is not None:
            target.generate = AttachedGenerate(target, own)
    elif drafter is None:
        del target.generate
        if own.replaced is not None:
            target.generate = own.replaced


def _check_attachment(target: PreTrainedModel, drafter: GumihoModel) -> None:
    """Raises `ValueError` for a target that a drafter cannot be attached to."""
    traits = check_target(target)
    check_pair(target, drafter)
    parameters = inspect.signature(target.generate).parameters
    if "assistant_model" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        raise UserValueError(
            f"The `generate` of this {type(target).__name__} takes no `assistant_model`, so nothing can be attached: "
            f"it takes {', '.join(parameters)}. Give it `**kwargs` that it hands on to `super().generate`."
        )
    # What only a pass can say is tried with a few tokens.
    if traits.is_chain:
        check_multi_token_decode(with_eager_decoder(target, drafter.config.layers_read(target.config)), traits, None)


class AttachedGenerate:
    """
    `generate` of one target: hands the attached drafter to what was its `generate` before. It holds the target weakly,
    so that both models are freed with their last reference. In a deep copy or a pickle of the target it belongs to
    the copy, which has no drafter. `replaced` is the `generate` that was set on the target itself, as repositories
    with a `custom_generate` do.
    """

    def __init__(self, target: PreTrainedModel, replaced: Callable[..., Any] | None = None):
        functools.update_wrapper(self, replaced or type(target).generate)
        self.target = weakref.ref(target)
        self.replaced = replaced
        self.__signature__ = inspect.signature(self._plain(target))

    def _plain(self, target: PreTrainedModel) -> Callable[..., Any]:
        return self.replaced or types.MethodType(type(target).generate, target)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        target = self.target()
        if target is None:
            raise ReferenceError("The model of this `generate` was deleted. Keep a reference to it.")
        plain, drafter = self._plain(target), _drafters_of(target).attached
        if drafter is None:
            return plain(*args, **kwargs)
        return generate_where_possible(plain, target, drafter, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttachedGenerate":
        target = memo.get(id(self.target()))
        return self if target is None else AttachedGenerate(target, copy.deepcopy(self.replaced, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return AttachedGenerate, (self.target(), self.replaced)


@dataclass(frozen=True)
class AttachedDrafter:
    """
    An `assistant_model` that the caller of `generate()` did not give: a call that turns out not to be drafted decodes
    plainly instead of raising an error.
    """

    drafter: GumihoModel


def generate_where_possible(
    plain: Callable[..., Any],
    target: PreTrainedModel,
    drafter: GumihoModel | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """
    Generates with a drafter, or with that of a folder or name, if the call names no assistant and can be drafted, and
    else plainly: by `plain`, the `generate()` of the target, with the arguments of the call.
    """
    given = named_arguments(plain, args, kwargs)
    is_other = given.get("custom_generate") is not None or given.get("cache_implementation") == "paged"
    if "assistant_model" in given or is_other:
        return plain(*args, **kwargs)
    if isinstance(drafter, str):
        drafter = load_drafter(target, drafter)
    if reason := unsupported_reason(check_request, target, drafter, *prepared_request(target, given)):
        warn_of_plain_decoding(target, reason)
        return plain(*args, **kwargs)
    return plain(*args, **kwargs, assistant_model=AttachedDrafter(drafter))


def warn_of_plain_decoding(target: PreTrainedModel, reason: str) -> None:
    """Logs why a call is not drafted, once for each target and reason."""
    # Its numbers may differ in each call.
    kind = "".join(character for character in reason if not character.isdigit())
    reasons = _drafters_of(target).reasons
    if kind not in reasons:
        reasons.add(kind)
        logger.warning(f"Decoding without the attached Gumiho drafter: {reason}")


def is_drafter(name: str | os.PathLike) -> bool:
    """
    Whether a folder or a name on the Hub is that of a drafter, judged by its config and the names of its tensors. Runs
    no code from there. Raises `ValueError` where no config can be read.
    """
    if find_packaged_folder(str(name)):
        return True
    try:
        with damaged_files_named(name):
            config, _ = PreTrainedConfig.get_config_dict(str(name))
            return is_of_drafter(config, name)
    except OSError as error:
        raise UserValueError(
            f"No drafter can be read from {str(name)!r} ({error}). Give a Gumiho drafter, or its folder or name."
        ) from error


def named_drafter(target: PreTrainedModel, name: str | os.PathLike) -> GumihoModel | None:
    """Returns the drafter with this name or folder, or `None` if it is another model; see [`is_drafter`]."""
    # A loaded drafter needs no request to the Hub.
    is_known = (_source(name), None) in _drafters_of(target).named
    return load_drafter(target, name) if is_known or is_drafter(name) else None


@torch.inference_mode(False)  # or calls outside of inference mode could not use the drafter
def load_drafter(target: PreTrainedModel, name: str | os.PathLike, **loading: Any) -> GumihoModel:
    """
    Returns the drafter of a folder or a name on the Hub, on the device of the target's output head and in the target's
    dtype. Later calls return the same drafter, unless the files of the folder have changed. `loading` are arguments of
    `from_pretrained`.
    """
    source, files, device = (_source(name), loading.get("revision")), _files_of(name), drafter_device(target)
    named = _drafters_of(target).named
    drafter, known_files = named.get(source, (None, None))
    if drafter is None or (known_files, drafter.device, drafter.dtype) != (files, device, target.dtype):
        drafter = GumihoModel.from_pretrained(name, dtype=target.dtype, device_map=device, **loading)
        if drafter.config.has_embedding:  # others read the target's in the first call
            drafter.share_embedding(target)
        named[source] = drafter, files
    return drafter


def _source(name: str | os.PathLike) -> str:
    return os.path.abspath(name) if os.path.isdir(name) else str(name)


def _files_of(name: str | os.PathLike) -> list[tuple[str, int, int]]:
    """Returns when the configs and weights of a folder were written, and their sizes. A name on the Hub has none."""
    suffixes = (".json", ".safetensors", ".bin")
    files = [(path.name, path.stat()) for path in Path(name).glob("*") if path.suffix in suffixes]
    return sorted((file, found.st_mtime_ns, found.st_size) for file, found in files)


__all__ = ["attach", "attached", "detach"]
