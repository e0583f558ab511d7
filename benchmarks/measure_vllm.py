"""Measures a target in vLLM with a Gumiho drafter and without one, by vLLM's own `vllm bench serve`.

    python benchmarks/measure_vllm.py --output vllm.jsonl

For each way of drafting it starts a server, sends prompts at each concurrency, and writes a row: tokens per second,
time to the first token, time per token, and of the drafts the acceptance length and the share that is accepted at each
position. `choose_vllm_tokens.py` turns these rows into settings for vLLM. The ways are vLLM without a drafter, its
n-gram method, Gumiho's chains, and the drafter's serial head alone, which drafts each token of a chain in a pass of
its own, as an EAGLE head does.

Run it on a machine that does nothing else, with vLLM, pandas and this package installed. Called again with the same
output, it continues after the existing rows; with more `--rounds`, it adds to them.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from demo_pair import DEMO_PAIR
from transformers import AutoTokenizer

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.tools.measuring.prompts import read_prompts


COLUMNS = {
    "tokens/s": "output_throughput", "first token (ms)": "median_ttft_ms", "per token (ms)": "median_tpot_ms",
    "acceptance length": "spec_decode_acceptance_length",
}  # fmt: skip
# For the pairs of this repository on a CPU. The same prompts come again and again: each is to be read like a new one.
SERVER_ARGUMENTS = [
    "enforce-eager", "no-enable-prefix-caching", "max-model-len=1024", "max-num-seqs=64",
    "kv-cache-memory-bytes=1073741824",
]  # fmt: skip
SECONDS_TO_END = 60
PER_POSITION = "spec_decode_per_position_acceptance_rates"
# Rows of which one of these differs are measurements of different things.
KEY = (
    "drafting", "concurrency", "round", "target", "drafter", "output_tokens", "requests", "dtype", "server_arguments",
)  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(DEMO_PAIR / "target"))
    parser.add_argument("--drafter", default=str(DEMO_PAIR / "gumiho"))
    parser.add_argument("--prompts", type=Path, default=DEMO_PAIR / "prompts.jsonl", help="As for `gumiho benchmark`.")
    parser.add_argument(
        "--num-tokens", type=int, nargs="*", default=[0, 2, 3, 4, 5, 6, 7],
        help="Lengths of the chain. With 0, nothing is drafted, and the drafter only reads along.",
    )  # fmt: skip
    parser.add_argument(
        "--speculative-config", type=json.loads, help="Measured as well: what choose_vllm_tokens.py printed.",
    )  # fmt: skip
    parser.add_argument(
        "--num-serial-tokens", type=int, nargs="*", default=[2, 4, 7], help="Lengths of the serial head's own chains."
    )
    parser.add_argument("--concurrencies", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--requests-per-slot", type=int, default=1, help="Requests for each that runs at once.")
    parser.add_argument("--least-requests", type=int, default=4, help="Requests at low concurrencies.")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1, help="Each server measures so often; all are kept.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=8765, help="Of the first server; others follow it.")
    parser.add_argument("--no-ngram", action="store_true", help="Leave vLLM's n-gram method out.")
    parser.add_argument(
        "--together", action="store_true",
        help="Start all servers first, and measure them in turns: a machine that drifts does so for all of them.",
    )  # fmt: skip
    parser.add_argument(
        "--server-argument", nargs="*", default=SERVER_ARGUMENTS,
        help="More for the server, as in `key=value`. Compiled models take a minute longer to start.",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def ways_of_drafting(
    arguments: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    """Yields the names of what is compared, and what makes the `--speculative-config` of each; it may use `folder`."""
    yield "plain", lambda: None
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if not arguments.no_ngram:
        yield "n-gram", lambda: ngram
    for num_tokens in arguments.num_tokens:
        yield name_of(num_tokens), partial(drafting_with, arguments.drafter, num_tokens)
    if (config := arguments.speculative_config) is not None:
        yield f"Gumiho, {json.dumps(config['num_speculative_tokens_per_batch_size'])}", lambda: config
    for num_tokens in arguments.num_serial_tokens:
        yield f"serial head, {num_tokens} passes", partial(serial_drafting, arguments.drafter, num_tokens, folder)


def name_of(num_tokens: int) -> str:
    return f"Gumiho, {num_tokens} tokens"


def tokens_of(name: str) -> int | None:
    """Returns the length of the chain in a name of Gumiho's; `None` for other ways of drafting."""
    found = re.fullmatch(r"Gumiho, (\d+) tokens", name)
    return int(found[1]) if found else None


def serial_drafting(drafter: str, num_tokens: int, folder: Path) -> dict[str, Any]:
    """Writes a drafter with the same serial head, which drafts all tokens one by one, and without parallel heads."""
    fields = {"num_serial_tokens": num_tokens, "num_parallel_heads": 0, "transition_rank": 0}
    alone = folder / f"serial-{num_tokens}"
    GumihoModel.from_pretrained(drafter, **fields).save_pretrained(alone)
    return drafting_with(str(alone), num_tokens)


def drafting_with(drafter: str, num_tokens: int) -> dict[str, Any]:
    reads_layers = GumihoConfig.from_pretrained(drafter).target_layer_ids is not None
    method = "eagle3" if reads_layers else "eagle"
    config = {"method": method, "model": drafter, "num_speculative_tokens": max(num_tokens, 1)}
    # Only a length by the number of requests may be 0.
    return config if num_tokens else config | {"num_speculative_tokens_per_batch_size": [[1, 1, 0]]}


@contextmanager
def server(arguments: argparse.Namespace, port: int, speculative_config: dict[str, Any] | None) -> Iterator[str]:
    """
    Yields the address of a server that is ready.

    Raises:
        RuntimeError: Something else answers at the port, or the server ends.
    """
    address = f"http://127.0.0.1:{port}"
    if answers(address):
        raise RuntimeError(f"There is a server at {address} already. End it, or give another `--port`.")
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.target,
        "--served-model-name", "target", "--dtype", arguments.dtype, "--port", str(port),
        *(f"--{argument}" for argument in arguments.server_argument),
    ]  # fmt: skip
    if speculative_config is not None:
        command += ["--speculative-config", json.dumps(speculative_config)]
    process = subprocess.Popen(command)
    try:
        wait_until_ready(process, address)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"The server ended with status {process.returncode}; its log is above.")
        if answers(address):
            return
        time.sleep(1)


def answers(address: str) -> bool:
    """Returns whether a server says that it is well."""
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except OSError:
        return False
    return True


def measure(arguments: argparse.Namespace, address: str, prompts: Path, concurrency: int) -> dict[str, Any]:
    """Returns what `vllm bench serve` found."""
    # In this process, as importing it takes longer than many a measurement.
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    is_chat = bool(AutoTokenizer.from_pretrained(arguments.target).chat_template)
    return main(parser.parse_args([
        "--base-url", address, "--model", "target", "--tokenizer", arguments.target,
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle",
        *(() if is_chat else ("--skip-chat-template",)),
        "--custom-output-len", str(arguments.output_tokens), "--ignore-eos", "--temperature", "0",
        "--num-prompts", str(num_requests(arguments, concurrency)), "--max-concurrency", str(concurrency),
        "--num-warmups", "1",
    ]))  # fmt: skip


def num_requests(arguments: argparse.Namespace, concurrency: int) -> int:
    return max(arguments.least_requests, arguments.requests_per_slot * concurrency)


def measure_all(arguments: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each way of drafting, concurrency and round that is not among those that are done."""
    texts = [question.turns[0] for question in read_prompts(str(arguments.prompts))]
    known = {key_of(row) for row in done}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        missing = {
            make_config: rows
            for name, make_config in ways_of_drafting(arguments, Path(folder))
            if (rows := [row for row in rows_of(arguments, name) if key_of(row) not in known])
        }
        for group in [list(missing)] if arguments.together else [[make_config] for make_config in missing]:
            with ExitStack() as running:
                addresses = {
                    make_config: running.enter_context(server(arguments, port, make_config()))
                    for port, make_config in enumerate(group, arguments.port)
                }
                turns = [(row, addresses[make_config]) for make_config in group for row in missing[make_config]]
                for row, address in sorted(turns, key=lambda turn: turn[0]["round"]):
                    found = measure(arguments, address, prompts, row["concurrency"])
                    # Without what is listed request by request.
                    kept = {name: v for name, v in found.items() if name == PER_POSITION or not isinstance(v, list)}
                    yield row | kept


def rows_of(arguments: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Yields what is known of the rows of a way of drafting before they are measured."""
    for round_number in range(arguments.rounds):
        for concurrency in arguments.concurrencies:
            yield {
                "drafting": name, "concurrency": concurrency, "round": round_number, "target": arguments.target,
                "drafter": arguments.drafter, "output_tokens": arguments.output_tokens, "dtype": arguments.dtype,
                "requests": num_requests(arguments, concurrency), "server_arguments": arguments.server_argument,
            }  # fmt: skip


def key_of(row: dict[str, Any]) -> str:
    return json.dumps([row[name] for name in KEY])


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the median of the rounds."""
    print(f"| drafting | concurrency | {' | '.join(COLUMNS)} | accepted at each position (%) |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    cells = dict.fromkeys((row["drafting"], row["concurrency"]) for row in rows)
    for drafting, concurrency in cells:
        rounds = [row for row in rows if (row["drafting"], row["concurrency"]) == (drafting, concurrency)]
        shown = [shown_median([row.get(name) for row in rounds]) for name in COLUMNS.values()]
        shares = zip(*(row.get(PER_POSITION) or () for row in rounds), strict=False)
        positions = " ".join(f"{100 * statistics.median(share):.0f}" for share in shares)
        print(f"| {drafting} | {concurrency} | {' | '.join(shown)} | {positions or '-'} |")


def shown_median(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def main() -> None:
    arguments = parse_arguments()
    rows = read_rows(arguments.output)
    with arguments.output.open("a", encoding="utf-8") as file:
        for row in measure_all(arguments, rows):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    settings = next(rows_of(arguments, ""))
    fixed = [name for name in KEY if name not in ("drafting", "concurrency", "round", "requests")]
    print_table([row for row in rows if all(row[name] == settings[name] for name in fixed)])


if __name__ == "__main__":
    main()
