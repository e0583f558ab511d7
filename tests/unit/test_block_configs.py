"""Configs of block drafters: what is read of each layout, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block import (
    HIDDEN,
    MASK,
    deepspec,
    make_block_drafter,
    make_block_target,
    newer_zlab,
    speculators,
    write_block_drafter,
    zlab,
)
from commands import refuse

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


REFUSED: dict[str, tuple[Any, str | None, str]] = {
    # The config, a tensor that is added, and the message.
    "dflash2": (lambda d: zlab(d) | {"architectures": ["DFlash2DraftModel"]}, None, "a DFlash2 drafter, with convol"),
    "dflash2_by_tensors": (zlab, "candidate_selector.successor_codebook", "a DFlash2 drafter"),
    "domino": (lambda d: zlab(d, projector_type="domino"), None, "a Domino drafter, with a GRU"),
    "domino_by_tensors": (zlab, "prefix_gru.weight_ih_l0", "a Domino drafter"),
    "xpress": (lambda d: speculators(d, architectures=["XPressSpeculator"]), None, "an XPress drafter, with several"),
    "xpress_by_type": (lambda d: speculators(d, speculators_model_type="xpress"), None, "an XPress drafter"),
    "peagle": (zlab, "mask_hidden", "a P-EAGLE head"),
    "gated": (deepspec, "markov_head.gate_proj.weight", "with a gated Markov head"),
    "recurrent": (deepspec, "markov_head.joint_proj.weight", "with a recurrent Markov head"),
    "markov_type": (lambda d: deepspec(d) | {"markov_head_type": "other", "markov_rank": 4}, None, "type 'other'"),
    "gemma": (lambda d: deepspec(d) | {"architectures": ["Gemma4DSparkModel"]}, None, "with layers of Gemma"),
    "gemma_by_tensors": (zlab, "layers.0.layer_scalar", "with layers of Gemma"),
    "laguna": (lambda d: zlab(d) | {"architectures": ["DFlashLagunaForCausalLM"]}, None, "with layers of Laguna"),
    "laguna_by_tensors": (zlab, "layers.0.self_attn.g_proj.weight", "with layers of Laguna"),
    "mla": (lambda d: zlab(d, attention_mode="mla"), None, r"multi-head latent attention \(MLA\)"),
    "mla_by_tensors": (zlab, "layers.0.self_attn.kv_b_proj.weight", r"multi-head latent attention \(MLA\)"),
    "sinks": (zlab, "layers.0.self_attn.attention_sink_bias", "with attention sinks"),
    "architecture": (lambda d: zlab(d) | {"architectures": ["DFlashOtherModel"]}, None, "'DFlashOtherModel'"),
    "kind": (lambda d: zlab(d, projector_type="other"), None, "of the kind 'other'"),
    "layer_type": (lambda d: zlab(d) | {"model_type": "olmo2"}, None, "layers of the type 'olmo2'"),
    "scaled_embedding": (lambda d: zlab(d, input_embedding_scale=8.0), None, "`input_embedding_scale` is 8.0"),
    "scaled_logits": (lambda d: zlab(d, output_multiplier=0.5), None, "`output_multiplier` is 0.5"),
    "capped_logits": (lambda d: zlab(d, final_logit_softcapping=30.0), None, "`final_logit_softcapping` is 30.0"),
    "interleaved": (lambda d: zlab(d, is_neox_style=False), None, "`is_neox_style` is False"),
    "unknown_field": (lambda d: zlab(d, some_new_switch=2), None, "`some_new_switch` is 2, which is not known here"),
    "unknown_tensor": (zlab, "layers.0.self_attn.gamma", "the tensor `layers.0.self_attn.gamma`, which is not known"),
    "activation": (lambda d: zlab(d) | {"hidden_act": "gelu"}, None, "the activation 'gelu'"),
    "rope": (lambda d: zlab(d) | {"rope_scaling": {"type": "mrope"}}, None, "rotary embedding that is not known"),
    "no_mask_token": (lambda d: zlab(d, mask_token_id=None), None, "`mask_token_id` must be an integer, got None"),
    "no_block_size": (lambda d: without(zlab(d), "block_size"), None, "`block_size` must be an integer, got None"),
    "no_layers": (lambda d: zlab(d, target_layer_ids=None), None, "`target_layer_ids`, the layers .* got None"),
    "the_embedding": (lambda d: zlab(d, target_layer_ids=[-1, 3, 5]), None, r"embedding \(`target_layer_ids` is \[-1"),
    "the_embedding_as_an_input": (
        lambda d: speculators(d, aux_hidden_state_layer_ids=[0, 3, 5]), None, "reads the target's embedding",
    ),
    "order": (lambda d: zlab(d, target_layer_ids=[3, 1, 5]), None, "in another order than the target's"),
    "no_window": (
        lambda d: newer_zlab(d) | {"layer_types": 2 * ["sliding_attention"], "use_sliding_window": True}, None,
        "has sliding layers, and `sliding_window` is None",
    ),
    "no_window_is_used": (
        lambda d: newer_zlab(d) | {"layer_types": 2 * ["sliding_attention"], "sliding_window": 8}, None,
        "has sliding layers .* and `use_sliding_window` is false",
    ),
    "which_query_is_first": (
        lambda d: speculators(d, "DSpark", speculators_config=None), None, "does not say which query predicts first",
    ),
    "no_room_for_a_draft": (lambda d: zlab(d) | {"block_size": 1}, None, "`block_size` must leave a token"),
    "mask_token": (lambda d: zlab(d, mask_token_id=99), None, "`mask_token_id` must be a token, from 0 to 29, got 99"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    as_config, tensor, message = REFUSED[name]
    drafter = make_block_drafter()
    if tensor is not None:
        drafter.weights[tensor] = torch.ones(4, 4, dtype=torch.float64)
    write_block_drafter(tmp_path, drafter, as_config(drafter))
    with pytest.raises(ValueError, match=message):
        GumihoModel.from_pretrained(tmp_path)


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    for name, message in (
        ("hidden_norm.weight", r"missing: hidden_norm\.weight"),
        ("fc.weight", "has no matrix `fc.weight`"),
        ("layers.1.mlp.up_proj.weight", r"missing: layers\.1\.mlp\.up_proj\.weight"),
        ("lm_head.weight", r"a draft vocabulary \(`d2t`\), and no output head"),
        ("markov_head.markov_w2.weight", r"missing: markov_head\.markov_w2\.weight"),
    ):
        drafter = make_block_drafter(draft_vocab_size=20, markov_rank=4)
        del drafter.weights[name]
        with pytest.raises(ValueError, match=message):
            GumihoModel.from_pretrained(write_block_drafter(tmp_path / name, drafter, deepspec(drafter)))
    (tmp_path / "config.json").write_text(json.dumps(zlab(make_block_drafter())))
    with pytest.raises(ValueError, match=r"no weight file is found next to its config\.json"):
        GumihoConfig.from_pretrained(tmp_path)


def test_conventions_are_resolved_when_the_config_is_read(tmp_path: Path) -> None:
    """What is saved says all of it, and can be overridden."""
    drafter = make_block_drafter(block_size=6, windows=(4, None), causal=(True, False), markov_rank=3)
    fields = newer_zlab(drafter, rope_scaling={"type": "yarn", "factor": 4.0})
    config = GumihoConfig.from_pretrained(write_block_drafter(tmp_path, drafter, fields))
    assert (config.block_size, config.mask_token_id, config.max_draft_depth) == (6, MASK, 5)
    assert (config.attention_windows, config.attention_causal) == ([4, None], [True, False])
    assert (config.target_layer_ids, config.markov_rank, config.has_own_head) == ([1, 3, 5], 3, False)
    assert config.model.rope_parameters.items() >= {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0}.items()
    config.save_pretrained(tmp_path / "saved")
    assert GumihoConfig.from_pretrained(tmp_path / "saved").to_dict() == config.to_dict()
    changed = GumihoConfig.from_pretrained(tmp_path, sample_from_anchor=True, target_layer_ids=[0, 2, 4])
    assert (changed.max_draft_depth, changed.target_layer_ids) == (6, [0, 2, 4])
    # Other drafters' files have none of these fields.
    assert not {"block_size", "attention_causal", "markov_rank"} & GumihoConfig().to_dict().keys()
    with pytest.raises(ValueError, match="all tokens in one pass: leave `num_serial_tokens` and `num_parallel_heads`"):
        GumihoConfig.from_pretrained(tmp_path, num_parallel_heads=5)
    with pytest.raises(ValueError, match="`attention_causal` must have a value for each of 2 layers"):
        GumihoConfig.from_pretrained(tmp_path, attention_causal=[True])


def test_training_names_the_tools_that_train_them(tmp_path: Path) -> None:
    drafter, target = make_block_drafter(), make_block_target()
    folder = write_block_drafter(tmp_path / "head", drafter, zlab(drafter))
    model, message = GumihoModel.from_pretrained(folder), "is not trained here. Train it with SpecForge, DeepSpec or"
    with pytest.raises(ValueError, match=message):
        GumihoTrainer(model, GumihoTrainingArguments(tmp_path / "out"), target=target)
    # Also on traffic that was recorded with it, before anything is read.
    (tmp_path / "recorded").mkdir()
    options = ["--drafter", folder, "--features", tmp_path / "recorded", "--output_dir", tmp_path / "out"]
    refuse(message, "train", "--target", tmp_path / "none", *options)
    model.share_embedding(target)
    with pytest.raises(ValueError, match=r"has no `forward` over a text\. It is trained by the tools"):
        model(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, 3 * HIDDEN))
