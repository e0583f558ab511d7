"""The drafters of a target: the attached one, with which every call drafts, and those that were given by name."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..commands import UserValueError
from ..files import check_folder
from ..internals import ARGUMENTS_OF_GENERATE, ENTRY, extend_generation_step, prepared_request
from ..model.modeling_gumiho import GumihoModel, unwrap_drafter
from ..model.mtp_checkpoint import OWN_MTP_LAYERS, check_mtp_layers
from ..model.wrappers import as_target, unwrap_model
from .verification.requirements import check_pair, check_request, check_target
from .verification.target_memory import Attachment, memory_of, place_of
from .verification.traits import TargetTraits, Unsupported, drafter_device
from .verification.trial import check_multi_token_decode


logger = logging.get_logger(__name__)


def attach(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> GumihoModel:
    """
    Makes `target.generate(...)` draft with a drafter in every call, for callers that cannot pass `assistant_model`.

    An `assistant_model` in a call takes precedence, also `None`. A call that cannot be drafted (beam search, for
    example) decodes plainly, with one warning for each reason. Copies of the target are not attached. The first call
    of this function extends `GenerationMixin.generate`, which all models share; others run it as it was.

    Args:
        target: The target, or a wrapper of it: a `PeftModel`, a compiled model, or one in data parallelism.
        drafter: The drafter, or its folder or name on the Hub. Then it is loaded to the target's device and dtype.
            `"mtp"` stands for the multi-token prediction layers in the target's own checkpoint.

    Returns:
        The drafter.

    Raises:
        ValueError: `drafter` is no Gumiho drafter, it does not fit the target, or the target cannot verify drafts.
        OSError: There is no drafter of this name, or its files are damaged.

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
    inner = as_target(target)
    place = memory_of(inner).attachments[-1]
    place.drafter = _drafter_for(inner, drafter, place)
    return place.drafter


def detach(target: nn.Module) -> None:
    """
    Undoes [`attach`], and forgets the drafters that were loaded by name for this target: the next call that names one
    reads its files again.
    """
    place = memory_of(as_target(target)).attachments[-1]
    place.drafter = None
    place.named.clear()


@contextmanager
def attached(target: nn.Module, drafter: nn.Module | str | os.PathLike) -> Iterator[GumihoModel]:
    """
    Attaches a drafter within a `with` block, and restores the former attachment afterwards. Blocks of several threads
    or tasks may overlap and end in any order: of those that are open, the last one counts, in all threads. The
    arguments are those of [`attach`].
    """
    inner = as_target(target)
    attachments = memory_of(inner).attachments
    place = Attachment(named=attachments[-1].named.copy())
    place.drafter = _drafter_for(inner, drafter, place)
    attachments.append(place)
    try:
        yield place.drafter
    finally:
        attachments.remove(place)


def attached_drafter(target: nn.Module) -> GumihoModel | None:
    """Returns the drafter that is attached to a target; `None` if there is none."""
    drafter: GumihoModel | None = memory_of(unwrap_model(target)).attachments[-1].drafter
    return drafter


def _drafter_for(target: PreTrainedModel, drafter: nn.Module | str | os.PathLike, place: Attachment) -> GumihoModel:
    """Returns the drafter to attach, if it fits, and lets the calls of all models look for an attached one."""
    if isinstance(drafter, (str, os.PathLike)):
        found: GumihoModel | None = named_drafter(target, drafter, place)
    else:
        found = unwrap_drafter(drafter)
    if found is None:
        kind = type(unwrap_model(drafter)).__name__
        raise UserValueError(f"No Gumiho drafter: a {kind}. Pass a `GumihoModel`, or its folder or name.")
    traits = check_target(target)
    check_pair(target, found)
    # What only a pass can say is tried with a few tokens.
    if traits.is_chain:
        check_multi_token_decode(target, traits, None)
    extend_generation_step(ENTRY, _generate)
    return found


def _generate(plain: Callable[..., Any], target: PreTrainedModel, /, *args: Any, **kwargs: Any) -> Any:
    """Hands the attached drafter to a call of `generate()`."""
    drafter = attached_drafter(target)
    if drafter is None:
        return plain(*args, **kwargs)
    return generate_where_possible(plain, target, lambda: drafter, args, kwargs)


@dataclass(frozen=True)
class AttachedDrafter:
    """
    An `assistant_model` that the caller of `generate()` did not give: a call that turns out not to be drafted decodes
    plainly instead of raising an error. It carries the target's traits, which were found when the call was checked.
    """

    drafter: GumihoModel
    traits: TargetTraits


def generate_where_possible(
    plain: Callable[..., Any],
    target: PreTrainedModel,
    find_drafter: Callable[[], GumihoModel],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """
    Generates with a drafter if the call names no assistant and can be drafted, and else plainly: by `plain`, the
    `generate()` of the target, with the arguments of the call.
    """
    given = dict(zip(ARGUMENTS_OF_GENERATE, args, strict=False)) | kwargs
    is_other = given.get("custom_generate") is not None or given.get("cache_implementation") == "paged"
    if "assistant_model" in given or is_other:
        return plain(*args, **kwargs)
    drafter = find_drafter()
    try:
        traits = check_request(target, drafter, *prepared_request(target, given))
    except Unsupported as reason:
        warn_of_plain_decoding(target, str(reason))
        return plain(*args, **kwargs)
    return plain(*args, **kwargs, assistant_model=AttachedDrafter(drafter, traits))


def warn_of_plain_decoding(target: PreTrainedModel, reason: str) -> None:
    """Logs why a call is not drafted, once for each target and reason."""
    # Its numbers may differ in each call.
    kind = "".join(character for character in reason if not character.isdigit())
    reasons = memory_of(target).reasons
    if kind not in reasons:
        reasons.add(kind)
        logger.warning(f"Decoding without the attached Gumiho drafter: {reason}")


@torch.inference_mode(False)  # or calls outside of inference mode could not use the drafter
def named_drafter(target: PreTrainedModel, name: str | os.PathLike, place: Attachment | None = None) -> GumihoModel:
    """
    Returns the drafter of a folder or of a name on the Hub, on the device of the target's output head and in the
    target's dtype. It is loaded once for a target, and again if the files of its folder have changed. It is kept in
    `place`, by default with the newest attachment. `"mtp"` stands for the target's own MTP layers, and another
    target's name for those of that one. Raises `OSError` or `ValueError` where it cannot be loaded.
    """
    named = (place or memory_of(target).attachments[-1]).named
    is_own = str(name) == OWN_MTP_LAYERS
    where, places = place_of(target) if is_own else (str(name), {})
    folder = Path(where, places.get("subfolder", ""))
    source = str(folder.absolute()) if folder.is_dir() else f"{where} {places or ''}"
    files, device = _files_of(folder), drafter_device(target)
    drafter, known_files = named.get(source, (None, None))
    if drafter is None or (known_files, drafter.device, drafter.dtype) != (files, device, target.dtype):
        # A drafter that is known needs no request to the Hub.
        if is_own:
            check_mtp_layers(where, places)
        check_folder(where, has_config=False)
        drafter = GumihoModel.from_pretrained(where, dtype=target.dtype, device_map=device, **places)
        if drafter.config.has_embedding or drafter.config.owns_head:  # others read the target's in the first call
            drafter.share_embedding(target)
        named[source] = drafter, files
    return drafter


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Returns when the configs and weights of a folder were written, and their sizes. A name on the Hub has none."""
    suffixes = (".json", ".safetensors", ".bin")
    files = [(path.name, path.stat()) for path in folder.glob("*") if path.suffix in suffixes]
    return sorted((file, found.st_mtime_ns, found.st_size) for file, found in files)


__all__ = ["attach", "attached", "detach"]
