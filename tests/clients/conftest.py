"""
Programs that call `generate()` for their users get the same results with an attached drafter, in fewer passes.

What is here runs where the clients are installed (`make test-clients`), and nowhere else.
"""

import functools
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from training_data import CHATML, DEMO_TARGET
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import transformers_gumiho
from transformers_gumiho.tools.serving_folder import AttachArguments, write_served_target


collect_ignore_glob = [] if importlib.util.find_spec("lm_eval") else ["test_*.py"]

DRAFTER = DEMO_TARGET.parent / "gumiho"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clients may call what transformers deprecates."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.transformers_deprecates("."))
            item.add_marker(pytest.mark.filterwarnings("default"))


class Run(NamedTuple):
    """What a client returned, and how often it ran the target."""

    result: Any
    num_passes: int


Client = Callable[[PreTrainedModel], Any]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Run]:
    """Runs a client, and counts the passes of all targets in this process."""
    forward, passes = LlamaForCausalLM.forward, []

    @functools.wraps(forward)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counting)

    def run(client: Callable[[], Any]) -> Run:
        passes.clear()
        torch.manual_seed(0)
        return Run(client(), len(passes))

    return run


@pytest.fixture
def chat_target(tmp_path: Path) -> Path:
    """The folder of the demo pair's target, with a chat template."""
    folder = tmp_path / "target"
    shutil.copytree(DEMO_TARGET, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.fixture
def served(chat_target: Path, tmp_path: Path) -> Path:
    """What `gumiho attach` writes."""
    folder = tmp_path / "served"
    write_served_target(AttachArguments(str(chat_target), str(DRAFTER), str(folder)))
    return folder


@pytest.fixture
def target(chat_target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(chat_target, dtype=torch.float32)


@pytest.fixture
def tokenizer(chat_target: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(chat_target)


@pytest.fixture
def compare(target: PreTrainedModel, count: Callable[[Callable[[], Any]], Run]) -> Callable[[Client], Any]:
    """
    Runs a client with the plain target and with an attached drafter, which may have other settings, and returns what
    both gave.
    """

    def run(client: Client, **settings: Any) -> Any:
        plain = count(lambda: client(target))
        with transformers_gumiho.attached(target, DRAFTER) as drafter:
            drafter.generation_config.update(**settings)
            drafted = count(lambda: client(target))
        assert drafted.result == plain.result
        assert drafted.num_passes < plain.num_passes
        return plain.result

    return run
