"""Drafters of every kind in vLLM: their chains are those of transformers, and sampled texts the target's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_weights
from distributions import exact_probabilities, p_value
from hub_cache import write_to_hub_cache
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, PreTrainedModel, Qwen3Config
from vllm import SamplingParams
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm_engine import drafter_of, drafting_with, engine, metric, recorded_chains, runner_of, write_texts
from vllm_pairs import (
    FIELDS,
    UNSURE_FIELDS,
    make_gumiho,
    make_transitions_felt,
    transformers_chains,
    write_target,
)

from transformers_gumiho import GumihoModel
from transformers_gumiho.model import loading
from transformers_gumiho.vllm.heads import DraftingHead


PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 1, 2], [3, 3, 5, 1, 7, 2, 6]]


def vllm_chains(llm: Any) -> list[list[list[int]]]:
    """Returns, for each prompt, the chains that vLLM drafts for it, step by step."""
    texts = []
    for prompt in PROMPTS:
        with recorded_chains(llm) as steps:
            write_texts(llm, [prompt], 16)
        texts.append([chains[0] for chains in steps])
    return texts


def test_drafter_of_unusual_parts_for_a_target_that_is_no_llama(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", Qwen3Config(**FIELDS, vocab_size=64))
    parts = {"num_serial_tokens": 3, "num_parallel_heads": 2, "num_residual_blocks": 1, "gumiho_fc_bias": False}
    gumiho = make_gumiho(target, **parts, attention_bias=True, mlp_bias=True, num_hidden_layers=1)
    gumiho.generation_config.draft_vocabulary = [*range(40, 0, -2), 63]
    gumiho.save_pretrained(tmp_path / "gumiho", save_embedding=False)
    expected = transformers_chains(target, gumiho, PROMPTS, 5, 16)
    with engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 5), skip_tokenizer_init=True) as llm:
        found = vllm_chains(llm)
    for chains, theirs in zip(found, expected, strict=True):
        assert len(theirs) > 2
        # vLLM also drafts after the step that was the last.
        assert chains[: len(theirs)] == theirs
    assert {token for chains in found for chain in chains for token in chain} <= {*range(40, 0, -2), 63}


TRANSITIONS = {"transition_rank": 4}
# What is particular about a drafter, the method of vLLM that is for it, the tokens that it may draft, and how many it
# drafts.
KINDS: dict[str, tuple[dict[str, Any], str, list[int] | None, int]] = {
    "transitions": (TRANSITIONS, "eagle", None, 6),
    "transition of one head": (TRANSITIONS, "eagle", None, 3),
    "transitions among few tokens": (TRANSITIONS | {"num_serial_tokens": 1}, "eagle", [*range(60, 4, -1)], 6),
    "two layers and the last": ({"target_layer_ids": [0, 2]}, "eagle3", None, 6),
    "two lower layers": ({"target_layer_ids": [0, 1]} | TRANSITIONS, "eagle3", None, 6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_drafters_with_more_than_the_released_ones_have(kind: str, tmp_path: Path) -> None:
    parts, method, vocabulary, num_tokens = KINDS[kind]
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS | {"num_hidden_layers": 3}, vocab_size=64))
    gumiho = make_gumiho(target, **parts)
    make_transitions_felt(gumiho)
    gumiho.generation_config.draft_vocabulary = vocabulary
    gumiho.save_pretrained(tmp_path / "gumiho")
    expected = transformers_chains(target, gumiho, PROMPTS, num_tokens, 16)
    speculative_config = drafting_with(tmp_path / "gumiho", num_tokens, method=method)
    with engine(tmp_path / "target", speculative_config, skip_tokenizer_init=True) as llm:
        found = vllm_chains(llm)
    assert [chains[: len(theirs)] for chains, theirs in zip(found, expected, strict=True)] == expected
    # The part that is particular does something.
    for transition in gumiho.transition or ():
        transition.up.data.zero_()
    if gumiho.layer_fusion is not None:
        gumiho.layer_fusion.weight.data[:, :64] = 0
    assert transformers_chains(target, gumiho, PROMPTS, num_tokens, 16) != expected


SCALED = [
    GraniteConfig(**FIELDS, vocab_size=64, logits_scaling=0.25),
    Gemma2Config(
        **FIELDS | {"tie_word_embeddings": True}, vocab_size=64, final_logit_softcapping=0.5, query_pre_attn_scalar=32
    ),
]


@pytest.mark.parametrize("config", SCALED, ids=lambda config: config.model_type)
def test_tokens_are_drawn_by_logits_like_the_targets(config: Any, tmp_path: Path) -> None:
    gumiho = make_gumiho(write_target(tmp_path / "target", config))
    gumiho.save_pretrained(tmp_path / "gumiho")
    # The drafter's layers have to be of one kind of cache, where the target's are of two.
    settings = {"skip_tokenizer_init": True, "disable_hybrid_kv_cache_manager": True}
    with engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 3), **settings) as llm:
        drafter, states = drafter_of(llm).model, torch.randn(5, 64)
        logits = drafter.compute_logits(states)
        torch.testing.assert_close(logits, runner_of(llm).model.compute_logits(states))
        plain = drafter.logits_processor(drafter.lm_head, states)
    assert not torch.allclose(logits, plain, rtol=0.1)


@pytest.mark.parametrize(("layer_ids", "method"), [([0, 1], "eagle"), (None, "eagle3")])
def test_a_method_that_hands_on_other_states_is_refused(
    layer_ids: list[int] | None, method: str, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS, vocab_size=64))
    make_gumiho(target, target_layer_ids=layer_ids).save_pretrained(tmp_path / "gumiho")
    needed = {"eagle": "eagle3", "eagle3": "eagle"}[method]
    with (
        pytest.raises(ValueError, match=rf"`method` .* has to be '{needed}', got '{method}'"),
        engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 3, method=method), skip_tokenizer_init=True),
    ):
        pass


@pytest.mark.parametrize(
    ("parts", "dropped", "fields", "message"),
    [
        ({}, None, {"gumiho_fc_bias": False}, r"holds what its config has no place for: fc\.bias"),
        ({"target_layer_ids": [0, 1]}, "layer_fusion.weight", {}, r"lacks layer_fusion\.weight"),
    ],
    ids=["a bias too much", "no fusion"],
)
def test_a_checkpoint_of_another_config_is_refused(
    parts: dict[str, Any], dropped: str | None, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS, vocab_size=64))
    make_gumiho(target, **parts).save_pretrained(tmp_path / "gumiho")
    tensors = load_file(tmp_path / "gumiho" / "model.safetensors")
    tensors.pop(dropped, None)
    save_file(tensors, tmp_path / "gumiho" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "gumiho" / "config.json").read_text())
    (tmp_path / "gumiho" / "config.json").write_text(json.dumps(config | fields))
    method = "eagle3" if parts else "eagle"
    with (
        pytest.raises(ValueError, match=message),
        engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 3, method=method), skip_tokenizer_init=True),
    ):
        pass


def test_a_drafter_that_another_class_drafts_with_says_so(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS, vocab_size=64))
    make_gumiho(target).save_pretrained(tmp_path / "gumiho")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleProposer, "__new__", lambda cls, *args, **kwargs: object.__new__(cls))
        with (
            pytest.raises(RuntimeError, match="did not get its target"),
            engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 2), skip_tokenizer_init=True) as llm,
        ):
            write_texts(llm, PROMPTS, 4)


def test_a_vocabulary_of_a_packed_output_head_is_drafted_from_all_logits() -> None:
    """vLLM packs the weights of some heads for its products on a CPU, and leaves an empty one behind."""
    unquantized = type("UnquantizedLinearMethod", (), {})()
    head = SimpleNamespace(weight=torch.randn(5, 4), quant_method=unquantized, tp_size=1)
    assert DraftingHead(head, torch.tensor([3, 1])).is_cut
    head.weight = torch.empty(0)
    assert not DraftingHead(head, torch.tensor([3, 1])).is_cut


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, PreTrainedModel, GumihoModel]:
    """A tiny target, and a drafter for it as the released ones are: in a cache of the Hub, without a config."""
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS, vocab_size=64))
    gumiho = make_gumiho(target)
    packaged = tmp_path / "hub_configs" / "Gumiho-llama3-8b"
    gumiho.config.save_pretrained(packaged)
    gumiho.save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    renamed = {f"model.mlp.{name}" if name.startswith("mlp.") else f"model.{name}": t for name, t in tensors.items()}
    # The draft vocabulary in the layout of EAGLE: distances of the tokens from their places in it.
    token_ids = torch.arange(1, 64, 2)
    renamed["d2t"] = token_ids - torch.arange(len(token_ids))
    gumiho.generation_config.draft_vocabulary = token_ids.tolist()
    (tmp_path / "cache").mkdir()
    files = write_weights(tmp_path / "cache", renamed)
    monkeypatch.setattr(loading, "_FOLDERS", (packaged.parent,))
    return write_to_hub_cache(tmp_path / "cache", "amd/Gumiho-llama3-8b", files), target, gumiho


def test_released_drafter_without_a_config_by_its_name(
    released: tuple[Path, PreTrainedModel, GumihoModel], tmp_path: Path
) -> None:
    snapshot, target, gumiho = released
    expected = transformers_chains(target, gumiho, PROMPTS, 4, 16)
    # Of its five heads, a chain of four tokens uses two.
    with engine(tmp_path / "target", drafting_with(snapshot, 4), skip_tokenizer_init=True) as llm:
        found = vllm_chains(llm)
    for chains, theirs in zip(found, expected, strict=True):
        assert chains[: len(theirs)] == theirs


def expand_on_a_cpu(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """What vLLM's function of this kind should do; on a CPU without Triton, its result for floats is lost."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    expanded = x.repeat_interleave(counts.long(), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


@pytest.mark.parametrize(("method", "rank"), [("greedy", 0), ("probabilistic", 0), ("probabilistic", 4)])
def test_sampled_texts_have_the_distribution_of_the_target(
    method: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expand_on_a_cpu)
    target = write_target(tmp_path / "target", LlamaConfig(**UNSURE_FIELDS, vocab_size=4))
    gumiho = make_gumiho(target, transition_rank=rank, num_serial_tokens=1)
    if rank:
        make_transitions_felt(gumiho, std=10.0)
    # Of four tokens the first is the target's and the second the serial head's, so one head drafts below another.
    gumiho.save_pretrained(tmp_path / "gumiho")
    speculative_config = drafting_with(tmp_path / "gumiho", 4, draft_sample_method=method)
    settings = {"skip_tokenizer_init": True, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    prompt = torch.tensor([[1, 2, 3]])
    with engine(tmp_path / "target", speculative_config, **settings, kv_cache_memory_bytes=2**26) as llm:
        for temperature, top_p in ((0.7, 1.0), (1.0, 0.8)):
            sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=4, n=64, detokenize=False)
            texts: list[list[int]] = []
            for _ in range(24):
                (output,) = llm.generate([{"prompt_token_ids": prompt[0].tolist()}], sampling, use_tqdm=False)
                texts += [list(completion.token_ids) for completion in output.outputs]
            assert p_value(torch.tensor(texts), exact_probabilities(target, prompt, 4, temperature, top_p)) > 1e-4
        drafts, accepted = metric(llm, "spec_decode_num_drafts"), metric(llm, "spec_decode_num_accepted_tokens")
        # Both what is accepted and what is drawn instead is among the texts.
        assert 0.1 * drafts < accepted < 1.9 * drafts


def test_seeds_repeat_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", expand_on_a_cpu)
    target = write_target(tmp_path / "target", LlamaConfig(**UNSURE_FIELDS, vocab_size=64))
    make_gumiho(target).save_pretrained(tmp_path / "gumiho")
    with engine(tmp_path / "target", drafting_with(tmp_path / "gumiho", 4), skip_tokenizer_init=True) as llm:
        texts = [write_texts(llm, PROMPTS[:1], 12, temperature=1.0, seed=seed, detokenize=False) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
