"""`transformers serve` with a folder that `gumiho attach` wrote."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from servers import free_port
from transformers.cli.serve import Serve


GREEDY = {"temperature": 0, "max_tokens": 48}
PROMPT = "def __init__(self, name):\n"
BEAMS = {"generation_config": json.dumps({"num_beams": 3, "max_new_tokens": 24, "do_sample": False})}


@pytest.fixture
def serve() -> Iterator[Callable[[Path], tuple[Serve, OpenAI]]]:
    servers: list[Serve] = []

    def start(folder: Path) -> tuple[Serve, OpenAI]:
        port = free_port()
        settings = {"device": "cpu", "dtype": "float32", "trust_remote_code": True, "log_level": "error"}
        servers.append(Serve(str(folder), port=port, non_blocking=True, **settings))
        return servers[-1], OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=8)

    yield start
    for server in servers:
        server.kill_server()


def test_answers_are_those_of_the_target(
    count: Callable[..., Any], serve: Callable[..., Any], chat_target: Path, served: Path
) -> None:
    def answer(folder: Path) -> list[Any]:
        _, client = serve(folder)
        name = str(folder)
        texts = [client.completions.create(model=name, prompt=PROMPT, **GREEDY).choices[0].text]
        stream = client.completions.create(model=name, prompt=PROMPT, stream=True, **GREEDY)
        texts.append("".join(chunk.choices[0].text for chunk in stream))
        messages = [{"role": "user", "content": PROMPT}]
        chat = client.chat.completions.create(model=name, messages=messages, **GREEDY)
        texts.append(chat.choices[0].message.content)
        sampled = {"generation_config": json.dumps({"do_sample": True, "max_new_tokens": 32})}
        texts.append(client.completions.create(model=name, prompt=PROMPT, seed=7, extra_body=sampled).choices[0].text)
        stopped = client.completions.create(model=name, prompt=PROMPT, stop=["self"], **GREEDY)
        return [*texts, stopped.choices[0].text]

    plain, drafted = (count(lambda folder=folder: answer(folder)) for folder in (chat_target, served))
    assert drafted.result == plain.result
    assert drafted.num_passes < plain.num_passes
    assert plain.result[0] == plain.result[1]


def test_beams_decode_plainly(
    count: Callable[..., Any], serve: Callable[..., Any], chat_target: Path, served: Path
) -> None:
    def answer(folder: Path) -> str:
        _, client = serve(folder)
        return client.completions.create(model=str(folder), prompt=PROMPT, extra_body=BEAMS).choices[0].text

    plain, drafted = (count(lambda folder=folder: answer(folder)) for folder in (chat_target, served))
    assert drafted == plain


def test_a_client_that_leaves_ends_its_generation(
    count: Callable[..., Any], serve: Callable[..., Any], served: Path
) -> None:
    _, client = serve(served)
    ask = {"model": str(served), "prompt": PROMPT, "temperature": 0}
    expected = client.completions.create(**ask, max_tokens=16).choices[0].text

    def leave() -> str:
        with client.completions.create(**ask, stream=True, max_tokens=3000) as stream:
            next(iter(stream))
        time.sleep(0.5)
        # Requests are answered one after the other: this one waits for the end of the one before.
        return client.completions.create(**ask, max_tokens=16).choices[0].text

    text, num_passes = count(leave)
    assert text == expected
    assert num_passes < 300
