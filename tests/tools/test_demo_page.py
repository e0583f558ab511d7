"""The web page: two answers to a question side by side, for several visitors at once."""

import re
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_data import DEMO_TARGET

from transformers_gumiho import cli
from transformers_gumiho.measuring.loading import load_pair
from transformers_gumiho.presenting import DemoArguments, make_page
from transformers_gumiho.presenting.web.markup import answer_html, tree_html, verdict_html
from transformers_gumiho.presenting.web.race import Question, Race
from transformers_gumiho.presenting.web.turns import Turns


Pair = tuple[Any, Any, Any]
PROMPTS = ["def __init__(self, ", "def read(self):"]
SMALL = {"max_new_tokens": 16, "num_assistant_tokens": 12, "branching_factor": 4}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(str(DEMO_TARGET), str(DEMO_TARGET.parent / "gumiho"), "float32")


def begin(pair: Pair, turns: Turns, text: str, **settings: Any) -> Race:
    target, tokenizer, drafter = pair
    race = Race(target, tokenizer, drafter, turns, Question(text=text, **SMALL | settings))
    race.start()
    return race


def plain_tokens(pair: Pair, text: str, seed: int = 0, **settings: Any) -> list[int]:
    inputs = pair[1](text, return_tensors="pt")
    torch.manual_seed(seed)
    return pair[0].generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()


def test_visitors_at_once_get_what_each_would_get_alone(pair: Pair) -> None:
    """Also where texts are sampled, with seeds and settings of their own, and in turns."""
    turns = Turns(torch.device("cpu"))
    sampled = [{"temperature": 0.8, "seed": seed} for seed in (1, 2)]
    expected = [
        plain_tokens(pair, text, how["seed"], max_new_tokens=16, do_sample=True, temperature=0.8)
        for text, how in zip(PROMPTS, sampled, strict=True)
    ]
    expected.append(plain_tokens(pair, PROMPTS[0], max_new_tokens=16, do_sample=False))
    settings_before = pair[2].generation_config.to_dict()
    races = [begin(pair, turns, text, **how) for text, how in zip(PROMPTS, sampled, strict=True)]
    races.append(begin(pair, turns, PROMPTS[0], num_assistant_tokens=5, branching_factor=1))
    for race, tokens in zip(races, expected, strict=True):
        assert race.wait(120)
        assert race.plain.tokens == race.drafted.tokens == tokens
        assert 'data-verdict="equal"' in verdict_html(race)
    assert [len(race.drafted.cycles[0].tokens) - 1 for race in races] == [12, 12, 5]
    assert pair[2].generation_config.to_dict() == settings_before


def test_what_is_coloured_is_drafted_and_the_page_survives_any_text(pair: Pair) -> None:
    race = begin(pair, Turns(torch.device("cpu")), "print('<b>${1}</b>')\n")
    assert race.wait(120)
    html = answer_html(race.drafted)
    text = "".join(piece for piece, _ in race.drafted.pieces)
    assert text == pair[1].decode(race.drafted.tokens)
    drafts = [cycle.tokens[node] for cycle in race.drafted.cycles for node in cycle.accepted]
    assert 0 < len(drafts) < len(race.drafted.tokens)
    coloured = "".join(piece for piece, is_draft in race.drafted.pieces if is_draft)
    assert coloured == "".join(pair[1].decode([token]) for token in drafts)
    assert "gumiho-drafts" in html
    assert not any(is_draft for _, is_draft in race.plain.pieces)
    tree = tree_html(race, pair[1])
    assert tree.count("<rect") == len(race.drafted.cycles[-1].tokens) + (
        race.drafted.cycles[-1].bonus_token is not None
    )
    assert "<b>$" not in html + tree


def test_stopped_answers_end_at_once_and_others_go_on(pair: Pair) -> None:
    turns = Turns(torch.device("cpu"))
    stopped = begin(pair, turns, PROMPTS[0], max_new_tokens=200)
    other = begin(pair, turns, PROMPTS[1])
    while not stopped.plain.tokens:
        time.sleep(0.01)
    stopped.stop()
    assert stopped.wait(60)
    assert {stopped.plain.progress, stopped.drafted.progress} == {"stopped"}
    assert len(stopped.plain.tokens) < 200
    assert "Stopped. The " in verdict_html(stopped)
    assert other.wait(120)
    assert 'data-verdict="equal"' in verdict_html(other)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (" \n", {}, "There is no question yet. Write one first."),
        ("a" * 600, {"max_new_tokens": 4090}, "has 75 tokens and the answer may have 4090, but the target reads 4096"),
        ("a", {"branching_factor": 0}, "`branching_factor` must be an integer of at least 1, got 0"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(
    pair: Pair, text: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        begin(pair, Turns(torch.device("cpu")), text, **settings)


def test_a_failure_is_told_and_the_models_go_to_the_next(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(pair[0].model.layers[0], "forward", _out_of_memory)
        race = begin(pair, turns, PROMPTS[0])
        assert race.wait(60)
    assert race.plain.progress == race.drafted.progress == "failed"
    assert "There is not enough memory for this answer. Ask for fewer" in answer_html(race.drafted)
    assert 'data-verdict="failed"' in verdict_html(race)
    again = begin(pair, turns, PROMPTS[0])
    assert again.wait(120)
    assert 'data-verdict="equal"' in verdict_html(again)


def _out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_gradio_is_asked_for_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers_gumiho.presenting.web.page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["gumiho", "demo", "--target", "no/such/folder", "--assistant", "no/such/one"])
    with pytest.raises(SystemExit, match=r"^gumiho demo: .*gradio.*pip install 'transformers-gumiho\[demo\]'"):
        cli.main()


def test_turns_are_fair_in_time() -> None:
    """Steps of one answer take four times as long as those of two others, of which one comes late."""
    turns = Turns(torch.device("cpu"))
    seconds: dict[str, float] = {}
    everybody_is_there, first_is_done = threading.Barrier(2), threading.Event()

    def work(name: str, step: float) -> None:
        if name == "late":
            everybody_is_there.wait(30)
        with turns.join(0) as turn:
            for index in range(10_000):
                if name == "slow" and index == 5:
                    everybody_is_there.wait(30)
                time.sleep(step)
                turn.give_way()
                if first_is_done.is_set() or (name == "late" and turn.seconds > 0.3):
                    break
            first_is_done.set()
            seconds[name] = turn.seconds

    threads = [threading.Thread(target=work, args=item) for item in (("slow", 0.04), ("quick", 0.01), ("late", 0.01))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seconds["slow"] == pytest.approx(seconds["quick"], abs=0.15)
    # Whoever comes late is level with the others from then on: it neither catches up first nor waits for their end.
    assert seconds["late"] < seconds["quick"]


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the extra `test` has it)")
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None) or playwright.chromium.executable_path
        if not Path(found).exists():
            pytest.skip("needs a browser: `apt-get install chromium`, or `playwright install chromium`")
        # Neither a sandbox nor much shared memory is to be had in most containers.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pytest.importorskip("gradio", reason="needs gradio (the extra `demo` has it)")
    page = make_page(DemoArguments(pair="demo", max_new_tokens=512, num_assistant_tokens=12, branching_factor=4))
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    yield url
    page.close()


def test_the_space_shows_the_pair_that_its_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gradio = pytest.importorskip("gradio", reason="needs gradio (the extra `demo` has it)")
    monkeypatch.setenv("PAIR", "demo")
    app = Path(__file__).parents[2] / "examples" / "space" / "app.py"
    assert isinstance(runpy.run_path(str(app), run_name="app")["demo"], gradio.Blocks)


class Visitor:
    """Somebody with the page open; sessions of visitors are apart."""

    def __init__(self, browser: Any, address: str):
        self.page = browser.new_context().new_page()
        self.page.set_default_timeout(120_000)
        self.page.goto(address)
        self.page.get_by_role("button", name="Length, sampling and draft tree").click()

    def ask(self, question: str, num_tokens: int) -> None:
        self.page.locator("#length input[type=number]").fill(str(num_tokens))
        self.page.locator("#question textarea").fill(question)
        self.press("#ask")

    def press(self, button: str) -> None:
        # A real click waits until nothing on the page moves; while an answer is written something always does.
        self.page.locator(button).dispatch_event("click")

    def wait_for_verdict(self, kind: str) -> str:
        verdict = self.page.locator(f'#verdict [data-verdict="{kind}"]')
        verdict.wait_for()
        return verdict.text_content()

    def number(self, answer: str, name: str) -> float:
        return float(self.page.locator(f"#{answer} .gumiho-{name}").text_content())

    def text(self, answer: str) -> str:
        return self.page.locator(f"#{answer} .gumiho-text").text_content()


def test_two_visitors_in_a_browser(browser: Any, address: str, pair: Pair) -> None:
    visitors = [Visitor(browser, address) for _ in PROMPTS]
    for visitor, prompt in zip(visitors, PROMPTS, strict=True):
        visitor.ask(prompt, 24)
    first = visitors[0]
    seen = []
    while not first.page.locator('#verdict [data-verdict="equal"]').count():
        if first.page.locator("#plain .gumiho-tokens").count():
            seen.append(first.number("plain", "tokens"))
        time.sleep(0.05)
    assert len(set(seen)) > 3, "the counter moves"
    assert seen == sorted(seen)
    for visitor, prompt in zip(visitors, PROMPTS, strict=True):
        assert "token for token" in visitor.wait_for_verdict("equal")
        expected = pair[1].decode(plain_tokens(pair, prompt, max_new_tokens=24, do_sample=False))
        assert visitor.text("plain") == visitor.text("drafted") == expected
        assert visitor.number("drafted", "tokens") == 24
        assert visitor.number("drafted", "tau") > 1.5
        assert visitor.number("drafted", "speed") > 0
        assert visitor.page.locator("#drafted .gumiho-drafts").count() > 1
        assert visitor.page.locator("#plain .gumiho-drafts").count() == 0
        assert visitor.page.locator("#tree svg rect").count() > 12
        visitor.page.context.close()


def test_stop_button_and_messages_in_a_browser(browser: Any, address: str) -> None:
    visitor = Visitor(browser, address)
    visitor.ask(" ", 500)
    visitor.page.get_by_text("There is no question yet. Write one first.").first.wait_for()
    visitor.ask(PROMPTS[0], 500)
    visitor.page.locator("#plain .gumiho-tokens").wait_for()
    visitor.press("#stop")
    assert re.fullmatch(r"Stopped\. The \d+ tokens that both have are the same\.", visitor.wait_for_verdict("stopped"))
    assert 0 < visitor.number("plain", "tokens") < 500
    visitor.ask(PROMPTS[1], 8)
    visitor.wait_for_verdict("equal")
    assert visitor.number("plain", "tokens") == 8
