"""Whether a target computes the same for several tokens in one pass as for one token after the other."""

import math

import torch
from transformers import PreTrainedModel

from .requirements import Unsupported
from .traits import TargetTraits
from .trial import Rows, measure_continuation, tried


def check_multi_token_decode(
    target: PreTrainedModel, traits: TargetTraits, attention_mask: torch.Tensor | None, batch_size: int = 1
) -> None:
    """
    Raises [`Unsupported`] for a target whose pass over several tokens differs from single-token passes. The first
    call runs the target on a few tokens; later calls reuse the result. The trial has padding if the `attention_mask`
    `(B, T)` of the prompt has it, and two rows if `batch_size` is larger than 1.
    """
    name = traits.name
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            f"{name} verifies chains by its own causal mask, so `attention_mask` must be (B, T), got "
            f"{tuple(attention_mask.shape)}."
        )
    rows: Rows = "one row" if batch_size == 1 else "a batch"
    if attention_mask is not None and not bool(attention_mask.all()):
        rows = "a padded batch"
    in_rows = "" if rows == "one row" else f" in {rows}"

    def measure(in_float32: bool = False) -> float:
        return measure_continuation(target, traits, rows, in_float32)

    try:
        verdict = tried(target, traits, rows, measure)
    except torch.OutOfMemoryError:
        raise  # a smaller batch may do
    except (RuntimeError, TypeError, IndexError, AssertionError) as error:
        raise Unsupported(
            f"{name} cannot verify drafts{in_rows}: a trial of a few tokens after its cache failed ({error}). "
            f"Generate without `assistant_model`."
        ) from error
    if not verdict.is_right:
        difference, tolerance = verdict.difference, verdict.tolerance
        how = "shapes" if math.isinf(difference) else f"relative error {difference:.1e}, tolerance {tolerance:.0e}"
        # What a function of the user's computes may be what differs.
        attention = traits.attention
        with_attention = f" with the attention {attention.name!r}" if attention.registered is not None else ""
        raise Unsupported(
            f"{name} cannot verify drafts{in_rows}{with_attention}: multi-token passes differ from single-token "
            f"passes ({how}). Generate without `assistant_model`."
        )
