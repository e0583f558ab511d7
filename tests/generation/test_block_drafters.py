"""Block drafters in every layout: their trees and chains are an independent implementation's, the text is plain's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from block import (
    VOCAB,
    BlockDrafter,
    deepspec,
    make_block_drafter,
    make_block_target,
    newer_zlab,
    specforge,
    speculators,
    write_block_drafter,
    zlab,
)
from draft_trees import Trees, paths_of
from safetensors.torch import load_file
from targets import equals_plain, make_prompts
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.generation.tree.draft_tree import DraftTree


NODES = 20
SLIDING = {"windows": (4, None), "causal": (True, False), "block_size": 6}
MARKOV = {"from_anchor": True, "markov_rank": 6, "confidence": True}

# What the drafter has, its config, and a prefix of its tensors.
LAYOUTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "zlab": ({}, zlab, ""),
    "zlab_of_a_model": ({}, zlab, "model."),
    "zlab_sliding": (SLIDING, newer_zlab, ""),
    "zlab_one_kind": ({"windows": (5, 5), "causal": (True, True)}, newer_zlab, ""),
    "zlab_sliding_both_ways": (SLIDING | {"causal": (False, False)}, lambda d: newer_zlab(d, is_causal=False), ""),
    "zlab_causal": ({"causal": (True, True)}, lambda d: newer_zlab(d, is_causal=True), ""),
    "vllm_causal": ({"causal": (True, True)}, lambda d: zlab(d, causal=True), ""),
    "modelopt": (
        {"windows": (3, 3)},
        lambda d: zlab(d, use_swa=True, swa_window_size=3) | {"layer_types": None, "sliding_window": None}, "",
    ),
    "windows_by_the_first_layer": (
        {"windows": (None, 4), "causal": (False, True)},
        lambda d: zlab(d) | {"layer_types": None, "max_window_layers": 1}, "",
    ),
    "jetspec": ({"causal": (True, True), "layers": (0, 2, 5)}, lambda d: zlab(d, causal_head=True), ""),
    "deepspec_dspark": (MARKOV | {"own_head": True, "own_embedding": True}, deepspec, ""),
    "deepspec_dflash": ({"from_anchor": True, "own_head": True, "own_embedding": True}, deepspec, ""),
    "specforge": (MARKOV | {"layers": (1, 2, 3, 4, 5)}, specforge, ""),
    "specforge_causal": (MARKOV | {"causal": (True, True)}, lambda d: specforge(d) | {"is_causal": True}, ""),
    "speculators_dflash": (
        {"draft_vocab_size": 20, "own_embedding": True},
        lambda d: speculators(d, architectures=["DFlashDraftModel"]), "",
    ),
    "speculators_says_fill_in": ({}, lambda d: speculators(d, sample_from_anchor=False), ""),
    "speculators_says_anchor": ({"from_anchor": True}, lambda d: speculators(d, sample_from_anchor=True), ""),
    "speculators_dspark": (
        MARKOV | {"draft_vocab_size": 20}, lambda d: speculators(d, "DSpark", sample_from_anchor=True), "",
    ),
    "speculators_dspark_by_its_drafts": (MARKOV | {"causal": (False,), "windows": (None,)},
                                         lambda d: speculators(d, "DSpark"), ""),
    "speculators_sliding": (SLIDING, speculators, ""),
    "speculators_sliding_both_ways": (
        SLIDING | {"causal": (False, False)}, lambda d: speculators(d, sliding_window_non_causal=True), "",
    ),
    "biases": ({"qkv_bias": True}, zlab, ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_block_target()


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    return make_prompts(lengths, 3, VOCAB)


def load(folder: Path, **settings: Any) -> GumihoModel:
    """Loads a drafter that never pauses, with trees whose scores are not sharpened."""
    drafter = GumihoModel.from_pretrained(folder, dtype=torch.float64).eval()
    given = {"num_assistant_tokens": NODES, "draft_temperature": 1.0, "break_even": 0.01}
    drafter.generation_config.update(**given | settings)
    return drafter


def make(folder: Path, layout: str, **settings: Any) -> tuple[BlockDrafter, GumihoModel]:
    parts, as_config, prefix = LAYOUTS[layout]
    head = make_block_drafter(**parts)
    return head, load(write_block_drafter(folder, head, as_config(head), prefix), **settings)


def assert_tree_is_the_oracles(
    head: BlockDrafter, tree: DraftTree, row: int, context: torch.Tensor, root: int, num_missing: int
) -> None:
    """Compares the paths of a tree under the newest token, and their scores."""
    expected = head.tree(context, root, NODES)
    # The target chooses the last token itself, so the last trees lack their deepest nodes.
    expected = {path: score for path, score in expected.items() if len(path) < num_missing}
    found = dict(zip(paths_of(tree, row), tree.scores[row, 1:].tolist(), strict=True))
    found = {path: score for path, score in found.items() if len(path) < num_missing}
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-4)


def assert_drafts_as(
    head: BlockDrafter, drafter: GumihoModel, target: PreTrainedModel, num_new: int = 12, **call: Any
) -> None:
    """Compares the trees of all cycles of all rows, and the text with plain decoding's."""
    with observing(seen := Trees()):
        output = equals_plain(target, drafter, **call, max_new_tokens=num_new)
    head.bind(target)
    mask = call.get("attention_mask", torch.ones_like(call["input_ids"]))
    width = mask.shape[1]
    for row, text in enumerate(output.sequences):
        padding = width - int(mask[row].sum())
        context = head.context(target, text[padding:])
        end = width
        for tree, num_accepted in zip(seen.trees, output.accepted_lengths[row], strict=False):
            num_missing = width + num_new - end - 1
            assert_tree_is_the_oracles(head, tree, row, context[: end - padding], int(text[end]), num_missing)
            end += num_accepted
    assert len(seen.trees) >= num_new / 6


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_trees_of_a_layout_are_the_oracles(layout: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head, drafter = make(tmp_path / "head", layout)
    assert drafter.config.max_draft_depth == head.depth
    assert_drafts_as(head, drafter, target, **prompts(7))
    # What is saved keeps the published names, and says all that was read.
    drafter.save_pretrained(tmp_path / "saved")
    dropped = {"t2d", "confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == head.weights.keys() - dropped
    saved = load(tmp_path / "saved")
    assert saved.config.converted_from == str(tmp_path / "head")
    assert_drafts_as(head, saved, target, num_new=3, **prompts(7))


CALLS: dict[str, dict[str, Any]] = {
    "batch": prompts(9, 4, 6),
    "static": prompts(6) | {"cache_implementation": "static"},
    "static_batch": prompts(8, 5) | {"cache_implementation": "static"},
    "prefill_in_chunks": prompts(11) | {"prefill_chunk_size": 4},
}
KINDS = ("zlab_sliding", "deepspec_dspark", "speculators_dspark")


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("layout", KINDS)
def test_trees_of_a_call_are_the_oracles(layout: str, call: str, target: PreTrainedModel, tmp_path: Path) -> None:
    assert_drafts_as(*make(tmp_path, layout), target, **CALLS[call])


@pytest.mark.parametrize("layout", KINDS)
def test_a_chain_is_the_most_likely_path(layout: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head, drafter = make(tmp_path, layout, branching_factor=1, num_assistant_tokens=8)
    with observing(seen := Trees()):
        output = equals_plain(target, drafter, **prompts(7), max_new_tokens=16)
    text, end = output.sequences[0], 7
    context = head.bind(target).context(target, text)
    for tree, num_accepted in zip(seen.trees, output.accepted_lengths[0], strict=True):
        chain = head.chain(context[:end], int(text[end]))
        assert tuple(tree.tokens[0, 1:].tolist()) == chain[: len(text) - end - 2]
        end += num_accepted


@pytest.mark.parametrize("layout", ["zlab_sliding", "deepspec_dspark"])
def test_the_depth_of_the_tree_cuts_the_block(layout: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head, drafter = make(tmp_path, layout, tree_depth=2)
    head.block_size -= head.depth - 2
    assert_drafts_as(head, drafter, target, **prompts(7))
