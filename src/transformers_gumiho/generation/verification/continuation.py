"""Whether a target computes the same for several tokens in one pass as for one token after the other."""

import math

import torch
from transformers import PreTrainedModel

from .chains import ChainCache
from .rollback import held_tensors
from .traits import TargetTraits, Unsupported
from .trial import NUM_TOKENS, Rows, Trial, largest_error, run_singly, trial_tokens, tried


# Of the drafts of the first pass.
NUM_ACCEPTED = 3


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

    try:
        verdict = tried(target, traits, rows, lambda: measure_continuation(target, traits, rows))
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


def measure_continuation(target: PreTrainedModel, traits: TargetTraits, rows: Rows = "one row") -> float:
    """
    Returns the error of multi-token passes with a rollback between them, against single-token passes: the largest of
    the logits and of each tensor in the cache. (A lost state may hardly show in the logits of an untrained model.)
    """
    given = trial_tokens(target, traits, rows)
    at_once = _run_at_once(Trial(target, traits, *given))
    trial = Trial(target, traits, *given)
    return largest_error(at_once, _results(trial, run_singly(trial, NUM_ACCEPTED)))


def _run_at_once(trial: Trial) -> list[torch.Tensor]:
    """Makes two passes over drafts, the first of which are accepted in part."""
    tokens, end = trial.tokens, trial.tokens.shape[1]
    chain = ChainCache(trial.cache, trial.num_prompt, len(tokens))
    drafts = trial.tried.clone()
    drafts[:, NUM_ACCEPTED:] = tokens[:, NUM_ACCEPTED:NUM_TOKENS]
    trial.run(chain.begin_pass(drafts), end)
    chain.keep(NUM_ACCEPTED)
    rest = trial.tried[:, NUM_ACCEPTED:]
    logits = trial.run(chain.begin_pass(rest), end)[:, -rest.shape[1] :]
    chain.keep(rest.shape[1])
    chain.restore(trial.cache)
    return _results(trial, logits)


def _results(trial: Trial, logits: torch.Tensor) -> list[torch.Tensor]:
    """Returns the logits, and what the cache holds."""
    held = [tensor for tensor in held_tensors(trial.cache) if tensor.is_floating_point() and tensor.numel()]
    return [logits, *held]
