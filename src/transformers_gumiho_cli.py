"""
The command `gumiho`.

Importing the package takes seconds, because it imports PyTorch. So this module is outside of it: `gumiho --help`,
`gumiho --version` and a misspelled command answer at once.
"""

import os
import sys
from importlib.metadata import version


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
_COMMANDS = [line.split()[0] for line in _USAGE.splitlines() if line.startswith("  ")]


def main() -> None:
    """Runs the command that the command line names."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # as where a service starts a program, or after `>&-`
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the end)
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "--version":
        sys.stdout.write(f"gumiho {version('transformers-gumiho')}\n")
    elif name in _COMMANDS:
        try:
            from transformers_gumiho.cli import run
        except KeyboardInterrupt:  # as `commands.py` of the package reports it
            sys.stderr.write(f"\ngumiho {name}: Interrupted.\n")
            raise SystemExit(130) from None
        run(name, sys.argv[2:])
    else:
        unknown = f"gumiho: unknown command {name!r}\n" if name and not name.startswith("-") else ""
        asked_for = name in ("-h", "--help")
        (sys.stdout if asked_for else sys.stderr).write(unknown + _USAGE)
        raise SystemExit(0 if asked_for else 2)


if __name__ == "__main__":
    main()
