import gc
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
# For processes that tests start; the tests' own are set below.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Warnings are made, for the fixture below to see, and written nowhere.
    transformers_logging.set_verbosity_warning()
    transformers_logging.disable_default_handler()
    # The models here are tiny: threads only wait for each other, for very long where the machine is busy.
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # What is imported by now stays. Each of the many collections of garbage would look at all of it again.
    gc.collect()
    gc.freeze()


class _Deprecations(logging.Handler):
    """Keeps what transformers says of its future."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if re.search("deprecat|will be removed", text, re.IGNORECASE) and not _transformers_called_generate():
            self.messages.append(text)


def _transformers_called_generate() -> bool:
    """Whether the innermost `generate()` was called by transformers itself: by a pipeline, or an assistant of its."""
    frame, is_inside = inspect.currentframe(), False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        # Decorators around it, and what `attach` extends it by.
        around = ("torch.", "transformers.utils.", "transformers_gumiho.")
        if is_inside and not module.startswith(around):
            return module.startswith("transformers.")
        is_inside = is_inside or (module == "transformers.generation.utils" and frame.f_code.co_name == "generate")
        frame = frame.f_back
    return False


@pytest.fixture(autouse=True)
def _no_deprecations(request: pytest.FixtureRequest) -> Iterator[None]:
    """
    Fails a test in which transformers logs that something is deprecated. (That it *warns* of it is an error by
    `filterwarnings` in pyproject.toml.) What its own pipelines and assistants pass to `generate()` is excepted, and
    by the marker `transformers_deprecates(match)` messages that a pattern is found in.
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


@pytest.fixture
def _forget_compiled() -> Iterator[None]:
    """What was compiled before a test, and the counts of it, are forgotten."""
    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """Notes from now on each call (its `args` and `kwargs`) of a function of a module, class or object."""

    def note(owner: Any, name: str) -> list[Any]:
        run, calls = getattr(owner, name), []

        def noting(*args: Any, **kwargs: Any) -> Any:
            calls.append(mock.call(*args, **kwargs))
            return run(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
        return calls

    return note


@pytest.fixture
def short_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tunes a drafter compares few settings, on a single prompt: each tree takes seconds."""
    from transformers_gumiho.tools.tuning import contest, trees

    monkeypatch.setattr(contest, "ROUNDS", (1,))
    monkeypatch.setattr(contest, "FINAL_TURNS", 1)
    monkeypatch.setattr(trees, "_SHAPES", ((6, 2),))
    monkeypatch.setattr(trees, "_NUM_SIZES", 2)
