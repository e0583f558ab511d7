"""Draws the method: a cycle, the mask of its tree, and the drafter. The first two are of a real cycle.

    python docs/pictures/draw_method.py --pair smollm2 --dtype float32 --num_assistant_tokens 8 \
        --prompt_lookup_num_tokens 0 --prompt "Write a Python function that returns the factorial of n." --step 2

All drafts are the drafter's, of its serial head and its parallel heads.
"""

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

from transformers_gumiho.commands import parse
from transformers_gumiho.tools.pairs import DraftingArguments, load_pair, use_options
from transformers_gumiho.tools.presenting import Cycle, watch_cycles
from transformers_gumiho.tools.presenting.cycles import CycleLabels, label_cycle
from transformers_gumiho.tools.presenting.tree_svg import lay_out
from transformers_gumiho.training.data.open_text import encode_turn


INK, GRAY, GREEN, ORANGE, BLUE = "#1f2937", "#94a3b8", "#15803d", "#c2410c", "#2563eb"
COLUMN, ROW, BOX = 112, 32, (98, 24)


@dataclass
class PictureArguments(DraftingArguments):
    prompt: str = field(default="Why is the sky blue?", metadata={"help": "What the target answers."})
    step: int = field(default=2, metadata={"help": "Cycle to draw, counted from 1."})
    max_new_tokens: int = field(default=48, metadata={"help": "Maximum number of tokens of the answer."})
    output_dir: str = field(default="docs/images", metadata={"help": "Folder for the pictures."})


def watch(args: PictureArguments) -> tuple[Cycle, CycleLabels]:
    """Returns a cycle of a greedy answer, and the texts of its tokens."""
    target, tokenizer, drafter = load_pair(args)
    use_options(target, drafter, args)
    drafter.generation_config.tree_depth = None  # the serial and the parallel heads
    ids = torch.tensor([encode_turn(tokenizer, [args.prompt], [])])
    cycles: list[Cycle] = []
    with watch_cycles(cycles.append):
        text = target.generate(ids, assistant_model=drafter, max_new_tokens=args.max_new_tokens, do_sample=False)
    num_before = ids.shape[1] + 1 + sum(len(cycle.committed) for cycle in cycles[: args.step - 1])
    cycle = cycles[args.step - 1]
    return cycle, label_cycle(tokenizer, text[0, :num_before].tolist(), cycle)


def box(x: float, y: float, text: str, color: str = INK, fill: str = "white", width: float = BOX[0]) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{BOX[1]}" rx="4" fill="{fill}" stroke="{color}"/>' + label(
        x + width / 2, y + 16, text, "middle"
    )


def label(x: float, y: float, text: str, anchor: str = "start", size: int = 11, color: str = INK) -> str:
    shown = escape(text).replace(" ", "\N{NO-BREAK SPACE}")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{shown}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, color: str = INK, head: bool = True) -> str:
    mark = ' marker-end="url(#head)"' if head else ""
    return f'<path d="M{x1} {y1}L{x2} {y2}" fill="none" stroke="{color}"{mark}/>'


def picture(width: float, height: float, parts: list[str]) -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace">{head}<rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def draw_tree(cycle: Cycle, labels: CycleLabels, top: float, walked: bool) -> tuple[list[str], float]:
    """Returns the parts of a tree below `top`, and where it ends. Where it was walked, its path is green."""
    places, parts = lay_out(cycle)[: len(cycle.tokens)], []
    for node, (column, row) in enumerate(places):
        x, y = 16 + column * COLUMN, top + row * ROW
        on_path = walked and node in cycle.accepted
        color = GREEN if on_path else INK if node == 0 else GRAY
        if node:
            above_x, above_y = (value for value in places[cycle.parents[node]])
            left, middle = 16 + above_x * COLUMN + BOX[0], top + above_y * ROW + BOX[1] / 2
            parts.append(arrow(left, middle, x, y + BOX[1] / 2, color, head=False))
        parts.append(box(x, y, labels.nodes[node], color, "#dcfce7" if on_path else "white"))
    return parts, top + (1 + max(row for _, row in places)) * ROW


def draw_cycle(cycle: Cycle, labels: CycleLabels) -> str:
    """Draws draft, verify and commit, one below the other."""
    parts = [label(16, 24, "1. Draft: the drafter guesses a tree under the newest token.", size=13)]
    drafted, bottom = draw_tree(cycle, labels, 40, walked=False)
    parts += [
        *drafted,
        label(16, bottom + 32, "2. Verify: one pass of the target reads all nodes. Walk down as long", size=13),
    ]
    parts.append(label(16, bottom + 50, "   as the target's own choice is in the tree.", size=13))
    walked, bottom = draw_tree(cycle, labels, bottom + 64, walked=True)
    parts += walked
    parts.append(
        label(16, bottom + 32, "3. Commit: the accepted tokens, and the bonus token that the target chose.", size=13)
    )
    committed = [labels.nodes[node] for node in (*cycle.accepted, *range(len(cycle.tokens), len(cycle.above)))]
    for number, text in enumerate([labels.nodes[0], *committed]):
        is_bonus, is_root = number == len(committed), number == 0
        color, fill = (INK, "white") if is_root else (ORANGE, "#ffedd5") if is_bonus else (GREEN, "#dcfce7")
        parts.append(box(16 + number * COLUMN, bottom + 48, text, color, fill))
    width = 32 + COLUMN * max(5.4, 2 + len(cycle.accepted), 1 + max(column for column, _ in lay_out(cycle)))
    return picture(width, bottom + 88, parts)


def draw_mask(cycle: Cycle, labels: CycleLabels) -> str:
    """Draws which tokens each node sees: the text, and its own ancestors."""
    size, left, top = 26, 118, 112
    nodes = labels.nodes[: len(cycle.tokens)]
    names = ["text", *nodes]
    parts = [label(16, 24, "Each node (row) sees the committed text and its own ancestors.", size=13)]
    for column, name in enumerate(names):
        x = left + column * size + size / 2
        parts.append(f'<g transform="translate({x + 4} {top - 8}) rotate(-55)">{label(0, 0, name)}</g>')
    for node, name in enumerate(nodes):
        above = {node}
        while min(above):
            above.add(cycle.parents[min(above)])
        y = top + node * size
        parts.append(label(left - 8, y + 17, name, "end"))
        for column in range(len(names)):
            sees = column == 0 or column - 1 in above
            fill = BLUE if sees and column - 1 == node else "#93c5fd" if sees else "#f1f5f9"
            place = f'x="{left + column * size}" y="{y}" width="{size - 2}" height="{size - 2}"'
            parts.append(f'<rect {place} rx="3" fill="{fill}"/>')
    return picture(max(left + len(names) * size + 90, 540), top + len(nodes) * size + 16, parts)


def draw_drafter() -> str:
    """Draws the drafter: two serial tokens, then five parallel ones."""
    parts = [
        label(16, 24, "Serial head: two passes, one token after the other", size=13),
        box(16, 44, "target's state", BLUE, "#dbeafe", 130), arrow(146, 56, 194, 72),
        box(16, 84, "newest token", width=130), arrow(146, 96, 194, 80),
    ]  # fmt: skip
    for number in (1, 2):
        y = 80 * number - 16
        parts += [
            box(196, y, "fc", width=60), arrow(256, y + 12, 294, y + 12),
            box(296, y, "2 layers", GREEN, "#dcfce7", 100), arrow(396, y + 12, 444, y + 12),
            box(446, y, f"state {number}", width=90), arrow(536, y + 12, 594, y + 12),
            box(596, y, f"token {number}", GREEN, "#dcfce7", 90), label(564, y + 6, "head", "middle", 10, GRAY),
            turn((491, y + 24), y + 46, (220, y + 78)), turn((641, y + 24), y + 56, (234, y + 78)),
        ]  # fmt: skip
    parts += [
        box(196, 224, "fc", width=60), arrow(226, 248, 226, 278), label(296, 296, "Parallel heads: one pass", size=13),
        f'<path d="M196 156H176V278" fill="none" stroke="{INK}" marker-end="url(#head)"/>',
        box(136, 280, "both vectors", width=120), f'<path d="M206 304V456" stroke="{INK}" fill="none"/>',
    ]  # fmt: skip
    for number in range(5):
        y = 316 + number * 32
        parts += [
            arrow(206, y + 12, 294, y + 12),
            box(296, y, f"MLP {number + 1}", ORANGE, "#ffedd5", 100), arrow(396, y + 12, 444, y + 12),
            box(446, y, f"state {number + 3}", width=90), arrow(536, y + 12, 594, y + 12),
            box(596, y, f"token {number + 3}", ORANGE, "#ffedd5", 90), label(564, y + 6, "head", "middle", 10, GRAY),
        ]  # fmt: skip
    parts.append(label(16, 496, "head: the target's own output head. fc: fuses a state and the embedding of a token."))
    return picture(704, 512, parts)


def turn(start: tuple[float, float], middle: float, stop: tuple[float, float]) -> str:
    """Draws an arrow that leaves `start` downward, runs sideways at the height `middle`, and ends at `stop`."""
    path = f"M{start[0]} {start[1]}V{middle}H{stop[0]}V{stop[1]}"
    return f'<path d="{path}" fill="none" stroke="{INK}" marker-end="url(#head)"/>'


def main() -> None:
    (args,) = parse([PictureArguments], "draw_method", sys.argv[1:], "Draws the method.")
    cycle, labels = watch(args)
    for name, drawn in (
        ("cycle", draw_cycle(cycle, labels)),
        ("mask", draw_mask(cycle, labels)),
        ("drafter", draw_drafter()),
    ):
        (Path(args.output_dir) / f"{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
