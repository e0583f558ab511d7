"""The `gumiho` command."""

import sys

from transformers import HfArgumentParser
from transformers.utils import logging


_USAGE = """\
usage: gumiho benchmark --target T --assistant G --prompts FILE ...

  benchmark   compare all ways of decoding a target on this machine

`gumiho benchmark --help` lists the options.
"""


def main() -> None:
    """Runs the subcommand that the command line names."""
    if len(sys.argv) < 2 or sys.argv[1] not in ("benchmark",):
        sys.stderr.write(_USAGE)
        raise SystemExit(0 if {"-h", "--help"} & set(sys.argv[1:2]) else 2)
    logging.disable_progress_bar()
    from .benchmarking import BenchmarkArguments, benchmark
    from .benchmarking.report import markdown

    parser = HfArgumentParser(BenchmarkArguments, prog="gumiho benchmark", description=benchmark.__doc__)
    (args,) = parser.parse_args_into_dataclasses(sys.argv[2:])
    rows = benchmark(args)
    sys.stdout.write(f"\n{markdown(rows)}\neverything is in {args.output_dir}\n")


if __name__ == "__main__":
    main()
