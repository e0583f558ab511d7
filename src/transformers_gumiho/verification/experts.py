"""
Experts of passes over single tokens, as plain decoding runs them.

On accelerators `generate()` reads prompts with experts in `grouped_mm`, and decodes with `batched_mm`, which copies
the weights of each token's experts. A pass over one token per row (a paused cycle) is such a step of decoding. Passes
over trees have many tokens, and keep `grouped_mm`.

transformers writes this choice to the target's config, which all threads share. Here the registered function chooses,
in the thread that runs such a pass.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..internals import GROUPED_EXPERTS, experts_function, replace_experts_function


# State of a pass over single tokens: whether it runs the experts of decoding.
_passes = threading.local()


@contextmanager
def experts_of_decoding() -> Iterator[None]:
    """Returns a context for a pass over a single token in each row, on an accelerator."""
    before = getattr(_passes, "are_single_tokens", False)
    _passes.are_single_tokens = True
    if experts_function("grouped_mm") is GROUPED_EXPERTS:
        replace_experts_function("grouped_mm", _dispatch)
    try:
        yield
    finally:
        _passes.are_single_tokens = before


@functools.wraps(GROUPED_EXPERTS)
def _dispatch(*args: Any, **kwargs: Any) -> torch.Tensor:
    are_single_tokens = getattr(_passes, "are_single_tokens", False)
    run: Callable[..., torch.Tensor] = experts_function("batched_mm") if are_single_tokens else GROUPED_EXPERTS
    return run(*args, **kwargs)
