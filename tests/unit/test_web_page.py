"""What the web page shows is text, and nothing that it does not know; answers share the models in turn."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from targets import make_target

from transformers_gumiho.tools.presenting import DemoArguments
from transformers_gumiho.tools.presenting.answering import Answer, Piece
from transformers_gumiho.tools.presenting.cycles import Cycle, CycleLabels
from transformers_gumiho.tools.presenting.tree_svg import tree_svg
from transformers_gumiho.tools.presenting.web import markup
from transformers_gumiho.tools.presenting.web.race import Host


def test_no_text_becomes_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = Cycle(tokens=(5, 6), parents=(0, 0), scores=(0.0, -0.5), accepted=(1,), bonus_token=7)
    labels = CycleLabels(context="<i>before", nodes=("<i>root", "<i>node", "<i>bonus"))
    answer = Answer()
    answer.pieces = [Piece("<script>", "draft"), Piece("&<b>", "target")]
    answer.problem, answer.cycles = "<img onerror=1>", [cycle]
    monkeypatch.setattr(markup, "label_cycle", lambda *_: labels)
    race: Any = SimpleNamespace(prompt=[1], drafted=answer, host=SimpleNamespace(tokenizer=None))

    answer_html, tree_html = markup.answer_html(answer), markup.tree_html(race)
    for tag in ("<script", "&<b>", "<img", "<i>"):
        assert tag not in answer_html + tree_html + tree_svg(cycle, labels)
    for text in ("&lt;script&gt;", "&amp;&lt;b&gt;", "&lt;img onerror=1&gt;"):
        assert text in answer_html
    for text in ("&lt;i&gt;before", "&lt;i&gt;root", "&lt;i&gt;node", "&lt;i&gt;bonus"):
        assert text in tree_html


def test_answers_that_end_while_they_are_compared_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafted = Answer(), Answer()
    plain.progress = drafted.progress = "generating"
    plain.tokens, drafted.tokens = [1], [1]

    def compare(*_: Answer) -> None:
        """The last tokens come just after they were looked at, and differ."""
        plain.tokens.append(2)
        drafted.tokens.append(3)
        plain.progress = drafted.progress = "done"

    race: Any = SimpleNamespace(plain=plain, drafted=drafted, is_over=False)
    monkeypatch.setattr(markup, "first_difference", compare)
    assert 'data-verdict="running"' in markup.verdict_html(race)


def test_the_lock_goes_round_in_the_order_of_arrival() -> None:
    host, taken = Host(make_target(), None, None, DemoArguments()), []
    all_wait = threading.Event()

    def answer(name: int) -> None:
        host.begin_turn()
        torch.manual_seed(name)
        all_wait.wait(60)
        for _ in range(3):
            taken.append((name, torch.rand(()).item()))
            host.hand_over()
        host.end_turn()

    threads = [threading.Thread(target=answer, args=(name,), daemon=True) for name in range(3)]
    for name, thread in enumerate(threads):
        thread.start()
        while host.num_begun < name + 1:
            thread.join(0.01)
    all_wait.set()
    for thread in threads:
        thread.join(60)
    assert [name for name, _ in taken] == [0, 1, 2] * 3
    for name in range(3):
        torch.manual_seed(name)
        assert [value for other, value in taken if other == name] == [torch.rand(()).item() for _ in range(3)]
