"""An answer as an SVG picture: accepted drafts in green, what the target wrote while the drafter paused in gray."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from ...commands import UserValueError
from ...generation.drafting.candidate_generator import DraftOrigin
from ...generation.loop import GumihoGenerateOutput
from .answering import Answer
from .cycles import Cycle
from .terminal import describe_passes


# Characters of a line, then pixels at a font size of 14.
_COLUMNS, _CHARACTER, _LINE, _MARGIN = 92, 8.4, 20, 16
_GROUND = "#0d1117"
_COLORS = {"draft": "#3fb950", "pause": "#8b949e", "target": "#e6edf3", "caption": "#8b949e"}
# A character, and what its color says: a source of a piece, or that it stands around the answer.
Characters = list[tuple[str, str]]


@dataclass(frozen=True)
class AnswerPicture:
    """A picture that notebooks show. `svg` is its text."""

    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg


def show_answer(output: GumihoGenerateOutput, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> AnswerPicture:
    """
    Draws a text that was generated with a Gumiho drafter, for a notebook: accepted drafts in green, what the target
    wrote while the drafter paused in gray, and below it tau and the passes. If a text ends within an accepted path,
    its last token is drawn as the target's own.

    Args:
        output: What `generate(assistant_model=gumiho, return_dict_in_generate=True)` returned.
        tokenizer: The target's tokenizer.
        row: The row of the batch.

    Raises:
        ValueError: The output has no cycles.
    """
    lengths = getattr(output, "accepted_lengths", None)
    if lengths is None:
        raise UserValueError(
            "The output has no cycles. Call `generate()` with a Gumiho drafter and `return_dict_in_generate=True`."
        )
    tokens = output.sequences[row].cpu()
    # Rows that ended early are padded up to the longest one, whose tokens say where the prompt ends.
    prompt_length = len(tokens) - 1 - max(map(sum, lengths))
    first, *later = tokens[prompt_length:].split(1)
    answer = Answer()
    answer.begin(tokenizer, has_cycles=True)
    answer.put(tokens[None, :prompt_length])
    answer.put(first)
    for length, source in zip(lengths[row], output.draft_origins or [], strict=False):
        committed, later = later[:length], later[length:]
        for token in committed:
            answer.put(token)
        answer.end_cycle(_accepted_chain([int(token) for token in committed], DraftOrigin(source)))
    answer.end()
    return AnswerPicture(answer_svg(answer))


def _accepted_chain(tokens: list[int], origin: DraftOrigin) -> Cycle:
    """Returns a cycle that committed these tokens, the last one as its bonus token."""
    num_nodes = len(tokens)
    parents = tuple(max(node - 1, 0) for node in range(num_nodes))
    accepted = tuple(range(1, num_nodes))
    return Cycle((0, *tokens[:-1]), parents, (0.0,) * num_nodes, accepted, tokens[-1], origin)


def answer_svg(answer: Answer, prompt: str | None = None) -> str:
    """Returns an answer as an SVG, with its prompt above it and its passes below it."""
    above = [] if prompt is None else [(f"> {prompt}\n\n", "caption")]
    parts = [*above, *answer.pieces, (f"\n\n{describe_passes(answer)}", "caption")]
    lines = _wrap([(character, kind) for text, kind in parts for character in text])
    drawn = "".join(_text(number, line) for number, line in enumerate(lines, 1))
    width, height = round(_COLUMNS * _CHARACTER) + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{_GROUND}"/>\n{drawn}</svg>\n'
    )


def _wrap(characters: Characters) -> list[Characters]:
    """Returns the characters in lines that fit the picture."""
    text = "".join(character for character, _ in characters)
    lines, begin = list[Characters](), 0
    for paragraph in text.split("\n"):
        for line in textwrap.wrap(paragraph, _COLUMNS, drop_whitespace=False) or [""]:
            lines.append(characters[begin : begin + len(line)])
            begin += len(line)
        begin += 1  # the end of the paragraph
    return lines


def _text(number: int, line: Sequence[tuple[str, str]]) -> str:
    """Draws the line of this number, counted from 1, with a span for each run of one color."""
    spans = ""
    for kind, run in groupby(line, key=lambda pair: pair[1]):
        # An SVG drops spaces at the beginning of a line, but keeps those that do not break.
        text = "".join(character for character, _ in run).replace(" ", "\N{NO-BREAK SPACE}")
        spans += f'<tspan fill="{_COLORS[kind]}">{escape(text)}</tspan>'
    return f'<text x="{_MARGIN}" y="{_MARGIN + number * _LINE - 5}">{spans}</text>\n'
