"""Training data without data: a target writes its own users' prompts, and answers them."""

from .prompts import Prompt
from .questions import read_questions
from .synthesis import SynthesisSettings, synthesize_dataset
from .user_turn import UserTurnNotFoundError


__all__ = ["Prompt", "SynthesisSettings", "UserTurnNotFoundError", "read_questions", "synthesize_dataset"]
