"""What people are shown: answers whose accepted drafts are colored, and the draft trees of `generate()`."""

import io
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from commands import gumiho, refuse
from drafting_oracle import scores_of_paths
from targets import make_drafter, make_prompts, make_target
from tokenizers import Tokenizer, decoders, models
from training_data import CHATML, DEMO_TARGET, make_tokenizer, write_jsonl
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from transformers_gumiho import GumihoGenerateOutput, GumihoModel, cli
from transformers_gumiho.model.decoding_settings import value_for_rows
from transformers_gumiho.tools.benchmarking import DecodingMode, Question, run_benchmark
from transformers_gumiho.tools.measuring.timing import PLAIN, Runner, temporary_settings
from transformers_gumiho.tools.pairs import load_pair
from transformers_gumiho.tools.presenting import (
    Answer,
    Cycle,
    GenerateArguments,
    ShowArguments,
    generate,
    show,
    show_answer,
    stream_answer,
    watch_cycles,
)
from transformers_gumiho.tools.presenting.answering import logit_gap
from transformers_gumiho.tools.presenting.terminal import describe_comparison, wants_colors, write_new_pieces
from transformers_gumiho.training import GumihoTrainingArguments
from transformers_gumiho.training.recipe.arguments import RecipeArguments


PAIR = {"target": str(DEMO_TARGET), "assistant": str(DEMO_TARGET.parent / "gumiho"), "dtype": "float32"}
OPTIONS = [part for name, value in PAIR.items() for part in (f"--{name}", value)]
COMMANDS = ["generate", "show", "demo", "benchmark", "tune", "attach", "data", "train"]
EXTRAS = [
    "datasets", "evaluate", "gguf", "gradio", "jinja2", "openai", "peft", "tensorboard",
]  # fmt: skip
PROMPT = "def __init__(self, "
TOKENIZER = make_tokenizer(None)


def decode(target: PreTrainedModel, drafter: GumihoModel, prompt: str, **kwargs: object) -> GumihoGenerateOutput:
    inputs = TOKENIZER(prompt, return_tensors="pt")
    return target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **kwargs)


def plain_tokens(target: PreTrainedModel, prompt: str, **kwargs: object) -> list[int]:
    inputs = TOKENIZER(prompt, return_tensors="pt")
    return target.generate(**inputs, **kwargs)[0, inputs["input_ids"].shape[1] :].tolist()


def new_tokens(output: GumihoGenerateOutput, prompt: str = PROMPT) -> list[int]:
    return output.sequences[0, len(TOKENIZER(prompt)["input_ids"]) :].tolist()


def split_by_color(text: str) -> list[tuple[str, bool]]:
    """Returns each character, and whether it is colored."""
    characters, is_colored = [], False
    for part in re.split("(\033\\[32m|\033\\[0m)", text):
        if part.startswith("\033"):
            is_colored = part == "\033[32m"
        else:
            characters += [(character, is_colored) for character in part]
    return characters


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_command_writes_the_text_of_plain_generate_and_the_tau_of_generate(
    target: PreTrainedModel, drafter: GumihoModel, temperature: float
) -> None:
    how = ["--max_new_tokens", 48, "--temperature", temperature, "--seed", 3]
    text, line = gumiho("generate", *OPTIONS, "--prompt", PROMPT, *how).rstrip("\n").rsplit("\n\n", 1)
    sampling = {"max_new_tokens": 48} | ({"do_sample": True, "temperature": temperature} if temperature else {})
    torch.manual_seed(3)
    assert text == TOKENIZER.decode(plain_tokens(target, PROMPT, **sampling))
    torch.manual_seed(3)
    lengths = decode(target, drafter, PROMPT, **sampling).accepted_lengths[0]
    assert re.fullmatch(
        rf"\[tau {sum(lengths) / len(lengths):.2f} \| {sum(lengths) / len(lengths):.2f} tokens per pass "
        rf"\| 48 tokens, \d+ accepted drafts \| {len(lengths)} passes \| \d+\.\d tokens/s \| float32\]",
        line,
    ), line


@pytest.mark.parametrize(
    ("max_new_tokens", "temperature"), [(21, 0.0), (22, 0.0), (23, 0.0), (24, 0.0), (25, 0.0), (21, 0.8), (24, 0.8)]
)
def test_what_is_colored_is_what_was_drafted_and_accepted(
    target: PreTrainedModel, drafter: GumihoModel, max_new_tokens: int, temperature: float
) -> None:
    """Also of a cycle that the text's end cuts short: a longer text shows what its tokens were."""
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    torch.manual_seed(0)
    longer = decode(target, drafter, PROMPT, max_new_tokens=64, **sampling)
    are_drafts = [False, *(index < n - 1 for n in longer.accepted_lengths[0][:-1] for index in range(n))]
    assert len(are_drafts) > 25
    are_drafts[max_new_tokens - 1] = False  # no tree reaches the last token of a text
    expected = [
        (character, is_draft)
        for token, is_draft in zip(new_tokens(longer)[:max_new_tokens], are_drafts, strict=False)
        for character in TOKENIZER.decode([token])
    ]
    stream, answer = io.StringIO(), Answer()
    answer.on_step = write_new_pieces(answer, stream, colors=True)
    torch.manual_seed(0)
    prompt = TOKENIZER(PROMPT)["input_ids"]
    stream_answer(target, TOKENIZER, drafter, prompt, answer, max_new_tokens=max_new_tokens, temperature=temperature)
    assert split_by_color(stream.getvalue()) == expected


def make_cycle(tokens: list[int], num_accepted: int) -> Cycle:
    """Returns a cycle that drafted and accepted the first tokens as a chain; the last one may be its bonus token."""
    drafts, bonus = tokens[:num_accepted], tokens[num_accepted:]
    return Cycle(
        tokens=(0, *drafts),
        parents=(0, *range(num_accepted)),
        scores=tuple(-float(depth) for depth in range(num_accepted + 1)),
        accepted=tuple(range(1, num_accepted + 1)),
        bonus_token=bonus[0] if bonus else None,
    )


def test_characters_of_several_tokens_are_written_completely() -> None:
    """One that the target's own token has a part in is plain."""
    text = "né 世界 🦊!"
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) > len(text)
    for num_accepted in range(len(tokens)):
        cycle = make_cycle(tokens[: num_accepted + 1], num_accepted)
        # The prompt's last token is chosen after the rest of it, in no cycle.
        written = split_by_color(write(TOKENIZER, TOKENIZER("a#")["input_ids"], tokens, cycle=cycle))
        assert "".join(character for character, _ in written) == f"#{text}"
        written = written[1:]
        num_colored = len(TOKENIZER.decode(tokens[:num_accepted]).rstrip("\N{REPLACEMENT CHARACTER}"))
        assert [is_colored for _, is_colored in written] == [i < num_colored for i in range(len(text))]


def write(tokenizer: Any, prompt: list[int], tokens: list[int], cycle: Cycle | None = None, ends: bool = True) -> str:
    """Returns what a streamer writes of tokens after a prompt, with colors where they are of a cycle."""
    stream, has_cycles, answer = io.StringIO(), cycle is not None, Answer()
    answer.begin(tokenizer, has_cycles)
    answer.put(torch.tensor([prompt[:-1] if has_cycles else prompt]))
    for token in [*(prompt[-1:] if has_cycles else []), *tokens]:
        answer.put(torch.tensor([token]))
    if cycle is not None:
        answer.end_cycle(cycle)
    if ends:
        answer.end()
    write_new_pieces(answer, stream, colors=has_cycles)()
    return stream.getvalue()


def test_texts_may_begin_and_end_within_a_character() -> None:
    text = "日本語 é"
    tokens = TOKENIZER(text)["input_ids"]
    for cut in range(1, len(tokens)):
        written = write(TOKENIZER, tokens[:cut], tokens[cut:])
        assert TOKENIZER.decode(tokens[:cut]).rstrip("\N{REPLACEMENT CHARACTER}") + written == text
    prompt, tokens = TOKENIZER("# ")["input_ids"], TOKENIZER("🦊")["input_ids"][:2]
    assert write(TOKENIZER, prompt, tokens, ends=False) == ""
    assert write(TOKENIZER, prompt, tokens) == TOKENIZER.decode(tokens)


def test_first_word_keeps_its_space_where_a_tokenizer_drops_that_of_a_text() -> None:
    words = Tokenizer(models.WordLevel({"▁go": 0, "▁on": 1, "▁now": 2}, unk_token="▁go"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "on"
    assert write(tokenizer, [0], [1, 2]) == " on now"


def test_colors_are_for_terminals_whose_users_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    # An empty NO_COLOR means nothing: https://no-color.org.
    for no_color, term, of_terminal in (("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", term)
        assert wants_colors(terminal) == of_terminal
        assert not wants_colors(io.StringIO())


@pytest.mark.parametrize("has_template", [True, False])
def test_typed_lines_are_a_conversation_where_there_is_a_chat_template(
    has_template: bool, target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, each is continued. Bytes of another encoding are replaced."""
    tokenizer = make_tokenizer(CHATML if has_template else None)
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_TARGET / name)
    messages, expected = [], []
    for line in ("import os", "caf\ufffd?"):
        messages.append({"role": "user", "content": line})
        prompt = line
        if has_template:
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected.append(plain_tokens(target, prompt, max_new_tokens=12))
        messages.append({"role": "assistant", "content": tokenizer.decode(expected[-1], skip_special_tokens=True)})
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\ncaf\udce9?\n"))
    answers = generate(GenerateArguments(**PAIR | {"target": str(tmp_path)}, max_new_tokens=12))
    assert [answer.tokens for answer in answers] == expected


def test_picture_of_an_answer_shows_its_text_accepted_drafts_and_pauses(
    target: PreTrainedModel, drafter: GumihoModel, tmp_path: Path
) -> None:
    """The command and the notebook draw the same, and the colors are those of the cycles."""
    how = ["--prompt", PROMPT, "--max_new_tokens", 48]
    gumiho("generate", *OPTIONS, *how, "--output", tmp_path / "answer.svg")
    output = decode(target, drafter, PROMPT, max_new_tokens=48)
    shown = read_picture(show_answer(output, TOKENIZER).svg)
    assert shown == read_picture((tmp_path / "answer.svg").read_text(encoding="utf-8"))[len(f"> {PROMPT}") :]

    # Nothing pays for itself, so the drafter pauses.
    drafter.generation_config.break_even = 100.0
    try:
        output = decode(target, drafter, PROMPT, max_new_tokens=48)
    finally:
        drafter.generation_config.break_even = None
    shown = read_picture(show_answer(output, TOKENIZER).svg)
    text = TOKENIZER.decode(new_tokens(output)).replace("\n", "")
    assert "".join(character for character, _ in shown).startswith(text)
    expected = ["#e6edf3"] * len(TOKENIZER.decode(new_tokens(output)[:1]).replace("\n", ""))
    begin = 1
    for length, source in zip(output.accepted_lengths[0], output.draft_origins, strict=True):
        own = "#8b949e" if source == "pause" else "#e6edf3"
        for index, token in enumerate(new_tokens(output)[begin : begin + length], 1):
            characters = TOKENIZER.decode([token]).replace("\n", "")
            expected += [own if index == length else "#3fb950"] * len(characters)
        begin += length
    assert {"drafter", "pause"} <= set(output.draft_origins)
    assert [color for _, color in shown[: len(text)]] == expected

    with pytest.raises(ValueError, match=r"The output has no cycles\. Call `generate\(\)` with a Gumiho drafter"):
        show_answer(output.sequences, TOKENIZER)
    refuse("gumiho generate: --output draws one answer", "generate", *OPTIONS, "--output", "answer.svg")


def read_picture(svg: str) -> list[tuple[str, str]]:
    """Returns the characters of a picture of an answer, and their colors."""
    spans = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}tspan")
    return [
        (character.replace("\N{NO-BREAK SPACE}", " "), span.get("fill", ""))
        for span in spans
        for character in span.text or ""
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_comparing_answers_by_plain_decoding_too(temperature: float, capsys: pytest.CaptureFixture[str]) -> None:
    options = PAIR | {"prompt": PROMPT, "max_new_tokens": 24, "temperature": temperature, "compare": True}
    (answer,) = generate(GenerateArguments(**options))
    written = capsys.readouterr().out
    text = TOKENIZER.decode(answer.tokens)
    assert written.count(text) == 2
    speeds = r"\[plain decoding \| [\d.]+ tokens/s \| 24 tokens]\nSpeed-up [\d.]+x"
    assert re.search(speeds + r", same text\n$", written)


def test_comparison_names_the_first_token_that_differs() -> None:
    def answer(*tokens: int, seconds: float = 1.0, progress: str = "done") -> Answer:
        return Answer(list(tokens), seconds=seconds, progress=progress)

    def last_line(*texts: Answer, dtype: torch.dtype = torch.bfloat16, **options: float) -> str:
        return describe_comparison(*texts, dtype, **options).splitlines()[-1]

    assert last_line(answer(1, 2, seconds=0.5), answer(1, 2)) == "Speed-up 2.00x, same text"
    assert last_line(answer(1, 2, 3, seconds=0.5), answer(1, 2, 4), gap=0.125) == (
        "Speed-up 2.00x. The texts differ from token 3 on: a near-tie in bfloat16 (two logits 0.12 apart); "
        "--dtype float32 avoids it"
    )
    # Whoever decodes in float32 is not sent there, and the number says that it is no near-tie.
    assert last_line(answer(1, 2), answer(1, 3), dtype=torch.float32, gap=2.0) == (
        "Speed-up 1.00x. The texts differ from token 2 on (two logits 2 apart)"
    )
    assert "differ from token 3 on" in last_line(answer(1, 2), answer(1, 2, 3))
    assert last_line(answer(1, 2), answer(1, progress="stopped")).endswith("| interrupted, so not compared]")


def test_options_are_settings_of_the_drafter(drafter: GumihoModel, tmp_path: Path) -> None:
    """A measured `break_even` goes with the tree that it was measured with; drafts from the context leave it."""
    own = {"num_assistant_tokens": {"1": 12, "4": 4}, "branching_factor": 4, "break_even": 1.9}
    with temporary_settings(drafter, own):
        drafter.save_pretrained(tmp_path)
    options = PAIR | {"assistant": str(tmp_path)}
    tree = {"num_assistant_tokens": 5, "branching_factor": 3, "draft_temperature": 0.5}
    for given, break_even in ((tree, None), ({"prompt_lookup_num_tokens": 4}, 1.9)):
        settings = load_pair(GenerateArguments(**options, **given))[2].generation_config
        assert {name: getattr(settings, name) for name in given} == given
        assert settings.break_even == break_even
    same = load_pair(GenerateArguments(**options, num_assistant_tokens=12, branching_factor=4))[2].generation_config
    assert {name: getattr(same, name) for name in own} == own


def test_a_target_that_is_offloaded_answers_too(drafter: GumihoModel) -> None:
    """Its first parameters are on no device."""
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    prompt, options = TOKENIZER(PROMPT)["input_ids"], {"max_new_tokens": 4, "temperature": 0.0}
    expected = stream_answer(target, TOKENIZER, drafter, prompt, Answer(), **options).tokens
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.device.type == "meta"
    answers = [stream_answer(target, TOKENIZER, model, prompt, Answer(), **options) for model in (drafter, None)]
    assert [answer.tokens for answer in answers] == [expected] * 2
    taken = Runner(target, 0, max_new_tokens=4).compare([PLAIN], [prompt], temperature=0.0, seed=0)
    assert taken[0].answers == [expected]
    modes = [DecodingMode("plain"), DecodingMode("gumiho", {"assistant_model": drafter})]
    questions = [Question("0", "all", (PROMPT,))]
    assert all(sample.equal for sample in run_benchmark(target, TOKENIZER, questions, modes, max_new_tokens=4))


def test_prompts_of_a_file_are_answered_turn_by_turn(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = [{"turns": ["import os", "\nimport"]}, {"prompt": "class A"}]
    name = write_jsonl(tmp_path / "prompts.jsonl", rows)
    answers = generate(GenerateArguments(**PAIR, prompts=name, max_new_tokens=8))
    first = TOKENIZER.decode(answers[0].tokens)
    for answer, prompt in zip(answers, ["import os", f"import os{first}\nimport", "class A"], strict=True):
        assert answer.tokens == plain_tokens(target, prompt, max_new_tokens=8)


def test_the_gap_of_two_answers_is_that_of_their_first_different_tokens(target: PreTrainedModel) -> None:
    prompt = TOKENIZER(PROMPT)["input_ids"]
    logits = target(torch.tensor([[*prompt, 7]])).logits[0, -1].detach()
    ours, theirs = (Answer([7, token, 9]) for token in (3, 5))
    assert logit_gap(target, prompt, ours, theirs) == pytest.approx(abs(float(logits[3] - logits[5])), rel=1e-4)
    assert logit_gap(target, prompt, ours, ours) is None
    # One ends where the other goes on.
    assert logit_gap(target, prompt, ours, replace(ours, tokens=[7])) is None


def test_ctrl_c_ends_an_answer_and_nothing_else(
    target: PreTrainedModel, drafter: GumihoModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = new_tokens(decode(target, drafter, PROMPT, max_new_tokens=48))
    put, interrupted = Answer.put, []

    def interrupted_put(self: Answer, value: torch.Tensor) -> None:
        if len(self.tokens) == 20 and not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(Answer, "put", interrupted_put)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\n" * 2))
    answers = generate(GenerateArguments(**PAIR, max_new_tokens=48))
    assert [answer.tokens for answer in answers] == [whole[:20], whole]
    assert capsys.readouterr().out.count(" | interrupted]") == 1


def test_ctrl_c_ends_a_command_with_the_status_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer to a prompt of the options is kept; no further prompt is answered."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": PROMPT}] * 3)
    monkeypatch.setattr(Answer, "put", interrupt)
    for words in (["generate", "--prompts", prompts], ["show", "--prompt", PROMPT]):
        with pytest.raises(SystemExit, match="130"):
            gumiho(*words, *OPTIONS)
    written = capsys.readouterr()
    assert written.out.count(" | interrupted]") == 1
    assert "gumiho generate: Interrupted.\n" in written.err
    assert written.err.splitlines()[-1] == "gumiho show: Interrupted."
    # Importing the package takes seconds, too.
    monkeypatch.delitem(sys.modules, "transformers_gumiho.cli")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupt), *sys.meta_path])
    with pytest.raises(SystemExit, match="130"):
        gumiho("show")
    assert capsys.readouterr().err.splitlines()[-1] == "gumiho show: Interrupted."


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_output_replaces_what_the_encoding_lacks(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes and files of Windows, and the C locale."""
    words = ["show", *OPTIONS, "--prompt", "# \N{GREEK SMALL LETTER PI}"]
    expected = gumiho(*words)
    assert "\N{BOX DRAWINGS LIGHT VERTICAL AND RIGHT}" in expected
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["gumiho", *words])
    cli.main()
    stream.flush()
    assert stream.buffer.getvalue() == expected.encode(encoding, errors="replace")


@pytest.mark.parametrize("step", [1, 2, 5])
def test_shown_path_is_the_one_that_generate_took(
    target: PreTrainedModel, drafter: GumihoModel, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    output = decode(target, drafter, PROMPT, max_new_tokens=64)
    lengths, tokens = output.accepted_lengths[0], new_tokens(output)
    start = 1 + sum(lengths[: step - 1])
    committed = tokens[start : start + lengths[step - 1]]
    cycle = show(ShowArguments(**PAIR, prompt=PROMPT, step=step))
    assert cycle.tokens[0] == tokens[start - 1]
    assert list(cycle.committed) == committed
    lines = capsys.readouterr().out.splitlines()
    marked = [re.search(r"([*+]) [ │]*[├└]─ (.*)", line) for line in lines]
    # The bonus token comes below all of its sibling's branch, after the last accepted draft.
    shown = [(match[1], match[2]) for match in marked if match]
    texts = [repr(TOKENIZER.decode([token])) for token in committed]
    assert shown == [*(("*", text) for text in texts[:-1]), ("+", texts[-1])]
    drafted = [line for line in lines if re.match(r" *\d\.\d{3} +\d\.\d{3} ", line)]
    assert len(drafted) == value_for_rows(drafter.generation_config.num_assistant_tokens, 1)


def test_cycles_longer_than_the_drafters_paths_are_shown_completely(
    target: PreTrainedModel, drafter: GumihoModel, tmp_path: Path
) -> None:
    """Drafts from the context may be longer, as often as the text goes round in circles."""
    drafter.save_pretrained(tmp_path)
    settings = {"prompt_lookup_num_tokens": 20, "num_assistant_tokens": 20, "tree_depth": 2, "branching_factor": 5}
    config = GenerationConfig.from_pretrained(tmp_path)
    config.update(**settings)
    config.save_pretrained(tmp_path)
    prompt = "x, " * 40
    with temporary_settings(drafter, settings):
        lengths = decode(target, drafter, prompt, max_new_tokens=300).accepted_lengths[0]
    longest = lengths.index(max(lengths))
    assert sum(lengths[: longest + 1]) > (longest + 1) * (drafter.config.max_draft_depth + 1)
    options = {**PAIR, "assistant": str(tmp_path)}
    cycle = show(ShowArguments(**options, prompt=prompt, step=longest + 1))
    assert len(cycle.committed) == max(lengths) == 21, "all that was looked up, and the bonus token"


def test_shown_probabilities_are_those_of_forward_passes() -> None:
    target = make_target()
    drafter = make_drafter(target, draft_temperature=[0.7, 1.2, 0.9], num_assistant_tokens=10, branching_factor=4)
    cycles: list[Cycle] = []
    prompt = make_prompts([6])["input_ids"]
    with watch_cycles(cycles.append):
        text = target.generate(prompt, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    committed = sum(len(cycle.committed) for cycle in cycles)
    assert prompt.shape[1] + 1 + committed == text.shape[1]
    stop = prompt.shape[1] + 1
    for cycle in cycles:
        assert int(text[0, stop - 1]) == cycle.tokens[0]
        probabilities: dict[int, float] = {0: 1.0}
        for node in range(1, len(cycle.tokens)):
            path, above = [], node
            while above:
                path.append(cycle.tokens[above])
                above = cycle.parents[above]
            with torch.no_grad():
                score = scores_of_paths(target, drafter, text[:, :stop], torch.tensor([path[::-1]]))
            probabilities[node] = math.exp(score)
            assert cycle.path_probability(node) == pytest.approx(probabilities[node], rel=1e-3)
            of_token = probabilities[node] / probabilities[cycle.parents[node]]
            assert cycle.token_probability(node) == pytest.approx(of_token, rel=1e-3)
        assert cycle.expected_accepted == pytest.approx(sum(probabilities.values()) - 1, rel=1e-3)
        stop += len(cycle.committed)


def test_pictures_of_large_trees_are_valid_and_small(tmp_path: Path) -> None:
    options = [*OPTIONS, "--prompt", "price = '$5' + '$6' + '<$", "--step", "1", "--num_assistant_tokens", "63"]
    options += ["--branching_factor", "14"]
    svgs = [tmp_path / "a.svg", tmp_path / "b.svg"]
    printed, _ = (gumiho("show", *options, "--output", path).split("drawn into")[0] for path in svgs)
    assert svgs[0].read_bytes() == svgs[1].read_bytes()
    assert svgs[0].stat().st_size < 60_000
    written = [element.text for element in ElementTree.parse(svgs[0]).iter("{http://www.w3.org/2000/svg}text")]
    numbers = [text for text in written if text and re.fullmatch(r"\d\.\d{3} +\d\.\d{3}", text)]
    assert len(numbers) == 63
    assert sorted(" ".join(text.split()) for text in numbers) == sorted(
        f"{match[1]} {match[2]}" for match in re.finditer(r"^ (\d\.\d{3})  (\d\.\d{3}) ", printed, re.M)
    )
    assert sum("✓" in (text or "") for text in written) - 1 == printed.count(" * ")
    assert f"after {re.search(r'^cycle 1, after (.*)$', printed, re.M)[1]}" in written


def test_show_says_how_many_cycles_a_text_has(tmp_path: Path) -> None:
    """A target that may end its text nearly anywhere."""
    for path in DEMO_TARGET.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {TOKENIZER("self")["input_ids"]}}}')
    with pytest.raises(ValueError, match=r"ends after \d+ cycles, before --step 30"):
        show(ShowArguments(**PAIR | {"target": str(tmp_path)}, prompt=PROMPT, step=30))


def test_cycles_of_a_batch_are_refused(target: PreTrainedModel, drafter: GumihoModel) -> None:
    prompts = torch.ones(2, 4, dtype=torch.long)
    with watch_cycles(lambda cycle: None), pytest.raises(ValueError, match="got a batch of 2"):
        target.generate(prompts, assistant_model=drafter, max_new_tokens=4)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_each_option_and_default_once(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # an option on each line
    with pytest.raises(SystemExit) as caught:
        gumiho(command, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    shown = re.findall(r"^  (?:-h, )?--(\S+)", text, flags=re.M)
    assert len(shown) == len(set(shown))
    assert not any("-" in name or name.startswith("no_") for name in shown), "a second spelling"
    assert "args." not in text
    assert not [line for line in text.splitlines() if line.count("(default") > 1 or "(default: None)" in line]
    if command == "generate":
        assert {"(default: 0.0)", "(default: 0)"} <= set(re.findall(r"\(default: .*?\)", text))
    if command != "train":
        return
    own = {field.name for kind in (RecipeArguments, GumihoTrainingArguments) for field in fields(kind)}
    # `lora_rank` is known in order to say where adapters are trained.
    own -= {field.name for field in fields(TrainingArguments)} | {"lora_rank"}
    assert own < set(shown)
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        gumiho(command, "--help")
    assert len(capsys.readouterr().out.splitlines()) <= 100, "two screens"
    with pytest.raises(SystemExit):
        gumiho(command, "--help_all")
    assert {field.name for field in fields(TrainingArguments) if field.init} <= set(
        re.findall(r"^  --(\S+)", capsys.readouterr().out, flags=re.M)
    )


def test_help_needs_no_extra() -> None:
    """As after `pip install transformers-gumiho` alone; what needs an extra then names it."""
    program = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS})
from transformers_gumiho_cli import main
for words in [[command, "--help"] for command in {COMMANDS}] + [["data", "--output_file", "a"]]:
    sys.argv = ["gumiho", *words]
    try:
        main()
    except SystemExit as error:
        print("ends with", error.code)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ends = re.findall("ends with (.*)", process.stdout)
    assert ends[:-1] == ["0"] * len(COMMANDS), process.stderr
    assert "Install it with `pip install 'transformers-gumiho[train]'`" in ends[-1]


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["--help"], 0), ([], 2), (["tun"], 2)])
def test_what_needs_no_model_answers_without_importing_the_package(words: list[str], code: int) -> None:
    program = "import atexit, sys; from transformers_gumiho_cli import main; atexit.register(lambda: print('torch' in sys.modules)); main()"  # noqa: E501
    process = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert process.returncode == code
    assert process.stdout.splitlines()[-1] == "False"
    expected = {"--version": f"gumiho {version('transformers-gumiho')}", "tun": "gumiho: unknown command 'tun'"}
    assert expected.get(next(iter(words), ""), "usage: gumiho COMMAND") in process.stdout + process.stderr


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", ["--target", "no/such/folder"], "There is no folder 'no/such/folder'. Give an existing"),
        ("generate", ["--assistant", "./gumihoo"], "There is no folder './gumihoo'"),
        ("generate", ["--target", "no/folder"], "There is no folder 'no/folder', and the Hub gave none: "),
        ("generate", ["--assistant", "no/folder"], "'no/folder' is no folder, has no config.json in the cache"),
        ("generate", ["--assistant", DEMO_TARGET.parent / "draft_model"],
         f"{str(DEMO_TARGET.parent / 'draft_model')!r} is not a Gumiho drafter: its tensors are a language model's"),
        ("generate", ["--target_layer_ids", "0", "3", "40"], "This Gumiho drafter reads the layers [0, 3, 40] ("
         "`target_layer_ids`), and LlamaForCausalLM has 20, 0 to 19. Name layers that it has, or use"),
        ("generate", ["--target", ""], "--target is empty. Give a value, or leave the option out"),
        ("generate", ["--target", __file__], f"{__file__!r} is a file. Give a model's folder"),
        ("generate", ["--target", DEMO_TARGET.parent], f"{str(DEMO_TARGET.parent)!r} has no config.json, so it holds"),
        ("generate", ["--assistant", __file__], f"{__file__!r} is a file. Give a model's folder"),
        ("generate", ["--prompts", "p.jsonl"], "--prompt and --prompts cannot be given together"),
        ("generate", ["--chat_template_kwargs", '{"a": 1}'], "--chat_template_kwargs has no effect: the tokenizer of"),
        ("generate", ["--chat_template", DEMO_TARGET], f"There is no file {str(DEMO_TARGET)!r}"),
        ("generate", ["--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        ("generate", ["--temperature", "nan"], "--temperature must be at least 0, got nan"),
        ("generate", ["--dtype", "flaot32"], "There is no precision 'flaot32'. Give 'auto', 'float32'"),
        ("generate", ["--device_map", "cuda:7"], "There is no device 'cuda:7' here. Leave the device map out"),
        ("generate", ["--device_map", "meta"], "There is no device 'meta' here"),
        ("generate", ["--target", PAIR["assistant"]], f"{PAIR['assistant']!r} is a drafter, not a target"),
        ("generate", ["--assistant", DEMO_TARGET.parents[1] / "smollm2" / "gumiho"],
         "This Gumiho drafter has a vocabulary of 49152, but LlamaForCausalLM has one of 4096"),
        ("show", ["--step", "0"], "--step must be at least 1, got 0"),
        ("generate", ["--seed", 2**63], "--seed must be from 0 to 4294967295, got 9223372036854775808"),
           ("show", ["--output", "tree.pdf"], "A picture is drawn into an .svg file, got --output tree.pdf"),
    ],
)  # fmt: skip
def test_what_a_user_can_fix_is_reported_without_a_traceback(
    command: str, options: list[object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(f"gumiho {command}: {message}", command, *OPTIONS, "--prompt", "a", *options)
