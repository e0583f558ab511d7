"""An EAGLE head in vLLM's model runner V2 that drafts only the first tokens of a chain, in each release of vLLM."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator


# Since 0.32 each call says how many tokens to draft; before, all calls draft `num_speculative_steps`.
_LENGTH_IN_CALLS = "num_speculative_tokens" in inspect.signature(EagleSpeculator.propose).parameters


class SerialSpeculator(EagleSpeculator):
    """
    Its buffers have room for complete chains. Its passes, also those captured as graphs, draft `num_serial_tokens`,
    which a subclass sets.
    """

    _num_serial_tokens: int
    num_speculative_steps: int  # of the base class

    def draft_serially(self, num_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Returns chains `(n, num_speculative_steps)` with the serial ones of the first `num_tokens` drafted, in place.
        """
        serial = min(num_tokens, self._num_serial_tokens)
        if _LENGTH_IN_CALLS:
            # vLLM has captured graphs of the lengths that users choose, so it is to look for one of these.
            num_tokens = num_tokens if serial > 1 else serial
            return super().propose(*args, num_speculative_tokens=num_tokens, **kwargs)
        with self._length_of_chains(serial):
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
        method = super()._generate_fused_drafts
        method(*self._shortened(method, *args, **kwargs))

    def _multi_step_decode(self, *args: Any, **kwargs: Any) -> None:
        method = super()._multi_step_decode
        method(*self._shortened(method, *args, **kwargs))

    def _shortened(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the arguments of a method that drafts a chain, with no more than the serial tokens as its length."""
        arguments = inspect.signature(method).bind(*args, **kwargs)
        if _LENGTH_IN_CALLS:
            length = min(arguments.arguments["num_speculative_steps"], self._num_serial_tokens)
            arguments.arguments["num_speculative_steps"] = length
        return arguments.args

    @contextmanager
    def _length_of_chains(self, num_tokens: int) -> Iterator[None]:
        num_steps = self.num_speculative_steps
        self.num_speculative_steps = num_tokens
        try:
            yield
        finally:
            self.num_speculative_steps = num_steps


__all__ = ["SerialSpeculator"]
