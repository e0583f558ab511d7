"""Recording what is generated: rows are the target's own states and tokens, and decoding goes on whatever happens."""

import errno
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from block import make_block_model
from chains import make_chain_drafter, make_chain_target
from commands import gumiho, refuse
from datasets import Dataset
from pretend_device import pretending
from targets import Pair, make_drafter, make_pair, make_prompts, make_target
from trainers import trained
from training_data import DEMO_TARGET, make_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from transformers_gumiho import GumihoModel, record
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.training import (
    CachedFeatures,
    FeatureDataset,
    feature_cache,
    recording,
    write_feature_cache,
)


TOKENIZER = make_tokenizer()
SETTINGS = {"max_new_tokens": 24, "do_sample": False}
DRAFTER = DEMO_TARGET.parent / "gumiho"


@pytest.fixture
def pair() -> Pair:
    return make_pair(num_layers=3)


def generate(target: PreTrainedModel, drafter: GumihoModel, *lengths: int, **settings: Any) -> torch.Tensor:
    torch.manual_seed(0)
    prompts = make_prompts(list(lengths or (5,)), seed=sum(lengths))
    return target.generate(**prompts, assistant_model=drafter, **SETTINGS | settings)


@contextmanager
def one_warning(caplog: pytest.LogCaptureFixture, reason: str) -> Iterator[None]:
    """Asserts that the recording stops with one warning."""
    caplog.clear()
    yield
    (message,) = [entry.getMessage() for entry in caplog.records if "Recording into" in entry.getMessage()]
    assert reason in message


# What the drafter is, and how texts are written.
WAYS: dict[str, tuple[str, dict[str, Any], list[int], dict[str, Any]]] = {
    "greedy": ("llama", {}, [5], {}),
    "batch, sampled": ("llama", {}, [6, 2, 4], {"do_sample": True}),
    "layers": ("llama", {"target_layer_ids": [0, 2]}, [6, 2], {}),
    "block": ("llama", {"serial_head": "block"}, [6, 2], {}),
    "paused": ("llama", {"break_even": 100.0}, [5, 3], {}),
    "context": ("llama", {"prompt_lookup_num_tokens": 8}, [9], {"max_new_tokens": 60}),
    "static": ("llama", {}, [5, 3], {"cache_implementation": "static", "disable_compile": True}),
    "ends": ("llama", {}, [5, 3, 4], {"eos_token_id": [3, 6], "do_sample": True}),
    "chains": ("qwen3_5", {}, [6, 2], {}),
    "prompt in chunks": ("llama", {}, [9], {"prefill_chunk_size": 4}),
}


@pytest.mark.parametrize(("family", "config", "lengths", "settings"), WAYS.values(), ids=WAYS)
def test_rows_are_the_texts_with_the_targets_states(
    tmp_path: Path, family: str, config: dict[str, Any], lengths: list[int], settings: dict[str, Any]
) -> None:
    is_chain = family == "qwen3_5"
    target = make_chain_target(family) if is_chain else make_target(family, num_layers=3)
    if "serial_head" in config:
        drafter = make_block_model(target)
    else:
        drafter = make_chain_drafter(target) if is_chain else make_drafter(target, **config)
    expected = generate(target, drafter, *lengths, **settings)
    with record(target, tmp_path / "cache", TOKENIZER):
        texts = generate(target, drafter, *lengths, **settings)
        generate(target, drafter, 3, **SETTINGS)
    assert torch.equal(texts, expected)
    assert torch.equal(generate(target, drafter, *lengths, **settings), expected)
    dataset = FeatureDataset(tmp_path / "cache")
    assert len(dataset) == len(lengths) + 1
    longest = max(lengths)
    for row, text, length in zip(dataset, texts.tolist(), lengths, strict=False):
        ids, num_prompt = row["input_ids"].tolist(), length
        written = text[longest:]
        assert ids == [*text[longest - length : longest], *written][: len(ids)]
        if "eos_token_id" in settings:
            ends = [number for number, token in enumerate(written) if token in (3, 6)]
            written = written[: ends[0] + 1] if ends else written
        assert len(ids) == num_prompt + len(written) - 1, "the last token has no state"
        assert row["loss_mask"].tolist() == [0] * num_prompt + [1] * (len(written) - 2) + [0]
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(row["hidden_states"].double(), states[-1][0], rtol=1e-2, atol=1e-2)
        assert row["hidden_states"].dtype == torch.bfloat16
        if "target_layer_ids" in config:
            torch.testing.assert_close(row["layer_states"].double(), states[1][0], rtol=1e-2, atol=1e-2)
        if "serial_head" in config:
            of_both = torch.cat((states[1][0], states[2][0]), dim=-1)
            torch.testing.assert_close(row["layer_states"].double(), of_both, rtol=1e-2, atol=1e-2)


def test_a_turn_after_a_cache_begins_after_it(tmp_path: Path, pair: Pair) -> None:
    target, drafter = pair
    cache, prompt = DynamicCache(config=target.config), make_prompts([6])["input_ids"]
    target(prompt[:, :4], **{CACHE_NAME: cache})
    with record(target, tmp_path, TOKENIZER):
        text = target.generate(prompt, assistant_model=drafter, **SETTINGS, **{CACHE_NAME: cache})
        embeds = target.get_input_embeddings()(prompt)
        later = target.generate(inputs_embeds=embeds, assistant_model=drafter, **SETTINGS)
    first, second = FeatureDataset(tmp_path)
    assert first["input_ids"].tolist() == text[0, 4:-1].tolist()
    assert first["loss_mask"].sum() == 22
    assert second["input_ids"].tolist() == later[0, :-1].tolist(), "a prompt without tokens is left out"


def test_a_program_that_changes_its_directory_goes_on_in_the_named_folder(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    monkeypatch.chdir(one)
    with record(pair[0], "cache", TOKENIZER):
        text = generate(*pair)
        monkeypatch.chdir(two)
        other = generate(*pair, 4)
    monkeypatch.chdir(one)
    dataset = FeatureDataset("cache")
    monkeypatch.chdir(two)
    rows = [row["input_ids"].tolist() for row in dataset]
    assert rows == [*text[:, :-1].tolist(), *other[:, :-1].tolist()]
    assert not list(two.iterdir())


def test_of_long_texts_the_written_parts_are_kept(tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_ROW", 10)
    with record(pair[0], tmp_path, TOKENIZER):
        text = generate(*pair, 40)
    rows = [row["input_ids"].tolist() for row in FeatureDataset(tmp_path)]
    parts = [text[0, start : start + 10].tolist() for start in (53, 43, 33)]
    assert rows == parts


def test_the_oldest_rows_make_room_and_a_recording_goes_on(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_ROWS_PER_SHARD", 3)
    texts = []
    for number in range(5):  # each begins with what the one before left of its last shard
        with record(pair[0], tmp_path / "cache", TOKENIZER, max_gigabytes=1.5e-5) as recorder:
            for length in (5, 4):
                texts += generate(*pair, length + number)[:, :-1].tolist()
    assert recorder.num_tokens < sum(map(len, texts))
    shard_bytes = [path.stat().st_size for path in (tmp_path / "cache").glob("shard*")]
    assert len(shard_bytes) > 1
    assert sum(shard_bytes) <= 1.5e4
    rows = [row["input_ids"].tolist() for row in FeatureDataset(tmp_path / "cache")]
    assert rows == texts[-len(rows) :]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_share_of_the_calls_draws_no_random_numbers(tmp_path: Path, pair: Pair) -> None:
    state, settings = random.getstate(), {"do_sample": True, "max_new_tokens": 6}
    expected = generate(*pair, **settings)
    after = torch.get_rng_state()
    with record(pair[0], tmp_path, TOKENIZER, share=0.3) as recorder:
        for _ in range(40):
            assert torch.equal(generate(*pair, **settings), expected)
            assert torch.equal(torch.get_rng_state(), after)
    assert random.getstate() == state
    assert 0 < recorder.num_tokens / (expected.shape[1] - 1) < 36


def test_threads_record_at_once(tmp_path: Path, pair: Pair) -> None:
    with record(pair[0], tmp_path, TOKENIZER), ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda length: generate(*pair, length, max_new_tokens=8), range(2, 42)))
    rows = [row["input_ids"].tolist() for row in FeatureDataset(tmp_path)]
    assert sorted(rows) == sorted(text[0, :-1].tolist() for text in texts)


def test_an_interrupted_call_leaves_what_was_committed(tmp_path: Path, pair: Pair) -> None:
    expected, received = generate(*pair), []

    class Interrupting(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            received.append(value)
            if len(received) == 12:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    with record(pair[0], tmp_path, TOKENIZER):
        with pytest.raises(KeyboardInterrupt):
            generate(*pair, streamer=Interrupting())
        generate(*pair)
    cut, whole = (row["input_ids"].tolist() for row in FeatureDataset(tmp_path))
    assert 5 < len(cut) < len(whole)
    assert whole == expected[0, :-1].tolist()
    assert cut == whole[: len(cut)]


def change_in_place(target: PreTrainedModel) -> None:
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def change_unnoticed(target: PreTrainedModel) -> None:
    target.model.layers[0].mlp.up_proj.weight.data *= 1.5


def add_adapter(target: PreTrainedModel) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], init_lora_weights=False), target)


@pytest.mark.parametrize("change", [change_in_place, change_unnoticed, add_adapter])
def test_other_weights_end_the_recording(
    tmp_path: Path, pair: Pair, change: Any, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(recording, "_ROWS_PER_SHARD", 1)
    with record(pair[0], tmp_path, TOKENIZER) as recorder, one_warning(caplog, "weights or adapters have changed"):
        before = generate(*pair)
        change(pair[0])
        changed = generate(*pair, 4)
        generate(*pair)
        assert not recorder.is_running
    assert torch.equal(generate(*pair, 4), changed)
    (row,) = FeatureDataset(tmp_path)
    assert row["input_ids"].tolist() == before[0, :-1].tolist()


def test_switched_adapters_end_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    wrapped = get_peft_model(make_target(num_layers=3), config)
    drafter = make_drafter(wrapped.get_base_model())
    with record(wrapped, tmp_path, TOKENIZER) as recorder, one_warning(caplog, "weights or adapters have changed"):
        generate(wrapped, drafter)
        assert recorder.is_running
        with wrapped.disable_adapter():
            generate(wrapped, drafter)
        assert not recorder.is_running
    assert len(FeatureDataset(tmp_path)) == 1  # of the call that ended before


def test_a_drafter_of_other_layers_ends_the_recording(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with record(pair[0], tmp_path, TOKENIZER), one_warning(caplog, "than the folder holds"):
        generate(*pair)
        generate(pair[0], make_drafter(pair[0], target_layer_ids=[0, 1]))
        generate(pair[0], make_drafter(pair[0], target_layer_ids=[0, 1]))


def test_a_full_disk_ends_the_recording_and_leaves_it_whole(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_ROWS_PER_SHARD", 1)
    save, is_full = feature_cache.save_file, False

    def save_what_fits(tensors: Any, path: Path, metadata: Any) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(feature_cache, "save_file", save_what_fits)
    with record(pair[0], tmp_path, TOKENIZER), one_warning(caplog, "No space left on device"):
        text = generate(*pair)
        is_full = True
        other = generate(*pair, 4)
        assert torch.equal(generate(*pair, 4), other)
    assert [row["input_ids"].tolist() for row in FeatureDataset(tmp_path)] == text[:, :-1].tolist()
    is_full = False
    with record(pair[0], tmp_path, TOKENIZER):
        generate(*pair, 4)
    rows = [row["input_ids"].tolist() for row in FeatureDataset(tmp_path)]
    assert rows == [*text[:, :-1].tolist(), *other[:, :-1].tolist()]


def test_a_second_process_does_not_record(tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    other = make_target(num_layers=3)
    with record(pair[0], tmp_path, TOKENIZER):
        with one_warning(caplog, "Another run is writing there"):
            second = record(other, tmp_path, TOKENIZER)
        generate(other, make_drafter(other), 4)
        second.stop()
        text = generate(*pair)
        if os.fork() == 0:  # a child shares the lock
            generate(*pair)
            os._exit(0)
        assert os.wait()[1] == 0
    assert [row["input_ids"].tolist() for row in FeatureDataset(tmp_path)] == text[:, :-1].tolist()


def test_a_drafter_trains_on_what_was_recorded_and_on_other_data_of_the_target(tmp_path: Path) -> None:
    target = make_target(vocab_size=len(TOKENIZER)).float()
    drafter = make_drafter(target)
    with record(target, tmp_path / "recorded", TOKENIZER):
        generate(target, drafter, 5, 3)
    rows = Dataset.from_list([{"input_ids": [*range(9, 29)], "loss_mask": [1] * 19 + [0]}] * 3)
    write_feature_cache(rows, target, TOKENIZER, tmp_path / "extracted", made_from={"target": "by name", "data": "x"}
                        | recording.tokenizer_fingerprints(TOKENIZER))  # fmt: skip
    for folders in (["recorded"], ["recorded", "extracted"]):
        features = CachedFeatures(tmp_path / "recorded")
        data = torch.utils.data.ConcatDataset([FeatureDataset(tmp_path / folder) for folder in folders])
        trainer = trained(features, tmp_path / "out", features.make_drafter(), train_dataset=data, max_steps=2)
        assert trainer.state.global_step == 2


def test_what_cannot_be_recorded_is_refused_at_once(tmp_path: Path) -> None:
    target = make_target(num_layers=3)
    with pytest.raises(ValueError, match=r"No tokenizer can be loaded from ''.*Give `tokenizer`"):
        record(target, tmp_path / "none")
    for wrong in ({"share": 0}, {"share": 1.5}, {"max_gigabytes": 0}):
        with pytest.raises(ValueError, match=r"`share` must be above 0.* and `max_gigabytes` above 0"):
            record(target, tmp_path / "none", TOKENIZER, **wrong)
    for wrong_target in (make_drafter(target), torch.nn.Linear(2, 2), "a name"):
        with pytest.raises(ValueError, match=r"A target is .*, and (this )?(GumihoModel|Linear|str) is"):
            record(wrong_target, tmp_path / "none", TOKENIZER)
    assert not (tmp_path / "none").exists()
    record(target, tmp_path / "cache", TOKENIZER).stop()
    with pytest.raises(ValueError, match=r"different settings: model .*Record into another folder"):
        record(make_target(seed=1, num_layers=3), tmp_path / "cache", TOKENIZER)


def test_a_served_target_that_cannot_be_recorded_drafts_on(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    record(make_target(seed=1, num_layers=3), tmp_path, TOKENIZER).stop()
    monkeypatch.setattr(recording.AutoTokenizer, "from_pretrained", lambda _: TOKENIZER)
    for _ in range(2):
        recording.record_once(pair[0], str(tmp_path))
    (message,) = [entry.getMessage() for entry in caplog.records if "recorded" in entry.getMessage()]
    assert re.search("Nothing is recorded: .* created with different settings: model", message)
    assert generate(*pair).shape == (1, 29)


def test_a_served_folder_records_a_share_within_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, settings, found = str(tmp_path / "served"), ["--record_share", "0.5", "--record_max_gigabytes", "2"], []
    words = ["attach", str(DEMO_TARGET), str(DRAFTER), "--output_dir", served, "--record", str(tmp_path / "recorded")]
    gumiho(*words, *settings)
    monkeypatch.setattr(recording, "record", lambda *args, **kwargs: found.append((args[1], kwargs)))
    target = AutoModelForCausalLM.from_pretrained(served, trust_remote_code=True)
    target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert found == [(str(tmp_path / "recorded"), {"share": 0.5, "max_gigabytes": 2.0})]
    words[4] = str(tmp_path / "b")
    refuse("`share` must be above 0 and at most 1, got 0.0", *words, "--record_share", 0)
    words[-1] = __file__
    refuse("is a file. Name a folder with --record", *words)


def test_the_command_trains_a_drafter_of_random_weights_on_its_own_use(tmp_path: Path) -> None:
    """A recording of a served folder, made in another process."""
    served, folder = tmp_path / "served", tmp_path / "recorded"
    gumiho("attach", str(DEMO_TARGET), str(DRAFTER), "--output_dir", str(served), "--record", str(folder))
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        f"target = AutoModelForCausalLM.from_pretrained({str(served)!r}, trust_remote_code=True)\n"
        "prompts = torch.arange(60, 220).view(20, 8)\n"
        "target.generate(prompts, max_new_tokens=24, do_sample=False)\n"
        "target.generate(prompts[:1], max_new_tokens=24, do_sample=False)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert len(FeatureDataset(folder)) == 21
    output = tmp_path / "drafter"
    gumiho("train", "--features", str(folder), "--drafter", str(DRAFTER), "--output_dir", str(output), "--max_steps",
           "1", "--num_eval_rows", "2", "--use_cpu", "true")  # fmt: skip
    assert (output / "model.safetensors").exists()
    trained = torch.load(output / "training_args.bin", weights_only=False)
    assert (trained.unroll_serial_head, trained.parallel_weight, trained.parallel_ce_start) == (True, 1, 0)


def test_recording_needs_no_extra_and_generation_none_of_the_training(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('datasets', 'evaluate', 'openai', 'peft')))\n"
        "from transformers import AutoModelForCausalLM\n"
        "import transformers_gumiho\n"
        "assert 'transformers_gumiho.training' not in sys.modules\n"
        f"target = AutoModelForCausalLM.from_pretrained({str(DEMO_TARGET)!r})\n"
        f"transformers_gumiho.record(target, {str(tmp_path / 'cache')!r}).stop()\n"
        "try:\n"
        "    from transformers_gumiho.training import GumihoTrainer\n"
        "except ImportError as error:\n"
        "    assert 'Training needs the `datasets` library' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_host_waits_no_more_for_a_recorded_call(tmp_path: Path) -> None:
    target = make_target(num_layers=3).float()
    drafter = make_drafter(target)
    with pretending() as machine:
        target.to("cuda:0")
        drafter.to("cuda:0")
        prompts = {name: tensor.to("cuda:0") for name, tensor in make_prompts([8, 5]).items()}

        def count() -> tuple[int, torch.Tensor]:
            before = len(machine.waits)
            text = target.generate(**prompts, assistant_model=drafter, **SETTINGS)
            return len(machine.waits) - before, text.cpu()

        count()
        num_waits, text = count()
        with record(target, tmp_path, TOKENIZER):
            assert count()[0] == num_waits
            assert torch.equal(count()[1], text)
    for number, row in enumerate(FeatureDataset(tmp_path)):
        states = target.to("cpu")(row["input_ids"][None].long(), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(row["hidden_states"].float(), states, rtol=2e-2, atol=2e-2)
        assert row["input_ids"].tolist()[-20:] == text[number % 2, -21:-1].tolist()
