"""The comparison of recipes: drafters of one size, lines that are measured once, and gains that are what they say."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from datasets import Dataset
from targets import make_target
from training_data import make_tokenizer
from transformers import AutoConfig, LlamaConfig

from transformers_gumiho.training import write_feature_cache


ROOT = Path(__file__).parents[2]


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare_recipes

    return compare_recipes


def test_all_drafters_are_of_one_size(script: ModuleType) -> None:
    import recipes

    demo = AutoConfig.from_pretrained(ROOT / "examples" / "demo_pair" / "target")
    smollm2 = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30,
        vocab_size=1000,
    )  # fmt: skip
    for target in (demo, smollm2):
        sizes = []
        for name, recipe in recipes.RECIPES.items():
            config, size = recipes.fitted_config(recipe, target, [1, 9, target.num_hidden_layers - 1])
            assert recipes.num_trained(config) == size, name
            sizes.append(size)
        assert max(sizes) / min(sizes) < 1.05
    with pytest.raises(ValueError, match="layers that the feature cache does not hold"):
        recipes.fitted_config(recipes.RECIPES["layers"], demo, None)
    for name in ("all", "all_on_serial", "all_on_parallel"):
        config, _ = recipes.fitted_config(recipes.RECIPES[name], demo, None)
        assert config.target_layer_ids is None


def test_a_line_is_trained_and_measured_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import recipes

    # Of the usual rank, transitions would be larger than the whole drafter of this target.
    monkeypatch.setitem(recipes.RECIPES["all"].config, "transition_rank", 4)
    target = make_target().float()
    target.config.vocab_size = 8
    target.save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    rows = Dataset.from_list(
        [{"input_ids": [1 + (i * j) % 7 for j in range(20)], "loss_mask": [1] * 20} for i in range(9)]
    )
    write_feature_cache(rows, target, tokenizer, tmp_path / "features", target_layer_ids=[0, -1])
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"text": "a"}) + "\n") * 2)
    encoded = iter([[3, 1, 5], [2]] * 99)  # the target knows few tokens
    monkeypatch.setattr(script, "encode_turn", lambda *_: next(encoded))
    monkeypatch.setattr(sys, "argv", [
        "compare_recipes.py", "--target", str(tmp_path / "target"), "--features_dir", str(tmp_path / "features"),
        "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--work_dir",
        str(tmp_path / "work"), "--recipes", "published", "all", "--seeds", "0", "--num_train_epochs", "2",
        "--batch_size", "4", "--num_eval_rows", "2", "--num_prompts", "2", "--max_new_tokens", "12", "--nodes", "6",
    ])  # fmt: skip
    script.main()
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["recipe"] for record in records] == ["published", "all"]
    for record in records:
        assert record["steps"] == 4
        assert len(record["agreements"]) == 7
        for of_way in record["accepted_lengths"].values():
            assert all(len(of_shape) == 2 for of_shape in of_way.values())
            # The first token comes from the prompt's pass.
            assert all(sum(of_prompt) == 11 for of_shape in of_way.values() for of_prompt in of_shape)
    with monkeypatch.context() as patch:
        patch.setattr(script, "train", lambda *_: pytest.fail("a line was trained again"))
        script.main()
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines
    assert "| `all` | 1 |" in capsys.readouterr().out
    # Under other settings the checkpoints of before are not gone on from.
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--learning_rate", "0.1", "--recipes", "published"])
    script.main()
    record = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[2])
    assert record["recipe"] == "published"
    assert record["accepted_lengths"] != records[0]["accepted_lengths"]
    assert len(list((tmp_path / "work").glob("published-0-*"))) == 2


def test_only_recipes_that_do_not_fit_are_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("the rows are of another cache")

    target, args = make_target(), script.ComparisonArguments(features_dir=tmp_path, output=tmp_path / "out.jsonl")
    monkeypatch.setattr(script, "CachedFeatures", lambda _: SimpleNamespace(layer_ids=None))
    script.add_row(args, "layers", 0, target)
    assert "layers is left out: it reads layers" in capsys.readouterr().err
    monkeypatch.setattr(script, "train", refuse)
    monkeypatch.setattr(script, "fitted_config", lambda *_: (None, 0))
    with pytest.raises(ValueError, match="rows are of another cache"):
        script.add_row(args, "published", 0, target)


def test_any_part_of_the_rows_holds_greedy_and_sampled_texts(script: ModuleType, tmp_path: Path) -> None:
    import demo_features

    target = make_target()
    args = demo_features.DemoFeaturesArguments(tmp_path, length=24)
    prompts = torch.tensor([[1, 2, 3]]).expand(6, -1)
    plain = target.generate(prompts[:1], max_length=24, min_length=24, do_sample=False)[0]
    for first_row in (0, 3):
        torch.manual_seed(0)
        texts = demo_features.continue_prompts(args, target, prompts, first_row)
        is_greedy = [torch.equal(text, plain) for text in texts]
        assert is_greedy == [(first_row + row) % 2 == 0 for row in range(6)]
    assert demo_features.DemoFeaturesArguments(tmp_path, length=25).texts_file != args.texts_file


def test_gains_are_over_the_published_recipe(script: ModuleType) -> None:
    import recipe_table

    def record(recipe: str, seed: int, lengths: list[int]) -> dict:
        of_shapes = {shape: [lengths, lengths] for shape in ("chain", "63")}
        ways = {"greedy": of_shapes, "sampled": of_shapes}
        return {"recipe": recipe, "seed": seed, "parameters": 2e6, "accepted_lengths": ways}

    records = [record("published", 0, [2, 2]), record("published", 1, [2, 2]), record("x", 0, [3, 3, 3])]
    records.append(record("x", 1, [2, 2, 2, 2, 1]))
    (row,) = (line for line in recipe_table.table(records, [63]).splitlines() if line.startswith("| `x`"))
    assert row.count("2.40 (1.80-3.00)") == 4
    assert "+12.5% (-10.0 to +50.0)" in row  # 18 tokens in 8 cycles, and each seed alone
    assert row.endswith("| 2.00M |")
