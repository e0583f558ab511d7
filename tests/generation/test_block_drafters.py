"""Block drafters in every layout: their trees and chains are an independent implementation's, the text is plain's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from block import (
    HIDDEN,
    LAYERS_OF_TARGET,
    MASK,
    VOCAB,
    BlockDrafter,
    deepspec,
    make_block_drafter,
    make_block_model,
    make_block_target,
    newer_zlab,
    specforge,
    speculators,
    write_block_drafter,
    zlab,
)
from chains import CHAIN_FAMILIES, RECURRENT_FAMILIES, make_chain_target
from draft_trees import Trees, paths_of
from safetensors.torch import load_file
from targets import equals_plain, make_prompts, make_target
from transformers import PreTrainedModel, cache_utils

from transformers_gumiho import DraftingSettings, GumihoModel
from transformers_gumiho.generation.drafting.candidate_generator import estimate_break_even
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.internals import CACHE_NAME, compile_on_every_device


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


@pytest.mark.parametrize("layout", KINDS)
def test_a_draft_vocabulary_cuts_head_and_pairs(layout: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head, drafter = make(tmp_path, layout)
    own = list(range(VOCAB)) if head.token_ids is None else head.token_ids.tolist()
    rows = torch.arange(0, len(own), 2).flip(0)
    drafter.generation_config.draft_vocabulary = [own[row] for row in rows]
    # The same as a head that scores these tokens alone.
    cut = copy.copy(head)
    cut.token_ids = torch.tensor(own)[rows]
    cut.weights = dict(head.weights) | {
        "lm_head.weight": head.weights.get("lm_head.weight", target.lm_head.weight)[rows]
    }
    if head.has_markov_head:
        cut.weights["markov_head.markov_w2.weight"] = head.weights["markov_head.markov_w2.weight"][rows]
    assert_drafts_as(cut, drafter, target, **prompts(7))


TEXTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # A call, arguments of the drafted one alone, and settings.
    "sampled": (prompts(6) | {"do_sample": True, "temperature": 0.8, "top_k": 20}, {}, {}),
    "sampled_batch": (prompts(7, 4) | {"do_sample": True, "num_return_sequences": 2}, {}, {}),
    "prompt_lookup": (prompts(6, 9), {"prompt_lookup_num_tokens": 4}, {}),
    "with_pauses": (prompts(6, 4), {}, {"break_even": 9.0}),
    "static_with_pauses": (prompts(6, 4) | {"cache_implementation": "static"}, {}, {"break_even": 9.0}),
    "compiled": (
        prompts(6, 4),
        {"compile_config": compile_on_every_device(backend="eager"), "cache_implementation": "static"}, {},
    ),
    "nodes_of_each_depth": (prompts(6), {}, {"full_tree_attention": False, "branching_factor": 3}),
    "sharp_scores": (prompts(6), {}, {"draft_temperature": [0.3, 0.5], "num_assistant_tokens": 63}),
}  # fmt: skip


@pytest.mark.parametrize("call", list(TEXTS))
@pytest.mark.parametrize("layout", ["zlab_sliding", "speculators_dspark"])
def test_text_is_plain_decodings(layout: str, call: str, target: PreTrainedModel, tmp_path: Path) -> None:
    arguments, drafted, settings = TEXTS[call]
    _, drafter = make(tmp_path, layout, **settings)
    output = equals_plain(target, drafter, drafted=drafted, **arguments, max_new_tokens=24)
    assert max(output.tree_sizes) > 2


def test_the_layers_states_of_a_prompt_are_read_pass_by_pass(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, drafter = make(tmp_path, "deepspec_dspark")
    call = prompts(14, 9) | {"prefill_chunk_size": 4, "max_new_tokens": 12}
    with observing(Trees()):  # an observer gets the states of all layers, which are held for it
        expected = equals_plain(target, drafter, **call)
    widths, read_target = [], drafter.serial_head.read_target
    monkeypatch.setattr(
        type(drafter.serial_head),
        "read_target",
        lambda self, model, states: widths.append(states.shape[1]) or read_target(model, states),
    )
    found = equals_plain(target, drafter, **call)
    assert widths[:4] == [4, 4, 4, 2]
    assert max(widths) <= drafter.config.max_draft_depth + 1
    assert found.accepted_lengths == expected.accepted_lengths


class MuseHead(BlockDrafter):
    """Transformers' own DFlash head, which knows no vocabulary, computes what is drafted."""

    def context(self, target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        outputs = target.model(ids[None], output_hidden_states=True).hidden_states[1:]
        return torch.cat([outputs[number][0] for number in self.layers], dim=-1)

    def block_logits(self, context: torch.Tensor, root: int, depth: int | None = None) -> torch.Tensor:
        cache = cache_utils.DFlashCache(config=self.theirs.config)
        cache.set_previous_accepted_tokens(len(context))
        block = self.embedding[torch.tensor([root] + [MASK] * self.depth)]
        states = self.theirs(block[None], context[None], **{CACHE_NAME: cache}).last_hidden_state
        return self.output_head.matmul(states[0, 1:].T).T


def test_transformers_own_head_for_muse_drafts_the_same(target: PreTrainedModel, tmp_path: Path) -> None:
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")  # since transformers 5.24
    torch.manual_seed(0)
    config = muse.MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, block_size=5, mask_token_id=MASK, target_layer_ids=[1, 3, 5], sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    theirs = muse.MuseGlimmerAssistantModel(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    theirs.save_pretrained(tmp_path)
    head = MuseHead({}, 5, False, (False, False), (5, None))
    head.theirs = theirs
    assert_drafts_as(head, load(tmp_path), target, **prompts(7))


@pytest.mark.parametrize("family", ["gpt_oss", "mistral", "gpt2"])
def test_trees_for_other_targets(family: str) -> None:
    target = make_target(family, num_layers=3)
    drafter = make_block_model(target)
    output = equals_plain(target, drafter, lengths=[7, 4], max_new_tokens=20)
    assert max(output.tree_sizes) == 12


@pytest.mark.parametrize(("family", "num_nodes"), [("qwen3_next", 12), ("bloom", 4)])
def test_trees_for_hybrids_and_chains_for_others(family: str, num_nodes: int) -> None:
    assert family in RECURRENT_FAMILIES | CHAIN_FAMILIES
    target = make_chain_target(family)
    output = equals_plain(target, make_block_model(target), lengths=[7], max_new_tokens=20)
    assert max(output.tree_sizes) == num_nodes


def test_weights_that_equal_the_targets_are_held_once(target: PreTrainedModel, tmp_path: Path) -> None:
    head = make_block_drafter(**LAYOUTS["deepspec_dspark"][0])
    embedding, output_head = target.get_input_embeddings().weight, target.lm_head.weight
    head.weights |= {"embed_tokens.weight": embedding.detach(), "lm_head.weight": output_head.detach()}
    drafter = load(write_block_drafter(tmp_path / "equal", head, deepspec(head)))
    assert drafter.share_embedding(target)
    assert drafter.lm_head.weight.data_ptr() == output_head.data_ptr()
    assert drafter.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert_drafts_as(head, drafter, target, num_new=6, **prompts(7))
    _, own = make(tmp_path / "own", "deepspec_dspark")
    before = own.lm_head.weight.clone()
    assert not own.share_embedding(target)
    assert own.lm_head.weight.data_ptr() != output_head.data_ptr()
    assert torch.equal(own.lm_head.weight, before)


def test_break_even_counts_one_pass(target: PreTrainedModel, tmp_path: Path) -> None:
    of_target = sum(p.numel() for n, p in target.named_parameters() if "embed_tokens" not in n)
    for layout, rows, rank in (("zlab", VOCAB, 0), ("speculators_dspark", 20, 6)):
        _, drafter = make(tmp_path / layout, layout)
        settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)
        size = {name: sum(p.numel() for p in getattr(drafter, name).parameters()) for name in ("layers", "fc")}
        expected = size["layers"] + size["fc"] + rows * (HIDDEN + rank)
        found = estimate_break_even(target, drafter, settings, num_rows=1)
        assert found == pytest.approx(1 + expected / of_target + NODES / 50)


def test_defaults_are_those_of_drafters_with_parallel_heads(target: PreTrainedModel, tmp_path: Path) -> None:
    _, drafter = make(tmp_path, "zlab_sliding")
    drafter.generation_config.update(num_assistant_tokens=None)
    for device, nodes, branching in (("cpu", 12, 4), ("cuda", 63, 14)):
        settings = DraftingSettings.from_generation_config(
            drafter.generation_config, drafter.config, None, device_type=device
        )
        found = settings.num_assistant_tokens, settings.branching_factor, settings.tree_depth
        assert found == (nodes, branching, 5)
    drafter.generation_config.update(tree_depth=6)
    with pytest.raises(ValueError, match="`tree_depth` is 6, but this drafter drafts at most 5 tokens: those of its"):
        target.generate(**prompts(6), assistant_model=drafter)


def test_pairs_of_which_tools_disagree_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    def refuses(message: str, target: PreTrainedModel, drafter: GumihoModel) -> None:
        with pytest.raises(ValueError, match=message):
            target.generate(**prompts(6), assistant_model=drafter, max_new_tokens=4)

    last = make_block_drafter(layers=(1, LAYERS_OF_TARGET - 1))
    drafter = load(write_block_drafter(tmp_path / "last", last, zlab(last)))
    refuses(
        r"reads the last layer of LlamaForCausalLM \(6\)\. Some tools train on .* before the final norm",
        target,
        drafter,
    )
    beyond = make_block_drafter(layers=(1, LAYERS_OF_TARGET))
    drafter = load(write_block_drafter(tmp_path / "beyond", beyond, zlab(beyond)))
    refuses(r"reads the layers \[1, 7\] .* has 7, 0 to 6", target, drafter)
    scaled = make_target("gemma3", num_layers=3)
    refuses("scales its token embedding", scaled, make_block_model(scaled))
    small = make_block_drafter(layers=(1, 2))
    drafter = load(write_block_drafter(tmp_path / "small", small, zlab(small, target_layer_ids=[1, 2, 3, 5])))
    refuses("has a hidden size of 16, but LlamaForCausalLM has one of 32", target, drafter)
