"""Targets with layers between their last hidden states and their output projection, and factorised embeddings."""

from pathlib import Path

import pytest
import torch
from chains import both
from sweep_architectures import build, prompts
from tiny_configs import VOCAB_SIZE
from trainers import losses_of, make_args
from transformers import ElectraConfig, PreTrainedModel, RemBertConfig, RoFormerConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.generation.verification.target_states import FeatureReader, output_head
from transformers_gumiho.training import GumihoTrainer


# A dense layer with a norm in the head, or beside it; and states that are divided before a plain head.
HEADS = ["bert", "roberta", "roformer", "modernbert-decoder", "electra", "rembert", "inkling_text"]
# Widths of embedding, states and what the projection reads: 16, 32, 16 and 16, 32, 24.
FACTORISED = ["electra", "rembert"]


def make_target(model_type: str) -> PreTrainedModel:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("This release of transformers does not have it.")
    return build(model_type).double()


def make_drafter(target: PreTrainedModel, **overrides: int) -> GumihoModel:
    torch.manual_seed(0)
    return GumihoModel.from_target(target, intermediate_size=48, **overrides).eval()


@pytest.mark.parametrize("model_type", HEADS)
def test_the_head_for_drafts_makes_the_targets_own_logits(model_type: str) -> None:
    """Of anything else a drafter could not learn what the target writes."""
    target = make_target(model_type)
    ids = prompts([9])["input_ids"]
    with torch.no_grad():
        logits = target(input_ids=ids).logits
        states = FeatureReader(target).read(ids).last
        torch.testing.assert_close(output_head(target)(states), logits)
        some = torch.tensor([7, 2, 11])
        torch.testing.assert_close(output_head(target, some)(states), logits[..., some])
    assert states.shape[2] == GumihoConfig.from_target(target.config).model.hidden_size


# Passes of RoFormer after a cache are not exact in the oldest supported release.
@pytest.mark.parametrize("model_type", [model_type for model_type in HEADS if model_type != "roformer"])
def test_texts_equal_plain(model_type: str) -> None:
    target = make_target(model_type)
    drafter = make_drafter(target, transition_rank=2)
    for lengths, do_sample in (([5], False), ([5], True), ([4, 17, 9], False)):
        _, drafted = both(target, lengths, drafter, **prompts(lengths), max_new_tokens=24, do_sample=do_sample)
        assert max(map(max, drafted.accepted_lengths)) >= 3


@pytest.mark.parametrize("config_class", [ElectraConfig, RemBertConfig, RoFormerConfig])
def test_widths_follow_from_the_config(config_class: type) -> None:
    widths = {ElectraConfig: (128, 128), RemBertConfig: (256, 1664), RoFormerConfig: (768, 768)}[config_class]
    config = GumihoConfig.from_target(config_class())
    assert (config.embedding_width, config.model.hidden_size) == widths
    assert config.model.hidden_size % config.model.num_attention_heads == 0
    assert GumihoConfig.from_target(config_class(), embedding_size=3).embedding_width == 3


@pytest.mark.parametrize("model_type", FACTORISED)
@pytest.mark.parametrize("save_embedding", [True, False])
def test_a_saved_drafter_drafts_the_same(model_type: str, save_embedding: bool, tmp_path: Path) -> None:
    target = make_target(model_type)
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path, save_embedding=save_embedding)
    loaded = GumihoModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.share_embedding(target)
    assert loaded.embed_tokens.weight.shape == (VOCAB_SIZE, 16)
    ids = prompts([9])["input_ids"]
    with torch.no_grad():
        states = FeatureReader(target).read(ids).last
        ours, theirs = (model(ids[:, 1:], states[:, :-1]) for model in (loaded, drafter))
    torch.testing.assert_close(ours.parallel_features, theirs.parallel_features)
    torch.testing.assert_close(ours.serial_features, theirs.serial_features)


def test_a_drafter_learns_what_the_target_writes(tmp_path: Path) -> None:
    """Through a head with a dense layer, and widths of its own."""
    target = make_target("rembert").float()
    prompt = prompts([5] * 12)
    rows = [
        {"input_ids": row.tolist(), "loss_mask": [0] * 5 + [1] * 14 + [0]}
        for row in target.generate(**prompt, max_new_tokens=15, do_sample=False)
    ]
    drafter = make_drafter(target)

    def tau() -> float:
        output = target.generate(
            **prompt, max_new_tokens=15, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        counts = [number for row in output.accepted_lengths for number in row if number]
        return sum(counts) / len(counts)

    before = tau()
    args = make_args(tmp_path, max_steps=150, per_device_train_batch_size=12, learning_rate=3e-3)
    trainer = GumihoTrainer(drafter, args, target=target, train_dataset=rows)
    trainer.train()
    assert losses_of(trainer)[-1] < 0.5 * losses_of(trainer)[0]
    drafter.eval()
    assert tau() > before + 1
