"""Drafters without a token embedding of their own, and drafters that give theirs up for the target's."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from targets import make_drafter, make_prompts, make_target

from transformers_gumiho import GumihoModel


def saved_without(folder: Path, seed: int = 0, family: str = "llama") -> GumihoModel:
    """Saves a drafter without its embedding, and returns it with the embedding."""
    drafter = make_drafter(make_target(family, seed=seed))
    drafter.save_pretrained(folder, save_embedding=False)
    return drafter


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_decoding_is_the_same_with_the_targets_embedding(family: str, tmp_path: Path) -> None:
    target, drafter = make_target(family), saved_without(tmp_path, family=family)
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert drafter.config.has_embedding  # only what was saved has none
    loaded = GumihoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert not loaded.config.has_embedding
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    whole = target.generate(**make_prompts([7]), assistant_model=drafter, **options)
    shared = target.generate(**make_prompts([7]), assistant_model=loaded, **options)
    assert torch.equal(shared.sequences, whole.sequences)
    assert shared.accepted_lengths == whole.accepted_lengths
    assert loaded.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()


def test_each_target_lends_its_own(tmp_path: Path) -> None:
    saved_without(tmp_path)
    targets = [make_target(seed=0), make_target(seed=1)]
    loaded = GumihoModel.from_pretrained(tmp_path, dtype=torch.float64)
    for target in (*targets, *targets):
        target.generate(**make_prompts([5]), assistant_model=loaded, max_new_tokens=4)
        assert torch.equal(loaded.embed_tokens.weight, target.get_input_embeddings().weight)


@pytest.mark.parametrize("way", ["optimizer", "data", "another tensor", "load_state_dict", "from here on"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_was_taken_is_taken_again_after_an_update(tmp_path: Path, dtype: torch.dtype, way: str) -> None:
    """As steps of reinforcement learning make them: the drafter drafts as one that is loaded anew."""
    target = make_target()
    make_drafter(target, transition_rank=3).save_pretrained(tmp_path, save_embedding=False)
    settings = {"draft_vocabulary": [1, 3, 4, 6], "break_even": 1.0}
    call = {**make_prompts([6]), "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}

    def load() -> GumihoModel:
        drafter = GumihoModel.from_pretrained(tmp_path, dtype=dtype)
        drafter.generation_config.update(**settings)
        return drafter

    drafter, other = load(), make_target(seed=1)
    target.generate(**call, assistant_model=drafter)
    if way == "load_state_dict":
        target.load_state_dict(other.state_dict())
    for ours, theirs in zip(target.parameters(), other.parameters(), strict=True):
        if way == "optimizer":
            with torch.no_grad():
                ours.copy_(theirs)
        elif way == "data":
            ours.data.copy_(theirs)
        elif way == "another tensor":
            ours.data = theirs.detach().clone()
    if way == "from here on":
        target.set_input_embeddings(other.get_input_embeddings())
    found, expected = (target.generate(**call, assistant_model=assistant) for assistant in (drafter, load()))
    assert torch.equal(drafter.embed_tokens.weight, target.get_input_embeddings().weight.to(dtype))
    assert torch.equal(found.sequences, expected.sequences)
    assert found.accepted_lengths == expected.accepted_lengths


def test_alone_it_says_what_it_needs(tmp_path: Path) -> None:
    drafter = saved_without(tmp_path)
    loaded = GumihoModel.from_pretrained(tmp_path, dtype=torch.float64)
    ids, states = torch.ones(1, 4, dtype=torch.long), torch.zeros(1, 4, 32, dtype=torch.float64)
    for alone in (loaded, copy.deepcopy(loaded)):
        with pytest.raises(ValueError, match=r"has no token embedding yet.*share_embedding\(target\)"):
            alone(ids, states)
    assert loaded.share_embedding(make_target())
    assert torch.equal(loaded(ids, states).serial_features, drafter(ids, states).serial_features)
    with pytest.raises(ValueError, match=r"embedding has shape \(16, 32\)|embedding has shape \(4, 32\)"):
        loaded.share_embedding(make_target(vocab_size=4))


def test_the_lent_embedding_goes_where_the_drafter_goes(tmp_path: Path) -> None:
    saved_without(tmp_path)
    target = make_target()
    loaded = GumihoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert not loaded.share_embedding(target)  # a copy, in the drafter's precision
    assert loaded.embed_tokens.weight.dtype == torch.float32
    assert loaded.double().embed_tokens.weight.dtype == torch.float64
    assert target.get_input_embeddings().weight.dtype == torch.float64
    assert "embed_tokens.weight" not in loaded.state_dict()


def test_saving_again_keeps_the_form(tmp_path: Path) -> None:
    drafter = saved_without(tmp_path / "without")
    assert drafter.config.has_embedding
    loaded = GumihoModel.from_pretrained(tmp_path / "without", dtype=torch.float64)
    loaded.share_embedding(make_target())
    loaded.save_pretrained(tmp_path / "again")
    again = GumihoModel.from_pretrained(tmp_path / "again")
    assert not again.config.has_embedding
    assert again.state_dict().keys() == drafter.state_dict().keys() - {"embed_tokens.weight"}


def test_equal_embeddings_share_memory_and_others_stay() -> None:
    target = make_target()
    drafter, embedding = make_drafter(target), target.get_input_embeddings().weight
    assert drafter.embed_tokens.weight.data_ptr() != embedding.data_ptr()
    assert drafter.share_embedding(target)
    assert drafter.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    other = make_target(seed=1)
    assert not drafter.share_embedding(other)
    assert torch.equal(drafter.embed_tokens.weight, embedding)
