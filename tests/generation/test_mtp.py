"""The MTP layers of targets draft what an independent implementation computes, and nothing else changes."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from block import make_block_drafter, make_block_target, write_block_drafter, zlab
from draft_trees import Trees
from eagle import llama_fields, make_eagle_target, make_head, write_head
from mtp import FAMILIES, MtpTarget, make_mtp_target, write_config
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from targets import equals_plain, make_prompts
from training_data import make_tokenizer
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from transformers_gumiho import DraftingSettings, GumihoModel, attach, detach, record
from transformers_gumiho.generation.drafting.candidate_generator import estimate_break_even
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.model import mtp_layouts
from transformers_gumiho.model.loading import is_drafter
from transformers_gumiho.tools.serving_folder import AttachArguments, write_served_target
from transformers_gumiho.tools.tuning.command import TuningArguments, tune
from transformers_gumiho.training import FeatureDataset


TREES = {"num_assistant_tokens": 10, "branching_factor": 3, "tree_depth": 4, "draft_temperature": 1.0}
VOCAB_SIZE = 24


def load(target: MtpTarget, **settings: Any) -> GumihoModel:
    """Returns the drafter of a target's MTP layer. It never pauses."""
    drafter = GumihoModel.from_pretrained(target.folder, dtype=torch.float32)
    drafter.generation_config.update(break_even=0.01, full_tree_attention=False, **TREES | settings)
    return drafter


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    return make_prompts(lengths, 3, VOCAB_SIZE)


def expected_scores(target: MtpTarget, text: list[int], paths: list[tuple[int, ...]]) -> list[float]:
    """Returns the sum of the oracle's log-probabilities of the tokens of each path."""
    known: dict[tuple[int, ...], torch.Tensor] = {}
    scores = []
    for path in paths:
        score = 0.0
        for depth, token in enumerate(path):
            above = path[:depth]
            if above not in known:
                known[above] = target.logits(text, above).log_softmax(-1)
            score += float(known[above][token])
        scores.append(score)
    return scores


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_every_tree_of_a_text_is_the_oracles(model_type: str, tmp_path: Path) -> None:
    target = make_mtp_target(model_type, tmp_path)
    drafter = load(target)
    with observing(seen := Trees()):
        output = equals_plain(target.model, drafter, **prompts(9), max_new_tokens=10)
    text, end = output.sequences[0].tolist(), 9
    for tree, num_accepted in zip(seen.trees, output.accepted_lengths[0], strict=True):
        nodes = [(tree.ancestors[0, node].nonzero()[1:, 0], node) for node in range(1, tree.tokens.shape[1])]
        paths = [tuple(tree.tokens[0, above].tolist()) for above, _ in nodes]
        # The root is the newest committed token, which the layer reads beside the state before it.
        wanted = expected_scores(target, text[: end + 1], paths)
        torch.testing.assert_close([float(tree.scores[0, node]) for _, node in nodes], wanted, atol=1e-3, rtol=0)
        # The best tokens are among the nodes.
        best = target.logits(text[: end + 1], ()).argmax()
        assert (int(best),) in paths or len(text) - end == 2
        end += num_accepted
    assert len(seen.trees) > 2
    # It is saved by the names in memory, which trainers read.
    drafter.save_pretrained(tmp_path / "saved")
    saved, states = load_file(tmp_path / "saved" / "model.safetensors"), drafter.state_dict()
    assert saved.keys() == states.keys()
    read = GumihoModel.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert all(tensor.equal(read[name]) for name, tensor in states.items())


WAYS: dict[str, dict[str, Any]] = {
    "batch": prompts(7, 3, 5),
    "sampled_batch": prompts(7, 4) | {"do_sample": True, "temperature": 0.8},
    "static": prompts(6) | {"cache_implementation": "static"},
    "prompt_lookup": prompts(6, 9) | {"drafted": {"prompt_lookup_num_tokens": 4}},
    "chunked_prompt": prompts(11) | {"prefill_chunk_size": 4},
}


@pytest.fixture(scope="module", params=["glm4_moe", "mimo_v2_flash", "qwen3_5_text"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpTarget:
    return make_mtp_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("way", list(WAYS))
def test_the_text_stays_plain_decodings(way: str, target: MtpTarget) -> None:
    equals_plain(target.model, load(target, draft_vocabulary=list(range(0, VOCAB_SIZE, 2))), **WAYS[way])
    equals_plain(target.model, "mtp", **WAYS[way])


@pytest.mark.parametrize("way", ["adapter", "second_turn", "inputs_embeds", "four_bits", "sixteen_bits"])
def test_the_text_stays_plain_decodings_for_changed_targets(way: str, target: MtpTarget) -> None:
    model, drafter, call = copy.deepcopy(target.model), load(target), prompts(7, 4) | {"max_new_tokens": 12}
    if way == "adapter":
        config = LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, config).eval()
    elif way == "second_turn":
        first = model.generate(**call, do_sample=False, return_dict_in_generate=True, assistant_model=drafter)
        text, mask = first.sequences, torch.nn.functional.pad(call["attention_mask"], (0, 12), value=1)
        call |= {"input_ids": text, "attention_mask": mask}
        without = equals_plain(model, drafter, **call)
        cached = model.generate(
            **call, do_sample=False, assistant_model=drafter, **{CACHE_NAME: getattr(first, CACHE_NAME)}
        )
        assert cached.equal(without.sequences)
    elif way == "inputs_embeds":
        call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids")).detach()
    elif way == "four_bits":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4))
        assert type(model.get_decoder().layers[-1].self_attn.o_proj.weight) is not torch.nn.Parameter
    else:
        drafter = drafter.to(torch.bfloat16)
    assert equals_plain(model, drafter, **call).accepted_lengths


def test_what_is_recorded_is_what_the_layer_reads(target: MtpTarget, tmp_path: Path) -> None:
    drafter, call = load(target), prompts(6) | {"max_new_tokens": 10, "do_sample": False}
    with record(target.model, tmp_path, make_tokenizer()):
        text = target.model.generate(**call, assistant_model=drafter)[0].tolist()
    (row,) = FeatureDataset(tmp_path)
    assert row["input_ids"].tolist() == text[:-1]
    states = row["hidden_states" if target.family.reads_normed else "layer_states"].float()
    torch.testing.assert_close(states, target.read(text[:-1]), atol=0.02, rtol=0.02)


def test_the_targets_own_layers_are_loaded_once(target: MtpTarget) -> None:
    call = prompts(5) | {"max_new_tokens": 6, "do_sample": False}
    detach(target.model)
    with mock.patch.object(GumihoModel, "from_pretrained", wraps=GumihoModel.from_pretrained) as loaded:
        for assistant in ("mtp", "mtp", str(target.folder)):
            target.model.generate(**call, assistant_model=assistant)
        drafter = attach(target.model, "mtp")
    detach(target.model)
    assert loaded.call_count == 1
    settings = drafter.generation_config
    has_experts = getattr(target.model.config, "num_experts_per_tok", None) is not None
    assert settings.tree_depth == 3
    assert settings.num_assistant_tokens == ({"1": 8, "4": 4, "8": 2} if has_experts else None)
    with pytest.raises(ValueError, match="use_mtp"):
        target.model.generate(**call, assistant_model="mtp", use_mtp=True)


def test_own_layers_are_read_where_the_target_was(tmp_path: Path) -> None:
    make_mtp_target("glm4_moe", tmp_path / "inner")
    places = {"subfolder": "inner", "revision": "v2", "token": "secret"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype="float32", **places)
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    with mock.patch.object(GumihoModel, "from_pretrained", wraps=GumihoModel.from_pretrained) as loaded:
        equals_plain(model, "mtp", **prompts(5), max_new_tokens=6)
    assert loaded.call_args.kwargs.items() >= places.items()


def test_a_saved_layer_is_an_ordinary_drafter(target: MtpTarget, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in target.folder.iterdir()}
    drafter = load(target)
    drafter.save_pretrained(tmp_path)
    saved = GumihoModel.from_pretrained(tmp_path, dtype=torch.float32)
    for made in (saved, copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        states = made.state_dict()
        assert all(tensor.equal(states[name]) for name, tensor in drafter.state_dict().items())
        equals_plain(target.model, made, **prompts(6), max_new_tokens=8)
    assert not any(name.startswith("embed_tokens") for name in load_file(tmp_path / "model.safetensors"))
    assert is_drafter(tmp_path)
    assert not is_drafter(target.folder)
    assert {path.name: path.read_bytes() for path in target.folder.iterdir()} == before


def test_only_the_files_with_the_layer_are_read(target: MtpTarget, tmp_path: Path) -> None:
    shutil.copy(target.folder / "config.json", tmp_path)
    names = dict.fromkeys(target.tensors, "one.safetensors") | dict.fromkeys(target.added, "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "one.safetensors").write_text("not read")
    save_file({name: target.tensors[name] for name in target.added}, tmp_path / "two.safetensors")
    found, wanted = GumihoModel.from_pretrained(tmp_path).state_dict(), load(target).state_dict()
    assert all(tensor.equal(found[name].float()) for name, tensor in wanted.items())


def test_of_several_layers_the_first_one_drafts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = make_mtp_target("mimo_v2_flash", tmp_path)
    wanted = load(target).state_dict()
    others = {name.replace("mtp.layers.0", "mtp.layers.1"): -target.tensors[name] for name in target.added}
    save_file(target.tensors | others, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.1, "do_sample": true}')
    drafter = load(target)
    assert all(tensor.equal(wanted[name]) for name, tensor in drafter.state_dict().items())
    assert "has 2 MTP layers. The first one drafts all tokens" in caplog.text
    # The target's settings are not the drafter's.
    assert drafter.generation_config.temperature != 0.1


@pytest.mark.parametrize("per", ["block", "row", "matrix"])
def test_eight_bits_are_multiplied_by_their_scales(per: str, tmp_path: Path) -> None:
    target = make_mtp_target("deepseek_v3", tmp_path)
    exact, quantized = dict(target.tensors), dict(target.tensors)
    block = {"block": (24, 16), "row": (1, 10**6), "matrix": (10**6, 10**6)}[per]
    for name in [name for name in target.added if name.endswith("proj.weight")]:
        rows, columns = target.tensors[name].shape
        shape = -(-rows // block[0]), -(-columns // block[1])
        scales = torch.rand(shape) + 0.5
        of_all = scales.repeat_interleave(block[0], 0)[:rows] if per != "matrix" else scales
        of_all = of_all.repeat_interleave(block[1], 1)[:, :columns] if per == "block" else of_all
        quantized[name] = target.tensors[name].to(torch.float8_e4m3fn)
        quantized[f"{name}_scale_inv" if per == "block" else f"{name}_scale"] = scales
        exact[name] = (quantized[name].float() * of_all).to(torch.bfloat16)
    write_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [24, 16]})
    found = []
    for tensors in (exact, quantized):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found.append(GumihoModel.from_pretrained(tmp_path, dtype=torch.float32).state_dict())
    assert all(tensor.equal(found[1][name]) for name, tensor in found[0].items())


def change(target: MtpTarget, folder: Path, what: str) -> None:
    """Writes the target's checkpoint with a fault in the MTP layer."""
    tensors, prefix = dict(target.tensors), "model.layers.2."
    if what == "packed":
        tensors[f"{prefix}self_attn.o_proj.qweight"] = torch.zeros(2, 2, dtype=torch.int32)
    elif what == "no scales":
        tensors[f"{prefix}self_attn.o_proj.weight"] = tensors[f"{prefix}self_attn.o_proj.weight"].to(torch.float8_e5m2)
    elif what == "transposed":
        tensors[f"{prefix}eh_proj.weight"] = tensors[f"{prefix}eh_proj.weight"].T.contiguous()
    elif what == "missing":
        del tensors[f"{prefix}self_attn.o_proj.weight"]
    elif what == "no layer":
        tensors = {name: tensor for name, tensor in tensors.items() if name not in target.added}
    elif what == "other head":
        tensors[f"{prefix}shared_head.head.weight"] = torch.randn(VOCAB_SIZE, 32)
    shutil.copy(target.folder / "config.json", folder)
    if what == "own embedding":
        write_config(folder, mtp_use_dedicated_embeddings=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("packed", r"packed form \(.*o_proj.qweight\).*Name the original"),
        ("no scales", "o_proj.weight' .*has no scales"),
        ("transposed", r"further.*original(.|\n)*wrong shape: fc.weight is \(64, 32\), expected \(32, 64\)"),
        ("missing", r"further.*original(.|\n)*missing: .*self_attn.o_proj.weight"),
        ("no layer", "is not a Gumiho drafter.*target with MTP layers"),
        ("own embedding", r"a token embedding of their own \(`mtp_use_dedicated_embeddings`\)"),
        ("other head", "came with another output head than the target's"),
    ],
)
def test_faults_of_a_layer_are_named(what: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "right").mkdir()
    target = make_mtp_target("glm4_moe", tmp_path / "right")
    change(target, tmp_path, what)
    with pytest.raises(ValueError, match=message):
        target.model.generate(**prompts(5), max_new_tokens=4, assistant_model=str(tmp_path))
    target.model.config.name_or_path = str(tmp_path)
    if what == "no layer":
        with pytest.raises(ValueError, match=r"has no MTP layers.*Name the original model"):
            attach(target.model, "mtp")


def test_a_saved_layer_knows_the_output_head_that_it_came_with(tmp_path: Path) -> None:
    target = make_mtp_target("glm4_moe", tmp_path / "target")
    tensors = target.tensors | {"model.layers.2.shared_head.head.weight": target.tensors["lm_head.weight"].bfloat16()}
    save_file(tensors, target.folder / "model.safetensors", metadata={"format": "pt"})
    load(target).save_pretrained(tmp_path / "saved")
    saved = GumihoModel.from_pretrained(tmp_path / "saved")
    equals_plain(target.model, saved, **prompts(5), max_new_tokens=4)
    # Training further changes it a little; another model has another one.
    other = copy.deepcopy(target.model)
    other.lm_head.weight.data += 0.01 * torch.randn(other.lm_head.weight.shape)
    equals_plain(other, saved, **prompts(5), max_new_tokens=4)
    other.lm_head.weight.data = torch.randn(other.lm_head.weight.shape)
    with pytest.raises(ValueError, match="came with another output head than the target's"):
        copy.deepcopy(other).generate(**prompts(5), max_new_tokens=4, assistant_model=saved)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "step3p7", "longcat_flash"])
def test_layers_of_other_kinds_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_hidden_layers": 2}))
    save_file({"model.layers.2.eh_proj.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"not available here: those of the type '{model_type}'"):
        GumihoModel.from_pretrained(tmp_path)


def test_a_layer_of_an_untested_type_is_read_as_similar_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_mtp_target("glm4_moe", tmp_path)
    wanted = load(target).state_dict()
    monkeypatch.delitem(mtp_layouts.FAMILIES, "glm4_moe")
    mtp_layouts.logger.warning_once.cache_clear()
    found = load(target).state_dict()
    assert all(tensor.equal(found[name]) for name, tensor in wanted.items())
    assert "was not tested for the type 'glm4_moe'" in caplog.text


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_transformers_own_layers_compute_the_same(model_type: str, tmp_path: Path) -> None:
    target = make_mtp_target(model_type, tmp_path)
    # It looks for the tensors that the model ignores, which are those of the published sizes.
    with mock.patch.object(target.model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"]):
        theirs = MtpModel.from_pretrained(target.model)
    drafter = load(target)
    drafter.share_embedding(target.model)
    ids, states = torch.randint(1, VOCAB_SIZE, (1, 9)), torch.randn(1, 9, 32)
    positions = torch.arange(9)[None]
    with torch.no_grad():
        wanted = theirs.forward_layer(0, states, positions, None, input_ids=ids)
        torch.testing.assert_close(drafter(ids, states).serial_features, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mtp", "eagle", "block"])
def test_a_drafter_that_drafts_next_to_nothing_is_named_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "mtp":
        model = make_mtp_target("glm4_moe", tmp_path).model
    elif kind == "eagle":
        head, model = make_head(is_eagle3=False), make_eagle_target()
        write_head(tmp_path, head, llama_fields(head))
    else:
        block, model = make_block_drafter(), make_block_target()
        write_block_drafter(tmp_path, block, zlab(block))
    drafter = GumihoModel.from_pretrained(tmp_path, dtype=model.dtype)
    # The target hardly ever says this token.
    drafter.generation_config.update(break_even=0.01, branching_factor=1, draft_vocabulary=[1], tree_depth=2)
    for _ in range(3):
        model.generate(**prompts(5), max_new_tokens=40, do_sample=True, assistant_model=drafter)
    assert caplog.text.count("drafts next to nothing") == 1
    assert str(tmp_path) in caplog.text


def test_of_experts_those_of_one_token_count(tmp_path: Path) -> None:
    estimates = []
    for num_experts in (4, 64):
        target = make_mtp_target("glm4_moe", tmp_path / str(num_experts), n_routed_experts=num_experts)
        drafter = load(target)
        settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None, 1, "cpu")
        estimates.append(estimate_break_even(target.model, drafter, settings, 1))
    # The routers alone grow.
    assert abs(estimates[0] - estimates[1]) < 0.2


def test_every_command_takes_the_targets_own_layers(tmp_path: Path) -> None:
    target = make_mtp_target("glm4_moe", tmp_path / "target")
    before = {path.name: path.read_bytes() for path in target.folder.iterdir()}
    args = AttachArguments(target=str(target.folder), drafter="mtp", output_dir=str(tmp_path / "served"))
    assert "drafts with mtp" in write_served_target(args)
    call = prompts(6) | {"max_new_tokens": 12, "do_sample": False}
    # The folder's own code imports this package.
    code = f"""
import torch, transformers
served = transformers.AutoModelForCausalLM.from_pretrained(
    {str(tmp_path / "served")!r}, attn_implementation="eager", dtype=torch.float32, trust_remote_code=True)
served.generation_config.update(pad_token_id=0, eos_token_id=None)
output = served.generate(torch.tensor({call["input_ids"].tolist()}), max_new_tokens=12, do_sample=False,
    return_dict_in_generate=True)
print(output.sequences.tolist(), len(output.accepted_lengths))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == f"{target.model.generate(**call).tolist()} 1"
    for assistant in ("mtp", str(target.folder)):
        with pytest.raises(ValueError, match=r"has no folder of its own\. Give --output_dir"):
            tune(TuningArguments(target=str(target.folder), assistant=assistant))
    with pytest.raises(ValueError, match="stay as they are"):
        tune(TuningArguments(target=str(target.folder), assistant="mtp", output_dir=str(target.folder)))
    assert {path.name: path.read_bytes() for path in target.folder.iterdir()} == before
