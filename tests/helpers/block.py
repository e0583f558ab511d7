"""Random block drafters in the layouts of their tools, and what they draft, in plain PyTorch without caches."""

import heapq
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from eagle import make_eagle_target
from plain_layers import EPS, FFN, HEADS, HIDDEN, KV_HEADS, PlainLayers, layer_weights
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import LlamaForCausalLM, PreTrainedModel

from transformers_gumiho import GumihoConfig, GumihoModel


# As many tokens as a depth has candidates, so that terms for pairs of tokens are exact.
VOCAB = 30
LAYERS_OF_TARGET, MASK, HEAD_DIM = 7, 29, 10
# Chosen for mistakes to show: no default of transformers, and not the target's.
THETA = 50.0


def make_block_target(kind: type[PreTrainedModel] = LlamaForCausalLM, **fields: Any) -> PreTrainedModel:
    """Returns a random target in float64."""
    return make_eagle_target(kind=kind, **{"vocab_size": VOCAB, "num_hidden_layers": LAYERS_OF_TARGET} | fields)


@dataclass
class BlockDrafter(PlainLayers):
    """
    A block drafter, and what it drafts by the formulas of DFlash and DSpark.

    Attributes:
        weights: Its tensors by plain names.
        block_size: Queries of a block.
        from_anchor: Whether the first query predicts the first draft.
        causal, windows: Of each layer.
        layers: The layers of the target whose outputs it reads.
        token_ids: The tokens of the rows of its own output head; `None` for all of them.
    """

    weights: dict[str, torch.Tensor]
    block_size: int
    from_anchor: bool
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    layers: tuple[int, ...] = (1, 3, 5)
    token_ids: torch.Tensor | None = None
    embedding: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output_head: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    head_dim: int = HEAD_DIM
    theta: float = THETA

    @property
    def depth(self) -> int:
        return self.block_size - (not self.from_anchor)

    @property
    def has_markov_head(self) -> bool:
        return "markov_head.markov_w1.weight" in self.weights

    def bind(self, target: PreTrainedModel) -> "BlockDrafter":
        """Uses what a drafter shares with its target, unless it has its own."""
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.output_head = self.weights.get("lm_head.weight", target.lm_head.weight.detach())
        return self

    def context(self, target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Returns one state `(T, H)` for each of the tokens `(T,)` that the target has read."""
        outputs = target.model(ids[None], output_hidden_states=True).hidden_states[1:]
        states = torch.cat([outputs[number][0] for number in self.layers], dim=-1)
        return self.rms(linear(states, self.weights["fc.weight"]), "hidden_norm.weight")

    def block_logits(self, context: torch.Tensor, root: int, depth: int | None = None) -> torch.Tensor:
        """Returns the logits `(D, K)` of the tokens after `root`, which follows the context; no Markov terms."""
        depth = self.depth if depth is None else depth
        num_queries = depth + (not self.from_anchor)
        x = self.embedding[torch.tensor([root] + [MASK] * (num_queries - 1))]
        positions = torch.arange(len(context) + num_queries)
        distance = positions[len(context) :, None] - positions
        for layer, (is_causal, window) in enumerate(zip(self.causal, self.windows, strict=True)):
            prefix = f"layers.{layer}."
            seen = torch.ones_like(distance, dtype=torch.bool)
            if is_causal:
                seen &= distance >= 0
            if window is not None:
                seen &= distance.abs() < window
            inputs = torch.cat((context, self.rms(x, prefix + "input_layernorm.weight")))
            x = x + self.attention(inputs, seen, prefix + "self_attn.")
            x = x + self.feed_forward(x, prefix)
        return linear(self.rms(x, "norm.weight")[-depth:], self.output_head)

    def log_probs(self, logits: torch.Tensor, depth: int, above: int) -> torch.Tensor:
        """Returns the log-probabilities `(K,)` of the tokens at a depth, counted from 0, under a token above."""
        if self.has_markov_head:
            w1, w2 = (self.weights[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
            return (logits[depth] + w2 @ w1[above]).log_softmax(-1)
        return logits[depth].log_softmax(-1)

    def tree(
        self, context: torch.Tensor, root: int, num_nodes: int, depth: int | None = None
    ) -> dict[tuple[int, ...], float]:
        """Returns the best paths of all, with their scores. A longer path is never better than its beginning."""
        logits = self.block_logits(context, root, depth)
        found: dict[tuple[int, ...], float] = {}
        waiting: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        while len(found) <= num_nodes:
            negative, path = heapq.heappop(waiting)
            found[path] = -negative
            if len(path) < len(logits):
                log_probs = self.log_probs(logits, len(path), path[-1] if path else root)
                for row, log_prob in enumerate(log_probs.tolist()):
                    token = row if self.token_ids is None else int(self.token_ids[row])
                    heapq.heappush(waiting, (negative - log_prob, (*path, token)))
        return {path: score for path, score in found.items() if path}

    def chain(self, context: torch.Tensor, root: int) -> tuple[int, ...]:
        """Returns the most likely token of each depth under the one before it."""
        logits, path = self.block_logits(context, root), [root]
        for depth in range(self.depth):
            row = int(self.log_probs(logits, depth, path[-1]).argmax())
            path.append(row if self.token_ids is None else int(self.token_ids[row]))
        return tuple(path[1:])


def make_block_drafter(
    block_size: int = 5,
    from_anchor: bool = False,
    causal: tuple[bool, ...] = (False, False),
    windows: tuple[int | None, ...] = (None, None),
    layers: tuple[int, ...] = (1, 3, 5),
    markov_rank: int = 0,
    confidence: bool = False,
    draft_vocab_size: int | None = None,
    own_head: bool = False,
    own_embedding: bool = False,
    qkv_bias: bool = False,
) -> BlockDrafter:
    """Returns a random drafter in float64."""
    generator = torch.Generator().manual_seed(1)

    def new(*shape: int, around: float = 0.0, std: float = 0.3) -> torch.Tensor:
        return around + std * torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {"fc.weight": new(HIDDEN, len(layers) * HIDDEN)}
    norms = {"norm.weight": HIDDEN, "hidden_norm.weight": HIDDEN}
    for layer in range(len(causal)):
        prefix = f"layers.{layer}."
        weights |= layer_weights(new, prefix, HEAD_DIM, qkv_bias=qkv_bias)
        norms |= {f"{prefix}{name}_layernorm.weight": HIDDEN for name in ("input", "post_attention")}
        norms |= {f"{prefix}self_attn.{name}_norm.weight": HEAD_DIM for name in "qk"}
    weights |= {name: new(size, around=1.0) for name, size in norms.items()}
    num_scored, token_ids = draft_vocab_size or VOCAB, None
    if own_head or draft_vocab_size:
        weights["lm_head.weight"] = new(num_scored, HIDDEN)
    if draft_vocab_size is not None:
        token_ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab_size].sort().values
        weights["d2t"] = token_ids - torch.arange(draft_vocab_size)
        weights["t2d"] = torch.isin(torch.arange(VOCAB), token_ids)
    if own_embedding:
        weights["embed_tokens.weight"] = new(VOCAB, HIDDEN, std=0.5)
    if markov_rank:
        weights["markov_head.markov_w1.weight"] = new(VOCAB, markov_rank, std=1.0)
        weights["markov_head.markov_w2.weight"] = new(num_scored, markov_rank, std=0.5)
    if confidence:
        weights |= {"confidence_head.proj.weight": new(1, HIDDEN + markov_rank), "confidence_head.proj.bias": new(1)}
    return BlockDrafter(weights, block_size, from_anchor, causal, windows, layers, token_ids)


def layer_fields(drafter: BlockDrafter) -> dict[str, Any]:
    """Returns the fields of a drafter's layers, as most tools write them."""
    kinds = ["full_attention" if window is None else "sliding_attention" for window in drafter.windows]
    window = next((window for window in drafter.windows if window is not None), None)
    return {
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
        "num_hidden_layers": len(kinds), "rope_theta": THETA, "vocab_size": VOCAB, "max_position_embeddings": 256,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "tie_word_embeddings": False, "layer_types": kinds, "sliding_window": window,
        "use_sliding_window": window is not None, "max_window_layers": len(kinds), "torch_dtype": "float64",
    }  # fmt: skip


def zlab(drafter: BlockDrafter, **own: Any) -> dict[str, Any]:
    """The layout of z-lab/dflash, in which JetSpec writes, too; the block's size is at the top."""
    given = {"mask_token_id": MASK, "target_layer_ids": list(drafter.layers)}
    return layer_fields(drafter) | {
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": drafter.block_size, "num_target_layers": LAYERS_OF_TARGET, "dflash_config": given | own,
    }  # fmt: skip


def newer_zlab(drafter: BlockDrafter, **top: Any) -> dict[str, Any]:
    """That of its heads since Qwen3.5: all of a block's fields in one object, and the newer fields of transformers."""
    fields = zlab(drafter, block_size=drafter.block_size)
    rope = {"rope_theta": fields.pop("rope_theta"), "rope_type": "default"}
    del fields["block_size"]
    return fields | {"rope_parameters": rope} | top


def deepspec(drafter: BlockDrafter) -> dict[str, Any]:
    """The layout of DeepSpec, whose DFlash drafters are of this class, too, with a rank of 0."""
    rank = drafter.weights.get("markov_head.markov_w1.weight", torch.empty(0, 0)).shape[1]
    return layer_fields(drafter) | {
        "architectures": ["Qwen3DSparkModel"], "block_size": drafter.block_size, "mask_token_id": MASK,
        "target_layer_ids": list(drafter.layers), "num_target_layers": LAYERS_OF_TARGET, "num_anchors": 512,
        "markov_rank": rank, "enable_confidence_head": "confidence_head.proj.weight" in drafter.weights,
        "confidence_head_with_markov": True, "markov_head_type": "vanilla",
    }  # fmt: skip


def specforge(drafter: BlockDrafter) -> dict[str, Any]:
    """The layout of SpecForge's DSpark drafters."""
    fields, own = deepspec(drafter), {"projector_type": "dspark", "attention_mode": "gqa"}
    names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
    own |= {name: fields.pop(name) for name in names}
    return fields | {"architectures": ["DSparkDraftModel"], "dflash_config": own, "rope_scaling": None}


def speculators(drafter: BlockDrafter, method: str = "DFlash", **fields: Any) -> dict[str, Any]:
    """The layout of speculators, which counts the inputs of layers. `fields` are those that came later, and others."""
    layer = layer_fields(drafter)
    rank = drafter.weights.get("markov_head.markov_w1.weight", torch.empty(0, 0)).shape[1]
    markov = {"markov_rank": rank, "markov_head_type": "vanilla"} if method == "DSpark" else {}
    methods = [{"proposal_type": "greedy", "speculative_tokens": drafter.depth}]
    return {
        "architectures": [f"{method}Speculator"], "speculators_model_type": method.lower(),
        "speculators_version": "0.9.0", "speculators_config": {"algorithm": method, "proposal_methods": methods},
        "transformer_layer_config": layer, "block_size": drafter.block_size, "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [number + 1 for number in drafter.layers], "target_hidden_size": None,
        "draft_vocab_size": VOCAB if drafter.token_ids is None else len(drafter.token_ids), "dtype": "float64",
    } | markov | fields  # fmt: skip


def write_block_drafter(folder: Path, drafter: BlockDrafter, fields: dict[str, Any], prefix: str = "") -> Path:
    """Writes a drafter with a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    weights = {prefix + name: tensor.contiguous() for name, tensor in drafter.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_block_model(target: PreTrainedModel, **fields: Any) -> GumihoModel:
    """Returns a random drafter of one layer, with windows and a Markov head, for any target. It never pauses."""
    text_config = target.config.get_text_config()
    hidden_size, vocab_size = text_config.hidden_size, text_config.vocab_size
    llama = {
        "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocab_size,
    }  # fmt: skip
    given = {
        "serial_head": "block", "num_serial_tokens": 0, "num_parallel_heads": 0, "block_size": 5, "mask_token_id": 1,
        "attention_windows": [6], "attention_causal": [True], "target_layer_ids": [0, 1], "qk_norm": True,
        "has_embedding": False, "markov_rank": 4, "gumiho_fc_bias": False,
    }  # fmt: skip
    torch.manual_seed(0)
    drafter = GumihoModel(GumihoConfig(model=llama, **given | fields)).to(target.dtype).eval()
    drafter.generation_config.update(num_assistant_tokens=12, break_even=0.01)
    return drafter
