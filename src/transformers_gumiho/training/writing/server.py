"""A target behind a server that speaks OpenAI's protocol: vLLM, SGLang, TGI, `transformers serve` and others."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import islice
from multiprocessing.pool import ThreadPool
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ...commands import UserOSError, UserValueError, as_user_errors
from ..data.datasets import MalformedRowError
from ..data.rendering import Renderer
from .requests import Completion, Request, Task


_REFUSALS = (400, 413, 422)  # what concerns one request: it is too long, or filtered
_ENDS = ("stop", "eos_token", "stop_sequence")  # of an answer: the last ones are TGI's names for it
_BUSY = (408, 409, 429)  # what the client asks again, and other servers may answer
_FAULTS = (500, 504, 524)  # which may concern one request, too, as one for which a gateway does not wait
_SECONDS = 3600  # for an answer: with many requests at a time, each of them waits for the others
_NUM_REFUSALS = 32  # rows at the start without an answer, after which the run stops
_NUM_TOGETHER = 10_000  # rows whose requests are prepared before the first is answered
# What may go wrong in reading an answer that is not one.
_NO_ANSWER = (ValueError, TypeError, KeyError, IndexError, AttributeError)


class EndpointError(UserOSError, ConnectionError):
    """A server that does not answer, or that answers none of the first rows."""


class ServerEngine:
    """
    Writes with a target behind a server. Prompts are sent as token ids, and answers come as token ids
    (`return_token_ids`). Servers without these are sent and send text.

    Args:
        urls: Addresses of servers of the same target up to before `/v1`, such as `http://localhost:8000`; they take
            turns.
        model: The servers' name for the target.
        tokenizer: The target's.
        concurrency: Requests at a time.
        api_key: For servers that require one.
        max_retries: Times that a request is sent again if a server is busy or does not answer, after growing waits.

    Raises:
        ValueError: An address is none.
    """

    batch_size = None

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        concurrency: int = 32,
        api_key: str | None = None,
        max_retries: int = 8,
    ):
        from openai import DefaultHttpxClient, OpenAI, Timeout

        self.urls = [urls] if isinstance(urls, str) else list(urls)
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserValueError(f"The endpoint must be an address such as http://localhost:8000, got {url!r}.")
        self.model, self.tokenizer, self.concurrency = model, tokenizer, concurrency
        self._renderer = Renderer(tokenizer)
        self._num_tokens = len(tokenizer)
        self._lock = threading.Lock()
        # Never with the user's token for the Hub, or for OpenAI.
        settings: dict[str, Any] = {"api_key": api_key or "none", "max_retries": max_retries}
        settings["timeout"] = Timeout(_SECONDS, connect=10)
        urls = [f"{url.rstrip('/').removesuffix('/v1')}/v1" for url in self.urls]
        with as_user_errors():  # of a proxy that the environment names
            self._clients = deque(
                OpenAI(base_url=url, http_client=DefaultHttpxClient(trust_env=not _is_here(url)), **settings)
                for url in urls
            )
        self._knows_ids: bool | None = None
        self.has_answered = False
        self._marks = dict[str, bool]()  # how a server keeps special tokens in its texts

    @property
    def made_from(self) -> dict[str, Any]:
        """What the texts depend on, of which only the target's name on the server is known here."""
        return {"served_model": self.model}

    def run(self, tasks: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """
        Yields the numbers and rows of `tasks` as they end.

        Raises:
            EndpointError: The server does not answer, or refuses the first rows, of which none is yielded.
        """
        if self._knows_ids is None:
            self._try_servers()
        left, held = iter(tasks), list[tuple[int, dict[str, Any]]]()
        with ThreadPool(self.concurrency) as pool:
            while part := list(islice(left, _NUM_TOGETHER)):
                for number, row in pool.imap_unordered(self._drive, part):
                    held.append((number, row))
                    if self.has_answered:
                        yield from held
                        held = []
                    elif len(held) == _NUM_REFUSALS:
                        said = f"{row.get('skipped')}. So it was with the first {len(held)} rows."
                        raise EndpointError(f"{', '.join(self.urls)}: {said}")
        yield from held

    def _drive(self, numbered: tuple[int, Task]) -> tuple[int, dict[str, Any]]:
        number, task = numbered
        answer: Any = None
        refusal: MalformedRowError | None = None
        while True:
            try:
                with self._lock:  # tokenizers do not like threads
                    request = task.throw(refusal) if refusal else task.send(answer)
            except StopIteration as end:
                return number, end.value
            try:
                answer, refusal, self.has_answered = self.complete(request), None, True
            except MalformedRowError as error:
                refusal = error

    def complete(self, request: Request) -> Completion:
        """
        Answers a request.

        Raises:
            MalformedRowError: The server refuses it, or sends no answer that can be read.
            EndpointError: The server does not answer, or refuses for another reason.
        """
        try:
            ids, is_ended = self._by_ids(request) if self._knows_ids else self._by_text(request)
        except MalformedRowError:
            raise
        except _NO_ANSWER as error:
            raise MalformedRowError("the server's response is invalid") from error
        if not all(0 <= token < self._num_tokens for token in ids):
            raise MalformedRowError("the server sends tokens that the target's tokenizer lacks: it runs another model")
        return ids, is_ended

    def _try_servers(self) -> None:
        """Finds the best way that all servers know, by requests of one token: ids, marked texts, or texts."""
        urls = " or ".join(self.urls)
        request = Request(self.tokenizer("a")["input_ids"], 1, None, 0)
        for knows_ids, self._marks in ((True, {}), (False, {"skip_special_tokens": False}), (False, {})):
            try:
                for _ in self.urls:  # requests take the servers in turns
                    self._by_ids(request) if knows_ids else self._text_after("a", request)
                break
            except _NO_ANSWER as error:
                cause = error
        else:
            said = cause if isinstance(cause, MalformedRowError) else "its response is invalid"
            raise EndpointError(f"{urls} answers no request: {said}. Check the server and its model.")
        self._knows_ids = knows_ids
        if not knows_ids:
            tqdm.write(
                f"{urls} sends no token ids: texts are encoded again, and those that do not encode back are left out."
            )
            if not self._marks:
                tqdm.write("It may leave special tokens out of its texts: marks of reasoning and tools are then lost.")

    def _by_ids(self, request: Request) -> Completion:
        further: dict[str, Any] = {"return_token_ids": True, "stop_token_ids": sorted(request.ends)}
        if request.sampling is not None:
            further |= {"top_k": request.sampling.top_k or -1} | request.sampling.further
        choice = self._send(request, prompt=request.prompt_ids, extra_body=further)
        return list(map(int, choice.token_ids)), choice.finish_reason in _ENDS

    def _by_text(self, request: Request) -> Completion:
        ids, begin = request.prompt_ids, [self.tokenizer.bos_token_id]
        if self.tokenizer("a")["input_ids"][:1] == begin == ids[:1]:
            ids = ids[1:]  # the server's tokenizer puts it before every text itself
        text, is_ended = self._text_after(self._renderer.decode(ids), request)
        with self._lock:
            ids = self._renderer.encode(text)
            if self._renderer.decode(ids) != text:
                raise MalformedRowError("the server's text does not encode back to its tokens")
        return ids + [self._renderer.after_answer[0]] * is_ended, is_ended

    def _text_after(self, prompt: str, request: Request) -> tuple[str, bool]:
        settings: dict[str, Any] = {"stop": [request.stop]} if request.stop else {}
        choice = self._send(request, prompt=prompt, extra_body=self._marks, **settings)
        return "" + choice.text, choice.finish_reason in _ENDS

    def _send(self, request: Request, **settings: Any) -> Any:
        import openai

        how: dict[str, Any] = {"temperature": 0.0}
        if (sampling := request.sampling) is not None:
            how = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": request.seed}
        settings |= how | {"model": self.model, "max_tokens": request.max_new_tokens}
        cause: openai.APIError
        while True:
            with self._lock:
                client = self._clients[0]
                self._clients.rotate(-1)
            try:
                return client.completions.create(**settings).choices[0]
            except openai.APIStatusError as error:
                cause = error
                said = f"({error.status_code}): {' '.join(error.response.text.split())[:200]}"
                is_of_row = error.status_code in _FAULTS and self._answers(client)
                if is_of_row or error.status_code in _REFUSALS:
                    raise MalformedRowError(f"the server refuses it {said}") from error
                is_down = error.status_code in _BUSY or error.status_code >= 500
                failure = f"{error.request.url} refuses {said}"
            except openai.APIConnectionError as error:
                cause, is_down = error, True
                failure = f"{error.request.url} does not answer: {str(error.__cause__ or error).rstrip('.')}"
            with self._lock:
                if not is_down or [*self._clients] == [client]:
                    raise EndpointError(
                        f"{failure}. What was written before stays. Check the server, and run this again to continue."
                    ) from cause
                if client in self._clients:
                    self._clients.remove(client)
                    tqdm.write(f"{failure}. The other servers go on.")

    def _answers(self, client: Any) -> bool:
        """Returns whether a server that failed in a request answers another one, of one token."""
        import openai

        with suppress(openai.APIError):
            client.with_options(max_retries=0).completions.create(model=self.model, prompt="a", max_tokens=1)
            return True
        return False


def _is_here(url: str) -> bool:
    """Whether a server runs on this machine, which no proxy reaches."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
