"""What nobody asked for costs nothing: no pass, copy or draft beyond what a text needs, and nothing is made twice."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from chains import make_chain_drafter, make_chain_target
from targets import equals_plain, make_drafter, make_pair, make_prompts, make_target, passes_of
from transformers import DynamicCache

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.drafting.drafter import GumihoDrafter
from transformers_gumiho.generation.observers import GenerationObserver, observing
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.tree.walk import Path
from transformers_gumiho.generation.verification import target_memory, traits
from transformers_gumiho.generation.verification.chains import ChainCache
from transformers_gumiho.generation.verification.tree_cache import TreeCache
from transformers_gumiho.internals import CACHE_NAME, modules_of


GREEDY = {"do_sample": False, "max_new_tokens": 24}
ROWS = {"one": [5], "batch": [6, 2, 4]}
LOOKUP = {"prompt_lookup_num_tokens": 6}


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("family", ["llama", "mistral", "zaya", "qwen3_5"])
def test_the_target_runs_once_for_the_prompt_and_once_per_cycle(
    family: str, lengths: list[int], calls_of: Any
) -> None:
    is_chain = family == "zaya"
    target = make_chain_target(family) if family in ("zaya", "qwen3_5") else make_target(family)
    drafter = make_chain_drafter(target) if is_chain else make_drafter(target)
    arguments: dict[str, Any] = {**make_prompts(lengths), **GREEDY, "eos_token_id": [3, 6], "assistant_model": drafter}
    target.generate(**arguments)  # what is tried at the first call is not tried again
    output = target.generate(**arguments, return_dict_in_generate=True)
    restored = [calls_of(kind, "restore") for kind in (TreeCache, ChainCache)]
    num_passes, text = passes_of(target, lambda: target.generate(**arguments))
    assert torch.equal(text, output.sequences)
    assert not any(restored)
    num_catching_up = num_passes - 1 - len(output.tree_sizes)
    assert num_catching_up == 0 or (is_chain and num_catching_up < len(output.tree_sizes) / 4)
    # The caller's cache gets its entries.
    cache = DynamicCache(config=target.config)
    target.generate(**arguments, **{CACHE_NAME: cache})
    assert any(restored)
    assert cache.get_seq_length() == output.sequences.shape[1] - 1


def test_a_call_reads_the_code_of_its_target_once(calls_of: Any) -> None:
    """And the next call reads it again, because it may have been patched."""
    target, drafter = make_pair()
    read = calls_of(traits, "foreign_code")
    for number in (1, 2):
        target.generate(**make_prompts([5]), **GREEDY, assistant_model=drafter)
        assert len(read) == number
    layer = target.model.layers[0]
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    assert sorted(modules_of(target), key=id) == sorted(target.modules(), key=id)
    equals_plain(target, drafter)
    assert traits.TargetTraits.of(target).foreign


class Depths(GenerationObserver):
    """Notes for each cycle the deepest draft, and the most tokens that an open row takes."""

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.accepted_lengths: list[list[int]] = []

    def on_cycle(self, tree: DraftTree, path: Path) -> None:
        self.depths.append(int(tree.depths.max()))
        self.accepted_lengths.append(path.accepted_lengths)


@pytest.mark.parametrize(
    ("transition_rank", "lengths", "lookup"),
    [(0, ROWS["one"], {}), (3, ROWS["batch"], {}), (3, ROWS["one"], LOOKUP), (0, ROWS["batch"], LOOKUP)],
)
def test_trees_are_no_deeper_than_what_is_missing(
    transition_rank: int, lengths: list[int], lookup: dict[str, int], calls_of: Any
) -> None:
    pair = make_pair(num_assistant_tokens=20, branching_factor=3, transition_rank=transition_rank)
    drafted = calls_of(GumihoDrafter, "draft")

    def lengths_of_rows(depths: Depths, num_tokens: int) -> list[list[int]]:
        """Returns what the cycles committed in each row, until it has `num_tokens` tokens."""
        ends = [list(itertools.accumulate(row)) for row in zip(*depths.accepted_lengths, strict=True)]
        return [sorted({min(end, num_tokens) for end in row}) for row in ends]

    with observing(longer := Depths()):
        equals_plain(*pair, drafted=lookup, lengths=lengths, max_new_tokens=40)
    num_bare = 0
    for max_new_tokens in range(2, 16):
        drafted.clear()
        with observing(depths := Depths()):
            equals_plain(*pair, drafted=lookup, lengths=lengths, max_new_tokens=max_new_tokens)
        # Cycles at the end of a text accept what they accept where it goes on.
        num_cycled = max_new_tokens - 1
        assert lengths_of_rows(depths, num_cycled) == lengths_of_rows(longer, num_cycled)
        missing = [max_new_tokens - 1] * len(lengths)
        for depth, accepted in zip(depths.depths, depths.accepted_lengths, strict=True):
            assert depth <= max(missing) - 1
            assert (depth == 0) == (max(missing) == 1)
            missing = [number - length for number, length in zip(missing, accepted, strict=True)]
        assert len(drafted) <= sum(depth > 0 for depth in depths.depths)
        num_bare += 0 in depths.depths
    assert num_bare > 2, "with one token missing no drafter runs"


@pytest.mark.parametrize("static", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
@pytest.mark.parametrize("lengths", [[13], [13, 4, 9]], ids=ROWS)
def test_the_drafter_reads_a_prompt_in_chunks(lengths: list[int], static: dict[str, Any], calls_of: Any) -> None:
    pair = make_pair("mistral", num_assistant_tokens=6)
    runs = calls_of(GumihoModel, "run_serial_head")
    arguments = {"drafted": static, **make_prompts(lengths), "max_new_tokens": 16}
    whole = equals_plain(*pair, **arguments)
    assert runs[0].args[1].shape[1] == 13
    for chunk_size in (5, 13, 20):
        runs.clear()
        output = equals_plain(*pair, **arguments, prefill_chunk_size=chunk_size)
        widths = [run.args[1].shape[1] for run in runs[:3]]
        assert widths == ([5, 5, 3] if chunk_size == 5 else [13, *widths[1:]])
        assert output.accepted_lengths == whole.accepted_lengths


def test_what_weights_give_is_made_once_and_freed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    keep = target_memory._Derived  # noqa: SLF001
    monkeypatch.setattr(target_memory, "_Derived", lambda *args: (made.append(""), keep(*args))[1])
    targets = [make_target()]
    drafter = make_drafter(targets[0], transition_rank=3, draft_vocabulary=[6, 1, 5, 2])
    settings = drafter.generation_config

    def count() -> int:
        """Returns how many sets of tensors a call makes."""
        made.clear()
        equals_plain(targets[0], drafter, max_new_tokens=6)
        return len(made)

    assert [count(), count()] == [3, 0], "vocabulary, cut head and transitions"
    with torch.inference_mode():
        assert count() == 0
    settings.draft_vocabulary = [6, 1, 5, 3]
    assert [count(), count()] == [3, 0]
    head, transition = targets[0].get_output_embeddings(), drafter.transition[0]
    with torch.no_grad():
        transition.up.mul_(1.5)
    assert [count(), count()] == [1, 0]
    head.weight.data.mul_(1.01)  # counts no version
    assert [count(), count()] == [2, 0], "cut head and transitions"
    entries = [entry for of_owner in target_memory.memory_of(head).derived.values() for entry in of_owner.values()]
    kept = [weakref.ref(tensor) for entry in entries for tensor in entry.tensors]
    assert len(kept) == 4
    del head, entries
    targets.clear()
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * 4, "freed with the target, also where the drafter lives on"
