"""Finding the checkpoint that a training continues from."""

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """
    Returns the folder of the newest complete checkpoint in `output_dir`, `None` if there is none. `Trainer` writes its
    state last, so a checkpoint with a readable one is complete.
    """
    found = Path(output_dir).glob("checkpoint-*")
    numbered = {int(path.name[11:]): path for path in found if path.name[11:].isdigit()}
    for _, path in sorted(numbered.items(), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None
