"""
Experts of passes over single tokens, as plain decoding runs them.

On accelerators `generate()` reads prompts with experts in `grouped_mm`, and decodes with `batched_mm`, which copies
the weights of each token's experts. A pass over one token per row (a paused cycle) is such a step; passes over trees
keep `grouped_mm`. transformers writes this choice to the target's config, which all threads share. Here the registered
function chooses, in the thread that runs such a pass.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from ..internals import GROUPED_EXPERTS, experts_function
from .attention import current_pass, pass_state


@contextmanager
def experts_of_decoding() -> Iterator[None]:
    """Returns a context for a pass over a single token in each row, on an accelerator."""
    if experts_function("grouped_mm") is GROUPED_EXPERTS:
        ExpertsInterface.register("grouped_mm", _dispatch)
    with pass_state(has_single_tokens=True):
        yield


@functools.wraps(GROUPED_EXPERTS)
def _dispatch(*args: Any, **kwargs: Any) -> torch.Tensor:
    run = experts_function("batched_mm") if current_pass("has_single_tokens") else GROUPED_EXPERTS
    output: torch.Tensor = run(*args, **kwargs)
    return output
