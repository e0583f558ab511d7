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

import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
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
# Factors of Granite, Cohere, MiniCPM, Gemma and Ministral, which change what the same tensors compute, and the neutral
# value.
_FACTORS = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
     "partial_rotary_factor"), 1,
) | dict.fromkeys(
    ("attention_multiplier", "scale_depth", "dim_model_base", "attn_logit_softcapping", "final_logit_softcapping",
     "query_pre_attn_scalar", "clip_qkv", "llama_4_scaling", "rope_interleave")
)  # fmt: skip
# Each with the numbers that it needs.
_ROPE_TYPES = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
_KNOWN_ARCHITECTURE = re.compile(r".*(Llama|Qwen[23]).*|Eagle3(Speculator|DraftModel|Model)|EAGLEModel|EagleModel")
# Fields in which a config may name the layers that are read.
_OF_LAYERS = re.compile(r"layer_ids|(aux|captur|target).*layer|layer.*captur")
# By their shapes a config is read.
_NEEDED = (
    "fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.gate_proj.weight",
)  # fmt: skip
# Types of configs whose layers are Llama's, with biases and norms that the tensors show. SafeAILab's EAGLE-1 head for
# Mixtral has the layers of a Llama; no EAGLE-1 head has Qwen3's.
_LLAMA_TYPES = ("llama", "qwen2", "mixtral", "qwen3")
# Fields whose defaults are of no head.
_NEEDED_FIELDS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


# What fields must be that are read here; a `LlamaConfig` checks the others.
_FIELDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("an integer above 0", lambda value: _is_number(value) and type(value) is int,
     (*_NEEDED_FIELDS, "num_key_value_heads")),
    ("a number above 0", _is_number, ("rope_theta",)),
    ("true or false", lambda value: isinstance(value, bool), _NORM_FLAGS),
    ("an object", lambda value: isinstance(value, dict), ("eagle_config", "rope_scaling", "rope_parameters")),
    ("a list of integers", _is_list_of(int), (_LAYER_IDS,)),
    ("a list of names", _is_list_of(str), ("architectures", "layer_types")),
    ("a name", lambda value: isinstance(value, str), ("model_type", "speculators_model_type")),
    ("an activation that transformers has", lambda value: str(value) in ACT2FN, ("hidden_act",)),
    ("a dtype of PyTorch",
     lambda value: isinstance(getattr(torch, str(value).removeprefix("torch."), None), torch.dtype),
     ("dtype", "torch_dtype")),
)  # fmt: skip


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
    levels = _levels(fields, name_or_path)
    flags = {name: value for level in levels for name, value in level.items()}
    claims, reason = claims_to_draft(fields), _refused_config(levels, flags)
    shapes = {} if claims and reason else read_shapes()
    if not claims and (is_of_language_model(shapes) or "mlp.0.0.linear.weight" in shapes):
        return None
    is_eagle3 = "layers.0.hidden_norm.weight" in shapes
    reason = _method_of(shapes) or reason or _lack(shapes)
    reason = reason or (None if is_eagle3 else _refused_eagle1(levels[0], flags, shapes))
    if reason is not None:
        raise _refusal(name_or_path, reason)
    _check_sizes(flags, shapes, name_or_path)
    rope = _rope_fields(levels)
    _check_rope(rope, shapes["layers.0.self_attn.q_proj.weight"][0] // flags["num_attention_heads"], name_or_path)
    found: dict[str, Any] = {
        "model_type": "gumiho",
        "model": _llama_fields(flags, shapes) | {"rope_parameters": dict(rope)},
        "num_serial_tokens": NUM_SERIAL_TOKENS,
        "num_parallel_heads": 0,
        "gumiho_fc_bias": "fc.bias" in shapes,
        "has_embedding": "embed_tokens.weight" in shapes,
        "dtype": flags.get("dtype") or flags.get("torch_dtype"),
        "converted_from": str(name_or_path),
    }
    return found | (_eagle3_fields(levels, flags, shapes, name_or_path) if is_eagle3 else {})


def is_of_language_model(shapes: Shapes) -> bool:
    """Whether tensors are a language model's, and not a drafter's, of any method."""
    return "fc.weight" not in shapes and _method_of(shapes) in (None, _MLA)


def _method_of(shapes: Shapes) -> str | None:
    return next((what for pattern, what in _TENSORS_OF_METHODS if any(map(re.compile(pattern).match, shapes))), None)


def _levels(fields: dict[str, Any], name_or_path: Any) -> list[dict[str, Any]]:
    """Returns the objects of a config, that of the layers first. A later one decides, unless it leaves a field out."""

    def given(level: dict[str, Any] | None) -> dict[str, Any]:
        found = {name: value for name, value in (level or {}).items() if value is not None and value != []}
        for what, is_right, names in _FIELDS:
            for name in names:
                if name in found and not is_right(found[name]):
                    raise _fault(name_or_path, f"`{name}` must be {what}, got {found[name]!r}")
        return found

    inner = fields.get("transformer_layer_config") or fields.get("model")  # of speculators, and of vLLM
    levels = [given(inner), given(fields)] if isinstance(inner, dict) else [given(fields)]
    # ModelOpt, SpecForge
    return levels + [given(level.get("eagle_config")) for level in levels]


def _rope_fields(levels: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the fields of the rotary embedding. Configs may have it in several places."""
    found: list[tuple[str, Any]] = []
    for level in levels:
        found += [(name, level[name]) for name in ("rope_theta", "original_max_position_embeddings") if name in level]
        for part in ("rope_parameters", "rope_scaling"):
            found += [("rope_type" if name == "type" else name, v) for name, v in level.get(part, {}).items()]
    # Another type goes before the default, which some tools write beside it.
    return [("rope_type", "default"), *(field for field in found if field != ("rope_type", "default"))]


def _named_method(fields: Mapping[str, Any]) -> str | None:
    """Returns the method that a config names, in lower case; `None` where it names none."""
    kind = fields.get("speculators_model_type") or fields.get("model_type") or ""
    architectures = fields.get("architectures")
    names = [str(name).lower() for name in (kind, *(architectures if isinstance(architectures, list) else ()))]
    words = (*_METHODS, "eagle")
    return next((word for name in names for word in words if word in name.replace("p_eagle", "peagle")), None)


def _refused_config(levels: list[dict[str, Any]], flags: dict[str, Any]) -> str | None:
    """Returns what a config describes that cannot be loaded; `None` where nothing speaks against it."""
    layers, speculator = levels[0], flags.get("speculators_model_type")
    given = [word for field, word in _FIELDS_OF_METHODS.items() if flags.get(field)]
    for method in (*map(_named_method, levels), *given):
        if method in _METHODS:
            return _METHODS[method]
    if speculator not in (None, "eagle3"):
        return f"a speculators drafter of the type {speculator!r}"
    architectures = [str(name) for level in levels for name in level.get("architectures", ())]
    if "deepseek" in str(architectures).lower() or flags.get("kv_lora_rank"):
        return _MLA
    if other := [name for name in architectures if not _KNOWN_ARCHITECTURE.fullmatch(name)]:
        return f"an EAGLE head with the architecture {other[0]!r}, whose norms and scales are not known"
    kind = layers.get("model_type", "llama")
    # Other tools copy the target's type, and say by the architecture that the layers are Llama's.
    if kind not in _LLAMA_TYPES and "eagle" not in kind and (speculator or not architectures):
        return f"an EAGLE head with layers of the type {kind!r}"
    if flags.get("add_para_norm"):
        return _PARA_NORM
    if flags.get("use_aux_hidden_state") is False:
        return "an EAGLE-3 head with `use_aux_hidden_state: false`, which reads no layers of the target"
    rope = dict(_rope_fields(levels))
    if rope["rope_type"] == "mrope" or any("mrope" in name and value for name, value in (flags | rope).items()):
        return "an EAGLE head with a multimodal rotary embedding (mrope)"
    if str(rope["rope_type"]) not in _ROPE_TYPES or any(isinstance(value, dict) for value in rope.values()):
        return f"an EAGLE head with a rotary embedding that is not known: {rope}"
    for name, neutral in _FACTORS.items():
        if (factor := (flags | rope).get(name)) not in (None, neutral, False):
            return f"an EAGLE head whose config scales its states (`{name}` is {factor!r})"
    layer_types = flags.get("layer_types", [])[: flags.get("num_hidden_layers", 1)]
    if flags.get("use_sliding_window") or "sliding_attention" in layer_types:
        return "an EAGLE head with a sliding window"
    return None


def _lack(shapes: Shapes) -> str | None:
    """Returns what cannot be recognized for lack of a tensor."""
    lacking = next((name for name in _NEEDED if len(shapes.get(name, ())) != 2), None)
    if lacking is None:
        return None
    lack = f"it has no matrix `{lacking}`" if shapes else "no weight file is found next to its config.json"
    return f"a drafter that cannot be recognized, because {lack}"


def _refused_eagle1(layers: dict[str, Any], flags: dict[str, Any], shapes: Shapes) -> str | None:
    """Returns what an EAGLE-1 or EAGLE-2 head has that Gumiho's serial head has not, of any number of layers."""
    kind, size = layers.get("model_type", "llama"), flags.get("hidden_size", 0)
    if flags.get("draft_vocab_size") or _LAYER_IDS in flags or flags.get("speculators_model_type"):
        return "an EAGLE-3 head by its config, and not by its tensors: `layers.0.hidden_norm.weight` is missing"
    if own := [name for name in ("norm.weight", "layers.0.input_layernorm.weight") if name in shapes]:
        return f"an EAGLE-1 head with norms of its own (`{own[0]}`), as those with Mistral, Cohere or Llama 4 layers"
    if kind not in _LLAMA_TYPES[:3]:
        return f"an EAGLE-1 head with layers of the type {kind!r}"
    if shapes["fc.weight"] != (size, 2 * size):
        return f"no EAGLE-1 head: its `fc.weight` has the shape {shapes['fc.weight']}, expected {(size, 2 * size)}"
    return None


def _check_sizes(flags: dict[str, Any], shapes: Shapes, name_or_path: Any) -> None:
    """Raises `ValueError` where a config leaves sizes out that tensors cannot show, or contradicts the tensors."""
    if lacking := [name for name in _NEEDED_FIELDS if name not in flags]:
        raise _fault(name_or_path, f"it gives no `{lacking[0]}`")
    q_rows, k_rows = (shapes[f"layers.0.self_attn.{name}_proj.weight"][0] for name in "qk")
    heads, kv_heads = flags["num_attention_heads"], flags.get("num_key_value_heads")
    if q_rows % heads or (kv_heads and q_rows * kv_heads != k_rows * heads):
        raise _fault(
            name_or_path,
            f"`layers.0.self_attn.q_proj.weight` has {q_rows} rows for {heads} heads (`num_attention_heads`), and "
            f"`layers.0.self_attn.k_proj.weight` has {k_rows} for {kv_heads} (`num_key_value_heads`)",
        )


def _check_rope(fields: list[tuple[str, Any]], head_dim: int, name_or_path: Any) -> None:
    """Raises `ValueError` where a config gives the rotary embedding in two ways, or with what it does not compute."""
    rope = dict(fields)
    for name, value in fields[1:]:
        if value != rope[name]:
            raise _fault(name_or_path, f"it gives `{name}` as {value!r} and as {rope[name]!r}")
    kind = rope.pop("rope_type")
    for name, value in (dict.fromkeys(_ROPE_TYPES[kind]) | rope).items():
        if kind == "longrope" and name in _ROPE_TYPES[kind]:
            # They divide the angles, of which there is one for two numbers of a head.
            what, numbers = f"a list of {head_dim // 2} numbers above 0", value if isinstance(value, list) else []
            is_right = len(numbers) == head_dim // 2 and all(map(_is_number, numbers))
        else:
            is_needed = name in _ROPE_TYPES[kind]
            what = "a number above 0" if is_needed else "a number"
            is_right = _is_number(value) if is_needed else isinstance(value, (int, float, type(None)))
        if not is_right:
            raise _fault(name_or_path, f"`{name}` of a {kind} rotary embedding must be {what}, got {value!r}")


def _fault(name_or_path: Any, what: str) -> UserValueError:
    return UserValueError(
        f"The config.json of the EAGLE head {str(name_or_path)!r} cannot be right: {what}. Correct it, or download it "
        f"again."
    )


def _refusal(name_or_path: Any, what: str) -> UserValueError:
    return UserValueError(
        f"{str(name_or_path)!r} is {what}. This is not available here: of other methods, EAGLE-1, EAGLE-2 and EAGLE-3 "
        f"heads with Llama or Qwen3 layers are. Use such a head, or one of Gumiho's, that was made for your target."
    )


def _llama_fields(given: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Returns the fields of the layers as those of a Llama. What tensors show of the layers is taken from them."""
    known = {field.name for field in dataclasses.fields(LlamaConfig)}
    fields = {name: value for name, value in given.items() if name in known}
    attention = "layers.0.self_attn."
    head_dim = shapes[f"{attention}q_proj.weight"][0] // fields["num_attention_heads"]
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


def _eagle3_fields(
    levels: list[dict[str, Any]], flags: dict[str, Any], shapes: Shapes, name_or_path: Any
) -> dict[str, Any]:
    """Returns what is an EAGLE-3 head's own."""
    of_speculators = "speculators_model_type" in flags
    _warn_of_doubts(flags, dict(_rope_fields(levels)).get("rope_theta"), of_speculators, name_or_path)
    given = {"norm_before_fc": "input_norm.weight" in shapes, "fc_norm": "fc_norm.0.weight" in shapes} | flags
    return {name: bool(given.get(name)) for name in _NORM_FLAGS} | {
        "serial_head": "eagle3",
        "target_layer_ids": _layers_read(levels, of_speculators, name_or_path),
        "target_hidden_size": flags.get("target_hidden_size"),
        "draft_vocab_size": next(iter(shapes.get("lm_head.weight", ())), None) if "d2t" in shapes else None,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
    }


def _layers_read(levels: list[dict[str, Any]], of_speculators: bool, name_or_path: Any) -> list[int] | None:
    """Returns the layers that a config names, as a `GumihoConfig` counts them; `None` where it names none."""
    found = []
    for name, value in (field for level in levels for field in level.items()):
        if name == _LAYER_IDS:
            found.append(_as_outputs(value, of_speculators, name_or_path))
        elif isinstance(value, list) and _OF_LAYERS.search(name):
            where = f"in `{name}`, and not in `{_LAYER_IDS}`"
            raise _refusal(name_or_path, f"an EAGLE-3 head that names the layers it reads {where}")
    if any(ids != found[0] for ids in found):
        raise _refusal(name_or_path, f"an EAGLE-3 head that names several sets of layers (as outputs, {found})")
    return found[0] if found else None


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


def _warn_of_doubts(flags: dict[str, Any], base: float | None, of_speculators: bool, name_or_path: Any) -> None:
    """Logs, once, which fields of a config may say something else than its head was trained with."""
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
