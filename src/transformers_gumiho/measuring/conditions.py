"""What measurements of a pair depend on."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..model.modeling_gumiho import GumihoModel
from ..verification.fingerprint import model_fingerprint
from ..verification.placement import input_device
from .machine import machine_name


def measuring_conditions(target: PreTrainedModel, drafter: GumihoModel) -> dict[str, Any]:
    """Returns what a run that continues another one must share with it, in what JSON holds."""
    return {
        "machine": machine_name(input_device(target)),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "target": model_fingerprint(target),
        "assistant": model_fingerprint(drafter),
        "settings of the assistant": drafter.generation_config.to_diff_dict(),
    }
