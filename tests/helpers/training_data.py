"""A tokenizer with chat templates, and conversations in all the forms of datasets."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast


DEMO_TARGET = Path(__file__).parents[2] / "examples" / "demo_pair" / "target"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same text, with the assistant's part marked.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows only the last of the assistant's answers in full, as templates of reasoning models do.
FORGETFUL = (
    "{% for message in messages %}{{ message.role }}:\n{% if message.role != 'assistant' or loop.last %}"
    "{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
# Writes the system prompt into the last user's turn, as Mistral's do.
SYSTEM_IN_LAST_TURN = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{% if loop.index0 + 2 >= messages | length and "
    "messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}{{ message.content }}[/INST]{% elif "
    "message.role == 'assistant' %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
# Opens the reasoning for the assistant, and shows none of it afterwards.
OPENING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# Insists on user and assistant taking turns.
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "import what?"},
    {"role": "assistant", "content": "import os"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "return self.path"},
]


def make_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Returns the demo pair's tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    tokenizer.chat_template = chat_template
    return tokenizer


def make_ending_tokenizer(ending: str = "</s>") -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a few words that begins every text with `<s>` and ends it with `ending`, if any."""
    words = ["<unk>", "<s>", "</s>", "[SEP]", "what", "is", "this", "a", "test"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:4])
    backend.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {ending}".strip(), special_tokens=[(word, vocabulary[word]) for word in words[1:4]]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """Writes rows (or lines that are no JSON, as text); returns the path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
