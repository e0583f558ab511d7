"""Parallel heads on top of EAGLE heads: the head stays as it is to the bit, and a pass of the target commits more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import gumiho, refuse
from datasets import Dataset
from eagle import make_eagle_target, publish
from safetensors.torch import load_file
from targets import equals_plain
from torch.nn.functional import cross_entropy
from trainers import make_args
from training_data import DEMO_TARGET, make_tokenizer, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.verification.target_states import FeatureReader
from transformers_gumiho.training import (
    CachedFeatures,
    FeatureDataset,
    GumihoTrainer,
    measure_acceptance,
    write_feature_cache,
)
from transformers_gumiho.training.recipe.arguments import RecipeArguments
from transformers_gumiho.training.recipe.options import recipe_of
from transformers_gumiho.training.unrolling import unroll_serial_head


KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {},
    "eagle3": {"serial_head": "eagle3", "draft_vocab_size": 24},
    "eagle3 of the last layer": {
        "serial_head": "eagle3", "target_layer_ids": [2, 7], "fc_norm": True, "norm_output": True,
    },
}  # fmt: skip
HEADS = recipe_of(RecipeArguments())["phases"]["heads"] | {"warmup_steps": 0, "learning_rate": 5e-3}


def make_head(target: PreTrainedModel, texts: torch.Tensor, num_steps: int = 80, **fields: Any) -> GumihoModel:
    """Returns a head that has learned to draft three tokens of the target's own texts `(B, T)`."""
    torch.manual_seed(0)
    drafter = GumihoModel.from_target(
        target, num_hidden_layers=1, num_parallel_heads=0, num_serial_tokens=3, **fields
    ).float()  # fmt: skip
    drafter.embed_tokens.requires_grad_(False)
    score = drafter.lm_head if drafter.config.is_eagle3 else target.lm_head
    ids = torch.arange(target.config.vocab_size)
    if drafter.own_tokens() is not None:
        ids = texts.flatten().bincount(minlength=len(ids)).topk(len(drafter.d2t)).indices.sort().values
        drafter.d2t.copy_(ids - torch.arange(len(ids)))
    row_of = torch.full((target.config.vocab_size,), -100).scatter_(0, ids, torch.arange(len(ids)))
    layers = drafter.config.layers_read(target.config)
    states = FeatureReader(target, layers).read(texts).target_states.detach()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(num_steps):
        output = drafter(texts[:, 1:], states[:, :-1], unroll=unroll_serial_head)
        loss = torch.zeros(())
        for step, found in enumerate((output.serial_features, *output.unrolled_features)):
            logits = score(found)[:, : texts.shape[1] - 2 - step]
            loss = loss + cross_entropy(logits.flatten(0, 1), row_of[texts[:, 2 + step :]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_eagle_target().float().requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target: PreTrainedModel) -> torch.Tensor:
    prompts = torch.randint(1, target.config.vocab_size, (40, 4), generator=torch.Generator().manual_seed(5))
    return target.generate(prompts, max_new_tokens=28, do_sample=False)


@pytest.mark.parametrize(
    ("kind", "is_cached"), [("eagle1", True), ("eagle3", False), ("eagle3 of the last layer", True)]
)
def test_heads_are_added_to_a_head_that_stays_as_it_is(
    kind: str, is_cached: bool, target: PreTrainedModel, texts: torch.Tensor, tmp_path: Path
) -> None:
    head = publish(tmp_path / "head", make_head(target, texts, **KINDS[kind]), torch.bfloat16)
    parts = {"num_serial_tokens": 2, "num_parallel_heads": 3, "transition_rank": 4}
    drafter = GumihoModel.from_pretrained(head, dtype=torch.float32, **parts)
    # A text of three tokens is too short for the heads.
    rows = Dataset.from_list([{"input_ids": ids} for ids in [*texts.tolist(), texts[0, :3].tolist()]])
    source: Any = target
    if is_cached:
        layers = drafter.config.layers_read(target.config)
        cache, tokenizer = tmp_path / "cache", make_tokenizer()
        write_feature_cache(rows, target, tokenizer, cache, dtype=torch.float32, target_layer_ids=layers)
        source, rows = CachedFeatures(cache), FeatureDataset(cache)
    args = make_args(tmp_path, **HEADS | {"max_steps": 60, "logging_steps": 60})
    trainer = GumihoTrainer(drafter, args, target=source, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()
    trainer.train()
    trainer.calibrate()
    after = trainer.evaluate()
    for depth in range(1, 6):
        assert after[f"eval_agreement_{depth}"] >= before[f"eval_agreement_{depth}"]
    assert after["eval_agreement_3"] > before["eval_agreement_3"] + 0.2
    assert drafter.generation_config.draft_temperature is not None
    drafter.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    saved, own = load_file(tmp_path / "saved" / "model.safetensors"), torch.load(head / "pytorch_model.bin")
    assert all(torch.equal(saved[name], tensor) for name, tensor in own.items())
    assert {name.split(".")[0] for name in saved.keys() - own.keys()} == {"mlp", "transition"}
    loaded = GumihoModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert (loaded.config.max_draft_depth, loaded.config.converted_from) == (5, str(head))
    cut = GumihoModel.from_pretrained(head, dtype=torch.float32, num_serial_tokens=2)
    taus = []
    for assistant in (cut, loaded):
        found = measure_acceptance(target, assistant, [ids[:6] for ids in texts[:16]], max_new_tokens=20)
        taus.append(sum(map(sum, found)) / sum(map(len, found)))
    assert taus[1] > taus[0] + 0.05, taus
    for call in ({}, {"do_sample": True}, {"cache_implementation": "static"}):
        equals_plain(target, loaded, input_ids=texts[:2, :5], max_new_tokens=12, **call)


@pytest.mark.parametrize(
    ("kind", "part"), [("eagle1", "serial"), ("eagle3", None), ("eagle3 of the last layer", "serial")]
)
def test_the_serial_layers_of_a_head_are_trained(
    kind: str, part: str | None, target: PreTrainedModel, texts: torch.Tensor, tmp_path: Path
) -> None:
    head = publish(tmp_path / "head", make_head(target, texts, num_steps=5, **KINDS[kind]), torch.float32)
    drafter = GumihoModel.from_pretrained(head, num_serial_tokens=3)
    rows = [{"input_ids": ids} for ids in texts.tolist()]
    args = make_args(tmp_path, train_only=part, unroll_serial_head=True, max_steps=40, logging_steps=40)
    trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows, eval_dataset=rows)
    before, own = trainer.evaluate(), {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_expected_acceptance_length"] > before["eval_expected_acceptance_length"] + 0.02
    same = {name for name, tensor in drafter.state_dict().items() if torch.equal(tensor, own[name])}
    assert same == {"embed_tokens.weight", "lm_head.weight", "d2t"} & own.keys()
    equals_plain(target, drafter, input_ids=texts[:2, :5], max_new_tokens=12)


def test_what_a_head_cannot_learn_is_refused(target: PreTrainedModel, texts: torch.Tensor, tmp_path: Path) -> None:
    drafter = GumihoModel.from_target(target, num_parallel_heads=2, **KINDS["eagle3"])
    rows = [{"input_ids": ids} for ids in texts.tolist()]
    for settings, message in (
        (
            {"draft_vocabulary_size": 8},
            "`draft_vocabulary_size` is 8, but an EAGLE-3 head scores the tokens of its own",
        ),
        ({"linear_start": True}, r"that of EAGLE-3 predicts none\. Leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            GumihoTrainer(drafter, make_args(tmp_path, **settings), target=target, train_dataset=rows)


@pytest.mark.usefixtures("short_contests")
@pytest.mark.parametrize(("kind", "dtype"), [("eagle1", torch.float32), ("eagle3", torch.float16)])
def test_one_command_adds_them(kind: str, dtype: torch.dtype, small: Path, tmp_path: Path) -> None:
    # EAGLE-3 reads its default layers, which a target of two does not have.
    name = small if kind == "eagle1" else DEMO_TARGET
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    # Prompts and answers are longer than the head's positions.
    fields = {"num_hidden_layers": 1, "num_parallel_heads": 0, "max_position_embeddings": 18, **KINDS[kind]}
    head = publish(tmp_path / "head", GumihoModel.from_target(target, **fields).float(), dtype)
    data = write_jsonl(tmp_path / "q.jsonl", [{"prompt": f"def f{index}(self, x):\n    "} for index in range(20)])
    common = [
        "train", "--drafter", head, "--train_only", "parallel", "--num_parallel_heads", 3, "--use_cpu", "--max_steps",
        2, "--save_steps", 2, "--per_device_train_batch_size", 2, "--num_eval_rows", 2, "--num_measured_prompts", 2,
        "--measured_new_tokens", 3,
    ]  # fmt: skip
    made = ["--target", name, "--data", data, "--max_new_tokens", 12]
    gumiho(*common, *made, "--output_dir", tmp_path / "all", "--cache_features", "true")
    assert "| gumiho |" in (tmp_path / "all" / "README.md").read_text()
    assert (tmp_path / "all" / "work" / "tune" / "made_from.json").exists()
    answers = ["--target", name, "--data", tmp_path / "all/work/answers.jsonl", "--regenerate", "false"]
    gumiho(*common, *answers, "--output_dir", tmp_path / "online", "--cache_features", "false", "--stages", "train")
    cache = tmp_path / "all" / "work" / "features"
    assert max(FeatureDataset(cache).lengths) == 18
    gumiho(*common, "--features", cache, "--output_dir", tmp_path / "cached", "--stages", "train")
    own = torch.load(head / "pytorch_model.bin")
    for folder in (tmp_path / name for name in ("all", "online", "cached")):
        saved = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} == {dtype}
        assert all(torch.equal(saved[name], tensor) for name, tensor in own.items())
        drafter = GumihoModel.from_pretrained(folder, dtype=torch.float32)
        shape = drafter.config.num_serial_tokens, drafter.config.num_parallel_heads, drafter.config.transition_rank
        assert shape == (2, 3, 64)
        ids = AutoTokenizer.from_pretrained(folder)("def __init__(self", return_tensors="pt")["input_ids"]
        equals_plain(target, drafter, input_ids=ids, max_new_tokens=12)
    wrong = [*common, *made, "--output_dir", tmp_path / "wrong"]
    refuse("--num_parallel_heads must be at least 1", *wrong, "--num_parallel_heads", 0)
