"""Prompts and answers of a target in this process."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversations import MalformedRowError
from ..rendering import render_prompt
from ..written_rows import answer_text
from .answer_features import AnswerFeatures
from .continuation import BatchContinuation, Continuation, Sampling
from .user_turn import UserTurn, find_user_turn
from .writing import Request, Start, Text


class TargetWriter:
    """
    A target in this process.

    Args:
        target: The target.
        tokenizer: The target's, with a chat template.
        max_prompt_tokens: Tokens of a prompt that it writes, at most.
        max_new_tokens: Tokens of an answer, at most.
        sampling: How prompts and sampled answers are sampled.
        states_dtype: Where given, answers come with the target's states in it.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_new_tokens: int,
        sampling: Sampling,
        states_dtype: torch.dtype | None = None,
    ):
        self.target, self.tokenizer, self.sampling = target, tokenizer, sampling
        self.states_dtype = states_dtype
        self.positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        ends = target.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
        self._turns: dict[str | None, UserTurn] = {}

    def write_user_turns(self, starts: Sequence[Start], seed: int) -> list[Text]:
        turns = [self._turn(start.system) for start in starts]
        ends = self.ends.union(*(turn.ends(self.tokenizer) for turn in turns))
        write = BatchContinuation(self.target, ends, self.sampling)
        prompts = [turn.opening_ids(self.tokenizer, start.opening) for turn, start in zip(turns, starts, strict=True)]
        results = write(prompts, self.max_prompt_tokens, [True] * len(prompts), seed)
        texts = []
        for turn, start, prompt, result in zip(turns, starts, prompts, results, strict=True):
            written = result.tokens[: -1 if result.ended else None]
            text = start.opening + self._decode_after(prompt if start.opening else [], written)
            cut = turn.cut(text)
            texts.append(Text(cut, result.ended or cut != text.strip(), len(result.tokens)))
        return texts

    def answer(self, requests: Sequence[Request], seed: int) -> list[Text]:
        write = BatchContinuation(self.target, self.ends, self.sampling, self.states_dtype)
        texts = [Text("", False, 0, problem="no room for an answer")] * len(requests)
        prompts: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            try:
                prompt = render_prompt(self.tokenizer, request.messages)
            except MalformedRowError as error:
                texts[index] = Text("", False, 0, problem=str(error))
            else:
                prompts |= {index: prompt} if self._fits(prompt) else {}
        if fitting := list(prompts):
            sampled = [requests[index].sampled for index in fitting]
            results = write([prompts[index] for index in fitting], self.max_new_tokens, sampled, seed)
            for index, result in zip(fitting, results, strict=True):
                texts[index] = self._read(prompts[index], result)
        return texts

    def _decode_after(self, before: list[int], tokens: list[int]) -> str:
        """Returns the text of tokens as it goes on from others: alone it may lack a space in front."""
        return self.tokenizer.decode(before + tokens)[len(self.tokenizer.decode(before)) :]

    def _fits(self, prompt: list[int]) -> bool:
        return self.positions is None or len(prompt) + self.max_new_tokens <= self.positions

    def _read(self, prompt: list[int], result: Continuation) -> Text:
        if not self.tokenizer.decode(result.tokens, skip_special_tokens=True).strip():
            return Text("", result.ended, len(result.tokens), problem="the target says nothing")
        text, turn = answer_text(self.tokenizer, result.tokens, result.ended), (prompt, result.tokens)
        features = None if result.states is None else AnswerFeatures(*turn, result.states)
        return Text(text, result.ended, len(result.tokens), turn=turn, features=features)

    def _turn(self, system: str | None) -> UserTurn:
        if system not in self._turns:
            self._turns[system] = find_user_turn(self.tokenizer, system)
        return self._turns[system]
