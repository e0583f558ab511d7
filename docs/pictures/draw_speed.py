"""Draws what was measured, from the tables of the reports: speed-ups, and what training on recorded tokens gains.

python docs/pictures/draw_speed.py
"""

import math
import re
from html import escape
from pathlib import Path


ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "benchmarks" / "reports"
INK, GRAY, GREEN, ORANGE, BLUE = "#1f2937", "#94a3b8", "#15803d", "#c2410c", "#2563eb"
Line = tuple[str, list[tuple[int, float]], str, str]


def read_tables(report: str) -> list[list[dict[str, str]]]:
    """Returns the tables of a report, each row as a mapping from the heading of a column to the cell."""
    tables: list[list[dict[str, str]]] = []
    text = (REPORTS / report).read_text(encoding="utf-8")
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        header, _, *rows = ([cell.strip(" *") for cell in line[1:-1].split("|")] for line in block.splitlines())
        tables.append([dict(zip(header, row, strict=True)) for row in rows])
    return tables


def speedups_by_task() -> dict[str, dict[str, float]]:
    """Returns the speed-up of each mode on each of Spec-Bench's tasks, for SmolLM2."""
    (table,) = (table for table in read_tables("2026-11-smollm2.md") if {"task", "tau"} <= table[0].keys())
    columns = {
        "prompt lookup": "prompt lookup",
        "drafter": "the drafter without context",
        "drafter and prompt lookup": "the drafter",
    }
    return {row["task"]: {name: float(row[column].split()[0]) for name, column in columns.items()} for row in table}


def speedups_by_requests() -> list[Line]:
    """Returns a line for each mode in vLLM: its label, the speed-up at each number of requests, color and dashes."""
    smollm2, _, demo, _ = read_tables("2026-11-vllm.md")
    modes = (
        ("demo pair, Gumiho, 4 tokens", demo, "Gumiho, 4 tokens", GREEN, ""),
        ("demo pair, n-gram", demo, "n-gram", GREEN, "5 4"),
        ("SmolLM2, Gumiho, 2 tokens", smollm2, "Gumiho, 2 tokens", BLUE, ""),
        ("SmolLM2, n-gram", smollm2, "n-gram", BLUE, "5 4"),
    )
    lines: list[Line] = []
    for label, table, mode, color, dashes in modes:
        (row,) = (row for row in table if row["drafting"] == mode)
        cells = {name: re.search(r"\(([\d.]+)x\)", cell) for name, cell in row.items()}
        points = [(int(name.split()[-1]), float(found[1])) for name, found in cells.items() if found]
        lines.append((label, points, color, dashes))
    return lines


def gains_by_tokens() -> list[Line]:
    """Returns a line for each pair: the gain in tau, in percent, of the best training on each number of tokens."""
    tables = [table for table in read_tables("2026-11-recording.md") if {"recorded tokens", "tau"} <= table[0].keys()]
    lines: list[Line] = []
    for (label, color), (before, *rows) in zip((("demo pair", GREEN), ("SmolLM2", BLUE)), tables, strict=True):
        best: dict[int, float] = {}
        for row in rows:
            tokens, tau = int(row["recorded tokens"].replace(",", "")), float(row["tau"])
            best[tokens] = max(best.get(tokens, 0.0), 100 * (tau / float(before["tau"]) - 1))
        lines.append((label, sorted(best.items()), color, ""))
    return lines


def text(x: float, y: float, shown: str, anchor: str = "start", color: str = INK, size: int = 12) -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f"<text {place}>{escape(shown)}</text>"


def stroke(points: list[tuple[float, float]], color: str, width: float = 1, dashes: str = "") -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width:g}" stroke-dasharray="{dashes}"/>'


def picture(width: int, height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif"><rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_tasks(speedups: dict[str, dict[str, float]]) -> str:
    """Draws a group of bars for each task, and a line at plain decoding's speed."""
    left, scale, bar, group, top = 130, 180, 14, 54, 44
    colors = {"prompt lookup": GRAY, "drafter": BLUE, "drafter and prompt lookup": GREEN}
    parts = []
    for place, (name, color) in zip((left, left + 130, left + 220), colors.items(), strict=True):
        parts += [f'<rect x="{place}" y="12" width="12" height="12" fill="{color}"/>', text(place + 18, 23, name)]
    for number, (task, values) in enumerate(speedups.items()):
        y = top + number * group
        parts.append(text(left - 10, y + 1.5 * bar + 4, task.replace("_", " "), "end"))
        for place, (name, value) in enumerate(values.items()):
            corner = f'x="{left}" y="{y + place * bar}" width="{value * scale:g}" height="{bar - 2}"'
            parts.append(f'<rect {corner} fill="{colors[name]}"/>')
            parts.append(text(left + value * scale + 6, y + place * bar + 11, f"{value:.2f}", size=11))
    bottom = top + len(speedups) * group
    parts.append(stroke([(left + scale, top - 8), (left + scale, bottom - 4)], INK, 1.5))
    parts.append(text(left + scale, bottom + 12, "1 = plain decoding", "middle"))
    return picture(left + 3 * scale + 10, bottom + 24, parts)


def draw_requests(lines: list[Line]) -> str:
    """Draws the speed-up against the number of requests, with a line at plain decoding's speed."""
    left, top, scale, octave = 44, 36, 150, 84

    def place(requests: int, speedup: float) -> tuple[float, float]:
        return left + octave * math.log2(requests), top + scale * (2.25 - speedup)

    numbers = sorted({requests for _, points, _, _ in lines for requests, _ in points})
    right, bottom = left + octave * math.log2(numbers[-1]), top + scale * 1.75
    parts = [text(8, 20, "speed-up over vLLM without a drafter")]
    for level in (0.5, 1, 1.5, 2):
        y = place(1, level)[1]
        parts.append(stroke([(left, y), (right, y)], INK if level == 1 else "#e2e8f0", 1.5 if level == 1 else 1))
        parts.append(text(left - 8, y + 4, f"{level:g}", "end"))
    parts += [text(place(number, 1)[0], bottom + 20, str(number), "middle") for number in numbers]
    parts.append(text((left + right) / 2, bottom + 42, "requests at once", "middle"))
    for number, (name, points, color, dashes) in enumerate(lines):
        places = [place(*point) for point in points]
        parts.append(stroke(places, color, 2, dashes))
        parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{color}"/>' for x, y in places]
        y = top + 12 + number * 20
        parts += [stroke([(right - 190, y), (right - 160, y)], color, 2, dashes), text(right - 152, y + 4, name)]
    return picture(round(right) + 40, round(bottom) + 54, parts)


def draw_gains(lines: list[Line]) -> str:
    """Draws the gain in tau against the number of recorded tokens."""
    left, top, scale, decade = 44, 36, 7, 300

    def place(tokens: float, gain: float) -> tuple[float, float]:
        return left + decade * math.log10(tokens / 10_000), top + scale * (30 - gain)

    right, bottom = place(300_000, 0)
    parts = [text(8, 20, "gain in tau on SymPy's code, percent")]
    for level in (0, 10, 20, 30):
        y = place(1, level)[1]
        parts += [
            stroke([(left, y), (right, y)], "#e2e8f0" if level else INK),
            text(left - 8, y + 4, str(level), "end"),
        ]
    for tokens in (10_000, 30_000, 100_000, 300_000):
        parts.append(text(place(tokens, 0)[0], bottom + 20, f"{tokens:,}", "middle"))
    parts.append(text((left + right) / 2, bottom + 42, "recorded tokens", "middle"))
    for name, points, color, _ in lines:
        places = [place(*point) for point in points]
        parts.append(stroke(places, color, 2))
        parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{color}"/>' for x, y in places]
        parts.append(
            text(places[-1][0] + 8, places[-1][1] - 8, name, "end" if places[-1][0] > right - 90 else "start")
        )
    return picture(round(right) + 40, round(bottom) + 54, parts)


def pictures() -> dict[str, str]:
    """Returns the pictures by the names of their files in `docs/images`."""
    return {
        "tasks.svg": draw_tasks(speedups_by_task()),
        "requests.svg": draw_requests(speedups_by_requests()),
        "recorded.svg": draw_gains(gains_by_tokens()),
    }


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (ROOT / "docs" / "images" / name).write_text(drawn, encoding="utf-8")
