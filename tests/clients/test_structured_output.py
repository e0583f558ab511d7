"""Outlines and XGrammar: texts that follow a JSON schema."""

import json
from collections.abc import Callable
from typing import Any

import outlines
import pytest
import xgrammar
from outlines.types import JsonSchema
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from xgrammar.contrib.hf import LogitsProcessor


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "minLength": 40, "maxLength": 60},
            "kind": {"enum": ["def", "class"]},
        },
        "required": ["code", "kind"],
        "additionalProperties": False,
    }
)
PROMPTS = ["def __init__(self, name):\n    ", "import os\n"]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
}

# What the small target writes under a schema repeats itself.
REPETITIVE = {"prompt_lookup_num_tokens": 8, "break_even": 0.01}


def check(texts: list[str]) -> None:
    for text in texts:
        answer = json.loads(text)
        assert 40 <= len(answer["code"]) <= 60
        assert answer["kind"] in ("def", "class")


@pytest.mark.parametrize("way", list(SETTINGS))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_outlines(compare: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, way: str, num_rows: int) -> None:
    def write(target: PreTrainedModel) -> list[str]:
        generator = outlines.Generator(
            outlines.from_transformers(target, tokenizer), JsonSchema(SCHEMA, whitespace_pattern="")
        )
        settings = SETTINGS[way] | {"max_new_tokens": 100}
        if num_rows == 1:
            return [generator(PROMPTS[0], **settings)]
        return generator.batch(PROMPTS, **settings)

    check(compare(write, **REPETITIVE))


@pytest.mark.parametrize("way", list(SETTINGS))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_xgrammar(compare: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, way: str, num_rows: int) -> None:
    def write(target: PreTrainedModel) -> list[str]:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
        grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
        inputs = tokenizer(PROMPTS[:num_rows], return_tensors="pt", padding=True)
        output = target.generate(
            **inputs, **SETTINGS[way], max_new_tokens=100, logits_processor=[LogitsProcessor(grammar)]
        )
        return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    check(compare(write, **REPETITIVE))
