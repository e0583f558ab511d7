"""The shipped pair, as a test loads it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from transformers_gumiho import GumihoModel


FOLDER = Path(__file__).parents[2] / "examples" / "demo_pair"


def load_language_model(name: str = "target") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)


def load_drafter(**settings: object) -> GumihoModel:
    drafter = GumihoModel.from_pretrained(FOLDER / "gumiho", dtype=torch.float32)
    drafter.generation_config.update(**settings)
    return drafter


def load_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER / "target")
