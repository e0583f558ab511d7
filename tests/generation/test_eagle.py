"""EAGLE heads in `generate()`: their trees are an independent implementation's, and everything else stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refuse
from draft_trees import Trees, paths_of
from eagle import HIDDEN, VOCAB, EagleHead, llama_fields, make_eagle_target, make_head, write_head
from targets import equals_plain, make_prompts
from trained_pair import load_language_model, load_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, pipeline

from transformers_gumiho import DraftingSettings, GumihoModel
from transformers_gumiho.generation.drafting.candidate_generator import estimate_break_even
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.internals import compile_on_every_device


KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"is_eagle3": False, "fc_bias": True, "own_embedding": True},
    "eagle3": {"is_eagle3": True, "draft_vocab_size": 24},
    "eagle3.1": {"is_eagle3": True, "draft_vocab_size": 24, "flags": ("fc_norm", "norm_output"), "num_layers": 2},
}
TREES = {"num_assistant_tokens": 14, "branching_factor": 3, "tree_depth": 4, "draft_temperature": 1.0}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_eagle_target()


def write(folder: Path, head: EagleHead) -> Path:
    fields = llama_fields(head)
    if head.is_eagle3:
        fields |= {"draft_vocab_size": 24} | dict.fromkeys(head.flags, True)
    return write_head(folder, head, fields)


def make(folder: Path, kind: str = "eagle3", **settings: Any) -> tuple[EagleHead, GumihoModel]:
    """Returns a head, and the drafter that it is loaded as. It never pauses."""
    head = make_head(**KINDS[kind])
    drafter = GumihoModel.from_pretrained(write(folder, head), dtype=torch.float64).eval()
    drafter.generation_config.update(break_even=0.01, **TREES | settings)
    return head, drafter


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    return make_prompts(lengths, 3, VOCAB)


@pytest.mark.parametrize("full_tree_attention", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_tree_of_a_text_is_the_oracles(
    kind: str, full_tree_attention: bool, target: PreTrainedModel, tmp_path: Path
) -> None:
    head, drafter = make(tmp_path, kind, full_tree_attention=full_tree_attention)
    with observing(seen := Trees()):
        output = equals_plain(target, drafter, **prompts(7), max_new_tokens=24)
    text = output.sequences[0]
    end = 7
    with torch.no_grad():
        states = head.bind(target).states(target, text)
        for tree, num_accepted in zip(seen.trees, output.accepted_lengths[0], strict=True):
            paths = head.tree(text[1 : end + 1], states[:end], top_k=3, depth=4, num_nodes=14)
            # The target chooses the last token itself, so the last trees lack their deepest nodes.
            assert set(paths_of(tree, 0)) == {path for path in paths if len(path) <= len(text) - end - 2}
            end += num_accepted
    assert len(seen.trees) > 10


CALLS: dict[str, dict[str, Any]] = {
    "batch": prompts(7, 3, 5),
    "sampled": prompts(6) | {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "sampled_batch": prompts(7, 4) | {"do_sample": True},
    "static": prompts(6) | {"cache_implementation": "static"},
    "prompt_lookup": prompts(6, 9) | {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_text_is_plain_decodings(kind: str, call: str, target: PreTrainedModel, tmp_path: Path) -> None:
    arguments = dict(CALLS[call])
    extra = {name: arguments.pop(name) for name in ("prompt_lookup_num_tokens",) if name in arguments}
    _, drafter = make(tmp_path, kind, num_assistant_tokens=40, branching_factor=8)
    output = equals_plain(target, drafter, drafted=extra, **arguments)
    assert len(output.accepted_lengths) == len(arguments["input_ids"])


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_compiled_cycles(kind: str, target: PreTrainedModel, tmp_path: Path) -> None:
    _, drafter = make(tmp_path, kind)
    _, expected = make(tmp_path, kind)
    call = prompts(6, 4) | {"cache_implementation": "static", "max_new_tokens": 16}
    compiled = {"compile_config": compile_on_every_device(backend="eager"), "cache_implementation": "static"}
    found = equals_plain(target, drafter, drafted=compiled, **prompts(6, 4), max_new_tokens=16)
    assert found.accepted_lengths == equals_plain(target, expected, **call).accepted_lengths


def test_tokens_of_the_output_head_belong_to_the_weights(target: PreTrainedModel, tmp_path: Path) -> None:
    head, drafter = make(tmp_path)
    own = set(head.token_ids.tolist())

    def drafted() -> list[Any]:
        with observing(seen := Trees()):
            equals_plain(target, drafter, **prompts(6), max_new_tokens=16)
        return [tree.tokens.tolist() for tree in seen.trees]

    before = drafted()
    assert {token for tree in before for token in tree[0][1:]} <= own
    # Settings that know nothing of the tokens, as `gumiho tune` may write them.
    drafter.generation_config = GenerationConfig(break_even=0.01, **TREES)
    assert drafted() == before
    subset = sorted(own)[::-2]
    drafter.generation_config = GenerationConfig(break_even=0.01, draft_vocabulary=subset, **TREES)
    assert {token for tree in drafted() for token in tree[0][1:]} <= set(subset)
    drafter.generation_config.draft_vocabulary = sorted(own)
    assert drafted() == before
    missing = next(token for token in range(VOCAB) if token not in own)
    drafter.generation_config.draft_vocabulary = [*subset, missing]
    with pytest.raises(
        ValueError, match=rf"has 1 tokens that the drafter's own output head .* such as {missing}\. It"
    ):
        drafted()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_head_that_another_class_has_loaded_is_named_at_the_first_call(
    kind: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    """`AutoModelForCausalLM` makes a language model of it, with an embedding of random numbers where it has none."""
    folder = write(tmp_path / "head", make_head(**KINDS[kind]))
    misread = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, ignore_mismatched_sizes=True)
    message = rf"LlamaForCausalLM from the files of the drafter {str(folder)!r}.* `GumihoModel.from_pretrained`"
    with pytest.raises(ValueError, match=message):
        target.generate(**prompts(6), assistant_model=misread, max_new_tokens=4)
    as_target = ["--target", folder, "--assistant", folder, "--prompt", "a"]
    refuse(f"{str(folder)!r} is a drafter, not a target", "show", *as_target)
    # Other assistants are transformers' affair.
    target.save_pretrained(tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert target.generate(**prompts(6), assistant_model=small, max_new_tokens=4).shape == (1, 10)


def test_a_saved_head_is_the_assistant_of_a_pipeline(tmp_path: Path) -> None:
    target, tokenizer = load_language_model(), load_tokenizer()
    fields = {"serial_head": "eagle3", "num_hidden_layers": 1, "num_parallel_heads": 0, "num_serial_tokens": 8}
    drafter = GumihoModel.from_target(target, target_layer_ids=[0, 1], **fields)
    drafter.tokenizer = tokenizer
    drafter.save_pretrained(tmp_path, save_embedding=False)
    loaded = {"model": target, "tokenizer": tokenizer}
    plain, assisted = (
        pipeline("text-generation", **loaded, **extra)("import os", max_new_tokens=16, do_sample=False)
        for extra in ({}, {"assistant_model": str(tmp_path)})
    )
    assert assisted == plain


def test_break_even_counts_the_own_head_and_the_passes(target: PreTrainedModel, tmp_path: Path) -> None:
    layers = sum(p.numel() for n, p in target.named_parameters() if "embed_tokens" not in n)
    for kind, num_fusions, rows in (("eagle1", 4, VOCAB), ("eagle3", 1, 24)):
        _, drafter = make(tmp_path / kind, kind)
        settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)
        size = {name: sum(p.numel() for p in getattr(drafter, name).parameters()) for name in ("layers", "fc")}
        expected = 4 * (size["layers"] + rows * HIDDEN) + num_fusions * size["fc"]
        found = estimate_break_even(target, drafter, settings, num_rows=1)
        assert found == pytest.approx(1 + expected / layers + 14 / 50)
