"""The lengths of chains that are chosen for vLLM are the fastest ones for each number of requests."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import choose_vllm_tokens
import pytest
from choose_vllm_tokens import schedule, speeds
from measure_vllm import PER_POSITION, drafting_with

from transformers_gumiho import GumihoConfig


LENGTHS = (0, 1, 2, 3, 5, 7)
SHARES = (0.8, 0.6, 0.5, 0.3, 0.2, 0.15, 0.1)


def true_speed(requests: int, tokens: int | None) -> float:
    """Tokens per second and request where each verified token costs more, the more requests there are."""
    if tokens is None:
        return 1.0
    return (1 + sum(SHARES[:tokens])) / (1.04 + 0.08 * tokens * requests)


def write_rows(concurrencies: tuple[int, ...], rounds: int = 9) -> list[dict[str, Any]]:
    """Returns rows of rounds in which other numbers of tokens were accepted, by chance."""
    generator = random.Random(0)
    rows = []
    for requests in concurrencies:
        for tokens in (None, *LENGTHS):
            for _ in range(rounds):
                shares = [share * generator.uniform(0.8, 1.2) for share in SHARES[: tokens or 0]]
                seconds = (1 + sum(SHARES[: tokens or 0])) / true_speed(requests, tokens)
                row = {"drafting": "plain" if tokens is None else f"Gumiho, {tokens} tokens", "concurrency": requests}
                row |= {"output_throughput": requests * (1 + sum(shares)) / seconds, "drafter": "drafter"}
                if tokens:
                    row |= {"spec_decode_acceptance_length": 1 + sum(shares), PER_POSITION: shares}
                rows.append(row)
    others = [{"drafting": "serial head, 7 passes", "concurrency": 1, "output_throughput": 9.9, "drafter": "drafter"}]
    return rows + others


def test_the_fastest_lengths_are_found_by_tokens_and_seconds() -> None:
    found = speeds(write_rows((1, 4, 16)))
    for requests, lengths in found.items():
        for tokens, speed in lengths.items():
            assert speed == pytest.approx(true_speed(requests, tokens), rel=0.1)
    best = {n: max(LENGTHS, key=lambda tokens, n=n: true_speed(n, tokens)) for n in (1, 4, 16)}
    assert len(set(best.values())) == 3
    assert best[16] == 0
    # Each number of requests is closest, by its ratio, to the one that was measured.
    assert schedule(found) == [[1, 2, best[1]], [3, 8, best[4]], [9, 16, best[16]]]
    # Neighbors of one length are one range.
    speeds_of = {None: 1.0, 0: 0.9, 3: 1.5}
    assert schedule({1: speeds_of, 2: speeds_of, 8: speeds_of | {3: 0.8}}) == [[1, 4, 3], [5, 8, 0]]


def test_a_line_for_the_server_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = tmp_path / "drafter"
    GumihoConfig().save_pretrained(drafter)
    rows = [row | {"drafter": str(drafter)} for row in write_rows((1, 16))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["choose", str(tmp_path / "rows.jsonl")])
    choose_vllm_tokens.main()
    line = capsys.readouterr().out.splitlines()[-1]
    config = json.loads(line.removeprefix("--speculative-config '").removesuffix("'"))
    ((*_, longest), _) = ranges = schedule(speeds(rows))
    assert config == drafting_with(str(drafter), longest) | {"num_speculative_tokens_per_batch_size": ranges}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["concurrency"] == 16))
    choose_vllm_tokens.main()
    assert "serve without a drafter" in capsys.readouterr().out.splitlines()[-1]
