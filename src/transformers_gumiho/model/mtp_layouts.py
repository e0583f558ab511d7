"""
The multi-token prediction (MTP) layers that targets ship: under which names, for which types of targets, and with
which conventions. A drafter's config holds all that differs between them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import CONFIG_MAPPING
from transformers.utils import logging

from ..commands import UserValueError


logger = logging.get_logger(__name__)

# Any number of further tokens is drafted from the head's own features. Acceptance falls with each, as the layer was
# trained for one.
_NUM_SERIAL_TOKENS, _TREE_DEPTH = 8, 3
# Each node of a tree may run other experts of the target, so that a pass reads up to as many times their weights.
_NODES_WITH_EXPERTS = {"1": 8, "4": 4, "8": 2}

# What stands before the layers of a text model, alone or inside of another model.
_ROOT = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"


@dataclass(frozen=True)
class MtpLayout:
    """
    The names of an MTP layer's tensors in a checkpoint, as patterns. `{n}` is the number of the target's own layers.

    Attributes:
        prefix: What all names begin with.
        embedding_norm, state_norm, product, final_norm: What follows for the norms of an embedding and a state, the
            product that makes one state of both, and the norm after the layer.
        layer: What follows for the layer itself: `tail` as in the decoder's layer, `index` if there may be several.
        renamed: Parts of the layer that have other names in the decoder.
    """

    prefix: str
    embedding_norm: str = "enorm"
    state_norm: str = "hnorm"
    product: str = "eh_proj"
    final_norm: str = "final_layernorm"
    layer: str = "(?P<tail>.+)"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def drafter_names(self, names: Iterable[str], num_layers: int) -> dict[str, str]:
        """Returns the drafter's names of those tensors of a checkpoint that are an MTP layer's, by their own names."""
        parts = {
            "enorm": self.embedding_norm, "hnorm": self.state_norm, "fc": self.product, "norm": self.final_norm,
        }  # fmt: skip
        beside = "|".join(rf"(?P<{part}>{pattern})(?P<{part}_end>\..+)" for part, pattern in parts.items())
        prefix = _ROOT + self.prefix.replace("{n}", str(num_layers))
        pattern = re.compile(rf"{prefix}(?:{beside}|{self.layer})")
        found = {}
        for name in names:
            if (match := pattern.fullmatch(name)) is None:
                continue
            groups = match.groupdict()
            part = next((part for part in parts if groups[part]), None)
            if part is not None:
                found[name] = part + groups[f"{part}_end"]
                continue
            first, dot, rest = groups["tail"].partition(".")
            layer = f"decoder.layers.{groups.get('index') or 0}"
            found[name] = f"{layer}.{self.renamed.get(first, first)}{dot}{rest}"
        return found


AFTER_THE_LAYERS = MtpLayout(
    r"layers\.{n}\.",
    final_norm=r"shared_head\.norm|final_layernorm",
    layer=r"(?P<tail>(?!shared_head\.|embed_tokens\.|word_embeddings\.).+)",
)
BESIDE_THE_MODEL = MtpLayout(
    r"mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", r"layers\.0\.(?P<tail>.+)"
)
IN_A_LIST = MtpLayout(r"mtp\.layers\.0\.", renamed={"pre_mlp_layernorm": "post_attention_layernorm"})
BY_PARTS = MtpLayout(r"mtp_", r"emb_norm\.0", r"hidden_norm\.0", r"linear_proj\.0", "(?!)", r"block\.0\.(?P<tail>.+)")
BY_BLOCKS = MtpLayout(
    r"mtp\.",
    r"layers\.0\.enorm",
    r"layers\.0\.hnorm",
    r"layers\.0\.eh_proj",
    final_norm=r"layers\.\d+\.final_layernorm",
    layer=r"layers\.(?P<index>\d+)\.(?P<tail>.+)",
)

# An output head that a checkpoint has for its MTP layer.
_OWN_HEAD = _ROOT + r"(?:layers\.{n}\.|mtp\.(?:layers\.0\.)?)(?:shared_head\.(?:head|output)|lm_head)\.weight"


@dataclass(frozen=True)
class MtpFamily:
    """
    The MTP layers of one type of targets.

    Attributes:
        layout: The names of their tensors.
        fields: Returns, for the target's text config, the fields of a model that has the first layer alone.
        reads_normed, feeds_normed, final_norm: `mtp_reads_normed`, `norm_output` and `mtp_final_norm` of the drafter.
    """

    layout: MtpLayout
    fields: Callable[[PreTrainedConfig], dict[str, Any]]
    reads_normed: bool = True
    feeds_normed: bool = True
    final_norm: bool = True


def _with(**fields: Any) -> Callable[[PreTrainedConfig], dict[str, Any]]:
    return lambda config: fields


def _of_mellum(config: PreTrainedConfig) -> dict[str, Any]:
    attention, mlp = config.mtp_layer_types, config.mtp_mlp_layer_types
    return {
        "layer_types": list(attention or ["sliding_attention"])[:1],
        "mlp_layer_types": list(mlp or ["sparse"])[:1],
    }


def _of_exaone(config: PreTrainedConfig) -> dict[str, Any]:
    kinds = getattr(config, "mtp_layer_types", None) or config.layer_types
    windows = getattr(config, "mtp_sliding_windows", None) or [config.sliding_window]
    # A layer of this class without a window has no rotary embedding. This one always has, so it gets a window for all.
    window = config.max_position_embeddings
    if kinds[0] == "sliding_attention":
        window = windows[0] or config.sliding_window
    fields = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
    return fields | {"sliding_window": window}


def _of_nemotron(config: PreTrainedConfig) -> dict[str, Any]:
    kinds = list(config.mtp_layers_block_type)
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds), "num_nextn_predict_layers": 0}


_ALL_SPARSE = _with(first_k_dense_replace=0)
_SPARSE = _with(mlp_layer_types=["sparse"])
_FULL_ATTENTION = _with(layer_types=["full_attention"])

# By the type of the target's text config.
FAMILIES = {
    "deepseek_v3": MtpFamily(AFTER_THE_LAYERS, _ALL_SPARSE),
    "glm4_moe": MtpFamily(AFTER_THE_LAYERS, _ALL_SPARSE),
    "glm4_moe_lite": MtpFamily(AFTER_THE_LAYERS, _SPARSE),
    "hy_v3": MtpFamily(AFTER_THE_LAYERS, _SPARSE),
    "bailing_hybrid": MtpFamily(
        AFTER_THE_LAYERS, _with(layer_types=["full_attention"], mlp_layer_types=["sparse"], first_k_dense_replace=0)
    ),
    "qwen3_next": MtpFamily(
        BESIDE_THE_MODEL, _with(layer_types=["full_attention"], mlp_only_layers=[], decoder_sparse_step=1)
    ),
    "qwen3_5_text": MtpFamily(BESIDE_THE_MODEL, _FULL_ATTENTION),
    "qwen3_5_moe_text": MtpFamily(BESIDE_THE_MODEL, _FULL_ATTENTION),
    "mellum": MtpFamily(BESIDE_THE_MODEL, _of_mellum),
    "exaone_moe": MtpFamily(BESIDE_THE_MODEL, _of_exaone),
    # Three layers, of which each reads the target's state. The first one drafts.
    "mimo_v2_flash": MtpFamily(
        IN_A_LIST,
        _with(layer_types=["sliding_attention"], mlp_layer_types=["dense"]),
        reads_normed=False,
        feeds_normed=False,
    ),
    "ernie4_5_moe": MtpFamily(BY_PARTS, _with(moe_layer_start_index=1, moe_layer_end_index=1), final_norm=False),
    "nemotron_h": MtpFamily(BY_BLOCKS, _of_nemotron),
}
# Why those of other types are not available.
_REFUSED = {
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "minimax_m3", "minimax_m3_vl_text"),
        "choose the keys that they read by an index, which a draft tree's cache does not hold",
    ),
    **dict.fromkeys(("deepseek_v4", "qwen4_exp_text", "hy_v4"), "read several residual streams"),
    **dict.fromkeys(
        ("inkling_text", "step3p7", "step3p7_text"), "are a chain of several layers, each with parts of its own"
    ),
    **dict.fromkeys(("dots3_note", "exaone4_5", "exaone4_5_text"), "were not compared with another implementation"),
    **dict.fromkeys(("glm_ocr", "glm_ocr_text"), "have multimodal positions"),
    "longcat_flash": "are of another class than the target's layers",
}
# Names under which every known layout has an MTP layer.
_ANY_LAYER = re.compile(r"(?:^|\.)mtp[._]|\.(?:eh_proj|enorm|hnorm)\.")


def may_have_mtp_layers(fields: Mapping[str, Any]) -> bool:
    """Whether there may be MTP layers in the checkpoint of a model with this `config.json`, also refused ones."""
    if not isinstance(fields, dict):  # a damaged file, which is named where the config is read
        return False
    of_text = _text_fields(fields)
    types = {fields.get("model_type"), of_text.get("model_type")}
    if types & _REFUSED.keys():
        return True
    # The names under which transformers counts them.
    counts = any(of_text.get(name) for name in ("num_mtp_layers", "num_nextn_predict_layers"))
    return fields.get("model_type") in CONFIG_MAPPING and (counts or bool(types & FAMILIES.keys()))


def mtp_fields(
    fields: Mapping[str, Any], tensor_names: Callable[[], Iterable[str]], name_or_path: Any
) -> dict[str, Any] | None:
    """
    Returns the fields of a `GumihoConfig` for the MTP layers of a target, by its `config.json` and the names of its
    tensors, which are read where there may be such layers; `None` where there are none. Raises `ValueError` for layers
    that are not available here.
    """
    if not may_have_mtp_layers(fields):
        return None
    model_type, names = str(_text_fields(fields).get("model_type")), list(tensor_names())
    if reason := _REFUSED.get(model_type) or _REFUSED.get(fields["model_type"]):
        if any(_ANY_LAYER.search(name) for name in names):
            raise _refusal(name_or_path, f"those of the type {model_type!r} {reason}")
        return None
    config, family = _family_of(fields, names, name_or_path)
    if family is None or not family.layout.drafter_names(names, config.num_hidden_layers):
        return None
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise _refusal(name_or_path, "they have a token embedding of their own (`mtp_use_dedicated_embeddings`)")
    of_layer = _config_of_layer(config, family)
    num_layers = _count_layers(names, config.num_hidden_layers)
    if num_layers > of_layer.num_hidden_layers:
        logger.warning_once(f"{str(name_or_path)!r} has {num_layers} MTP layers. The first one drafts all tokens.")
    return {
        "model_type": "gumiho",
        "serial_head": "mtp",
        "model": of_layer.to_dict(),
        "num_serial_tokens": _NUM_SERIAL_TOKENS,
        "num_parallel_heads": 0,
        "gumiho_fc_bias": False,
        "has_embedding": False,
        "norm_output": family.feeds_normed,
        "mtp_reads_normed": family.reads_normed,
        "mtp_final_norm": family.final_norm,
        "dtype": fields.get("dtype") or fields.get("torch_dtype") or config.dtype,
        "converted_from": str(name_or_path),
    }


def mtp_names(fields: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, str], str | None]:
    """
    Returns the drafter's names of an MTP layer's tensors by their `names` in the target's checkpoint, and the name of
    an output head that came with the layer, or `None`. The target is one for which [`mtp_fields`] returns fields.
    """
    config, family = _family_of(fields, names, None)
    assert family is not None
    head = re.compile(_OWN_HEAD.replace("{n}", str(config.num_hidden_layers)))
    own_head = next((name for name in names if head.fullmatch(name)), None)
    return family.layout.drafter_names(names, config.num_hidden_layers), own_head


def mtp_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the decoding settings with which an MTP layer drafts, for the config of the layer."""
    nodes = _NODES_WITH_EXPERTS if getattr(config, "num_experts_per_tok", None) else None
    return {"tree_depth": _TREE_DEPTH, "num_assistant_tokens": nodes}


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of the text model in those of a config."""
    inner = fields.get("text_config")
    return inner if isinstance(inner, dict) else fields


def _family_of(
    fields: Mapping[str, Any], names: Iterable[str], name_or_path: Any
) -> tuple[PreTrainedConfig, MtpFamily | None]:
    """Returns a target's text config, and how its MTP layers are read; `None` where that is not known."""
    config = AutoConfig.for_model(**fields).get_text_config(decoder=True)
    return config, FAMILIES.get(config.model_type) or _family_like(config, names, name_or_path)


def _family_like(config: PreTrainedConfig, names: Iterable[str], name_or_path: Any) -> MtpFamily | None:
    """Returns how MTP layers of a type without a line of its own are read, if transformers describes them."""
    try:
        of_layers = config.get_mtp_config()
    except (AttributeError, ValueError):  # it describes none
        return None
    found = {name: getattr(of_layers, name, None) for name in ("layer_types", "mlp_layer_types")}
    fields: dict[str, Any] = {name: kinds[:1] for name, kinds in found.items() if kinds is not None}
    if hasattr(of_layers, "first_k_dense_replace"):
        fields["first_k_dense_replace"] = 0
    for layout in (AFTER_THE_LAYERS, BESIDE_THE_MODEL):
        own = layout.drafter_names(names, config.num_hidden_layers).values()
        if {"fc.weight", "enorm.weight", "hnorm.weight", "norm.weight"} <= set(own):
            if name_or_path is not None:
                logger.warning_once(
                    f"The MTP layer of {str(name_or_path)!r} is read as those of similar types. It was not tested for "
                    f"the type {config.model_type!r}: if few of its tokens are accepted, it may be read wrongly."
                )
            return MtpFamily(layout, _with(**fields))
    return None


def _count_layers(names: Iterable[str], num_own: int) -> int:
    """Returns how many MTP layers are in a checkpoint, for a target with this number of layers of its own."""
    found = [match for name in names if (match := re.search(r"(?:^|\.)(mtp\.)?layers\.(\d+)\.", name))]
    return len({match[2] for match in found if match[1] or int(match[2]) >= num_own})


def _config_of_layer(config: PreTrainedConfig, family: MtpFamily) -> PreTrainedConfig:
    """Returns the text config of a model that has the first MTP layer alone."""
    fields = {"num_hidden_layers": 1, "tie_word_embeddings": False} | family.fields(config)
    left_out = {"quantization_config", "per_layer_config", "architectures"}
    kept = {name: value for name, value in config.to_dict().items() if name not in left_out}
    return type(config).from_dict(kept | fields)


def _refusal(name_or_path: Any, reason: str) -> UserValueError:
    return UserValueError(
        f"The MTP layers of {str(name_or_path)!r} are not available here: {reason}. Use a drafter that was trained "
        f"for this target, or transformers' `generate(use_mtp=True)` if it knows the type."
    )
