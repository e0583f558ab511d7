"""The web page: two answers to a question side by side, for several visitors at once."""

import operator
import re
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import gumiho, refuse

from transformers_gumiho.commands import UserValueError
from transformers_gumiho.tools import presenting
from transformers_gumiho.tools.measuring.timing import temporary_settings
from transformers_gumiho.tools.presenting import DemoArguments, GenerateArguments, command, make_page
from transformers_gumiho.tools.presenting.web import race as race_module
from transformers_gumiho.tools.presenting.web.markup import answer_html, verdict_html
from transformers_gumiho.tools.presenting.web.race import Host, Race


Pair = tuple[Any, Any, Any]
PROMPTS = ["def __init__(self, ", "def read(self):"]
SMALL = {"max_new_tokens": 16, "num_assistant_tokens": 12, "branching_factor": 4}
LIMITS = DemoArguments(pair="demo", max_new_tokens=2000, max_question_tokens=100)


@pytest.fixture(scope="module")
def page_module() -> ModuleType:
    """The module of the page, which needs gradio."""
    pytest.importorskip("gradio", reason="needs gradio (the extra `demo` has it)")
    from transformers_gumiho.tools.presenting.web import page

    return page


def make_host(pair: Pair) -> Host:
    return Host(*pair, LIMITS)


def begin(host: Host, text: str, **settings: Any) -> Race:
    return Race(host, GenerateArguments(prompt=text, **SMALL | settings))


def plain_tokens(pair: Pair, text: str, seed: int = 0, **settings: Any) -> list[int]:
    inputs = pair[1](text, return_tensors="pt")
    torch.manual_seed(seed)
    return pair[0].generate(**inputs, **settings)[0, inputs["input_ids"].shape[1] :].tolist()


def test_visitors_at_once_get_what_each_would_get_alone(pair: Pair) -> None:
    """Also where texts are sampled, with seeds and settings of their own."""
    host = make_host(pair)
    sampled = [{"temperature": 0.8, "seed": seed} for seed in (1, 2)]
    expected = [
        plain_tokens(pair, text, how["seed"], max_new_tokens=16, do_sample=True, temperature=0.8)
        for text, how in zip(PROMPTS, sampled, strict=True)
    ]
    expected.append(plain_tokens(pair, PROMPTS[0], max_new_tokens=16, do_sample=False))
    settings_before = pair[2].generation_config.to_dict()
    races = [begin(host, text, **how) for text, how in zip(PROMPTS, sampled, strict=True)]
    races.append(begin(host, PROMPTS[0], num_assistant_tokens=5, branching_factor=1))
    for race, tokens in zip(races, expected, strict=True):
        assert race.wait(120)
        assert race.plain.tokens == race.drafted.tokens == tokens
        assert 'data-verdict="equal"' in verdict_html(race)
    assert [len(race.drafted.cycles[0].tokens) - 1 for race in races] == [12, 12, 5]
    assert pair[2].generation_config.to_dict() == settings_before


def test_the_settings_of_a_page_begin_with_the_drafters(pair: Pair, page_module: Any) -> None:
    with temporary_settings(pair[2], {"prompt_lookup_num_tokens": 7, "branching_factor": 3}):
        shown = page_module.Page(*pair, LIMITS)
    values = {getattr(block, "label", ""): getattr(block, "value", None) for block in shown.blocks.values()}
    assert (values["Prompt-lookup drafts"], values["Branching factor"]) == (7, 3)


def test_stopped_answers_end_at_once_and_others_go_on(pair: Pair) -> None:
    host = make_host(pair)
    so_far: list[tuple[int, int]] = []

    def stop_once_both_are_written(*_: Any) -> None:
        is_there.wait()
        if stopped.plain.tokens and stopped.drafted.cycles and not so_far:
            so_far.append((len(stopped.plain.tokens), len(stopped.drafted.cycles)))
            stopped.wish_to_stop.set()

    is_there = threading.Event()
    with pair[0].model.layers[0].register_forward_pre_hook(stop_once_both_are_written):
        stopped = begin(host, PROMPTS[0], max_new_tokens=2000)
        is_there.set()
        other = begin(host, PROMPTS[1])
        assert stopped.wait(120)
        assert other.wait(120)
    assert {stopped.plain.progress, stopped.drafted.progress} == {"stopped"}
    # What was being computed is still shown.
    assert len(stopped.plain.tokens) <= so_far[0][0] + 1
    assert len(stopped.drafted.cycles) <= so_far[0][1] + 1
    assert "Stopped. The " in verdict_html(stopped)
    assert 'data-verdict="equal"' in verdict_html(other)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (" \n", {}, "The question is empty. Write one first."),
        ("a b " * 100, {}, r"is too long: the limit is 100 tokens .* \(`max_question_tokens`\). Shorten it"),
        ("a" * 1601, {}, "is too long: the limit is 100 tokens and 1600 characters"),
        ("a", {"branching_factor": 0}, "`branching_factor` must be an integer of at least 1, got 0"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(
    pair: Pair, text: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        begin(make_host(pair), text, **settings)


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_failure_is_shown_without_what_is_private_and_the_models_go_to_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, logged = make_host(pair), []
    monkeypatch.setattr(race_module.logger, "error", lambda *_, exc_info: logged.append(exc_info))
    with monkeypatch.context() as patch:
        failing = fail_with(FileNotFoundError(2, "No such file", "/home/host/secret"))
        patch.setattr(pair[0].model.layers[0], "forward", failing)
        race = begin(host, PROMPTS[0])
        assert race.wait(60)
    assert race.plain.progress == race.drafted.progress == "failed"
    assert "The answer failed (FileNotFoundError)." in answer_html(race.plain)
    # The target runs code of others here, so drafting begins with a trial, which quotes the error.
    assert "The answer failed (Unsupported)." in answer_html(race.drafted)
    assert "secret" not in answer_html(race.plain) + answer_html(race.drafted)
    assert all("secret" in str(error) for error in logged)
    assert 'data-verdict="failed"' in verdict_html(race)
    again = begin(host, PROMPTS[0])
    assert again.wait(120)
    assert 'data-verdict="equal"' in verdict_html(again)


def test_who_leaves_stops_the_answers_and_the_session_keeps_no_answer(
    pair: Pair, page_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_module.Page(*pair, LIMITS)
    shown = page.ask("a", 2000, 0, None, 12, 4, 0)
    kept = next(shown)[0]
    assert isinstance(kept, threading.Event)
    assert not kept.is_set()
    shown.close()
    assert kept.is_set()
    # What a refusal quotes is no markup.
    monkeypatch.setattr(page_module, "Race", fail_with(UserValueError("<img>")))
    with pytest.raises(page_module.gr.Error, match="&lt;img&gt;"):
        next(page.ask("a", 2000, 0, 0, 12, 4, 0))


def test_a_closed_page_ends_all_answers(pair: Pair, page_module: Any) -> None:
    page = page_module.Page(*pair, LIMITS)
    race = begin(page.host, PROMPTS[0], max_new_tokens=2000)
    page.close()
    assert race.wait(60)
    assert "stopped" in (race.plain.progress, race.drafted.progress)


def test_gradio_is_asked_for_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers_gumiho.tools.presenting.web.page", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(SystemExit, match=r"^gumiho demo: .*gradio.*pip install 'transformers-gumiho\[demo\]'"):
        gumiho("demo", "--target", "no/such/folder", "--assistant", "no/such/one")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "256.1.1.1"], "Nothing can listen on --host 256.1.1.1: "),
        (["--port", 99999], "Nothing can listen on --host 127.0.0.1 --port 99999: "),
    ],
)
def test_an_address_is_tried_before_models_are_loaded(words: list[object], message: str) -> None:
    refuse(message, "demo", "--target", "no/such/folder", "--assistant", "no/such/one", *words)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the extra `test` has it)")
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None) or playwright.chromium.executable_path
        if not Path(found).exists():
            pytest.skip("needs a browser: `apt-get install chromium`, or `playwright install chromium`")
        # Neither a sandbox nor much shared memory is to be had in most containers. Fonts of other hosts are not waited
        # for.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


class Gate:
    """Where it is not open, it lets a few of the target's passes through at a time: no machine is too fast to look."""

    def __init__(self) -> None:
        self.is_open = True
        self._permits = threading.Semaphore(0)

    def __call__(self, *_: Any) -> None:
        while not self.is_open and not self._permits.acquire(timeout=0.05):
            pass

    def let_through(self, num_passes: int) -> None:
        self._permits.release(num_passes)


@pytest.fixture(scope="module")
def page_with_gate(page_module: Any) -> Iterator[tuple[str, Gate]]:
    gate = Gate()

    def load(args: Any) -> Pair:
        pair = load_before(args)
        pair[0].model.layers[0].register_forward_pre_hook(gate)
        return pair

    with pytest.MonkeyPatch.context() as patch:
        load_before = command.load_pair
        patch.setattr(command, "load_pair", load)
        page = make_page(DemoArguments(pair="demo", num_assistant_tokens=12, branching_factor=4))
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    yield url, gate
    page.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 3e9}, "Value 3000000000.0 is greater than maximum value 512"),
        ({"prompt_lookup": -1}, "Value -1 is less than minimum value 0"),
        ({"seed": -5}, "Value -5 is less than minimum value 0"),
        ({"text": "a" * 20_000}, "max_question_tokens"),
        ({"nodes": "<img>"}, "error"),
    ],
)
def test_the_page_trusts_nothing_that_it_is_sent(
    wrong: dict[str, Any], message: str, page_with_gate: tuple[str, Gate]
) -> None:
    settings = {"text": "a", "max_new_tokens": 8, "temperature": 0, "seed": 0, "nodes": 12, "width": 4}
    gradio_client = pytest.importorskip("gradio_client")
    client = gradio_client.Client(page_with_gate[0], verbose=False)
    with pytest.raises(gradio_client.exceptions.AppError, match=re.escape(message)) as refused:
        client.predict(*(settings | {"prompt_lookup": 0} | wrong).values(), api_name="/ask")
    assert "<img>" not in str(refused.value)


@pytest.fixture
def gate(page_with_gate: tuple[str, Gate]) -> Iterator[Gate]:
    """The page's gate, closed."""
    gate = page_with_gate[1]
    gate.is_open = False
    yield gate
    gate.is_open = True


def test_the_space_shows_what_its_variables_say(page_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "ASSISTANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PAIR", "demo")
    app = Path(__file__).parents[2] / "examples" / "space" / "app.py"
    page = runpy.run_path(str(app), run_name="app")["demo"]
    assert isinstance(page, page_module.gr.Blocks)
    assert any("The target `demo`" in str(getattr(b, "value", "")) for b in page.blocks.values())
    monkeypatch.delenv("PAIR")
    monkeypatch.setattr(presenting, "make_page", lambda arguments: arguments)
    shown = runpy.run_path(str(app), run_name="app")["demo"]
    assert shown == DemoArguments(pair="smollm2")
    monkeypatch.setenv("TARGET", "some/target")
    monkeypatch.setenv("ASSISTANT", "some/drafter")
    shown = runpy.run_path(str(app), run_name="app")["demo"]
    assert shown == DemoArguments(target="some/target", assistant="some/drafter")


class Visitor:
    """Somebody with the page open; sessions of visitors are apart."""

    def __init__(self, browser: Any, address: str):
        self.page = browser.new_context().new_page()
        self.page.set_default_timeout(120_000)
        self.page.goto(address)
        # To draw them takes the processor all the time.
        self.page.add_style_tag(content="* { animation: none !important; transition: none !important; }")
        self.page.get_by_role("button", name="Length, sampling and draft tree").click()

    def ask(self, question: str, num_tokens: int, by_enter: bool = False) -> None:
        self.page.locator("#max_new_tokens input[type=number]").fill(str(num_tokens))
        field = self.page.locator("#question textarea")
        field.fill(question)
        if by_enter:
            field.press("Enter")
        else:
            self.press("#ask")

    def press(self, button: str) -> None:
        # A real click waits until nothing on the page moves; while an answer is written something always does.
        self.page.locator(button).dispatch_event("click")

    def wait_for_verdict(self, kind: str) -> str:
        verdict = self.page.locator(f'#verdict [data-verdict="{kind}"]')
        verdict.wait_for(state="attached")  # it may be empty
        return verdict.text_content()

    def shown(self, *places: str) -> list[str]:
        """What these places of the page hold, all at one moment; nothing until all of them are there."""
        read = "places => places.map(place => document.querySelector(place)?.innerHTML)"
        found = self.page.evaluate(read, places)
        return found if all(found) else []

    def has_tokens(self, more_than: float = 0) -> bool:
        """Whether plain decoding shows more tokens than that."""
        return any(float(number) > more_than for number in self.shown("#plain .gumiho-tokens"))

    def progress(self) -> list[str]:
        """The counters of the answer with the drafter and the tree, as they are shown; empty until all of them are."""
        return self.shown(*(f"#drafted .gumiho-{name}" for name in ("tokens", "tau", "speed")), "#tree svg")

    def number(self, answer: str, name: str) -> float:
        return float(self.page.locator(f"#{answer} .gumiho-{name}").text_content())

    def text(self, answer: str) -> str:
        return self.page.locator(f"#{answer} .gumiho-text").text_content()


@pytest.fixture(scope="module")
def visitors(browser: Any, page_with_gate: tuple[str, Gate]) -> list[Visitor]:
    return [Visitor(browser, page_with_gate[0]) for _ in PROMPTS]


def let_through_until(is_reached: Callable[[], bool], gate: Gate) -> None:
    deadline = time.monotonic() + 120
    while not is_reached():
        assert time.monotonic() < deadline, "the page does not show what it should"
        gate.let_through(4)  # one for each answer of two visitors
        time.sleep(0.4)


def test_two_visitors_in_a_browser(visitors: list[Visitor], gate: Gate, pair: Pair) -> None:
    for visitor, prompt in zip(visitors, PROMPTS, strict=True):
        visitor.ask(prompt, 64)
        visitor.wait_for_verdict("running")
    first = visitors[0]
    let_through_until(lambda: first.has_tokens() and bool(first.progress()), gate)
    seen, before = first.number("plain", "tokens"), first.progress()
    let_through_until(lambda: first.has_tokens(more_than=seen), gate)
    let_through_until(lambda: all(map(operator.ne, before, first.progress() or before)), gate)
    assert seen < 64
    assert first.number("drafted", "tokens") < 64
    gate.is_open = True
    for visitor, prompt in zip(visitors, PROMPTS, strict=True):
        assert "token for token" in visitor.wait_for_verdict("equal")
        expected = pair[1].decode(plain_tokens(pair, prompt, max_new_tokens=64, do_sample=False))
        assert visitor.text("plain") == visitor.text("drafted") == expected
        assert visitor.number("drafted", "tokens") == 64
        assert visitor.number("drafted", "tau") > 1.5
        assert visitor.number("drafted", "speed") > 0
        assert visitor.page.locator("#drafted .gumiho-drafts").count() > 1
        assert visitor.page.locator("#plain .gumiho-drafts").count() == 0
        assert visitor.page.locator("#tree svg rect").count() > 1, "the last tree of the text, which may be small"


def test_stop_button_and_messages_in_a_browser(visitors: list[Visitor], gate: Gate) -> None:
    visitor = visitors[0]
    visitor.ask(" ", 500)
    visitor.page.get_by_text("The question is empty. Write one first.").first.wait_for()
    visitor.ask(PROMPTS[0], 500)
    visitor.wait_for_verdict("running")
    let_through_until(visitor.has_tokens, gate)
    visitor.press("#stop")
    let_through_until(lambda: bool(visitor.page.locator('#verdict [data-verdict="stopped"]').count()), gate)
    assert re.fullmatch(r"Stopped\. The first \d+ tokens are the same\.", visitor.wait_for_verdict("stopped"))
    assert 0 < visitor.number("plain", "tokens") < 500
    gate.is_open = True
    visitor.ask(PROMPTS[1], 8, by_enter=True)
    visitor.wait_for_verdict("equal")
    assert visitor.number("plain", "tokens") == 8
