"""A row of a batch equals its single run, also where its left padding is longer than the target's sliding window."""

from typing import Any

import pytest
import torch
from targets import make_drafter, make_prompts
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
)


TINY = {
    "vocab_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.6,
}  # fmt: skip


def make_target(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    # The eager experts are the ones that know float64.
    experts = {"experts_implementation": "eager"} if hasattr(config, "num_local_experts") else {}
    return AutoModelForCausalLM.from_config(config, **experts).double().eval()


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (MistralConfig(**TINY, sliding_window=11), [117, 1]),
        (MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, sliding_window=11), [2, 1, 24, 1]),
        (Starcoder2Config(**TINY, sliding_window=2), [1, 98, 114]),
        (MistralConfig(**TINY, sliding_window=1), [7, 2]),
    ],
    ids=lambda value: f"{value.model_type}-{value.sliding_window}" if hasattr(value, "model_type") else None,
)
def test_rows_equal_their_single_runs(config: PreTrainedConfig, lengths: list[int]) -> None:
    target = make_target(config)
    drafter = make_drafter(target, num_assistant_tokens=23)
    prompts = make_prompts(lengths)
    kwargs: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    batch = target.generate(**prompts, **kwargs, assistant_model=drafter)[:, max(lengths) :]
    for row, length in enumerate(lengths):
        single = prompts["input_ids"][row : row + 1, -length:]
        drafted = target.generate(single, **kwargs, assistant_model=drafter)[:, length:]
        # Plain decoding without a cache is what the model defines; with one, a window of a single token differs.
        plain = target.generate(single, **kwargs, use_cache=False)[:, length:]
        assert batch[row].tolist() == drafted[0].tolist() == plain[0].tolist()
