from pathlib import Path

import pytest
from training_data import DEMO_TARGET
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the demo pair's target: its texts are worse, and take less time."""
    folder = tmp_path_factory.mktemp("small")
    AutoModelForCausalLM.from_pretrained(DEMO_TARGET, num_hidden_layers=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_TARGET).save_pretrained(folder)
    return folder
