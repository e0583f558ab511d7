"""EAGLE heads load in every layout, and make the logits, chains and trees of an independent implementation."""

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle import (
    DEFAULT_INPUTS,
    HEADS,
    HIDDEN,
    LAYERS_OF_TARGET,
    VOCAB,
    EagleHead,
    llama_fields,
    make_eagle_target,
    make_head,
    write_head,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from transformers_gumiho import DraftingSettings, GumihoConfig, GumihoModel
from transformers_gumiho.generation.verification.target_states import FeatureReader, head_for_drafting


IDS = torch.tensor([3, 17, 5, 29, 8, 11, 36, 2])
LAST = (2, 4, LAYERS_OF_TARGET)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_eagle_target()


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def load(folder: Path, **options: Any) -> GumihoModel:
    return GumihoModel.from_pretrained(folder, dtype=torch.float64, **options).eval()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares logits. The drafter's norms and rotary embedding compute in float32."""
    torch.testing.assert_close(found, expected, rtol=0, atol=float(1e-5 * expected.abs().max()))


def assert_drafts_as(head: EagleHead, drafter: GumihoModel, target: PreTrainedModel) -> None:
    """Compares the logits of a text, and a chain of which each token is drafted from the features before it."""
    head.bind(target)
    drafter.share_embedding(target)
    score, token_ids = head_for_drafting(target, drafter, None, target.device, target.dtype)
    read = FeatureReader(target, drafter.config.layers_read(target.config)).read(IDS[None, :-1]).target_states
    tokens, states = IDS[None, 1:], drafter.read_target(read)
    expected_states = head.states(target, IDS[:-1])
    expected = head.logits(head.features(IDS[1:], expected_states))
    assert_close(score(drafter(tokens, read).serial_features)[0], expected)
    chain, logits = head.chain(IDS[1:], expected_states, depth=4)
    for depth, token in enumerate(chain):
        feature = drafter.run_serial_head(drafter.fuse(tokens, states))[:, -1:]
        found = score(drafter.predict(feature))[0, 0]
        assert_close(found, logits[depth])
        drafted = found.argmax() if token_ids is None else token_ids[found.argmax()]
        assert drafted == token
        tokens, states = torch.cat((tokens, drafted.view(1, 1)), 1), torch.cat((states, feature), 1)


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


EAGLE1: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    # What the head has; its config, by that of its layers; how it is written.
    "reference": ({"fc_bias": True, "own_embedding": True}, dict, {}),
    "no_bias": ({"own_embedding": True}, dict, {"form": "safetensors"}),
    "target_embedding": ({"fc_bias": True}, dict, {"prefix": "model."}),
    "qwen2": ({"qkv_bias": True, "own_embedding": True}, lambda f: f | {"model_type": "qwen2", "qkv_bias": True}, {}),
    "vllm": (
        {"fc_bias": True, "own_embedding": True},
        lambda f: {"model_type": "eagle", "model": f, "eagle_fc_bias": True, "truncated_vocab_size": VOCAB},
        {"prefix": "model."},
    ),
    "vllm_fields_beside_the_layers": (
        {"own_embedding": True},
        lambda f: {"model_type": "eagle", "model": without(f, "rope_theta"), "rope_theta": f["rope_theta"]},
        {},
    ),
    "mixtral": ({"own_embedding": True}, lambda f: f | {"model_type": "mixtral"}, {}),
    "two_layers": ({"num_layers": 2, "own_embedding": True}, dict, {"form": "safetensors"}),
    "no_rope_theta": ({"theta": 10000.0, "own_embedding": True}, lambda f: without(f, "rope_theta"), {}),
}

AUX = "eagle_aux_hidden_state_layer_ids"


def bare(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"draft_vocab_size": 24}


def of_specforge(fields: dict[str, Any]) -> dict[str, Any]:
    """Its numbers count outputs: 1, 3 and 4 are the inputs of layers 2, 4 and 5."""
    return bare(fields) | {
        "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {AUX: [1, 3, 4], "use_aux_hidden_state": True},
    }  # fmt: skip


def of_speculators(fields: dict[str, Any], *flags: str, kind: str = "llama", ids: Any = None) -> dict[str, Any]:
    layer = without(fields, "torch_dtype", "architectures") | {"model_type": kind}
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": 24, "torch_dtype": "float64", AUX: ids, "norm_before_residual": False,
    } | dict.fromkeys(flags, True)  # fmt: skip


SMALL = {"draft_vocab_size": 24}
SPECULATORS = SMALL | {"own_embedding": True}
EAGLE3: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "reference": (SMALL, bare, {"midlayer": True}),
    "all_tokens": ({}, lambda f: f | {"draft_vocab_size": None}, {"midlayer": True}),
    "automodel": (SMALL, bare, {"midlayer": True, "prefix": "model.", "form": "safetensors"}),
    "nested": (SMALL, bare, {"midlayer": True, "prefix": "model.model."}),
    "specforge": (SMALL, of_specforge, {"midlayer": True, "form": "safetensors"}),
    "vllm_eagle": (SMALL, lambda f: {"model_type": "eagle", "method": "eagle3", "model": bare(f)}, {}),
    "speculators": (SPECULATORS, of_speculators, {"form": "safetensors"}),
    "layers_1_3_4_are_inputs_for_speculators": (
        SPECULATORS | {"inputs": (1, 3, 4)}, lambda f: of_speculators(f, ids=[1, 3, 4]), {},
    ),
    "inputs_in_any_order": (SMALL | {"inputs": (3, 5, 6)}, lambda f: bare(f) | {AUX: [6, 3, 5]}, {"midlayer": True}),
    "last_layer": (SMALL | {"inputs": LAST}, lambda f: bare(f) | {AUX: list(LAST)}, {"midlayer": True}),
    "two_states": (SMALL | {"inputs": (3, 6)}, lambda f: bare(f) | {AUX: [3, 6]}, {"midlayer": True}),
    "nulls_say_nothing": (
        SMALL | {"inputs": (3, 5, 6), "flags": ("fc_norm",)},
        lambda f: bare(f) | {AUX: [3, 5, 6], "fc_norm": None, "eagle_config": {AUX: None, "norm_before_fc": None}}, {},
    ),
    "nulls_beside_the_layers": (
        SMALL | {"inputs": (3, 5, 6)},
        lambda f: {"model_type": "eagle", "model": bare(f) | {"eagle_config": {AUX: [3, 5, 6]}}, AUX: [],
                   "eagle_config": None}, {},
    ),
    "one_set_counted_twice": (
        SMALL | {"inputs": (2, 4, 6)}, lambda f: bare(f) | {AUX: [2, 4, 6], "eagle_config": {AUX: [1, 3, 5]}}, {},
    ),
    "qwen3": (
        SPECULATORS | {"qk_norm": True, "head_dim": 16, "num_heads": 6},
        lambda f: of_speculators(f | {"head_dim": 16}, kind="qwen3"), {"form": "safetensors"},
    ),
    "qwen3_named_by_tensors": (SPECULATORS | {"qk_norm": True, "num_layers": 2}, of_speculators, {}),
    "llama_layer_of_a_qwen3_config": (
        SMALL | {"head_dim": 6},
        lambda f: bare(f | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}), {"midlayer": True},
    ),
    "two_layers": (SPECULATORS | {"num_layers": 2}, of_speculators, {}),
    "eagle3.1": (
        SPECULATORS | {"flags": ("fc_norm", "norm_output")}, lambda f: of_speculators(f, "fc_norm", "norm_output"), {},
    ),
    "norm_before_residual": (
        SPECULATORS | {"flags": ("norm_before_residual",)}, lambda f: of_speculators(f, "norm_before_residual"), {},
    ),
    "norm_before_fc": (
        SMALL | {"flags": ("norm_before_fc",)},
        lambda f: bare(f) | {"eagle_config": {"norm_before_fc": True}}, {"midlayer": True},
    ),
    "biases": (SMALL | {"qkv_bias": True, "fc_bias": True}, lambda f: bare(f) | {"attention_bias": True}, {}),
    "llama4": (SMALL, lambda f: bare(f) | {"model_type": "llama4_text", "intermediate_size": 8,
                                           "intermediate_size_mlp": 48}, {"midlayer": True}),
    "no_rope_theta": (SMALL | {"theta": 10000.0}, lambda f: bare(without(f, "rope_theta")), {"midlayer": True}),
    "rope_parameters": (
        SMALL, lambda f: bare(without(f, "rope_theta")) | {"rope_parameters": {"rope_theta": f["rope_theta"],
                                                                               "rope_type": "default"}}, {},
    ),
    "rope_in_two_fields": (
        SMALL | {"rope_factor": 4.0},
        lambda f: bare(without(f, "rope_theta")) | {
            "rope_parameters": {"rope_theta": f["rope_theta"], "rope_type": "default"},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        }, {},
    ),
}  # fmt: skip
CASES = {f"eagle1-{name}": (False, *case) for name, case in EAGLE1.items()}
CASES |= {f"eagle3-{name}": (True, *case) for name, case in EAGLE3.items()}


@pytest.mark.parametrize("name", list(CASES))
def test_logits_and_chains_are_the_oracles(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    is_eagle3, parts, as_config, layout = CASES[name]
    head = make_head(is_eagle3, **parts)
    folder = write_head(tmp_path / "head", head, as_config(llama_fields(head)), **layout)
    drafter = load(folder)
    assert (drafter.config.num_parallel_heads, drafter.config.max_draft_depth) == (0, 8)
    assert_drafts_as(head, drafter, target)
    # What is saved keeps the published names, and is loaded by the Auto classes.
    drafter.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == head.weights.keys() - {"t2d"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert type(saved) is GumihoModel
    assert saved.config.converted_from == str(folder)
    assert_drafts_as(head, saved, target)


COPIED: dict[str, tuple[bool, dict[str, Any], str]] = {
    "layers": (True, {"num_hidden_layers": 36}, "`num_hidden_layers` is 36, and the weights have 1"),
    "width": (True, {"hidden_size": 64}, "`hidden_size` is 64, and the weights have 32"),
    "width_of_target": (True, {"target_hidden_size": 64}, "`target_hidden_size` is 64, and the weights have 32"),
    "width_of_mlp": (True, {"intermediate_size": 96}, "`intermediate_size` is 96, and the weights have 48"),
    "vocabulary": (True, {"vocab_size": 400}, "`vocab_size` is 400, and the weights have 40"),
    "draft_vocabulary": (True, {"draft_vocab_size": 40}, "`draft_vocab_size` is 40, and the weights have 24"),
    "nothing": (True, dict.fromkeys(("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size")), ""),
}


@pytest.mark.parametrize("name", list(COPIED))
def test_sizes_are_those_of_the_tensors(
    name: str, target: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tools copy fields of a target's config to a head's. Those that the tensors contradict are named."""
    is_eagle3, changes, message = COPIED[name]
    head = make_head(is_eagle3, own_embedding=not is_eagle3, draft_vocab_size=24 if is_eagle3 else None)
    fields = llama_fields(head) | ({"draft_vocab_size": 24} if is_eagle3 else {}) | changes
    with caplog.at_level(logging.WARNING):
        drafter = load(write_head(tmp_path, head, fields))
    assert_drafts_as(head, drafter, target)
    assert any(message in text for text in caplog.messages) or not message
    assert any("contradicts its weights" in text for text in caplog.messages) == bool(message)


def test_a_variant_is_recognized_by_its_own_tensors(target: PreTrainedModel, tmp_path: Path) -> None:
    head = make_head(True, draft_vocab_size=24)
    write_head(tmp_path, head, bare(llama_fields(head)), form="safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "model.own.safetensors")
    drafter = load(tmp_path, variant="own", num_serial_tokens=3)
    assert drafter.config.num_serial_tokens == 3
    assert_drafts_as(head, drafter, target)


def test_a_head_for_a_wider_target(tmp_path: Path) -> None:
    target = make_eagle_target(hidden_size=48)
    head = make_head(True, own_embedding=True, draft_vocab_size=24, target_hidden_size=48, flags=("fc_norm",))
    fields = bare(llama_fields(head)) | {"target_hidden_size": 48, "fc_norm": True}
    drafter = load(write_head(tmp_path, head, fields, midlayer=True))
    assert_drafts_as(head, drafter, target)
    with pytest.raises(ValueError, match="hidden size of 48, but LlamaForCausalLM has one of 32"):
        make_eagle_target().generate(IDS[None], assistant_model=drafter)


def test_layers_are_logged_and_can_be_replaced(
    target: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_head(True, inputs=(3, 5, 6))
    write_head(tmp_path, head, bare(llama_fields(head)) | {"draft_vocab_size": None})
    drafter = load(tmp_path, target_layer_ids=[2, 4, 5])
    assert_drafts_as(head, drafter, target)
    caplog.clear()
    target.generate(IDS[None], assistant_model=drafter, max_new_tokens=4)
    assert not caplog.messages, "they are named"
    for _ in range(2):
        target.generate(IDS[None], assistant_model=load(tmp_path), max_new_tokens=4)
    (message,) = caplog.messages
    assert re.search(r"reads the layers \[1, \d, \d\] of .* pass `target_layer_ids=", message)
    small = make_eagle_target(num_hidden_layers=6)
    with pytest.raises(ValueError, match=r"a target of 6 layers is too small .* Pass `target_layer_ids="):
        small.generate(IDS[None], assistant_model=load(tmp_path), max_new_tokens=4)


def test_the_length_that_a_rotary_embedding_was_trained_for(tmp_path: Path) -> None:
    """It may be in the object of the embedding, or beside it, as for Phi."""
    head, scaling = make_head(True), {"rope_type": "yarn", "factor": 4.0}
    length = {"original_max_position_embeddings": 32}
    for name, changes in (
        ("within", {"rope_scaling": scaling | length}),
        ("beside", {"rope_scaling": scaling, **length}),
    ):
        config = GumihoConfig.from_pretrained(write_head(tmp_path / name, head, llama_fields(head) | changes))
        assert config.model.rope_parameters == {"rope_theta": head.theta, **scaling, **length}


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    # Tensors that are added, and fields that are changed.
    "architecture": (True, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architecture 'Eagle3DeepseekV2For"),
    "architecture_within_vllms": (
        True,
        {"architectures": ["Eagle3LlamaForCausalLM"], "model": {"architectures": ["Gemma2ForCausalLM"]}},
        "the architecture 'Gemma2ForCausalLM'",
    ),
    "mtp": (True, {"architectures": None, "model_type": "deepseek_mtp"}, "layers of the type 'deepseek_mtp'"),
    "layers": (True, {"architectures": None, "model_type": "gemma2"}, "with layers of the type 'gemma2'"),
    "layers_of_speculators": (
        True,
        {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "qwen3_5_text"}},
        "with layers of the type 'qwen3_5_text'",
    ),
    "layers_of_eagle1": (False, {"model_type": "mistral", "architectures": None}, "layers of the type 'mistral'"),
    "speculators_type": (True, {"speculators_model_type": "peagle"}, "a drafter of the type 'peagle'"),
    "tensor": ("mask_hidden", {}, "the tensor `mask_hidden`, which is not known"),
    "tensor_without_fc": ("0.0.linear.weight", {}, r"the tensor `0\.0\.linear\.weight`"),
    "flag": (False, {"add_para_norm": True}, "`add_para_norm` is True, which is not known"),
    "scale": (False, {"logit_scale": 0.0625}, "`logit_scale` is 0.0625"),
    "layers_elsewhere": (True, {"aux_layer_indices": [3, 5, 6]}, r"`aux_layer_indices` is \[3, 5, 6\]"),
    "no_aux": (True, {"eagle_config": {"use_aux_hidden_state": False}}, "`use_aux_hidden_state` is False"),
    "sliding": (True, {"layer_types": ["sliding_attention"]}, "with a sliding window"),
    "sliding_by_flag": (True, {"use_sliding_window": True, "sliding_window": 8}, "`use_sliding_window` is True"),
    "rope_type": (True, {"rope_scaling": {"type": "su", "factor": 2.0}}, "rotary embedding that is not known: .*'su'"),
    "rope_field": (True, {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}, "not known: .*mrope_sect"),
    "rope_of_each_kind": (
        True,
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
        "embedding that is not known: .*full_atten",
    ),
    "embedding_layer": (True, {AUX: [0, 4, 5]}, r"reads the target's embedding \(layer 0"),
    "two_sets_of_layers": (
        True,
        {AUX: [2, 4, 6], "eagle_config": {AUX: [3, 5, 6]}},
        r"several sets of layers .*1, 3, 5.*2, 4, 5",
    ),
    "final_norm": ("norm.weight", {}, r"norms of its own \(`norm.weight`\)"),
    "eagle3_by_config_alone": (False, {"draft_vocab_size": 24}, "an EAGLE-3 head by its config, and not by"),
    "flag_without_tensors": (True, {"fc_norm": True}, "`fc_norm` is True, and its weights lack the norms"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_other_heads_are_refused_by_name(name: str, tmp_path: Path, target: PreTrainedModel) -> None:
    kind, changes, message = REFUSED[name]
    head = make_head(kind is True, fc_bias=kind is not True, draft_vocab_size=24 if kind is True else None)
    if isinstance(kind, str):
        head.weights[kind] = torch.ones(HIDDEN, dtype=torch.float64)
        if name == "tensor_without_fc":  # Medusa heads have none
            del head.weights["fc.weight"]
    fields = llama_fields(head) | ({"draft_vocab_size": 24} if kind is True else {}) | changes
    write_head(tmp_path, head, fields)
    with pytest.raises(ValueError, match=message):
        target.generate(IDS[None], assistant_model=str(tmp_path), max_new_tokens=2)


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    head = make_head(True, draft_vocab_size=24)
    fields = bare(llama_fields(head))
    for name, message in (
        ("lm_head.weight", r"missing: lm_head\.weight"),
        ("d2t", r"wrong shape: lm_head\.weight is \(24, 32\), expected \(40, 32\)"),
        ("layers.0.self_attn.q_proj.weight", "cannot be recognized, because it has no matrix `layers.0.self_attn.q_"),
        ("layers.0.mlp.down_proj.weight", r"missing: layers\.0\.mlp\.down_proj\.weight"),
    ):
        weights = {key: tensor for key, tensor in head.weights.items() if key not in (name, "t2d")}
        with pytest.raises(ValueError, match=message):
            load(write_head(tmp_path / name, dataclasses.replace(head, weights=weights), fields))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"no weight file is found next to its config\.json"):
        GumihoConfig.from_pretrained(tmp_path / "bare")


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 0}, "`num_attention_heads` must be an integer above 0, got 0"),
    ({"num_attention_heads": None}, "gives no `num_attention_heads`"),
    ({"num_attention_heads": 8}, "q_proj.weight` has 32 rows for 8 heads .*k_proj.weight` has 16 for 2"),
    ({"num_attention_heads": 3}, "q_proj.weight` has 32 rows for 3 heads"),
    ({AUX: [2.0, 4.0, 5.0]}, rf"`{AUX}` must be a list of integers, got \[2\.0, 4"),
    ({"eagle_config": [1]}, r"`eagle_config` must be an object, got \[1\]"),
    ({"norm_output": "false"}, "`norm_output` must be true or false, got 'false'"),
    ({"architectures": "LlamaForCausalLM"}, "`architectures` must be a list of names, got 'LlamaForCausalLM'"),
    ({"model_type": 3}, "`model_type` must be a name, got 3"),
    ({"hidden_act": "swish2"}, "`hidden_act` must be an activation that transformers has, got 'swish2'"),
    ({"torch_dtype": "float99"}, "`torch_dtype` must be a dtype of PyTorch, got 'float99'"),
    ({"rms_norm_eps": "1e-3"}, "'rms_norm_eps' expected float, got str"),
    ({"rope_theta": "100"}, "`rope_theta` must be a number above 0, got '100'"),
    ({"rope_scaling": "linear"}, "`rope_scaling` must be an object, got 'linear'"),
    ({"rope_scaling": {"type": "linear"}}, "it gives no `factor` for its rotary embedding: .*linear"),
    ({"eagle_config": {"rope_theta": 5.0}}, r"gives `rope_theta` as 100\.0 and as 5\.0"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "as 'linear' and as 'yarn'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_FIELDS)
def test_wrong_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    head = make_head(True, draft_vocab_size=24)
    with pytest.raises(ValueError, match=message):
        load(write_head(tmp_path, head, bare(llama_fields(head)) | changes))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda d2t: d2t[:, None], r"`d2t` must be 1-D and of integers, got torch\.int64 of shape \(24, 1\)"),
        ("d2t", lambda d2t: d2t > 3, "`d2t` must be 1-D and of integers, got torch.bool"),
        # Ids in the place of distances.
        ("d2t", lambda d2t: d2t + torch.arange(24), "`d2t` must name distinct token ids from 0 to 39, but it holds"),
        ("d2t", lambda d2t: d2t[:20], "`t2d` marks other tokens than `d2t` names"),
        ("t2d", lambda t2d: t2d.roll(1), r"`t2d` marks other tokens than `d2t` names, such as \d+"),
        ("t2d", lambda t2d: torch.ones(2, 3), "`t2d` marks other tokens than `d2t` names"),
        ("lm_head.weight", torch.sum, r"lm_head\.weight is \(\), expected \(40, 32\)"),
        ("layers.0.self_attn.k_proj.weight", torch.sum, "it has no matrix `layers.0.self_attn.k_proj.weight`"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(name: str, change: Any, message: str, tmp_path: Path) -> None:
    head = make_head(True, draft_vocab_size=24)
    head.weights[name] = change(head.weights[name])
    with pytest.raises(ValueError, match=message):
        load(write_head(tmp_path, head, bare(llama_fields(head))))


def test_files_without_named_tensors_are_named(tmp_path: Path) -> None:
    head = make_head(True, draft_vocab_size=24)
    write_head(tmp_path, head, bare(llama_fields(head)))
    torch.save([1], tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model\.bin` is damaged: it holds no tensors by name"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(OSError, match=r"index\.json` of .* is damaged: it has no `weight_map`"):
        load(tmp_path)
    index.write_text('{"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(OSError, match=r"model-00001-of-00002\.safetensors"):
        load(tmp_path)


def test_a_spare_output_head_and_a_token_map_of_eagle1(target: PreTrainedModel, tmp_path: Path) -> None:
    """The target's head scores; the map is a setting."""
    head = make_head(False)
    head.weights["lm_head.weight"] = torch.ones(VOCAB, HIDDEN, dtype=torch.float64)
    head.weights["token_map"] = torch.tensor([4, 31, 7])
    drafter = load(write_head(tmp_path, head, llama_fields(head)))
    assert_drafts_as(head, drafter, target)
    assert drafter.generation_config.draft_vocabulary == [4, 31, 7]


def test_defaults_of_drafters_without_parallel_heads(tmp_path: Path) -> None:
    head = make_head(True)
    drafter = load(write_head(tmp_path, head, llama_fields(head) | {"draft_vocab_size": None}))
    for device, shape in (("cpu", (12, 4, 5)), ("cuda", (63, 10, 5))):
        settings = DraftingSettings.from_generation_config(
            drafter.generation_config, drafter.config, None, device_type=device
        )
        assert (settings.num_assistant_tokens, settings.branching_factor, settings.tree_depth) == shape
    settings = DraftingSettings.from_generation_config(GenerationConfig(tree_depth=8), drafter.config, None)
    assert settings.tree_depth == 8
    assert drafter.config.model.head_dim * HEADS == HIDDEN
    assert drafter.config.layers_read(make_eagle_target().config).ids == tuple(i - 1 for i in DEFAULT_INPUTS)
