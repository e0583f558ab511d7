"""Whether a target computes the same for several tokens behind its cache as for one after the other."""

import inspect
import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..internals import attention_implementation, cache_argument, computing_in_float32
from ..tree.verification import AcceptedPath
from .chain_cache import ChainCache
from .chain_layers import layers_of, own_states
from .own_caches import as_cache, make_cache
from .requirements import Unsupported


NUM_PROMPT_TOKENS = 9
NUM_TOKENS = 7
NUM_ACCEPTED = 3
NUM_PADDED = 2
# In float32, where rounding was measured to make up to 2e-5 in small random models, and a wrong state 4e-3 or more.
TOLERANCE = 3e-4

Rows = Literal["one row", "a batch", "a padded batch"]

# What was measured, by class, config and kind of batch: a config says which code runs. The oldest goes first.
_measured: dict[tuple[Any, ...], tuple[float, float]] = {}
MAX_MEASURED = 64
_recording = threading.Lock()


def check_continuation(target: PreTrainedModel, attention_mask: torch.Tensor | None, batch_size: int = 1) -> None:
    """
    Raises `ValueError` for a target whose pass over several tokens is not that over one after the other. The first
    call for a class and config runs the target on a few tokens; later ones look up what was measured.

    Args:
        attention_mask (`(B, T)`, *optional*): Of the prompt: where it has padding, it is tried with padding.
        batch_size: Rows of the prompt: where there are several, several are tried.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            f"{type(target).__name__} verifies chains by its own causal mask, so `attention_mask` must be (B, T), got "
            f"{tuple(attention_mask.shape)}."
        )
    rows: Rows = "one row" if batch_size == 1 else "a batch"
    if attention_mask is not None and not bool(attention_mask.all()):
        rows = "a padded batch"
    config = target.config
    implementation = attention_implementation(config.get_text_config(decoder=True))
    key = (type(target), config.to_json_string(), implementation, target.dtype, rows)
    measured = _measured.get(key)
    if measured is None:
        try:
            measured = _measure(target, rows)
        except torch.OutOfMemoryError:
            raise  # a smaller batch may do
        except (RuntimeError, TypeError, IndexError, AssertionError) as error:
            raise Unsupported(
                f"{type(target).__name__} cannot verify drafts{_in(rows)}: a trial of a few tokens after its cache "
                f"failed ({error}). Generate without `assistant_model`."
            ) from error
        with _recording:
            while len(_measured) >= MAX_MEASURED:
                del _measured[next(iter(_measured))]
            _measured[key] = measured
    difference, tolerance = measured
    # Not the other way round: nothing is less than not-a-number.
    if not difference <= tolerance:
        how = f"relative error {difference:.1e}, tolerance {tolerance:.0e}"
        raise Unsupported(
            f"{type(target).__name__} cannot verify drafts{_in(rows)}: multi-token passes differ from single-token "
            f"passes ({'in shape' if math.isinf(difference) else how}). Generate without `assistant_model`."
        )


def _in(rows: Rows) -> str:
    return "" if rows == "one row" else f" in {rows}"


def _measure(target: PreTrainedModel, rows: Rows) -> tuple[float, float]:
    """Returns the difference, and what rounding explains."""
    if target.dtype not in (torch.float16, torch.bfloat16):
        return measure_continuation(target, rows), TOLERANCE
    try:
        # In 16 bits rounding would hide what is wrong.
        return measure_continuation(target, rows, in_float32=True), TOLERANCE
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError):
        # Kernels of other packages, and quantised weights, may take 16 bits alone.
        return measure_continuation(target, rows), torch.finfo(target.dtype).eps ** 0.5


def measure_continuation(target: PreTrainedModel, rows: Rows = "one row", in_float32: bool = False) -> float:
    """
    Returns by how much it differs whether a few tokens are run behind the cache one after the other, or at once, after
    others that are taken back: the root mean square of the difference relative to that of the values, the largest of
    the logits and of each tensor in the cache. (A state that is lost may hardly show in the logits of a model that is
    not trained.)

    Args:
        target: The target.
        rows: Whether to try one or two; the first row of a padded batch begins with padding.
        in_float32: Whether a target in 16 bits computes in float32.
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
        pairs = list(zip(_run_at_once(target, tokens, mask), _run_singly(target, tokens, mask), strict=True))
    differences = [_difference(*pair) for pair in pairs]
    return float("nan") if any(map(math.isnan, differences)) else max(differences)


def _run_singly(target: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Returns the logits of the last tokens, and what is in the cache after them."""
    cache = _read_prompt(target, tokens, mask)
    logits = [
        _run(target, tokens[:, place : place + 1], mask[:, : place + 1], cache)
        for place in range(NUM_PROMPT_TOKENS, tokens.shape[1])
    ]
    return [torch.cat(logits[NUM_ACCEPTED:], dim=1), *_entries(cache)]


def _run_at_once(target: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Returns the same after two passes over drafts, the first of which are accepted in part."""
    cache = _read_prompt(target, tokens, mask)
    chain = ChainCache(cache, NUM_PROMPT_TOKENS, len(tokens))
    drafts = tokens[:, NUM_PROMPT_TOKENS:].clone()
    drafts[:, NUM_ACCEPTED:] = tokens[:, NUM_ACCEPTED:NUM_TOKENS]
    _run(target, chain.begin_pass(drafts), mask, cache)
    chain.commit(AcceptedPath(drafts, drafts, [NUM_ACCEPTED]))
    rest = tokens[:, NUM_PROMPT_TOKENS + NUM_ACCEPTED :]
    logits = _run(target, chain.begin_pass(rest), mask, cache)[:, -rest.shape[1] :]
    chain.commit(AcceptedPath(rest, rest, [rest.shape[1]]))
    chain.restore(cache)
    return [logits, *_entries(cache)]


def _difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    if values.shape != expected.shape:
        return float("inf")
    values, expected = values.cpu().double(), expected.cpu().double()  # not every device has float64
    size = expected.square().mean()
    error = (values - expected).square().mean()
    return (error / size).sqrt().item() if size > 0 else error.sqrt().item()


def _read_prompt(target: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
    """Runs the first of the tokens. Returns the cache that holds them."""
    cache = make_cache(target)
    outputs = _outputs(target, tokens[:, :NUM_PROMPT_TOKENS], mask[:, :NUM_PROMPT_TOKENS], cache)
    return outputs[cache_argument(target)] if cache is None else cache


def _run(target: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Runs `tokens` `(B, n)`, the last ones of those that `mask` `(B, T)` is for. Returns their logits `(B, n, V)`."""
    logits: torch.Tensor = _outputs(target, tokens, mask, cache).logits
    return logits


@torch.no_grad()
def _outputs(target: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, cache: Any) -> Any:
    num_tokens = tokens.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -num_tokens:]
    takes_positions = "position_ids" in inspect.signature(target.forward).parameters
    model_inputs = target.prepare_inputs_for_generation(
        tokens,
        **{cache_argument(target): cache},
        attention_mask=mask,
        position_ids=positions if takes_positions else None,
        use_cache=True,
        is_first_iteration=num_tokens == mask.shape[1],
    )
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = num_tokens
    return target(**model_inputs, return_dict=True)


def _entries(cache: Any) -> Iterator[torch.Tensor]:
    return _tensors([own_states(as_cache(cache)), *map(vars, layers_of(cache))])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of floating-point numbers in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel() > 0:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
