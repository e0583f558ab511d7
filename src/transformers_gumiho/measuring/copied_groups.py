"""What passes over draft trees would take if they copied grouped keys and values, as transformers' `sdpa` does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..internals import replace_sdpa_attention, sdpa_attention


@contextmanager
def copying_groups() -> Iterator[None]:
    """Within it all threads attend by transformers' own function, in passes of this package, too."""
    installed: Any = sdpa_attention()
    replace_sdpa_attention(getattr(installed, "__wrapped__", installed))
    try:
        yield
    finally:
        replace_sdpa_attention(installed)
