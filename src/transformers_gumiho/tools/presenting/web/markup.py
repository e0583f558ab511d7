"""What the page shows of a question, as HTML."""

from html import escape
from itertools import groupby

from ..answering import Answer, first_difference
from ..cycles import label_cycle
from ..tree_svg import LEGEND, tree_svg
from .race import Race


EXACTNESS = "https://github.com/transformers-gumiho/transformers-gumiho/blob/main/docs/concepts/exactness.md"
_COUNTERS = (
    '<div style="display:flex;flex-wrap:wrap;gap:0.3em 1.6em;font-variant-numeric:tabular-nums;opacity:0.85">{}</div>'
)
_TEXT = '<div class="gumiho-text" style="white-space:pre-wrap;overflow-wrap:anywhere;min-height:12em">{}</div>'
_DRAFTS = '<span class="gumiho-drafts" style="background:rgba(34,197,94,0.28);border-radius:3px">{}</span>'


def answer_html(answer: Answer) -> str:
    """Returns an answer so far: its counters, and its text with the accepted drafts colored."""
    counters = [answer.progress.capitalize()]
    if answer.tokens:
        counters += [
            f'<b class="gumiho-speed">{answer.speed:.1f}</b> tokens/s',
            f'<b class="gumiho-tokens">{len(answer.tokens)}</b> tokens',
            f'<b class="gumiho-seconds">{answer.seconds:.1f}</b> s',
        ]
    if (tau := answer.tau) is not None:
        counters.append(f'tau <b class="gumiho-tau">{tau:.2f}</b>')
    if answer.cycles:
        counters.append(f"{answer.tokens_per_pass:.2f} tokens per pass in {len(answer.cycles)} passes")
    parts = []
    for is_draft, pieces in groupby(list(answer.pieces), key=lambda piece: piece.source == "draft"):
        text = escape("".join(piece.text for piece in pieces))
        parts.append(_DRAFTS.format(text) if is_draft else text)
    problem = f"<p><b>{escape(answer.problem)}</b></p>" if answer.problem else ""
    shown = "".join(f"<span>{counter}</span>" for counter in counters)
    return _COUNTERS.format(shown) + _TEXT.format("".join(parts)) + problem


def verdict_html(race: Race) -> str:
    """Returns what can be said of both answers: whether they are equal, and how much faster one is."""
    plain, drafted = race.plain, race.drafted
    # Read before the tokens are compared: an answer that is done by now has all of its tokens.
    are_done, is_over = plain.progress == drafted.progress == "done", race.is_over
    num_common = min(len(plain.tokens), len(drafted.tokens))
    kind, text = "running", f"The first {num_common} tokens are the same." if num_common else ""
    if "failed" in (plain.progress, drafted.progress):
        kind, text = "failed", "The answers cannot be compared."
    elif (difference := first_difference(drafted, plain)) is not None:
        kind, text = "different", (
            f"≠ The answers differ from token {difference + 1} on. In 16 bits two tokens can tie, and rounding "
            f'decides (<a href="{EXACTNESS}">more</a>); in float32 both answers are the same.'
        )  # fmt: skip
    elif are_done:
        speed_up = f"Speed-up {drafted.speed / plain.speed:.2f}x."
        kind, text = "equal", f"✓ Both answers are the same, token for token. {speed_up}"
    elif is_over:
        kind, text = "stopped", f"Stopped. {text}"
    return f'<p class="gumiho-verdict" data-verdict="{kind}">{text}</p>'


def tree_html(race: Race) -> str:
    """Returns the newest draft tree of a question, once there is one."""
    if not (cycles := list(race.drafted.cycles)):
        return ""
    cycle = cycles[-1]
    labels = label_cycle(race.host.tokenizer, [*race.prompt, *race.drafted.tokens_before(len(cycles) - 1)], cycle)
    return (
        f"<p>Cycle {len(cycles)}, after <code>{escape(labels.context)}</code>: {cycle.summary}.</p>"
        f'<div style="overflow-x:auto">{tree_svg(cycle, labels)}</div>'
        f'<p style="font-size:0.85em;opacity:0.8">{" ".join(LEGEND)}</p>'
    )
