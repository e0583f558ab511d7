"""What measurements of a pair depend on."""

import platform
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..model.modeling_gumiho import GumihoModel
from ..target.fingerprint import model_fingerprint
from ..target.machine import machine_name
from ..target.placement import drafter_device


def environment() -> dict[str, str]:
    """Returns what the numbers depend on."""
    device = "CPU"
    if torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
    return {
        "device": device,
        "threads": str(torch.get_num_threads()),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers_version,
    }


def measuring_conditions(target: PreTrainedModel, drafter: GumihoModel) -> dict[str, Any]:
    """Returns what a run that continues another one must share with it, in what JSON holds."""
    return {
        "machine": machine_name(drafter_device(target)),
        "environment": environment(),
        "target": model_fingerprint(target),
        "assistant": model_fingerprint(drafter),
        "settings of the assistant": drafter.generation_config.to_diff_dict(),
    }
