"""Fingerprints, by which cached features are matched with a tokenizer and a dataset."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


def tokenizer_fingerprints(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns fingerprints of the tokenizer and of its chat template."""
    if tokenizer.is_fast:  # what the tokenizer was asked to do last is no part of it
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    else:
        state = tokenizer.get_vocab()
    texts = {"tokenizer": json.dumps(state, sort_keys=True), "template": str(tokenizer.chat_template)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def rows_fingerprint(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Returns a fingerprint of these integer columns of all rows, in their order."""
    digest, columns = hashlib.sha256(), list(columns)
    for row in rows:
        for name in columns:
            values = np.asarray(row[name], dtype=np.int64)
            digest.update(values.size.to_bytes(8, "little") + values.tobytes())
    return digest.hexdigest()
