"""Draws what `gumiho generate --compare --color always` writes as an SVG.

PROMPT="Count from 1 to 20."
gumiho generate --pair smollm2 --dtype float32 --compare --color always --prompt "$PROMPT" |
    python docs/pictures/draw_answer.py --prompt "$PROMPT" docs/images/answer.svg
"""

import argparse
import re
import sys
import textwrap
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path


COLUMNS, CHARACTER, LINE, MARGIN = 92, 8.4, 20, 16  # characters, then pixels at a font size of 14
GROUND, GRAY, WHITE, GREEN = "#0d1117", "#8b949e", "#e6edf3", "#3fb950"
COLORS = {"\033[0m": WHITE, "\033[32m": GREEN}


def read_characters(written: str) -> list[tuple[str, str]]:
    """Returns each character that a terminal is sent, and its color."""
    color, characters = WHITE, []
    for piece in re.split(r"(\033\[\d+m)", written):
        if piece.startswith("\033"):
            color = COLORS[piece]
        else:
            characters += [(character, color) for character in piece]
    return characters


def without_speeds(written: str) -> str:
    """Removes the speeds and the speed-up, which are those of one machine at one moment."""
    return re.sub(r" \| [\d.]+ tokens/s|^Speed-up [\d.]+x, ", "", written, flags=re.M)


def wrap(characters: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Returns the characters in lines that fit the picture."""
    text, lines, place = "".join(character for character, _ in characters), [], 0
    for paragraph in text.split("\n"):
        for line in textwrap.wrap(paragraph, COLUMNS, drop_whitespace=False) or [""]:
            lines.append(characters[place : place + len(line)])
            place += len(line)
        place += 1
    return lines


def side_by_side(lines: list[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
    """Returns the lines of two answers next to each other if the picture is wide enough for both."""
    end = next(n for n, line in enumerate(lines, start=1) if "".join(c for c, _ in line).startswith("[tau"))
    left, right = lines[:end], lines[end + 1 :]
    width = max(map(len, left)) + 4
    if width + max(map(len, right)) > COLUMNS:
        return lines
    rows = zip_longest(left, right, fillvalue=[])
    return [line + [(" ", WHITE)] * (width - len(line)) + other for line, other in rows]


def draw(lines: list[list[tuple[str, str]]]) -> str:
    """Returns the lines as an SVG, one below the other on a dark ground."""
    rows = []
    for number, line in enumerate(lines, start=1):
        spans = ""
        for color, run in groupby(line, key=lambda character: character[1]):
            # An SVG drops spaces at the beginning of a line, but keeps those that do not break.
            text = "".join(character for character, _ in run).replace(" ", "\N{NO-BREAK SPACE}")
            spans += f'<tspan fill="{color}">{escape(text)}</tspan>'
        rows.append(f'<text x="{MARGIN}" y="{MARGIN + number * LINE - 5}">{spans}</text>\n')
    width, height = round(COLUMNS * CHARACTER) + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>\n{"".join(rows)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompt", required=True)
    args = parser.parse_args()
    prompt = [(character, GRAY) for character in f"> {args.prompt}\n"]
    answers = wrap(read_characters(without_speeds(sys.stdin.read().rstrip())))
    args.output.write_text(draw(wrap(prompt) + side_by_side(answers)), encoding="utf-8")


if __name__ == "__main__":
    main()
