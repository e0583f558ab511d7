"""transformers' own loop of assisted decoding can ask the generator for candidates, though no release does so."""

import pytest
import torch
from drafting_oracle import make_generator
from targets import make_drafter, make_prompts, make_target, passes_of
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_text_and_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(family)
    drafter = make_drafter(target, branching_factor=1)
    settings = {**make_prompts([5]), "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(**settings)
    num_drafted, _ = passes_of(target, lambda: target.generate(**settings, assistant_model=drafter))

    def make(self: PreTrainedModel, **kwargs: object) -> CandidateGenerator:
        return make_generator(target, drafter, 1)

    # The loop that prompt lookup takes, which no hook touches.
    monkeypatch.setattr(type(target), "_get_candidate_generator", make)
    num_passes, text = passes_of(target, lambda: target.generate(**settings, prompt_lookup_num_tokens=3))
    assert torch.equal(text, plain)
    assert num_passes == num_drafted < 40
