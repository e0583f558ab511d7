"""The `gumiho` command."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from transformers import HfArgumentParser
from transformers.utils import logging


_USAGE = """\
usage: gumiho COMMAND ...

  generate    answer prompts, and colour what was drafted
  show        draw the draft tree of a verification cycle
  benchmark   compare all ways of decoding a target on this machine
  tune        find the draft trees that decode fastest on this machine, and keep them with the drafter

`gumiho COMMAND --help` lists a command's options.
"""


def main() -> None:
    """Runs the command that the command line names."""
    commands = {
        "generate": run_generate_command,
        "show": run_show_command,
        "benchmark": run_benchmark_command,
        "tune": run_tune_command,
    }
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in commands:
        sys.stderr.write(_USAGE)
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    logging.disable_progress_bar()
    try:
        commands[name](sys.argv[2:])
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. Install it with `pip install 'transformers-gumiho[benchmark]'`.") from error


def run_generate_command(arguments: list[str]) -> None:
    """`gumiho generate`."""
    from .presenting import GenerateArguments, generate

    parser = HfArgumentParser(GenerateArguments, prog="gumiho generate", description=_summary(generate))
    generate(*parser.parse_args_into_dataclasses(arguments))


def run_show_command(arguments: list[str]) -> None:
    """`gumiho show`."""
    from .presenting import ShowArguments, show

    parser = HfArgumentParser(ShowArguments, prog="gumiho show", description=_summary(show))
    show(*parser.parse_args_into_dataclasses(arguments))


def run_benchmark_command(arguments: list[str]) -> None:
    """`gumiho benchmark`."""
    from .benchmarking import BenchmarkArguments, benchmark
    from .benchmarking.report import markdown

    parser = HfArgumentParser(BenchmarkArguments, prog="gumiho benchmark", description=_summary(benchmark))
    (args,) = parser.parse_args_into_dataclasses(arguments)
    rows = benchmark(args)
    sys.stdout.write(f"\n{markdown(rows)}\neverything is in {args.output_dir}\n")


def run_tune_command(arguments: list[str]) -> None:
    """`gumiho tune`."""
    from .tuning import TuningArguments, describe, tune

    parser = HfArgumentParser(TuningArguments, prog="gumiho tune", description=_summary(tune))
    (args,) = parser.parse_args_into_dataclasses(arguments)
    sys.stdout.write(f"\n{describe(tune(args))}\n")


def _summary(command: Callable[..., Any]) -> str:
    """Returns the first paragraph of what a command's docstring says."""
    return (inspect.getdoc(command) or "").partition("\n\n")[0]


if __name__ == "__main__":
    main()
