"""
Reads the configs of block drafters (DFlash, JetSpec and DSpark), in the layouts of all tools that write them.

A block drafter is one body with five switches: which query predicts first, which layers are causal, which have
windows, whether it has a Markov head, and whether it has its own output head. Each tool writes the first three in its
own way. They are resolved here, layer by layer, so that nothing later knows which tool it was.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..commands import UserValueError
from .published_head import PublishedHead, Shapes


# Other drafters and parts, by a word in a name of a class, a type or a tensor.
_OTHERS = (
    (r"dflash2|(attention|mlp)_conv\.|candidate_selector\.", "a DFlash2 drafter, with convolutions and a selector"),
    (r"domino|prefix_gru\.|embed_proj\.", "a Domino drafter, with a GRU over drafted tokens"),
    (r"xpress|refiner_head\.", "an XPress drafter, with several passes over a block"),
    (r"p_?eagle|mask_hidden$", "a P-EAGLE head, with EAGLE's first layer"),
    (r"gemma|layer_scalar$|_feedforward_layernorm\.", "a block drafter with layers of Gemma"),
    (r"laguna|self_attn\.g_proj\.|aux_(hidden_)?norms?\.", "a block drafter with layers of Laguna"),
    (r"markov_head\.gate_proj\.", "a DSpark drafter with a gated Markov head"),
    (r"markov_head\.joint_proj\.", "a DSpark drafter with a recurrent Markov head, with a state for each path"),
    (r"deepseek|^mla$|\.(q_[ab]_proj|kv_[ab]_proj\w*)\.", "a block drafter with multi-head latent attention (MLA)"),
    (r"attention_sink|\.sinks$", "a block drafter with attention sinks"),
)
_KNOWN_ARCHITECTURE = re.compile(r"(Qwen3)?(DFlash|DSpark)(DraftModel|Model|Speculator)|MuseGlimmerAssistantModel")
# Transformers' own DFlash head, for Muse.
_MUSE = "muse_glimmer_assistant"
# Types of configs whose layers are Qwen3's or Llama's, with biases and norms that the tensors show.
_LAYER_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", _MUSE)
# Fields that are read, beside those of any head.
_READ = {
    "dflash_config", "block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids",
    "sample_from_anchor", "is_causal", "causal", "causal_head", "use_swa", "swa_window_size", "use_sliding_window",
    "sliding_window_non_causal", "markov_rank", "markov_head_type", "projector_type", "attention_mode",
}  # fmt: skip
# Fields of training, of a head that judges drafts, and of Domino.
_IDLE = {
    "num_target_layers", "num_anchors", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma", "auf", "pure_draft_prefix_len",
    "emb_dim", "gru_hidden_dim", "lambda_base_start", "lambda_base_decay_ratio",
}  # fmt: skip
# Fields that change what the same tensors compute, with the value under which they do not.
_NEUTRAL = {
    "input_embedding_scale": 1, "output_multiplier": 1, "attention_value_scale": 1, "is_neox_style": True,
    "rope_is_neox_style": True,
}  # fmt: skip
# A mask of tokens, a head that judges drafts, and copies of parts of the target are in some files, not used.
_KNOWN_TENSORS = re.compile(
    r"(fc|layers\.\d+\.self_attn\.[qkvo]_proj)\.(weight|bias)|(embed_tokens|hidden_norm|norm|lm_head"
    r"|layers\.\d+\.(self_attn\.[qk]_norm|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm)"
    r"|markov_head\.markov_w[12]|verifier_lm_head|verifier_norm)\.weight|confidence_head\.proj\.(weight|bias)"
    r"|d2t|t2d|(.*\.)?rotary_emb\.inv_freq"
)


def is_block_drafter(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that it is one of a block drafter, of any kind."""
    names = [fields.get(name) for name in ("speculators_model_type", "model_type", "architectures")]
    kind = re.compile(r"dflash|dspark|xpress|muse_?glimmer_?assistant", re.IGNORECASE)
    return "dflash_config" in fields or any(kind.search(str(name)) for name in names)


def block_fields(fields: dict[str, Any], shapes: Shapes, name_or_path: Any) -> dict[str, Any]:
    """
    Returns the fields of a `GumihoConfig` for a block drafter, by its `config.json` and the shapes of its tensors by
    plain names. Raises `ValueError` for a drafter of another kind, or with something that is not known here.
    """
    if fields.get("model_type") == _MUSE:
        # Its vocabulary is the target's. Its layers slide both ways, and see as far as the window's last token.
        window = fields.get("sliding_window", 2048) + 1
        fields = fields | {"vocab_size": 0, "is_causal": False, "sliding_window": window}
    head = PublishedHead(fields, "dflash_config", name_or_path)
    head.shapes = shapes
    _check_names(head)
    head.check_fields(_READ | _IDLE, _NEUTRAL)
    head.check_tensors(_KNOWN_TENSORS)
    for name in ("block_size", "mask_token_id"):
        if type(head.flags.get(name)) is not int:
            raise head.fault(f"`{name}` must be an integer, got {head.flags.get(name)!r}")
    if "d2t" in shapes and "lm_head.weight" not in shapes:
        raise head.fault("its weights have a draft vocabulary (`d2t`), and no output head of its own for it")
    llama, layer_ids = head.llama_fields(), _layers_read(head)
    windows = _windows(head, llama["num_hidden_layers"])
    return {
        "model_type": "gumiho",
        "serial_head": "block",
        "num_serial_tokens": 0,
        "num_parallel_heads": 0,
        "block_size": head.flags["block_size"],
        "mask_token_id": head.flags["mask_token_id"],
        "sample_from_anchor": _samples_anchor(head),
        "attention_windows": windows,
        "attention_causal": _causal_layers(head.flags, windows),
        "markov_rank": shapes.get("markov_head.markov_w1.weight", (0, 0))[1],
        "has_own_head": "lm_head.weight" in shapes,
        "draft_vocab_size": shapes["lm_head.weight"][0] if "d2t" in shapes else None,
        "target_layer_ids": layer_ids,
        "target_hidden_size": shapes["fc.weight"][1] // len(layer_ids),
        "has_embedding": "embed_tokens.weight" in shapes,
        "gumiho_fc_bias": "fc.bias" in shapes,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
        "converted_from": head.name,
        "dtype": head.flags.get("dtype") or head.flags.get("torch_dtype"),
        "model": {"rms_norm_eps": 1e-6} | llama,
    }


def check_block(config: Any) -> None:
    """Raises `ValueError` where the fields of a block drafter's `GumihoConfig` do not fit together."""
    size, mask_token = config.block_size, config.mask_token_id
    llama = config.get_text_config()
    if size is None or config.max_draft_depth < 1:
        raise UserValueError(f"`block_size` must leave a token to draft, got {size!r}.")
    if mask_token is None or not 0 <= mask_token < (llama.vocab_size or mask_token + 1):
        raise UserValueError(f"`mask_token_id` must be a token, from 0 to {llama.vocab_size - 1}, got {mask_token!r}.")
    if config.num_serial_tokens or config.num_parallel_heads:
        raise UserValueError(
            "A block drafter drafts all tokens in one pass: leave `num_serial_tokens` and `num_parallel_heads` out."
        )
    for name in ("attention_windows", "attention_causal"):
        values = getattr(config, name)
        if len(values or ()) != llama.num_hidden_layers:
            raise UserValueError(
                f"`{name}` must have a value for each of {llama.num_hidden_layers} layers: {values!r}."
            )


def _check_names(head: PublishedHead) -> None:
    """Raises `ValueError` for a drafter of another body, by its names and tensors."""
    flags = head.flags
    architectures = head.architectures()
    kind_fields = ("speculators_model_type", "projector_type", "attention_mode")
    kinds = [flags[name] for name in kind_fields if name in flags]
    layer_type = head.levels[0].get("model_type", "qwen3")
    given = (*architectures, *kinds, flags.get("model_type"), layer_type)
    names = [str(name).lower() for name in given if name]
    for pattern, what in _OTHERS:
        if any(re.search(pattern, name) for name in (*names, *head.shapes)):
            raise head.refusal(what)
    for name in architectures:
        if not _KNOWN_ARCHITECTURE.fullmatch(name):
            raise head.refusal(f"a block drafter of the architecture {name!r}")
    for kind in kinds:
        if kind not in ("dflash", "dspark", "gqa", "mha"):
            raise head.refusal(f"a block drafter of the kind {kind!r}")
    if layer_type not in _LAYER_TYPES:
        raise head.refusal(f"a block drafter with layers of the type {layer_type!r} (`model_type`)")
    markov_type = flags.get("markov_head_type", "vanilla")
    if markov_type != "vanilla" and flags.get("markov_rank"):
        raise head.refusal(f"a DSpark drafter with a Markov head of the type {markov_type!r}")
    if flags.get("hidden_act", "silu") != "silu":
        raise head.refusal(f"a block drafter with the activation {flags['hidden_act']!r} (`hidden_act`)")


def _samples_anchor(head: PublishedHead) -> bool:
    """
    Returns whether each query predicts the token after its own. Else it predicts the token at its own place, and the
    output of the first one is not used.
    """
    flags, kind = head.flags, head.flags.get("speculators_model_type")
    if "sample_from_anchor" in flags:
        return bool(flags["sample_from_anchor"])
    if kind is None:
        # DeepSpec's drafters, its DFlash among them, and SpecForge's DSpark.
        named = (*flags.get("architectures", ()), flags.get("projector_type"))
        return any("dspark" in str(name).lower() for name in named)
    # Before it had the field, speculators wrote the number of drafts.
    methods = (flags.get("speculators_config") or {}).get("proposal_methods") or [{}]
    num_drafts = methods[0].get("speculative_tokens")
    if kind == "dspark" and num_drafts not in (flags["block_size"], flags["block_size"] - 1):
        raise head.refusal("a DSpark drafter that does not say which query predicts first (`sample_from_anchor`)")
    return bool(num_drafts == flags["block_size"])


def _windows(head: PublishedHead, num_layers: int) -> list[int | None]:
    """Returns for each layer how many positions a query sees, its own included; `None` for all."""
    flags = head.flags
    window, kinds = flags.get("sliding_window"), flags.get("layer_types", [])[:num_layers]
    if kinds:
        slides = [kind == "sliding_attention" for kind in kinds]
        slides += [False] * (num_layers - len(kinds))
    else:
        # As transformers' config of Qwen3 fills them in.
        first = flags.get("max_window_layers", 28)
        has_windows = bool(flags.get("use_sliding_window"))
        slides = [has_windows and layer >= first for layer in range(num_layers)]
    if flags.get("use_swa") and not any(slides):
        # Drafters of MiMo and ModelOpt say it for all layers.
        window, slides = flags.get("swa_window_size", window), [True] * num_layers
    elif any(slides) and flags.get("use_sliding_window") is False:
        raise head.fault("it has sliding layers (`layer_types`), and `use_sliding_window` is false")
    if any(slides) and type(window) is not int:
        raise head.fault(f"it has sliding layers, and `sliding_window` is {window!r}")
    return [window if is_sliding else None for is_sliding in slides]


def _causal_layers(flags: Mapping[str, Any], windows: list[int | None]) -> list[bool]:
    """Returns which layers hide later queries of a block: unless the config says it, those with windows."""
    for name in ("is_causal", "causal", "causal_head"):
        if name in flags:
            return [bool(flags[name])] * len(windows)
    goes_both_ways = flags.get("sliding_window_non_causal") or flags.get("use_swa")
    return [window is not None and not goes_both_ways for window in windows]


def _layers_read(head: PublishedHead) -> list[int]:
    """Returns the layers whose outputs are read. speculators counts their inputs, so that 0 is the embedding."""
    if "speculators_model_type" in head.flags:
        name, offset = "aux_hidden_state_layer_ids", 1
    else:
        name, offset = "target_layer_ids", 0
    given = head.flags.get(name)
    if not isinstance(given, list) or any(type(number) is not int for number in given):
        raise head.fault(f"`{name}`, the layers of the target that it reads, must be a list of numbers, got {given!r}")
    ids = [number - offset for number in given]
    if min(ids) < 0:
        raise head.refusal(f"a block drafter that reads the target's embedding (`{name}` is {given})")
    if ids != sorted(set(ids)):
        raise head.refusal(f"a block drafter that reads layers in another order than the target's (`{name}`: {given})")
    return ids
