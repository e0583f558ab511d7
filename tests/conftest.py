import logging
import os
import re
from collections.abc import Iterator

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure() -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Warnings are made, for the fixture below to see, and written nowhere.
    transformers_logging.set_verbosity_warning()
    transformers_logging.disable_default_handler()
    # The models here are tiny: threads only wait for each other, for very long where the machine is busy.
    torch.set_num_threads(1)


class _Deprecations(logging.Handler):
    """Keeps what transformers says of its future."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if re.search("deprecat|will be removed", record.getMessage(), re.IGNORECASE):
            self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def _no_deprecations(request: pytest.FixtureRequest) -> Iterator[None]:
    """
    Fails a test in which transformers logs that something is deprecated. (That it *warns* of it is an error by
    `filterwarnings` in pyproject.toml.) The marker `transformers_deprecates(match)` excepts messages that a pattern
    is found in: those of calls that transformers' own code makes.
    """
    from transformers.utils import logging as transformers_logging

    allowed = [pattern for marker in request.node.iter_markers("transformers_deprecates") for pattern in marker.args]
    handler = _Deprecations()
    # What is said once in a process is said once in each test.
    logging.Logger.warning_once.cache_clear()
    transformers_logging.add_handler(handler)
    yield
    transformers_logging.remove_handler(handler)
    found = [text for text in handler.messages if not any(re.search(pattern, text) for pattern in allowed)]
    if found:
        pytest.fail("transformers calls deprecated what this test uses:\n" + "\n".join(found), pytrace=False)
