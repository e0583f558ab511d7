"""The page: one question, and its answers with a drafter and without, side by side."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from threading import Event
from typing import Any

import gradio as gr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.settings import DraftingSettings
from ...model.modeling_gumiho import GumihoModel
from ...target.placement import drafter_device
from .lock import ModelLock
from .markup import answer_html, tree_html, verdict_html
from .race import Question, Race


# Seconds between two pictures of an answer: often enough to read along, seldom enough to cost nothing.
_INTERVAL = 0.2
_LONGEST_QUEUE = 64
_MOST_NODES, _MOST_WIDTH, _MOST_LOOKED_UP = 127, 32, 64
_CHATS = ["Why is the sky blue?", "Write a short poem about a fox with nine tails.", "What is 17 times 23?"]
_TEXTS = ["def __init__(self, ", "def read(self):", "import os\n\nclass "]
_INTRODUCTION = """\
# Gumiho beside plain decoding

`{target}` answers your question twice, at the same time: as plain `generate()` does, and with the drafter \
`{drafter}`. What was drafted and the target accepted is <span style="background:rgba(34,197,94,0.28)">\
green</span>. Both share the processor, a cycle or token each in turn. \
Each clock runs only while its own answer is generated."""


class Page:
    """
    What the page does for its visitors. Nothing of a visit is kept here: a question and its answers belong to the
    visitor's session.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        drafter: The drafter.
        max_new_tokens: The most that a visitor may ask for.
        max_question_tokens: The most that a visitor may ask with.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: GumihoModel,
        max_new_tokens: int,
        max_question_tokens: int,
    ):
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.max_new_tokens, self.max_question_tokens = max_new_tokens, max_question_tokens
        self.lock = ModelLock(drafter_device(target))

    def ask(self, text: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Yields what is shown, again and again until both answers are done: how to stop, and four pieces of HTML."""
        try:
            question = self._question(text, *settings)
            race = Race(self.target, self.tokenizer, self.drafter, self.lock, question, self.max_question_tokens)
        except ValueError as error:
            # What it says is shown as HTML.
            raise gr.Error(escape(str(error)), print_exception=False) from error
        try:
            race.start()
            # Only once: the session keeps it for the button that stops it, and nothing else of the race.
            yield race.wish_to_stop, *self._show(race)
            while not race.wait(_INTERVAL):
                yield gr.skip(), *self._show(race)
            yield gr.skip(), *self._show(race)
        finally:
            # Also where the visitor has gone.
            race.stop()

    def _question(
        self,
        text: str,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        num_assistant_tokens: int,
        branching_factor: int,
        full_tree_attention: bool,
        prompt_lookup_num_tokens: int,
    ) -> Question:
        for name, value, least, most in (
            ("New tokens", max_new_tokens, 1, self.max_new_tokens),
            ("Nodes in the tree", num_assistant_tokens, 1, _MOST_NODES),
            ("Branching factor", branching_factor, 1, _MOST_WIDTH),
            ("Prompt-lookup drafts", prompt_lookup_num_tokens, 0, _MOST_LOOKED_UP),
            ("The temperature", temperature, 0, 2),
            ("The seed", seed, 0, 2**31 - 1),
        ):
            # Anything can be sent, of any length; only numbers are worth repeating.
            if not isinstance(value, (int, float)):
                raise ValueError(f"{name} must be a number from {least} to {most}.")
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {value}.")
        return Question(
            text=text or "",
            max_new_tokens=int(max_new_tokens),
            temperature=float(temperature),
            seed=int(seed),
            num_assistant_tokens=int(num_assistant_tokens),
            branching_factor=int(branching_factor),
            full_tree_attention=bool(full_tree_attention),
            prompt_lookup_num_tokens=int(prompt_lookup_num_tokens),
        )

    def _show(self, race: Race) -> tuple[str, str, str, str]:
        tree = tree_html(race, self.tokenizer)
        return answer_html(race.plain), answer_html(race.drafted), verdict_html(race), tree

    def build(self, max_visitors: int) -> gr.Blocks:
        """Returns the page, which answers `max_visitors` at a time."""
        introduction = _INTRODUCTION.format(target=_name(self.target), drafter=_name(self.drafter))
        with gr.Blocks(title="Gumiho beside plain decoding", analytics_enabled=False) as blocks:
            session = gr.State(None)
            gr.Markdown(introduction)
            question = gr.Textbox(label="Your question", lines=2, elem_id="question")
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                stop = gr.Button("Stop", variant="stop", elem_id="stop")
            gr.Examples(_CHATS if self.tokenizer.chat_template else _TEXTS, question)
            with gr.Accordion("Length, sampling and draft tree", open=False):
                settings = self._settings()
            verdict = gr.HTML(elem_id="verdict")
            with gr.Row():
                plain = _answer("plain", "Plain decoding")
                drafted = _answer("drafted", "With Gumiho")
            gr.Markdown("### The newest draft tree")
            tree = gr.HTML(elem_id="tree")
            gr.on(
                [ask.click, question.submit],
                self.ask,
                [question, *settings],
                [session, plain, drafted, verdict, tree],
                concurrency_limit=max_visitors,
                show_progress="hidden",
            )
            stop.click(_stop, session, None, queue=False)
        return blocks.queue(max_size=_LONGEST_QUEUE)

    def _settings(self) -> list[gr.components.Component]:
        """Returns the settings of a question, in the order in which [`ask`] takes them."""
        own = DraftingSettings.from_generation_config(
            self.drafter.generation_config, self.drafter.config, None, device_type=self.drafter.device.type
        )
        length = min(128, self.max_new_tokens)
        with gr.Row():
            sampling = [
                gr.Slider(
                    1, self.max_new_tokens, length, step=1, label="New tokens", info="Maximum.", elem_id="length"
                ),
                gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0 is greedy."),
                gr.Number(0, label="Seed", precision=0, minimum=0, info="Both answers are sampled with it."),
            ]
        with gr.Row():
            nodes = min(own.num_assistant_tokens, _MOST_NODES)
            width = min(own.branching_factor, _MOST_WIDTH)
            lookup = min(own.prompt_lookup_num_tokens, _MOST_LOOKED_UP)
            tree = [
                gr.Slider(1, _MOST_NODES, nodes, step=1, label="Nodes in the tree", info="Drafted per cycle."),
                gr.Slider(1, _MOST_WIDTH, width, step=1, label="Branching factor", info="1 is a chain."),
                gr.Checkbox(own.full_tree_attention, label="Full tree attention", info="All recombinations."),
                gr.Slider(
                    0, _MOST_LOOKED_UP, lookup, step=1, label="Prompt-lookup drafts", info="Maximum; 0 for none."
                ),
            ]
        return [*sampling, *tree]


def _answer(name: str, heading: str) -> gr.HTML:
    """Returns the place of an answer, in a column of its own."""
    with gr.Column():
        gr.Markdown(f"### {heading}")
        return gr.HTML(container=True, padding=True, elem_id=name)


def _stop(wish_to_stop: Event | None) -> None:
    if wish_to_stop is not None:
        wish_to_stop.set()


def _name(model: PreTrainedModel) -> str:
    """Returns a model's name without the folders around it, which visitors need not see."""
    return Path(model.name_or_path).name or type(model).__name__
