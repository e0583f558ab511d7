"""Prints the table of what `compare_recipes.sh` measured: tau of each recipe, and its gain over the published one.

    python benchmarks/recipe_table.py recipes

Intervals are of 95%, over seeds and prompts. When sampling, tau is that at temperature 1.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np


BASE = "published"
NUM_RESAMPLES = 2000
# Tokens and cycles `(seeds, prompts, 2)`, by recipe and then by mode and temperature.
Counts = dict[str, dict[tuple[str, float], np.ndarray]]


def read_counts(folder: Path) -> Counts:
    """Returns what the benchmarks in `folder/RECIPE-SEED` counted."""
    found: dict[str, dict[tuple[str, float], list[list[tuple[int, int]]]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("*-*/benchmark/samples.jsonl")):
        of_seed = defaultdict(list)
        batches = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for sample in (sample for batch in batches for sample in batch["samples"]):
            for lengths in sample["accepted_lengths"] or []:
                of_seed[sample["mode"], sample["temperature"]].append((sum(lengths), len(lengths)))
        for way, counts in of_seed.items():
            found[path.parts[-3].rpartition("-")[0]][way].append(counts)
    return {recipe: {way: np.array(seeds) for way, seeds in ways.items()} for recipe, ways in found.items()}


def tau(counts: np.ndarray) -> float:
    """Returns the tokens per cycle, over all cycles."""
    tokens, cycles = counts.reshape(-1, 2).sum(axis=0)
    return float(tokens / cycles)


def gain(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns by how many percent our tau exceeds theirs on the same prompts, with its interval."""
    generator, gains = np.random.default_rng(0), []
    for _ in range(NUM_RESAMPLES):
        prompts = generator.integers(0, ours.shape[1], ours.shape[1])
        drawn = [group[generator.integers(0, len(group), len(group))][:, prompts] for group in (ours, theirs)]
        gains.append(100 * (tau(drawn[0]) / tau(drawn[1]) - 1))
    low, high = np.percentile(gains, [2.5, 97.5])
    return f"{100 * (tau(ours) / tau(theirs) - 1):+.1f}% ({low:+.1f} to {high:+.1f})"


def table(counts: Counts) -> str:
    """Returns a row for each recipe."""
    ways = list(dict.fromkeys(way for of_recipe in counts.values() for way in of_recipe))
    names = [f"{mode}, {f'temperature {t:g}' if t else 'greedy'}" for mode, t in ways]
    largest = [way for way in ways if not way[1]][-1]
    lines = [["recipe", "seeds", *names, f"gain, {names[ways.index(largest)]}"]]
    lines.append(["---"] * len(lines[0]))
    for recipe, found in counts.items():
        of_base = "" if recipe == BASE or BASE not in counts else gain(found[largest], counts[BASE][largest])
        taus = [f"{tau(found[way]):.2f}" for way in ways]
        lines.append([f"`{recipe}`", str(len(found[largest])), *taus, of_base])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table(read_counts(Path(sys.argv[1]))))
