"""`prompt_lookup_num_tokens` with a Gumiho assistant: the same texts, in fewer passes where they repeat themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chains import make_chain_drafter, make_chain_target
from draft_trees import Trees
from targets import equals_plain, make_drafter, make_pair, make_prompts, make_target
from torch._dynamo.utils import counters

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.drafting.context_drafts import ContextDrafts
from transformers_gumiho.generation.drafting.drafter import GumihoDrafter
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.internals import compile_on_every_device


LOOKUP = {"prompt_lookup_num_tokens": 12, "max_matching_ngram_size": 3}
STATIC = {"cache_implementation": "static", "disable_compile": True}


def keep_going(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A criterion that the caller wrote. With one, all rows advance in step."""
    return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("family", "branching_factor", "shapes"),
    [("llama", 1, {}), ("llama", 3, STATIC), ("gemma3", 1, STATIC), ("gemma3", 3, {})],
)
def test_texts_are_those_of_plain_decoding(family: str, branching_factor: int, shapes: dict[str, Any]) -> None:
    target = make_target(family, seed=3, num_layers=3)
    drafter = make_drafter(target, num_assistant_tokens=9, branching_factor=branching_factor)
    num_cycles = {"alone": 0, "with context": 0}
    for lengths, criteria in (([9], []), ([9, 4, 1], []), ([9, 4, 1], [keep_going])):
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
            arguments = {**make_prompts(lengths), "stopping_criteria": criteria, **sampling}
            for name, options in (("alone", shapes), ("with context", shapes | LOOKUP)):
                drafted = equals_plain(target, drafter, drafted=options, **arguments)
                num_cycles[name] += sum(map(len, drafted.accepted_lengths))
    assert num_cycles["with context"] < 0.9 * num_cycles["alone"], "random targets repeat themselves"


def test_trees_reach_deeper_than_the_drafter_and_hold_no_token_twice() -> None:
    target, drafter = make_pair("llama", seed=3, num_layers=3, num_assistant_tokens=9, branching_factor=3)
    with observing(trees := Trees()):
        output = equals_plain(target, drafter, drafted=LOOKUP, lengths=[9, 4, 1])
    half = trees.trees[: len(trees.trees) // 2]
    assert {tree.tokens.shape for tree in half} == {(3, 10)}, "as many nodes as without"
    for tree in trees.trees:
        num_nodes = tree.tokens.shape[1]
        assert num_nodes <= 10, "trees lack what is too deep for a row that ends soon"
        for row in range(3):
            pairs = set(zip(tree.parents[row, 1:].tolist(), tree.tokens[row, 1:].tolist(), strict=True))
            assert len(pairs) == num_nodes - 1
    longest = drafter.config.max_draft_depth + 1
    assert max(map(max, output.accepted_lengths)) > longest, "more than the drafter drafts, and the bonus token"


def test_context_is_looked_up_before_the_drafter_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU reading the text would wait for all that was launched before."""
    calls: list[str] = []
    for kind in (ContextDrafts, GumihoDrafter):

        def draft(self: Any, *args: Any, name: str = kind.__name__, plain: Any = kind.draft) -> Any:
            calls.append(name)
            return plain(self, *args)

        monkeypatch.setattr(kind, "draft", draft)
    target = make_target("llama", seed=3, num_layers=3)
    target.generate(
        **make_prompts([9, 4]), max_new_tokens=20, do_sample=False, assistant_model=make_drafter(target), **LOOKUP
    )
    assert len(calls) > 2
    assert calls == ["ContextDrafts", "GumihoDrafter"] * (len(calls) // 2)


@pytest.mark.usefixtures("_forget_compiled")
def test_compiled_cycles_take_drafts_from_the_context() -> None:
    target = make_target("llama", seed=3, num_layers=1)
    drafter = make_drafter(target, num_assistant_tokens=9, branching_factor=3, num_layers=1)
    config = compile_on_every_device(backend="eager", mode="default", fullgraph=True)
    static = {"cache_implementation": "static", "compile_config": config, **LOOKUP}
    for seed in range(2):
        equals_plain(target, drafter, drafted=static, **make_prompts([9 - seed], seed), max_new_tokens=30)
        assert counters["stats"]["unique_graphs"] == 4, "masks, target, walk, draft"


@pytest.mark.parametrize("family", ["zaya", "bloom"])
@pytest.mark.parametrize("lengths", [[5], [4, 17, 9]])
def test_chains_of_targets_that_verify_no_tree(family: str, lengths: list[int]) -> None:
    target = make_chain_target(family)
    equals_plain(target, make_chain_drafter(target), drafted=LOOKUP, lengths=lengths, max_new_tokens=32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_lookup_num_tokens": -1}, "`prompt_lookup_num_tokens` must be an integer of at least 0, got -1"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1}, "`max_matching_ngram_size` must .* got -1"),
    ],
)
def test_what_is_no_number_of_tokens_is_refused(settings: dict[str, int], message: str) -> None:
    target = make_target()
    arguments = {**make_prompts([3]), "assistant_model": (drafter := make_drafter(target)), "max_new_tokens": 4}
    with pytest.raises(ValueError, match=message):
        target.generate(**arguments, **settings)
    drafter.generation_config.update(**settings)
    with pytest.raises(ValueError, match=message):
        target.generate(**arguments)


def test_a_drafter_looks_up_by_its_own_settings_unless_a_call_says_otherwise(tmp_path: Path) -> None:
    target, drafter = make_pair("llama", seed=3, num_layers=3, num_assistant_tokens=9, branching_factor=3)
    arguments = {**make_prompts([9]), "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}

    def accepted(drafter: GumihoModel, **options: int) -> list[list[int]]:
        return target.generate(**arguments, assistant_model=drafter, **options).accepted_lengths

    alone, looking_up = accepted(drafter), accepted(drafter, **LOOKUP)
    assert len(looking_up[0]) < len(alone[0])
    drafter.generation_config.update(**LOOKUP)
    drafter.save_pretrained(tmp_path)
    loaded = GumihoModel.from_pretrained(tmp_path)
    assert accepted(loaded) == looking_up
    assert accepted(loaded, prompt_lookup_num_tokens=0) == alone
    # A call may say one of the two alone.
    longer = accepted(loaded, max_matching_ngram_size=5)
    assert longer != looking_up
    assert longer == accepted(loaded, **LOOKUP | {"max_matching_ngram_size": 5})
