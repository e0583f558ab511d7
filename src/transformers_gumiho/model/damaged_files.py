"""Errors that name the damaged file of a checkpoint, as an interrupted download leaves it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..user_errors import UserOSError


class DamagedFileError(UserOSError):
    """A file is there, and does not hold what a file of its name holds."""

    def __init__(self, file: str, name_or_path: Any, finding: str):
        super().__init__(
            f"`{file}` of {str(name_or_path)!r} is damaged: {finding}. An interrupted download or copy leaves such a "
            f"file. Delete it, and download it again (`force_download=True`) or save it again."
        )


@contextmanager
def damaged_json_named(file: str, name_or_path: Any) -> Iterator[None]:
    """Raises [`DamagedFileError`] where transformers reads, within this, a JSON file that holds no object."""
    try:
        yield
    except (AttributeError, TypeError) as error:  # it takes whatever JSON it finds for an object
        raise DamagedFileError(file, name_or_path, f"it holds no JSON object ({error})") from error
    except OSError as error:
        # It raises the same where there is no file.
        if not isinstance(error.__context__, (json.JSONDecodeError, UnicodeDecodeError)):
            raise
        raise DamagedFileError(file, name_or_path, f"it holds no JSON object ({error.__context__})") from error
