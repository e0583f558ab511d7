"""The shipped pair does what its README and the quickstart say."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from transformers_gumiho import GumihoModel


FOLDER = Path(__file__).parents[2] / "examples" / "demo_pair"


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter() -> GumihoModel:
    return GumihoModel.from_pretrained(FOLDER / "gumiho", dtype=torch.float32)


@pytest.fixture(scope="module")
def draft_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "draft_model", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"] for line in lines]


def test_pair_is_small_and_deep_enough(target: PreTrainedModel, drafter: GumihoModel) -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) < 40e6
    assert target.config.num_hidden_layers >= 12
    assert 8e6 < target.num_parameters() < 20e6
    for folder in ("target", "gumiho", "draft_model"):
        config = json.loads((FOLDER / folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16"


def test_trained_drafter_decodes_exactly_and_far(
    target: PreTrainedModel, drafter: GumihoModel, prompts: list[torch.Tensor]
) -> None:
    lengths = []
    for prompt in prompts[:16]:
        plain = target.generate(prompt, max_new_tokens=64, do_sample=False)
        output = target.generate(
            prompt, max_new_tokens=64, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        lengths += output.accepted_lengths[0]
    # The whole of the prompts reaches more (see the pair's README); a part of them varies.
    assert sum(lengths) / len(lengths) > 3.0
    assert max(lengths) == drafter.config.max_draft_depth + 1


def test_trained_drafter_samples_the_same_text(
    target: PreTrainedModel, drafter: GumihoModel, prompts: list[torch.Tensor]
) -> None:
    for seed, prompt in enumerate(prompts[:8]):
        outputs = []
        for assistant in ({}, {"assistant_model": drafter}):
            torch.manual_seed(seed)
            outputs.append(
                target.generate(
                    prompt, max_new_tokens=64, do_sample=True, temperature=0.8, top_p=0.9, repetition_penalty=1.1,
                    **assistant,
                )
            )  # fmt: skip
        assert torch.equal(*outputs)


def test_stop_strings_end_in_the_middle_of_an_accepted_path(
    target: PreTrainedModel, drafter: GumihoModel, prompts: list[torch.Tensor]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    stopped_early = 0
    for prompt in prompts[:8]:
        settings = {"stop_strings": ["self.", "):\n", "= "], "tokenizer": tokenizer, "do_sample": False}
        plain = target.generate(prompt, max_new_tokens=64, **settings)
        assert torch.equal(target.generate(prompt, max_new_tokens=64, assistant_model=drafter, **settings), plain)
        stopped_early += plain.shape[1] < prompt.shape[1] + 64
    assert stopped_early >= 4


def test_draft_model_is_one_for_assisted_generation(
    target: PreTrainedModel, draft_model: PreTrainedModel, prompts: list[torch.Tensor]
) -> None:
    vocabularies = [(FOLDER / folder / "tokenizer.json").read_bytes() for folder in ("target", "draft_model")]
    assert vocabularies[0] == vocabularies[1]
    assert draft_model.config.vocab_size == target.config.vocab_size
    assert draft_model.num_parameters() < target.num_parameters() / 5
    passes: list[object] = []
    hook = target.register_forward_hook(lambda *_: passes.append(None))
    num_tokens, num_passes = 0, 0
    for prompt in prompts[:8]:
        plain = target.generate(prompt, max_new_tokens=48, do_sample=False)
        passes.clear()
        assert torch.equal(
            target.generate(prompt, max_new_tokens=48, do_sample=False, assistant_model=draft_model), plain
        )
        num_tokens += plain.shape[1] - prompt.shape[1]
        num_passes += len(passes)
    hook.remove()
    # All of the prompts reach more (see the pair's README); a part of them varies.
    assert num_tokens / num_passes > 2.0


def test_every_prompt_has_a_category_of_several() -> None:
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = Counter(row["category"] for row in rows)
    assert len(rows) == 64
    assert len(counts) == 4
    assert min(counts.values()) >= 8
