"""The `gumiho` command."""

import inspect
import io
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from transformers import HfArgumentParser
from transformers.utils import logging

from . import __version__
from .options import HelpFormatter
from .user_errors import INTERRUPTED, reported_in_one_line


Options = TypeVar("Options")

_USAGE = """\
usage: gumiho COMMAND ...

  generate    generate text and highlight accepted draft tokens
  show        draw the draft tree of a verification cycle
  demo        open a web page that answers questions with and without a drafter
  benchmark   benchmark against plain, prompt-lookup and assisted decoding
  tune        find the fastest settings for this machine and save them
  attach      write a folder of a target that drafts wherever it is loaded by name
  train       make a drafter for a target: data, training, tuning and evaluation
  data        let a target write training data

`gumiho COMMAND --help` lists a command's options. `gumiho --version` prints the version.
"""


def main() -> None:
    """Runs the command that the command line names."""
    commands = {
        "generate": run_generate_command,
        "show": run_show_command,
        "demo": run_demo_command,
        "benchmark": run_benchmark_command,
        "tune": run_tune_command,
        "attach": run_attach_command,
        "train": run_train_command,
        "data": run_data_command,
    }
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # texts and tree marks, where its encoding lacks a character
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--version":
        sys.stdout.write(f"gumiho {__version__}\n")
        return
    if name not in commands:
        unknown = f"gumiho: unknown command {name!r}\n" if name and not name.startswith("-") else ""
        asked_for = name in ("-h", "--help")
        (sys.stdout if asked_for else sys.stderr).write(unknown + _USAGE)
        raise SystemExit(0 if asked_for else 2)
    logging.disable_progress_bar()
    with reported_in_one_line(f"gumiho {name}"):
        commands[name](sys.argv[2:])


def run_generate_command(arguments: list[str]) -> None:
    """`gumiho generate`."""
    from .presenting import GenerateArguments, generate

    args = _parse(GenerateArguments, "generate", generate, arguments)
    answers = generate(args)
    if args.has_prompts and answers[-1].progress == "stopped":
        raise SystemExit(INTERRUPTED)


def run_show_command(arguments: list[str]) -> None:
    """`gumiho show`."""
    from .presenting import ShowArguments, show

    show(_parse(ShowArguments, "show", show, arguments))


def run_demo_command(arguments: list[str]) -> None:
    """`gumiho demo`."""
    from .presenting import DemoArguments, demo

    demo(_parse(DemoArguments, "demo", demo, arguments))


def run_benchmark_command(arguments: list[str]) -> None:
    """`gumiho benchmark`."""
    from .benchmarking import BenchmarkArguments, benchmark
    from .benchmarking.report import markdown

    args = _parse(BenchmarkArguments, "benchmark", benchmark, arguments)
    rows = benchmark(args)
    sys.stdout.write(f"\n{markdown(rows)}\nThe samples, tables and pictures are in {args.output_dir}\n")


def run_tune_command(arguments: list[str]) -> None:
    """`gumiho tune`."""
    from .tuning import TuningArguments, describe, tune

    args = _parse(TuningArguments, "tune", tune, arguments)
    result = describe(tune(args))
    how = "; copy its generation_config.json over the drafter's to use them" if args.output_dir else ""
    sys.stdout.write(f"\n{result}\nthe settings are in {args.output_dir or args.resolved().assistant}{how}\n")


def run_attach_command(arguments: list[str]) -> None:
    """`gumiho attach TARGET DRAFTER --output_dir FOLDER`; both may also be given as options."""
    from .serving_folder import AttachArguments, write_served_target

    if len(arguments) > 1 and not any(argument.startswith("-") for argument in arguments[:2]):
        arguments = ["--target", arguments[0], "--drafter", *arguments[1:]]
    sys.stdout.write(f"{write_served_target(_parse(AttachArguments, 'attach', write_served_target, arguments))}\n")


def run_train_command(arguments: list[str]) -> None:
    """`gumiho train`."""
    from .recipe.command import run_train_command

    run_train_command(arguments)


def run_data_command(arguments: list[str]) -> None:
    """`gumiho data`."""
    from .recipe.command import run_data_command

    run_data_command(arguments)


def _parse(options: type[Options], name: str, command: Callable[..., Any], arguments: list[str]) -> Options:
    """Returns the options of a command. An unknown option ends the program with the usage."""
    summary = (inspect.getdoc(command) or "").partition("\n\n")[0].replace("`args.", "`--")
    parser = HfArgumentParser(options, prog=f"gumiho {name}", description=summary, formatter_class=HelpFormatter)
    parsed, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


if __name__ == "__main__":
    main()
