"""Prints the `--speculative-config` for vLLM with as many drafted tokens for each number of requests as pay there.

    python benchmarks/measure_vllm.py --output vllm.jsonl --num-tokens 0 2 3 4 7
    python benchmarks/choose_vllm_tokens.py vllm.jsonl

It reads what `measure_vllm.py` wrote for one target and drafter. For each length of the chain and each number of
requests, the rows hold how long a step takes. How many tokens a step gets depends on the drafter alone, so the shares
that are accepted at each position are taken from all rows together. With a chain of 0 tokens the drafter only reads
the new tokens, so that it can draft once fewer requests run. That takes passes of its serial layers, so it is measured
as well.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure_vllm import PER_POSITION, drafting_with, read_rows, tokens_of


def speeds(rows: list[dict[str, Any]]) -> dict[int, dict[int | None, float]]:
    """
    Returns tokens per second and request by the number of requests and the length of the chain, `None` for vLLM
    without a drafter.

    Raises:
        ValueError: A row of vLLM without a drafter, of chains of 0 tokens or of longer ones is missing.
    """
    measured: dict[tuple[int, int | None], list[dict[str, Any]]] = {}
    for row in rows:
        if row["drafting"] == "plain" or tokens_of(row["drafting"]) is not None:
            measured.setdefault((row["concurrency"], tokens_of(row["drafting"])), []).append(row)
    shares = accepted_shares(row for (_, tokens), found in measured.items() if tokens for row in found)
    by_requests: dict[int, dict[int | None, float]] = {}
    for (requests, tokens), found in measured.items():
        # Of all requests together, in which each gets its tokens.
        seconds = statistics.median(
            requests * (row.get("spec_decode_acceptance_length") or 1) / row["output_throughput"] for row in found
        )
        by_requests.setdefault(requests, {})[tokens] = (1 + sum(shares[: tokens or 0])) / seconds
    for requests, lengths in by_requests.items():
        if not {None, 0} < lengths.keys():
            raise ValueError(
                f"For {requests} requests the rows have to be of vLLM without a drafter, of chains of 0 tokens and of "
                f"longer ones, got {sorted({row['drafting'] for row in rows if row['concurrency'] == requests})}. Run "
                f"measure_vllm.py with `--num-tokens 0 2 3 4 7`, all at the same `--concurrencies`."
            )
    return by_requests


def accepted_shares(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Returns, for each position of a chain, the median share of drafts in which its token is accepted."""
    chains = [row[PER_POSITION] for row in rows]
    longest = max(map(len, chains), default=0)
    return [
        statistics.median(chain[position] for chain in chains if len(chain) > position) for position in range(longest)
    ]


def schedule(found: dict[int, dict[int | None, float]]) -> list[list[int]]:
    """
    Returns vLLM's `num_speculative_tokens_per_batch_size`: the first and last number of requests, and the tokens that
    are the fastest for the nearest number that was measured.
    """
    ranges: list[list[int]] = []
    measured = sorted(found)
    for index, requests in enumerate(measured):
        tokens = max((length for length in found[requests] if length is not None), key=lambda n: found[requests][n])
        last = math.isqrt(requests * measured[index + 1]) if index + 1 < len(measured) else requests
        if ranges and ranges[-1][2] == tokens:
            ranges[-1][1] = last
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, last, tokens])
    return ranges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="What measure_vllm.py wrote.")
    rows = read_rows(parser.parse_args().rows)
    found = speeds(rows)
    for requests, lengths in sorted(found.items()):
        gains = ", ".join(
            f"{n}: {lengths[n] / lengths[None]:.2f}x" for n in sorted(n for n in lengths if n is not None)
        )
        print(f"{requests} requests, tokens drafted and speed against vLLM without a drafter: {gains}")
    ranges = schedule(found)
    longest = max(tokens for *_, tokens in ranges)
    if longest == 0:
        print("No number of drafted tokens pays: serve without a drafter.")
        return
    config = drafting_with(rows[0]["drafter"], longest) | {"num_speculative_tokens_per_batch_size": ranges}
    print(f"--speculative-config '{json.dumps(config)}'")


if __name__ == "__main__":
    main()
