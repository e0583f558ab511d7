"""Training a Gumiho drafter with the Hugging Face `Trainer`."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..commands import UserImportError


if TYPE_CHECKING:
    from .arguments import GumihoTrainingArguments
    from .checkpoints import last_complete_checkpoint
    from .collator import GumihoDataCollator
    from .data.datasets import load_conversations
    from .data.preparation import PreparationReport, prepare_dataset
    from .feature_cache import CachedFeatures, FeatureDataset
    from .feature_extraction import cache_size, write_feature_cache
    from .losses.chunked import chunked_gumiho_loss
    from .losses.predictors import LossWeights
    from .recording import Recorder
    from .scores import expected_acceptance_length, measure_acceptance
    from .target_features import OnlineFeatures
    from .trainer import GumihoTrainer
    from .writing.answers import WritingSettings, regenerate_dataset
    from .writing.local import LocalEngine
    from .writing.questions import UserTurnNotFoundError, synthesize_dataset
    from .writing.requests import Sampling
    from .writing.server import EndpointError, ServerEngine
else:
    # By the file: each is imported when one of its names is used, as commands that train nothing need few of them.
    _FILES = {
        ".arguments": "GumihoTrainingArguments",
        ".checkpoints": "last_complete_checkpoint",
        ".collator": "GumihoDataCollator",
        ".data.datasets": "load_conversations",
        ".data.preparation": "PreparationReport prepare_dataset",
        ".feature_cache": "CachedFeatures FeatureDataset",
        ".feature_extraction": "cache_size write_feature_cache",
        ".losses.chunked": "chunked_gumiho_loss",
        ".losses.predictors": "LossWeights",
        ".recording": "Recorder",
        ".scores": "expected_acceptance_length measure_acceptance",
        ".target_features": "OnlineFeatures",
        ".trainer": "GumihoTrainer",
        ".writing.answers": "WritingSettings regenerate_dataset",
        ".writing.local": "LocalEngine",
        ".writing.questions": "UserTurnNotFoundError synthesize_dataset",
        ".writing.requests": "Sampling",
        ".writing.server": "EndpointError ServerEngine",
    }

    def __getattr__(name: str) -> Any:
        file = next((file for file, names in _FILES.items() if name in names.split()), None)
        if file is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if find_spec("datasets") is None:
            raise UserImportError(
                "Training needs the `datasets` library. Install it with `pip install 'transformers-gumiho[train]'`."
            )
        return getattr(importlib.import_module(file, __name__), name)


__all__ = [
    "CachedFeatures",
    "EndpointError",
    "FeatureDataset",
    "GumihoDataCollator",
    "GumihoTrainer",
    "GumihoTrainingArguments",
    "LocalEngine",
    "LossWeights",
    "OnlineFeatures",
    "PreparationReport",
    "Recorder",
    "Sampling",
    "ServerEngine",
    "UserTurnNotFoundError",
    "WritingSettings",
    "cache_size",
    "chunked_gumiho_loss",
    "expected_acceptance_length",
    "last_complete_checkpoint",
    "load_conversations",
    "measure_acceptance",
    "prepare_dataset",
    "regenerate_dataset",
    "synthesize_dataset",
    "write_feature_cache",
]
