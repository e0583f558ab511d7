"""Small configs of any model type of transformers: its default config with known fields made small."""

from collections.abc import Iterable
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig


VOCAB_SIZE = 24
MAX_LAYERS = 4

# By name of the field, where the default is a number.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "input_embedding_size"), 32),
    **dict.fromkeys(("output_embedding_size", "attention_hidden_size", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dff"), 48),
    **dict.fromkeys(("dim_ff", "d_inner", "ffn_hidden_size", "dense_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_value_heads", "n_mamba_heads"), 4),
    "swa_num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("kv_channels", "dim_head", "attention_head_dim", "index_head_dim", "d_kv"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "o_groups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    # With few heads many scores of an indexer are exactly 0, and which of them are the largest is a matter of chance.
    "index_n_heads": 16,
    **dict.fromkeys(("index_topk", "index_topk_blocks"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 6),
    "attention_chunk_size": 12,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), 256),
    **dict.fromkeys(("rotary_dim", "hidden_size_per_layer_input", "laurel_rank", "gated_norm_rank"), 8),
    # Large weights: the next token then depends on the full text, not only on the last token.
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.4),
}  # fmt: skip
# Where the default is no number, or known fields are not enough.
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA4 = {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    # A cache gets as many layers as the encoder has.
    "blenderbot": {"encoder_layers": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
    },
    "dbrx": {
        "attn_config": DbrxAttentionConfig(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        "ffn_config": DbrxFFNConfig(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "deepseek_v2": _EXPERTS,
    "dots1": _EXPERTS,
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4},
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "num_key_value_heads": 4},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_head": 16, "mamba_d_ssm": 64},
    "electra": {"embedding_size": 16},
    "gemma3n_text": {
        "layer_types": _SLIDING_AND_FULL * 2, "num_hidden_layers": 8, "num_kv_shared_layers": 4,
        "intermediate_size": 48, "activation_sparsity_pattern": [0.0] * 8,
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 4, "index_topk_blocks": 2,
        "index_local_blocks": 1,
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_hidden_layers": 2},
    "roc_bert": {"pronunciation_vocab_size": 24, "shape_vocab_size": 24},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "num_blocks": 4, "qk_dim_factor": 1.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    # Layers share their attention, which takes more than one of them.
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 16,
    },
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
}  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "start_token_id", "sep_token_id")
TOKENS += ("eod_token_id", "forced_eos_token_id")
OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types")


def small_config(model_type: str, **settings: Any) -> PreTrainedConfig:
    """
    Returns a config of a causal language model of a few layers, each kind of layer among them, with `VOCAB_SIZE`
    tokens, of which 0 pads and none ends a text, and with these settings.
    """
    config_class = CONFIG_MAPPING[model_type]
    overrides = OVERRIDES.get(model_type, {}) | settings
    config = config_class(**overrides.get("first", {}))
    return _shrunk(config, {name: value for name, value in overrides.items() if name != "first"})


def _shrunk(config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    names = [name for name in _field_names(config) if name not in overrides]
    fields = {name: value for name in names if (value := _small(name, vars(config)[name])) is not None}
    # Some configs take no `None` here. What ends a text is a matter of the generation config.
    fields |= {name: 0 for name in TOKENS if getattr(config, name, None) is not None}
    if hasattr(config, "is_decoder"):
        fields["is_decoder"] = True
    if vars(config).get("num_key_value_heads", 0) == vars(config).get("num_attention_heads"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= _layers(config)
    for name, value in overrides.items():
        nested = vars(config).get(name)
        is_nested = isinstance(nested, PreTrainedConfig) and isinstance(value, dict)
        fields[name] = _shrunk(nested, value) if is_nested else value
    return type(config)(**fields)


def _field_names(config: PreTrainedConfig) -> Iterable[str]:
    # By their own names: what others in the attribute map stand for would be given twice.
    return [name for name in vars(config) if name not in config.attribute_map and not name.startswith("_")]


def _small(name: str, value: Any) -> Any:
    """Returns a small value for a field, `None` where the default stays."""
    if isinstance(value, PreTrainedConfig):
        return _shrunk(value, {})
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or name not in SMALL:
        return None
    # A size of 0 leaves something out, and where there are few of something there are no more than that.
    return min(value, SMALL[name]) if value >= 0 and isinstance(SMALL[name], int) else SMALL[name]


def _layers(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """Returns lists of layers that hold each combination of kinds, in the order of the default's."""
    lists = {name: value for name in OF_LAYERS if isinstance(value := vars(config).get(name), (list, tuple))}
    kinds = list(zip(*lists.values(), strict=False)) if lists else []
    if not kinds:
        return {}
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    # The last kind again before the first, so that a layer of each stands between others.
    chosen = sorted([*chosen, *[place for place in range(len(kinds)) if place not in chosen]][:MAX_LAYERS])
    return {name: [list(value)[place] for place in chosen] for name, value in lists.items()}
