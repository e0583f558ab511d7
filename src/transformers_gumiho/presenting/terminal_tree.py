"""A draft tree as lines of text."""

from .cycles import Cycle, CycleLabels
from .streaming import colored


_LEGEND = """\
token: the probability of the token after the tokens above it, at the draft temperature
path: the probability of all tokens down to it, by which the nodes were chosen
* accepted draft   + bonus token, which the target chose"""
_ORIGINS = {
    "drafter": "drafted by the drafter",
    "context": "drafted by the context alone",
    "pause": "the drafter is paused for {} more cycles",
    "end": "one token is missing, so nothing is drafted",
}


def draw_in_terminal(cycle: Cycle, labels: CycleLabels, *, colors: bool) -> str:
    """
    Draws the draft tree of a cycle, a line for each node.

    Args:
        cycle: The cycle.
        labels: The texts of its tokens.
        colors: Whether to color the accepted path, which has its marks either way.
    """
    lines = [
        f"after {labels.context}",
        "",
        " token   path",
        f"{'':16}{labels.nodes[0]}  (the newest committed token)",
        *_draw_children(cycle, labels, 0, "", colors),
        "",
        _LEGEND,
        "",
        cycle.summary,
        _ORIGINS[cycle.origin.source].format(cycle.origin.num_left),
    ]
    return "\n".join(lines)


def _draw_children(cycle: Cycle, labels: CycleLabels, node: int, indent: str, colors: bool) -> list[str]:
    """Returns the lines below `node`, whose own line begins its children's branches at `indent`."""
    children = cycle.children(node)
    has_bonus = labels.bonus is not None and node == cycle.last_accepted
    lines = []
    for child in children:
        is_last = child == children[-1] and not has_bonus
        is_accepted = child in cycle.accepted
        numbers = f"{cycle.token_probability(child):6.3f} {cycle.path_probability(child):6.3f}"
        branch = f"{indent}{'└' if is_last else '├'}─ "
        lines.append(
            f"{numbers} {colored('*', colors) if is_accepted else ' '} {branch}"
            f"{colored(labels.nodes[child], colors and is_accepted)}"
        )
        lines += _draw_children(cycle, labels, child, indent + ("   " if is_last else "│  "), colors)
    if has_bonus:
        lines.append(f"{'':13} + {indent}└─ {labels.bonus}")
    return lines
