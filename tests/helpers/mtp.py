"""
Tiny random targets whose checkpoints have MTP layers under the published names, and what these layers draft: plain
PyTorch on the published tensors, without a cache, a tree mask or a class of transformers.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_configs import small_config
from torch.nn.functional import linear, relu, silu
from transformers import AutoModelForCausalLM, PreTrainedModel


# No norm of a layer has this epsilon by default. Those within MLA keep theirs.
EPS, EPS_OF_MLA = 1e-2, 1e-6
WINDOW = 5
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """
    How a type of targets has its MTP layer.

    Attributes:
        names: The names before tensors of the norm of the embedding, of that of the state, of the product, of the norm
            after the layer (`None` without one), and of the layer. `N` is the number of the target's layers.
        attention, mlp: Layers of the target with the shapes of the MTP layer's attention and of the rest of it.
        attend: Its attention.
        reads_normed, feeds_normed: Whether it reads the target's states, and its own, after the final norm.
        plus_one: Whether norms multiply by `1 + weight`.
        fields: Fields of the target's config.
        renamed: Names in the layer that are not those of the target's layers.
        model_type: Its type, where that is not the family's name.
    """

    names: tuple[str, str, str, str | None, str]
    attention: int
    mlp: int
    attend: Callable[..., torch.Tensor]
    reads_normed: bool = True
    feeds_normed: bool = True
    plus_one: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    model_type: str | None = None


def norm(states: torch.Tensor, weight: torch.Tensor, eps: float = EPS, plus_one: bool = False) -> torch.Tensor:
    scaled = states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return scaled * (weight + 1 if plus_one else weight)


def rotated(heads: torch.Tensor, theta: float, width: int, is_interleaved: bool) -> torch.Tensor:
    """Returns `(heads, T, D)` with rotary positions in the first `width` numbers."""
    angles = torch.arange(heads.shape[1])[:, None] / theta ** (torch.arange(0, width, 2) / width)
    turned, rest = heads[..., :width], heads[..., width:]
    if is_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    first, second = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    turned = torch.stack((first, second), -1).flatten(-2) if is_interleaved else torch.cat((first, second), -1)
    return torch.cat((turned, rest), dim=-1)


def softmax_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `(T, heads * D)` for heads `(heads, T, D)`, of which each group of queries has keys and values."""
    groups, length = len(queries) // len(keys), queries.shape[1]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = queries @ keys.mT / queries.shape[-1] ** 0.5
    ahead = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (ahead < 0) | (ahead >= (window or length))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return (weights @ values).transpose(0, 1).flatten(1)


def grouped_attention(kind: str = "full_attention", interleaved: bool = False, rotary: bool = True) -> Any:
    """Returns attention with groups of queries, and whatever its tensors show."""

    def attend(states: torch.Tensor, weights: Weights, config: Any, family: Family) -> torch.Tensor:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        value_width = getattr(config, "v_head_dim", None) or width

        def heads(name: str, size: int) -> torch.Tensor:
            made = linear(states, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
            made = made.unflatten(-1, (-1, size)).transpose(0, 1)
            return made

        gated = weights["q_proj.weight"].shape[0] == 2 * config.num_attention_heads * width
        queries, gate = heads("q_proj", 2 * width if gated else width), None
        if gated:
            queries, gate = queries.chunk(2, dim=-1)
        keys, values = heads("k_proj", width), heads("v_proj", value_width)
        if "q_norm.weight" in weights:
            queries = norm(queries, weights["q_norm.weight"], plus_one=family.plus_one)
            keys = norm(keys, weights["k_norm.weight"], plus_one=family.plus_one)
        if rotary:
            rope = config.rope_parameters.get(kind, config.rope_parameters)
            turned = int(width * rope.get("partial_rotary_factor", 1.0))
            queries, keys = (rotated(part, rope["rope_theta"], turned, interleaved) for part in (queries, keys))
        values = values * (getattr(config, "attention_value_scale", None) or 1)
        window = config.sliding_window if kind == "sliding_attention" else None
        out = softmax_attention(queries, keys, values, window, weights.get("attention_sink_bias"))
        if gate is not None:
            out = out * gate.transpose(0, 1).flatten(1).sigmoid()
        return linear(out, weights["o_proj.weight"])

    return attend


def latent_attention(states: torch.Tensor, weights: Weights, config: Any, family: Family) -> torch.Tensor:
    """Multi-head latent attention, whose rotary part is interleaved."""
    nope, rope, count = config.qk_nope_head_dim, config.qk_rope_head_dim, config.num_attention_heads
    low = norm(linear(states, weights["q_a_proj.weight"]), weights["q_a_layernorm.weight"], EPS_OF_MLA)
    queries = linear(low, weights["q_b_proj.weight"]).unflatten(-1, (count, nope + rope)).transpose(0, 1)
    low, turned = linear(states, weights["kv_a_proj_with_mqa.weight"]).split((config.kv_lora_rank, rope), dim=-1)
    low = norm(low, weights["kv_a_layernorm.weight"], EPS_OF_MLA)
    both = linear(low, weights["kv_b_proj.weight"]).unflatten(-1, (count, -1)).transpose(0, 1)
    theta = config.rope_parameters["rope_theta"]
    turned = rotated(turned[None], theta, rope, True).expand(count, -1, -1)
    keys = torch.cat((both[..., :nope], turned), dim=-1)
    queries = torch.cat((queries[..., :nope], rotated(queries[..., nope:], theta, rope, True)), dim=-1)
    return linear(softmax_attention(queries, keys, both[..., nope:], None), weights["o_proj.weight"])


def feed_forward(states: torch.Tensor, weights: Weights, prefix: str = "") -> torch.Tensor:
    up = linear(states, weights[f"{prefix}up_proj.weight"])
    if f"{prefix}gate_proj.weight" in weights:
        hidden = silu(linear(states, weights[f"{prefix}gate_proj.weight"])) * up
    else:
        hidden = relu(up).square()
    return linear(hidden, weights[f"{prefix}down_proj.weight"])


def experts(states: torch.Tensor, weights: Weights, config: Any) -> torch.Tensor:
    """Runs the experts of each token one after the other, or the only feed-forward network."""
    if "down_proj.weight" in weights:
        return feed_forward(states, weights)
    logits = linear(states, weights.get("gate.weight", weights.get("router.gate.weight")))
    bias = next((weights[name] for name in ("gate.e_score_correction_bias", "expert_bias") if name in weights), None)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    chosen = (scores if bias is None else scores + bias).topk(config.num_experts_per_tok).indices
    shares = scores.gather(-1, chosen)
    if getattr(config, "norm_topk_prob", True):
        shares = shares / shares.sum(-1, keepdim=True)
    factors = (getattr(config, name, None) for name in ("routed_scaling_factor", "router_scaling_factor"))
    shares = shares * next(filter(None, factors), 1)
    rows = []
    for state, numbers, factors in zip(states, chosen.tolist(), shares, strict=True):
        parts = [feed_forward(state, weights, f"experts.{number}.") for number in numbers]
        rows.append((torch.stack(parts) * factors[:, None]).sum(0))
    made = torch.stack(rows)
    for name in ("shared_experts.", "shared_mlp."):
        if f"{name}up_proj.weight" in weights:
            made = made + feed_forward(states, weights, name)
    if "shared_expert_gate.weight" in weights:
        shared = feed_forward(states, weights, "shared_expert.")
        made = made + linear(states, weights["shared_expert_gate.weight"]).sigmoid() * shared
    return made


_AFTER = tuple(f"model.layers.N.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""))
_AFTER_FINAL = (*_AFTER[:3], "model.layers.N.final_layernorm", _AFTER[4])
_BESIDE = tuple(f"mtp.{n}" for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."))
_LISTED = tuple(f"model.mtp.layers.0.{n}" for n in ("enorm", "hnorm", "eh_proj", "final_layernorm", ""))
_PARTS = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None, "model.mtp_block.0.")
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
_QWEN = {"plus_one": True, "fields": _HYBRID}
_SLIDING = grouped_attention("sliding_attention")
_MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": WINDOW,
}
FAMILIES = {
    "glm4_moe": Family(_AFTER, 1, 1, grouped_attention(), fields={"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v3": Family(_AFTER, 1, 1, latent_attention),
    "glm4_moe_lite": Family(_AFTER, 1, 1, latent_attention),
    "hy_v3": Family(_AFTER_FINAL, 1, 1, grouped_attention()),
    "qwen3_next": Family(_BESIDE, 1, 1, grouped_attention(), **_QWEN),
    "qwen3_5_text": Family(_BESIDE, 1, 1, grouped_attention(), **_QWEN),
    "qwen3_5_moe_text": Family(_BESIDE, 1, 1, grouped_attention(), **_QWEN),
    "mellum": Family(_BESIDE, 0, 1, _SLIDING, fields={"num_mtp_layers": 1} | _MIXED),
    "exaone_moe": Family(_BESIDE, 0, 0, _SLIDING, fields=_MIXED),
    # Full layers of the target have no positions, and this one has.
    "exaone_moe_full": Family(
        _BESIDE, 0, 0, grouped_attention(), fields=_MIXED | {"mtp_layer_types": ["full_attention"]},
        model_type="exaone_moe",
    ),
    "mimo_v2_flash": Family(
        _LISTED, 0, 0, _SLIDING, False, False, fields=_MIXED,
        renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
    ),
    "ernie4_5_moe": Family(
        _PARTS, 0, 0, grouped_attention(interleaved=True),
        fields={"moe_layer_start_index": 1, "tie_word_embeddings": False},
    ),
}  # fmt: skip


@dataclass
class MtpTarget:
    """
    A target with an MTP layer.

    Attributes:
        folder: Its checkpoint.
        family: How it has its MTP layer.
        model: The target, in float32.
        tensors: All that is in the checkpoint.
        added: The names of those of the MTP layer.
    """

    folder: Path
    family: Family
    model: PreTrainedModel
    tensors: Weights
    added: list[str]

    def weights(self, prefix: str) -> Weights:
        """Returns the tensors of a part by what follows the prefix."""
        return {name.removeprefix(prefix): self.tensors[name] for name in self.added if name.startswith(prefix)}

    @property
    def prefixes(self) -> list[str | None]:
        count = str(self.model.config.get_text_config().num_hidden_layers)
        return [None if name is None else name.replace("N", count, 1) for name in self.family.names]

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the states `(T, H)` that the layer reads of the target."""
        found: list[torch.Tensor] = []
        final_norm = self.model.get_decoder().norm
        handle = final_norm.register_forward_hook(
            lambda module, inputs, output: found.append(output if self.family.reads_normed else inputs[0])
        )
        with torch.no_grad():
            self.model(torch.tensor([list(ids)]))
        handle.remove()
        return found[0][0]

    @torch.no_grad()
    def logits(self, ids: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """Returns the logits of the token after a text and a path, of which the layer reads its own states."""
        embedding_norm, state_norm, product, final_norm, layer = self.prefixes
        config, plus_one = self.model.config.get_text_config(), self.family.plus_one
        tokens, states = [*ids[1:], *path], self.read(ids[: len(ids) - 1])
        rows = self.model.get_input_embeddings().weight[torch.tensor(tokens)]
        block, length = self.weights(layer), len(ids) - 1
        for end in range(length, len(tokens) + 1):
            pair = (
                norm(rows[:end], self.tensors[f"{embedding_norm}.weight"], plus_one=plus_one),
                norm(states[:end], self.tensors[f"{state_norm}.weight"], plus_one=plus_one),
            )
            hidden = linear(torch.cat(pair, dim=-1), self.tensors[f"{product}.weight"])
            own = norm(hidden, block["input_layernorm.weight"], plus_one=plus_one)
            attention = {n.removeprefix("self_attn."): t for n, t in block.items() if n.startswith("self_attn.")}
            hidden = hidden + self.family.attend(own, attention, config, self.family)
            middle = self.family.renamed.get("post_attention_layernorm", "post_attention_layernorm")
            own = norm(hidden, block[f"{middle}.weight"], plus_one=plus_one)
            rest = {name.removeprefix("mlp."): tensor for name, tensor in block.items() if name.startswith("mlp.")}
            hidden = hidden + experts(own, rest, config)
            scored = hidden
            if final_norm is not None:
                scored = norm(hidden, self.tensors[f"{final_norm}.weight"], plus_one=plus_one)
            states = torch.cat((states, (scored if self.family.feeds_normed else hidden)[-1:]))
        return linear(scored[-1], self.model.get_output_embeddings().weight)


def make_mtp_target(model_type: str, folder: Path, **fields: Any) -> MtpTarget:
    """Makes a random target with an MTP layer, and writes it."""
    family, size = FAMILIES[model_type], {"num_hidden_layers": 2, "rms_norm_eps": EPS}
    torch.manual_seed(0)
    config = small_config(family.model_type or model_type, **size | family.fields | fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases are not trivial
            torch.nn.init.normal_(parameter, 0.0 if family.plus_one or "bias" in name else 1.0, 0.2)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    target = MtpTarget(folder, family, model, tensors, [])
    add_layer(target)
    save_file(target.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target.model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    target.model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return target


def add_layer(target: MtpTarget) -> None:
    """Adds a random MTP layer, whose tensors have the shapes of those in the target's layers."""
    embedding_norm, state_norm, product, final_norm, layer = target.prefixes
    family, width = target.family, target.model.config.get_text_config().hidden_size
    made: Weights = {f"{product}.weight": torch.randn(width, 2 * width) * 0.3}
    for name in filter(None, (embedding_norm, state_norm, final_norm)):
        made[f"{name}.weight"] = torch.randn(width) * 0.2 + (not family.plus_one)
    for name, tensor in target.tensors.items():
        for number, is_wanted in ((family.attention, True), (family.mlp, False)):
            prefix = f"model.layers.{number}."
            tail = name.removeprefix(prefix)
            if name.startswith(prefix) and ("self_attn" in tail) == is_wanted:
                first, dot, rest = tail.partition(".")
                is_norm, size = "norm" in tail, 0.2 if tensor.ndim == 1 else 0.4
                size = 2.0 if "sink" in tail else size  # or few tokens would attend to them
                new = torch.randn(tensor.shape) * size + (is_norm and not family.plus_one)
                made[f"{layer}{family.renamed.get(first, first)}{dot}{rest}"] = new.to(tensor.dtype)
    target.tensors |= made
    target.added[:] = made


def write_config(folder: Path, **fields: Any) -> None:
    """Changes fields of a `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
