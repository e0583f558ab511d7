"""What the web page shows is never more than text, and never says what it does not know."""

from types import SimpleNamespace
from typing import Any

import pytest

from transformers_gumiho.tools.presenting.answering import Answer
from transformers_gumiho.tools.presenting.cycles import Cycle, CycleLabels
from transformers_gumiho.tools.presenting.tree_svg import tree_svg
from transformers_gumiho.tools.presenting.web import markup


def test_no_text_becomes_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = Cycle(tokens=(5, 6), parents=(0, 0), scores=(0.0, -0.5), accepted=(1,), bonus_token=7)
    labels = CycleLabels(context="<i>before", nodes=("<i>root", "<i>node", "<i>bonus"))
    answer = Answer()
    answer.pieces = [("<script>", True), ("&<b>", False)]
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
