"""The plug-in for vLLM, without vLLM: when it steps aside, what it takes for a drafter, and what its loader reads."""

import copy
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from block import make_block_model
from checkpoints import LLAMA_FIELDS, VLLM_FIELDS
from eagle import llama_fields, make_head, write_head
from hub_cache import write_to_hub_cache
from targets import make_drafter, make_target
from vllm_reader import expected_shapes, read_config, read_names

import transformers_gumiho
import transformers_gumiho_vllm as plugin
from transformers_gumiho import GumihoModel
from transformers_gumiho.vllm.chain import ChainParts
from transformers_gumiho.vllm.checkpoint import (
    EMBEDDING,
    FUSION,
    copy_tensor,
    drafter_name,
    expected_names,
    is_readable,
)
from transformers_gumiho.vllm.contract import SIGNATURES, check_signatures


ROOT = Path(__file__).parents[2]


class Registry:
    def __init__(self) -> None:
        self.models: dict[str, Any] = {"LlamaForCausalLM": "vllm's"}

    def register_model(self, name: str, model: str) -> None:
        self.models[name] = model


def with_parameters(names: str) -> Callable[..., Any]:
    """Returns a function with these parameters; those after `...` may be left out."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    needed, _, optional = names.partition("...")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in needed.split()]
    parameters += [inspect.Parameter(name, kind, default=None) for name in optional.split()]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def stand_in(owner: str) -> Any:
    """Returns a class or a function with what the plug-in needs of vLLM's."""
    if owner in SIGNATURES:
        function = with_parameters(SIGNATURES[owner])
        function.__name__ = owner
        return function
    methods = {name.partition(".")[2]: names for name, names in SIGNATURES.items() if name.startswith(f"{owner}.")}
    return type(owner, (), {method: with_parameters(names) for method, names in methods.items()})


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of vLLM as the plug-in touches before a drafter is asked for."""
    modules = {name: ModuleType(name) for name in (
        "vllm", "vllm.config", "vllm.config.model", "vllm.model_executor", "vllm.model_executor.models",
        "vllm.model_executor.models.registry", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched",
        "vllm.v1.core.sched.scheduler", "vllm.v1.spec_decode", "vllm.v1.spec_decode.eagle",
    )}  # fmt: skip
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    modules["vllm"].__version__ = "0.32.0"
    modules["vllm.config.model"].get_config = lambda model, *args, **kwargs: f"vllm's config of {model}"
    registry = Registry()
    modules["vllm.model_executor.models.registry"].ModelRegistry = registry

    class EagleProposer(stand_in("EagleProposer")):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any = None, runner: Any = None) -> None:
            self.vllm_config = vllm_config

    modules["vllm.v1.spec_decode.eagle"].EagleProposer = EagleProposer

    class Scheduler:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

        def make_spec_decoding_stats(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int) -> Any:
            return stats, num_draft_tokens, num_accepted_tokens

    modules["vllm.v1.core.sched.scheduler"].Scheduler = Scheduler
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return SimpleNamespace(
        package=modules["vllm"], config=modules["vllm.config.model"], registry=registry, eagle=EagleProposer,
        scheduler=Scheduler,
    )  # fmt: skip


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, names: dict[str, Any]) -> None:
    """Puts a module with these names in the place of another."""
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


def with_drafter(architecture: str) -> Any:
    drafter = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=drafter))


def write_config(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_the_entry_point_is_the_function() -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    assert EntryPoint("gumiho", value, "vllm.general_plugins").load() is plugin.register


def test_the_entry_point_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; import transformers_gumiho_vllm; print([name for name in ('torch', 'transformers', 'transformers_gumiho') if name in sys.modules])"  # noqa: E501
    path = str(Path(transformers_gumiho.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True, capture_output=True)
    assert done.stdout.strip() == b"[]"


def test_a_tested_release_gets_the_model_and_the_classes(vllm: SimpleNamespace, tmp_path: Path) -> None:
    for _ in range(2):
        plugin.register()
    module, name = vllm.registry.models[plugin.ARCHITECTURE].split(":")
    assert f"class {name}(" in (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
    # A drafter of another kind gets vLLM's own class, and another model vLLM's own config.
    other = vllm.eagle(vllm_config=with_drafter("EagleLlamaForCausalLM"))
    assert type(other) is vllm.eagle
    assert other.vllm_config is not None
    target = write_config(tmp_path / "gumiho-target", {"model_type": "llama"})
    assert vllm.config.get_config(target, False) == f"vllm's config of {target}"


def test_our_drafters_get_our_class(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class GumihoProposer(vllm.eagle):  # type: ignore[name-defined, misc]
        pass

    put_module(monkeypatch, "transformers_gumiho.vllm.proposer", {"GumihoProposer": GumihoProposer})
    plugin.register()
    assert type(vllm.eagle(with_drafter(plugin.ARCHITECTURE))) is GumihoProposer


@pytest.mark.parametrize(
    ("architecture", "accepted", "num_warnings"),
    [
        (plugin.ARCHITECTURE, [0] * 299, 0),
        (plugin.ARCHITECTURE, [0] * 900, 1),
        (plugin.ARCHITECTURE, [1, *[0] * 9] * 90, 0),
        (plugin.ARCHITECTURE, [3] * 3000 + [0] * 300, 1),  # requests grow longer than the drafter's positions
        ("EagleLlamaForCausalLM", [0] * 900, 0),
    ],
)
def test_drafts_that_are_never_accepted_are_said_once(
    vllm: SimpleNamespace, architecture: str, accepted: list[int], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        plugin.register()
    scheduler = vllm.scheduler(with_drafter(architecture))
    for count in accepted:
        counted = scheduler.make_spec_decoding_stats("stats", num_draft_tokens=4, num_accepted_tokens=count)
        assert counted == ("stats", 4, count)
    assert len(caplog.messages) == num_warnings
    assert all("accepted 0 tokens of 300 drafts" in message for message in caplog.messages)


@pytest.mark.parametrize("has_class", [True, False])
def test_a_module_that_is_imported_later_is_changed_where_it_has_the_class(
    has_class: bool, vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    del sys.modules["vllm.v1.spec_decode.eagle"]
    (tmp_path / "eagle.py").write_text(f"class {'EagleProposer' if has_class else 'Other'}:\n    pass\n")
    monkeypatch.setattr(sys.modules["vllm.v1.spec_decode"], "__path__", [str(tmp_path)])
    plugin.register()
    names = vars(importlib.import_module("vllm.v1.spec_decode.eagle"))
    assert ("__new__" in vars(names["EagleProposer" if has_class else "Other"])) == has_class
    found = ["does not fit this vLLM" in message for message in caplog.messages]
    assert found == ([] if has_class else [True])


def test_an_object_is_copied_and_made_without_a_drafter(vllm: SimpleNamespace) -> None:
    plugin.register()
    without = vllm.eagle(SimpleNamespace(speculative_config=None))
    assert type(copy.copy(without)) is vllm.eagle
    assert type(vllm.eagle.__new__(vllm.eagle)) is vllm.eagle


def test_of_a_model_that_vllm_reads_nothing_else_is_fetched(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[tuple[str, Any, Any]] = []

    def hf_hub_download(repo: str, file: str, revision: Any = None, token: Any = None) -> str:
        fetched.append((repo, revision, token))
        raise OSError("not found")

    def refuse(model: str, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"vllm's error for {model}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    plain = vllm.config.get_config
    plugin.register()
    assert vllm.config.get_config("other/model", False, token="secret") == plain("other/model")
    assert fetched == []
    vllm.config.get_config = refuse
    plugin.register()
    with pytest.raises(ValueError, match="vllm's error for other/model"):
        vllm.config.get_config("other/model", False, "v1", token="secret")
    assert fetched == [("other/model", "v1", "secret")]


@pytest.mark.parametrize("known_to_transformers", [False, True])
def test_a_drafter_on_the_hub_by_any_name(
    known_to_transformers: bool, vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_config(model: str, *args: Any, **kwargs: Any) -> Any:
        if known_to_transformers:
            return SimpleNamespace(model_type="gumiho")
        raise ValueError("unknown type")

    def read_drafter(model: str, revision: Any, token: Any) -> Any:
        return model, revision, token

    put_module(monkeypatch, "transformers_gumiho.vllm.configuration", {"read_drafter": read_drafter})
    folder = write_config(tmp_path, {"model_type": "gumiho"})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file, **options: str(folder / file))
    vllm.config.get_config = get_config
    plugin.register()
    assert vllm.config.get_config("some/name", False, "v1", token="secret") == ("some/name", "v1", "secret")


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (None, "`EagleProposer.set_inputs_first_pass` is missing. Use vLLM 0.31 or"),
        (with_parameters("self num_tokens"), "has no parameter `target_hidden_states`"),
        (with_parameters("target_hidden_states self"), r"in another order \(target_hidden_states, self\)"),
        (with_parameters("self target_hidden_states another"), ""),  # they are passed on
    ],
)
def test_methods_of_vllm_that_differ_are_named(now: Any, message: str) -> None:
    for owner in {name.partition(".")[0] for name in SIGNATURES}:
        check_signatures(stand_in(owner))
    changed = stand_in("EagleProposer")
    changed.set_inputs_first_pass = now
    if not message:
        check_signatures(changed)
        return
    with pytest.raises(ImportError, match=f"does not fit this vLLM: .*{message}"):
        check_signatures(changed)


def test_parameters_that_the_plugin_does_not_give_are_named() -> None:
    changed = stand_in("EagleSpeculator")
    changed.capture = with_parameters("self ... stream")
    check_signatures(changed)
    changed.capture = with_parameters("self stream")
    with pytest.raises(ImportError, match=r"`EagleSpeculator\.capture` needs `stream` as well"):
        check_signatures(changed)


def test_that_a_release_was_not_tested_is_said_once_to_those_who_draft(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"read_drafter": lambda model, **options: "ours"}
    put_module(monkeypatch, "transformers_gumiho.vllm.configuration", names)
    vllm.package.__version__ = "0.40.0"
    plugin.register()
    vllm.config.get_config("other/model", False)
    assert caplog.records == []
    for _ in range(2):
        assert vllm.config.get_config(write_config(tmp_path, {"model_type": "gumiho"}), False) == "ours"
    assert ["has not been tested with vLLM 0.40.0" in record.getMessage() for record in caplog.records] == [True]


def test_a_vllm_with_gumiho_of_its_own_is_left_alone(
    vllm: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.registry.models["GumihoLlamaForCausalLM"] = "vllm's"
    plugin.register()
    assert ["This vLLM has Gumiho itself" in record.getMessage() for record in caplog.records] == [True]
    assert plugin.ARCHITECTURE not in vllm.registry.models
    drafter = write_config(tmp_path, {"model_type": "gumiho"})
    assert vllm.config.get_config(drafter, False) == f"vllm's config of {drafter}"


def test_a_vllm_that_is_made_otherwise_goes_on(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    del vllm.config.get_config
    plugin.register()
    assert [re.search("does not fit this vLLM", record.getMessage()) is None for record in caplog.records] == [False]


def test_drafters_are_known_by_their_config_or_as_released(tmp_path: Path) -> None:
    assert plugin.is_drafter(ROOT / "examples" / "demo_pair" / "gumiho")
    assert not plugin.is_drafter(ROOT / "examples" / "demo_pair" / "target")
    assert plugin.is_drafter(write_config(tmp_path / "a", VLLM_FIELDS))
    assert not plugin.is_drafter(write_config(tmp_path / "gumiho-a", LLAMA_FIELDS))
    assert plugin.is_drafter(write_config(tmp_path / "Gumiho-llama3-8b", LLAMA_FIELDS))
    (tmp_path / "weights").write_text("")
    assert plugin.is_drafter(write_to_hub_cache(tmp_path, "amd/Gumiho-vicuna-7b", [tmp_path / "weights"]))
    assert not plugin.is_drafter(tmp_path / "nothing")


@pytest.mark.parametrize(
    "overrides",
    [{}, {"gumiho_fc_bias": False}, {"attention_bias": True, "mlp_bias": True}, {"num_hidden_layers": 3}],
    ids=str,
)
def test_the_loader_expects_what_vllm_reads(overrides: dict[str, Any], tmp_path: Path) -> None:
    drafter = GumihoModel.from_target(make_target(num_layers=3), **overrides)
    drafter.save_pretrained(tmp_path)
    fields = read_config(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    for num_tokens in range(1, 8):
        read, dropped = read_names(shapes, fields, num_tokens)
        chain = ChainParts.of_drafter(SimpleNamespace(**fields), num_tokens)
        names = expected_names(SimpleNamespace(**fields), chain)
        assert names == set(read) - {EMBEDDING} == set(expected_shapes(fields, num_tokens)) - {EMBEDDING}
        assert all(int(name.split(".")[1]) >= chain.num_heads for name in dropped)


def load(name: str, monkeypatch: pytest.MonkeyPatch, stubs: dict[str, Any]) -> Any:
    """Executes a module of the package for itself; `stubs` gives the names that it imports, by their modules."""
    for stub, names in stubs.items():
        put_module(monkeypatch, stub, names)
    spec = importlib.util.find_spec(f"transformers_gumiho.vllm.{name}")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class EAGLEConfig:
    def __init__(self, model: Any, method: Any = None, **kwargs: Any) -> None:
        vars(self).update(kwargs, model=model)


@pytest.fixture
def read_drafter(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Returns the config of a drafter's folder that vLLM would carry."""
    stubs: dict[str, Any] = {name: {} for name in ("vllm.transformers_utils", "vllm.transformers_utils.configs")}
    stubs |= {"vllm.transformers_utils.configs.eagle": {"EAGLEConfig": EAGLEConfig}}
    return load("configuration", monkeypatch, stubs).read_drafter


def test_widths_that_differ_are_refused(tmp_path: Path, read_drafter: Callable[[Path], Any]) -> None:
    GumihoModel.from_target(make_target(num_layers=3), hidden_size=64, embedding_size=32).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"embeddings of width 32 and states of width 64, and vLLM's .* Decode with it"
    ):
        read_drafter(tmp_path)


def test_block_drafters_are_refused_with_their_method(tmp_path: Path, read_drafter: Callable[[Path], Any]) -> None:
    for method, rank in (("dflash", 0), ("dspark", 4)):
        make_block_model(make_target(num_layers=3), markov_rank=rank).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=rf'is a block drafter\. vLLM serves it itself.* `"method": "{method}"`'):
            read_drafter(tmp_path)


def test_a_damaged_file_of_settings_is_none_that_is_missing(
    tmp_path: Path, read_drafter: Callable[[Path], Any]
) -> None:
    GumihoModel.from_target(make_target(num_layers=3)).save_pretrained(tmp_path)
    settings = tmp_path / "generation_config.json"
    for text in ('{"draft_vocabulary": [1, 2', "[1]"):
        settings.write_text(text)
        with pytest.raises(OSError, match=r"`generation_config\.json` of .* is damaged: it holds no JSON object"):
            read_drafter(tmp_path)
    settings.unlink()
    assert read_drafter(tmp_path).draft_vocabulary is None


@pytest.mark.parametrize("num_heads", [0, 2])
@pytest.mark.parametrize(("is_eagle3", "method"), [(False, "eagle"), (True, "eagle3")])
def test_saved_eagle_heads_are_refused_with_the_name_of_the_original(
    is_eagle3: bool, method: str, num_heads: int, tmp_path: Path, read_drafter: Callable[[Path], Any]
) -> None:
    head = make_head(is_eagle3)
    fields = llama_fields(head) | ({"draft_vocab_size": None} if is_eagle3 else {})
    original = write_head(tmp_path / "original", head, fields)
    GumihoModel.from_pretrained(original, num_parallel_heads=num_heads).save_pretrained(tmp_path / "saved")
    assert plugin.is_drafter(tmp_path / "saved")
    assert not plugin.is_drafter(original)
    what = "with parallel heads" if num_heads else "that was saved for transformers"
    way_out = f'serves EAGLE heads itself: give it {str(original)!r} as `model`, with `"method": "{method}"`.'
    with pytest.raises(ValueError, match=re.escape(f"is an EAGLE head {what}. vLLM {way_out}")):
        read_drafter(tmp_path / "saved")


def test_layers_of_the_target_are_counted_as_vllm_does(tmp_path: Path, read_drafter: Callable[[Path], Any]) -> None:
    GumihoModel.from_target(make_target(num_layers=3), target_layer_ids=[0, -1]).save_pretrained(tmp_path / "several")
    GumihoModel.from_target(make_target(num_layers=3)).save_pretrained(tmp_path / "last")
    config = read_drafter(tmp_path / "several")
    assert (config.target_layer_ids, config.eagle_aux_hidden_state_layer_ids) == ([0, 2], [1, 3])
    config = read_drafter(tmp_path / "last")
    assert config.target_layer_ids is None
    assert not hasattr(config, "eagle_aux_hidden_state_layer_ids")


def test_a_checkpoint_holds_what_its_config_has_a_place_for() -> None:
    drafter = GumihoModel.from_target(make_target(num_layers=3), transition_rank=4, target_layer_ids=[0, 1])
    fields = drafter.config.get_text_config().to_dict() | drafter.config.to_dict()
    config, plainer = SimpleNamespace(**fields), SimpleNamespace(**fields | {"target_layer_ids": None})
    saved = set(drafter.state_dict())
    assert expected_names(config, ChainParts(2, 5)) == saved - {EMBEDDING}
    # Of the five heads with transitions, a chain of five tokens reads three.
    unread = {name for name in saved for head in (3, 4) if name.startswith((f"mlp.{head}.", f"transition.{head}."))}
    assert expected_names(config, ChainParts(2, 3)) == saved - unread - {EMBEDDING}
    for name in (*saved, "mlp.9.5.linear.weight", "d2t"):
        assert is_readable(config, name)
        assert is_readable(plainer, name) == (name != FUSION)
    unknown = ("layers.0.self_attn.q_proj.bias", "layers.2.mlp.up_proj.weight", "mlp.0.6.linear.weight", "norm.weight")
    assert not any(is_readable(config, name) for name in unknown)


@pytest.fixture
def proposer(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A proposer without vLLM, with the config of the released drafters."""
    ours = load("proposer", monkeypatch, {
        "vllm.config": {"VllmConfig": object},
        "vllm.v1.sample": {},
        "vllm.v1.sample.metadata": {"SamplingMetadata": object},
    }).GumihoProposer  # fmt: skip
    proposer = object.__new__(ours)
    config = SimpleNamespace(num_serial_tokens=2, num_parallel_heads=5)
    proposer.draft_model_config = SimpleNamespace(hf_config=config)
    return proposer


def test_a_rank_without_requests_runs_the_passes_of_a_draft(vllm: SimpleNamespace, proposer: Any) -> None:
    passes: list[int] = []

    def dummy_run(proposer: Any, num_tokens: int, fails: bool = False) -> None:
        passes.append(proposer.num_speculative_tokens)
        if fails:
            raise RuntimeError

    vllm.eagle.dummy_run = dummy_run
    for num_tokens in (1, 2, 7):
        proposer.num_speculative_tokens = num_tokens
        proposer.dummy_run(3)
        with pytest.raises(RuntimeError):
            proposer.dummy_run(3, fails=True)
        assert proposer.num_speculative_tokens == num_tokens
    assert passes == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("prefix", ["", "model.", "model.model.", "mlp."])
def test_every_name_of_a_tensor_is_the_drafters_own(prefix: str) -> None:
    own = [
        name
        for name in make_drafter(make_target(num_layers=3)).state_dict()
        if prefix != "mlp." or name.startswith("mlp.")
    ]
    assert [drafter_name(prefix + name) for name in own] == own
    for name in ("lm_head.weight", "model.lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq"):
        assert drafter_name(name) is None


def test_chains_are_as_long_as_the_drafter_was_trained_for() -> None:
    config = SimpleNamespace(num_serial_tokens=2, num_parallel_heads=3)
    parts = [ChainParts.of_drafter(config, num_tokens) for num_tokens in range(6)]
    assert [(chain.num_serial_tokens, chain.num_heads) for chain in parts] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"is 6, but this Gumiho drafter drafts at most 5 tokens.*Ask for 5 or fewer"):
        ChainParts.of_drafter(config, 6)


def test_batched_heads_are_the_drafters_own() -> None:
    from transformers_gumiho.vllm.heads import BatchedHeads

    torch.manual_seed(0)
    drafter = make_drafter(make_target(num_layers=3)).float()
    heads = BatchedHeads(3, 32, 2, 5)
    tensors = drafter.state_dict()
    for name, place in heads.places().items():
        copy_tensor(name, tensors[name], place)
    inputs = torch.randn(4, 64)
    torch.testing.assert_close(heads(inputs), drafter.mlp(inputs[:, None])[:, :3, 0])
    with pytest.raises(ValueError, match=r"`mlp.0.1.linear.weight` has the shape \(2, 2\), expected \(32, 32\)"):
        copy_tensor("mlp.0.1.linear.weight", torch.zeros(2, 2), heads.places()["mlp.0.1.linear.weight"])


@pytest.mark.parametrize("token_ids", [None, torch.arange(60, 10, -1)])
def test_chains_follow_the_transitions(token_ids: torch.Tensor | None) -> None:
    from transformers_gumiho.model.transition import NUM_CANDIDATES
    from transformers_gumiho.vllm.transitions import ChainTransitions

    torch.manual_seed(0)
    embedding, output_head, bias = torch.randn(64, 32), torch.randn(64, 32), torch.randn(64)
    transitions = ChainTransitions(3, 32, 4)
    down, up = torch.randn(3, 4, 32), torch.randn(3, 32, 4)
    for name, place in transitions.places().items():
        copy_tensor(name, {"down": down, "up": up}[name[13:]][int(name[11])], place)
    transitions.adopt_output_head(lambda features: features @ output_head.T + bias)
    if token_ids is not None:
        transitions.keep_tokens(token_ids)
    kept = torch.arange(64) if token_ids is None else token_ids
    features, above = 40 * torch.randn(8, 3, 32), torch.arange(8)
    logits = (features @ output_head.T + bias)[..., kept]
    chains = transitions.best_candidates(logits, above, lambda tokens: embedding[tokens], token_ids)
    expected = []
    for head in range(3):
        moved = transitions.move(head, features[:, head], embedding[above])
        torch.testing.assert_close(moved, features[:, head] + embedding[above] @ down[head].T @ up[head].T)
        scores = (moved @ output_head.T)[:, kept]
        candidates = logits[:, head].topk(NUM_CANDIDATES).indices
        outside = torch.full_like(scores, -torch.inf).scatter(1, candidates, 0.0)
        above = kept[(scores + bias[kept] + outside).argmax(dim=1)]
        expected.append(above)
    assert torch.equal(chains, torch.stack(expected, dim=1))
    assert not torch.equal(chains, kept[logits.argmax(dim=-1)])
