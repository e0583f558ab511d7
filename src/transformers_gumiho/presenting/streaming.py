"""Writing a text as it is decoded, its accepted drafts in colour."""

from collections import deque
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .colours import coloured
from .cycles import Cycle


# Tokens before a piece that its text may depend on: some tokenizers drop a space where a text begins.
_CONTEXT = 8
# What a decoder writes for bytes that are no whole character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class CycleStreamer(BaseStreamer):
    """
    Writes the text of one sequence as it is decoded, in pieces of whole characters. Pieces that are made of accepted
    drafts alone are coloured; the target's own tokens, and characters that need one of them, are plain. A token is
    written once its cycle is known, which may be before or after it comes.

    Args:
        tokenizer: The target's tokenizer.
        stream: Where the text goes.
        colours: Whether to colour pieces.

    Attributes:
        tokens: The tokens that came after the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: TextIO, colours: bool):
        self.tokenizer = tokenizer
        self.stream = stream
        self.colours = colours
        self.tokens: list[int] = []
        # Tokens whose cycle is not known yet, or what is known of tokens that have not come yet.
        self._waiting: deque[int] = deque()
        self._are_drafts: deque[bool] = deque()
        self._context: list[int] | None = None  # of the piece to come; none before the prompt
        self._piece: list[tuple[int, bool]] = []

    def expect(self, cycle: Cycle) -> None:
        """Takes note that the next tokens, which may be waiting already, are those of `cycle`."""
        drafts = len(cycle.accepted)
        self._are_drafts.extend(index < drafts for index in range(len(cycle.committed)))
        self._write_known()

    def put(self, value: torch.Tensor) -> None:
        """
        Takes as `value` the prompt `(1, T)`, which is not written, in the first call, and a new token `(1,)` in every
        other one.

        Raises:
            ValueError: There are several sequences.
        """
        if value.shape[0] != 1:
            raise ValueError(f"Only one text can be written at a time, got tokens of shape {tuple(value.shape)}.")
        if self._context is None:
            self._context = value[0, -_CONTEXT:].tolist()
            return
        if not self.tokens and not self._are_drafts:
            self._are_drafts.append(False)  # the first token is chosen after the prompt, in no cycle
        self.tokens.append(int(value))
        self._waiting.append(int(value))
        self._write_known()

    def end(self) -> None:
        """Writes what is left of a text that ends within a character or, interrupted, within a cycle."""
        self._are_drafts.extend([False] * len(self._waiting))
        self._write_known()
        self._write_piece(is_last=True)

    def _write_known(self) -> None:
        while self._waiting and self._are_drafts:
            self._piece.append((self._waiting.popleft(), self._are_drafts.popleft()))
            self._write_piece()

    def _write_piece(self, is_last: bool = False) -> None:
        context, piece = self._context or [], [token for token, _ in self._piece]
        text = self._decode(context + piece)
        if text.endswith(_INCOMPLETE) and not is_last:
            return
        # A prompt may end within a character, which is written whole.
        text = text[len(self._decode(context).rstrip(_INCOMPLETE)) :]
        self.stream.write(coloured(text, self.colours and all(is_draft for _, is_draft in self._piece)))
        self.stream.flush()
        self._context, self._piece = (context + piece)[-_CONTEXT:], []

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
