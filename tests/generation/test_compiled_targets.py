"""Targets that the user compiled are refused by name, and decode plainly with an attached drafter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from targets import equals_plain, make_drafter, make_prompts, make_target
from transformers import PreTrainedModel

from transformers_gumiho import attach
from transformers_gumiho.internals import compile_on_every_device


pytestmark = pytest.mark.usefixtures("_forget_compiled")
SETTINGS = {**make_prompts([6]), "max_new_tokens": 5, "do_sample": False}


def compile_forward(target: PreTrainedModel) -> None:
    target.forward = torch.compile(target.forward, backend="eager")


def wrap_decoder(target: PreTrainedModel) -> None:
    target.model = torch.compile(target.model, backend="eager")


def place(target: PreTrainedModel) -> None:
    """As accelerate puts a `forward` on each module that it moves inputs for."""
    add_hook_to_module(target, AlignDevicesHook("cpu"))


WAYS: list[tuple[list[Callable[[PreTrainedModel], Any]], str]] = [
    ([compile_forward], "LlamaForCausalLM"),
    ([lambda target: target.compile(backend="eager")], "LlamaForCausalLM"),
    ([lambda target: target.model.compile(backend="eager")], "LlamaModel"),
    ([wrap_decoder], "OptimizedModule"),
    ([lambda target: target.model.norm.compile(backend="eager")], "LlamaRMSNorm"),
    ([compile_forward, place], "LlamaForCausalLM"),
    ([place, compile_forward], "LlamaForCausalLM"),
]


@pytest.mark.parametrize(("steps", "module"), WAYS)
def test_a_compiled_module_is_named(steps: list[Callable[[PreTrainedModel], Any]], module: str) -> None:
    target = make_target(num_layers=1)
    drafter = make_drafter(target)
    for step in steps:
        step(target)
    with pytest.raises(ValueError, match=rf"was compiled \(its `{module}`\).*cache_implementation='static'"):
        target.generate(**SETTINGS, assistant_model=drafter)
    with pytest.raises(ValueError, match="was compiled"):
        attach(target, drafter)


def test_a_target_that_is_compiled_later_decodes_plainly(caplog: pytest.LogCaptureFixture) -> None:
    target = make_target(num_layers=1)
    expected = target.generate(**SETTINGS)
    attach(target, make_drafter(target))
    target.compile(backend="eager")
    assert torch.equal(target.generate(**SETTINGS), expected)
    assert any("was compiled" in message for message in caplog.messages)


def test_what_generate_compiles_itself_is_not_refused() -> None:
    target = make_target(num_layers=1)
    config = compile_on_every_device(backend="eager")
    static = {"cache_implementation": "static", "compile_config": config}
    target.generate(**SETTINGS, **static)
    equals_plain(target, make_drafter(target), drafted=static, **SETTINGS)
