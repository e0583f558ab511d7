"""What the recorder keeps of one call of `generate()`: its states, which are copied to the host, and its tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from ..commands import UserValueError
from ..generation.observers import GenerationObserver
from ..generation.verification.target_states import TargetStates
from .data.target_runs import why_not_finite


DTYPE = torch.bfloat16  # in which `gumiho train` keeps states, too
_MAX_ROW = 2048  # tokens; of a longer text, the parts that the target wrote are kept


class RecordedCall(GenerationObserver):
    """
    A call of `generate()`, whose states are on their way to the host.

    Args:
        num_layers: Layers beside the last one whose states are kept; `None` for a drafter that reads the last one.
        vocab_size: Tokens that the drafter knows. A multimodal prompt may mark its images by others.
        end: Takes the call when it has ended.
        guard: Returns a context in which errors end the recording instead of the call.
    """

    def __init__(
        self,
        num_layers: int | None,
        vocab_size: int,
        end: Callable[["RecordedCall"], None],
        guard: Callable[[], AbstractContextManager[None]],
    ):
        self._num_layers, self._vocab_size, self._end, self._guard = num_layers, vocab_size, end, guard
        self._states: list[tuple[dict[str, torch.Tensor], Sequence[int]]] = []  # of the prompt and of each cycle
        self._new_tokens: list[list[int]] = []

    @property
    def num_rows(self) -> int:
        """Texts of the batch."""
        return len(self._new_tokens)

    def on_prompt(self, input_ids: torch.Tensor, states: TargetStates, mask: torch.Tensor | None) -> None:
        """Keeps the prompt from where its states begin, or the end of it where it is long."""
        with self._guard():
            self._devices = {input_ids.device, states.last.device} - {torch.device("cpu")}
            num_known = min(states.last.shape[1], input_ids.shape[1], _MAX_ROW)
            self._prompt = _to_host(input_ids[:, input_ids.shape[1] - num_known :])
            self._mask = None if mask is None else _to_host(mask[:, mask.shape[1] - num_known :])
            self._keep(states.newest(num_known), [num_known] * len(input_ids))

    def on_states(self, states: TargetStates, counts: Sequence[int]) -> None:
        """Keeps the states of a cycle."""
        with self._guard():
            self._keep(states, counts)

    def on_generation_end(self, new_tokens: list[list[int]]) -> None:
        """Hands the call to the recorder."""
        with self._guard():
            if self._states:
                self._new_tokens = new_tokens
                self._end(self)

    def _keep(self, states: TargetStates, counts: Sequence[int]) -> None:
        kept = {"hidden_states": states.last}
        if self._num_layers is not None:
            kept["layer_states"] = states.target_states[..., : self._num_layers * states.last.shape[-1]]
        self._states.append(({name: _to_host(tensor.to(DTYPE)) for name, tensor in kept.items()}, counts))

    def read_rows(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the rows of a feature cache: of each text, those parts in which the target wrote something."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
        (of_prompt, _), *cycles = self._states
        for number, new in enumerate(self._new_tokens):
            is_text = torch.ones_like(self._prompt[number]) if self._mask is None else self._mask[number]
            prompt = self._prompt[number][is_text.bool()]
            states = {
                name: torch.cat([
                    of_prompt[name][number][is_text.bool()],
                    *(of_cycle[name][number, : counts[number]] for of_cycle, counts in cycles),
                ])
                for name in of_prompt
            }  # fmt: skip
            length = len(states["hidden_states"])  # the text's last token has no state
            ids = torch.tensor([*prompt.tolist(), *new][:length], dtype=torch.int32, device="cpu")
            ids = ids.clamp(max=self._vocab_size - 1)
            if not all(torch.isfinite(of_name).all() for of_name in states.values()):
                raise UserValueError(why_not_finite(DTYPE))
            loss_mask = torch.zeros_like(ids)
            loss_mask[len(prompt) :] = 1
            # From the end, so that what the target wrote has as much as possible before it.
            for stop in range(length, 0, -_MAX_ROW):
                part = slice(max(stop - _MAX_ROW, 0), stop)
                loss_mask[stop - 1] = 0  # no token of the row follows
                if loss_mask[part].any():
                    yield {"input_ids": ids[part], "loss_mask": loss_mask[part]} | {
                        name: of_name[part] for name, of_name in states.items()
                    }


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, which is only queued where it comes from a device."""
    return tensor.to("cpu", non_blocking=True, copy=True)
