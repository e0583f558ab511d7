"""`cache_implementation="static"`: cycles of fixed shapes, compiled once, whose outputs equal plain decoding's."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import FAMILIES, WINDOW, Pair, equals_plain, make_drafter, make_prompts, make_target
from torch._dynamo.utils import counters
from transformers import CompileConfig

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import GenerationObserver, observing
from transformers_gumiho.generation.verification.cycle_shapes import CycleShapes
from transformers_gumiho.internals import CACHE_NAME, compile_on_every_device


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}


# Tracing takes seconds for each layer.
SMALL = {"num_assistant_tokens": 12, "num_layers": 1}


def make_pair(family: str = "llama", **settings: Any) -> Pair:
    num_layers = None if "num_layers" not in settings else 2 if "target_layer_ids" in settings else 1
    target = make_target(family, num_layers=num_layers)
    if family == "gemma2":
        target = target.float()  # see test_families
    return target, make_drafter(target, **{"num_assistant_tokens": 47} | settings)


def compile_config(backend: str) -> CompileConfig:
    # As a whole graph: a stage that falls back to Python would be an error.
    return compile_on_every_device(backend=backend, mode="default", fullgraph=True)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_fixed_shapes_equal_plain(family: str) -> None:
    target, drafter = make_pair(family)
    static = {"cache_implementation": "static"}
    accepted = []
    for seed, (length, sampling) in enumerate(((1, SAMPLING), (WINDOW + 9, {"do_sample": False}))):
        drafted = equals_plain(target, drafter, seed, static, **make_prompts([length], seed), **sampling)
        accepted += drafted.accepted_lengths[0]
    assert max(accepted) >= 2, "the equality says something only where drafts are accepted"
    batch = make_prompts([3, WINDOW + 9, 1])
    batch |= {"max_new_tokens": 24, "do_sample": False, "assistant_model": drafter}
    assert torch.equal(target.generate(**batch, **static), target.generate(**batch))


@pytest.mark.parametrize("branching_factor", [2, 14])
def test_caches_have_room_for_the_last_tree(branching_factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CycleShapes, "slots_for", lambda shapes, num_slots: num_slots)  # not one slot more
    settings = {"branching_factor": branching_factor, "draft_vocabulary": [5, 1, 2, 7, 3, 6]}
    settings |= {"draft_temperature": [1.0, 0.5]}
    for family in ("llama", "mistral"):
        target = make_target(family)
        drafter = make_drafter(target, num_assistant_tokens=40, **settings)
        for max_new_tokens in range(2, 9):
            for inputs in (make_prompts([2]), make_prompts([WINDOW + 4, 3])):
                embeds = target.get_input_embeddings()(inputs["input_ids"])
                for given in (inputs, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}):
                    static = {"cache_implementation": "static"}
                    equals_plain(target, drafter, drafted=static, **given, max_new_tokens=max_new_tokens)


@pytest.mark.usefixtures("_forget_compiled")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gemma3", {"branching_factor": 3, "target_layer_ids": [0, 1]}),
        ("gpt2", {"transition_rank": 3}),
    ],
    ids=["llama", "gemma3-layers", "gpt2-transitions"],
)
def test_stages_are_compiled_once(family: str, settings: dict[str, Any]) -> None:
    target, drafter = make_pair(family, **SMALL, **settings)
    static = {"cache_implementation": "static", "compile_config": compile_config("eager")}

    def check(lengths: list[int], seed: int, **sampling: object) -> None:
        batch = make_prompts(lengths, seed)
        arguments = {"max_new_tokens": 30 - max(lengths), **sampling}
        torch.manual_seed(seed)
        dynamic = target.generate(**batch, assistant_model=drafter, **arguments)
        torch.manual_seed(seed)
        assert torch.equal(target.generate(**batch, assistant_model=drafter, **arguments, **static), dynamic)

    check([9], 0, do_sample=False)
    assert counters["stats"]["unique_graphs"] == 4, "masks, target, walk, draft"
    check([9], 0, **SAMPLING)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs == 5, "drafting for sampling, too"
    # Other prompts, lengths, and ways of choosing run what was compiled for the first.
    for seed, length in enumerate((4, 17), start=1):
        check([length], seed, do_sample=False)
        check([length], seed, **SAMPLING | {"temperature": 0.5 + 0.1 * seed})
    assert counters["stats"]["unique_graphs"] == num_graphs
    # A batch has shapes of its own, and padding a mask.
    check([9, 4], 0, do_sample=False)
    num_graphs = counters["stats"]["unique_graphs"]
    check([3, 8], 1, do_sample=False)
    assert counters["stats"]["unique_graphs"] == num_graphs


class Backend:
    """A backend that is no function."""

    num_graphs = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        Backend.num_graphs += 1
        return graph.forward


@pytest.mark.usefixtures("_forget_compiled")
def test_later_calls_use_the_same_memory_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else graphs would be captured, or compiled, anew in every call."""
    marked: list[int] = []
    for module in ("tree_cache", "target_memory"):
        monkeypatch.setattr(
            f"transformers_gumiho.generation.verification.{module}.mark_static_address",
            lambda tensor: marked.append(tensor.data_ptr()),
        )
    target, drafter = make_pair(transition_rank=3, draft_vocabulary=[6, 1, 5, 2], **SMALL)
    kwargs = {"do_sample": False, "cache_implementation": "static", "assistant_model": drafter}
    compiling = compile_on_every_device(backend=Backend(), mode="default")

    def generate(lengths: list[int], seed: int) -> tuple[set[int], Any]:
        marked.clear()
        prompts = make_prompts(lengths, seed)
        plain = target.generate(**prompts, max_new_tokens=20, do_sample=False)
        output = target.generate(
            **prompts, **kwargs, max_new_tokens=20, compile_config=compiling, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        return set(marked), output[CACHE_NAME]

    # Of a first call all are new: keys and values of two layers, and two counts; the cut head, its tokens, two tables.
    first, cache = generate([9], 0)
    assert len(first) == (2 * 2 + 2) + (2 + 2)
    num_graphs, states = Backend.num_graphs, [layer.keys.clone() for layer in cache.layers]
    assert num_graphs > 0
    again, _ = generate([9], 1)
    assert again <= first
    assert Backend.num_graphs == num_graphs
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, states, strict=True))
    batch, _ = generate([9, 4], 0)
    assert len(batch) == 2 * 2 + 2, "what weights give is shared by all calls"
    assert generate([9], 2)[0] <= first
    assert generate([4, 9], 0)[0] <= batch
    # Two generations at once do not share memory.
    nested: list[set[int]] = []

    class Nesting(GenerationObserver):
        def on_cycle(self, *_: Any) -> None:
            if not nested:
                nested.append(set())
                outer = set(marked)
                nested[0] = generate([9], 3)[0]
                assert not nested[0] & outer

    with observing(Nesting()):
        prompts = make_prompts([9], 0)
        marked.clear()
        drafted = target.generate(**prompts, **kwargs, max_new_tokens=20, compile_config=compiling)
    assert nested[0]
    assert torch.equal(drafted, target.generate(**prompts, max_new_tokens=20, do_sample=False))


@pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="inductor needs a C++ compiler, and Python's headers",
)
@pytest.mark.usefixtures("_forget_compiled")
def test_inductor_equals_compiled_plain() -> None:
    # Small, as a CPU compiles for long.
    target = make_target(num_layers=1)
    drafter = GumihoModel.from_target(target, num_hidden_layers=1, num_parallel_heads=1, num_residual_blocks=1)
    drafter.generation_config.update(num_assistant_tokens=24, branching_factor=4)
    static = {"cache_implementation": "static", "compile_config": compile_config("inductor")}
    for seed in range(2):
        equals_plain(target, drafter, **make_prompts([9], seed), max_new_tokens=24, **static)
    assert counters["inductor"], "nothing went through inductor"


def test_a_pause_reaches_no_nodes_below_the_depth_of_the_trees() -> None:
    """In fixed shapes a paused cycle has as many nodes as others, which hold token 0, at the last one's position."""
    target, drafter = make_pair("gpt2", tree_depth=1, num_assistant_tokens=7, break_even=9.0)
    for seed in range(4):
        equals_plain(
            target, drafter, seed=seed, do_sample=True, cache_implementation="static", sequence_bias={(0,): 3.0}
        )
