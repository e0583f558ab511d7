"""Disks that are full."""

import errno
from pathlib import Path
from typing import Any


def disk_of(num_bytes: int, open_file: Any, name: str) -> Any:
    """Returns an `open` after which a file of this name takes so many bytes and no more."""

    def open_on_it(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        file = open_file(path, mode, **kwargs)
        if mode != "a" or path.name != name:
            return file
        write = file.write

        def write_what_fits(text: str) -> None:
            room = num_bytes - path.stat().st_size
            write(text[:room])
            if len(text) > room:
                raise OSError(errno.ENOSPC, "No space left on device")

        file.write = write_what_fits
        return file

    return open_on_it


def no_room(path: Path, *_: Any, **__: Any) -> None:
    """Stands in for `Path.write_text` on a full disk."""
    path.write_bytes(b"")
    raise OSError(errno.ENOSPC, "No space left on device")
