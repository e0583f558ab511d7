"""The text of the demo pair: the Python standard library, with some files held out.

The SHA-256 of a file's path (relative to the library, `/`-separated) decides whether it is held out. So every machine
and every Python version agrees on the files that a model trained here has never seen.
"""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"


def is_held_out(relative_path: str, one_in: int = 20) -> bool:
    """Whether the file at `relative_path` belongs to the held-out one in `one_in`."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def read_library(root: Path | None = None) -> dict[str, str]:
    """Returns the source text of every module of the standard library under `root`, keyed by relative path.

    Installed packages are left out, and so are the test files that are deliberately not UTF-8.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        try:
            texts[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    if not texts:
        raise FileNotFoundError(f"No Python source found under {root}; pass the folder of a standard library.")
    return texts


def prompt_category(relative_path: str, text: str) -> str:
    """Returns what kind of source a piece of the file at `relative_path` is, to compare like with like."""
    if {"test", "tests", "idle_test"} & set(relative_path.split("/")):
        return "test assertions" if "assert" in text else "test code"
    return "library functions" if "def " in text else "library statements"


def train_tokenizer(texts: list[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, which can encode any text, on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Returns the texts as one stream of token ids `[num_tokens]`, each preceded by the end-of-text token."""
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        stream.append(tokenizer.eos_token_id)
        stream.extend(encoding.ids)
    return np.asarray(stream, dtype=np.uint16 if len(tokenizer) <= 2**16 else np.int32)


class TokenWindows(torch.utils.data.Dataset):
    """Rows of `[sequence_length]` token ids: consecutive windows of a stream, or the rows of a matrix."""

    def __init__(self, tokens: np.ndarray, sequence_length: int):
        num_rows = tokens.size // sequence_length
        self.rows = tokens.reshape(-1)[: num_rows * sequence_length].reshape(num_rows, sequence_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        input_ids = torch.from_numpy(self.rows[index].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}
