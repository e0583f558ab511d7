"""
Reads the configs of EAGLE heads, in the layouts of all tools that write them.

The names and shapes of a head's tensors say what it is made of, because configs of other tools leave it out or say
something else. The config says what tensors cannot show: the layers that are read, the rotary embedding, and where
norms apply. A head that is misread drafts without an error, only worse. So whatever is not known is refused.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import LlamaConfig
from transformers.utils import logging

from ..commands import UserValueError


logger = logging.get_logger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

# As many as the reference drafts: seven levels below the first.
NUM_SERIAL_TOKENS = 8
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Words in `architectures` and in model types of drafters, with what each is.
_METHODS = {
    "medusa": "Medusa heads",
    "hydra": "Hydra heads",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
    "peagle": "a P-EAGLE head, which drafts in parallel",
    "mtp": "a multi-token prediction (MTP) head",
    "nextn": "a multi-token prediction (MTP) head",
    "mlp_speculator": "an MLP speculator",
}
# Fields by which a drafter of another method is known, whatever it calls itself.
_FIELDS_OF_METHODS = {
    "medusa_num_heads": "medusa", "hydra_num_heads": "hydra", "dflash_config": "dflash",
    "parallel_drafting": "peagle", "pard_token": "peagle",
}  # fmt: skip
_PARA_NORM = "an EAGLE head with `add_para_norm`, two norms before `fc`"
_MLA = "an EAGLE head with multi-head latent attention (MLA)"
# Tensors of attention and norms that these heads do not have, with what they belong to.
_TENSORS_OF_METHODS = (
    (r"mask_hidden$", _METHODS["peagle"]),
    (r"(.*\.)?eh_proj\.", _METHODS["mtp"]),
    (r"(medusa_head|\d+\.\d+\.linear)\.", _METHODS["medusa"]),
    (r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.", _MLA),
    (r"(enorm|hnorm)\.", _PARA_NORM),
)
# Factors of Granite, Cohere, MiniCPM and Gemma, which change what the same tensors compute, and the neutral value.
_FACTORS = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
     "partial_rotary_factor"), 1,
) | dict.fromkeys(
    ("attention_multiplier", "scale_depth", "dim_model_base", "attn_logit_softcapping", "final_logit_softcapping",
     "query_pre_attn_scalar")
)  # fmt: skip
_KNOWN_ARCHITECTURE = re.compile(r".*(Llama|Qwen[23]).*|Eagle3(Speculator|DraftModel|Model)|EAGLEModel|EagleModel")
# By their shapes a config is read.
_NEEDED = (
    "fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.gate_proj.weight",
)  # fmt: skip
# Types of EAGLE-1 configs whose layers are Llama's, with biases that the tensors show.
_LLAMA_TYPES = ("llama", "qwen2")


def claims_to_draft(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that it is a drafter's, of another method than Gumiho. Some do not say it."""
    return _named_method(fields) is not None or any(
        name in fields for name in ("speculators_model_type", "eagle_config", "draft_vocab_size", *_FIELDS_OF_METHODS)
    )


def eagle_fields(
    fields: dict[str, Any], read_shapes: Callable[[], Shapes], name_or_path: Any
) -> dict[str, Any] | None:
    """
    Returns the fields of a `GumihoConfig` for an EAGLE head; `None` for what is none, and does not claim to be one.

    Args:
        fields: The content of its `config.json`.
        read_shapes: Returns the shape of each of its tensors, by plain names.
        name_or_path: Where it is from.

    Raises:
        ValueError: It is a drafter of another method, or an EAGLE head that is not known here.
    """
    llama, flags = _flatten(fields)
    claims, reason = claims_to_draft(fields), _refused_config(fields, flags)
    shapes = {} if claims and reason else read_shapes()
    method = next((what for pattern, what in _TENSORS_OF_METHODS if any(map(re.compile(pattern).match, shapes))), None)
    is_language_model = "fc.weight" not in shapes and method in (None, _MLA)
    if not claims and (is_language_model or "mlp.0.0.linear.weight" in shapes):
        return None
    is_eagle3 = "layers.0.hidden_norm.weight" in shapes
    reason = method or reason or _lack(shapes) or (None if is_eagle3 else _refused_eagle1(flags, shapes))
    if reason is not None:
        raise _refusal(name_or_path, reason)
    found: dict[str, Any] = {
        "model_type": "gumiho",
        "model": _llama_fields(llama, shapes),
        "num_serial_tokens": NUM_SERIAL_TOKENS,
        "num_parallel_heads": 0,
        "gumiho_fc_bias": "fc.bias" in shapes,
        "has_embedding": "embed_tokens.weight" in shapes,
        "dtype": flags.get("dtype") or flags.get("torch_dtype"),
        "converted_from": str(name_or_path),
    }
    return found | (_eagle3_fields(flags, shapes, name_or_path) if is_eagle3 else {})


def _flatten(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of the layers, and all fields with those of nested objects."""
    llama: dict[str, Any] = fields
    if isinstance(fields.get("transformer_layer_config"), dict):  # speculators
        llama = fields["transformer_layer_config"]
    elif isinstance(fields.get("model"), dict):  # vLLM
        llama = fields["model"]
    flags = llama | fields
    # ModelOpt, SpecForge
    return llama, flags | (flags.get("eagle_config") or {})


def _named_method(fields: Mapping[str, Any]) -> str | None:
    """Returns the method that a config names, in lower case; `None` where it names none."""
    kind = fields.get("speculators_model_type") or fields.get("model_type") or ""
    names = [str(name).lower() for name in (kind, *(fields.get("architectures") or ()))]
    words = (*_METHODS, "eagle")
    return next((word for name in names for word in words if word in name.replace("p_eagle", "peagle")), None)


def _refused_config(fields: dict[str, Any], flags: dict[str, Any]) -> str | None:
    """Returns what a config describes that cannot be loaded; `None` where nothing speaks against it."""
    given = [word for field, word in _FIELDS_OF_METHODS.items() if flags.get(field) not in (None, False)]
    for method in (_named_method(fields), *given):
        if method in _METHODS:
            return _METHODS[method]
    kind = fields.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        return f"a speculators drafter of the type {kind!r}"
    architectures = fields.get("architectures") or ()
    if "deepseek" in str(architectures).lower() or flags.get("kv_lora_rank"):
        return _MLA
    if other := [name for name in architectures if not _KNOWN_ARCHITECTURE.fullmatch(str(name))]:
        return f"an EAGLE head with the architecture {other[0]!r}, whose norms and scales are not known"
    if flags.get("add_para_norm"):
        return _PARA_NORM
    if flags.get("use_aux_hidden_state") is False:
        return "an EAGLE-3 head with `use_aux_hidden_state: false`, which reads no layers of the target"
    rope = {**(flags.get("rope_scaling") or {}), **(flags.get("rope_parameters") or {})}
    if "mrope_section" in rope or "mrope" in (rope.get("rope_type"), rope.get("type")):
        return "an EAGLE head with a multimodal rotary embedding (mrope)"
    for name, neutral in _FACTORS.items():
        if (factor := {**flags, **rope}.get(name)) not in (None, neutral, False):
            return f"an EAGLE head whose config scales its states (`{name}` is {factor!r})"
    num_layers = flags.get("num_hidden_layers") or 1
    if flags.get("use_sliding_window") or "sliding_attention" in (flags.get("layer_types") or ())[:num_layers]:
        return "an EAGLE head with a sliding window"
    return None


def _lack(shapes: Shapes) -> str | None:
    """Returns what cannot be recognized for lack of a tensor."""
    lacking = next((name for name in _NEEDED if name not in shapes), None)
    if lacking is None:
        return None
    lack = f"it has no tensor `{lacking}`" if shapes else "no weight file is found next to its config.json"
    return f"a drafter that cannot be recognized, because {lack}"


def _refused_eagle1(flags: dict[str, Any], shapes: Shapes) -> str | None:
    """Returns what an EAGLE-1 or EAGLE-2 head has that Gumiho's serial head has not, of any number of layers."""
    kind, size = (flags.get("model") or flags).get("model_type", "llama"), flags.get("hidden_size", 0)
    if flags.get("draft_vocab_size") or _LAYER_IDS in flags or flags.get("speculators_model_type"):
        return "an EAGLE-3 head by its config, and not by its tensors: `layers.0.hidden_norm.weight` is missing"
    if own := [name for name in ("norm.weight", "layers.0.input_layernorm.weight") if name in shapes]:
        return f"an EAGLE-1 head with norms of its own (`{own[0]}`), as those with Mistral, Cohere or Llama 4 layers"
    if kind not in _LLAMA_TYPES:
        return f"an EAGLE-1 head with layers of the type {kind!r}"
    if shapes["fc.weight"] != (size, 2 * size):
        return f"no EAGLE-1 head: its `fc.weight` has the shape {shapes['fc.weight']}, expected {(size, 2 * size)}"
    return None


def _refusal(name_or_path: Any, what: str) -> UserValueError:
    return UserValueError(
        f"{str(name_or_path)!r} is {what}. This is not available here: of other methods, EAGLE-1, EAGLE-2 and EAGLE-3 "
        f"heads with Llama or Qwen3 layers are. Use such a head, or one of Gumiho's, that was made for your target."
    )


def _llama_fields(given: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of the layers as those of a Llama. What tensors show of the layers is taken from them."""
    known = {field.name for field in dataclasses.fields(LlamaConfig)} | {"rope_theta", "rope_scaling"}
    fields = {name: value for name, value in given.items() if name in known and value is not None}
    attention = "layers.0.self_attn."
    head_dim = shapes[f"{attention}q_proj.weight"][0] // fields.get(
        "num_attention_heads", LlamaConfig.num_attention_heads
    )
    return fields | {
        "model_type": "llama",
        # Some tools do not read the field of this name.
        "head_dim": head_dim,
        "num_key_value_heads": shapes[f"{attention}k_proj.weight"][0] // head_dim,
        "architectures": None,
        # Copied from targets, although the head has an output head of its own.
        "tie_word_embeddings": False,
        # Llama 4 has another field for it.
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        # As in Qwen2, q, k and v may have biases and o none.
        "qkv_bias": f"{attention}q_proj.bias" in shapes,
        "attention_bias": f"{attention}o_proj.bias" in shapes,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in shapes,
    }


def _eagle3_fields(flags: dict[str, Any], shapes: Shapes, name_or_path: Any) -> dict[str, Any]:
    """Returns what is an EAGLE-3 head's own."""
    of_speculators, ids = "speculators_model_type" in flags, flags.get(_LAYER_IDS)
    _warn_of_doubts(flags, of_speculators, name_or_path)
    given = {"norm_before_fc": "input_norm.weight" in shapes, "fc_norm": "fc_norm.0.weight" in shapes} | flags
    return {name: bool(given.get(name)) for name in _NORM_FLAGS} | {
        "serial_head": "eagle3",
        "target_layer_ids": _as_outputs(ids, of_speculators, name_or_path) if ids else None,
        "target_hidden_size": flags.get("target_hidden_size"),
        "draft_vocab_size": shapes.get("lm_head.weight", (None,))[0] if "d2t" in shapes else None,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
    }


def _as_outputs(ids: list[int], of_speculators: bool, name_or_path: Any) -> list[int]:
    """
    Returns numbers of layers as a `GumihoConfig` counts them, by their outputs.

    speculators and vLLM count inputs: n is what layer n reads. SpecForge and ModelOpt count outputs in configs that
    begin with layer 1, which is the first layer that their defaults read.
    """
    ids = sorted(set(ids))
    if of_speculators or ids[0] != 1:
        ids = [number - 1 for number in ids]
    if ids[0] < 0:
        raise _refusal(name_or_path, "an EAGLE-3 head that reads the target's embedding (layer 0 in its config)")
    return ids


def _warn_of_doubts(flags: dict[str, Any], of_speculators: bool, name_or_path: Any) -> None:
    """Logs, once, which fields of a config may say something else than its head was trained with."""
    base = (flags.get("rope_parameters") or {}).get("rope_theta", flags.get("rope_theta"))
    doubts = []
    if not of_speculators and base not in (None, 10000):
        doubts.append(
            f"has a `rope_theta` of {base}, which is used. The training code of several tools ignored it and used "
            f"10000. If few drafts are accepted, try `config.model.rope_parameters['rope_theta'] = 10000.0`."
        )
    if not of_speculators and flags.get("norm_output"):
        doubts.append(
            "says `norm_output: true`. Until September 2026 SpecForge wrote this for heads without it. If few drafts "
            "are accepted, try `norm_output=False`."
        )
    if of_speculators and "norm_before_residual" not in flags:
        doubts.append(
            "does not say `norm_before_residual`, so it is false, as for speculators; vLLM takes it for true. If few "
            "drafts are accepted, try `norm_before_residual=True`."
        )
    for doubt in doubts:
        logger.warning_once(f"The config of the EAGLE-3 head {str(name_or_path)!r} {doubt}")
