"""
Heads of drafters in the files of the tools that made them: a `config.json`, and tensors with names and shapes.

A head that is misread drafts without an error, only worse. So what is read is a white list: a field or a tensor of
another name is refused by this name. Where tensors say a size, a field that says another one was copied from a target.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from ..commands import UserValueError


logger = logging.get_logger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

# By their shapes a config is read.
_NEEDED_TENSORS = (
    "fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.gate_proj.weight",
)  # fmt: skip

_LLAMA = {field.name for field in dataclasses.fields(LlamaConfig)}
# Fields that are read, or that say what the tensors say better.
_READ = {
    "bias", "draft_vocab_size", "eagle_config", "head_dim", "intermediate_size_mlp", "layer_types", "model",
    "model_type", "num_aux_hidden_states", "original_max_position_embeddings", "qkv_bias", "rope_scaling",
    "rope_theta", "speculators_model_type", "target_hidden_size", "torch_dtype", "transformer_layer_config",
    "truncated_vocab_size", "use_qk_norm",
}  # fmt: skip
# Fields that change nothing, by their names: of tokens, of training, of what tools write about themselves, of experts
# that a target has and no head, and of windows that other fields switch on.
_IDLE = re.compile(
    r"_.*|.*(dropout|_pdrop|token_ids?|_token_index|_version|requires_grad)|.*(expert|moe_|router).*|auto_map"
    r"|decoder_sparse_step|has_no_defaults_at_init|max_window_layers|method|mlp_only_layers|norm_topk_prob"
    r"|sliding_window|speculators_config|tf_legacy_loss|tie_encoder_decoder|tokenizer_class|torchscript|use_bfloat16"
)
# Fields that change what the same tensors compute, with the value under which they do not.
_NEUTRAL = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb",
     "partial_rotary_factor"), 1,
)  # fmt: skip
# Types of rotary embeddings, each with the fields that it needs, and the fields that are known.
_ROPE_TYPES = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
_ROPE_FIELDS = {
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor",
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


# What fields must be that are read here, where no tensor decides; a `LlamaConfig` checks the others.
_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("an integer above 0", lambda value: _is_number(value) and type(value) is int,
     ("num_attention_heads", "num_key_value_heads")),
    ("a number above 0", _is_number, ("rope_theta",)),
    ("true or false", lambda value: isinstance(value, bool), ("norm_before_residual", "norm_output")),
    ("an object", lambda value: isinstance(value, dict), ("rope_scaling", "rope_parameters")),
    ("a list of integers", _is_list_of(int), ("eagle_aux_hidden_state_layer_ids",)),
    ("a list of names", _is_list_of(str), ("architectures", "layer_types")),
    ("a name", lambda value: isinstance(value, str), ("model_type", "speculators_model_type")),
    ("an activation that transformers has", lambda value: str(value) in ACT2FN, ("hidden_act",)),
    ("a dtype of PyTorch",
     lambda value: isinstance(getattr(torch, str(value).removeprefix("torch."), None), torch.dtype),
     ("dtype", "torch_dtype")),
)  # fmt: skip


def num_layers(shapes: Shapes) -> int:
    """Returns of how many layers a head holds tensors."""
    return len({match[1] for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))})


class PublishedHead:
    """
    The head of a drafter, as the tool that made it wrote it. Errors are `ValueError`s that name a field or a tensor.

    Args:
        fields: The content of its `config.json`.
        own: The object within it that holds what belongs to the method, if there is one.
        name_or_path: Where it is from.

    Attributes:
        levels: The objects of its config, that of the layers first, without fields that have no value.
        flags: The fields of all of them; a later object decides.
        rope: The fields of the rotary embedding.
        shapes: The shape of each tensor by its plain name.
    """

    def __init__(self, fields: dict[str, Any], own: str, name_or_path: Any):
        self.name = str(name_or_path)
        self.shapes: Shapes = {}
        inner = fields.get("transformer_layer_config") or fields.get("model")  # of speculators, and of vLLM
        outer = [inner, fields] if isinstance(inner, dict) else [fields]
        self.levels = [self._given(level) for level in outer]
        for level in outer:
            if not isinstance(level.get(own) or {}, dict):
                raise self.fault(f"`{own}` must be an object, got {level[own]!r}")
            self.levels.append(self._given(level.get(own) or {}))
        self.flags = {name: value for level in self.levels for name, value in level.items()}
        self.rope = self._rope_fields()

    def _given(self, level: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in level.items() if value is not None and value != []}
        for what, is_right, names in _KINDS:
            for name in names:
                if name in found and not is_right(found[name]):
                    raise self.fault(f"`{name}` must be {what}, got {found[name]!r}")
        return found

    def _rope_fields(self) -> dict[str, Any]:
        found: list[tuple[str, Any]] = []
        for level in self.levels:
            beside = ("rope_theta", "original_max_position_embeddings")
            found += [(name, level[name]) for name in beside if name in level]
            for part in ("rope_parameters", "rope_scaling"):
                for name, value in level.get(part, {}).items():
                    found.append(("rope_type" if name == "type" else name, value))
        # Another type goes before the default, which some tools write beside it.
        found = [field for field in found if field != ("rope_type", "default")]
        rope = {"rope_type": "default"} | dict(found)
        for name, value in found:
            if value != rope[name]:
                raise self.fault(f"it gives `{name}` as {value!r} and as {rope[name]!r}")
        return rope

    def fault(self, what: str) -> UserValueError:
        """Returns an error for a config that contradicts itself or the tensors."""
        return UserValueError(
            f"The config.json of the drafter {self.name!r} cannot be right: {what}. Correct it, or download it again."
        )

    def refusal(self, what: str) -> UserValueError:
        """Returns an error for a head of a kind that is not known here."""
        return UserValueError(
            f"{self.name!r} is {what}. This is not available here: of other methods, EAGLE-1, EAGLE-2 and EAGLE-3 "
            f"heads and block drafters (DFlash, JetSpec, DSpark) with Llama or Qwen3 layers are. Use such a head, or "
            f"one of Gumiho's, made for your target."
        )

    def architectures(self) -> list[str]:
        """Returns the names of classes in its config."""
        return [name for level in self.levels for name in level.get("architectures", ())]

    def check_fields(self, known: set[str], neutral: Mapping[str, Any]) -> None:
        """
        Raises an error for a field with a value that is not `known`, beside those of any head. Those of `neutral`
        change nothing while they have the value there.
        """
        known = known | _READ | _LLAMA | vars(GenerationConfig()).keys()
        neutral = {**_NEUTRAL, **neutral}
        for name, value in self.flags.items():
            if name in known or _IDLE.fullmatch(name):
                continue
            # A field that is false, 0 or empty switches nothing on.
            idle = [neutral[name]] if name in neutral else [False, "", {}]
            if value not in idle:
                raise self.refusal(
                    f"a head whose config says that `{name}` is {value!r}, which is not known here (if it changes "
                    f"nothing of the head, remove it)"
                )

    def check_tensors(self, known: re.Pattern[str]) -> None:
        """Raises an error for a tensor of another name, and for a matrix that is missing."""
        if not self.shapes:
            raise self.refusal("a drafter that cannot be recognized: no weight file is found next to its config.json")
        if unknown := next((name for name in self.shapes if not known.fullmatch(name)), None):
            raise self.refusal(f"a head with the tensor `{unknown}`, which is not known")
        for name in _NEEDED_TENSORS:
            if len(self.shapes.get(name, ())) != 2:
                raise self.refusal(f"a drafter that cannot be recognized, because it has no matrix `{name}`")

    def llama_fields(self) -> dict[str, Any]:
        """Returns the fields of the layers as those of a Llama. Sizes, biases and norms are those of the tensors."""
        shapes, attention = self.shapes, "layers.0.self_attn."
        width, hidden_size = shapes["layers.0.mlp.gate_proj.weight"]
        sizes = self._attention_sizes() | {
            "hidden_size": hidden_size,
            "intermediate_size": width,
            "num_hidden_layers": num_layers(shapes),
            "vocab_size": self._vocab_size(),
        }
        self.warn_of_copies(sizes)
        fields = {name: value for name, value in self.flags.items() if name in _LLAMA}
        return fields | sizes | {
            "model_type": "llama",
            "architectures": None,
            "rope_parameters": self._known_rope(),
            # Copied from targets, although the head has an output head of its own.
            "tie_word_embeddings": False,
            # As in Qwen2, q, k and v may have biases and o none.
            "qkv_bias": f"{attention}q_proj.bias" in shapes,
            "attention_bias": f"{attention}o_proj.bias" in shapes,
            "mlp_bias": "layers.0.mlp.gate_proj.bias" in shapes,
        }  # fmt: skip

    def _attention_sizes(self) -> dict[str, int]:
        """Returns the number and the width of the heads. Only norms of heads show it among the tensors."""
        q_rows, k_rows = (self.shapes[f"layers.0.self_attn.{name}_proj.weight"][0] for name in "qk")
        norm = self.shapes.get("layers.0.self_attn.q_norm.weight")
        heads, kv_heads = (self.flags.get(f"num_{name}_heads") for name in ("attention", "key_value"))
        heads = q_rows // norm[0] if norm else heads
        if heads is None:
            raise self.fault("it gives no `num_attention_heads`")
        is_whole = q_rows % heads == 0 and k_rows % (q_rows // heads) == 0
        if not is_whole or (kv_heads and q_rows * kv_heads != k_rows * heads):
            raise self.fault(
                f"`layers.0.self_attn.q_proj.weight` has {q_rows} rows for {heads} heads (`num_attention_heads`), and "
                f"`layers.0.self_attn.k_proj.weight` has {k_rows} for {kv_heads} (`num_key_value_heads`)"
            )
        head_dim = q_rows // heads
        return {"num_attention_heads": heads, "num_key_value_heads": k_rows // head_dim, "head_dim": head_dim}

    def _vocab_size(self) -> int:
        """Returns the number of tokens: of an own embedding or of the mask over all tokens, where there is one."""
        embedding, mask = self.shapes.get("embed_tokens.weight", ()), self.shapes.get("t2d", ())
        shown = embedding[:1] or (mask if len(mask) == 1 else ())
        size: int | None = shown[0] if shown else self.flags.get("vocab_size")
        if size is None:
            raise self.fault("it gives no `vocab_size`")
        return size

    def _known_rope(self) -> dict[str, Any]:
        """Returns the rotary embedding, if its type and its fields are known, and it has those that it needs."""
        idle = (None, False, _NEUTRAL["partial_rotary_factor"])
        unknown = [name for name in self.rope.keys() - _ROPE_FIELDS if self.rope[name] not in idle]
        if unknown or self.rope["rope_type"] not in _ROPE_TYPES:
            raise self.refusal(f"a head with a rotary embedding that is not known: {self.rope}")
        if missing := [name for name in _ROPE_TYPES[self.rope["rope_type"]] if not self.rope.get(name)]:
            raise self.fault(f"it gives no `{missing[0]}` for its rotary embedding: {self.rope}")
        return self.rope

    def warn_of_copies(self, sizes: Mapping[str, Any]) -> None:
        """Logs, once, the fields that contradict what tensors say."""
        copied = [
            f"`{name}` is {self.flags[name]}, and the weights have {size}"
            for name, size in sizes.items()
            if self.flags.get(name) not in (None, size)
        ]
        if copied:
            logger.warning_once(
                f"The config of the drafter {self.name!r} contradicts its weights, which are used: "
                f"{'; '.join(copied)}. Some tools copy such fields from the target. If weights are missing, download "
                f"them again."
            )
