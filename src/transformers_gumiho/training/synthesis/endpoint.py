"""A target behind a server that speaks OpenAI's protocol: vLLM, TGI, `transformers serve` and others."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from multiprocessing.pool import ThreadPool
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...user_errors import UserOSError, UserValueError
from .settings import SynthesisSettings
from .user_turn import UserTurn, find_user_turn
from .writing import Text


INVALID = "invalid response"
# What a server says that will answer later; and whatever is its own fault.
_LATER = {408, 425, 429}
# What may go wrong in reading an answer that is not one.
_NO_ANSWER = (ValueError, TypeError, KeyError, IndexError, AttributeError)


class EndpointError(UserOSError, ConnectionError):
    """A server that does not answer, refuses, or returns only invalid responses."""


@dataclass(frozen=True)
class Endpoint:
    """
    A server.

    Attributes:
        url: Up to before `/v1`, such as `http://localhost:8000`.
        model: The server's name for the target.
        concurrency: Requests at a time.
        api_key: For servers that require one.
        timeout: Seconds until a request is sent again.
        num_tries: Maximum number of tries of a request.
        first_wait: Seconds before the second try; doubled after every failure.
        longest_wait: Maximum seconds between two tries.
    """

    url: str
    model: str
    concurrency: int = 32
    api_key: str | None = None
    timeout: float = 600.0
    num_tries: int = 8
    first_wait: float = 1.0
    longest_wait: float = 60.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserValueError(f"The endpoint must be an address such as http://localhost:8000, got {self.url!r}.")
        if self.concurrency < 1 or self.num_tries < 1:
            raise UserValueError(
                f"`concurrency` and `num_tries` must be at least 1, got {self.concurrency} and {self.num_tries}."
            )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """
        Returns the response to a request with this JSON `body`, to `path` below `/v1/`.

        Raises:
            EndpointError: The server refuses, or does not answer after the last try.
            ValueError: The response is no JSON.
        """
        # Never the user's token for the Hub.
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.api_key or 'none'}"}
        address = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"
        request = urllib.request.Request(address, json.dumps({"model": self.model, **body}).encode(), headers)
        wait = self.first_wait
        for index in range(self.num_tries):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                reason = str(error)
                if error.code not in _LATER and error.code < 500:
                    said = error.read().decode(errors="replace")[:200]
                    raise EndpointError(f"{self.url} refuses ({error.code}): {error.reason}. {said}") from error
                asked = error.headers.get("retry-after", "")
                wait = max(wait, float(asked)) if asked.isdigit() else wait
            except (OSError, HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
            if index + 1 < self.num_tries:
                time.sleep(min(wait, self.longest_wait))
                wait *= 2
        raise EndpointError(
            f"{self.url} did not answer in {self.num_tries} tries: {reason}. What was written before stays. Check "
            f"that the server runs, and run this again to continue."
        )


class EndpointWriter:
    """A target behind a server, with the `tokenizer`'s chat template; texts are written as the `settings` say."""

    def __init__(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, settings: SynthesisSettings):
        self.endpoint, self.tokenizer, self.settings = endpoint, tokenizer, settings
        self._first: dict[str, str] = {}  # what was written first after each opening

    def write_user_turns(self, openings: Sequence[str], seed: int) -> list[Text]:
        """Returns what a user might say first, for each of these first words, with these."""
        turn = find_user_turn(self.tokenizer)
        texts = self._send_all(
            partial(self._complete, turn, opening, seed + index) for index, opening in enumerate(openings)
        )
        repeats = []
        for opening, text in zip(openings, texts, strict=True):
            if not text.problem and opening in self._first:
                repeats.append(text.text == self._first[opening])
            elif not text.problem:
                self._first[opening] = text.text
        if repeats and all(repeats):
            raise EndpointError(
                f"{self.endpoint.url} writes the same prompt every time, so it does not sample. `transformers serve` "
                f'samples where the model\'s generation_config.json has `"do_sample": true`.'
            )
        return texts

    def answer(self, conversations: Sequence[list[dict[str, str]]], sampled: Sequence[bool], seed: int) -> list[Text]:
        """Returns the answer to each conversation, of which some are `sampled` and the others greedy."""
        pairs = enumerate(zip(conversations, sampled, strict=True))
        return self._send_all(
            partial(self._chat, messages, sample, seed + index) for index, (messages, sample) in pairs
        )

    def _complete(self, turn: UserTurn, opening: str, seed: int) -> Text:
        closing = turn.closing.strip()
        body = {
            "prompt": self._without_bos(turn.opening) + opening,
            "max_tokens": self.settings.max_prompt_tokens,
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "seed": seed,
        } | ({"stop": [closing]} if closing else {})
        choice = self.endpoint.post("completions", body)["choices"][0]
        text = opening + choice["text"]
        cut = turn.cut(text)
        return Text(cut, choice["finish_reason"] == "stop" or cut != text.strip())

    def _chat(self, messages: list[dict[str, str]], is_sampled: bool, seed: int) -> Text:
        settings = self.settings
        how = {"temperature": settings.temperature, "top_p": settings.top_p} if is_sampled else {"temperature": 0}
        body = {"messages": messages, "max_tokens": settings.max_new_tokens, "seed": seed, **how}
        choice = self.endpoint.post("chat/completions", body)["choices"][0]
        message = choice["message"]
        problem = None if message["content"].strip() else "the target says nothing"
        if any(message.get(name) for name in ("reasoning", "reasoning_content")):
            problem = "the server keeps the reasoning apart, so what the target wrote is not known"
        return Text(message["content"], choice["finish_reason"] == "stop", problem)

    def _without_bos(self, text: str) -> str:
        """Returns the text without the token that the server's tokenizer puts before every text itself."""
        bos = self.tokenizer.bos_token
        adds_it = bool(bos) and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return text.removeprefix(bos) if adds_it else text

    def _send_all(self, sends: Iterable[Callable[[], Text]]) -> list[Text]:
        with ThreadPool(self.endpoint.concurrency) as pool:
            texts = list(pool.imap(_read, sends))
        if texts and all(text.problem == INVALID for text in texts):
            raise EndpointError(
                f"{self.endpoint.url} returned invalid responses to all {len(texts)} requests. It must speak OpenAI's "
                f"protocol (`/v1/completions` and `/v1/chat/completions`). What was written before stays."
            )
        return texts


def _read(send: Callable[[], Text]) -> Text:
    """Returns what a request gives; an answer that makes no sense is a problem of its own text alone."""
    try:
        return send()
    except _NO_ANSWER:
        return Text("", False, INVALID)
