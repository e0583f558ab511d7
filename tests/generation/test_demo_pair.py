"""The shipped pair does what its README and the quickstart say."""

import json
from collections import Counter

import pytest
import torch
from targets import Pair, equals_plain, passes_of
from trained_pair import FOLDER, load_drafter, load_language_model, load_tokenizer


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_language_model(), load_drafter()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    tokenizer = load_tokenizer()
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["text"], return_tensors="pt")["input_ids"] for line in lines]


@pytest.fixture(scope="module")
def plain_texts(pair: Pair, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the first eight prompts, 64 tokens each."""
    return [pair[0].generate(prompt, max_new_tokens=64, do_sample=False) for prompt in prompts[:8]]


def test_pair_is_small_and_deep_enough(pair: Pair) -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) < 40e6
    assert pair[0].config.num_hidden_layers >= 12
    assert 8e6 < pair[0].num_parameters() < 20e6
    for folder in ("target", "gumiho", "draft_model"):
        config = json.loads((FOLDER / folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16"


def test_trained_drafter_decodes_exactly_and_far(
    pair: Pair, prompts: list[torch.Tensor], plain_texts: list[torch.Tensor]
) -> None:
    (target, drafter), lengths = pair, []
    for prompt, plain in zip(prompts, plain_texts, strict=False):
        output = target.generate(
            prompt, max_new_tokens=64, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        lengths += output.accepted_lengths[0]
    # The whole of the prompts reaches more (see the pair's README); a part of them varies.
    assert sum(lengths) / len(lengths) > 3.0
    assert max(lengths) == drafter.config.max_draft_depth + 1


def test_trained_drafter_samples_the_same_text(pair: Pair, prompts: list[torch.Tensor]) -> None:
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    for seed, prompt in enumerate(prompts[:4]):
        equals_plain(*pair, seed, input_ids=prompt, max_new_tokens=48, **sampling)


def test_stop_strings_end_in_the_middle_of_an_accepted_path(pair: Pair, prompts: list[torch.Tensor]) -> None:
    settings = {"stop_strings": ["self.", "):\n", "= "], "tokenizer": load_tokenizer(), "max_new_tokens": 64}
    stopped_early = 0
    for prompt in prompts[:8]:
        output = equals_plain(*pair, input_ids=prompt, **settings)
        stopped_early += output.sequences.shape[1] < prompt.shape[1] + 64
    assert stopped_early >= 4


def test_draft_model_is_one_for_assisted_generation(
    pair: Pair, prompts: list[torch.Tensor], plain_texts: list[torch.Tensor]
) -> None:
    target, draft_model = pair[0], load_language_model("draft_model")
    vocabularies = [(FOLDER / folder / "tokenizer.json").read_bytes() for folder in ("target", "draft_model")]
    assert vocabularies[0] == vocabularies[1]
    assert draft_model.config.vocab_size == target.config.vocab_size
    assert draft_model.num_parameters() < target.num_parameters() / 5
    settings = {"max_new_tokens": 64, "do_sample": False, "assistant_model": draft_model}
    num_tokens, num_passes = 0, 0
    for prompt, plain in zip(prompts[:4], plain_texts, strict=False):
        num_of_text, text = passes_of(target, lambda prompt=prompt: target.generate(prompt, **settings))
        assert torch.equal(text, plain)
        num_tokens += plain.shape[1] - prompt.shape[1]
        num_passes += num_of_text
    # All of the prompts reach more (see the pair's README); a part of them varies.
    assert num_tokens / num_passes > 2.0


def test_every_prompt_has_a_category_of_several() -> None:
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = Counter(row["category"] for row in rows)
    assert len(rows) == 64
    assert len(counts) == 4
    assert min(counts.values()) >= 8
