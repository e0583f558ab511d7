"""A Hub cache as `huggingface_hub` lays it out."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_to_hub_cache(
    cache_dir: Path, repo: str, files: Iterable[Path], revision: str = "main", commit: str = COMMIT
) -> Path:
    """Moves files into the cache, as a commit of `repo` that `revision` points to. Returns the snapshot's folder."""
    storage = cache_dir / f"models--{repo.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    for folder in (storage / "blobs", storage / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (storage / "refs" / revision).write_text(commit)
    for file in files:
        # Blobs are called by the tag that the Hub gives a content: any name serves.
        blob = storage / "blobs" / hashlib.sha256(f"{commit}/{file.name}".encode()).hexdigest()
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def note_missing(cache_dir: Path, repo: str, name: str, commit: str = COMMIT) -> None:
    """Notes that the repository has no file `name`, as a download does that the Hub answers with 404."""
    missing = cache_dir / f"models--{repo.replace('/', '--')}" / ".no_exist" / commit / name
    missing.parent.mkdir(parents=True, exist_ok=True)
    missing.touch()
