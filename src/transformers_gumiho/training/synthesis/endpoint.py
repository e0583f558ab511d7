"""A target behind a server that speaks OpenAI's protocol: vLLM, TGI, `transformers serve` and others."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceTimeoutError, constants
from huggingface_hub.utils import HfHubHTTPError, get_async_session, hf_raise_for_status
from transformers import PreTrainedTokenizerBase

from ..sampling import Sampling
from .user_turn import UserTurn, find_user_turn
from .writing import Start, Text


NONSENSE = "the server answers nonsense"
# What a server says that will answer later; and whatever is its own fault.
_LATER = {408, 425, 429}
# What may go wrong in reading an answer that is not one.
_NO_ANSWER = (ValueError, TypeError, KeyError, IndexError, AttributeError)


class EndpointError(ConnectionError):
    """A server that does not answer, refuses, or answers nonsense only."""


@dataclass(frozen=True)
class Endpoint:
    """
    A server, and how to be patient with it.

    Attributes:
        url: Up to before `/v1`, such as `http://localhost:8000`.
        model: The name that the server has for the target.
        concurrency: Requests at a time.
        api_key: For servers that want one.
        timeout: Seconds until a request is given up and sent again.
        num_tries: How often a request is sent, at most.
        first_wait: Seconds until it is sent again; twice as many after every failure.
        longest_wait: Seconds that it waits, at most.
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
            raise ValueError(f"The endpoint must be an address such as http://localhost:8000, got {self.url!r}.")
        if self.concurrency < 1 or self.num_tries < 1:
            raise ValueError(
                f"`concurrency` and `num_tries` must be at least 1, got {self.concurrency} and {self.num_tries}."
            )

    @property
    def base(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")


class EndpointWriter:
    """
    A target behind a server.

    Args:
        endpoint: The server.
        tokenizer: The target's, with the chat template that the server has.
        max_prompt_tokens: Tokens of a prompt that it writes, at most.
        max_new_tokens: Tokens of an answer, at most.
        sampling: How prompts and sampled answers are sampled.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_new_tokens: int,
        sampling: Sampling,
    ):
        self.endpoint, self.tokenizer, self.sampling = endpoint, tokenizer, sampling
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self._first: dict[Start, list[str]] = {}  # what was written first after each

    def write_user_turns(self, starts: Sequence[Start], seed: int) -> list[Text]:
        turns = {system: find_user_turn(self.tokenizer, system) for system in {start.system for start in starts}}
        sends = [
            partial(self._complete, turns[start.system], start.opening, seed + index)
            for index, start in enumerate(starts)
        ]
        texts = asyncio.run(self._send_all(sends))
        repeats = []
        for start, text in zip(starts, texts, strict=True):
            if not text.problem:
                first = self._first.setdefault(start, [])
                repeats += [text.text == other for other in first]
                first += [] if first else [text.text]
        if repeats and all(repeats):
            raise EndpointError(
                f"{self.endpoint.url} writes the same prompt every time, so it does not sample. `transformers serve` "
                f'samples where the model\'s generation_config.json has `"do_sample": true`.'
            )
        return texts

    def answer(self, conversations: Sequence[list[dict[str, str]]], sampled: Sequence[bool], seed: int) -> list[Text]:
        """Returns the answer to each conversation, of which some are `sampled` and the others greedy."""
        pairs = enumerate(zip(conversations, sampled, strict=True))
        sends = [partial(self._chat, messages, is_sampled, seed + index) for index, (messages, is_sampled) in pairs]
        return asyncio.run(self._send_all(sends))

    async def _complete(self, turn: UserTurn, opening: str, seed: int, client: "_Client") -> Text:
        closing = turn.closing.strip()
        body = {
            "prompt": self._without_bos(turn.opening) + opening,
            "max_tokens": self.max_prompt_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": seed,
        } | ({"stop": [closing]} if closing else {})
        answer = await client.complete(body)
        choice = answer["choices"][0]
        text = opening + choice["text"]
        cut = turn.cut(text)
        ended = choice["finish_reason"] == "stop" or cut != text.strip()
        return Text(cut, ended, int((answer.get("usage") or {}).get("completion_tokens") or 0))

    async def _chat(self, messages: list[dict[str, str]], is_sampled: bool, seed: int, client: "_Client") -> Text:
        sampling = self.sampling
        how = {"temperature": sampling.temperature, "top_p": sampling.top_p} if is_sampled else {"temperature": 0}
        answer = await client.chat(messages, max_tokens=self.max_new_tokens, seed=seed, **how)
        choice = answer.choices[0]
        if not isinstance(choice.message.content, str):
            raise TypeError("the content is no text")
        problem = None if choice.message.content.strip() else "the target says nothing"
        if any(getattr(choice.message, name, None) for name in ("reasoning", "reasoning_content")):
            problem = "the server keeps the reasoning apart, so what the target wrote is not known"
        num_tokens = int(getattr(answer.usage, "completion_tokens", 0) or 0)
        return Text(choice.message.content, choice.finish_reason == "stop", num_tokens, problem)

    def _without_bos(self, text: str) -> str:
        """Returns the text without the token that the server's tokenizer puts before every text itself."""
        bos = self.tokenizer.bos_token
        adds_it = bool(bos) and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return text.removeprefix(bos) if adds_it else text

    async def _send_all(self, sends: Sequence[Callable[["_Client"], Awaitable[Text]]]) -> list[Text]:
        if constants.is_offline_mode():
            raise EndpointError(
                f"`huggingface_hub` sends nothing to {self.endpoint.url} while HF_HUB_OFFLINE is set. Unset it; a "
                f"tokenizer in a folder is read without the Hub all the same."
            )
        async with _Client(self.endpoint) as client:
            tasks = [asyncio.ensure_future(client.patiently(send)) for send in sends]
            try:
                texts = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        if texts and all(text.problem == NONSENSE for text in texts):
            raise EndpointError(
                f"{self.endpoint.url} answers nonsense to all of {len(texts)} requests. It has to speak OpenAI's "
                f"protocol (`/v1/completions` and `/v1/chat/completions`). What was written before stays."
            )
        return texts


class _Client:
    """Requests to an endpoint, so many at a time, sent again where that may help."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        # Never the user's token for the Hub, which the client would otherwise send to any server.
        self.key = endpoint.api_key or "none"
        self.chat_client = AsyncInferenceClient(base_url=endpoint.base, api_key=self.key, timeout=endpoint.timeout)
        self.session = get_async_session()
        # The HTTP library has another name in other releases of huggingface_hub.
        library = __import__(type(self.session).__module__.split(".")[0])
        self.broken = (library.TransportError, InferenceTimeoutError, OSError)
        self.slots = asyncio.Semaphore(endpoint.concurrency)

    async def __aenter__(self) -> "_Client":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.chat_client.close()
        await self.session.aclose()

    async def chat(self, messages: list[dict[str, str]], **parameters: Any) -> Any:
        """Returns an answer to messages."""
        return await self.chat_client.chat_completion(messages, model=self.endpoint.model, **parameters)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns a continuation of a text; the inference client knows chats only."""
        response = await self.session.post(
            f"{self.endpoint.base}/v1/completions",
            json={"model": self.endpoint.model, **body},
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=self.endpoint.timeout,
        )
        hf_raise_for_status(response)
        return response.json()

    async def patiently(self, send: Callable[["_Client"], Awaitable[Text]]) -> Text:
        """
        Returns what a request gives, sent as often as it takes.

        Raises:
            EndpointError: The server refuses, or does not answer after the last try.
        """
        wait = self.endpoint.first_wait
        for index in range(self.endpoint.num_tries):
            try:
                async with self.slots:
                    return await send(self)
            except HfHubHTTPError as error:
                status, reason = error.response.status_code, str(error)
                if status not in _LATER and status < 500:
                    raise EndpointError(f"{self.endpoint.url} refuses ({status}): {error}") from error
                asked = error.response.headers.get("retry-after", "")
                wait = max(wait, float(asked)) if asked.isdigit() else wait
            except self.broken as error:
                reason = f"{type(error).__name__}: {error}"
            except _NO_ANSWER:
                return Text("", False, 0, problem=NONSENSE)
            if index + 1 < self.endpoint.num_tries:
                await asyncio.sleep(min(wait, self.endpoint.longest_wait))
                wait *= 2
        raise EndpointError(
            f"{self.endpoint.url} did not answer in {self.endpoint.num_tries} tries: {reason}. What was written "
            f"before stays. See that the server runs, and run this again: it goes on there."
        )
