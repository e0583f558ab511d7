"""Compiled targets, and targets with compiled submodules, decode with a drafter in any order of calls."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from chains import make_chain_drafter, make_chain_target
from targets import Pair, make_drafter, make_prompts, make_target
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.internals import compile_on_every_device


def compile_forward(target: PreTrainedModel) -> None:
    target.forward = torch.compile(target.forward, backend="eager")


def compile_call(target: PreTrainedModel) -> None:
    target.compile(backend="eager")


pytestmark = pytest.mark.usefixtures("_forget_compiled")
COMPILING = [compile_forward, compile_call]
SETTINGS = {**make_prompts([6, 4]), "max_new_tokens": 5, "do_sample": False}


def make_pair(kind: str) -> Pair:
    if kind == "chain":
        target = make_chain_target("qwen3_next")
        return target, make_chain_drafter(target)
    # Tracing takes seconds for each layer.
    layers = [0, 1] if kind == "tree of layers" else None
    target = make_target(num_layers=2 if layers else 1)
    return target, make_drafter(target, target_layer_ids=layers, num_layers=1)


# Both orders for each kind, and for each way to compile.
@pytest.mark.parametrize(
    ("kind", "compile_target", "order"),
    [
        (kind, compile_target, ("plain first", "drafted first")[(number + way) % 2])
        for number, kind in enumerate(("tree", "tree of layers", "chain"))
        for way, compile_target in enumerate(COMPILING)
    ],
)
def test_texts_equal_in_any_order_of_calls(
    kind: str, compile_target: Callable[[PreTrainedModel], None], order: str
) -> None:
    target, drafter = make_pair(kind)
    expected = target.generate(**SETTINGS)
    compile_target(target)
    assert_equal_in_turns(target, drafter, order, expected)


def assert_equal_in_turns(target: PreTrainedModel, drafter: GumihoModel, order: str, expected: torch.Tensor) -> None:
    plain, drafted = {}, {"assistant_model": drafter}
    for call in (plain, drafted, plain) if order == "plain first" else (drafted, plain, drafted):
        assert torch.equal(target.generate(**SETTINGS, **call), expected)


@pytest.mark.slow
def test_default_backend() -> None:
    target, drafter = make_pair("tree")
    expected = target.generate(**SETTINGS)
    target.compile()
    assert_equal_in_turns(target, drafter, "drafted first", expected)


# Trees of layers have the hook on the decoder, too. Without others, it is tried on what it is set on.
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *itertools.product(["tree of layers"], ["decoder", "wrapped decoder", "layers", "attention", "norm", "head"]),
        *itertools.product(["tree"], ["decoder", "wrapped decoder"]),
    ],
)
def test_compiled_submodules(kind: str, compiled: str) -> None:
    target, drafter = make_pair(kind)
    expected = target.generate(**SETTINGS)
    decoder = target.model
    of_names = {
        "decoder": [decoder],
        "layers": decoder.layers,
        "attention": [layer.self_attn for layer in decoder.layers],
        "norm": [decoder.norm],
        "head": [target.lm_head],
    }
    if compiled == "wrapped decoder":
        target.model = torch.compile(decoder, backend="eager")
    for module in of_names.get(compiled, []):
        module.compile(backend="eager")
    assert_equal_in_turns(target, drafter, "plain first", expected)


@pytest.mark.parametrize("compile_target", COMPILING)
def test_fixed_shapes_compile_such_a_target_once(
    compile_target: Callable[[PreTrainedModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = make_pair("tree")
    settings = {**make_prompts([6]), "max_new_tokens": 12, "do_sample": False}
    expected = target.generate(**settings)
    compile_target(target)
    target.generate(**settings)
    config = compile_on_every_device(backend="eager", mode="default", fullgraph=True)
    static = {"assistant_model": drafter, "cache_implementation": "static", "compile_config": config}
    assert torch.equal(target.generate(**settings, **static), expected)
    marked: list[torch.Tensor] = []
    monkeypatch.setattr("transformers_gumiho.generation.verification.cycle_shapes.mark_static_address", marked.append)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(target.generate(**settings, **static), expected)
    assert not marked  # the tensors of the call before were used again


def test_another_thread_compiles_meanwhile() -> None:
    target, drafter = make_pair("tree")
    prompts = [make_prompts([length], seed=length) for length in (5, 7)]
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = [target.generate(**prompt, **settings) for prompt in prompts]
    compile_forward(target)
    with ThreadPoolExecutor(2) as threads:
        plain = threads.submit(lambda: [target.generate(**prompt, **settings) for prompt in prompts])
        drafted = threads.submit(
            lambda: [target.generate(**prompt, **settings, assistant_model=drafter) for prompt in prompts]
        )
        texts = plain.result() + drafted.result()
    assert all(map(torch.equal, texts, expected + expected))


@pytest.mark.parametrize("moved", ["target", "decoder"])
def test_a_compiled_target_with_a_forward_of_another_package(moved: str) -> None:
    """As accelerate puts one on each module that it moves inputs for."""
    target, drafter = make_pair("tree of layers")
    expected = target.generate(**SETTINGS)
    for module in (target.model, target) if moved == "target" else (target.model,):
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    compile_forward(target)
    assert_equal_in_turns(target, drafter, "plain first", expected)
