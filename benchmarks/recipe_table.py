"""The table of what `compare_recipes.py` measured."""

from itertools import pairwise
from typing import Any

import numpy as np

from transformers_gumiho.metrics.acceptance import acceptance_statistics


NUM_RESAMPLES = 2000


def table(records: list[dict[str, Any]], nodes: list[int]) -> str:
    """
    Returns the records of one comparison as a table in Markdown, with a row for each recipe and means over its seeds:
    tau when decoding greedily, with what the trees of the largest size gain over the published recipe's (95%
    intervals over seeds and prompts), tau when sampling, and the drafter's size.
    """
    recipes = {
        name: [r for r in records if r["recipe"] == name] for name in dict.fromkeys(r["recipe"] for r in records)
    }
    published, shapes = recipes.get("published", []), ["chain", *map(str, nodes)]
    named = [shape if shape == "chain" else f"{shape} nodes" for shape in shapes]
    columns = ["recipe", "seeds", *named, "gain", "accepted by depth", *(f"sampled, {name}" for name in named)]
    lines = [[*columns, "parameters"], ["---"] * (len(columns) + 1)]
    for name, of_recipe in recipes.items():
        cells = [f"`{name}`", str(len(of_recipe)), *(_tau(of_recipe, "greedy", shape) for shape in shapes)]
        cells += [_gain(of_recipe, published, shapes[-1]), _depths(of_recipe)]
        cells += [_tau(of_recipe, "sampled", shape) for shape in shapes]
        lines.append([*cells, f"{of_recipe[0]['parameters'] / 1e6:.2f}M"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tau(lengths: list[list[int]]) -> float:
    """Returns the tokens per cycle, over all cycles of all prompts."""
    return acceptance_statistics(lengths).tau_micro


def _tau(records: list[dict[str, Any]], way: str, shape: str) -> str:
    """Returns the mean over seeds, and their range."""
    values = [tau(record["accepted_lengths"][way][shape]) for record in records]
    spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def _gain(records: list[dict[str, Any]], published: list[dict[str, Any]], shape: str) -> str:
    """Returns how much larger tau is than the published recipe's, greedily; both are of the same prompts."""
    if not published or records is published:
        return ""
    ours, theirs = (
        np.array([_counts(record["accepted_lengths"]["greedy"][shape]) for record in group])
        for group in (records, published)
    )  # (seeds, prompts, tokens and cycles)
    generator = np.random.default_rng(0)
    gains = []
    for _ in range(NUM_RESAMPLES):
        prompts = generator.integers(0, ours.shape[1], ours.shape[1])
        taus = []
        for group in (ours, theirs):
            seeds = generator.integers(0, len(group), len(group))
            tokens, cycles = group[seeds][:, prompts].sum(axis=(0, 1))
            taus.append(tokens / cycles)
        gains.append(100 * (taus[0] / taus[1] - 1))
    sums = [group.sum(axis=(0, 1)) for group in (ours, theirs)]
    gain = 100 * (sums[0][0] / sums[0][1] / (sums[1][0] / sums[1][1]) - 1)
    low, high = np.percentile(gains, [2.5, 97.5])
    return f"{gain:+.1f}% ({low:+.1f} to {high:+.1f})"


def _counts(lengths: list[list[int]]) -> list[tuple[int, int]]:
    """Returns the tokens and the cycles of each prompt."""
    return [(sum(of_prompt), len(of_prompt)) for of_prompt in lengths]


def _depths(records: list[dict[str, Any]]) -> str:
    """Returns for each depth of the chain the share of its drafts that were accepted, of those that were reached."""
    lengths = [of_prompt for record in records for of_prompt in record["accepted_lengths"]["greedy"]["chain"]]
    reached = [1.0, *acceptance_statistics(lengths).acceptance_per_position]
    return " ".join(f"{below / above:.2f}" for above, below in pairwise(reached) if above)
