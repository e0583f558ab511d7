"""smolagents and LangChain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from smolagents import TransformersModel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, pipeline


MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "import os\nimport sys\n\nclass A:"}]}]


def test_smolagents(count: Callable[..., Any], chat_target: Path, served: Path) -> None:
    def answer(folder: Path) -> list[str]:
        model = TransformersModel(str(folder), torch_dtype="float32", trust_remote_code=True, max_new_tokens=48)
        message = model.generate(MESSAGES)
        stopped = model.generate(MESSAGES, stop_sequences=["#\n#"])
        streamed = "".join(delta.content for delta in model.generate_stream(MESSAGES) if delta.content)
        return [message.content, stopped.content, streamed]

    plain, drafted = (count(lambda folder=folder: answer(folder)) for folder in (chat_target, served))
    assert drafted.result == plain.result
    assert drafted.num_passes < plain.num_passes
    assert len(plain.result[1]) < len(plain.result[0])


def test_langchain(compare: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> None:
    def answer(target: PreTrainedModel) -> list[str]:
        generator = pipeline("text-generation", model=target, tokenizer=tokenizer, max_new_tokens=48, do_sample=False)
        chain = PromptTemplate.from_template("def {name}(self):\n") | HuggingFacePipeline(pipeline=generator)
        return [chain.invoke({"name": "read"}), *chain.batch([{"name": "write"}, {"name": "close"}])]

    texts = compare(answer)
    assert len(set(texts)) == 3
