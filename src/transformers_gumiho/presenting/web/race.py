"""One question answered twice at the same time: with the drafter and by plain decoding."""

import copy
import threading
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...drafting.settings import DraftingSettings
from ...measuring.prompts import encode_turn
from ...model.modeling_gumiho import GumihoModel
from ..answering import Answer, stream_answer
from .lock import ModelLock


logger = logging.get_logger(__name__)

# More than nearly any text has; to count the tokens of a longer one would take long already.
_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class Question:
    """
    What is asked, and how it is answered.

    Attributes:
        text: The question, or a text to continue where the tokenizer has no chat template.
        max_new_tokens: Maximum number of tokens in each answer.
        temperature: 0 is greedy.
        seed: For sampling.
        num_assistant_tokens: Nodes of a draft tree.
        branching_factor: Tokens kept at each serial step; 1 makes the tree a chain.
        full_tree_attention: Whether a node may be any recombination of the heads' tokens.
        prompt_lookup_num_tokens: Maximum number of tokens to draft by prompt lookup; 0 for none.
    """

    text: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    num_assistant_tokens: int
    branching_factor: int
    full_tree_attention: bool = True
    prompt_lookup_num_tokens: int = 0


class Stopped(Exception):
    """Ends a generation whose visitor has left or stopped it."""


class Race:
    """
    The two answers to a question, generated at the same time. They share the models, and nothing else, with the
    answers to other questions.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        drafter: The drafter, whose settings stay as they are.
        lock: The lock on the models.
        question: What is asked.
        max_question_tokens: The most that a question may have.

    Attributes:
        prompt: The question's token ids.
        wish_to_stop: Once it is set, both answers end at their next token or cycle.

    Raises:
        ValueError: The question is empty or too long, or a setting is out of range.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: GumihoModel,
        lock: ModelLock,
        question: Question,
        max_question_tokens: int = 1024,
    ):
        self.question = question
        self.plain, self.drafted = Answer(), Answer()
        self._target, self._tokenizer, self._lock = target, tokenizer, lock
        self._drafter = with_settings(drafter, question)
        self.prompt = _encode(target, tokenizer, question, max_question_tokens)
        self.wish_to_stop, self._is_over = threading.Event(), threading.Event()

    def start(self) -> None:
        """Begins to write both answers, in threads of their own."""
        for answer, drafter in ((self.drafted, self._drafter), (self.plain, None)):
            threading.Thread(target=self._run, args=(answer, drafter), daemon=True).start()

    def stop(self) -> None:
        """Ends both answers at their next token or cycle."""
        self.wish_to_stop.set()

    def wait(self, seconds: float) -> bool:
        """Waits until both answers are over, for at most `seconds`; returns whether they are."""
        return self._is_over.wait(seconds)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.plain.is_over and self.drafted.is_over

    def _run(self, answer: Answer, drafter: GumihoModel | None) -> None:
        try:
            with self._lock.hold(self.question.seed) as hold:
                self._check_wanted()

                def hand_over() -> None:
                    self._check_wanted()
                    hold.hand_over()
                    self._check_wanted()

                stream_answer(
                    self._target, self._tokenizer, drafter, self.prompt, answer, on_step=hand_over,
                    max_new_tokens=self.question.max_new_tokens, temperature=self.question.temperature,
                    clock=lambda: hold.seconds,
                )  # fmt: skip
        except Stopped:
            answer.progress = "stopped"
        except Exception as error:  # whatever it is, a visitor waits for the answer
            answer.problem = _explain(error)
            answer.progress = "failed"
        finally:
            if self.is_over:
                self._is_over.set()

    def _check_wanted(self) -> None:
        if self.wish_to_stop.is_set() or self._lock.is_closed:
            raise Stopped


def with_settings(drafter: GumihoModel, question: Question) -> GumihoModel:
    """Returns a drafter with the same weights and its own copy of the settings."""
    own = copy.copy(drafter)
    own.generation_config = copy.deepcopy(drafter.generation_config)
    measured = DraftingSettings.from_generation_config(
        own.generation_config, own.config, None, device_type=own.device.type
    )
    names = ("num_assistant_tokens", "branching_factor", "full_tree_attention", "prompt_lookup_num_tokens")
    values = {name: getattr(question, name) for name in names}
    if any(getattr(measured, name) != value for name, value in values.items()):
        values["break_even"] = None
    own.generation_config.update(**values)
    DraftingSettings.from_generation_config(own.generation_config, own.config, question.temperature or None)
    return own


def _encode(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: Question, max_question_tokens: int
) -> list[int]:
    if not question.text.strip():
        raise ValueError("The question is empty. Write one first.")
    if len(question.text) > _CHARACTERS_PER_TOKEN * max_question_tokens:
        raise ValueError(_too_long(f"{len(question.text)} characters", max_question_tokens))
    prompt = encode_turn(tokenizer, [question.text], [])
    if len(prompt) > max_question_tokens:
        raise ValueError(_too_long(f"{len(prompt)} tokens", max_question_tokens))
    most = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and len(prompt) + question.max_new_tokens > most:
        raise ValueError(
            f"The question has {len(prompt)} tokens and the answer may have {question.max_new_tokens}, but the target "
            f"reads {most} at most. Shorten the question, or ask for fewer new tokens."
        )
    return prompt


def _too_long(length: str, most: int) -> str:
    return (
        f"The question has {length}; the limit is {most} tokens and {_CHARACTERS_PER_TOKEN * most} characters "
        f"(`max_question_tokens`). Shorten it."
    )


def _explain(error: Exception) -> str:
    """Returns what a visitor may read of an error; the log has the rest, which may be private."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return "Not enough memory for this answer. Choose fewer new tokens or a smaller tree, or try later."
    if isinstance(error, ValueError):
        return str(error)
    logger.error("An answer failed.", exc_info=error)
    kind = type(error).__name__
    return f"The answer failed ({kind}). The server's log has the details."
