"""Training data without data: a target writes its own users' prompts, and answers them."""

from .endpoint import Endpoint, EndpointError
from .prompts import Prompt
from .questions import read_questions
from .synthesis import SynthesisSettings, synthesize_dataset, synthesize_from_endpoint
from .user_turn import UserTurnNotFoundError


__all__ = [
    "Endpoint",
    "EndpointError",
    "Prompt",
    "SynthesisSettings",
    "UserTurnNotFoundError",
    "read_questions",
    "synthesize_dataset",
    "synthesize_from_endpoint",
]
