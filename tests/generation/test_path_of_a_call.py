"""CONTRIBUTING names every file that a call of `generate(assistant_model=...)` passes. Files and calls stay few."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from traced_files import count_calls, traced_files
from trained_pair import load_drafter, load_language_model, load_tokenizer
from transformers.generation import GenerationMixin

from transformers_gumiho.internals import _HOOK


ROOT = Path(__file__).parents[2]
MAX_IN_A_CALL, MAX_IN_A_CYCLE = 30, 18
# Calls of functions before the first cycle, and in a cycle: a tenth above what there is.
MAX_CALLS_BEFORE, MAX_CALLS_IN_A_CYCLE = 555, 400


def named_files() -> list[tuple[str, bool]]:
    """Returns the files of the path of one call in CONTRIBUTING, and whether each is in its cycle."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.split("The path of one call of `generate(assistant_model=...)`", 1)[1].split("```")[1]
    lines = re.findall(r"^([* ]) ([\w/]+\.py) ", block, flags=re.MULTILINE)
    return [(name, mark == "*") for mark, name in lines]


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A greedy call with the demo pair, of which one has run before: what the first call prepares is kept."""
    generate_of_transformers: Any = GenerationMixin.generate
    while hasattr(generate_of_transformers, _HOOK):  # another test has attached a drafter
        generate_of_transformers = generate_of_transformers.__wrapped__
    monkeypatch.setattr(GenerationMixin, "generate", generate_of_transformers)
    target, gumiho = load_language_model(), load_drafter()
    inputs = load_tokenizer()("def read(self):", return_tensors="pt")

    def call() -> None:
        target.generate(**inputs, assistant_model=gumiho, max_new_tokens=33, do_sample=False)

    call()
    return call


def test_contributing_names_the_files_of_a_greedy_call(generate: Callable[[], None]) -> None:
    files, of_cycle = traced_files(generate)
    named = named_files()
    assert [name for name, _ in named] == files, "in the order in which the call first passes them"
    assert {name for name, is_in_cycle in named if is_in_cycle} == set(of_cycle)
    assert len(files) <= MAX_IN_A_CALL
    assert len(of_cycle) <= MAX_IN_A_CYCLE


def test_a_greedy_call_calls_few_functions(generate: Callable[[], None]) -> None:
    before, *cycles = count_calls(generate)
    assert before <= MAX_CALLS_BEFORE
    assert len(cycles) > 2
    assert max(cycles[:-1]) <= MAX_CALLS_IN_A_CYCLE
    assert cycles[-1] <= MAX_CALLS_IN_A_CYCLE + 40  # with what ends the call
