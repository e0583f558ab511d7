"""The comparison of recipes: drafters of one size, lines that are measured once, and gains that are what they say."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
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
            if recipe.copies_layers:
                assert config.model.intermediate_size == target.intermediate_size
        assert max(sizes) / min(sizes) < 1.05
    with pytest.raises(ValueError, match="layers that the feature cache does not hold"):
        recipes.fitted_config(recipes.RECIPES["all"], demo, None)


def test_a_line_is_trained_and_measured_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target().float()
    target.config.vocab_size = 8
    target.save_pretrained(tmp_path / "target")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    rows = Dataset.from_list(
        [{"input_ids": [1 + (i * j) % 7 for j in range(20)], "loss_mask": [1] * 20} for i in range(9)]
    )
    write_feature_cache(rows, target, tokenizer, tmp_path / "features", target_layer_ids=[0, -1])
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    monkeypatch.setattr(script, "encode_turn", lambda *_: [3, 1, 5])  # the target knows few tokens
    monkeypatch.setattr(sys, "argv", [
        "compare_recipes.py", "--target", str(tmp_path / "target"), "--features_dir", str(tmp_path / "features"),
        "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--work_dir",
        str(tmp_path / "work"), "--recipes", "published", "all", "--seeds", "0", "--num_train_epochs", "2",
        "--batch_size", "4", "--num_eval_rows", "2", "--num_prompts", "1", "--max_new_tokens", "12", "--nodes", "6",
    ])  # fmt: skip
    script.main()
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["recipe"] for record in records] == ["published", "all"]
    for record in records:
        assert record["steps"] == 4
        assert len(record["draft_temperature"]) == 7
        for of_way in record["accepted_lengths"].values():
            # The first token comes from the prompt's pass.
            assert all(sum(of_prompt) == 11 for of_shape in of_way.values() for of_prompt in of_shape)
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("a line was trained again"))
    script.main()
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines
    assert "| `all` | 1 |" in capsys.readouterr().out


def test_gains_are_over_the_published_recipe(script: ModuleType) -> None:
    import recipe_table

    def record(recipe: str, seed: int, lengths: list[int]) -> dict:
        of_shapes = {shape: [lengths, lengths] for shape in ("chain", "63")}
        ways = dict.fromkeys(("greedy", "sampled", "calibrated"), of_shapes)
        return {
            "recipe": recipe, "seed": seed, "parameters": 2e6, "accepted_lengths": ways, "drafter_ms": 3.0,
            "tokens": 1000, "seconds": 36.0, "settings": {"num_train_epochs": 2},
        }  # fmt: skip

    records = [record("published", 0, [2, 2]), record("published", 1, [2, 2]), record("x", 0, [3, 3, 3])]
    records.append(record("x", 1, [2, 2, 2, 2, 1]))
    text = recipe_table.table(records, [63])
    row = next(line for line in text.splitlines() if line.startswith("| `x`"))
    assert "2.40 (1.80-3.00)" in row
    assert "+12.5% (-10.0 to +50.0)" in row  # 18 tokens in 8 cycles, and each seed alone
    assert row.endswith("| 3.0 ms | 0.0M | 0.01 |")
