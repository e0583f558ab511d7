"""When the drafter pauses: a count of lost tokens, without a clock; and the number that the count rests on."""

from pathlib import Path

import pytest
import tiny_configs
import torch
import trained_pair
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig, PreTrainedModel

from transformers_gumiho import DraftingSettings, GumihoConfig, GumihoModel
from transformers_gumiho.generation.drafting import candidate_generator
from transformers_gumiho.generation.drafting.candidate_generator import DraftingPause, estimate_break_even
from transformers_gumiho.model.decoding_settings import override_settings, value_for_rows


ROOT = Path(__file__).parents[2]


def read(
    values: dict, num_rows: int = 1, device_type: str = "cpu", temperature: float | None = None
) -> DraftingSettings:
    return DraftingSettings.from_generation_config(
        GenerationConfig(**values), GumihoConfig(), temperature, num_rows, device_type
    )


@given(st.lists(st.tuples(st.floats(1, 8), st.floats(0, 4)), max_size=60), st.floats(1, 4))
def test_pauses_follow_the_rule(cycles: list[tuple[float, float]], break_even: float) -> None:
    """2 lost tokens pause for 8 cycles, and later for 64; 4 gained tokens are kept at most."""
    pause, lost, length = DraftingPause(break_even), 0.0, 8
    for tokens, right in cycles:
        pause.observe(tokens, right)
        lost = max(lost + break_even + right - tokens, -4.0)
        expected = 0
        if lost <= 0:
            length = 8
        if lost > 2:
            lost, expected, length = 2.0, length, 64
        assert [pause.take_cycle() for _ in range(expected + 1)] == [True] * expected + [False]


@pytest.mark.parametrize(("rows", "expected"), [(1, 12), (3, 12), (4, 4), (7, 4), (8, 2), (100, 2)])
def test_the_largest_key_not_above_the_rows_counts(rows: int, expected: int) -> None:
    for mapping in ({"1": 12, "4": 4, "8": 2}, {8: 2, 1: 12, 4: 4}):
        assert value_for_rows(mapping, rows) == expected
        assert read({"num_assistant_tokens": mapping}, rows).num_assistant_tokens == expected
    assert value_for_rows({"4": 9, "8": 2}, 1) == 9  # the smallest key where all are above


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_assistant_tokens": {}}, "`num_assistant_tokens` is {}, but a mapping .* must not be empty"),
        ({"num_assistant_tokens": {"one": 3}}, "'one' is not a number of rows"),
        ({"num_assistant_tokens": {"0": 3}}, "'0' is not a number of rows"),
        ({"num_assistant_tokens": {"1": 0}}, "must be an integer of at least 1, got 0"),
        ({"break_even": {"1": -1.0}}, "`break_even` must be a positive number or None, got -1.0"),
        ({"break_even": "2"}, "`break_even` must be a positive number or None, got '2'"),
    ],
)
def test_wrong_mappings_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(values)


def test_defaults_depend_on_the_device_and_the_rows() -> None:
    on_cpu = [read({}, rows) for rows in (1, 4, 8)]
    assert [(s.num_assistant_tokens, s.branching_factor) for s in on_cpu] == [(12, 4), (4, 4), (2, 4)]
    on_gpu = read({}, 8, "cuda")
    assert (on_gpu.num_assistant_tokens, on_gpu.branching_factor) == (63, 14)
    # A number that was set counts everywhere.
    assert read({"num_assistant_tokens": 63, "branching_factor": 14}).num_assistant_tokens == 63


def test_break_even_may_differ_between_greedy_and_sampled() -> None:
    both = {"break_even": {"greedy": {"1": 1.8, "4": 2.5}, "sampled": 1.4}}
    assert (read(both, 4).break_even, read(both, 4, temperature=1.0).break_even) == (2.5, 1.4)
    assert read({"break_even": {"greedy": 1.8}}, temperature=1.0).break_even is None


def test_unset_settings_are_saved_as_none(tmp_path: Path) -> None:
    target = small_target()
    GumihoModel.from_target(target).save_pretrained(tmp_path)
    loaded = GumihoModel.from_pretrained(tmp_path).generation_config
    assert loaded.num_assistant_tokens is loaded.branching_factor is loaded.break_even is loaded.tree_depth is None
    loaded.num_assistant_tokens = {1: 12, 4: 4}
    loaded.save_pretrained(tmp_path)
    assert GumihoModel.from_pretrained(tmp_path).generation_config.num_assistant_tokens == {"1": 12, "4": 4}


def test_other_settings_remove_a_break_even_that_was_measured() -> None:
    config = GenerationConfig(num_assistant_tokens={"1": 12, "4": 4}, break_even=1.9)
    override_settings(config, num_assistant_tokens=None, branching_factor=None)
    assert (config.num_assistant_tokens, config.break_even) == ({"1": 12, "4": 4}, 1.9)
    override_settings(config, num_assistant_tokens=12, branching_factor=None)
    assert (config.num_assistant_tokens, config.break_even) == (12, None)


def small_target() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


def test_embeddings_cost_no_time() -> None:
    """Gemma 3n holds most of its parameters in a second embedding; GPT-2 has an embedding of positions."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = GPT2Config(**sizes, n_positions=8)
    estimates = []
    for config.n_positions in (8, 4096):
        target = AutoModelForCausalLM.from_config(config)
        drafter = GumihoModel.from_target(target, intermediate_size=24)
        settings = read({"num_assistant_tokens": 7})
        estimates.append(estimate_break_even(target, drafter, settings, 1))
    assert estimates[0] == estimates[1]


def test_a_decoder_that_is_not_where_its_class_says_counts_fully() -> None:
    config = tiny_configs.small_config("modernbert-decoder")
    target = AutoModelForCausalLM.from_config(config)
    drafter = GumihoModel.from_target(target, intermediate_size=24)
    # Its output projection alone would make a drafter more than ten times as large as the target.
    assert estimate(target, drafter) < 5


def estimate(target: PreTrainedModel, drafter: GumihoModel, num_rows: int = 1) -> float:
    """Returns the break-even of a pair with the drafter's own settings."""
    own = drafter.generation_config
    settings = DraftingSettings.from_generation_config(own, drafter.config, None, num_rows)
    return estimate_break_even(target, drafter, settings, num_rows)


def test_the_estimate_of_the_demo_pair() -> None:
    target = trained_pair.load_language_model()
    assert estimate(target, trained_pair.load_drafter()) == pytest.approx(1.716, abs=1e-3)
    assert estimate(target, GumihoModel.from_target(target), num_rows=4) == pytest.approx(1.825, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "target", "device_type", "expected"),
    [
        (
            "examples/smollm2/gumiho",
            {
                "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
            },
            "cpu",
            1.289,
        ),
        (
            "hub_configs/Gumiho-llama3-8b",
            {
                "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8,
            },
            "cuda",
            1.418,
        ),
    ],
)  # fmt: skip
def test_the_estimate_by_parameters_alone(
    name: str, target: dict, device_type: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_generator, "input_device", lambda target: target.device)
    config = GumihoConfig.from_pretrained(ROOT / name)
    with torch.device("meta"):
        drafter, model = GumihoModel(config), AutoModelForCausalLM.from_config(LlamaConfig(**target))
    generation_config = GenerationConfig.from_pretrained(ROOT / name)
    settings = DraftingSettings.from_generation_config(generation_config, config, None, 1, device_type)
    # Tensors without memory are on no CPU, so that nodes add nothing.
    assert estimate_break_even(model, drafter, settings, 1) == pytest.approx(expected, abs=1e-3)
