"""Checkpoints of random weights in the forms in which drafters are released."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from vllm_reader import expected_shapes

from transformers_gumiho import GumihoConfig


HIDDEN_SIZE, VOCAB_SIZE = 32, 50


def reference_shapes(hidden: int, ffn: int, kv: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a released checkpoint, by the names and shapes of the reference."""
    heads = {"head_dim": 1, "num_attention_heads": hidden, "num_key_value_heads": kv}
    biases = {"gumiho_fc_bias": True, "attention_bias": False, "mlp_bias": False}
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab, "num_hidden_layers": 2}
    return expected_shapes(sizes | heads | biases, num_speculative_tokens=7)


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


def write_weights(folder: Path, weights: dict[str, Any], form: str = "bin", variant: str = "") -> list[Path]:
    """Writes a checkpoint's tensors in one of the forms of weight files, and returns the files."""
    suffix, *options = form.split("_")
    stem = {"bin": "pytorch_model", "safetensors": "model"}[suffix]
    names, index = list(weights), folder / f"{stem}.{suffix}.index.json"
    shards = {folder / f"{stem}{variant}.{suffix}": names}
    if "sharded" in options:
        shards = {folder / f"{stem}-1-of-2.{suffix}": names[:9], folder / f"{stem}-2-of-2.{suffix}": names[9:]}
        weight_map = {name: file.name for file, held in shards.items() for name in held}
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file, held in shards.items():
        part = {name: weights[name] for name in held}
        if suffix == "safetensors":
            save_file(part, file, metadata={"format": "pt"})
        else:
            torch.save(part, file, _use_new_zipfile_serialization="legacy" not in options)
    return [*shards, *([index] if "sharded" in options else [])]


def write_checkpoint(
    folder: Path, extra: dict[str, Any] | None = None, form: str = "bin", variant: str = ""
) -> dict[str, Any]:
    """Writes a checkpoint as the reference does, with further entries, next to a config in vLLM's layout."""
    weights = make_weights() | (extra or {})
    write_weights(folder, weights, form, variant)
    small_config().save_pretrained(folder)
    return weights


def small_config(**overrides: Any) -> GumihoConfig:
    llama = LlamaConfig(
        hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    return GumihoConfig.from_target(llama, **overrides)
