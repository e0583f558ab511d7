"""The page: one question, and its answers with a drafter and without, side by side."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from transformers import PreTrainedModel

from ...model.decoding_settings import DraftingSettings
from ...user_errors import UserError, UserValueError
from ..arguments import GenerateArguments
from .markup import shown
from .race import Host, Race


# Seconds between two pictures of an answer: often enough to read along, seldom enough to cost nothing.
_INTERVAL = 0.2
_LONGEST_QUEUE = 64
# The settings of a question: label, explanation, least value, most (`None`: the page's limit), and step.
_SETTINGS = {
    "max_new_tokens": ("New tokens", "Maximum.", 1, None, 1),
    "temperature": ("Temperature", "0 is greedy.", 0, 2, 0.1),
    "seed": ("Seed", "Both answers are sampled with it.", 0, 2**31 - 1, 1),
    "num_assistant_tokens": ("Nodes in the tree", "Drafted per cycle.", 1, 127, 1),
    "branching_factor": ("Branching factor", "1 is a chain.", 1, 32, 1),
    "prompt_lookup_num_tokens": ("Prompt-lookup drafts", "Maximum; 0 for none.", 0, 64, 1),
}
_CHATS = ["Why is the sky blue?", "Write a short poem about a fox with nine tails.", "What is 17 times 23?"]
_TEXTS = ["def __init__(self, ", "def read(self):", "import os\n\nclass "]
_INTRODUCTION = """\
# Gumiho beside plain decoding

{target} answers your question twice, at the same time: as plain `generate()` does, and with {drafter}. \
What was drafted and the target accepted is <span style="background:rgba(34,197,94,0.28)">\
green</span>. Both share the processor, a cycle or token each in turn. \
Each clock runs only while its own answer is generated."""


class Page(Host):
    """
    What the page does for its visitors. Nothing of a visit is kept here: a question and its answers belong to the
    visitor's session.
    """

    def ask(self, text: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Yields what is shown, again and again until both answers are done: how to stop, and four pieces of HTML."""
        try:
            race = Race(self, self._question(text, *settings))
        except UserError as error:
            # What it says is shown as HTML.
            raise gr.Error(escape(str(error)), print_exception=False) from error
        try:
            race.start()
            # Only once: the session keeps it for the button that stops it, and nothing else of the race.
            yield race.wish_to_stop, *shown(race)
            while not race.wait(_INTERVAL):
                yield gr.skip(), *shown(race)
            yield gr.skip(), *shown(race)
        finally:
            # Also where the visitor has gone.
            race.wish_to_stop.set()

    def _question(self, text: str, *settings: Any) -> GenerateArguments:
        values: dict[str, Any] = {}
        for (name, (label, _, least, most, step)), value in zip(_SETTINGS.items(), settings, strict=True):
            most = most or self.max_new_tokens
            # Anything can be sent, of any length; only numbers are worth repeating.
            if not isinstance(value, (int, float)):
                raise UserValueError(f"{label} must be a number from {least} to {most}.")
            if not least <= value <= most:
                raise UserValueError(f"{label} must be from {least} to {most}, got {value}.")
            values[name] = int(value) if step == 1 else float(value)
        return GenerateArguments(prompt=text, **values)

    def build(self, max_visitors: int, pair: str | None = None) -> gr.Blocks:
        """Returns the page, which answers `max_visitors` at a time. `pair` is the short name of the models, if any."""
        target, drafter = f"`{_name(self.target)}`", f"the drafter `{_name(self.drafter)}`"
        if pair is not None:
            target, drafter = f"The target of the pair `{pair}`", "the pair's drafter"
        introduction = _INTRODUCTION.format(target=target, drafter=drafter)
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
            answers = []
            with gr.Row():
                for name, heading in (("plain", "Plain decoding"), ("drafted", "With Gumiho")):
                    with gr.Column():
                        gr.Markdown(f"### {heading}")
                        answers.append(gr.HTML(container=True, padding=True, elem_id=name))
            gr.Markdown("### The newest draft tree")
            tree = gr.HTML(elem_id="tree")
            gr.on(
                [ask.click, question.submit],
                self.ask,
                [question, *settings],
                [session, *answers, verdict, tree],
                concurrency_limit=max_visitors,
                show_progress="hidden",
            )
            stop.click(lambda wish_to_stop: wish_to_stop and wish_to_stop.set(), session, None, queue=False)
        return blocks.queue(max_size=_LONGEST_QUEUE)

    def _settings(self) -> list[gr.components.Component]:
        """Returns the settings of a question, in the order in which [`ask`] takes them."""
        own = DraftingSettings.from_generation_config(
            self.drafter.generation_config, self.drafter.config, None, device_type=self.drafter.device.type
        )
        shown: list[gr.components.Component] = []
        with gr.Row():
            for name, (label, info, least, most, step) in _SETTINGS.items():
                begin = {"max_new_tokens": min(128, self.max_new_tokens)}.get(name, getattr(own, name, 0))
                if name == "seed":
                    shown.append(gr.Number(begin, label=label, precision=0, minimum=least, info=info))
                else:
                    most = most or self.max_new_tokens
                    shown.append(gr.Slider(least, most, begin, step=step, label=label, info=info, elem_id=name))
        return shown


def _name(model: PreTrainedModel) -> str:
    """Returns a model's name without the folders around it, which visitors need not see."""
    return Path(model.name_or_path).name or type(model).__name__
