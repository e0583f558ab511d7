"""Training data without data: a target writes its own users' prompts, and answers them."""

from .endpoint import Endpoint, EndpointError
from .synthesis import SynthesisSettings, synthesize_dataset, synthesize_from_endpoint
from .user_turn import UserTurnNotFoundError


__all__ = [
    "Endpoint",
    "EndpointError",
    "SynthesisSettings",
    "UserTurnNotFoundError",
    "synthesize_dataset",
    "synthesize_from_endpoint",
]
