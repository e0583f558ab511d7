"""Writing a text as it is decoded, its accepted drafts in color."""

import os
from collections import deque
from collections.abc import Callable
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..user_errors import UserValueError
from .cycles import Cycle


_GREEN, _RESET = "\033[32m", "\033[0m"
# Tokens before a piece that its text may depend on: some tokenizers drop a space where a text begins.
_CONTEXT = 8
# What a decoder writes for bytes that are not a complete character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class CycleStreamer(BaseStreamer):
    """
    Hands on the text of one sequence as it is decoded, in pieces of complete characters, and says which pieces hold
    accepted drafts only. A character that needs a token of the target's own is no such piece. A token waits until its
    cycle is known, which may be before or after the token comes.

    Args:
        tokenizer: The target's tokenizer.
        on_piece: Is called with each piece, and whether it was drafted.
        has_cycles: Whether the text is decoded with draft trees, so that [`expect`] is called for each cycle.
            Otherwise all tokens are the target's own.
        on_step: Is called after each cycle, when all its tokens have come; without cycles, after each token.

    Attributes:
        tokens: The tokens that came after the prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        on_piece: Callable[[str, bool], None],
        has_cycles: bool = True,
        on_step: Callable[[], None] = lambda: None,
    ):
        self.tokenizer = tokenizer
        self.on_piece = on_piece
        self.has_cycles = has_cycles
        self.on_step = on_step
        self.tokens: list[int] = []
        # Tokens whose cycle is not known yet, or what is known of tokens that have not come yet.
        self._waiting: deque[int] = deque()
        self._are_drafts: deque[bool] = deque()
        self._context: list[int] | None = None  # of the piece to come; none before the prompt
        self._piece: list[tuple[int, bool]] = []

    def expect(self, cycle: Cycle) -> None:
        """Notes that the next tokens, some of which may be waiting, are those of `cycle`."""
        drafts = len(cycle.accepted)
        self._are_drafts.extend(index < drafts for index in range(len(cycle.committed)))
        self._step()

    def put(self, value: torch.Tensor) -> None:
        """
        Takes as `value` the prompt `(1, T)` in the first call, which is not handed on, and a new token `(1,)` in every
        other call.

        Raises:
            ValueError: There are several sequences.
        """
        if value.shape[0] != 1:
            raise UserValueError(f"Only one text can be written at a time, got tokens of shape {tuple(value.shape)}.")
        if self._context is None:
            self._context = value[0, -_CONTEXT:].tolist()
            return
        if not self.has_cycles or (not self.tokens and not self._are_drafts):
            self._are_drafts.append(False)  # the first token is chosen after the prompt, in no cycle
        self.tokens.append(int(value))
        self._waiting.append(int(value))
        self._step()

    def end(self) -> None:
        """Hands on the end of a text that ends within a character or, interrupted, within a cycle."""
        self._are_drafts.extend([False] * len(self._waiting))
        self._release_known()
        self._release_piece(is_last=True)

    def _step(self) -> None:
        self._release_known()
        if not self._waiting and not self._are_drafts:
            self.on_step()

    def _release_known(self) -> None:
        while self._waiting and self._are_drafts:
            self._piece.append((self._waiting.popleft(), self._are_drafts.popleft()))
            self._release_piece()

    def _release_piece(self, is_last: bool = False) -> None:
        context, piece = self._context or [], [token for token, _ in self._piece]
        text = self._decode(context + piece)
        if text.endswith(_INCOMPLETE) and not is_last:
            return
        # A prompt may end within a character, which is then written completely.
        text = text[len(self._decode(context).rstrip(_INCOMPLETE)) :]
        self.on_piece(text, all(is_draft for _, is_draft in self._piece))
        self._context, self._piece = (context + piece)[-_CONTEXT:], []

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def wants_colors(choice: str, stream: TextIO) -> bool:
    """Returns whether to write colors to `stream`; `"auto"` asks for a terminal, and respects https://no-color.org."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colored(text: str, wanted: bool = True) -> str:
    """Returns `text` in the color of accepted drafts."""
    return f"{_GREEN}{text}{_RESET}" if wanted and text else text


def colored_writer(stream: TextIO, colors: bool) -> Callable[[str, bool], None]:
    """Returns a function that writes pieces of a text to `stream`, with drafted ones in color if wanted."""

    def write(text: str, is_draft: bool) -> None:
        stream.write(colored(text, colors and is_draft))
        stream.flush()

    return write
