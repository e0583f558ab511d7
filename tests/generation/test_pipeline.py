"""`pipeline("text-generation", assistant_model=...)` writes what it writes without the assistant, in fewer passes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from targets import passes_of
from trained_pair import FOLDER, load_drafter, load_language_model, load_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, pipeline

from transformers_gumiho import GumihoModel


TEXT = "def __init__(self, "
TEMPLATE = "{% for message in messages %}# {{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
INPUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (TEXT, {}),
    "batch": ([TEXT, "import os\n\n\nclass A:\n    def f(self):\n"], {"batch_size": 2}),
    "chat": ([{"role": "user", "content": "import os"}], {}),
    "chats": ([[{"role": "user", "content": text}] for text in ("import os", TEXT)], {"batch_size": 2}),
}


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, GumihoModel]:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return load_language_model(), tokenizer, load_drafter()


def check(target: PreTrainedModel, plain: Any, assisted: Any, inputs: Any, **kwargs: Any) -> None:
    """Both pipelines write the same text, and the one with the assistant runs the target less often."""
    outputs, counts = [], []
    for generator in (plain, assisted):
        torch.manual_seed(3)
        count, output = passes_of(
            target, lambda generator=generator: generator(inputs, max_new_tokens=32, **{"do_sample": False} | kwargs)
        )
        counts.append(count)
        outputs.append(output)
    assert outputs[0] == outputs[1]
    assert counts[1] < counts[0]


@pytest.mark.parametrize("form", list(INPUTS))
def test_same_text_with_an_assistant(models: Any, form: str) -> None:
    target, tokenizer, drafter = models
    settings = drafter.generation_config.to_dict()
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    # By the path of a folder, as by a name.
    for assistant in (drafter, str(FOLDER / "gumiho")):
        assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
        inputs, kwargs = INPUTS[form]
        check(target, plain, assisted, inputs, **kwargs)
        assert isinstance(assisted.assistant_model, GumihoModel)
        assert assisted.assistant_model.dtype == target.dtype
        # What the drafter was tuned to is neither lost in loading nor changed by the calls.
        assert assisted.assistant_model.generation_config.to_dict() == settings


def test_same_sampled_text_and_stop_sequence(models: Any) -> None:
    target, tokenizer, drafter = models
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    check(target, plain, assisted, TEXT, do_sample=True, temperature=0.8)
    check(target, plain, assisted, TEXT, stop_sequence="Equal")


def test_special_tokens_of_the_configs_may_differ(models: Any, tmp_path: Path) -> None:
    """transformers takes that for another tokenizer: it asks for the assistant's, and passes it on."""
    target, tokenizer, drafter = models
    drafter.config.get_text_config().eos_token_id = [0, 1]
    drafter.tokenizer = tokenizer
    drafter.save_pretrained(tmp_path)
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    by_name = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(tmp_path))
    by_object = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter, assistant_tokenizer=tokenizer
    )
    for assisted in (by_name, by_object):
        assert assisted.assistant_tokenizer is not None
        check(target, plain, assisted, TEXT)


def test_a_drafter_does_not_generate() -> None:
    drafter = load_drafter()
    assert not drafter.can_generate()
    assert not hasattr(drafter, "generate")
    assert drafter.generation_config.num_assistant_tokens
