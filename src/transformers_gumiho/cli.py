"""The commands of `gumiho`, which `transformers_gumiho_cli` starts."""

import argparse
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from transformers.utils import logging

from .commands import parse, reported_in_one_line


Options = TypeVar("Options")


def run(name: str, words: list[str]) -> None:
    """Runs the command of this name with the words that follow it on the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # texts and tree marks, where its encoding lacks a character
    logging.disable_progress_bar()
    with reported_in_one_line(f"gumiho {name}"):
        _COMMANDS[name](words)


def main() -> None:
    """Runs the command that the command line names, for launchers that start a module instead of `gumiho`."""
    parser = argparse.ArgumentParser("gumiho")
    parser.add_argument("command", choices=list(_COMMANDS))
    run(parser.parse_args(sys.argv[1:2]).command, sys.argv[2:])


def _generate(words: list[str]) -> None:
    from .tools.presenting import GenerateArguments, generate

    generate(_parse(GenerateArguments, generate, words))


def _show(words: list[str]) -> None:
    from .tools.presenting import ShowArguments, show

    show(_parse(ShowArguments, show, words))


def _demo(words: list[str]) -> None:
    from .tools.presenting import DemoArguments, demo

    demo(_parse(DemoArguments, demo, words))


def _benchmark(words: list[str]) -> None:
    from .tools.benchmarking import BenchmarkArguments, benchmark
    from .tools.benchmarking.summary import markdown

    args = _parse(BenchmarkArguments, benchmark, words)
    rows = benchmark(args)
    sys.stdout.write(f"\n{markdown(rows)}\nThe samples and the table are in {args.output_dir}\n")


def _tune(words: list[str]) -> None:
    from .tools.tuning import TuningArguments, describe, tune

    args = _parse(TuningArguments, tune, words)
    result = describe(tune(args))
    how = "; copy its generation_config.json over the drafter's to use them" if args.output_dir else ""
    sys.stdout.write(f"\n{result}\nthe settings are in {args.output_dir or args.resolved().assistant}{how}\n")


def _attach(words: list[str]) -> None:
    from .tools.serving_folder import AttachArguments, write_served_target

    # `gumiho attach TARGET DRAFTER --output_dir FOLDER`; both may also be given as options.
    if len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        words = ["--target", words[0], "--drafter", *words[1:]]
    args = _parse(AttachArguments, write_served_target, words, "attach")
    sys.stdout.write(f"{write_served_target(args)}\n")


def _train(words: list[str]) -> None:
    from .tools.after_training import MEASURES
    from .training.recipe.command import run_train_command

    run_train_command(words, MEASURES)


def _data(words: list[str]) -> None:
    from .training.recipe.command import run_data_command

    run_data_command(words)


_COMMANDS = {
    "generate": _generate, "show": _show, "demo": _demo, "benchmark": _benchmark, "tune": _tune, "attach": _attach,
    "train": _train, "data": _data,
}  # fmt: skip


def _parse(options: type[Options], command: Callable[..., Any], words: list[str], name: str = "") -> Options:
    """Returns the options of a command, whose help begins with the first paragraph of its docstring."""
    summary = (inspect.getdoc(command) or "").partition("\n\n")[0].replace("`args.", "`--")
    (parsed,) = parse([options], name or command.__name__, words, summary)
    return parsed


if __name__ == "__main__":
    main()
