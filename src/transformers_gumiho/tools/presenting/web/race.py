"""One question answered twice at the same time, for several visitors."""

import copy
import threading
import time

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ....commands import UserValueError
from ....generation.verification.traits import Unsupported, input_device
from ....model.modeling_gumiho import GumihoModel
from ....training.data.open_text import encode_turn
from ...pairs import use_options
from ..answering import Answer, stream_answer
from ..arguments import DemoArguments, GenerateArguments


logger = logging.get_logger(__name__)

# More than nearly any text has; to count the tokens of a longer one would take long already.
_CHARACTERS_PER_TOKEN = 16


class Host:
    """
    The models that answer all questions, in turn, a token or a cycle each. Once `is_closed` is set, all answers end at
    their next turn.
    """

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: GumihoModel, limits: DemoArguments
    ):
        self.target, self.tokenizer, self.drafter, self.limits = target, tokenizer, drafter, limits
        self.is_closed = False
        self._changed = threading.Condition()
        self.num_begun = self.num_ended = 0  # turns, with those that are waited for

    def begin_turn(self) -> None:
        """Waits until all turns that were asked for before have ended."""
        with self._changed:
            self.num_begun += 1
            ticket = self.num_begun
            self._changed.wait_for(lambda: self.num_ended == ticket - 1)

    def end_turn(self) -> None:
        """Lets the next one begin."""
        with self._changed:
            self.num_ended += 1
            self._changed.notify_all()

    def hand_over(self) -> float:
        """Lets each waiting answer have a turn; returns the seconds that the caller waited."""
        begin, device = time.perf_counter(), input_device(self.target)
        # The draws of the others do not change the caller's random numbers.
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            self.end_turn()
            self.begin_turn()
        return time.perf_counter() - begin

    def encode(self, question: GenerateArguments) -> list[int]:
        """Returns the token ids of a question. Raises `ValueError` if it is empty or too long."""
        text, most = question.prompt or "", self.limits.max_question_tokens
        if not text.strip():
            raise UserValueError("The question is empty. Write one first.")
        if len(text) <= (longest := _CHARACTERS_PER_TOKEN * most):
            prompt = encode_turn(self.tokenizer, [text], [])
            if len(prompt) <= most:
                return prompt
        raise UserValueError(
            f"The question is too long: the limit is {most} tokens and {longest} characters (`max_question_tokens`). "
            f"Shorten it."
        )


class Race:
    """
    The two answers to a question, written in threads of their own. Once `wish_to_stop` is set, both end at their next
    token or cycle. Raises `ValueError` for a question that is empty or too long, and a setting that is out of range.
    """

    def __init__(self, host: Host, question: GenerateArguments):
        self.host, self.question = host, question
        self.plain, self.drafted = Answer(), Answer()
        # The same weights, with settings of its own.
        drafter = copy.copy(host.drafter)
        drafter.generation_config = copy.deepcopy(host.drafter.generation_config)
        use_options(host.target, drafter, question)
        self.prompt = host.encode(question)
        self.wish_to_stop = threading.Event()
        pairs = (self.drafted, drafter), (self.plain, None)
        self._threads = [threading.Thread(target=self._run, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits until both answers are over, for some `seconds`; returns whether they are."""
        for thread in self._threads:
            thread.join(seconds)
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return not {self.plain.progress, self.drafted.progress} & {"queued", "generating"}

    def _run(self, answer: Answer, drafter: GumihoModel | None) -> None:
        host, question = self.host, self.question

        def check_wish_to_stop() -> None:
            if self.wish_to_stop.is_set() or host.is_closed:
                raise KeyboardInterrupt

        def take_turns() -> None:
            answer.waited += host.hand_over()
            check_wish_to_stop()

        host.begin_turn()
        try:
            check_wish_to_stop()  # it waited for its first turn
            torch.manual_seed(question.seed)
            answer.on_step = take_turns
            stream_answer(
                host.target, host.tokenizer, drafter, self.prompt, answer, max_new_tokens=question.max_new_tokens,
                temperature=question.temperature,
            )  # fmt: skip
        except KeyboardInterrupt:
            answer.progress = "stopped"
        except Exception as error:  # whatever it is, a visitor waits for the answer
            answer.problem = str(error)
            # Others may say what is private. So may a trial, which quotes what a target raised.
            if not isinstance(error, ValueError) or isinstance(error, Unsupported):
                answer.problem = f"The answer failed ({type(error).__name__}). The server's log has the details."
                logger.error("An answer failed.", exc_info=error)
            answer.progress = "failed"
        finally:
            host.end_turn()
