"""Training a Gumiho drafter with the Hugging Face `Trainer`."""

from importlib.util import find_spec


if find_spec("datasets") is None:
    raise ImportError(
        "Training needs the `datasets` library. Install it with `pip install 'transformers-gumiho[train]'`."
    )

from ..losses.chunked import chunked_gumiho_loss
from ..losses.terms import LossWeights, gumiho_loss
from .agreement import expected_acceptance_length
from .arguments import GumihoTrainingArguments
from .callbacks import AcceptanceCallback, measure_acceptance
from .checkpoints import last_complete_checkpoint
from .collator import GumihoDataCollator
from .conversations import load_conversations
from .feature_cache import CachedFeatures, FeatureDataset
from .feature_extraction import cache_size, write_feature_cache
from .preparation import PreparationReport, collect_prompts, prepare_dataset
from .regeneration import regenerate_dataset
from .rendering import UnstableTemplateError
from .target_features import OnlineFeatures, TargetFeatures
from .trainer import GumihoTrainer


__all__ = [
    "AcceptanceCallback",
    "CachedFeatures",
    "FeatureDataset",
    "GumihoDataCollator",
    "GumihoTrainer",
    "GumihoTrainingArguments",
    "LossWeights",
    "OnlineFeatures",
    "PreparationReport",
    "TargetFeatures",
    "UnstableTemplateError",
    "cache_size",
    "chunked_gumiho_loss",
    "collect_prompts",
    "expected_acceptance_length",
    "gumiho_loss",
    "last_complete_checkpoint",
    "load_conversations",
    "measure_acceptance",
    "prepare_dataset",
    "regenerate_dataset",
    "write_feature_cache",
]
