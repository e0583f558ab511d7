"""Training a Gumiho drafter with the Hugging Face `Trainer`."""

from importlib.util import find_spec

from ..user_errors import UserImportError


if find_spec("datasets") is None:
    raise UserImportError(
        "Training needs the `datasets` library. Install it with `pip install 'transformers-gumiho[train]'`."
    )

from ..losses.chunked import chunked_gumiho_loss
from ..losses.weights import LossWeights
from .agreement import expected_acceptance_length
from .arguments import GumihoTrainingArguments
from .checkpoints import last_complete_checkpoint
from .collator import GumihoDataCollator
from .conversations import load_conversations
from .feature_cache import CachedFeatures, FeatureDataset
from .feature_extraction import cache_size, write_feature_cache
from .measured_tau import measure_acceptance
from .preparation import PreparationReport, prepare_dataset
from .regeneration import regenerate_dataset
from .sampling import Sampling
from .synthesis.endpoint import Endpoint, EndpointError
from .synthesis.settings import SynthesisSettings
from .synthesis.synthesis import synthesize_dataset, synthesize_from_endpoint
from .synthesis.user_turn import UserTurnNotFoundError
from .target_features import OnlineFeatures
from .trainer import GumihoTrainer


__all__ = [
    "CachedFeatures",
    "Endpoint",
    "EndpointError",
    "FeatureDataset",
    "GumihoDataCollator",
    "GumihoTrainer",
    "GumihoTrainingArguments",
    "LossWeights",
    "OnlineFeatures",
    "PreparationReport",
    "Sampling",
    "SynthesisSettings",
    "UserTurnNotFoundError",
    "cache_size",
    "chunked_gumiho_loss",
    "expected_acceptance_length",
    "last_complete_checkpoint",
    "load_conversations",
    "measure_acceptance",
    "prepare_dataset",
    "regenerate_dataset",
    "synthesize_dataset",
    "synthesize_from_endpoint",
    "write_feature_cache",
]
