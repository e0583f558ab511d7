"""Cached features: the losses of the running target, files that survive a kill, and caches that are refused."""

import copy
import errno
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset
from pretend_device import pretending
from safetensors import SafetensorError
from sweep_architectures import build
from targets import make_target
from trainers import losses_of, make_trainer, trained
from training_data import make_tokenizer
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.training import (
    CachedFeatures,
    FeatureDataset,
    GumihoDataCollator,
    cache_size,
    feature_cache,
    feature_extraction,
    write_feature_cache,
)


LENGTHS = [20, 9, 17, 20, 5, 20, 12]


def make_rows(seed: int = 0, packed: bool = True) -> Dataset:
    """Returns seven rows, of two texts each where they are packed."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(1, 8, (length,), generator=generator).tolist()
        row = {"input_ids": ids, "loss_mask": [int(token > 2) for token in ids]}
        rows.append(row | ({"position_ids": [*range(4), *range(length - 4)]} if packed else {}))
    return Dataset.from_list(rows)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", num_layers=3).float()


def write(target: PreTrainedModel, folder: Path, rows: Dataset | None = None, **settings: Any) -> None:
    # Up to two rows of the longest length in a shard.
    settings = {"dtype": torch.float32, "shard_bytes": 2 * 20 * (32 * 4 + 12), "tokens_per_batch": 1} | settings
    write_feature_cache(make_rows() if rows is None else rows, target, make_tokenizer(), folder, **settings)


def rows_in(folder: Path) -> list[dict[str, list[Any]]]:
    return [{name: tensor.tolist() for name, tensor in row.items()} for row in FeatureDataset(folder)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("family", "layer_ids", "packed"),
    # The third caps its logits, and the fourth has layers before its output projection, and other widths there.
    [
        ("llama", None, False), ("llama", None, True), ("gemma2", None, True), ("rembert", None, False),
        ("llama", [0, 2], True), ("llama", [0, 1], False),
    ],
)  # fmt: skip
def test_cached_features_give_the_losses_of_the_running_target(
    tmp_path: Path, family: str, layer_ids: list[int] | None, packed: bool
) -> None:
    target = make_target(family, num_layers=3).float() if family != "rembert" else build("rembert")
    rows = make_rows(packed=packed)
    write(target, tmp_path / "cache", rows, target_layer_ids=layer_ids)
    histories = []
    for features, dataset in (
        (target, rows),
        (CachedFeatures(tmp_path / "cache"), FeatureDataset(tmp_path / "cache")),
    ):
        torch.manual_seed(0)
        is_cache = isinstance(features, CachedFeatures)
        drafter = (features.make_drafter if is_cache else partial(GumihoModel.from_target, features))(
            target_layer_ids=layer_ids
        )
        data = {"train_dataset": dataset, "eval_dataset": dataset, "per_device_train_batch_size": 1}
        trainer = trained(features, tmp_path, drafter, feature_noise=0.2, **data)
        numbers = [
            {k: v for k, v in entry.items() if "_ce" in k or "_feature" in k or k == "loss"}
            for entry in trainer.state.log_history
        ]
        histories.append(
            [*numbers[:4], {k: v for k, v in trainer.evaluate().items() if "agreement" in k or "loss" in k}]
        )
    for online, cached in zip(*histories, strict=True):
        assert online.keys() == cached.keys()
        assert cached == (online if "loss" in online else pytest.approx(online, rel=1e-4))  # evaluations have batches


def test_a_cache_of_several_layers_serves_drafters_of_the_last_one(target: PreTrainedModel, tmp_path: Path) -> None:
    rows = make_rows()
    write(target, tmp_path / "one", rows)
    write(target, tmp_path / "two", rows, target_layer_ids=[0, 2])
    losses = []
    for folder in ("one", "two"):
        torch.manual_seed(0)
        features, dataset = CachedFeatures(tmp_path / folder), FeatureDataset(tmp_path / folder)
        trainer = trained(features, tmp_path, features.make_drafter(), train_dataset=dataset, max_steps=3)
        losses.append(losses_of(trainer))
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match=r"layers \[0, 1\] .*features are of \[0, 2\]"):
        make_trainer(features, tmp_path, features.make_drafter(target_layer_ids=[0, 1]), train_dataset=dataset)
    with pytest.raises(
        ValueError, match=r"different settings: target_layer_ids \(\[0, 2\], now \[1, 2\]\)\. Extract features"
    ):
        write(target, tmp_path / "two", rows, target_layer_ids=[1, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_are_those_of_the_target_in_the_precision_asked_for(
    target: PreTrainedModel, tmp_path: Path, dtype: torch.dtype
) -> None:
    rows = make_rows(packed=False)
    write(target, tmp_path, rows, dtype=dtype, tokens_per_batch=60)
    dataset = FeatureDataset(tmp_path)
    assert len(dataset) == len(rows)
    for row, cached in zip(rows, dataset, strict=True):
        states = target.model(torch.tensor([row["input_ids"]])).last_hidden_state[0]
        assert cached["hidden_states"].dtype == dtype
        torch.testing.assert_close(cached["hidden_states"].float(), states.detach(), rtol=1e-2, atol=1e-2)
        assert cached["input_ids"].tolist() == row["input_ids"]
        assert cached["loss_mask"].tolist() == row["loss_mask"]


def test_marks_of_other_libraries_are_kept_as_what_they_say(target: PreTrainedModel, tmp_path: Path) -> None:
    row = {"input_ids": [3, 4, 5, 6], "labels": [-100, 4, 5, -100]}
    write(target, tmp_path / "one", Dataset.from_list([row]))
    (one,) = rows_in(tmp_path / "one")
    assert one["loss_mask"] == [0, 1, 0, 0]
    assert "position_ids" not in one
    write(target, tmp_path / "two", Dataset.from_list([row | {"seq_lengths": [2, 2]}, row | {"seq_lengths": [4]}]))
    assert [row["position_ids"] for row in rows_in(tmp_path / "two")] == [[0, 1, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(("layer_ids", "num_kept"), [(None, 1), ([0, 1], 3), ([1, 2], 2)])
def test_size_is_estimated_before_extraction(
    target: PreTrainedModel, tmp_path: Path, layer_ids: list[int] | None, num_kept: int
) -> None:
    rows = make_rows()
    write(target, tmp_path, rows, dtype=torch.bfloat16, target_layer_ids=layer_ids)
    written = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    headers = 1000 * len(list(tmp_path.glob("shard-*")))
    estimate = cache_size(rows, target.config, torch.bfloat16, layer_ids)
    assert written - headers < estimate == 103 * (32 * 2 * num_kept + 12) < written


@pytest.mark.parametrize(("killed_at", "num_bytes"), [(0, 100), (1, 0), (2, 3000), (3, 1)])
def test_a_killed_extraction_goes_on_where_it_was(
    target: PreTrainedModel, tmp_path: Path, killed_at: int, num_bytes: int, monkeypatch: Any, calls_of: Any
) -> None:
    write(target, tmp_path / "whole")
    killed, saved = tmp_path / "killed", []
    real = feature_cache.save_file

    def dying_save(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        real(tensors, path, metadata)
        if len(saved) == killed_at:
            path.write_bytes(path.read_bytes()[:num_bytes])
            raise KeyboardInterrupt
        saved.append(path)

    monkeypatch.setattr(feature_cache, "save_file", dying_save)
    with pytest.raises(KeyboardInterrupt):
        write(target, killed)
    if killed_at:  # the first file is the target's head
        with pytest.raises(ValueError, match=f"has {2 * killed_at - 2} of 7 rows. Run what wrote it again"):
            FeatureDataset(killed)
    assert len(saved) == killed_at
    monkeypatch.undo()
    written = calls_of(feature_cache, "save_file")
    write(target, killed)
    assert len(saved) + len(written) == 4  # nothing that was whole is written again
    assert contents(killed) == contents(tmp_path / "whole")


def test_processes_share_the_rows(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes shards of its own; those of one that was killed are there for another number of processes."""
    write(target, tmp_path / "alone")
    missing = feature_cache.missing_rows
    for index in range(2):
        state = SimpleNamespace(
            process_index=index, num_processes=2, is_main_process=not index, is_local_main_process=not index,
            wait_for_everyone=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(feature_extraction, "PartialState", lambda state=state: state)
        # Both have seen that nothing is there.
        monkeypatch.setattr(feature_extraction, "missing_rows", lambda _, lengths: [*range(len(lengths))])
        write(target, tmp_path / "shared")
    names = [path.name for path in sorted((tmp_path / "shared").glob("shard*"))]
    assert names == [f"shard-00{index}-0000{number}.safetensors" for index in range(2) for number in range(2)]
    assert rows_in(tmp_path / "shared") == rows_in(tmp_path / "alone")
    monkeypatch.undo()
    (tmp_path / "shared" / names[2]).unlink()
    assert len(missing(tmp_path / "shared", LENGTHS)) == 2
    write(target, tmp_path / "shared")
    assert rows_in(tmp_path / "shared") == rows_in(tmp_path / "alone")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device.*Make room and run this"),
        (SafetensorError("I/O error: No such file (os error 2)"), r"No such file \(os error 2\).*Remove the cause"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_with_what_is_kept(
    target: PreTrainedModel, tmp_path: Path, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = feature_cache.save_file

    def fail(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        if "shard-000-00002" in path.name:
            path.write_bytes(b"half of it")
            raise error
        real(tensors, path, metadata)

    monkeypatch.setattr(feature_cache, "save_file", fail)
    with pytest.raises(OSError, match=rf"shard-000-00002.*{message}"):
        write(target, tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("shard*"))) == 2
    assert not list((tmp_path / "cache").glob("*.partial"))


DAMAGE = {"cut": lambda data: data[:-9], "rubbish": lambda _: b"<html>" * 99,
          "zeroed": lambda data: data[:-800] + bytes(800)}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["shard-000-00001.safetensors", "target/target.safetensors"])
def test_a_damaged_file_is_named_and_written_again(
    target: PreTrainedModel, tmp_path: Path, name: str, damage: str, calls_of: Any
) -> None:
    """A file that was cut is noticed by itself, and one with other content where checksums are asked for."""
    write(target, tmp_path)
    before, path = contents(tmp_path), tmp_path / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{path.name}' is damaged: .*Delete this file, and run what wrote it again"):
        FeatureDataset(tmp_path, verify=True)
    if damage == "zeroed":
        FeatureDataset(tmp_path)
        path.unlink()
    saved = calls_of(feature_cache, "save_file")
    write(target, tmp_path)
    assert [save.args[1].name for save in saved] == [f"{path.name.replace('00001', '00003')}.partial"]
    if name.startswith("shard"):  # its rows are in a new shard
        path.with_name("shard-000-00003.safetensors").rename(path)
    assert contents(tmp_path) == before
    FeatureDataset(tmp_path, verify=True)


def test_the_host_waits_for_the_device_of_the_target(target: PreTrainedModel, tmp_path: Path) -> None:
    """It may be another one than the current."""
    write(target, tmp_path / "here")
    with pretending() as machine:
        write(copy.deepcopy(target).to("cuda:1"), tmp_path / "there")
    assert rows_in(tmp_path / "there") == rows_in(tmp_path / "here")
    assert sum("synchronize with cuda:1" in wait for wait in machine.waits) == len(LENGTHS)


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_as_many_states_are_read_as_are_trained_on(
    target: PreTrainedModel, tmp_path: Path, strategy: str, calls_of: Any
) -> None:
    """Sorting by length and counting tokens, of a part of two caches as well, read none."""
    rows = [Dataset.from_list([*make_rows(seed)] * 4) for seed in range(2)]
    for number, of_cache in enumerate(rows):
        write(target, tmp_path / str(number), of_cache)
    whole = torch.utils.data.ConcatDataset([FeatureDataset(tmp_path / str(number)) for number in range(2)])
    features, reads = CachedFeatures(tmp_path / "0"), calls_of(FeatureDataset, "_read")
    dataset = torch.utils.data.Subset(whole, range(3, 53))
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "train_sampling_strategy": strategy}
    trained(features, tmp_path, features.make_drafter(), train_dataset=dataset, draft_vocabulary_size=4, **settings)
    # A data loader fetches one batch ahead.
    assert 4 <= sum("hidden_states" in read.args[2] for read in reads) <= 6


def test_a_disk_that_is_too_small_is_noticed_at_once(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(OSError, match=r"The features need 0\.0 GB more, and 0\.0 GB are free"):
        write(target, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_stale_cache_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    write(target, tmp_path)
    before, config = contents(tmp_path), make_target("llama", num_layers=3).float()
    config.config.rms_norm_eps = 0.1
    tokenizers = [make_tokenizer() for _ in range(3)]
    tokenizers[0]("used", truncation=True, max_length=4)  # which makes it no other tokenizer
    tokenizers[1].add_tokens(["<new>"])
    tokenizers[2].chat_template += " "
    usual = {"dataset": make_rows(), "target": target, "tokenizer": tokenizers[0], "dtype": torch.float32}
    for part, other in (
        ("target", {"target": make_target("llama", seed=1, num_layers=3).float()}),
        ("target", {"target": config}),
        ("tokenizer", {"tokenizer": tokenizers[1]}),
        ("template", {"tokenizer": tokenizers[2]}),
        ("data", {"dataset": make_rows(seed=1)}),
        ("dtype", {"dtype": torch.bfloat16}),
    ):
        with pytest.raises(ValueError, match=rf"different settings: {part} \(.*, now .*\)\. Extract features into"):
            write_feature_cache(folder=tmp_path, **usual | other)
    assert contents(tmp_path) == before


def test_states_beyond_float16_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    large = make_target("llama", num_layers=3).float()
    large.model.norm.weight.data.fill_(1e6)
    with pytest.raises(ValueError, match=r"too large for torch\.float16\. Keep them as torch\.bfloat16"):
        write(large, tmp_path, dtype=torch.float16)
    # The target itself is to blame where its own precision is too small, whatever the features'.
    large.model.norm.weight.data.fill_(6e4)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(
            ValueError, match=r"own states are not finite \(torch.float16\). It overflows in float16: load"
        ):
            write(large.half(), tmp_path / str(dtype), dtype=dtype)


def test_an_offloaded_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token embedding is offloaded.* a `device_map` that keeps the embedding"):
        write(cpu_offload(make_target("llama", num_layers=3).float()), tmp_path)


def test_rows_of_another_target_or_of_other_layers_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    write(target, tmp_path / "a")
    write(make_target("llama", seed=1, num_layers=3).float(), tmp_path / "b")
    write(target, tmp_path / "c", target_layer_ids=[0, 1])
    write(target, tmp_path / "d", dtype=torch.bfloat16)
    (second := make_tokenizer()).add_tokens("<another>")
    write_feature_cache(make_rows(), target, second, tmp_path / "e", dtype=torch.float32)
    features, first = CachedFeatures(tmp_path / "a"), FeatureDataset(tmp_path / "a")
    messages = {
        "b": r"/b' was created with different settings: model .*Give caches that were made as",
        "c": r"target_layer_ids \(\[0, 1\], now None\)",
        "d": r"dtype \(bfloat16, now float32\)",
        "e": r"/e' was created with different settings: tokenizer",
    }  # fmt: skip
    for folder, message in messages.items():
        rows = torch.utils.data.ConcatDataset([first, FeatureDataset(tmp_path / folder)])
        part = torch.utils.data.Subset(rows, range(5, 9))
        with pytest.raises(ValueError, match=message):
            make_trainer(features, tmp_path, features.make_drafter(), train_dataset=part)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (make_rows().select([]), "The dataset is empty"),
        (make_rows().to_iterable_dataset(), r"must be a `datasets\.Dataset`, got IterableDataset"),
        (Dataset.from_dict({"input_ids": [[1, 10**6]]}), "A row holds the token 1000000"),
    ],
)
def test_what_gives_no_features_is_refused(target: PreTrainedModel, tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(target, tmp_path, rows)


def test_what_is_no_cache_is_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no feature cache: it has no made_from\.json"):
        FeatureDataset(tmp_path)
    write(target, tmp_path)
    row = GumihoDataCollator()([{"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match="The rows hold no `hidden_states`"):
        CachedFeatures(tmp_path).states(row)


def test_a_head_with_an_adapter_is_cached_as_what_it_computes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    target = peft.get_peft_model(
        make_target("llama", num_layers=3).float(),
        peft.LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False),
    )
    write(target, tmp_path)
    features = torch.randn(5, 32)
    head = CachedFeatures(tmp_path).lm_head(features)
    torch.testing.assert_close(head(features), target.get_output_embeddings()(features), rtol=1e-4, atol=1e-4)
