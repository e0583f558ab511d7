"""Finding the checkpoint that a training goes on from."""

import json
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """
    Returns the folder of the newest checkpoint in `output_dir` that was written to its end, `None` if there is none.

    `Trainer` writes its state last, so a checkpoint with a readable one is whole.
    """
    folder = Path(output_dir)
    numbered = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    ]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None
