"""Tiny random targets that verify chains, and drafts for them that are accepted in part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import partly_right_drafts as drafts
import tiny_configs
import torch
from targets import LARGE_TREES
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    DeepseekV4Config,
    FalconConfig,
    FalconH1Config,
    GlmMoeDsaConfig,
    GPTNeoConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    MptConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from transformers_gumiho import GumihoModel


VOCAB_SIZE = 24
_TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
_COMMON = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Chunks shorter than some passes.
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

CHAIN_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: Qwen3NextConfig(**_COMMON, **_LINEAR, head_dim=8, num_experts=0, mlp_only_layers=[0, 1, 2]),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_COMMON, **_LINEAR, head_dim=8),
    "lfm2": lambda: Lfm2Config(**_COMMON, layer_types=["conv", "full_attention", "conv"]),
    "falcon_h1": lambda: FalconH1Config(**_COMMON, **_MAMBA2, mamba_d_ssm=64),
    "granite_hybrid": lambda: GraniteMoeHybridConfig(
        **_COMMON, **_MAMBA2, layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=48,
        num_local_experts=0,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(**_COMMON, **_LINEAR),
    "bamba": lambda: BambaConfig(**_COMMON, **_MAMBA2, attn_layer_indices=[1]),
    "bloom": lambda: BloomConfig(**_TOKENS, hidden_size=32, n_layer=3, n_head=4),
    "mpt": lambda: MptConfig(**_TOKENS, d_model=32, n_layers=3, n_heads=4, max_seq_len=256),
    "falcon_alibi": lambda: FalconConfig(
        **_TOKENS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=True
    ),
    "gpt_neo": lambda: GPTNeoConfig(
        **_TOKENS, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=6, max_position_embeddings=256,
    ),
    "llama4": lambda: Llama4TextConfig(
        **_COMMON, intermediate_size_mlp=48, num_experts_per_tok=1, head_dim=8, num_local_experts=2,
        attention_chunk_size=12,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
    ),
    "mamba2": lambda: Mamba2Config(
        **_TOKENS, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16, n_groups=1,
        chunk_size=16,
    ),
    # The states lie beside the layers of a cache of its own class.
    "minimax": lambda: minimax_config(["full_attention", "linear_attention", "full_attention"]),
    # The keys that each token attends to are chosen by an index.
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **_COMMON | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, index_topk=8, index_head_dim=8, index_n_heads=16,
        mlp_layer_types=["dense", "dense", "dense"],
    ),
}  # fmt: skip


def deepseek_v4_config() -> PreTrainedConfig:
    """Windows, and what lies behind them compressed: two tokens to one, or four."""
    return DeepseekV4Config(
        **_COMMON | {"num_hidden_layers": 4, "num_key_value_heads": 1}, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, head_dim=8, q_lora_rank=16, o_lora_rank=16, o_groups=1, sliding_window=6, index_topk=8,
        index_head_dim=8, index_n_heads=16, hc_mult=2,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    )  # fmt: skip


def minimax_config(layer_types: list[str]) -> PreTrainedConfig:
    """Blocks shorter than some prompts."""
    return MiniMaxConfig(
        **_COMMON, head_dim=8, layer_types=layer_types, block_size=16, num_local_experts=2, num_experts_per_tok=1
    )


# Families whose pass over several tokens is not, in transformers, that over one after the other.
INEXACT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    # Only the pass over several tokens bounds the time step from below (`time_step_min`).
    "nemotron_h": lambda: NemotronHConfig(
        **_COMMON, layers_block_type=["mamba", "attention", "mamba"], mamba_num_heads=4, mamba_head_dim=16,
        n_groups=1, chunk_size=16, ssm_state_size=8, head_dim=8,
    ),
    # The pass over several tokens begins with an empty state.
    "jamba": lambda: JambaConfig(
        **_COMMON, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=8,
        mamba_dt_rank=4,     ),
    "mamba": lambda: MambaConfig(**_TOKENS, hidden_size=32, num_hidden_layers=2, state_size=8),
}  # fmt: skip

if "dory" in CONFIG_MAPPING:  # since 5.24
    # Tokens of one pass see what an earlier loop computes for each other, and those behind it what the last one did.
    INEXACT_FAMILIES["dory"] = partial(tiny_configs.small_config, "dory", recurrent_kv_cache_mode="last_loop")

# Families that are exact where nothing is padded.
PARTLY_EXACT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v4": deepseek_v4_config,
    # Each token attends to blocks of four keys, which an index of its own in the cache chooses.
    "minimax_m3": partial(tiny_configs.small_config, "minimax_m3_vl_text"),
}

# Families whose states lie in no cache.
BARE_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    family: partial(tiny_configs.small_config, family) for family in ("rwkv", "xlstm")
}


def make_chain_target(family: str, seed: int = 0) -> PreTrainedModel:
    """Returns a tiny random target, in float64 where its code knows that and does not turn padding into NaN."""
    torch.manual_seed(seed)
    config = (CHAIN_FAMILIES | INEXACT_FAMILIES | PARTLY_EXACT_FAMILIES | BARE_FAMILIES)[family]()
    # The eager experts are the ones that know float64.
    target = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    if family == "glm_moe_dsa":
        # Of the padding token's embedding, which is zero, an index makes ties, which chance decides.
        torch.nn.init.normal_(target.get_input_embeddings().weight.data[0], std=0.4)
    if family not in ("bloom", "mpt", "deepseek_v4", "xlstm"):
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


def draft_rate(accepted_lengths: list[list[int]]) -> float:
    """Returns which share of the drafted tokens was accepted, for drafts of 7 tokens."""
    # The last cycle of a row may end early, and an ended row takes part in no more.
    counts = [number - 1 for row in accepted_lengths for number in row[:-1] if number]
    return sum(counts) / len(counts) / 7
