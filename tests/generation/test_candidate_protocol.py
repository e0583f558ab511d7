"""transformers' own loop of assisted decoding, undispatched, decodes with a Gumiho drafter as one with chains."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import parse
from targets import make_drafter, make_prompts, make_target, passes_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation import CandidateGenerator

from transformers_gumiho import GumihoCandidateGenerator, GumihoModel


def generate_with_transformers(target: PreTrainedModel, drafter: GumihoModel, **kwargs: Any) -> Any:
    """Lets the loop that prompt lookup takes, which no dispatch touches, ask a Gumiho drafter for its candidates."""

    def make_generator(self: PreTrainedModel, generation_config: Any, **_: Any) -> CandidateGenerator:
        return GumihoCandidateGenerator.for_assisted_decoding(target, drafter, generation_config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "_get_candidate_generator", make_generator)
        return target.generate(**kwargs, prompt_lookup_num_tokens=3)


def check(target: PreTrainedModel, drafter: GumihoModel, **kwargs: Any) -> int:
    """Checks that three loops write one text, two of them in as many passes of the target; returns this number."""
    kwargs = {**make_prompts([5]), "max_new_tokens": 40, "do_sample": False} | kwargs
    plain = target.generate(**copy.deepcopy(kwargs))
    num_passes, text = passes_of(target, lambda: generate_with_transformers(target, drafter, **copy.deepcopy(kwargs)))
    assert text.tolist() == plain.tolist()
    ours, text = passes_of(target, lambda: target.generate(**copy.deepcopy(kwargs), assistant_model=drafter))
    assert text.tolist() == plain.tolist()
    assert num_passes == ours
    return num_passes


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "opt"])
def test_greedy_text_and_passes(family: str) -> None:
    target = make_target(family)
    drafter = make_drafter(target, branching_factor=1)
    for seed in range(2):
        check(target, drafter, **make_prompts([3 + seed], seed))


def test_several_layers_are_read() -> None:
    target = make_target()
    check(target, make_drafter(target, branching_factor=1, target_layer_ids=[0, 2]))


@pytest.mark.parametrize("text", ["def open(path, mode='r'):\n", "def __init__(self, "])
def test_long_chains_of_a_trained_drafter(text: str) -> None:
    pair = Path(__file__).parents[2] / "examples" / "demo_pair"
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(pair / "gumiho", dtype=torch.float32)
    drafter.generation_config.branching_factor = 1
    prompt = AutoTokenizer.from_pretrained(pair / "target")(text, return_tensors="pt")
    assert check(target, drafter, **prompt, max_new_tokens=64) < 40


@pytest.mark.parametrize(
    "settings",
    [
        {"num_assistant_tokens": 1}, {"num_assistant_tokens": 3}, {"tree_depth": 2},
        {"draft_vocabulary": [6, 1, 5, 2]}, {"full_tree_attention": False},
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_the_drafter(settings: dict[str, Any]) -> None:
    target = make_target()
    check(target, make_drafter(target, branching_factor=1, **settings))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 12, "eos_token_id": [1, 3]},
        *[{"eos_token_id": token} for token in (1, 3, 5)],
        *[{"max_new_tokens": number} for number in (1, 2, 8)],
        {"input_ids": torch.tensor([[0, 0, 0, 4, 6]]), "attention_mask": torch.tensor([[0, 0, 0, 1, 1]])},
        {"position_ids": torch.tensor([[0, 1, 5, 9, 10]])},
    ],
    ids=str,
)
def test_settings_of_the_target(kwargs: dict[str, Any]) -> None:
    target = make_target()
    check(target, make_drafter(target, branching_factor=1), **kwargs)


def test_text_that_ends_at_the_last_learned_position() -> None:
    target = make_target("gpt2")
    check(target, make_drafter(target, branching_factor=1), **make_prompts([20]), max_new_tokens=96 - 20)


@pytest.mark.skipif(
    parse(transformers.__version__) < parse("5.23"),
    reason="the loop of earlier releases (seen in 5.17) drops embeddings, with any assistant",
)
def test_embeddings_as_the_prompt() -> None:
    target = make_target()
    embeds = target.get_input_embeddings()(make_prompts([5])["input_ids"]).detach()
    kwargs = {"inputs_embeds": embeds, "max_new_tokens": 30, "do_sample": False}
    plain = target.generate(**kwargs)
    text = generate_with_transformers(target, make_drafter(target), **kwargs)
    assert text.tolist() == plain.tolist()


def test_drafter_that_was_saved_without_its_embedding(tmp_path: Path) -> None:
    target = make_target()
    make_drafter(target, branching_factor=1).save_pretrained(tmp_path, save_embedding=False)
    drafter = GumihoModel.from_pretrained(tmp_path, dtype=torch.float64)
    plain = target.generate(**make_prompts([5]), max_new_tokens=20, do_sample=False)
    text = generate_with_transformers(target, drafter, **make_prompts([5]), max_new_tokens=20, do_sample=False)
    assert text.tolist() == plain.tolist()


def test_sampling_has_the_distribution_of_the_target() -> None:
    """Two tokens at random after any text; the drafter's are certain, and are accepted with the target's share."""
    target = make_target()
    head = torch.nn.Linear(target.config.hidden_size, target.config.vocab_size).double()
    head.weight.data.zero_()
    head.bias.data.fill_(-1e4)
    head.bias.data[1:3] = torch.tensor([0.7, 0.3]).double().log()
    target.set_output_embeddings(head)
    torch.manual_seed(0)
    text = generate_with_transformers(
        target, make_drafter(target), **make_prompts([5]), max_new_tokens=2000, do_sample=True, top_k=0
    )
    share = float((text[0, 5:] == 1).float().mean())
    assert abs(share - 0.7) < 4 * (0.7 * 0.3 / 2000) ** 0.5


def test_candidates_need_the_states_of_the_target() -> None:
    target = make_target()
    config = copy.deepcopy(target.generation_config)
    config.max_length = 20
    generator = GumihoCandidateGenerator.for_assisted_decoding(target, make_drafter(target), config)
    ids = make_prompts([5])["input_ids"]
    assert generator.get_candidates(ids, {}, None, is_first_iteration=True, n_last_matches=0) == (ids, None)
    outputs = target(ids[:, :-1])
    with pytest.raises(ValueError, match=r"a CausalLMOutputWithPast without them.*`output_hidden_states=True`"):
        generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
