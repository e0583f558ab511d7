"""
Reads the configs of EAGLE heads, in the layouts of all tools that write them.

The names and shapes of a head's tensors say what it is made of. The config says what tensors cannot show: the layers
that are read, the rotary embedding, and where norms apply. [`PublishedHead`] refuses the rest by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .published_head import PublishedHead, Shapes


# As many as the reference drafts: seven levels below the first.
NUM_SERIAL_TOKENS = 8
# The reference reads three layers.
_NUM_LAYERS_READ = 3
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_KNOWN_FIELDS = {_LAYER_IDS, *_NORM_FLAGS, "eagle_fc_bias"}
# Fields with the value that each head here has, of which ModelOpt writes all.
_NEUTRAL = dict.fromkeys(
    ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"), True
) | {"parallel_draft_step": 1}
# A spare output head, a map of tokens and angles of positions are there in some files and not used.
_KNOWN_TENSORS = re.compile(
    r"((embed_tokens|fc|norm|lm_head|input_norm|fc_norm\.\d+)|layers\.\d+\.(self_attn\.[qkvo]_proj"
    r"|self_attn\.[qk]_norm|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm|hidden_norm))\.(weight|bias)"
    r"|d2t|t2d|token_map|(.*\.)?rotary_emb\.inv_freq"
)
_KNOWN_ARCHITECTURE = re.compile(
    r"(Eagle3?)?(Llama4?|Mixtral|Qwen[23](_?5?vl|_?moe)?)ForCausalLM(Eagle3?)?|Eagle(3(Speculator|DraftModel|Model)|Model)",
    re.IGNORECASE,
)  # fmt: skip
# Types of configs whose layers are Llama's, with biases and norms that the tensors show. SafeAILab's EAGLE-1 head for
# Mixtral has the layers of a Llama; no EAGLE-1 head has Qwen3's.
_LLAMA_TYPES = ("llama", "qwen2", "mixtral", "qwen3")
# Words in the names and fields of drafters, of any method.
_DRAFTERS = re.compile(
    r"eagle|medusa|hydra|dflash|dspark|mtp|nextn|speculator|^draft_|parallel_drafting|pard_", re.IGNORECASE
)
# Fields by which targets count or describe their own MTP layers.
_OF_TARGETS = re.compile(r"num_mtp_layers|num_nextn_predict_layers|mtp_.+")
# Tensors that drafters have and language models have not.
_OF_DRAFTERS = re.compile(r"(fc|medusa_head|(mlp\.)?\d+\.\d+\.linear)\.|(.*\.)?eh_proj\.")


def claims_to_draft(fields: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that it is a drafter's, of another method than Gumiho. Some do not say it."""
    names = [fields.get("model_type"), fields.get("architectures")]
    names += [name for name in fields if not _OF_TARGETS.fullmatch(name)]
    return any(_DRAFTERS.search(str(name)) for name in names)


def is_of_language_model(names: Iterable[str]) -> bool:
    """Whether the plain names of tensors are a language model's, and not a drafter's, of any method."""
    return not any(map(_OF_DRAFTERS.match, names))


def eagle_fields(
    fields: dict[str, Any], read_shapes: Callable[[], Shapes], name_or_path: Any
) -> dict[str, Any] | None:
    """
    Returns the fields of a `GumihoConfig` for an EAGLE head, by its `config.json` and the shapes of its tensors by
    plain names; `None` for what is none, and does not claim to be one. Raises `ValueError` for a drafter of another
    method, and for an EAGLE head that is not known here.
    """
    claims = claims_to_draft(fields)
    shapes = {} if claims else read_shapes()
    if not claims and (is_of_language_model(shapes) or "mlp.0.0.linear.weight" in shapes):
        return None
    head = PublishedHead(fields, "eagle_config", name_or_path)
    _check_names(head)
    head.check_fields(_KNOWN_FIELDS, _NEUTRAL)
    kinds = head.flags.get("layer_types", [])
    if "sliding_attention" in kinds[: head.flags.get("num_hidden_layers")]:
        raise head.refusal("a head with a sliding window (`layer_types`)")
    head.shapes = shapes or read_shapes()
    head.check_tensors(_KNOWN_TENSORS)
    is_eagle3 = "layers.0.hidden_norm.weight" in head.shapes
    if not is_eagle3:
        _check_eagle1(head)
    found: dict[str, Any] = {
        "model_type": "gumiho",
        "model": head.llama_fields(),
        "num_serial_tokens": NUM_SERIAL_TOKENS,
        "num_parallel_heads": 0,
        "gumiho_fc_bias": "fc.bias" in head.shapes,
        "has_embedding": "embed_tokens.weight" in head.shapes,
        "dtype": head.flags.get("dtype") or head.flags.get("torch_dtype"),
        "converted_from": head.name,
    }
    return found | (_eagle3_fields(head) if is_eagle3 else {})


def _check_names(head: PublishedHead) -> None:
    """Raises `ValueError` for a config that calls its drafter, its class or its layers by a name that is not known."""
    speculator, layers = head.flags.get("speculators_model_type"), head.levels[0]
    if speculator not in (None, "eagle3"):
        raise head.refusal(f"a drafter of the type {speculator!r} (`speculators_model_type`)")
    architectures = head.architectures()
    for name in architectures:
        if not _KNOWN_ARCHITECTURE.fullmatch(name):
            raise head.refusal(f"a drafter of the architecture {name!r}")
    kind = layers.get("model_type", "llama")
    # Other tools copy the target's type, and say by the architecture that the layers are Llama's.
    is_copied = architectures and not speculator and not _DRAFTERS.search(kind)
    if kind not in (*_LLAMA_TYPES, "eagle", "eagle3") and not is_copied:
        raise head.refusal(f"a drafter with layers of the type {kind!r} (`model_type`)")


def _check_eagle1(head: PublishedHead) -> None:
    """Raises `ValueError` for what an EAGLE-1 or EAGLE-2 head has that Gumiho's serial head has not."""
    kind, shapes = head.levels[0].get("model_type", "llama"), head.shapes
    if {"draft_vocab_size", _LAYER_IDS, "speculators_model_type"} & head.flags.keys():
        raise head.refusal(
            "an EAGLE-3 head by its config, and not by its tensors: `layers.0.hidden_norm.weight` is missing"
        )
    for name in ("norm.weight", "layers.0.input_layernorm.weight"):
        if name in shapes:
            raise head.refusal(f"an EAGLE-1 head with norms of its own (`{name}`)")
    if kind not in (*_LLAMA_TYPES[:3], "eagle"):
        raise head.refusal(f"an EAGLE-1 head with layers of the type {kind!r}")
    size = shapes["layers.0.mlp.gate_proj.weight"][1]
    if shapes["fc.weight"] != (size, 2 * size):
        raise head.refusal(
            f"no EAGLE-1 head: its `fc.weight` has the shape {shapes['fc.weight']}, expected {(size, 2 * size)}"
        )


def _eagle3_fields(head: PublishedHead) -> dict[str, Any]:
    """Returns what is an EAGLE-3 head's own."""
    flags, shapes = head.flags, head.shapes
    shown = {"norm_before_fc": "input_norm.weight" in shapes, "fc_norm": "fc_norm.0.weight" in shapes}
    for name, is_shown in shown.items():
        if flags.get(name, is_shown) != is_shown:
            raise head.fault(f"`{name}` is {flags[name]}, and its weights {'have' if is_shown else 'lack'} the norms")
    layer_ids, (rows, columns) = _layers_read(head), shapes["fc.weight"]
    num_layers = len(layer_ids) if layer_ids else _NUM_LAYERS_READ
    if columns % num_layers:
        raise head.fault(f"`fc.weight` has {columns} columns for the states of {num_layers} layers")
    sizes = {"target_hidden_size": columns // num_layers}
    if "d2t" in shapes and shapes.get("lm_head.weight"):
        sizes["draft_vocab_size"] = shapes["lm_head.weight"][0]
    head.warn_of_copies(sizes)
    return {name: bool((shown | flags).get(name)) for name in _NORM_FLAGS} | {
        "serial_head": "eagle3",
        "target_layer_ids": layer_ids,
        "target_hidden_size": columns // num_layers if columns != num_layers * rows else None,
        "draft_vocab_size": sizes.get("draft_vocab_size"),
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
    }


def _layers_read(head: PublishedHead) -> list[int] | None:
    """Returns the layers that a config names, as a `GumihoConfig` counts them; `None` where it names none."""
    found = [_as_outputs(head, level[_LAYER_IDS]) for level in head.levels if _LAYER_IDS in level]
    if any(ids != found[0] for ids in found):
        raise head.refusal(f"an EAGLE-3 head that names several sets of layers (as outputs, {found})")
    return found[0] if found else None


def _as_outputs(head: PublishedHead, ids: list[int]) -> list[int]:
    """
    Returns numbers of layers as a `GumihoConfig` counts them, by their outputs.

    speculators and vLLM count inputs: n is what layer n reads. SpecForge and ModelOpt count outputs in configs that
    begin with layer 1, which is the first layer that their defaults read.
    """
    ids = sorted(set(ids))
    if "speculators_model_type" in head.flags or ids[0] != 1:
        ids = [number - 1 for number in ids]
    if ids[0] < 0:
        raise head.refusal("an EAGLE-3 head that reads the target's embedding (layer 0 in its config)")
    return ids
