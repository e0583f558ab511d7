"""What scripts that measure the demo pair share: where it is, its prompts, and their options."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, logging


DEMO_PAIR = Path(__file__).parent.parent / "examples" / "demo_pair"


@dataclass(kw_only=True)
class DemoPairArguments:
    demo_pair: Path = field(default=DEMO_PAIR, metadata={"help": "Folder with `target`, `gumiho` and prompts."})

    @property
    def folders(self) -> dict[str, str]:
        """The target's and the drafter's."""
        return {"target": str(self.demo_pair / "target"), "assistant": str(self.demo_pair / "gumiho")}

    @property
    def texts(self) -> list[str]:
        """The prompts."""
        lines = (self.demo_pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]


def parse(options: type, description: str | None, words: list[str] | None = None) -> Any:
    """Returns the options of a command line, or of these words; libraries are silent from then on."""
    (args,) = HfArgumentParser(options, description=description).parse_args_into_dataclasses(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return args
