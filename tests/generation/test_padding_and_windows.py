"""A row of a batch equals its single run, also where its left padding is longer than the target's sliding window."""

from typing import Any

import pytest
import torch
from targets import make_drafter, make_prompts
from tiny_configs import small_config
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(
    ("model_type", "window", "lengths"),
    [
        ("mistral", 11, [117, 1]),
        ("mixtral", 11, [2, 1, 24, 1]),
        ("starcoder2", 2, [1, 98, 114]),
        ("mistral", 1, [7, 2]),
    ],
)
def test_rows_equal_their_single_runs(model_type: str, window: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    config = small_config(model_type, num_hidden_layers=3, sliding_window=window)
    # The eager experts are the ones that know float64.
    target = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    target.generation_config.update(eos_token_id=None, pad_token_id=0)
    drafter = make_drafter(target, num_assistant_tokens=23)
    prompts = make_prompts(lengths)
    kwargs: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    batch = target.generate(**prompts, **kwargs, assistant_model=drafter)[:, max(lengths) :]
    for row, length in enumerate(lengths):
        single = prompts["input_ids"][row : row + 1, -length:]
        drafted = target.generate(single, **kwargs, assistant_model=drafter)[:, length:]
        # Plain decoding without a cache is what the model defines; with one, a window of a single token differs.
        plain = target.generate(single, **kwargs, use_cache=False)[:, length:]
        assert batch[row].tolist() == drafted[0].tolist() == plain[0].tolist()
