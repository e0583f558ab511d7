"""Trials of a target with a few tokens: whether its passes over several tokens compute what single tokens do."""

import copy
import inspect
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ...commands import UserError
from ...internals import computing_in_float32, in_eval_mode, weights_version
from .placement import input_device
from .tree_cache import TreeCache


NUM_PROMPT_TOKENS = 9
# Before code of other packages, which may treat longer texts in another way (windows, compressed caches).
NUM_PROMPT_TOKENS_OF_FOREIGN_CODE = 256
NUM_TOKENS = 7
NUM_PADDED = 2
# In float32, where small random models measured up to 2e-5 by rounding, and 4e-3 or more with a wrong state.
TOLERANCE = 3e-4

Rows = Literal["one row", "a batch", "a padded batch"]
# Two nodes under the root, and one under the second of them; more under the root, as many as a usual tree has.
_TREE_PATHS = ((0,), (0, 1), (0, 2), (0, 2, 3), *((0, number) for number in range(4, 64)))
# Those that are compared: the last is far behind the prompt.
_COMPARED = (0, 1, 2, 3, len(_TREE_PATHS) - 1)


class Verdict(NamedTuple):
    """What a trial has measured: a relative error, and the largest one that counts as rounding."""

    difference: float
    tolerance: float
    weights: Any  # those that were measured

    @property
    def is_right(self) -> bool:
        """Whether drafts can be verified."""
        # Not the other way round: nothing is less than not-a-number.
        return self.difference <= self.tolerance


# Of each target by its embedding, which the copies of a compiled target share. The oldest go first.
_measured: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Verdict]] = WeakKeyDictionary()
MAX_MEASURED = 16
_recording = threading.Lock()


def tried(target: PreTrainedModel, traits: Any, what: str, measure: Callable[[], float]) -> Verdict:
    """
    Returns the verdict of a trial by name `what`, which runs once for a target with this config, code and dtype on
    this device. One that the target failed is repeated when its weights have changed. `traits` are its
    [`TargetTraits`]; `measure` returns the relative error.
    """
    key = (
        what,
        type(target),
        json.dumps(target.config.to_dict(), default=str),  # users put any objects into a config
        (traits.attention.name, traits.foreign),
        (target.dtype, input_device(target), target.use_kernels),
    )
    known = _measured.get(target.get_input_embeddings(), {}).get(key)
    if known is not None and (known.is_right or known.weights == weights_version(target)):
        return known
    # Whatever precision the call runs in, as the verdict is that of all calls.
    with in_eval_mode(target), in_full_float32(), torch.autocast(input_device(target).type, enabled=False):
        verdict = Verdict(*_measure(target, measure), weights_version(target))
    with _recording:
        verdicts = _measured.setdefault(target.get_input_embeddings(), {})
        while len(verdicts) >= MAX_MEASURED:
            del verdicts[next(iter(verdicts))]
        verdicts[key] = verdict
    return verdict


@contextmanager
def in_full_float32() -> Iterator[None]:
    """Returns a context in which products of float32 are not rounded (to TF32, on GPUs)."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _measure(target: PreTrainedModel, measure: Callable[[], float]) -> tuple[float, float]:
    """Returns the difference, and the tolerance for it."""
    if target.dtype in (torch.float16, torch.bfloat16):
        try:
            # In 16 bits rounding would hide what is wrong.
            with computing_in_float32():
                return measure(), TOLERANCE
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, AssertionError):
            # Kernels of other packages, and quantized weights, may take 16 bits alone.
            return measure(), torch.finfo(target.dtype).eps ** 0.5
    return measure(), TOLERANCE


def follows_tree_masks(target: PreTrainedModel, traits: Any) -> bool:
    """
    Whether a target that runs code of other packages computes the nodes of a draft tree as single tokens after their
    paths. Such code may ignore the mask, or count distances by cache slots.
    """
    try:
        return tried(target, traits, "a tree", lambda: _measure_tree(target, traits)).is_right
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception:
        # Whatever the code raises for a mask that it does not take. As a chain the target is tried again.
        return False


def _measure_tree(target: PreTrainedModel, traits: Any) -> float:
    """Returns the error of the logits of a pass over a tree, against passes of single tokens."""
    trial = Trial(target, traits, *trial_tokens(target, traits, "one row", len(_TREE_PATHS)))
    # The path's tokens are those of its nodes, one after the other.
    singly = [
        run_singly(trial.with_path(path), num_skipped=len(path) - 1)
        for path in map(_TREE_PATHS.__getitem__, _COMPARED)
    ]
    at_once = _run_tree(trial)[:, _COMPARED]
    return largest_error(at_once.split(1, dim=1), singly)


def _run_tree(trial: "Trial") -> torch.Tensor:
    """Returns the logits `(1, n, V)` of the nodes of a tree after the prompt."""
    num_nodes, device, traits = len(_TREE_PATHS), trial.tokens.device, trial.traits
    depths = torch.tensor([[len(path) - 1 for path in _TREE_PATHS]], device=device)
    ancestors = torch.tensor([[[node in path for node in range(num_nodes)] for path in _TREE_PATHS]], device=device)
    cache = TreeCache.from_dynamic(trial.cache, trial.num_prompt + num_nodes)
    dtype = traits.attention.mask_dtype(trial.target.dtype)
    masks = {kind: cache.attention_mask(ancestors, depths, dtype, window) for kind, window in traits.windows.items()}
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    logits: torch.Tensor = trial.run_with(trial.tried, cache, mask, trial.num_prompt + depths).logits
    return logits


def trial_tokens(
    target: PreTrainedModel, traits: Any, rows: Rows, num_tokens: int = NUM_TOKENS
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the tokens `(B, T)` of a trial, their mask, and how many of them are before those that are tried."""
    device, config = input_device(target), target.config.get_text_config(decoder=True)
    num_prompt = NUM_PROMPT_TOKENS
    if traits.foreign:
        fields = ("original_max_position_embeddings", "max_position_embeddings")
        limits = [limit - num_tokens for name in fields if (limit := getattr(config, name, None)) is not None]
        num_prompt = max(min([NUM_PROMPT_TOKENS_OF_FOREIGN_CODE, *limits]), NUM_PROMPT_TOKENS)
    length, num_ids = num_prompt + num_tokens, min(config.vocab_size, 97)
    num_rows = 1 if rows == "one row" else 2
    tokens = (torch.arange(num_rows * length, device=device) * 5 % (num_ids - 1) + 1).view(-1, length)
    mask = torch.ones_like(tokens)
    if rows == "a padded batch":
        mask[0, :NUM_PADDED] = 0
    return tokens, mask, num_prompt


class Trial:
    """Passes of a target over `tokens` `(B, T)` under `mask`, the first `num_prompt` of which are in its cache."""

    def __init__(
        self, target: PreTrainedModel, traits: Any, tokens: torch.Tensor, mask: torch.Tensor, num_prompt: int
    ):
        self.target, self.traits, self.tokens, self.mask, self.num_prompt = target, traits, tokens, mask, num_prompt
        self.cache = traits.make_cache()
        outputs = self._outputs(tokens[:, :num_prompt], num_prompt)
        traits.check_is_written(self.cache)
        if self.cache is None:
            self.cache = outputs[traits.cache_argument]

    @property
    def tried(self) -> torch.Tensor:
        """The tokens after the prompt."""
        return self.tokens[:, self.num_prompt :]

    def with_path(self, path: Sequence[int]) -> "Trial":
        """Returns the same with these of the tokens that are tried, and a cache of its own."""
        other = copy.copy(self)
        other.tokens = torch.cat((self.tokens[:, : self.num_prompt], self.tried[:, [*path]]), dim=1)
        other.cache = copy.deepcopy(self.cache)
        return other

    def run(self, tokens: torch.Tensor, end: int) -> torch.Tensor:
        """Runs `tokens` `(B, n)`, the last of `end` tokens. Returns their logits `(B, n, V)`."""
        logits: torch.Tensor = self._outputs(tokens, end).logits
        return logits

    def _outputs(self, tokens: torch.Tensor, end: int) -> Any:
        num_tokens, mask = tokens.shape[1], self.mask[:, :end]
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -num_tokens:]
        takes_positions = "position_ids" in inspect.signature(self.target.forward).parameters
        return self.run_with(tokens, self.cache, mask, positions if takes_positions else None, num_tokens == end)

    @torch.no_grad()
    def run_with(
        self, tokens: torch.Tensor, cache: Any, mask: Any, positions: torch.Tensor | None, is_first: bool = False
    ) -> Any:
        """Runs `tokens` `(B, n)` with a cache, a mask and positions. Returns the outputs, with logits for all."""
        model_inputs = self.target.prepare_inputs_for_generation(
            tokens,
            **{self.traits.cache_argument: cache},
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            is_first_iteration=is_first,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = 1 if is_first else tokens.shape[1]
        return self.target(**model_inputs, **self.traits.unused_outputs, return_dict=True)


def run_singly(trial: Trial, num_skipped: int) -> torch.Tensor:
    """Returns the logits `(B, n, V)` of the tokens after the prompt, one pass for each, without the first ones."""
    ends = range(trial.num_prompt + 1, trial.tokens.shape[1] + 1)
    logits = [trial.run(trial.tokens[:, end - 1 : end], end) for end in ends]
    return torch.cat(logits[num_skipped:], dim=1)


def largest_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Returns the largest root mean square of an error, relative to that of the expected values."""
    errors = [_relative_error(*pair) for pair in zip(found, expected, strict=True)]
    return float("nan") if any(map(math.isnan, errors)) else max(errors)


def _relative_error(values: torch.Tensor, expected: torch.Tensor) -> float:
    if values.shape != expected.shape:
        return float("inf")
    values, expected = values.cpu().double(), expected.cpu().double()  # not every device has float64
    size = expected.square().mean()
    error = (values - expected).square().mean()
    return (error / size).sqrt().item() if size > 0 else error.sqrt().item()
