"""Gumiho speculative decoding inside transformers' `generate()`.

Importing this package registers [`GumihoModel`] with the Auto classes, and makes `generate(assistant_model=...)`
decode with a draft tree where the assistant is one.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .candidate_generator import GumihoCandidateGenerator
from .checkpoint_loading import register_released_names
from .configuration_gumiho import GumihoConfig
from .drafting_settings import DraftingSettings
from .generation import GumihoGenerateOutput, GumihoGenerationMixin, install
from .modeling_gumiho import GumihoModel, GumihoOutput


AutoConfig.register(GumihoConfig.model_type, GumihoConfig, exist_ok=True)
AutoModel.register(GumihoConfig, GumihoModel, exist_ok=True)
AutoModelForCausalLM.register(GumihoConfig, GumihoModel, exist_ok=True)
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
]
