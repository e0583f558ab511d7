"""What is learned under the chat templates of today's models, as TRL installs them."""

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from training_data import DEMO_TARGET, make_tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast

from transformers_gumiho.training import prepare_dataset
from transformers_gumiho.training.data.rendering import Renderer


FOLDER = Path(trl.__file__).parent / "chat_templates"
# For each template the marks of a turn's end, and of others that it writes.
CHATML = ["<|im_end|>", "<|im_start|>"]
DEEPSEEK = [f"<\uff5c{name}\uff5c>" for name in ("end▁of▁sentence", "User", "Assistant")]
MARKS = {
    "qwen3": CHATML,
    "qwen3_instruct_2507": CHATML,
    "qwen3_5_think": CHATML,
    "gptoss": ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>"],
    "gemma3": ["<end_of_turn>", "<start_of_turn>"],
    "deepseekv3": DEEPSEEK,
    "deepseek_r1_distill": DEEPSEEK,
    "llama3_1": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
    "glm4moe": ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
    "nemotron_3_nano": CHATML,
}
# Templates that open reasoning in the prompt, and show an answer without it.
OPENING = {"qwen3_5_think": {}, "deepseekv3": None, "deepseek_r1_distill": None, "nemotron_3_nano": {}}
ASK, MORE = {"role": "user", "content": "import what?"}, {"role": "user", "content": "and then?"}
CALL = {"type": "function", "function": {"name": "list_paths", "arguments": '{"path": "a.py"}'}}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "list_paths", "description": "Lists.", "parameters": PARAMETERS}}]


def say(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | fields


def load(name: str) -> PreTrainedTokenizerFast:
    """Returns the demo tokenizer with a template and its marks."""
    tokenizer = make_tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    end, *others = MARKS[name]
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": "<bos>", "extra_special_tokens": others})
    return tokenizer


def learned(name: str, messages: list[dict[str, Any]], **columns: Any) -> list[str]:
    """Returns the text of each run of learned tokens, or why there is none."""
    tokenizer, config = load(name), AutoConfig.from_pretrained(DEMO_TARGET, vocab_size=5000)
    row = {"messages": json.dumps(messages)} | {key: json.dumps(value) for key, value in columns.items()}
    dataset = Dataset.from_list([{"json_line": json.dumps({key: json.loads(value) for key, value in row.items()})}])
    try:
        rows, _ = prepare_dataset(dataset, tokenizer, config, max_length=2000, packing=False)
    except ValueError as error:
        return [str(error).splitlines()[-1]]
    found = []
    for prepared in rows:
        ids, mask = prepared["input_ids"], [*prepared["loss_mask"], 0]
        first = None
        for place, counts in enumerate(mask):
            if counts and first is None:
                first = place
            elif not counts and first is not None:
                found.append(tokenizer.decode(ids[first : place + 1]))
                first = None
    return found


def without_thinking(name: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": False}} if name in OPENING else {}


@pytest.mark.parametrize("name", MARKS)
def test_of_plain_answers_only_what_the_target_writes_is_learned(name: str) -> None:
    """No empty block of reasoning, and nothing after the end of a turn."""
    if OPENING.get(name, {}) is None:
        (reason,) = learned(name, [ASK, say("import os")])
        assert "the chat template opens an answer in another way" in reason
        assert "Let the target answer (`regenerate_dataset`)" in reason
        return
    if name == "nemotron_3_nano":  # while it thinks
        assert "the chat template opens an answer in another way" in learned(name, [ASK, say("import os")])[0]
    found = learned(name, [ASK, say("import os"), MORE, say("import re, sys")], **without_thinking(name))
    end = "" if name == "glm4moe" else MARKS[name][0]  # whose turns have no end of their own
    assert [text.strip() for text in found] == [f"import os{end}", f"import re, sys{end}"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gptoss", "glm4moe", "nemotron_3_nano"])
def test_reasoning_is_learned_with_its_marks(name: str) -> None:
    for field in ("reasoning_content", "reasoning", "thinking"):
        (text,) = learned(name, [ASK, say("import os", **{field: "what is asked?"})])
        assert "what is asked?" in text
        assert text.index("what is asked?") < text.index("import os")
    assert "hides or rewrites" in learned("llama3_1", [ASK, say("import os", reasoning="what is asked?")])[0]
    cut = learned("qwen3", [ASK, say("<think>\nwhat")], ended=False)
    assert "a block before an answer that begins with such a" in cut[0]


@pytest.mark.parametrize("name", [name for name in MARKS if name != "gemma3"])
def test_calls_of_tools_are_rendered(name: str) -> None:
    said = "" if OPENING.get(name, {}) is None else None
    messages = [ASK, say(said, tool_calls=[CALL]), {"role": "tool", "content": "a.py"}, say("import os")]
    found = learned(name, messages, tools=TOOLS, **without_thinking(name))
    if OPENING.get(name, {}) is None:
        assert "opens an answer in another way" in found[0]
    else:
        assert "list_paths" in found[0]
        assert "a.py" in found[0]
        assert "<think>" not in found[0]
        assert found[-1].startswith("import os")


@pytest.mark.parametrize("name", MARKS)
def test_the_targets_own_answer_is_history_for_its_next_turn(name: str) -> None:
    """With its marks of reasoning, or without them where a template refuses these."""
    tokenizer = load(name)
    said = "<think>\nwhat is asked?\n</think>\n\nimport os"
    if name == "gptoss":
        said = (
            "<|channel|>analysis<|message|>what is asked?<|end|><|start|>assistant<|channel|>final<|message|>import os"
        )
    text = tokenizer.decode(Renderer(tokenizer).prompt([ASK, say(said), MORE], {}))
    assert "import os" in text
    if name in ("qwen3", "qwen3_5_think", "deepseekv3", "deepseek_r1_distill", "glm4moe", "nemotron_3_nano"):
        assert "what is asked?" not in text
