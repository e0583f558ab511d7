"""
Reads the configs of block drafters (DFlash, JetSpec and DSpark) in the layouts of all tools that write them.

A block drafter is one body with five switches: which query predicts first, which of its layers are causal, which have
windows, whether it has a Markov head, and whether it has an output head of its own. Tensors show the last two. Each
tool writes the others in its own way, and leaves them out in its own way; they are resolved here, layer by layer, so
that nothing later knows which tool it was. A head that is misread drafts without an error, only worse. So what is not
known is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from transformers import Qwen3Config

from ..commands import UserValueError


Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

# Words in names of classes, types of models and types of heads, in small letters, with what each is.
_METHODS = {
    "dflash2": "a DFlash2 drafter, with convolutions and a selector of candidates",
    "domino": "a Domino drafter, with a GRU over drafted tokens",
    "xpress": "an XPress drafter, with repeated passes",
    "peagle": "a P-EAGLE head",
    "gemma": "a block drafter with layers of Gemma",
    "laguna": "a block drafter with layers of Laguna",
    "muse": "a DFlash assistant of transformers, with layers of Muse",
    "deepseek": "a block drafter with layers of DeepSeek",
}
# Parts of names of tensors, with what they belong to.
_TENSORS_OF_METHODS = (
    (r"_conv\.|candidate_selector\.", _METHODS["dflash2"]),
    (r"prefix_gru\.|embed_proj\.", _METHODS["domino"]),
    (r"refiner_head\.", _METHODS["xpress"]),
    (r"mask_hidden$", _METHODS["peagle"]),
    (r"layer_scalar$|_feedforward_layernorm\.", _METHODS["gemma"]),
    (r"self_attn\.g_proj\.|aux_(hidden_)?norms?\.", _METHODS["laguna"]),
    (r"markov_head\.gate_proj\.", "a DSpark drafter with a gated Markov head"),
    (r"markov_head\.joint_proj\.", "a DSpark drafter with a recurrent Markov head"),
    (r"\.(q_[ab]_proj|kv_[ab]_proj\w*)\.", "a block drafter with multi-head latent attention (MLA)"),
    (r"attention_sink|\.sinks$", "a block drafter with attention sinks"),
)
_ARCHITECTURE = re.compile(r"(Qwen3)?(DFlash|DSpark)(DraftModel|Model|Speculator)")
# Their layers are those of Qwen3 or Llama, as far as tensors show it.
_LAYER_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_MARKOV_TYPES = {"gated": "a gated Markov head", "rnn": "a recurrent Markov head"}
# Fields that are read, beside those of the layers.
_READ = (
    "block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "sample_from_anchor",
    "is_causal", "causal", "causal_head", "use_swa", "swa_window_size", "sliding_window_non_causal", "markov_rank",
    "markov_head_type", "projector_type", "attention_mode", "speculators_model_type", "speculators_config",
    "draft_vocab_size", "target_hidden_size", "rope_theta", "rope_scaling", "torch_dtype", "mlp_bias", "model_type",
    "transformer_layer_config", "dflash_config",
)  # fmt: skip
# Fields that say nothing about what is computed: of training, of the target, and of parts that are not used.
_OF_TRAINING = (
    "num_target_layers", "num_anchors", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma", "auf", "speculators_version",
    "auto_map", "tie_word_embeddings", "pretraining_tp", "_attn_implementation", "_name_or_path",
    # Domino's, which speculators writes for all DFlash drafters.
    "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start", "lambda_base_decay_ratio",
    # Experts', of the target.
    "decoder_sparse_step", "moe_intermediate_size", "mlp_only_layers", "norm_topk_prob", "num_experts",
    "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
)  # fmt: skip
_KNOWN = {*_READ, *_OF_TRAINING, *(field.name for field in fields_of(Qwen3Config))}
# Fields that change what the same tensors compute, with the value under which they do not.
_NEUTRAL = {
    "input_embedding_scale": 1, "output_multiplier": 1, "attention_value_scale": 1, "is_neox_style": True,
    "rope_is_neox_style": True, "partial_rotary_factor": 1,
}  # fmt: skip
_NEEDED_FIELDS = ("block_size", "mask_token_id", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NEEDED_TENSORS = (
    "fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight", "layers.0.mlp.gate_proj.weight",
)  # fmt: skip
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def is_block_drafter(fields: Fields) -> bool:
    """Whether a `config.json` says that it is one of a block drafter, of any kind."""
    names = _names(fields)
    return "dflash_config" in fields or any(word in name for name in names for word in ("dflash", "dspark", "xpress"))


def block_fields(fields: dict[str, Any], shapes: Shapes, name_or_path: Any) -> dict[str, Any]:
    """
    Returns the fields of a `GumihoConfig` for a block drafter.

    Args:
        fields: The content of its `config.json`.
        shapes: The shape of each of its tensors, by plain names.
        name_or_path: Where it is from.

    Raises:
        ValueError: It is a kind of drafter that is not known here, or something is missing.
    """
    own = fields.get("dflash_config") or {}
    flags: dict[str, Any] = {}
    # The layers' object first: a later one decides, unless it leaves a field out.
    for level in (fields.get("transformer_layer_config") or {}, fields, own):
        flags |= {name: value for name, value in level.items() if value is not None}
    reason = _other_method(fields, flags, shapes) or _unknown_part(flags) or _lack(flags, shapes)
    if reason is not None:
        raise _refusal(name_or_path, reason)
    slides = _sliding_layers(flags)
    window = flags["swa_window_size"] if _slides_everywhere(flags) else flags.get("sliding_window")
    layer_ids = _layers_read(flags, name_or_path)
    return {
        "model_type": "gumiho",
        "serial_head": "block",
        "num_serial_tokens": 0,
        "num_parallel_heads": 0,
        "block_size": flags["block_size"],
        "mask_token_id": flags["mask_token_id"],
        "sample_from_anchor": _samples_anchor(fields, flags, name_or_path),
        "attention_windows": [window if is_sliding else None for is_sliding in slides],
        "attention_causal": _causal_layers(flags, slides),
        "markov_rank": shapes.get("markov_head.markov_w1.weight", (0, 0))[1],
        "has_own_head": "lm_head.weight" in shapes,
        "draft_vocab_size": shapes["d2t"][0] if "d2t" in shapes else None,
        "target_layer_ids": layer_ids,
        "target_hidden_size": shapes["fc.weight"][1] // len(layer_ids),
        "has_embedding": "embed_tokens.weight" in shapes,
        "gumiho_fc_bias": "fc.bias" in shapes,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
        "converted_from": str(name_or_path),
        "dtype": flags.get("dtype") or flags.get("torch_dtype"),
        "model": _llama_fields(flags, shapes),
    }


def check_block(config: Any) -> None:
    """Raises `ValueError` where the fields of a block drafter's `GumihoConfig` do not fit together."""
    size, mask_token, llama = config.block_size, config.mask_token_id, config.get_text_config()
    if size is None or config.max_draft_depth < 1:
        raise UserValueError(f"`block_size` must leave a token to draft, got {size!r}.")
    if mask_token is None or not 0 <= mask_token < llama.vocab_size:
        raise UserValueError(f"`mask_token_id` must be a token, from 0 to {llama.vocab_size - 1}, got {mask_token!r}.")
    for name in ("attention_windows", "attention_causal"):
        values = getattr(config, name)
        if values is None or len(values) != llama.num_hidden_layers:
            raise UserValueError(
                f"`{name}` must have a value for each of {llama.num_hidden_layers} layers: {values!r}."
            )
    if any(window is not None and window < 1 for window in config.attention_windows):
        raise UserValueError(f"`attention_windows` must be at least 1, or None, got {config.attention_windows!r}.")


def _llama_fields(flags: Fields, shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of the layers as those of a Llama. What tensors show is taken from them."""
    attention = "layers.0.self_attn."
    head_dim = shapes[f"{attention}q_proj.weight"][0] // flags["num_attention_heads"]
    return {
        "model_type": "llama",
        "hidden_size": shapes["fc.weight"][0],
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": flags["num_hidden_layers"],
        "num_attention_heads": flags["num_attention_heads"],
        "num_key_value_heads": shapes[f"{attention}k_proj.weight"][0] // head_dim,
        "head_dim": head_dim,
        "vocab_size": flags["vocab_size"],
        "hidden_act": flags.get("hidden_act", "silu"),
        "rms_norm_eps": flags.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": flags.get("max_position_embeddings", 32768),
        "rope_parameters": _rope(flags),
        "qkv_bias": f"{attention}q_proj.bias" in shapes,
        "attention_bias": f"{attention}o_proj.bias" in shapes,
        "tie_word_embeddings": False,
    }


def _samples_anchor(fields: Fields, flags: Fields, name_or_path: Any) -> bool:
    """
    Returns whether the newest token, the first query, predicts the token after it. Else each query predicts the token
    at its own place, and the output of the first one is not used.
    """
    if "sample_from_anchor" in flags:
        return bool(flags["sample_from_anchor"])
    kind = fields.get("speculators_model_type")
    if kind is None:
        # DeepSpec's drafters, its DFlash among them, and SpecForge's DSpark.
        return any("dspark" in name for name in _names(flags))
    # speculators wrote the number of drafts before it had the field.
    methods = (flags.get("speculators_config") or {}).get("proposal_methods") or [{}]
    num_drafts = methods[0].get("speculative_tokens")
    if num_drafts == flags["block_size"]:
        return True
    if kind == "dspark" and num_drafts != flags["block_size"] - 1:
        raise _refusal(name_or_path, "a DSpark drafter that does not say which query predicts first, in the field "
                                     "`sample_from_anchor`")  # fmt: skip
    return False


def _slides_everywhere(flags: Fields) -> bool:
    """Whether all layers have windows, whatever `layer_types` says, as in drafters of MiMo and ModelOpt."""
    return bool(flags.get("use_swa")) and "sliding_attention" not in flags.get("layer_types", ())


def _sliding_layers(flags: Fields) -> list[bool]:
    num_layers = flags["num_hidden_layers"]
    if _slides_everywhere(flags):
        return [True] * num_layers
    if "layer_types" in flags:
        kinds = [kind == "sliding_attention" for kind in flags["layer_types"]]
        return [*kinds, *[False] * num_layers][:num_layers]
    # As transformers' config of Qwen3 fills them in.
    first = flags.get("max_window_layers", 28) if flags.get("use_sliding_window") else num_layers
    return [index >= first for index in range(num_layers)]


def _causal_layers(flags: Fields, slides: list[bool]) -> list[bool]:
    """Returns which layers hide later queries of a block: unless the config says it, those with windows."""
    for name in ("is_causal", "causal", "causal_head"):
        if name in flags:
            return [bool(flags[name])] * len(slides)
    if flags.get("sliding_window_non_causal") or flags.get("use_swa"):
        return [False] * len(slides)
    return slides


def _layers_read(flags: Fields, name_or_path: Any) -> list[int]:
    """Returns the layers whose outputs are read. speculators counts their inputs, so that 0 is the embedding."""
    ids = flags.get("target_layer_ids")
    if "speculators_model_type" in flags:
        ids = [number - 1 for number in flags.get("aux_hidden_state_layer_ids", ())]
    if not ids:
        raise _refusal(name_or_path, "a block drafter that names no layers of the target")
    if min(ids) < 0:
        raise _refusal(name_or_path, f"a block drafter that reads the target's embedding (as outputs, {ids})")
    if ids != sorted(set(ids)):
        raise _refusal(name_or_path, f"a block drafter that reads layers in the order {ids}")
    return list(ids)


def _rope(flags: Fields) -> dict[str, Any]:
    """Returns the fields of the drafter's own rotary embedding. Configs may have it in several places."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": flags.get("rope_theta", 10000.0)}
    for part in ("rope_parameters", "rope_scaling"):
        given = {"rope_type" if name == "type" else name: value for name, value in flags.get(part, {}).items()}
        # Another type goes before the default, which some tools write beside it.
        rope |= {name: value for name, value in given.items() if (name, value) != ("rope_type", "default")}
    return rope


def _names(fields: Fields) -> list[str]:
    """Returns the names by which a config says what it is, in small letters."""
    given = fields.get("architectures")
    named = given if isinstance(given, list) else []
    kinds = [fields.get(name) for name in ("speculators_model_type", "projector_type", "model_type")]
    return [str(name).lower().replace("p_eagle", "peagle") for name in (*named, *kinds) if name]


def _other_method(fields: Fields, flags: Fields, shapes: Shapes) -> str | None:
    """Returns what a drafter is that another body computes; `None` where nothing speaks against the one here."""
    for word, what in _METHODS.items():
        if any(word in name for name in _names(fields) + _names(flags)):
            return what
    for pattern, what in _TENSORS_OF_METHODS:
        if any(re.search(pattern, name) for name in shapes):
            return what
    kind = flags.get("markov_head_type", "vanilla")
    if "markov_head.markov_w1.weight" in shapes and kind != "vanilla":
        return f"a DSpark drafter with {_MARKOV_TYPES.get(kind, f'a Markov head of the type {kind!r}')}"
    if other := [name for name in flags.get("architectures", ()) if not _ARCHITECTURE.fullmatch(str(name))]:
        return f"a block drafter with the architecture {other[0]!r}"
    layers = fields.get("transformer_layer_config") or fields
    if (kind := layers.get("model_type") or "qwen3") not in _LAYER_TYPES:
        return f"a block drafter with layers of the type {kind!r}"
    if flags.get("attention_mode") == "mla":
        return "a block drafter with multi-head latent attention (MLA)"
    return None


def _unknown_part(flags: Fields) -> str | None:
    """Returns a field that changes what is computed, or may do so; `None` where every field is known."""
    for name, value in flags.items():
        if name in _NEUTRAL:
            if value != _NEUTRAL[name]:
                return f"a block drafter with `{name}` of {value!r}"
        elif name not in _KNOWN and value not in (False, 0, "", [], {}):
            return f"a block drafter with a field that is not known, `{name}` of {value!r}"
    if flags.get("hidden_act", "silu") != "silu":
        return f"a block drafter with `hidden_act` of {flags['hidden_act']!r}"
    rope = _rope(flags)
    if rope["rope_type"] not in _ROPE_TYPES or any(isinstance(value, dict) for value in rope.values()):
        return f"a block drafter with a rotary embedding that is not known: {rope}"
    if any("mrope" in name and value for name, value in rope.items()):
        return "a block drafter with a multimodal rotary embedding (mrope)"
    return None


def _lack(flags: Fields, shapes: Shapes) -> str | None:
    """Returns what is missing, or does not fit together."""
    if lacking := [name for name in _NEEDED_FIELDS if name not in flags]:
        return f"a block drafter whose config gives no `{lacking[0]}`"
    if not shapes:
        return "a block drafter without a weight file next to its config.json"
    if lacking := [name for name in _NEEDED_TENSORS if name not in shapes]:
        return f"a block drafter without the tensor `{lacking[0]}`"
    if "d2t" in shapes and "lm_head.weight" not in shapes:
        return "a block drafter with a draft vocabulary (`d2t`), and without an output head for it"
    if shapes["layers.0.self_attn.q_proj.weight"][0] % flags["num_attention_heads"]:
        return f"a block drafter whose queries are of no {flags['num_attention_heads']} heads (`num_attention_heads`)"
    if "sliding_attention" in flags.get("layer_types", ()) and flags.get("use_sliding_window") is False:
        return "a block drafter with sliding layers, and with `use_sliding_window: false`"
    if any(_sliding_layers(flags)) and not (flags.get("sliding_window") or flags.get("swa_window_size")):
        return "a block drafter with sliding layers, and without a window (`sliding_window`)"
    return None


def _refusal(name_or_path: Any, what: str) -> UserValueError:
    return UserValueError(
        f"{str(name_or_path)!r} is {what}. This is not available here: of block drafters, DFlash, JetSpec and DSpark "
        f"heads with the layers of Qwen3 or Llama are. Use such a head, or serve this one with vLLM or SGLang."
    )
