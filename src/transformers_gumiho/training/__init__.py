"""Training a Gumiho drafter with the Hugging Face `Trainer`."""

from importlib.util import find_spec
from typing import Any

from ..commands import UserImportError


if find_spec("datasets") is None:

    def __getattr__(name: str) -> Any:  # but for `recording`, which needs no extra
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserImportError(
            "Training needs the `datasets` library. Install it with `pip install 'transformers-gumiho[train]'`."
        )
else:
    from ..files import load_conversations
    from .arguments import GumihoTrainingArguments
    from .checkpoints import last_complete_checkpoint
    from .collator import GumihoDataCollator
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
