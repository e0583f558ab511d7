"""Recognizing the model that something was made with."""

import hashlib
import json

import torch
from transformers import PreTrainedModel


# Values of each weight that go into a fingerprint, evenly spaced.
_SAMPLES = 64
# Fields of a config that do not change what the model computes.
VOLATILE = ("_name_or_path", "transformers_version", "use_cache")


@torch.no_grad()
def model_fingerprint(model: PreTrainedModel) -> str:
    """
    Returns a fingerprint of a model's architecture and weights. It reads some dozens of values of each parameter:
    training changes them all, and reading all takes minutes. Offloaded parameters count by name and shape alone.
    """
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in VOLATILE}
    digest = hashlib.sha256(f"{type(model).__name__} {json.dumps(config, sort_keys=True, default=str)}".encode())
    digest.update(str(adapters_of(model)).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta":
            values = parameter.detach().flatten()
            values = values[:: max(values.numel() // _SAMPLES, 1)].cpu()
            digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def adapters_of(model: PreTrainedModel) -> list[str]:
    """Returns which adapters of PEFT a model's layers run, have merged, or have disabled: each combination once."""
    layers = (module for module in model.modules() if "merged_adapters" in vars(module))
    return sorted({f"{layer.active_adapters} {layer.merged_adapters} {layer.disable_adapters}" for layer in layers})
