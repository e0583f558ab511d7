"""Training data from a target behind a server: one of our own that misbehaves, and `transformers serve`."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_target import make_chat_target, make_chat_tokenizer
from commands import gumiho, refuse
from datasets import Dataset
from servers import free_port
from training_data import MESSAGES, make_ending_tokenizer, read_jsonl, write_jsonl
from transformers.utils.import_utils import is_serve_available

from transformers_gumiho.training import (
    EndpointError,
    LocalEngine,
    Sampling,
    ServerEngine,
    WritingSettings,
    regenerate_dataset,
)
from transformers_gumiho.training.writing.requests import Request


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


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(*args: Any) -> Server:
        servers.append(Server(*args))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def completion(text: str | None, reason: str = "stop", **fields: Any) -> Reply:
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": reason} | fields], "usage": USAGE}


USAGE = {"completion_tokens": 3, "prompt_tokens": 1, "total_tokens": 4}


def by_ids(path: str, body: dict[str, Any], number: int) -> Reply:
    """As vLLM answers: with the tokens that the target writes greedily in this process."""
    assert path == "/v1/completions"
    assert body["return_token_ids"] is True
    request = Request(body["prompt"], body["max_tokens"], None, 0, frozenset(body["stop_token_ids"]))
    ((ids, ended),) = LocalEngine(TARGET).complete([request])
    return completion(TOKENIZER.decode(ids), "stop" if ended else "length", token_ids=ids)


def by_text(path: str, body: dict[str, Any], number: int) -> Reply:
    """As servers answer that know no more than OpenAI's protocol."""
    unknown = {*body} - {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop"}
    if unknown or not isinstance(body["prompt"], str):
        return 422, {"error": f"unexpected fields {unknown}"}
    request = Request(TOKENIZER(body["prompt"])["input_ids"], body["max_tokens"], None, 0)
    ((ids, ended),) = LocalEngine(TARGET).complete([request])
    return completion(TOKENIZER.decode(ids, skip_special_tokens=True), "stop" if ended else "length")


TARGET, TOKENIZER = make_chat_target(), make_chat_tokenizer()
SETTINGS = WritingSettings(max_length=200, max_new_tokens=8, sampling=Sampling(share=0.0))
TURNS = [{"messages": MESSAGES[:2] + MESSAGES[3:4]}, {"messages": MESSAGES}]


def make_engine(url: str | list[str], **settings: Any) -> ServerEngine:
    patience = {"max_retries": 2, "concurrency": 2}
    return ServerEngine(url, "tiny", TOKENIZER, **patience | settings)


def write(
    engine: ServerEngine | LocalEngine, path: Path, rows: list[dict[str, Any]] = QUESTIONS, **settings: Any
) -> list[dict[str, Any]]:
    columns = {name: None for row in rows for name in row}
    regenerate_dataset(
        Dataset.from_list([columns | row for row in rows]), engine, TOKENIZER, path, replace(SETTINGS, **settings)
    )
    return read_jsonl(path)


def test_a_server_writes_what_the_target_writes_here(serve: Serve, tmp_path: Path) -> None:
    """All turns, and texts, byte for byte; two addresses take turns, and each has its name for an end."""

    def names_the_token(path: str, body: dict[str, Any], number: int) -> Reply:
        status, answer = by_ids(path, body, number)
        return status, json.loads(json.dumps(answer).replace('"stop"', '"eos_token"'))

    servers = [serve(by_ids), serve(names_the_token)]
    engines = {
        "here": LocalEngine(TARGET),
        "there": make_engine([servers[0].url + "/v1/", servers[1].url], api_key="k"),
    }
    for name, engine in engines.items():
        write(engine, tmp_path / f"{name}.jsonl", [*TURNS, *QUESTIONS, {"text": "import os"}])
    here, there = ((tmp_path / f"{name}.jsonl").read_bytes() for name in engines)
    assert here == there
    assert len(json.loads(there.splitlines()[1])["generations"]) == 2
    assert all(server.requests for server in servers)
    requests = [body for server in servers for body in server.requests]
    assert {body["temperature"] for body in requests} == {0}
    assert {body["model"] for body in requests} == {"tiny"}
    assert {key for server in servers for key in server.keys} == {"Bearer k"}


def test_a_server_without_token_ids_is_used_by_text(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not encode back is left out with a count; the rest are the target's own tokens."""
    rows = write(make_engine(serve(by_text).url), tmp_path / "a.jsonl", QUESTIONS * 3, max_new_tokens=20)
    expected = write(LocalEngine(TARGET), tmp_path / "b.jsonl", QUESTIONS * 3, max_new_tokens=20)
    kept = [(row, other) for row, other in zip(rows, expected, strict=True) if "generations" in row]
    assert kept
    for row, other in kept:
        text = row["messages"][-1]["content"]
        assert TOKENIZER(text)["input_ids"] == row["generations"][0]["answer_ids"][: -1 if row["ended"] else None]
        assert row["generations"][0]["prompt_ids"] == other["generations"][0]["prompt_ids"]
        assert row["ended"] == other["ended"]
    out = capsys.readouterr().out
    assert out.count("sends no token ids: texts are encoded again") == 1
    assert out.count("It may leave special tokens out of its texts") == 1


def test_texts_for_a_server_begin_once_and_keep_their_marks(serve: Serve, tmp_path: Path) -> None:
    """A server's tokenizer begins a text itself, and leaves special tokens out unless it is asked."""

    def keeps_marks(path: str, body: dict[str, Any], number: int) -> Reply:
        keeps = body.pop("skip_special_tokens", True) is False
        return completion("this [SEP] test" if keeps else "this test") if number else (422, {})

    server, tokenizer = serve(keeps_marks), make_ending_tokenizer("")
    engine = ServerEngine(server.url, "tiny", tokenizer, concurrency=1)
    regenerate_dataset(Dataset.from_list([{"prompt": "what is"}]), engine, tokenizer, tmp_path / "a.jsonl", SETTINGS)
    (row,) = read_jsonl(tmp_path / "a.jsonl")
    assert server.requests[-1]["prompt"] == "what is"
    assert tokenizer.convert_ids_to_tokens(row["generations"][0]["prompt_ids"]) == ["<s>", "what", "is"]
    written = tokenizer.convert_ids_to_tokens(row["generations"][0]["answer_ids"])
    assert written == ["this", "[SEP]", "test", "</s>"]


def test_servers_of_different_software_lose_no_rows(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them knows no token ids, so both are used by text."""

    def knows_both(path: str, body: dict[str, Any], number: int) -> Reply:
        return (by_ids if "return_token_ids" in body else by_text)(path, body, number)

    one = write(make_engine(serve(by_text).url), tmp_path / "one.jsonl", max_new_tokens=20)
    servers = [serve(knows_both), serve(by_text)]
    urls = [server.url for server in servers]
    assert write(make_engine(urls), tmp_path / "two.jsonl", max_new_tokens=20) == one
    assert all(len(server.requests) > 1 for server in servers)
    assert f"{' or '.join(urls)} sends no token ids" in capsys.readouterr().out


def test_the_commands_tell_what_they_do(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several requests are open at a time, and a run without any usable row fails with the reasons."""

    def reply(path: str, body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.1)
        return completion("", token_ids=TOKENIZER(f" {number} things, what are they?")["input_ids"])

    server = serve(reply)
    TARGET.save_pretrained(tmp_path / "tiny")
    TOKENIZER.save_pretrained(tmp_path / "tiny")
    questions = write_jsonl(tmp_path / "questions.jsonl", [*QUESTIONS, *QUESTIONS[:2], {"answer": 1}])
    command = [
        "data", "--target", tmp_path / "tiny", "--max_new_tokens", 8,
        "--endpoint", server.url, "--concurrency", 3,
    ]  # fmt: skip
    asked = ["--data", "none", "--num_prompts", 5, "--max_prompt_tokens", 30]
    gumiho(*command, "--output_file", tmp_path / "a.jsonl", *asked)
    gumiho(*command, "--output_file", tmp_path / "b.jsonl", "--data", questions)
    assert server.most_open == 3
    printed = capsys.readouterr()
    assert "5 prompts. Dropped: none." in printed.out
    assert "6 of 9 rows can be used, with 6 answers to write after" in printed.out
    assert "left out 2 (the first is row 6): is a duplicate" in printed.out
    assert "6 rows with 6 answers. Left out: none." in printed.out
    assert "target asks: 100%" in printed.err
    assert "target answers: 100%" in printed.err
    unusable = write_jsonl(tmp_path / "unusable.jsonl", [{"answer": 1}] * 3)
    refuse("No row of the dataset can be used", *command, "--output_file", tmp_path / "c", "--data", unusable)


def test_the_users_own_tokens_are_not_sent(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    monkeypatch.setenv("OPENAI_API_KEY", "sk_of_the_user")
    server = serve(by_ids)
    write(make_engine(server.url), tmp_path / "a.jsonl")
    assert set(server.keys) == {"Bearer none"}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(serve: Serve, tmp_path: Path, status: int) -> None:
    server = serve(
        lambda path, body, n: by_ids(path, body, n) if n % 3 else (status, {"error": "busy"}), {"retry-after-ms": "10"}
    )
    rows = write(make_engine(server.url, max_retries=8), tmp_path / "a.jsonl")
    assert all("messages" in row for row in rows)


@pytest.mark.parametrize("status", [400, 413, 422, 500, 504, 524])
def test_a_refused_row_is_skipped_with_the_servers_words(serve: Serve, tmp_path: Path, status: int) -> None:
    """The others are written, and it is not asked again; where the first ones are all refused, the run stops."""
    refused, path = QUESTIONS[1]["prompt"], tmp_path / "a.jsonl"

    def reply(path: str, body: dict[str, Any], number: int) -> Reply:
        if isinstance(body["prompt"], str):  # whether it still answers
            return by_text(path, body, number)
        is_long = refused in TOKENIZER.decode(body["prompt"])
        return (status, {"message": "the context is full"}) if is_long else by_ids(path, body, number)

    server = serve(reply, {"retry-after-ms": "10"})
    rows = write(make_engine(server.url), path)
    assert [n for n, row in enumerate(rows) if "skipped" in row] == [1]
    assert rows[1]["skipped"].startswith(f"the server refuses it ({status})")
    assert "the context is full" in rows[1]["skipped"]
    num_requests = len(server.requests)
    assert write(make_engine(server.url), path) == rows
    assert len(server.requests) <= num_requests + 1
    with pytest.raises(EndpointError, match=rf"refuses it \({status}\).*So it was with the first 32 rows"):
        write(make_engine(server.url), tmp_path / "b.jsonl", QUESTIONS[1:2] * 40)
    assert not (tmp_path / "b.jsonl").read_bytes(), "it is asked again when the server is well"


@pytest.mark.parametrize(("status", "answers_others"), [(500, False), (503, True), (504, False)])
def test_a_server_that_fails_from_some_request_on_costs_no_row(
    serve: Serve, tmp_path: Path, status: int, answers_others: bool
) -> None:
    def reply(path: str, body: dict[str, Any], number: int) -> Reply:
        if answers_others and isinstance(body["prompt"], str):
            return by_text(path, body, number)
        return by_ids(path, body, number) if number < 4 else (status, {})

    server = serve(reply, {"retry-after-ms": "10"})
    with pytest.raises(EndpointError, match=rf"refuses \({status}\).*run this again to continue"):
        write(make_engine(server.url, max_retries=1), tmp_path / "a.jsonl")
    assert "skipped" not in (tmp_path / "a.jsonl").read_text(encoding="utf-8")


def test_a_server_that_refuses_everything_is_not_asked_again(serve: Serve, tmp_path: Path) -> None:
    server = serve(lambda *_: (404, "<html>\n  there is\nno model 'tiny'"))
    with pytest.raises(EndpointError, match=r"refuses \(404\): <html> there is no model 'tiny'"):
        write(make_engine(server.url), tmp_path / "a.jsonl")
    assert len(server.requests) == 1


NO_ANSWER = completion(None)[1]


@pytest.mark.parametrize("nonsense", ["<html>", {"choices": []}, {"answer": 42}, [], NO_ANSWER])
@pytest.mark.parametrize("server_knows", [by_ids, by_text])
def test_nonsense_costs_its_row_alone(serve: Serve, tmp_path: Path, nonsense: Any, server_knows: Any) -> None:
    server = serve(lambda path, body, n: server_knows(path, body, n) if n != 4 else (200, nonsense))
    rows = write(make_engine(server.url, concurrency=1), tmp_path / "a.jsonl")
    skipped = [row["skipped"] for row in rows if "skipped" in row]
    assert skipped[0] == "the server's response is invalid"
    assert len(rows) > len(skipped)
    server = serve(lambda *_: (200, nonsense))
    with pytest.raises(EndpointError, match=r"answers no request: its response is invalid"):
        write(make_engine(server.url), tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").read_bytes(), "it is asked again when the server is well"


@pytest.mark.parametrize("token", [-1, len(TOKENIZER), 10**12])
def test_tokens_that_the_target_does_not_have_cost_their_row(serve: Serve, tmp_path: Path, token: int) -> None:
    """One may be a padding row of the target's head. Where the first rows all have some, they are another model's."""
    unknown = completion("a", token_ids=[token])
    server = serve(lambda path, body, number: unknown if number == 4 else by_ids(path, body, number))
    rows = write(make_engine(server.url, concurrency=1), tmp_path / "a.jsonl")
    (reason,) = [row["skipped"] for row in rows if "skipped" in row]
    assert reason.startswith("the server sends tokens that the target's tokenizer lacks")
    server = serve(lambda *_: unknown)
    with pytest.raises(EndpointError, match=r"another model\. So it was with the first 32 rows"):
        write(make_engine(server.url), tmp_path / "b.jsonl", QUESTIONS * 6)


def test_a_run_that_goes_on_may_have_only_refused_rows_left(serve: Serve, tmp_path: Path) -> None:
    """They end it: otherwise it would stop at them on each start."""
    rows, status = [QUESTIONS[0], *QUESTIONS[1:2] * 40], 404

    def reply(path: str, body: dict[str, Any], number: int) -> Reply:
        is_refused = QUESTIONS[1]["prompt"] in TOKENIZER.decode(body["prompt"])
        return (status, {}) if is_refused else by_ids(path, body, number)

    server = serve(reply)
    with pytest.raises(EndpointError, match=r"refuses \(404\)"):
        write(make_engine(server.url, concurrency=1), tmp_path / "a.jsonl", rows)
    status = 400
    written = write(make_engine(server.url), tmp_path / "a.jsonl", rows)
    assert ["skipped" in row for row in written] == [False] + [True] * 40


@pytest.mark.parametrize("status", [None, 429, 503])
def test_where_one_server_fails_the_others_go_on(
    serve: Serve, tmp_path: Path, status: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = serve(lambda *_: (status, {"error": "busy"}), {"retry-after-ms": "10"})
    fails, works = busy.url if status else f"http://localhost:{free_port()}", serve(by_ids).url
    told = rf"(refuses \({status}\)|does not answer)" if status else "does not answer: .*refused"
    rows = write(make_engine([fails, works], max_retries=1), tmp_path / "a.jsonl")
    assert all("messages" in row for row in rows)
    assert capsys.readouterr().out.count("The other servers go on.") == 1
    with pytest.raises(EndpointError, match=rf"{told}.*run this again to continue"):
        write(make_engine([fails, f"http://localhost:{free_port()}"], max_retries=1), tmp_path / "b.jsonl")
    assert len(write(make_engine(works), tmp_path / "b.jsonl")) == len(QUESTIONS)


def test_a_proxy_of_the_environment_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:9/")
    for url in ("http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000/v1"):
        make_engine(url)
    with pytest.raises(ValueError, match="proxy"):
        make_engine("http://example.com")


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="an address such as http://localhost:8000, got 'localhost:8000'"):
        make_engine("localhost:8000")


@pytest.mark.skipif(
    not is_serve_available(),
    reason="`transformers serve` needs fastapi, uvicorn and openai (the extra `test` has them)",
)
def test_transformers_serve_writes_what_the_target_writes(serve: Serve, tmp_path: Path) -> None:
    from transformers.cli.serve import Serve

    model, port = str(tmp_path / "tiny"), free_port()
    TARGET.save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    server = Serve(model, port=port, device="cpu", dtype="float32", non_blocking=True)
    try:
        rows = write(ServerEngine(f"http://localhost:{port}", model, TOKENIZER, concurrency=2), tmp_path / "a.jsonl")
    finally:
        server.kill_server()
    assert rows == write(ServerEngine(serve(by_text).url, model, TOKENIZER), tmp_path / "b.jsonl")
    assert any("messages" in row for row in rows)
