"""`attach`: every call of a target's `generate()` drafts, and what cannot be drafted decodes plainly."""

import copy
import functools
import gc
import inspect
import pickle
import shutil
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import gumiho, refuse
from streamers import Recorder
from targets import Pair, make_drafter, make_prompts, make_target, passes_of
from torch import nn
from trained_pair import FOLDER, load_drafter
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation import GenerationMixin

from transformers_gumiho import GumihoModel, attach, attached, detach, record
from transformers_gumiho.generation.attach import attached_drafter
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


PROMPT = make_prompts([5])
SETTINGS = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def pair() -> Pair:
    target = make_target()
    return target, make_drafter(target)


def decode(target: PreTrainedModel, **settings: Any) -> tuple[int, torch.Tensor]:
    """Returns the passes of the target and the text."""
    return passes_of(target, lambda: target.generate(**PROMPT, **SETTINGS | settings))


def test_calls_without_an_assistant_draft_and_explicit_ones_win(pair: Pair, tmp_path: Path) -> None:
    """With a drafter as it is, wrapped, or by its name."""
    target, drafter = pair
    drafter.save_pretrained(tmp_path)
    num_plain, plain = decode(target)
    other = make_drafter(target, seed=1, num_assistant_tokens=1)
    for given in (drafter, nn.DataParallel(drafter), tmp_path, str(tmp_path)):
        attach(target, given)
        num_drafted, drafted = decode(target)
        assert torch.equal(drafted, plain)
        assert num_drafted < num_plain == decode(target, assistant_model=None)[0]
        assert decode(target, assistant_model=other)[0] > num_drafted
        with attached(target, other) as found:
            assert found is other
            assert decode(target)[0] > num_drafted
        assert decode(target)[0] == num_drafted
        detach(target)
        assert decode(target)[0] == num_plain
        with attached(target, given):
            assert decode(target)[0] == num_drafted
        assert decode(target)[0] == num_plain
    detach(target)
    with pytest.raises(ValueError, match="No Gumiho drafter: a LlamaForCausalLM"):
        attach(target, make_target())


def test_copies_and_files_do_not_see_the_drafter(pair: Pair, tmp_path: Path) -> None:
    target, drafter = pair
    names = set(target.state_dict())
    attach(target, drafter)
    assert set(target.state_dict()) == names == {name for name, _ in target.named_parameters(remove_duplicate=False)}
    num_plain, plain = decode(target, assistant_model=None)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    copies = [copy.deepcopy(target), pickle.loads(pickle.dumps(target))]
    copies += [copy.deepcopy(copies[0]), loaded]
    torch.nn.init.normal_(target.get_output_embeddings().weight, std=10.0)
    assert not torch.equal(decode(target)[1], plain)
    detach(target)
    for other in copies:
        num_passes, text = decode(other)
        assert num_passes == num_plain
        assert torch.equal(text, plain)  # with its own weights
        attach(other, make_drafter(other))
        assert decode(other)[0] < num_plain


def test_a_target_and_its_drafters_are_freed_with_the_last_reference(tmp_path: Path) -> None:
    target = make_target()
    make_drafter(target).save_pretrained(tmp_path)
    gc.disable()
    try:
        for is_named in (True, False):
            freed = weakref.ref(attach(target, tmp_path if is_named else make_drafter(target)))
            decode(target)
            detach(target)
            assert freed() is None
            with attached(target, tmp_path if is_named else make_drafter(target)):
                freed = weakref.ref(attached_drafter(target))
            assert freed() is None
        references = [weakref.ref(target), weakref.ref(attach(target, tmp_path))]
        decode(target)
        del target
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def attached_target() -> PreTrainedModel:
    target = make_target()
    attach(target, make_drafter(target))
    return target


def test_a_call_keeps_its_model(pair: Pair) -> None:
    """As a bound method does, although nothing else holds the model or the copy."""
    plain = decode(pair[0])[1]
    assert torch.equal(attached_target().generate(**PROMPT, **SETTINGS), plain)
    assert torch.equal(copy.deepcopy(attached_target()).generate(**PROMPT, **SETTINGS), plain)
    assert torch.equal(copy.copy(attached_target()).generate(**PROMPT, **SETTINGS), plain)
    generate = attached_target().generate
    assert torch.equal(generate(**PROMPT, **SETTINGS), plain)


def test_other_models_generate_as_before(pair: Pair) -> None:
    target, drafter = pair
    num_plain, _ = decode(target)
    signature = inspect.signature(target.generate)
    attach(target, drafter)
    assert inspect.signature(target.generate) == signature
    assert "generate" not in vars(target)
    of_class = GenerationMixin.generate
    assert decode(make_target(seed=1))[0] == num_plain
    detach(target)
    attach(target, drafter)
    assert GenerationMixin.generate is of_class, "extended once"


@pytest.mark.parametrize("ends_first", [0, 1])
def test_blocks_that_overlap_end_as_they_began(pair: Pair, ends_first: int) -> None:
    """Of threads, or of tasks of one thread."""
    target, drafter = pair
    lasting = attach(target, make_drafter(target, seed=1))
    drafters = [drafter, make_drafter(target, seed=2)]
    blocks = [attached(target, own) for own in drafters]
    for block, own in zip(blocks, drafters, strict=True):
        block.__enter__()
        assert attached_drafter(target) is own
    with ThreadPoolExecutor(1) as pool:
        pool.submit(blocks[ends_first].__exit__, None, None, None).result()
    assert attached_drafter(target) is drafters[1 - ends_first], "a block that is open drafts"
    assert decode(target)[0] < 24
    detach(target)
    assert decode(target)[0] == 24
    blocks[1 - ends_first].__exit__(None, None, None)
    assert attached_drafter(target) is lasting


def test_a_generate_that_was_set_drafts_if_it_calls_that_of_the_class(pair: Pair) -> None:
    target, drafter = pair
    num_plain, plain = decode(target)
    seen: list[bool] = []

    @functools.wraps(type(target).generate)
    def own(*args: Any, **kwargs: Any) -> Any:
        seen.append("assistant_model" in kwargs)
        return type(target).generate(target, *args, **kwargs)

    target.generate = own  # type: ignore[assignment]
    attach(target, drafter)
    num_passes, text = decode(target)
    assert num_passes < num_plain
    assert torch.equal(text, plain)
    assert decode(target, assistant_model=None)[0] == num_plain
    detach(target)
    assert target.generate is own
    assert decode(target)[0] == num_plain
    assert seen == [False, True, False]


class TakesNoAssistant(LlamaForCausalLM):
    def generate(self, input_ids: torch.Tensor, max_new_tokens: int = 20) -> torch.Tensor:  # type: ignore[override]
        return super().generate(input_ids, max_new_tokens=max_new_tokens)


class OtherArguments(LlamaForCausalLM):
    def generate(self, images: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return super().generate(input_ids, **kwargs)


@pytest.mark.parametrize(("kind", "before"), [(TakesNoAssistant, ()), (OtherArguments, (None,))])
def test_a_generate_of_the_class_drafts(pair: Pair, kind: type[LlamaForCausalLM], before: tuple[None, ...]) -> None:
    target = kind(pair[0].config).double().eval()
    arguments = (*before, PROMPT["input_ids"])
    plain = target.generate(*arguments, max_new_tokens=24)
    attach(target, make_drafter(target))
    num_passes, drafted = passes_of(target, lambda: target.generate(*arguments, max_new_tokens=24))
    assert num_passes < 24
    assert torch.equal(drafted, plain)


def test_arguments_may_have_any_names(pair: Pair) -> None:
    """transformers says which ones it does not know."""
    target, drafter = pair
    for is_attached in (False, True):
        for name in ("target", "plain", "drafter", "args", "memo"):
            with pytest.raises(ValueError, match=rf"model_kwargs` are not used by the model: \['{name}'\]"):
                target.generate(**PROMPT, **SETTINGS, **{name: 1})
        if not is_attached:
            attach(target, drafter)


def test_other_ways_to_decode_are_left_alone(pair: Pair) -> None:
    target, drafter = pair
    ids = PROMPT["input_ids"]
    # Otherwise it takes most of the free memory.
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    paged = {"cache_implementation": "paged", "max_new_tokens": 5, "do_sample": False}
    paged |= {"continuous_batching_config": small}
    expected = target.generate(ids, **paged)

    def own_loop(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> tuple[PreTrainedModel, Any]:
        return model, kwargs.get("assistant_model")

    attach(target, drafter)
    assert torch.equal(target.generate(ids, **paged), expected)
    assert target.generate(**PROMPT, **SETTINGS, custom_generate=own_loop) == (target, None)


class Calls(LogitsProcessor):
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 2}, "ask for `beam_search`"),
        ({"use_cache": False}, "Set `use_cache=True`"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "`output_attentions=True` is not available"),
    ],
)
def test_what_cannot_be_drafted_decodes_plainly_with_one_warning(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_target(attn_implementation="eager")
    drafter = make_drafter(target)
    expected = target.generate(**PROMPT, **SETTINGS | settings)
    attach(target, drafter)
    for _ in range(2):
        found = target.generate(**PROMPT, **SETTINGS | settings)
        sequences = (getattr(output, "sequences", output) for output in (found, expected))
        assert torch.equal(*sequences)
    # Neither does transformers say that it would ignore settings.
    (message,) = caplog.messages
    assert message.startswith("Decoding without the attached Gumiho drafter: ")
    assert reason in message
    with pytest.raises(ValueError, match=reason):
        target.generate(**PROMPT, **SETTINGS | settings, assistant_model=drafter)


def test_a_reason_in_the_inputs_runs_streamers_and_processors_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache of the caller's that cannot hold drafts is only seen after `generate()` has begun."""
    target, drafter = pair

    def generate() -> tuple[list[list[int]], list[int], torch.Tensor]:
        streamer, processor = Recorder(), Calls()
        cache = StaticCache(config=target.config, max_cache_len=64)
        given = {"streamer": streamer, "logits_processor": [processor], CACHE_NAME: cache}
        return streamer.values, processor.lengths, target.generate(**PROMPT, **SETTINGS, **given)

    expected = generate()
    attach(target, drafter)
    found = generate()
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])
    assert any("got StaticCache" in message for message in caplog.messages)


def test_a_rope_switch_in_reach_decodes_plainly(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    target = make_target()
    target = LlamaForCausalLM(LlamaConfig(**target.config.to_diff_dict() | {"rope_parameters": rope})).double().eval()
    target.config.max_position_embeddings = 16
    num_plain, plain = decode(target)
    attach(target, make_drafter(target))
    num_passes, found = decode(target)
    assert torch.equal(found, plain)
    assert num_passes == num_plain
    # One reason, whatever the lengths of the calls are.
    for length in (6, 7):
        target.generate(**make_prompts([length]), **SETTINGS)
    (message,) = [message for message in caplog.messages if message.startswith("Decoding without")]
    assert "which changes at 16 tokens, and this generation may go from 5 to 29" in message
    assert decode(target, max_new_tokens=10)[0] < 10


def test_wrapped_models_are_the_models_inside(pair: Pair) -> None:
    target, drafter = pair
    num_plain, plain = decode(target)
    for wrapped in (torch.compile(drafter, backend="eager"), nn.DataParallel(drafter)):
        num_drafted, drafted = decode(target, assistant_model=wrapped)
        assert num_drafted < num_plain
        assert torch.equal(drafted, plain)
    compiled = torch.compile(target, backend="eager")
    for wrapped in (compiled, nn.DataParallel(target), nn.DataParallel(compiled)):
        with attached(wrapped, drafter):
            assert decode(target)[0] == num_drafted
    with attached(target, drafter):
        assert passes_of(target, lambda: compiled.generate(**PROMPT, **SETTINGS))[0] == num_drafted


class LosesCache(LlamaForCausalLM):
    def forward(
        self, input_ids: Any, position_ids: Any = None, cache: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


def test_what_only_a_pass_can_say_is_said_when_attaching(pair: Pair) -> None:
    target, drafter = pair
    with pytest.raises(ValueError, match="added nothing to the cache"):
        attach(LosesCache(target.config).double().eval(), drafter)
    as_it_is = type("OwnLlama", (LlamaForCausalLM,), {"__module__": "somewhere"})(target.config).double().eval()
    attach(as_it_is, drafter)
    assert decode(as_it_is)[0] < 24


class Around(nn.Module):
    """As wrappers with a value head are, of other packages."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.pretrained_model = model

    def generate(self, **kwargs: Any) -> Any:
        return self.pretrained_model.generate(**kwargs)


class Runtime(GenerationMixin):
    """As models of another runtime are: `generate()` of transformers, around what it does not know."""

    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig):
        self.config, self.generation_config = config, GenerationConfig()
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        raise NotImplementedError


def adapted(drafter: GumihoModel) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(drafter, LoraConfig(target_modules=["q_proj"]))


ENTRIES: list[Callable[[Any, GumihoModel], Any]] = [
    lambda target, drafter: attach(target, drafter),
    lambda target, drafter: attached(target, drafter).__enter__(),
    lambda target, _: detach(target),
    lambda target, _: GumihoModel.from_target(target),
    lambda target, _: record(target, "no/folder"),
    lambda target, drafter: GumihoTrainer(drafter, GumihoTrainingArguments(use_cpu=True), target=target),
]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda target, _: Around(target),
            "Around is none. It holds a LlamaForCausalLM as `pretrained_model`",
        ),
        (lambda _, drafter: drafter, "this GumihoModel is a drafter. Give the model that it drafts for"),
        (lambda _, drafter: adapted(drafter), "this GumihoModel is a drafter. Give the model that it drafts for"),
        (lambda target, _: target.model, "LlamaModel does not generate text. Load it with `AutoModelForCausalLM"),
        (lambda target, _: Runtime(target.config), "Runtime is none. .*AutoModelForCausalLM"),
    ],
    ids=["a module around it", "a drafter", "an adapter of one", "a backbone", "another runtime"],
)
def test_what_is_no_target_is_named(pair: Pair, make: Callable[..., Any], reason: str) -> None:
    target, drafter = pair
    given = make(target, make_drafter(target))
    entries = ENTRIES
    if given is target.model:  # a drafter can be made for it
        entries = ENTRIES[:2]
    elif isinstance(given, Runtime):
        entries = [*ENTRIES[:-1], lambda *_: given.generate(**PROMPT, assistant_model=drafter)]
    for entry in entries:
        with pytest.raises(ValueError, match=reason):
            entry(given, drafter)


def test_a_drafter_is_attached_only_to_its_target(pair: Pair) -> None:
    with pytest.raises(ValueError, match="has a vocabulary of 8, but LlamaForCausalLM has one of 12"):
        attach(make_target(vocab_size=12), pair[1])


def test_an_assistant_may_be_named(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair
    drafter.save_pretrained(tmp_path / "gumiho")
    num_plain, plain = decode(target)
    for name in (str(tmp_path / "gumiho"), tmp_path / "gumiho"):
        num_drafted, drafted = decode(target, assistant_model=name)
        assert num_drafted < num_plain
        assert torch.equal(drafted, plain)
    # By position, and without a look at the files again.
    monkeypatch.setattr(GumihoModel, "from_pretrained", None)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", None)
    settings = GenerationConfig(**SETTINGS)
    call = (PROMPT["input_ids"], settings, None, None, None, None, tmp_path / "gumiho")
    assert passes_of(target, lambda: target.generate(*call))[0] == num_drafted


def test_a_folder_that_is_written_anew_is_read_again(pair: Pair, tmp_path: Path) -> None:
    target, good = pair
    poor = make_drafter(target, num_assistant_tokens=1)
    counts = []
    for drafter in (poor, good, poor):
        drafter.save_pretrained(tmp_path)
        named = decode(target, assistant_model=tmp_path)[0]
        attach(target, tmp_path)
        assert decode(target)[0] == named
        counts.append(named)
    assert counts[1] < counts[0] == counts[2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nothing", "There is no folder"),
        ("a file", "is a file"),
        ("an empty folder", "has no config.json"),
        ("weights alone", "has no config.json"),
        ("settings alone", "decoding settings alone"),
        ("no JSON", "is damaged"),
        ("no type", "has no config.json"),
        ("a target", "is not a Gumiho drafter"),
    ],
)
def test_what_is_no_drafter_is_named(pair: Pair, tmp_path: Path, content: str, reason: str) -> None:
    target, drafter = pair
    folder = tmp_path / content
    if content in ("weights alone", "no JSON", "no type"):
        drafter.save_pretrained(folder)
    elif content == "a target":
        target.save_pretrained(folder)
    elif content == "a file":
        folder.write_text("{}")
    elif content != "nothing":
        folder.mkdir()
    if content == "weights alone":
        (folder / "config.json").unlink()
        (folder / "generation_config.json").unlink()
    elif content == "settings alone":
        drafter.generation_config.save_pretrained(folder)
    elif content in ("no JSON", "no type"):
        (folder / "config.json").write_text("{" if content == "no JSON" else "{}")
    for use in (
        lambda: target.generate(**PROMPT, assistant_model=str(folder)),
        lambda: target.generate(**PROMPT, assistant_model=folder),
        lambda: attach(target, folder),
    ):
        with pytest.raises((ValueError, OSError), match=reason) as refused:
            use()
        assert repr(str(folder)) in str(refused.value)
    assert attached_drafter(target) is None


DEMO_TARGET, DEMO_DRAFTER = FOLDER / "target", FOLDER / "gumiho"


def test_a_served_folder_drafts_for_clients_that_know_a_name_alone(tmp_path: Path) -> None:
    served = tmp_path / "served"
    arguments = ["attach", "--target", DEMO_TARGET, "--drafter", DEMO_DRAFTER, "--output_dir", served]
    assert "the weights are linked" in gumiho(*arguments)
    assert (served / "model.safetensors").is_symlink()
    target = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32, trust_remote_code=True)
    inputs = {"input_ids": torch.arange(3, 9)[None], "max_new_tokens": 32, "do_sample": False}
    num_drafted, drafted = passes_of(target, lambda: target.generate(**inputs))
    num_plain, plain = passes_of(target, lambda: type(target).generate(target, **inputs, assistant_model=None))
    assert num_drafted < num_plain
    assert torch.equal(drafted, plain)
    assert passes_of(target, lambda: target.generate(**inputs, assistant_model=None))[0] == num_plain
    # Beams decode plainly.
    assert target.generate(**inputs, num_beams=2).shape == plain.shape
    # Another drafter may be attached; then the folder's own is back.
    of_folder = target.generate
    with attached(target, load_drafter(num_assistant_tokens=1)):
        assert passes_of(target, lambda: target.generate(**inputs))[0] > num_drafted
    assert target.generate is of_folder
    assert passes_of(target, lambda: target.generate(**inputs))[0] == num_drafted
    # A copy generates with itself, and drafts as the folder does.
    twin = copy.deepcopy(target)
    del target.generate
    assert passes_of(twin, lambda: twin.generate(**inputs))[0] == num_drafted
    # In a call of another target, by its name; its other calls stay plain.
    custom = {"custom_generate": str(served), "trust_remote_code": True}
    assert passes_of(target, lambda: target.generate(**inputs, **custom))[0] == num_drafted
    assert passes_of(target, lambda: target.generate(**inputs))[0] == num_plain
    refuse("is not empty", *arguments)
    for positional, message in (
        ((served, DEMO_DRAFTER), "already has a folder 'custom_generate'"),
        ((DEMO_TARGET, DEMO_TARGET), "is not a Gumiho drafter"),
        ((DEMO_DRAFTER, DEMO_DRAFTER), "is a drafter, not a target"),
        ((DEMO_TARGET, "no/drafter"), "No drafter can be read from 'no/drafter'"),
        (("no/target", DEMO_DRAFTER), "The target 'no/target' is not a folder and cannot be"),
    ):
        refuse(message, "attach", *positional, "--output_dir", tmp_path / "other")
        assert not (tmp_path / "other").exists()


def test_a_served_folder_holds_what_is_loaded_from_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    shutil.copytree(DEMO_TARGET, tmp_path / "target")
    for name in ("model.gguf", "tf_model.h5", "consolidated.00.pth", "optimizer.bin"):
        (tmp_path / "target" / name).write_bytes(b"large")
    served = ["--output_dir", tmp_path / "served", "--copy_weights"]
    assert "the weights are copied" in gumiho("attach", tmp_path / "target", DEMO_DRAFTER, *served)
    kept = {path.name for path in DEMO_TARGET.iterdir()} | {"custom_generate"}
    assert {path.name for path in (tmp_path / "served").iterdir()} == kept
    (tmp_path / "target" / "model.safetensors").unlink()
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(DEMO_TARGET), lora).save_pretrained(tmp_path / "adapter")
    for target, message in (
        (tmp_path / "target", "holds no weights"),
        (tmp_path / "adapter", "is an adapter. Save a merged model"),
    ):
        refuse(message, "attach", target, DEMO_DRAFTER, "--output_dir", tmp_path / "other")
        assert not (tmp_path / "other").exists()
    make_drafter(make_target()).save_pretrained(tmp_path / "of another")
    options = tmp_path / "of another", "--output_dir", tmp_path / "other"
    refuse("has a vocabulary of 8, and the target one of 4096", "attach", DEMO_TARGET, *options)
