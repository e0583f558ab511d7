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
            "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
            "lines": {"type": "array", "items": {"enum": ["import os", "import sys"]}, "minItems": 3, "maxItems": 4},
        },
        "required": ["name", "lines"],
        "additionalProperties": False,
    }
)
PROMPTS = ["import os\n", "def __init__(self, name):\n    "]
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8}}


def check(texts: list[str]) -> None:
    for text in texts:
        assert len(json.loads(text)["lines"]) in (3, 4)


@pytest.mark.parametrize("way", list(SETTINGS))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_outlines(compare: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, way: str, num_rows: int) -> None:
    def write(target: PreTrainedModel) -> list[str]:
        generator = outlines.Generator(outlines.from_transformers(target, tokenizer), JsonSchema(SCHEMA))
        settings = SETTINGS[way] | {"max_new_tokens": 80}
        if num_rows == 1:
            return [generator(PROMPTS[0], **settings)]
        return generator.batch(PROMPTS, **settings)

    check(compare(write))


@pytest.mark.parametrize("way", list(SETTINGS))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_xgrammar(compare: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, way: str, num_rows: int) -> None:
    def write(target: PreTrainedModel) -> list[str]:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
        grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA)
        inputs = tokenizer(PROMPTS[:num_rows], return_tensors="pt", padding=True)
        output = target.generate(
            **inputs, **SETTINGS[way], max_new_tokens=80, logits_processor=[LogitsProcessor(grammar)]
        )
        return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    check(compare(write))
