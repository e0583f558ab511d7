"""The demo pair, which no test changes."""

from typing import Any

import pytest
import torch
from training_data import DEMO_TARGET
from transformers import AutoModelForCausalLM, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.tools.pairs import PairArguments, load_pair


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)


@pytest.fixture(scope="session")
def drafter() -> GumihoModel:
    return GumihoModel.from_pretrained(DEMO_TARGET.parent / "gumiho", dtype=torch.float32)


@pytest.fixture(scope="session")
def pair() -> tuple[Any, Any, GumihoModel]:
    """As commands load it, with its tokenizer."""
    return load_pair(PairArguments(pair="demo", dtype="float32"))
