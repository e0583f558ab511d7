"""Checkpoints of random weights in the forms in which drafters are released."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from transformers_gumiho import GumihoConfig


HIDDEN_SIZE, VOCAB_SIZE = 32, 50


# The tensors of a released checkpoint, by the names and shapes of the reference.
def reference_shapes(hidden: int, ffn: int, kv: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.1.input_layernorm.weight": (hidden,),
    }
    for layer in range(2):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    for head in range(5):
        for block in range(6):
            shapes[f"mlp.{head}.{block}.linear.weight"] = (hidden, hidden if block else 2 * hidden)
            shapes[f"mlp.{head}.{block}.linear.bias"] = (hidden,)
    return shapes


def write_reference_checkpoint(folder: Path, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """Writes a checkpoint as the reference does: a pickle of fp16 tensors, next to a config in vLLM's layout."""
    torch.manual_seed(1)
    weights = {name: torch.randn(shape).to(dtype) for name, shape in reference_shapes(32, 48, 16, 50).items()}
    torch.save(weights, folder / "pytorch_model.bin")
    small_config().save_pretrained(folder)
    return weights


REPO = "amd/Gumiho-llama3-8b"


# A tiny Llama, as the reference writes its configs, and around it what vLLM adds.
LLAMA_FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bias": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "vocab_size": 50,
}  # fmt: skip


VLLM_FIELDS: dict[str, Any] = {
    "architectures": ["GumihoLlamaForCausalLM"],
    "gumiho_fc_bias": True,
    "model": LLAMA_FIELDS,
    "model_type": "gumiho",
    "truncated_vocab_size": 50,
}


def make_weights(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = reference_shapes(hidden=32, ffn=48, kv=16, vocab=50)
    return {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}


def write_weights(folder: Path, weights: dict[str, torch.Tensor], form: str = "bin") -> list[Path]:
    """Writes a checkpoint's tensors in one of the forms of weight files, and returns the files."""
    if form == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return [folder / "model.safetensors"]
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
        return [folder / "pytorch_model.bin"]
    names = list(weights)
    shards = {"pytorch_model-1-of-2.bin": names[:30], "pytorch_model-2-of-2.bin": names[30:]}
    for file, held in shards.items():
        torch.save({name: weights[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return [folder / name for name in (*shards, "pytorch_model.bin.index.json")]


def small_config(**overrides: Any) -> GumihoConfig:
    llama = LlamaConfig(
        hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    return GumihoConfig.from_target(llama, **overrides)
