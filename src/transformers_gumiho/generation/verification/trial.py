"""
The trial of a target: whether it computes the same for several tokens in one pass as for one token after the other.
"""

import inspect
import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ...commands import UserValueError
from ...model.wrappers import in_eval_mode
from .chains import ChainCache
from .precision import NARROW, computing_precisely, rounds_products
from .rollback import layers_of
from .target_memory import memory_of
from .traits import TargetTraits, Unsupported, input_device


NUM_PROMPT_TOKENS = 9
# Before code of other packages, which may treat longer texts in another way (windows, compressed caches).
NUM_PROMPT_TOKENS_OF_FOREIGN_CODE = 256
NUM_TOKENS = 7
# Of the drafts of the first pass.
NUM_ACCEPTED = 3
NUM_PADDED = 2
# The largest error that counts as rounding: in full precision, and where a kernel takes 16 bits or TF32 alone.
TOLERANCE = 3e-4
TOLERANCE_OF_ROUNDING = 1e-2
# Model types that are wrong by less than 16 bits round.
_HARDLY_WRONG = ("dory", "nemotron_h", "zamba2")

Rows = Literal["one row", "a batch", "a padded batch"]
# Verdicts that are kept for a target; the oldest go first.
MAX_VERDICTS = 16


def check_multi_token_decode(
    target: PreTrainedModel, traits: TargetTraits, attention_mask: torch.Tensor | None, batch_size: int = 1
) -> None:
    """
    Raises [`Unsupported`] for a target whose pass over several tokens differs from single-token passes. The trial has
    padding if the `attention_mask` `(B, T)` of the prompt has it, and two rows if `batch_size` is larger than 1.
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
    if (obstacle := _find_obstacle(target, traits, rows)) is not None:
        in_rows = "" if rows == "one row" else f" in {rows}"
        # What a function of the user's computes may be what differs.
        attention = f" with the attention {traits.attention.name!r}" if traits.attention.registered else ""
        raise Unsupported(
            f"{name} cannot verify drafts{in_rows}{attention}: {obstacle}. Generate without `assistant_model`."
        )


def _find_obstacle(target: PreTrainedModel, traits: TargetTraits, rows: Rows) -> str | None:
    """Returns why drafts cannot be verified, as a clause; `None` if they can. What was tried is not tried again."""
    key = (
        rows,
        type(target),
        json.dumps(target.config.to_dict(), default=str),  # users put any objects into a config
        (traits.attention.name, traits.foreign),
        (target.dtype, input_device(target), target.use_kernels),
    )
    verdicts = memory_of(target).verdicts
    if key in (known := verdicts.copy()):  # other threads may remove it
        return known[key]
    obstacle = verdicts[key] = _try(target, traits, rows)
    for oldest in list(verdicts)[:-MAX_VERDICTS]:
        verdicts.pop(oldest, None)
    return obstacle


def _try(target: PreTrainedModel, traits: TargetTraits, rows: Rows) -> str | None:
    """Returns why drafts cannot be verified."""
    try:
        # Whatever precision the call runs in, as the verdict is that of all calls.
        with in_eval_mode(target), torch.autocast(input_device(target).type, enabled=False):
            difference, tolerance = _measure(target, traits, rows)
    except (torch.OutOfMemoryError, MemoryError) as error:
        # It says nothing of the target, so it is not remembered.
        raise Unsupported(f"There is no memory for a trial of {traits.name} with a few tokens ({error}).") from error
    except Exception as error:  # whatever the code of others raises
        return f"a trial of a few tokens after its cache failed ({type(error).__name__}: {error})"
    if math.isnan(difference):
        # That is of the weights, and not of the code, so it is not remembered.
        raise Unsupported(f"A trial of {traits.name} with a few tokens computes NaN. Check its weights.")
    if difference <= tolerance:
        return None
    how = "shapes" if math.isinf(difference) else f"relative error {difference:.1e}, tolerance {tolerance:.0e}"
    return f"multi-token passes differ from single-token passes ({how})"


def _measure(target: PreTrainedModel, traits: TargetTraits, rows: Rows) -> tuple[float, float]:
    """Returns the error of multi-token passes, and the tolerance for it."""
    may_round = target.dtype == torch.float32 and rounds_products(input_device(target))
    if target.dtype not in NARROW and not may_round:
        return measure_continuation(target, traits, rows), TOLERANCE
    try:
        with computing_precisely():
            return measure_continuation(target, traits, rows), TOLERANCE
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:
        # Kernels of other packages, and quantized weights, may take their own dtype alone.
        if traits.config.model_type in _HARDLY_WRONG:
            raise
        return measure_continuation(target, traits, rows), TOLERANCE_OF_ROUNDING


@torch.no_grad()
def measure_continuation(target: PreTrainedModel, traits: TargetTraits, rows: Rows = "one row") -> float:
    """
    Returns the error of multi-token passes with a rollback between them, against single-token passes: the largest of
    the logits and of each tensor in the cache. (A lost state may hardly show in the logits of an untrained model.)
    """
    given = _trial_tokens(target, traits, rows)
    at_once = _run_at_once(Trial(target, traits, *given))
    singly = _run_singly(Trial(target, traits, *given))
    errors = [_relative_error(*pair) for pair in zip(at_once, singly, strict=True)]
    return float("nan") if any(map(math.isnan, errors)) else max(errors)


def _trial_tokens(target: PreTrainedModel, traits: TargetTraits, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the tokens `(B, T)` of a trial, their mask, and how many of them are before those that are tried."""
    device, config = input_device(target), traits.config
    num_prompt = NUM_PROMPT_TOKENS
    if traits.foreign:
        fields = ("original_max_position_embeddings", "max_position_embeddings")
        limits = [getattr(config, name, None) for name in fields]
        room = [limit - NUM_TOKENS for limit in limits if limit is not None]
        num_prompt = max(min([NUM_PROMPT_TOKENS_OF_FOREIGN_CODE, *room]), NUM_PROMPT_TOKENS)
    length, num_ids = num_prompt + NUM_TOKENS, min(config.vocab_size, 97)
    num_rows = 1 if rows == "one row" else 2
    tokens = (torch.arange(num_rows * length, device=device) * 5 % (num_ids - 1) + 1).view(-1, length)
    mask = torch.ones_like(tokens)
    if rows == "a padded batch":
        mask[0, :NUM_PADDED] = 0
    return tokens, mask, num_prompt


class Trial:
    """Passes of a target over `tokens` `(B, T)` under `mask`, the first `num_prompt` of which are in its cache."""

    def __init__(
        self, target: PreTrainedModel, traits: TargetTraits, tokens: torch.Tensor, mask: torch.Tensor, num_prompt: int
    ):
        self.target, self.traits, self.tokens, self.mask, self.num_prompt = target, traits, tokens, mask, num_prompt
        self.cache = traits.make_cache()
        self.run(tokens[:, :num_prompt], num_prompt)
        if not _held_tensors(self.cache):
            raise UserValueError(
                f"it added nothing to the cache in its argument `{traits.cache_argument}`, the name that this release "
                f"of transformers uses; give its `forward` a parameter of that name"
            )

    @property
    def continuation(self) -> torch.Tensor:
        """The tokens after the prompt."""
        return self.tokens[:, self.num_prompt :]

    def run(self, tokens: torch.Tensor, end: int) -> torch.Tensor:
        """Runs the last `tokens` `(B, n)` of `end`. Returns their logits `(B, n, V)`; of a prompt the last."""
        num_tokens, mask = tokens.shape[1], self.mask[:, :end]
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -num_tokens:]
        takes_positions = "position_ids" in inspect.signature(self.target.forward).parameters
        is_first = num_tokens == end
        model_inputs = self.target.prepare_inputs_for_generation(
            tokens,
            **{self.traits.cache_argument: self.cache},
            attention_mask=mask,
            position_ids=positions if takes_positions else None,
            use_cache=True,
            is_first_iteration=is_first,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = 1 if is_first else num_tokens
        logits: torch.Tensor = self.target(**model_inputs, **self.traits.unused_outputs, return_dict=True).logits
        return logits

    def results(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Returns the logits, and what the cache holds."""
        held = [tensor for tensor in _held_tensors(self.cache) if tensor.is_floating_point() and tensor.numel()]
        return [logits, *held]


def _run_at_once(trial: Trial) -> list[torch.Tensor]:
    """Makes two passes over drafts, the first of which are accepted in part. Returns the results of the second."""
    tokens, end = trial.tokens, trial.tokens.shape[1]
    chain = ChainCache(trial.cache, trial.num_prompt, len(tokens))
    # 1. Drafts whose last ones are other tokens than those of the text.
    drafts = trial.continuation.clone()
    drafts[:, NUM_ACCEPTED:] = tokens[:, NUM_ACCEPTED:NUM_TOKENS]
    trial.run(chain.begin_pass(drafts), end)
    chain.keep(NUM_ACCEPTED)
    # 2. The rest of the text.
    rest = trial.continuation[:, NUM_ACCEPTED:]
    logits = trial.run(chain.begin_pass(rest), end)[:, -rest.shape[1] :]
    chain.keep(rest.shape[1])
    chain.restore(trial.cache)
    return trial.results(logits)


def _run_singly(trial: Trial) -> list[torch.Tensor]:
    """Makes one pass for each token. Returns the same results."""
    ends = range(trial.num_prompt + 1, trial.tokens.shape[1] + 1)
    logits = [trial.run(trial.tokens[:, end - 1 : end], end) for end in ends]
    return trial.results(torch.cat(logits[NUM_ACCEPTED:], dim=1))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _held_tensors(cache: Any) -> list[torch.Tensor]:
    """Returns all tensors that a target's cache holds, in its layers and beside them."""
    owners = (cache, *layers_of(cache))
    return [tensor for owner in owners for tensor in _tensors_in(getattr(owner, "__dict__", owner))]


def _relative_error(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the root mean square of the error, relative to that of the expected values."""
    if values.shape != expected.shape:
        return float("inf")
    values, expected = values.cpu().double(), expected.cpu().double()  # not every device has float64
    size = expected.square().mean()
    error = (values - expected).square().mean()
    return (error / size).sqrt().item() if size > 0 else error.sqrt().item()
