"""Measures a target in vLLM with a Gumiho drafter and without one, by vLLM's own `vllm bench serve`.

    python benchmarks/measure_vllm.py --output vllm.json

For each way of drafting it starts a server, sends prompts at each concurrency, and writes a row: tokens per second,
time to the first token, time per token, and of the drafts the acceptance length and the share that is accepted at each
position. Run it on a machine that does nothing else, with vLLM and pandas installed. The ways are vLLM without a
drafter, its n-gram method, and Gumiho's chains.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


PAIR = Path(__file__).parent.parent / "examples" / "demo_pair"
# The `vllm` command does not start in every build; what it calls does.
BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main;"
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
COLUMNS = {
    "tokens/s": "output_throughput", "first token (ms)": "median_ttft_ms", "per token (ms)": "median_tpot_ms",
    "acceptance length": "spec_decode_acceptance_length",
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--drafter", default=str(PAIR / "gumiho"))
    parser.add_argument("--prompts", type=Path, default=PAIR / "prompts.jsonl", help="Lines with a `text`.")
    parser.add_argument("--num-tokens", type=int, nargs="*", default=[2, 3, 4, 5, 6, 7], help="Lengths of the chain.")
    parser.add_argument("--concurrencies", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--requests-per-slot", type=int, default=4, help="Requests for each that runs at once.")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="Each server measures so often; all are kept.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--server-argument", nargs="*", default=[], help="More for the server, as in `key=value`.")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


def ways_of_drafting(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields the names of what is compared, and for each its `--speculative-config`."""
    yield "plain", None
    yield "n-gram", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    for num_tokens in arguments.num_tokens:
        config = {"method": "eagle", "model": arguments.drafter, "num_speculative_tokens": num_tokens}
        yield f"Gumiho, {num_tokens} tokens", config


@contextmanager
def server(arguments: argparse.Namespace, speculative_config: dict[str, Any] | None) -> Iterator[str]:
    """Yields the address of a server that is ready."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.target,
        "--served-model-name", "target", "--dtype", arguments.dtype, "--port", str(arguments.port),
        *(f"--{argument}" for argument in arguments.server_argument),
    ]  # fmt: skip
    if speculative_config is not None:
        command += ["--speculative-config", json.dumps(speculative_config)]
    process = subprocess.Popen(command)
    address = f"http://127.0.0.1:{arguments.port}"
    try:
        wait_until_ready(process, address)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"The server ended with status {process.returncode}; its log is above.")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)


def measure(arguments: argparse.Namespace, address: str, prompts: Path, concurrency: int) -> dict[str, Any]:
    """Returns what `vllm bench serve` found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", BENCH, "--base-url", address, "--model", "target", "--tokenizer", arguments.target,
            "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template", "--disable-shuffle",
            "--custom-output-len", str(arguments.output_tokens), "--ignore-eos", "--temperature", "0",
            "--num-prompts", str(arguments.requests_per_slot * concurrency), "--max-concurrency", str(concurrency),
            "--save-result", "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def measure_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each way of drafting, concurrency and round."""
    texts = [json.loads(line)["text"] for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        for name, speculative_config in ways_of_drafting(arguments):
            with server(arguments, speculative_config) as address:
                for _ in range(arguments.rounds):
                    for concurrency in arguments.concurrencies:
                        found = measure(arguments, address, prompts, concurrency)
                        yield {"drafting": name, "concurrency": concurrency} | found


def main() -> None:
    arguments = parse_arguments()
    rows = []
    for row in measure_all(arguments):
        rows.append(row)
        # What has been measured is there even if the next server does not start.
        arguments.output.write_text(json.dumps(rows), encoding="utf-8")
    print(f"| drafting | concurrency | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for row in rows:
        values = (row.get(name) for name in COLUMNS.values())
        shown = " | ".join("-" if value is None else f"{value:.2f}" for value in values)
        print(f"| {row['drafting']} | {row['concurrency']} | {shown} |")


if __name__ == "__main__":
    main()
