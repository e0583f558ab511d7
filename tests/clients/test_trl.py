"""TRL: online reinforcement learning samples the same completions from a policy with a drafter."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from training_data import DEMO_TARGET
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import transformers_gumiho


PROMPTS = ["def __init__(self, name):\n", "import os\n\n\nclass A:\n", "class B(A):\n", "    for name in names:\n"]


@pytest.mark.parametrize("has_adapter", [False, True], ids=["all weights", "LoRA"])
def test_grpo(
    count: Callable[..., Any],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    has_adapter: bool,
) -> None:
    def train(policy: PreTrainedModel) -> list[str]:
        written: list[str] = []

        def reward(completions: list[str], **_: Any) -> list[float]:
            written.extend(completions)
            return [float(len(set(text))) for text in completions]

        config = GRPOConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=24, learning_rate=1e-4, use_cpu=True, bf16=False, gradient_checkpointing=True,
            report_to=[], save_strategy="no", seed=3,
        )  # fmt: skip
        trainer = GRPOTrainer(
            policy,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules=["q_proj", "v_proj"], r=4) if has_adapter else None,
        )
        trainer.train()
        return written

    def train_drafted() -> list[str]:
        policy = copy.deepcopy(target)
        transformers_gumiho.attach(policy, DEMO_TARGET.parent / "gumiho")
        return train(policy)

    plain, drafted = count(lambda: train(copy.deepcopy(target))), count(train_drafted)
    assert len(plain.result) == 8
    assert drafted.result == plain.result
    assert drafted.num_passes < plain.num_passes
