"""Tiny random targets with states, or that verify chains; and drafts for them that are accepted in part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import partly_right_drafts as drafts
import torch
from targets import LARGE_TREES, make_prompts
from tiny_configs import VOCAB_SIZE, small_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from transformers_gumiho import GumihoModel


# Fewer layers than these configs have otherwise, each kind of them all the same.
_OF_THREE = partial(small_config, num_hidden_layers=3)
_LINEAR = partial(_OF_THREE, layer_types=["linear_attention", "full_attention", "linear_attention"])

# Families whose states hold a tree: delta rules, with a decay for each head or channel, Mamba-2, short convolutions.
RECURRENT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": partial(_LINEAR, "qwen3_next", num_experts=0, mlp_only_layers=[0, 1, 2]),
    "qwen3_5": partial(_LINEAR, "qwen3_5_text"),
    "qwen3_5_moe": partial(_LINEAR, "qwen3_5_moe_text"),
    "olmo_hybrid": partial(_LINEAR, "olmo_hybrid"),
    "lara_mini": partial(small_config, "lara_mini"),
    "kimi_linear": partial(small_config, "kimi_linear"),
    "bailing_hybrid": partial(small_config, "bailing_hybrid"),
    "granite_hybrid": partial(
        _OF_THREE, "granitemoehybrid", layer_types=["mamba", "attention", "mamba"], num_local_experts=0
    ),
    "bamba": partial(_OF_THREE, "bamba", attn_layer_indices=[1]),
    "falcon_h1": partial(_OF_THREE, "falcon_h1"),
    "nemotron_h": partial(small_config, "nemotron_h", layers_block_type=["mamba", "attention", "mamba"]),
    "zamba2": partial(small_config, "zamba2"),
    "mamba2": partial(small_config, "mamba2", num_hidden_layers=2),
    "lfm2": partial(_OF_THREE, "lfm2", layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": partial(small_config, "lfm2_moe"),
    "lfm3": partial(small_config, "lfm3", layer_types=["conv", "full_attention", "conv", "sliding_attention"]),
}  # fmt: skip

CHAIN_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "zaya": partial(small_config, "zaya"),
    "bloom": partial(small_config, "bloom", n_layer=3),
    "mpt": partial(small_config, "mpt", n_layers=3),
    "falcon_alibi": partial(_OF_THREE, "falcon", alibi=True, num_kv_heads=4, ffn_hidden_size=128),
    "gpt_neo": partial(
        small_config, "gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]],
        attention_layers=["global", "local"],
    ),
    "llama4": partial(
        _OF_THREE, "llama4_text", layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        num_local_experts=2, num_experts_per_tok=1,
    ),
    # Without chunks, and layers without a rotary embedding scale their attention by the length of the cache.
    "llama4_unchunked": partial(
        _OF_THREE, "llama4_text", attention_chunk_size=None, layer_types=3 * ["full_attention"],
        no_rope_layers=[1, 0, 1], floor_scale=5, attn_scale=0.8, num_local_experts=2, num_experts_per_tok=1,
    ),
    # The keys that each token attends to are chosen by an index.
    "glm_moe_dsa": partial(
        _OF_THREE, "glm_moe_dsa", layer_types=3 * ["indexed_attention"], mlp_layer_types=3 * ["dense"]
    ),
}  # fmt: skip


# Families whose pass over several tokens is not, in transformers, that over one after the other.
INEXACT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    # The pass over several tokens begins with an empty state.
    "jamba": partial(_OF_THREE, "jamba", num_experts=1, num_experts_per_tok=1),
    "mamba": partial(small_config, "mamba", num_hidden_layers=2),
    # The experts of a token depend on the other tokens of its pass.
    "doge_moe": partial(small_config, "doge", is_moe=True, num_experts=16),
}

if "dory" in CONFIG_MAPPING:  # since 5.24
    # Tokens of one pass see what an earlier loop computes for each other, and those behind it what the last one did.
    INEXACT_FAMILIES["dory"] = partial(small_config, "dory", recurrent_kv_cache_mode="last_loop")

# Families that are exact where nothing is padded.
PARTLY_EXACT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    # Windows, and what lies behind them compressed: two tokens to one, or four.
    "deepseek_v4": partial(small_config, "deepseek_v4"),
    # Each token attends to blocks of four keys, which an index of its own in the cache chooses.
    "minimax_m3": partial(small_config, "minimax_m3_vl_text"),
}


def make_chain_target(family: str, seed: int = 0) -> PreTrainedModel:
    """Returns a tiny random target, in float64 where its code knows that and does not turn padding into NaN."""
    torch.manual_seed(seed)
    config = (RECURRENT_FAMILIES | CHAIN_FAMILIES | INEXACT_FAMILIES | PARTLY_EXACT_FAMILIES)[family]()
    # The eager experts are the ones that know float64.
    target = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    if family == "glm_moe_dsa":
        # Of the padding token's embedding, which is zero, an index makes ties, which chance decides.
        torch.nn.init.normal_(target.get_input_embeddings().weight.data[0], std=0.4)
    if family not in ("bloom", "mpt", "deepseek_v4"):
        target = target.double()
    target.generation_config.use_cache = True
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target


# Within it chains are drafted of the target's own tokens, of which about one in twelve is made wrong.
partly_right_drafts = partial(drafts.partly_right_drafts, vocab_size=VOCAB_SIZE)


def make_chain_drafter(target: PreTrainedModel, **settings: object) -> GumihoModel:
    """Returns a random drafter."""
    torch.manual_seed(0)
    drafter = GumihoModel.from_target(
        target, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48
    ).eval()
    for name, value in (LARGE_TREES | settings).items():
        setattr(drafter.generation_config, name, value)
    return drafter


def both(
    target: PreTrainedModel, lengths: list[int], drafter: GumihoModel | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Asserts that drafts that are right in part leave the text as it is; returns what plain and drafted calls do."""
    settings = {**make_prompts(lengths), "max_new_tokens": 36, "return_dict_in_generate": True} | settings
    drafter = drafter or make_chain_drafter(target)
    torch.manual_seed(1)
    plain = target.generate(**settings)
    torch.manual_seed(1)
    with partly_right_drafts(plain.sequences, max(lengths)):
        drafted = target.generate(**settings, assistant_model=drafter)
    assert torch.equal(drafted.sequences, plain.sequences)
    return plain, drafted


def draft_rate(accepted_lengths: list[list[int]]) -> float:
    """Returns which share of the drafted tokens was accepted, for drafts of 7 tokens."""
    # The last cycle of a row may end early, and an ended row takes part in no more.
    counts = [number - 1 for row in accepted_lengths for number in row[:-1] if number]
    return sum(counts) / len(counts) / 7


def assert_same_cache(drafted: Any, plain: Any) -> None:
    """Compares the keys, values, indices and states that two caches hold."""

    def tensors_of(cache: Any) -> list[torch.Tensor]:
        values = [value for layer in cache.layers for value in vars(layer).values()]
        found = [own for value in values for own in (value.values() if isinstance(value, dict) else [value])]
        return [own for own in found if isinstance(own, torch.Tensor)]

    assert len(tensors_of(plain)) >= 3
    torch.testing.assert_close(tensors_of(drafted), tensors_of(plain), rtol=1e-4, atol=1e-4)
