"""A drafter that gains too little is paused, and the text stays that of plain decoding."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from chains import make_chain_drafter, make_chain_target
from origins import Origins
from targets import Pair, equals_plain, make_drafter, make_prompts, make_target
from torch._dynamo.utils import counters

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.internals import compile_on_every_device


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.9}
STATIC = {"cache_implementation": "static", "disable_compile": True}


def make_pair(family: str = "llama", num_layers: int | None = None, **settings: Any) -> Pair:
    """A pair whose drafter would have to be right more often than it is, and is now and then."""
    target = make_target(family, seed=3, num_layers=num_layers)
    return target, make_drafter(
        target, **{"num_assistant_tokens": 20, "branching_factor": 3, "break_even": 3.0} | settings
    )


@pytest.mark.parametrize(
    ("family", "branching_factor", "lengths", "shapes"),
    [
        ("llama", 1, [9], STATIC), ("llama", 1, [9, 4, 1], {}), ("llama", 3, [9], {}), ("llama", 3, [9, 4, 1], STATIC),
        ("gemma3", 3, [9], STATIC), ("gemma3", 3, [9, 4, 1], {}),
    ],
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(
    family: str, branching_factor: int, lengths: list[int], shapes: dict[str, Any]
) -> None:
    target, drafter = make_pair(family, branching_factor=branching_factor)
    sources: set[str] = set()
    for sampling in (GREEDY, SAMPLED):
        arguments = make_prompts(lengths) | {"max_new_tokens": 60} | sampling
        for lookup in ({}, {"prompt_lookup_num_tokens": 6}):
            with observing(origins := Origins()):
                equals_plain(target, drafter, drafted=shapes | lookup, **arguments)
            sources |= set(origins.sources)
            paused = [origin.num_left for origin in origins.seen if origin.source == "pause"]
            # Each cycle of a pause says how many more there are.
            assert all(left in (after + 1, 0) for left, after in pairwise(paused))
    assert {"drafter", "pause"} <= sources, "the equality says something only where drafting pauses and goes on"


def test_a_chain_pauses_as_a_tree_does() -> None:
    target = make_chain_target("zaya")
    drafter = make_chain_drafter(target)
    drafter.generation_config.break_even = 6.0
    with observing(origins := Origins()):
        equals_plain(target, drafter, lengths=[9, 4], max_new_tokens=60)
    assert {"drafter", "pause"} <= set(origins.sources)


@pytest.mark.parametrize(
    ("rows", "sampling", "shapes"), [(1, GREEDY, STATIC), (1, SAMPLED, {}), (4, GREEDY, {}), (4, SAMPLED, STATIC)]
)
def test_a_drafter_that_does_not_fit_drafts_seldom_with_nothing_set(
    rows: int, sampling: dict[str, Any], shapes: dict[str, Any]
) -> None:
    target = make_target("llama", vocab_size=512, seed=3)
    torch.manual_seed(1)
    drafter = GumihoModel.from_target(target).to(target.dtype)
    with observing(origins := Origins()):
        equals_plain(target, drafter, drafted=shapes, **make_prompts([9] * rows), max_new_tokens=240, **sampling)
    assert origins.sources.count("drafter") < len(origins.seen) / 10
    assert origins.sources.index("drafter", 40) > 64, "it drafts again after a long pause, having read what was missed"
    assert origins.sources[:4] != ["pause"] * 4


def test_rows_are_counted_after_num_return_sequences() -> None:
    target, drafter = make_pair(num_assistant_tokens={"1": 9, "3": 5})
    settings = {"max_new_tokens": 12, "assistant_model": drafter, "return_dict_in_generate": True}
    alone = target.generate(**make_prompts([5]), do_sample=False, **settings)
    three = target.generate(**make_prompts([5]), **SAMPLED, num_return_sequences=3, **settings)
    assert (alone.tree_sizes[0], three.tree_sizes[0]) == (9, 5)


@pytest.mark.parametrize("lookup", [{}, {"prompt_lookup_num_tokens": 6}], ids=["alone", "context"])
def test_a_pause_compiles_nothing(lookup: dict[str, int]) -> None:
    """Whatever a pause verifies has the shapes of every other cycle."""
    target, drafter = make_pair(num_layers=1, break_even=1.0)
    static = {"cache_implementation": "static", "compile_config": compile_on_every_device(backend="eager")}
    arguments = make_prompts([9]) | {"max_new_tokens": 90} | GREEDY | static | lookup | {"assistant_model": drafter}
    torch.compiler.reset()
    with observing(before := Origins()):
        target.generate(**arguments)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    drafter.generation_config.break_even = 5.0
    with observing(origins := Origins()):
        target.generate(**arguments)
    assert "pause" in set(origins.sources) - set(before.sources)
    assert counters["stats"]["unique_graphs"] == num_graphs
