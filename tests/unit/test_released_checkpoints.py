"""Released drafters, loaded by name from a cache of the Hub: with a config of either layout, and without one."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA_FIELDS, REPO, VLLM_FIELDS, make_weights, reference_shapes, write_weights
from hub_cache import COMMIT, note_missing, write_to_hub_cache
from safetensors.torch import load_file
from targets import equals_plain, make_target
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, LlamaConfig

from transformers_gumiho import DraftingSettings, GumihoConfig, GumihoModel
from transformers_gumiho.model import loading


# Hidden size, size of the feed-forward layers, heads, key-value heads, vocabulary, base of the rotary embedding,
# positions, and epsilon of the norms.
TABLE = {
    "amd/Gumiho-vicuna-7b": (4096, 11008, 32, 32, 32000, 10000.0, 2048, 1e-6),
    "amd/Gumiho-vicuna-13b": (5120, 13824, 40, 40, 32000, 10000.0, 4096, 1e-5),
    "amd/Gumiho-llama2-7b": (4096, 11008, 32, 32, 32000, 10000.0, 4096, 1e-6),
    "amd/Gumiho-llama2-13b": (5120, 13824, 40, 40, 32000, 10000.0, 4096, 1e-5),
    "amd/Gumiho-llama2-70b": (8192, 28672, 64, 8, 32000, 10000.0, 4096, 1e-5),
    "amd/Gumiho-llama3-8b": (4096, 14336, 32, 8, 128256, 500000.0, 2048, 1e-5),
    "amd/Gumiho-llama3-70b": (8192, 28672, 64, 8, 128256, 500000.0, 2048, 1e-5),
}

LAYOUTS = {"vllm": VLLM_FIELDS, "reference": LLAMA_FIELDS}

# How the tensors of a drafter are called elsewhere.
NAMINGS = {
    "released": lambda name: name,
    "prefix": lambda name: f"model.{name}",
    "two_prefixes": lambda name: f"model.model.{name}",
    "serial_head_only": lambda name: name if name.startswith("mlp.") else f"model.{name}",
    "training": lambda name: f"mlp.{name}" if name.startswith("mlp.") else name,
    "training_and_prefix": lambda name: f"model.mlp.{name}" if name.startswith("mlp.") else f"model.{name}",
}


def write_repository(
    cache_dir: Path,
    weights: dict[str, torch.Tensor],
    fields: dict[str, Any] | None = None,
    form: str = "bin",
    repo: str = REPO,
    **options: Any,
) -> Path:
    """Puts a repository with these weights, and with this config where there is one, into a cache of the Hub."""
    cache_dir.mkdir(exist_ok=True)
    files = write_weights(cache_dir, weights, form)
    if fields is not None:
        (cache_dir / "config.json").write_text(json.dumps(fields))
        files.append(cache_dir / "config.json")
    return write_to_hub_cache(cache_dir, repo, files, **options)


@pytest.fixture
def tiny_packaged_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts a tiny config in the place of the packaged one, and returns its settings."""
    folder = tmp_path / "packaged" / REPO.partition("/")[2]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(VLLM_FIELDS))
    settings = {"num_assistant_tokens": 21, "branching_factor": 3}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(loading, "_FOLDERS", (folder.parent,))
    return settings


def assert_loaded(model: GumihoModel, weights: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    llama = model.config.model
    assert (llama.hidden_size, llama.num_key_value_heads, llama.rms_norm_eps) == (32, 2, 1e-5)
    assert llama.rope_parameters == {"rope_theta": 500000.0, "rope_type": "default"}


@pytest.mark.parametrize("name", list(TABLE))
def test_packaged_configs_describe_the_released_tensors(name: str, tmp_path: Path) -> None:
    hidden, ffn, heads, kv_heads, vocab, theta, positions, eps = TABLE[name]
    note_missing(tmp_path, name, "config.json")
    write_to_hub_cache(tmp_path, name, [])
    config = GumihoConfig.from_pretrained(name, cache_dir=tmp_path)
    with torch.device("meta"):
        model = GumihoModel(config)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert shapes == reference_shapes(hidden, ffn, hidden // heads * kv_heads, vocab)
    llama = config.model
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (heads, kv_heads)
    assert llama.rope_parameters == {"rope_theta": theta, "rope_type": "default"}
    assert (llama.max_position_embeddings, llama.rms_norm_eps, llama.hidden_act) == (positions, eps, "silu")
    assert (config.num_serial_tokens, config.dtype) == (2, torch.float16)


def test_packaged_configs_are_those_of_the_table() -> None:
    assert set(loading.released_names()) == set(TABLE)


@pytest.mark.parametrize("noted", [True, False], ids=["noted_as_missing", "not_downloaded"])
def test_repository_without_a_config_gets_the_packaged_one(
    noted: bool, tmp_path: Path, tiny_packaged_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    weights = make_weights()
    snapshot = write_repository(tmp_path / "cache", weights)
    if noted:
        note_missing(tmp_path / "cache", REPO, "config.json")
    model = GumihoModel.from_pretrained(REPO, cache_dir=tmp_path / "cache")
    assert_loaded(model, weights)
    assert model.dtype == torch.float16
    assert model.name_or_path == REPO
    settings = model.generation_config.to_dict()
    assert settings.items() >= tiny_packaged_config.items()
    message = rf"'{REPO}' has no config\.json.*; the packaged one of Gumiho-llama3-8b is used\."
    assert any(re.fullmatch(message, logged) for logged in caplog.messages)
    # A copy that is called like the repository, and the folder that `snapshot_download` returns.
    for copy in (shutil.copytree(snapshot, tmp_path / "Gumiho-llama3-8b"), snapshot):
        assert_loaded(GumihoModel.from_pretrained(copy), weights)
    # A copy that is called otherwise, with the name of the drafter that it is.
    renamed = shutil.copytree(snapshot, tmp_path / "copy")
    assert_loaded(GumihoModel.from_pretrained(renamed, config=REPO), weights)


@pytest.mark.parametrize(
    ("naming", "form"),
    [*((naming, "bin") for naming in NAMINGS), ("prefix", "bin_sharded"), ("training_and_prefix", "safetensors")],
)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts_and_namings(layout: str, naming: str, form: str, tmp_path: Path) -> None:
    weights = make_weights()
    stored = {NAMINGS[naming](name): tensor for name, tensor in weights.items()}
    # Features are turned into tokens by the target's head.
    stored[NAMINGS[naming]("lm_head.weight")] = torch.ones(50, 32).half()
    stored["token_map"] = torch.tensor([4, 40, 7])
    write_repository(tmp_path / "cache", stored, LAYOUTS[layout], form)
    model, info = GumihoModel.from_pretrained(REPO, cache_dir=tmp_path / "cache", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_loaded(model, weights)
    assert model.dtype == torch.float16
    assert model.generation_config.draft_vocabulary == [4, 40, 7]
    # What is saved has the released names and our layout, whatever was loaded, and no storage that heads share.
    model.mlp.batched_weights()
    model.save_pretrained(tmp_path / "saved")
    saved, info = AutoModel.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert_loaded(saved, weights)
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == weights.keys()


def test_config_of_vllm_that_says_nothing_of_a_bias_has_none(tmp_path: Path) -> None:
    fields = {name: value for name, value in VLLM_FIELDS.items() if name != "gumiho_fc_bias"}
    weights = {name: tensor for name, tensor in make_weights().items() if name != "fc.bias"}
    write_repository(tmp_path, weights, fields)
    for loaded in (GumihoModel, AutoModel, AutoModelForCausalLM):
        assert loaded.from_pretrained(REPO, cache_dir=tmp_path).fc.bias is None
    assert type(AutoConfig.from_pretrained(REPO, cache_dir=tmp_path)) is GumihoConfig


@pytest.mark.parametrize("layout", ["vllm", "reference", None])
def test_options_keep_their_meaning(layout: str | None, tmp_path: Path, tiny_packaged_config: dict[str, Any]) -> None:
    cache_dir = tmp_path / "cache"
    fields = LAYOUTS[layout] if layout else None
    weights = {"main": make_weights(1), "v2": make_weights(2)}
    write_repository(cache_dir, weights["main"], fields)
    write_repository(cache_dir, weights["v2"], fields, revision="v2", commit="f" * 40)
    options: dict[str, Any] = {"cache_dir": cache_dir, "local_files_only": True}
    for revision, expected in (("main", "main"), ("v2", "v2"), ("f" * 40, "v2"), (COMMIT, "main")):
        assert_loaded(GumihoModel.from_pretrained(REPO, revision=revision, **options), weights[expected])
    device_map = dict.fromkeys(("fc", "layers", "rotary_emb", "mlp"), "cpu") | {"embed_tokens": "disk"}
    model = GumihoModel.from_pretrained(
        REPO, dtype=torch.bfloat16, device_map=device_map, offload_folder=tmp_path / "offload", **options
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.hf_device_map.keys() == device_map.keys()
    assert (model.embed_tokens.weight.device.type, model.fc.weight.device.type) == ("meta", "cpu")
    for absent in ({"revision": "v3"}, {"cache_dir": tmp_path / "empty"}):
        with pytest.raises(OSError, match=r"does not appear to have a file|couldn't connect|not find"):
            GumihoModel.from_pretrained(REPO, **options | absent)


def test_first_heads_are_used_where_fewer_are_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = make_target(vocab_size=50)
    weights = make_weights() | {"embed_tokens.weight": target.get_input_embeddings().weight.detach()}
    write_repository(tmp_path, {f"mlp.{k}" if k.startswith("mlp.") else k: v for k, v in weights.items()}, VLLM_FIELDS)
    model = GumihoModel.from_pretrained(REPO, cache_dir=tmp_path, num_parallel_heads=3, dtype=torch.float64)
    kept = {name for name in weights if not name.startswith(("mlp.3.", "mlp.4."))}
    assert model.state_dict().keys() == kept
    assert all(torch.equal(model.state_dict()[name], weights[name].double()) for name in kept)
    assert any("holds 5 parallel heads; the first 3 are used" in message for message in caplog.messages)
    settings = DraftingSettings.from_generation_config(model.generation_config, model.config, None)
    assert settings.tree_depth == 5
    equals_plain(target, model, max_new_tokens=16)


def test_repositories_of_other_models_are_refused(tmp_path: Path) -> None:
    for fields, message in (
        (GPT2Config().to_dict(), r"is not a Gumiho drafter: its config\.json has the model_type 'gpt2'"),
        (LLAMA_FIELDS | {"num_hidden_layers": 32}, r"is not a Gumiho drafter: .* a Llama of 32 layers"),
        ({"hidden_size": 32}, r"is not a Gumiho drafter: its config\.json has the model_type None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        for load in (GumihoConfig.from_pretrained, GumihoModel.from_pretrained):
            with pytest.raises(ValueError, match=message):
                load(tmp_path)


def test_layers_are_those_of_the_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever number was copied from the target's config."""
    write_weights(tmp_path, make_weights())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_FIELDS | {"num_hidden_layers": 36}))
    assert len(GumihoModel.from_pretrained(tmp_path).layers) == 2
    assert any("`num_hidden_layers` is 36, and the weights have 2" in message for message in caplog.messages)


def test_language_models_of_few_layers_are_told_by_their_tensors(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_FIELDS)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not a Gumiho drafter: its tensors are a language model's"):
        GumihoModel.from_pretrained(tmp_path)
    # A config of your own says that they are a drafter's.
    config = GumihoConfig.from_target(LlamaConfig(**LLAMA_FIELDS))
    with pytest.raises(ValueError, match=r"it has no `fc`.*\nmissing: fc\.bias, .* and \d+ more"):
        GumihoModel.from_pretrained(tmp_path, config=config)


def test_folders_without_a_config_are_refused(tmp_path: Path) -> None:
    write_weights(tmp_path, make_weights())
    for load in (GumihoConfig.from_pretrained, GumihoModel.from_pretrained):
        with pytest.raises(OSError, match=r"has no config\.json, .* amd/Gumiho-llama2-13b, .* Pass `config=`"):
            load(tmp_path)
    theirs = REPO.replace("amd/", "someone/")
    write_repository(tmp_path / "cache", make_weights(), repo=theirs)
    note_missing(tmp_path / "cache", theirs, "config.json")
    with pytest.raises(OSError, match=rf"'{theirs}' has no config\.json.* Pass `config=`"):
        GumihoModel.from_pretrained(theirs, cache_dir=tmp_path / "cache")


def test_drafter_of_another_owner_is_none_of_the_released_ones(tmp_path: Path) -> None:
    """Whatever its name is: its own config counts, with the settings that go with it."""
    theirs = REPO.replace("amd/", "someone/")
    weights = {name: tensor for name, tensor in make_weights().items() if not name.startswith(("mlp.3.", "mlp.4."))}
    write_repository(tmp_path, weights, VLLM_FIELDS | {"num_parallel_heads": 3}, repo=theirs)
    drafter = GumihoModel.from_pretrained(theirs, cache_dir=tmp_path)
    assert drafter.generation_config.tree_depth is None  # the settings of a released drafter would have 7


def test_a_released_config_is_saved_without_fields_that_it_does_not_have(tmp_path: Path) -> None:
    config = GumihoConfig.from_pretrained("amd/Gumiho-vicuna-7b")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.keys().isdisjoint({"embedding_size", "target_layer_ids"})
    config.target_layer_ids = [0, 31]
    assert config.to_dict()["target_layer_ids"] == [0, 31]
