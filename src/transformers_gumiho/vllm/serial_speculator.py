"""An EAGLE head that drafts only the first tokens of a chain, for V2 runners of all supported vLLM releases."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from .contract import check_signatures


check_signatures(EagleSpeculator)
# Since 0.32 each call says how many tokens to draft. Before, all calls drafted `num_speculative_steps`.
_LENGTH_IN_CALLS = "num_speculative_tokens" in inspect.signature(EagleSpeculator.propose).parameters


class SerialSpeculator(EagleSpeculator):
    """
    The buffers have room for complete chains. The passes, including those captured as graphs, draft
    `_num_serial_tokens` tokens. A subclass sets this number.
    """

    _num_serial_tokens: int
    num_speculative_steps: int  # of the base class

    def draft_serially(self, num_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """
        Drafts the serial tokens among the first `num_tokens`, in place. Returns the chains
        `(n, num_speculative_steps)`.
        """
        serial = min(num_tokens, self._num_serial_tokens)
        if _LENGTH_IN_CALLS:
            # vLLM has captured graphs for the lengths that users choose, so it must look for one of these.
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
        """Returns the arguments of a method that drafts a chain, with the length cut to the serial tokens."""
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
