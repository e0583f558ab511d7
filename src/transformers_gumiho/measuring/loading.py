"""Loading what a command works on."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..model.modeling_gumiho import GumihoModel
from ..target.placement import drafter_device
from ..target.requirements import check_pair


def load_pair(
    target: str, assistant: str, dtype: str = "auto", device_map: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GumihoModel]:
    """
    Loads a target, its tokenizer, and a drafter for it, on the machine's accelerator if there is one.

    Args:
        target: A folder or a name on the Hub.
        assistant: The same, of the drafter; it goes next to the target, in the target's precision.
        dtype: The target's precision.
        device_map: Where the target goes, instead of one device.

    Raises:
        FileNotFoundError: A name looks like a folder, and there is none.
        ValueError: There is no such precision or device, or the two are no pair.
    """
    for name in (target, assistant):
        _check_folder(name)
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"There is no precision {dtype!r}. Give 'auto', 'float32', 'bfloat16' or 'float16'.")
    if device_map is not None and device_map.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"There is no device {device_map!r} here. Leave the device map out, or give 'cpu'.")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, device_map=device_map or device)
    if isinstance(model, GumihoModel):
        raise ValueError(
            f"{target!r} is a drafter, and no target. Give the model that it was trained for as the target."
        )
    drafter = GumihoModel.from_pretrained(assistant, dtype=model.dtype, device_map=drafter_device(model))
    check_pair(model, drafter)
    drafter.share_embedding(model)
    return model, AutoTokenizer.from_pretrained(target), drafter


def _check_folder(name: str) -> None:
    """Raises `FileNotFoundError` for what can only be a folder: names on the Hub have one slash at the most."""
    is_folder = name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/")
    if is_folder and not Path(name).is_dir():
        raise FileNotFoundError(
            f"There is no folder {name!r}. Give an existing folder, or a name on the Hub such as "
            f"'amd/Gumiho-llama3-8b'."
        )
