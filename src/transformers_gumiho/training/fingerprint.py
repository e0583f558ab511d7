"""Fingerprints that tell whether cached features still belong to a target, a tokenizer and a dataset."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Values of each weight that go into a target's fingerprint, evenly spaced.
_SAMPLES = 64
# Fields of a config that say nothing about what the target computes.
_VOLATILE = ("transformers_version", "use_cache")


@torch.no_grad()
def target_fingerprint(target: PreTrainedModel) -> str:
    """
    Returns a fingerprint of the target's architecture and weights.

    Of each parameter it reads some dozens of values: training changes them all, and reading all takes minutes. Of
    offloaded ones it reads none.
    """
    config = {name: value for name, value in target.config.to_diff_dict().items() if name not in _VOLATILE}
    adapters = getattr(target, "active_adapters", None) if hasattr(target, "peft_config") else None
    digest = hashlib.sha256(f"{type(target).__name__} {json.dumps(config, sort_keys=True, default=str)}".encode())
    digest.update(str(adapters).encode())
    for name, parameter in target.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta":
            values = parameter.detach().flatten()
            values = values[:: max(values.numel() // _SAMPLES, 1)].cpu()
            digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
