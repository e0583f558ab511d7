"""Training data from a target behind a server: one of our own that misbehaves, and `transformers serve`."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_target import make_chat_target, make_chat_tokenizer
from datasets import Dataset
from transformers.utils.import_utils import is_serve_available

from transformers_gumiho.cli import main
from transformers_gumiho.training import Endpoint, EndpointError, SynthesisSettings, synthesize_from_endpoint


QUESTIONS = [{"prompt": f"What is {index}, please?"} for index in range(6)]
Reply = tuple[int, Any]


class Server:
    """A server whose replies are those of a function of the path, the request and the number of requests before."""

    def __init__(self, reply: Callable[[str, dict[str, Any], int], Reply], headers: dict[str, str] | None = None):
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_open = self.most_open = 0
        server, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(server.requests)
                    server.requests.append(body)
                    server.keys.append(self.headers["authorization"])
                    server.num_open += 1
                    server.most_open = max(server.most_open, server.num_open)
                status, answer = reply(self.path, body, number)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                with lock:
                    server.num_open -= 1
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("localhost", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://localhost:{self.http.server_port}"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: Any) -> Server:
        servers.append(Server(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def chat_reply(text: str | None, reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": USAGE}


USAGE = {"completion_tokens": 3, "prompt_tokens": 1, "total_tokens": 4}


def completion_reply(text: str) -> Reply:
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": USAGE}


def well_behaved(path: str, body: dict[str, Any], number: int) -> Reply:
    if path == "/v1/completions":
        return completion_reply(f"Tell me {number}, what {number * 7} things are?")
    assert path == "/v1/chat/completions"
    return chat_reply(f"It is {body['messages'][-1]['content']}", "length" if number % 2 else "stop")


def synthesize(
    url: str, path: Path, num_prompts: int = 0, questions: list[dict[str, str]] = QUESTIONS, **endpoint: Any
) -> list[dict[str, Any]]:
    patience = {"num_tries": 3, "first_wait": 0.01, "concurrency": 2, "timeout": 60.0}
    settings = SynthesisSettings(num_prompts, batch_size=2, max_prompt_tokens=30, max_new_tokens=8, sampled_share=0.5)
    where = Endpoint(url, **{"model": "tiny"} | patience | endpoint)
    synthesize_from_endpoint(where, make_chat_tokenizer(), path, settings, questions=Dataset.from_list(questions))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_both_steps_run_on_a_server(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(well_behaved)
    rows = synthesize(server.url + "/v1/", tmp_path / "a.jsonl", num_prompts=5, api_key="secret")
    assert len(rows) == 11
    for row in rows:
        assert row["messages"][-1]["content"] == "It is " + row["messages"][0]["content"]
    completions = [body for body in server.requests if "prompt" in body]
    assert {body["prompt"] for body in completions} == {"<|im_start|>user\n"}
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in completions} == {(1.0, 0.95, 30)}
    answers = [body for body in server.requests if "messages" in body]
    assert {body["temperature"] for body in answers} == {0, 1.0}
    assert {body["max_tokens"] for body in answers} == {8}
    assert {body["model"] for body in server.requests} == {"tiny"}
    assert set(server.keys) == {"Bearer secret"}
    assert server.most_open <= 2
    assert {row["ended"] for row in rows} == {True, False}


def test_the_command_tells_what_it_does(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Near-duplicates are dropped and counted, and several requests are open at a time."""

    def reply(path: str, body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.1)
        return well_behaved(path, body, number // 2)

    server = serve(reply)
    make_chat_tokenizer().save_pretrained(tmp_path / "tiny")
    questions = [{"prompt": f"What is {'very ' * (index * 5 % 7)}much?"} for index in range(7)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    command = [
        "gumiho", "data", "--target", tmp_path / "tiny", "--max_prompt_tokens", 30, "--max_new_tokens", 8,
        "--endpoint", server.url, "--concurrency", 3, "--writing_batch_size", 6,
    ]  # fmt: skip
    for name, data in (("a", ["none", "--num_prompts", 5]), ("b", [tmp_path / "questions.jsonl"])):
        words = [*command, "--output_file", tmp_path / f"{name}.jsonl", "--data", *data]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        main()
    assert server.most_open == 3
    written = [json.loads(line) for line in (tmp_path / "a.prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row.get("dropped") for row in written].count("near-duplicate") == len(written) // 2 == 6
    printed = capsys.readouterr()
    assert "5 prompts. Dropped: 6 (near-duplicate)." in printed.out
    assert "7 rows. Left out: none." in printed.out
    assert "target asks: 100%" in printed.err
    assert "server answers: 100%" in printed.err
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == [question["prompt"] for question in questions]


def test_a_server_goes_on_after_an_opening(serve: Callable[..., Server], tmp_path: Path) -> None:
    server, path = serve(well_behaved), tmp_path / "a.jsonl"
    settings = SynthesisSettings(2, batch_size=2, max_prompt_tokens=30, max_new_tokens=8)
    where = Endpoint(server.url, "tiny", concurrency=1)
    synthesize_from_endpoint(where, make_chat_tokenizer(), path, settings, openings=["Summarize:\n\nThe", "Who"])
    sent = {body["prompt"] for body in server.requests if "prompt" in body}
    assert sent == {"<|im_start|>user\nSummarize:\n\nThe", "<|im_start|>user\nWho"}
    prompts = [json.loads(line)["messages"][0]["content"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert sorted(prompt.split("Tell me")[0] for prompt in prompts) == ["Summarize:\n\nThe", "Who"]


def test_the_users_own_token_is_not_sent(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    server = serve(well_behaved)
    synthesize(server.url, tmp_path / "a.jsonl", num_prompts=2)
    assert set(server.keys) == {"Bearer none"}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(serve: Callable[..., Server], tmp_path: Path, status: int) -> None:
    server = serve(lambda path, body, n: well_behaved(path, body, n) if n % 3 else (status, {"error": "busy"}))
    rows = synthesize(server.url, tmp_path / "a.jsonl", num_tries=8)
    assert sorted(row["messages"][0]["content"] for row in rows) == [question["prompt"] for question in QUESTIONS]


def test_a_server_says_how_long_to_wait(serve: Callable[..., Server], tmp_path: Path) -> None:
    times: list[float] = []

    def reply(path: str, body: dict[str, Any], number: int) -> Reply:
        times.append(time.monotonic())
        return well_behaved(path, body, number) if number else (429, "later")

    server = serve(reply, {"retry-after": "1"})
    synthesize(server.url, tmp_path / "a.jsonl", questions=QUESTIONS[:1])
    assert times[1] - times[0] >= 1


def test_a_server_that_refuses_is_not_asked_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda *_: (404, {"error": "there is no model 'tiny'"}))
    with pytest.raises(EndpointError, match=r"refuses \(404\)"):
        synthesize(server.url, tmp_path / "a.jsonl")
    assert len(server.requests) <= 2


@pytest.mark.parametrize("nonsense", ["<html>", {"choices": []}, {"answer": 42}, [], chat_reply(None)[1]])
def test_single_nonsense_is_left_out_and_counted(
    serve: Callable[..., Server], tmp_path: Path, nonsense: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(lambda path, body, n: well_behaved(path, body, n) if n % 2 else (200, nonsense))
    rows = synthesize(server.url, tmp_path / "a.jsonl", concurrency=1)
    assert [row.get("skipped") for row in rows] == ["invalid response", None] * 3
    assert "6 rows. Left out: 3 (invalid response)." in capsys.readouterr().out


def test_answers_whose_reasoning_is_kept_apart_are_left_out(serve: Callable[..., Server], tmp_path: Path) -> None:
    """The target wrote the reasoning first: the answer alone is not its text."""

    def reason(path: str, body: dict[str, Any], number: int) -> Reply:
        status, answer = chat_reply("It is.")
        if body["messages"][-1]["content"] == QUESTIONS[0]["prompt"]:
            answer["choices"][0]["message"]["reasoning_content"] = "Is it?"
        return status, answer

    rows = synthesize(serve(reason).url, tmp_path / "a.jsonl")
    assert [row for row in rows if "skipped" in row] == [
        {"skipped": "the server keeps the reasoning apart, so what the target wrote is not known"}
    ]
    assert len(rows) == len(QUESTIONS)


def test_nothing_but_nonsense_stops_the_run(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda *_: (200, "<html>It works!</html>"))
    with pytest.raises(EndpointError, match=r"returned invalid responses to all 2 requests. It must speak OpenAI's"):
        synthesize(server.url, tmp_path / "a.jsonl", num_prompts=2)


def test_a_server_that_does_not_sample_is_told(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda *_: completion_reply("Tell me what things are, please?"))
    with pytest.raises(EndpointError, match="writes the same prompt every time, so it does not sample"):
        synthesize(server.url, tmp_path / "a.jsonl", num_prompts=2)
    # Other openings make other texts: what is told apart is what follows the same one.
    settings = SynthesisSettings(6, batch_size=2, max_prompt_tokens=30, max_new_tokens=8)
    with pytest.raises(EndpointError, match="writes the same prompt every time, so it does not sample"):
        synthesize_from_endpoint(
            Endpoint(server.url, "tiny"), make_chat_tokenizer(), tmp_path / "b.jsonl", settings,
            openings=["Summarize the text of", "Who is the author of", "Translate what follows into"],
        )  # fmt: skip


def test_no_server_is_told_and_the_run_goes_on_with_one(serve: Callable[..., Server], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        nowhere = f"http://localhost:{free.getsockname()[1]}"
    with pytest.raises(EndpointError, match=r"did not answer in 3 tries: URLError.*run this again"):
        synthesize(nowhere, tmp_path / "a.jsonl")
    assert len(synthesize(serve(well_behaved).url, tmp_path / "a.jsonl")) == len(QUESTIONS)


def test_settings_of_an_endpoint_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="an address such as http://localhost:8000, got 'localhost:8000'"):
        Endpoint("localhost:8000", "tiny")
    with pytest.raises(ValueError, match="at least 1, got 0 and 8"):
        Endpoint("http://localhost:8000", "tiny", concurrency=0)


class TransformersServe:
    """A process of `transformers serve`."""

    def __init__(self, model: Path, log: Path):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://localhost:{port}", log
        command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--device", "cpu", "--dtype", "float32"],
            stdout=log.open("a"), stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"`transformers serve` did not start:\n{self.log.read_text()}")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start_transformers(tmp_path: Path) -> Iterator[Callable[[], TransformersServe]]:
    if not is_serve_available():
        pytest.skip("`transformers serve` needs fastapi, uvicorn and openai (the extra `test` has them)")
    model, servers = tmp_path / "tiny", []
    make_chat_target().save_pretrained(model)
    make_chat_tokenizer().save_pretrained(model)

    def start() -> TransformersServe:
        servers.append(TransformersServe(model, tmp_path / "serve.log"))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def test_transformers_serve_dies_in_the_middle(
    start_transformers: Callable[[], TransformersServe], tmp_path: Path
) -> None:
    """It is killed when the first answers are written; what is there then stays, and another one writes the rest."""
    path, model = tmp_path / "a.jsonl", str(tmp_path / "tiny")
    server = start_transformers()

    def kill_after_the_first_batch() -> None:
        while not path.exists() or not path.stat().st_size:
            time.sleep(0.005)
        server.kill()

    killer = threading.Thread(target=kill_after_the_first_batch, daemon=True)
    killer.start()
    questions = QUESTIONS * 5
    with pytest.raises(EndpointError, match=r"did not answer in 3 tries.*What was written before stays"):
        synthesize(server.url, path, num_prompts=4, questions=questions, model=model)
    killer.join(timeout=60)
    assert not killer.is_alive()
    before = path.read_text(encoding="utf-8").splitlines()
    assert 0 < len(before) < 34
    rows = synthesize(start_transformers().url, path, num_prompts=4, questions=questions, model=model)
    assert len(rows) == 34
    assert path.read_text(encoding="utf-8").splitlines()[: len(before)] == before
    assert any(row.get("messages") for row in rows[len(before) :])
