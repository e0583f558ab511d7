"""An EAGLE head in vLLM's model runner V2 that drafts only the first tokens of a chain, in each release of vLLM."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator


# Since 0.32 each call says how many tokens to draft; before, all calls draft `num_speculative_steps`.
_LENGTH_IN_CALLS = "num_speculative_tokens" in inspect.signature(EagleSpeculator.propose).parameters


class SerialSpeculator(EagleSpeculator):
    """
    Its buffers are those of whole chains, and its passes those of `num_serial_tokens`, which the class that inherits
    from this one sets; also those that are captured as graphs.
    """

    _num_serial_tokens: int
    num_speculative_steps: int  # of the base class

    def draft_serially(self, num_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns chains `(n, num_speculative_steps)` with only the first `num_tokens` drafted, in place."""
        if _LENGTH_IN_CALLS:
            return super().propose(*args, num_speculative_tokens=num_tokens, **kwargs)
        with self._length_of_chains(num_tokens):
            drafted = super().propose(*args, **kwargs)
        return self.draft_tokens[: len(drafted)]

    def capture(self) -> None:
        """Captures graphs of the passes."""
        if _LENGTH_IN_CALLS:
            super().capture()
            return
        with self._length_of_chains(self._num_serial_tokens):
            super().capture()

    def _generate_fused_drafts(self, *args: Any, **kwargs: Any) -> None:
        if _LENGTH_IN_CALLS:
            # Where a graph of all steps is captured, this is called with the length of the whole chain.
            bound = inspect.signature(super()._generate_fused_drafts).bind(*args, **kwargs)
            length = min(bound.arguments["num_speculative_steps"], self._num_serial_tokens)
            bound.arguments["num_speculative_steps"] = length
            args, kwargs = bound.args, bound.kwargs
        super()._generate_fused_drafts(*args, **kwargs)

    @contextmanager
    def _length_of_chains(self, num_tokens: int) -> Iterator[None]:
        whole = self.num_speculative_steps
        self.num_speculative_steps = num_tokens
        try:
            yield
        finally:
            self.num_speculative_steps = whole


__all__ = ["SerialSpeculator"]
