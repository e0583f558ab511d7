"""The page: one question, and its answers with a drafter and without, side by side."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....commands import UserError
from ....model.modeling_gumiho import GumihoModel
from ...pairs import settings_of
from ..arguments import DemoArguments, GenerateArguments
from .markup import answer_html, tree_html, verdict_html
from .race import Host, Race


# Seconds between two pictures of an answer: often enough to read along, seldom enough to cost nothing.
_INTERVAL = 0.2
_LONGEST_QUEUE = 64
_CHATS = ["Why is the sky blue?", "Write a short poem about a fox with nine tails.", "What is 17 times 23?"]
_TEXTS = ["def __init__(self, ", "def read(self):", "import os\n\nclass "]
_INTRODUCTION = """\
# Gumiho beside plain decoding

The target `{}` answers your question twice, at the same time: as plain `generate()` does, and with a drafter. \
Accepted drafts are <span style="background:rgba(34,197,94,0.28)">green</span>. Both answers share the processor, a \
cycle or token each in turn. Each clock runs only while its own answer is generated."""


class Page(gr.Blocks):
    """The page of a pair. A question and its answers belong to the visitor's session. `args` has the limits."""

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: GumihoModel, args: DemoArguments
    ):
        super().__init__(title="Gumiho beside plain decoding", analytics_enabled=False)
        self.host = Host(target, tokenizer, drafter, args)
        with self:
            # Visitors need not see the folders around a target.
            gr.Markdown(_INTRODUCTION.format(Path(args.target or args.pair or "").name))
            # With one line, Enter asks. Shift and Enter begin another line.
            question = gr.Textbox(label="Your question", lines=1, max_lines=8, elem_id="question")
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                stop = gr.Button("Stop", variant="stop", elem_id="stop")
            gr.Examples(_CHATS if tokenizer.chat_template else _TEXTS, question)
            with gr.Accordion("Length, sampling and draft tree", open=False), gr.Row():
                self._settings = self._list_settings(args.max_new_tokens)
            session, verdict, answers = gr.State(None), gr.HTML(elem_id="verdict"), []
            with gr.Row():
                for name, heading in (("plain", "Plain decoding"), ("drafted", "With Gumiho")):
                    with gr.Column():
                        gr.Markdown(f"### {heading}")
                        answers.append(gr.HTML(container=True, padding=True, elem_id=name))
            gr.Markdown("### The newest draft tree")
            outputs = [session, *answers, verdict, gr.HTML(elem_id="tree")]
            gr.on(
                [ask.click, question.submit], self.ask, [question, *self._settings.values()], outputs,
                concurrency_limit=args.max_visitors, show_progress="hidden",
            )  # fmt: skip
            stop.click(lambda wish_to_stop: wish_to_stop and wish_to_stop.set(), session, None, queue=False)
        self.queue(max_size=_LONGEST_QUEUE)

    def ask(self, text: str, *settings: Any) -> Iterator[tuple[Any, ...]]:
        """Yields what is shown until both answers are done: how to stop, and four pieces of HTML."""
        # A field may be empty.
        given = {name: value for name, value in zip(self._settings, settings, strict=True) if value is not None}
        try:
            race = Race(self.host, GenerateArguments(prompt=text, **given))
        except UserError as error:
            # What it says is shown as HTML.
            raise gr.Error(escape(str(error)), print_exception=False) from error
        # Only once: the session keeps it for the button that stops it, and nothing else of the race.
        kept, is_over = race.wish_to_stop, False
        try:
            while True:
                yield kept, answer_html(race.plain), answer_html(race.drafted), verdict_html(race), tree_html(race)
                if is_over:
                    return
                kept, is_over = gr.skip(), race.wait(_INTERVAL)
        finally:
            # Also where the visitor has gone.
            race.wish_to_stop.set()

    def close(self, verbose: bool = True) -> None:
        """Closes the page and ends all answers: each ends in its next turn."""
        self.host.is_closed = True
        self.host.begin_turn()
        self.host.end_turn()
        super().close(verbose)

    def _list_settings(self, most: int) -> dict[str, gr.components.Component]:
        """Returns the component of each setting. Gradio refuses what is out of range."""
        own = settings_of(self.host.target, self.host.drafter)
        nodes, width, lookup = own.num_assistant_tokens, own.branching_factor, own.prompt_lookup_num_tokens
        whole: dict[str, Any] = {"step": 1, "precision": 0}
        return {
            "max_new_tokens": gr.Slider(
                1, most, min(128, most), label="New tokens", elem_id="max_new_tokens", **whole
            ),
            "temperature": gr.Slider(0, 2, 0, step=0.1, label="Temperature", info="0 is greedy."),
            "seed": gr.Number(0, label="Seed", info="Of both answers.", minimum=0, maximum=2**31 - 1, precision=0),
            "num_assistant_tokens": gr.Slider(1, 127, nodes, label="Nodes in the tree", **whole),
            "branching_factor": gr.Slider(1, 32, width, label="Branching factor", info="1 is a chain.", **whole),
            "prompt_lookup_num_tokens": gr.Slider(0, 64, lookup, label="Prompt-lookup drafts", **whole),
        }
