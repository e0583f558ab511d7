"""Random EAGLE heads in the layouts of their tools, and what they draft, in plain PyTorch without caches."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plain_layers import EPS, FFN, HEADS, HIDDEN, KV_HEADS, PlainLayers, layer_weights
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


VOCAB, LAYERS_OF_TARGET = 40, 8
# Chosen for mistakes to show: no default of transformers, and not the target's.
THETA = 100.0
# Of the paper, for a target of eight layers: inputs of the layers 2, 4 and 5.
DEFAULT_INPUTS = (2, 4, 5)


def make_eagle_target(
    hidden_size: int = HIDDEN, kind: type[PreTrainedModel] = LlamaForCausalLM, **fields: Any
) -> PreTrainedModel:
    """Returns a random target in float64 that has different default layers for EAGLE-3."""
    torch.manual_seed(0)
    given = {"num_hidden_layers": LAYERS_OF_TARGET, "vocab_size": VOCAB, "initializer_range": 0.4}
    config = LlamaConfig(
        hidden_size=hidden_size, intermediate_size=FFN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, **{"rope_theta": 500000.0} | given | fields,
    )  # fmt: skip
    target = kind(config).double().eval()
    target.generation_config.pad_token_id = 0
    return target


@dataclass
class EagleHead(PlainLayers):
    """
    A head, and what it drafts by the formulas of EAGLE's papers.

    Attributes:
        weights: Its tensors, the first layer's called `layers.0`.
        token_ids: The tokens of the rows of its own output head; `None` for all, or for the target's head.
        flags: Of `norm_before_residual`, `norm_before_fc`, `fc_norm` and `norm_output` those that are true.
        inputs: For EAGLE-3: the layers whose inputs it reads. The number of layers stands for the last one's output.
        rope_factor: By which positions are divided.
    """

    weights: dict[str, torch.Tensor]
    is_eagle3: bool
    num_layers: int = 1
    head_dim: int = HIDDEN // HEADS
    token_ids: torch.Tensor | None = None
    flags: frozenset[str] = frozenset()
    inputs: tuple[int, ...] = DEFAULT_INPUTS
    theta: float = THETA
    rope_factor: float = 1.0
    embedding: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output_head: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def bind(self, target: PreTrainedModel) -> "EagleHead":
        """Uses what a head shares with its target, unless it has its own."""
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.output_head = self.weights["lm_head.weight"] if self.is_eagle3 else target.lm_head.weight.detach()
        return self

    def states(self, target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Returns the states `(T, H)` that go with the tokens after `ids` `(T,)`."""
        read: list[torch.Tensor] = []
        handle = target.model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0][0]))
        output = target.model(ids[None], output_hidden_states=True)
        handle.remove()
        if not self.is_eagle3:
            return output.last_hidden_state[0]
        inputs = [*(states[0] for states in output.hidden_states[:-1]), read[0]]
        parts = [inputs[number] for number in self.inputs]
        if "fc_norm" in self.flags:
            parts = [self.rms(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)]
        states = torch.cat(parts, dim=-1)
        if "norm_before_fc" in self.flags:
            states = self.rms(states, "input_norm.weight")
        return linear(states, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def features(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Returns the features `(T, H)` for tokens `(T,)` and the states before them."""
        embedded, x = self.embedding[tokens], states
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        if not self.is_eagle3:
            x = linear(torch.cat((embedded, states), -1), self.weights["fc.weight"], self.weights.get("fc.bias"))
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            inputs = x if layer == 0 else self.rms(x, prefix + "input_layernorm.weight")
            if self.is_eagle3 and layer == 0:
                normed = self.rms(states, prefix + "hidden_norm.weight")
                inputs = torch.cat((self.rms(embedded, prefix + "input_layernorm.weight"), normed), -1)
                x = normed if "norm_before_residual" in self.flags else x
            x = x + self.attention(inputs, seen, prefix + "self_attn.")
            x = x + self.feed_forward(x, prefix)
        return self.rms(x, "norm.weight") if "norm_output" in self.flags else x

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        if self.is_eagle3 and "norm_output" not in self.flags:
            features = self.rms(features, "norm.weight")
        return linear(features, self.output_head)

    def ids_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.token_ids is None else self.token_ids[rows]

    def chain(self, tokens: torch.Tensor, states: torch.Tensor, depth: int) -> tuple[list[int], torch.Tensor]:
        """Returns the most likely tokens, each drafted after the ones before it, and their logits `(depth, K)`."""
        chain, logits = [], []
        for _ in range(depth):
            feature = self.features(tokens, states)[-1:]
            logits.append(self.logits(feature)[0])
            token = self.ids_of(logits[-1].argmax())
            chain.append(int(token))
            tokens, states = torch.cat((tokens, token[None])), torch.cat((states, feature))
        return chain, torch.stack(logits)

    def tree(
        self, tokens: torch.Tensor, states: torch.Tensor, top_k: int, depth: int, num_nodes: int
    ) -> set[tuple[int, ...]]:
        """Returns the paths of EAGLE-2's tree below the last of `tokens`."""
        beam = [((), 0.0, tokens, states)]
        candidates: list[tuple[tuple[int, ...], float]] = []
        for _ in range(depth):
            level = []
            for path, score, before, seen in beam:
                feature = self.features(before, seen)[-1:]
                best = self.logits(feature)[0].log_softmax(-1).topk(top_k)
                for row, log_prob in zip(best.indices, best.values.tolist(), strict=True):
                    token = self.ids_of(row)
                    longer = torch.cat((before, token[None])), torch.cat((seen, feature))
                    level.append(((*path, int(token)), score + log_prob, *longer))
            candidates += [(path, score) for path, score, _, _ in level]
            beam = sorted(level, key=lambda node: -node[1])[:top_k]
        return {path for path, _ in sorted(candidates, key=lambda node: -node[1])[:num_nodes]}


def make_head(
    is_eagle3: bool,
    num_layers: int = 1,
    head_dim: int = HIDDEN // HEADS,
    flags: tuple[str, ...] = (),
    draft_vocab_size: int | None = None,
    own_embedding: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    fc_bias: bool = False,
    target_hidden_size: int = HIDDEN,
    inputs: tuple[int, ...] = DEFAULT_INPUTS,
    theta: float = THETA,
    rope_factor: float = 1.0,
    num_heads: int = HEADS,
) -> EagleHead:
    """Returns a random head in float64."""
    generator = torch.Generator().manual_seed(1)

    def new(*shape: int, around: float = 0.0, std: float = 0.3) -> torch.Tensor:
        return around + std * torch.randn(shape, generator=generator, dtype=torch.float64)

    width = len(inputs) * target_hidden_size if is_eagle3 else 2 * HIDDEN
    # With a small `fc`, what is drafted follows the tokens more than the target's states.
    weights = {"fc.weight": new(HIDDEN, width, std=0.03 if is_eagle3 else 0.3)}
    if fc_bias:
        weights["fc.bias"] = new(HIDDEN)
    norms = {"norm.weight": HIDDEN} if is_eagle3 else {}
    norms |= {"input_norm.weight": width} if "norm_before_fc" in flags else {}
    norms |= {f"fc_norm.{i}.weight": target_hidden_size for i in range(len(inputs))} if "fc_norm" in flags else {}
    for layer in range(num_layers):
        prefix, is_first = f"layers.{layer}.", layer == 0
        columns = 2 * HIDDEN if is_eagle3 and is_first else HIDDEN
        weights |= layer_weights(new, prefix, head_dim, columns, num_heads, qkv_bias)
        norms[prefix + "post_attention_layernorm.weight"] = HIDDEN
        if is_eagle3 or not is_first:
            norms[prefix + "input_layernorm.weight"] = HIDDEN
        if is_eagle3 and is_first:
            norms[prefix + "hidden_norm.weight"] = HIDDEN
        if qk_norm:
            norms |= {f"{prefix}self_attn.{name}_norm.weight": head_dim for name in "qk"}
    weights |= {name: new(size, around=1.0) for name, size in norms.items()}
    token_ids = None
    if is_eagle3:
        weights["lm_head.weight"] = new(draft_vocab_size or VOCAB, HIDDEN, std=1.0)
    if draft_vocab_size is not None:
        token_ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab_size].sort().values
        weights["d2t"] = token_ids - torch.arange(draft_vocab_size)
        weights["t2d"] = torch.isin(torch.arange(VOCAB), token_ids)
    if own_embedding:
        weights["embed_tokens.weight"] = new(VOCAB, HIDDEN, std=1.0)
    return EagleHead(
        weights, is_eagle3, num_layers, head_dim, token_ids, frozenset(flags), inputs, theta, rope_factor
    )  # fmt: skip


def llama_fields(head: EagleHead) -> dict[str, Any]:
    """Returns the fields of a head's layers, as most tools write them."""
    num_heads = len(head.weights["layers.0.self_attn.q_proj.weight"]) // head.head_dim
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_attention_heads": num_heads, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": head.num_layers, "rms_norm_eps": EPS, "rope_theta": head.theta, "vocab_size": VOCAB,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "torch_dtype": "float64",
    }  # fmt: skip


def write_head(
    folder: Path, head: EagleHead, fields: dict[str, Any], prefix: str = "", midlayer: bool = False, form: str = "bin"
) -> Path:
    """Writes a head with a config, and with the names of tensors that a tool gives them."""
    names = {name: name.replace("layers.0.", "midlayer.") if midlayer else name for name in head.weights}
    weights = {prefix + names[name]: tensor for name, tensor in head.weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def publish(folder: Path, drafter: Any, dtype: torch.dtype) -> Path:
    """Writes a head as it is published: with a Llama's config, and without an embedding."""
    config, llama = drafter.config, drafter.config.model.to_dict()
    names = ("draft_vocab_size", "norm_output", "fc_norm")
    fields = llama | {"architectures": ["LlamaForCausalLM"], "torch_dtype": str(dtype).removeprefix("torch.")}
    fields |= {name: value for name in names if (value := getattr(config, name))} | {"dtype": None}
    if config.is_eagle3 and config.target_layer_ids is not None:
        fields["eagle_aux_hidden_state_layer_ids"] = [number + 1 for number in config.target_layer_ids]
    weights = {name: tensor for name, tensor in drafter.to(dtype).state_dict().items() if "embed" not in name}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder
