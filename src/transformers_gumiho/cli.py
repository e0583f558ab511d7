"""The commands of `gumiho`, which `transformers_gumiho_cli` starts."""

import inspect
import io
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from transformers.utils import logging

from transformers_gumiho_cli import main

from .options import parse
from .user_errors import INTERRUPTED, reported_in_one_line


Options = TypeVar("Options")


def run(name: str, words: list[str]) -> None:
    """Runs the command of this name with the words that follow it on the command line."""
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
    logging.disable_progress_bar()
    with reported_in_one_line(f"gumiho {name}"):
        commands[name](words)


def run_generate_command(words: list[str]) -> None:
    """`gumiho generate`."""
    from .presenting import GenerateArguments, generate

    args = _parse(GenerateArguments, "generate", generate, words)
    answers = generate(args)
    if args.has_prompts and answers[-1].progress == "stopped":
        raise SystemExit(INTERRUPTED)


def run_show_command(words: list[str]) -> None:
    """`gumiho show`."""
    from .presenting import ShowArguments, show

    show(_parse(ShowArguments, "show", show, words))


def run_demo_command(words: list[str]) -> None:
    """`gumiho demo`."""
    from .presenting import DemoArguments, demo

    demo(_parse(DemoArguments, "demo", demo, words))


def run_benchmark_command(words: list[str]) -> None:
    """`gumiho benchmark`."""
    from .benchmarking import BenchmarkArguments, benchmark
    from .benchmarking.report import markdown

    args = _parse(BenchmarkArguments, "benchmark", benchmark, words)
    rows = benchmark(args)
    sys.stdout.write(f"\n{markdown(rows)}\nThe samples, tables and pictures are in {args.output_dir}\n")


def run_tune_command(words: list[str]) -> None:
    """`gumiho tune`."""
    from .tuning import TuningArguments, describe, tune

    args = _parse(TuningArguments, "tune", tune, words)
    result = describe(tune(args))
    how = "; copy its generation_config.json over the drafter's to use them" if args.output_dir else ""
    sys.stdout.write(f"\n{result}\nthe settings are in {args.output_dir or args.resolved().assistant}{how}\n")


def run_attach_command(words: list[str]) -> None:
    """`gumiho attach TARGET DRAFTER --output_dir FOLDER`; both may also be given as options."""
    from .serving_folder import AttachArguments, write_served_target

    if len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        words = ["--target", words[0], "--drafter", *words[1:]]
    sys.stdout.write(f"{write_served_target(_parse(AttachArguments, 'attach', write_served_target, words))}\n")


def run_train_command(words: list[str]) -> None:
    """`gumiho train`."""
    from .recipe.command import run_train_command
    from .recipe.measure import MEASURES

    run_train_command(words, MEASURES)


def run_data_command(words: list[str]) -> None:
    """`gumiho data`."""
    from .recipe.command import run_data_command

    run_data_command(words)


def _parse(options: type[Options], name: str, command: Callable[..., Any], words: list[str]) -> Options:
    """Returns the options of a command, whose help begins with the first paragraph of its docstring."""
    summary = (inspect.getdoc(command) or "").partition("\n\n")[0].replace("`args.", "`--")
    (parsed,) = parse([options], name, words, summary)
    return parsed


__all__ = ["main", "run"]

if __name__ == "__main__":
    main()
