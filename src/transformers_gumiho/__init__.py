"""Gumiho speculative decoding inside transformers' `generate()`.

Importing this package registers [`GumihoModel`] with the Auto classes, and makes `generate(assistant_model=...)`
decode with a draft tree if the assistant is a Gumiho drafter.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .generation.attach import attach, attached, detach
from .generation.drafting.candidate_generator import GumihoCandidateGenerator
from .generation.hooks import GumihoGenerationMixin, install
from .generation.loop import GumihoGenerateOutput
from .generation.verification.target_memory import free_memory
from .model.configuration_gumiho import GumihoConfig
from .model.decoding_settings import DraftingSettings
from .model.loading import register_released_names
from .model.modeling_gumiho import GumihoModel
from .model.outputs import GumihoOutput


if TYPE_CHECKING:
    from .training.recording import record
else:

    def __getattr__(name: str) -> Any:
        if name == "record":  # loaded when it is used: generation needs nothing of the training
            return importlib.import_module(".training.recording", __name__).record
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

AutoConfig.register(GumihoConfig.model_type, GumihoConfig, exist_ok=True)
AutoModel.register(GumihoConfig, GumihoModel, exist_ok=True)
AutoModelForCausalLM.register(GumihoConfig, GumihoModel, exist_ok=True)
# If an assistant is given by name, a pipeline looks up the class that its config names in the module `transformers`.
# transformers replaces this module while its models are imported, so the package gets it here and not at the top.
importlib.import_module("transformers").GumihoModel = GumihoModel  # type: ignore[attr-defined]
register_released_names()
install()

__all__ = [
    "DraftingSettings",
    "GumihoCandidateGenerator",
    "GumihoConfig",
    "GumihoGenerateOutput",
    "GumihoGenerationMixin",
    "GumihoModel",
    "GumihoOutput",
    "attach",
    "attached",
    "detach",
    "free_memory",
    "record",
]
