"""The conditions on which measurements of a pair depend."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from ..model.modeling_gumiho import GumihoModel
from ..verification.fingerprint import model_fingerprint
from ..verification.placement import input_device
from .machine import machine_name


def measuring_conditions(target: PreTrainedModel, drafter: GumihoModel) -> dict[str, Any]:
    """Returns the conditions that a run must share with a run that it continues, as values for JSON."""
    return {
        "machine": machine_name(input_device(target)),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "target": model_fingerprint(target),
        "assistant": model_fingerprint(drafter),
        "settings of the assistant": drafter.generation_config.to_diff_dict(),
    }
