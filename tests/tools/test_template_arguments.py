"""Arguments of the chat template: all commands that render it take them."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commands import gumiho, refuse
from training_data import DEMO_TARGET, write_jsonl
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from transformers_gumiho.tools import after_training as measure
from transformers_gumiho.tools.presenting import DemoArguments, make_page
from transformers_gumiho.training.recipe.arguments import RecipeArguments


PAIR = ["--target", DEMO_TARGET, "--assistant", DEMO_TARGET.parent / "gumiho"]
QUICK = '{"quick": true}'


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text("{% if quick %}import {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}")
    return path


def test_a_template_that_cannot_be_rendered_is_reported_in_one_line(template: Path) -> None:
    template.write_text("{{ messages")
    refuse("The chat template cannot be rendered: ", "generate", *PAIR, "--prompt", "a", "--chat_template", template)


@pytest.mark.parametrize("command", ["generate", "show", "tune", "benchmark"])
def test_commands_give_the_template_its_arguments(
    command: str, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decoded: the run is stopped there."""
    read: list[list[int]] = []

    def generate(_: Any, inputs: Any = None, **kwargs: Any) -> None:
        read.append((kwargs["input_ids"] if inputs is None else inputs)[0].tolist())
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    prompts = ["--prompts", write_jsonl(tmp_path / "q.jsonl", [{"prompt": "os?"}] * 6)]
    options = prompts if command in ("tune", "benchmark") else ["--prompt", "os?"]
    options = options if command in ("generate", "show") else [*options, "--output_dir", tmp_path / "out"]
    with suppress(SystemExit):
        gumiho(command, *PAIR, *options, "--chat_template", template, "--chat_template_kwargs", QUICK)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_TARGET)
    assert read[0] == tokenizer("import os?")["input_ids"]
    refuse("must be a JSON object, got 'no'", command, *PAIR, *options, "--chat_template_kwargs", "no")


def test_the_page_and_the_last_stages_take_them(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gradio")
    options = {"target": str(DEMO_TARGET), "chat_template": template, "chat_template_kwargs": QUICK}
    page = make_page(DemoArguments(**options, assistant=str(DEMO_TARGET.parent / "gumiho")))
    messages = [{"role": "user", "content": "os?"}]
    assert page.host.tokenizer.apply_chat_template(messages, tokenize=False) == "import os?"
    given: list[Any] = []
    monkeypatch.setattr(measure, "tune", given.append)
    monkeypatch.setattr(measure, "describe", str)

    def load_pair(pair: Any) -> None:
        given.append(pair)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "load_pair", load_pair)
    measure.tune_drafter(RecipeArguments(**options), Path("drafter"), Path("q.jsonl"), 1)
    with pytest.raises(KeyboardInterrupt):
        measure.evaluate_drafter(RecipeArguments(**options), Path("drafter"), Path("q.jsonl"), 1)
    assert [(each.chat_template, each.chat_template_kwargs) for each in given] == [(template, QUICK)] * 2
