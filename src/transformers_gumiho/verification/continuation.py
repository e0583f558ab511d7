"""Whether a target computes the same for several tokens in one pass as for one token after the other."""

import inspect
import math
import threading
from contextlib import nullcontext
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..internals import computing_in_float32
from ..tree.walk import AcceptedPath
from .chains import ChainCache, held_tensors
from .requirements import Unsupported
from .traits import TargetTraits


NUM_PROMPT_TOKENS = 9
NUM_TOKENS = 7
NUM_ACCEPTED = 3
NUM_PADDED = 2
# In float32, where small random models measured up to 2e-5 by rounding, and 4e-3 or more with a wrong state.
TOLERANCE = 3e-4

Rows = Literal["one row", "a batch", "a padded batch"]

# Errors and tolerances by class, config and kind of batch: a config says which code runs. The oldest goes first.
_measured: dict[tuple[Any, ...], tuple[float, float]] = {}
MAX_MEASURED = 64
_recording = threading.Lock()


def check_multi_token_decode(
    target: PreTrainedModel, traits: TargetTraits, attention_mask: torch.Tensor | None, batch_size: int = 1
) -> None:
    """
    Raises [`Unsupported`] for a target whose pass over several tokens differs from single-token passes. The first
    call for a class and config runs the target on a few tokens; later calls reuse the result. The trial has padding if
    the `attention_mask` `(B, T)` of the prompt has it, and two rows if `batch_size` is larger than 1.
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
    key = (type(target), target.config.to_json_string(), traits.attention, target.dtype, rows)
    measured = _measured.get(key)
    if measured is None:
        try:
            measured = _measure(target, traits, rows)
        except torch.OutOfMemoryError:
            raise  # a smaller batch may do
        except (RuntimeError, TypeError, IndexError, AssertionError) as error:
            raise Unsupported(
                f"{name} cannot verify drafts{in_rows}: a trial of a few tokens after its cache failed ({error}). "
                f"Generate without `assistant_model`."
            ) from error
        with _recording:
            while len(_measured) >= MAX_MEASURED:
                del _measured[next(iter(_measured))]
            _measured[key] = measured
    difference, tolerance = measured
    # Not the other way round: nothing is less than not-a-number.
    if not difference <= tolerance:
        how = "shapes" if math.isinf(difference) else f"relative error {difference:.1e}, tolerance {tolerance:.0e}"
        raise Unsupported(
            f"{name} cannot verify drafts{in_rows}: multi-token passes differ from single-token passes "
            f"({how}). Generate without `assistant_model`."
        )


def _measure(target: PreTrainedModel, traits: TargetTraits, rows: Rows) -> tuple[float, float]:
    """Returns the difference, and the tolerance for it."""
    if target.dtype not in (torch.float16, torch.bfloat16):
        return measure_continuation(target, traits, rows), TOLERANCE
    try:
        # In 16 bits rounding would hide what is wrong.
        return measure_continuation(target, traits, rows, in_float32=True), TOLERANCE
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError):
        # Kernels of other packages, and quantized weights, may take 16 bits alone.
        return measure_continuation(target, traits, rows), torch.finfo(target.dtype).eps ** 0.5


def measure_continuation(
    target: PreTrainedModel, traits: TargetTraits, rows: Rows = "one row", in_float32: bool = False
) -> float:
    """
    Returns the error of multi-token passes with a rollback between them, against single-token passes: the root mean
    square relative to that of the values, the largest of the logits and of each tensor in the cache. (A lost state may
    hardly show in the logits of an untrained model.) With `in_float32` a target in 16 bits computes in float32.
    """
    device = target.get_input_embeddings().weight.device
    length = NUM_PROMPT_TOKENS + NUM_TOKENS
    num_ids = min(target.config.get_text_config(decoder=True).vocab_size, 97)
    num_rows = 1 if rows == "one row" else 2
    tokens = (torch.arange(num_rows * length, device=device) * 5 % (num_ids - 1) + 1).view(-1, length)
    mask = torch.ones_like(tokens)
    if rows == "a padded batch":
        mask[0, :NUM_PADDED] = 0
    with computing_in_float32() if in_float32 else nullcontext():
        passes = (run(_Trial(target, traits, tokens, mask)) for run in (_run_at_once, _run_singly))
        differences = [_difference(*pair) for pair in zip(*passes, strict=True)]
    return float("nan") if any(map(math.isnan, differences)) else max(differences)


class _Trial:
    """Passes of a target over `tokens` `(B, T)` under `mask`, the first of which are in its cache."""

    def __init__(self, target: PreTrainedModel, traits: TargetTraits, tokens: torch.Tensor, mask: torch.Tensor):
        self.target, self.traits, self.tokens, self.mask = target, traits, tokens, mask
        self.cache = traits.make_cache()
        outputs = self._outputs(tokens[:, :NUM_PROMPT_TOKENS])
        if self.cache is None:
            self.cache = outputs[traits.cache_argument]

    def run(self, tokens: torch.Tensor, end: int) -> torch.Tensor:
        """Runs `tokens` `(B, n)`, after which the text is `end` long. Returns their logits `(B, n, V)`."""
        logits: torch.Tensor = self._outputs(tokens, end).logits
        return logits

    @torch.no_grad()
    def _outputs(self, tokens: torch.Tensor, end: int = NUM_PROMPT_TOKENS) -> Any:
        num_tokens, mask = tokens.shape[1], self.mask[:, :end]
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -num_tokens:]
        takes_positions = "position_ids" in inspect.signature(self.target.forward).parameters
        model_inputs = self.target.prepare_inputs_for_generation(
            tokens,
            **{self.traits.cache_argument: self.cache},
            attention_mask=mask,
            position_ids=positions if takes_positions else None,
            use_cache=True,
            is_first_iteration=num_tokens == end,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = num_tokens
        return self.target(**model_inputs, return_dict=True)

    def results(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Returns the logits, and what the cache holds."""
        held = [tensor for tensor in held_tensors(self.cache) if tensor.is_floating_point() and tensor.numel()]
        return [logits, *held]


def _run_singly(trial: _Trial) -> list[torch.Tensor]:
    ends = range(NUM_PROMPT_TOKENS + 1, trial.tokens.shape[1] + 1)
    logits = [trial.run(trial.tokens[:, end - 1 : end], end) for end in ends]
    return trial.results(torch.cat(logits[NUM_ACCEPTED:], dim=1))


def _run_at_once(trial: _Trial) -> list[torch.Tensor]:
    """Makes two passes over drafts, the first of which are accepted in part."""
    tokens, end = trial.tokens, trial.tokens.shape[1]
    chain = ChainCache(trial.cache, NUM_PROMPT_TOKENS, len(tokens))
    drafts = tokens[:, NUM_PROMPT_TOKENS:].clone()
    drafts[:, NUM_ACCEPTED:] = tokens[:, NUM_ACCEPTED:NUM_TOKENS]
    trial.run(chain.begin_pass(drafts), end)
    chain.keep_path(AcceptedPath(drafts, drafts, [NUM_ACCEPTED]))
    rest = tokens[:, NUM_PROMPT_TOKENS + NUM_ACCEPTED :]
    logits = trial.run(chain.begin_pass(rest), end)[:, -rest.shape[1] :]
    chain.keep_path(AcceptedPath(rest, rest, [rest.shape[1]]))
    chain.restore(trial.cache)
    return trial.results(logits)


def _difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    if values.shape != expected.shape:
        return float("inf")
    values, expected = values.cpu().double(), expected.cpu().double()  # not every device has float64
    size = expected.square().mean()
    error = (values - expected).square().mean()
    return (error / size).sqrt().item() if size > 0 else error.sqrt().item()
