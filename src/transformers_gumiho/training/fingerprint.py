"""Fingerprints that tell whether cached features still belong to a tokenizer and a dataset."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


def tokenizer_fingerprints(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns fingerprints of the tokenizer and of its chat template."""
    # What the tokenizer was asked to do last is no part of it.
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return {
        "tokenizer": _digest(json.dumps(state, sort_keys=True)),
        "template": _digest(str(tokenizer.chat_template)),
    }


def rows_fingerprint(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    """Returns a fingerprint of these integer columns of all rows, in their order."""
    digest, columns = hashlib.sha256(), list(columns)
    for row in rows:
        for name in columns:
            values = np.asarray(row[name], dtype=np.int64)
            digest.update(values.size.to_bytes(8, "little") + values.tobytes())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
