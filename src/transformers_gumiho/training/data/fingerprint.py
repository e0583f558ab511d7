"""Fingerprints of contents: of weights, tokenizers and rows. A copied or touched file has the same one."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...commands import UserFileNotFoundError, UserValueError
from ...files import damaged_files_named


# Fields of a config that do not change what the model computes.
VOLATILE = ("_name_or_path", "transformers_version", "use_cache")
_DIGITS = 16
# Values of each weight of a loaded model that are read, evenly spaced.
_NUM_VALUES = 64
# The files of a model, those of the newer format first: where they exist, the others are not read.
_CONFIGS = ["config.json", "adapter_config.json"]
_WEIGHTS = [["model*.safetensors", "adapter_model.safetensors"], ["pytorch_model*.bin", "adapter_model.bin"]]
# Bytes of a tensor that are read, in pieces that are evenly spaced. Training changes nearly all values.
_NUM_PIECES, _PIECE_BYTES = 8, 8


@torch.no_grad()
def model_fingerprint(model: PreTrainedModel) -> str:
    """
    Returns a fingerprint of a model's architecture and weights. It reads some dozens of values of each parameter:
    training changes them all, and reading all takes minutes. Offloaded parameters count by name and shape alone.
    """
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in VOLATILE}
    shown = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.sha256(f"{type(model).__name__} {shown}".encode())
    digest.update(str(adapters_of(model)).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta":
            values = parameter.detach().flatten()
            values = values[:: max(values.numel() // _NUM_VALUES, 1)].cpu()
            digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def adapters_of(model: PreTrainedModel) -> list[str]:
    """Returns which adapters of PEFT a model's layers run, have merged, or have disabled: each combination once."""
    layers = (module for module in model.modules() if "merged_adapters" in vars(module))
    return sorted({f"{layer.active_adapters} {layer.merged_adapters} {layer.disable_adapters}" for layer in layers})


def checkpoint_fingerprint(name: str | Path) -> str:
    """
    Returns a fingerprint of a model, a folder or a name on the Hub, without loading it: its config, and of each tensor
    the name, shape, dtype and some dozens of bytes. Raises `FileNotFoundError` where there are no weights.
    """
    folder, parts, tensors = Path(name), list[str](), list[Any]()
    for patterns in _WEIGHTS:
        if not Path(name).is_dir():
            folder = Path(snapshot_download(str(name), allow_patterns=[*_CONFIGS, *patterns]))
        tensors = [tensor for pattern in patterns for path in folder.glob(pattern) for tensor in _sampled(path)]
        if tensors:
            break
    else:
        raise UserFileNotFoundError(f"{str(name)!r} holds no weights: no model.safetensors and no pytorch_model.bin.")
    for path in (folder / config for config in _CONFIGS if (folder / config).exists()):
        with damaged_files_named(folder):
            config = dict(json.loads(path.read_text(encoding="utf-8")))
        parts.append(json.dumps({k: v for k, v in config.items() if k not in VOLATILE}, sort_keys=True))
        if base := config.get("base_model_name_or_path"):
            parts.append(checkpoint_fingerprint(base))
    # Sorted, as it does not matter how the tensors are spread over files.
    return _hash([*parts, *map(repr, sorted(tensors))])


def tokenizer_fingerprints(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns fingerprints of the tokenizer and of its chat template, with the arguments that it takes by default."""
    if tokenizer.is_fast:  # what the tokenizer was asked to do last is no part of it
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    else:
        state = tokenizer.get_vocab()
    kwargs = getattr(tokenizer.apply_chat_template, "keywords", "")
    texts = {"tokenizer": json.dumps(state, sort_keys=True), "template": f"{tokenizer.chat_template}{kwargs}"}
    return {name: _hash([text]) for name, text in texts.items()}


def conversations_fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns a fingerprint of rows, in their order."""
    return _hash(json.dumps(dict(row), sort_keys=True, default=str) for row in rows)


def file_fingerprint(path: str | Path) -> str:
    """Returns a fingerprint of a file's content."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while piece := file.read(2**24):
            digest.update(piece)
    return digest.hexdigest()[:_DIGITS]


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()[:_DIGITS]


def _sampled(path: Path) -> list[tuple[str, str, str, bytes]]:
    """Returns name, shape, dtype and some bytes of each tensor in a file; other formats count as one tensor."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            size = path.stat().st_size
            return [(path.name, str(size), "", _some_bytes(file, 0, size))]
        begin = 8 + int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(begin - 8))
        except (ValueError, OverflowError) as error:
            raise UserValueError(f"{str(path)!r} is damaged: {error}. Write or download it again.") from error
        header.pop("__metadata__", None)
        return [
            (name, str(of["shape"]), of["dtype"], _some_bytes(file, *(begin + at for at in of["data_offsets"])))
            for name, of in header.items()
        ]


def _some_bytes(file: BinaryIO, start: int, stop: int) -> bytes:
    found = b""
    for offset in range(start, stop, max((stop - start) // _NUM_PIECES, _PIECE_BYTES)):
        file.seek(offset)
        found += file.read(min(_PIECE_BYTES, stop - offset))
    return found
