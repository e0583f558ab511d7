"""
The undocumented names that the package relies on exist, and do what they are used for, in the installed releases.

A failure here means that a release of transformers, accelerate, datasets or PyTorch has moved something, and
`transformers_gumiho/internals.py` is the place to follow it.
"""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from targets import make_drafter, make_target
from torch import nn
from transformers import DynamicCache, GenerationConfig, StaticCache, TrainingArguments

import transformers_gumiho
from transformers_gumiho import GumihoConfig, GumihoGenerationMixin, GumihoModel, internals
from transformers_gumiho.generation.verification.traits import cache_argument
from transformers_gumiho.internals import CACHE_NAME, OVERRIDDEN
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


ROOT = Path(transformers_gumiho.__file__).parent
RELEASES = f"transformers {transformers.__version__}, torch {torch.__version__}"
OVERRIDDEN_NAMES = {name for names in OVERRIDDEN.values() for name in names}

# What is called or replaced, beside what classes override.
RELIED_ON = {
    "transformers.GenerationMixin": (
        "_validate_generation_mode", "_assisted_decoding", "_extract_generation_mode_kwargs", "_prefill", "_sample",
        "_prepare_generation_config", "_prepare_cache_for_generation", "_valid_auto_compile_criteria",
        "_supports_default_dynamic_cache", "_update_model_kwargs_for_generation", "adjust_generation_fn",
        "_get_logits_processor",
    ),
    # What mixers call, for which the algebra of trees stands in.
    "transformers.models.qwen3_5.modeling_qwen3_5": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "transformers.models.kimi_linear.modeling_kimi_linear": ("chunk_kimi_delta_attention",),
    "transformers.models.mamba2.modeling_mamba2": ("mamba2_chunk_scan",),
    "transformers.cache_utils.LinearAttentionLayer": ("update_conv_state", "update_recurrent_state"),
    "transformers.conversion_mapping": ("register_checkpoint_conversion_mapping",),
    "transformers.core_model_loading.WeightRenaming": ("reverse_transform",),
    "transformers.integrations.sdpa_attention": ("sdpa_attention_forward", "use_gqa_in_sdpa"),
    "transformers.modeling_utils.AttentionInterface": ("register",),
    "transformers.utils.output_capturing": ("capture_outputs",),
    "torch._dynamo": ("mark_static_address",),
}  # fmt: skip


def find(name: str) -> Any:
    """Returns what a dotted name stands for, and fails where there is no such thing."""
    owner, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name) if not owner else getattr(find(owner), last)
    except AttributeError:
        pass
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.fail(f"{RELEASES} has no {name} any more, which `transformers_gumiho.internals` relies on.")


@pytest.mark.parametrize(
    "name", [f"{owner}.{name}" for owner, names in (OVERRIDDEN | RELIED_ON).items() for name in names]
)
def test_what_is_called_or_overridden_is_there(name: str) -> None:
    find(name)


def test_no_other_module_names_anything_private() -> None:
    """Neither by attribute, nor by import, nor as a string."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    used: dict[str, str] = {}
    own: set[str] = set()
    for path, tree in trees.items():
        if path.stem == "internals":
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
            elif isinstance(node, ast.Attribute):
                used[node.attr] = path.name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used |= dict.fromkeys([*node.module.split("."), *(name.name for name in node.names)], path.name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
                used |= {name.value: path.name for name in node.args if isinstance(name, ast.Constant)}
    private = {name for name in used if re.fullmatch(r"_[a-z][a-z0-9_]*", str(name))}
    foreign = private - own - OVERRIDDEN_NAMES
    assert not foreign, {name: used[name] for name in foreign}


def test_private_names_that_classes_override_are_listed() -> None:
    for ours in (GumihoModel, GumihoConfig, GumihoGenerationMixin, GumihoTrainer, GumihoTrainingArguments):
        inside = [base for base in ours.__mro__ if base.__module__.startswith("transformers_gumiho.")]
        outside = [base for base in ours.__mro__ if base.__module__.startswith("transformers.")]
        for base in inside:
            source = ast.parse(textwrap.dedent(inspect.getsource(base)))
            written = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
            written |= {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
            private = {name for name in written if re.match("_[a-z]", name)}
            assert {name for name in private if any(hasattr(o, name) for o in outside)} <= OVERRIDDEN_NAMES


def test_importing_replaces_three_steps_and_nothing_else() -> None:
    """Of all classes and functions that other models run. Nothing of vLLM is imported."""
    script = """
import sys
import transformers
from transformers import AttentionInterface, LlamaForCausalLM, LlamaModel
from transformers.generation import GenerationMixin
from transformers.models.llama import modeling_llama

def state():
    kinds = (*LlamaForCausalLM.__mro__[:-1], LlamaModel)
    found = {(kind.__name__, name): value for kind in kinds for name, value in vars(kind).items()}
    found |= {("attention", name): value for name, value in AttentionInterface._global_mapping.items()}
    return found | {("file", name): value for name, value in vars(modeling_llama).items()}

before = state()
import transformers_gumiho
after = state()
print(*sorted(".".join(name) for name in before | after if before.get(name) is not after.get(name)))
print(*(name for name in sys.modules if "vllm" in name))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    steps = ["_assisted_decoding", "_validate_generation_mode", "adjust_generation_fn"]
    assert run.stdout.split() == [f"GenerationMixin.{name}" for name in steps]


def test_only_what_may_be_compiled_on_this_device_is() -> None:
    target = make_target(num_layers=3)
    cache = StaticCache(config=target.config, max_cache_len=8)
    anywhere = GenerationConfig(compile_config=internals.compile_on_every_device())
    assert internals.would_compile(target, {CACHE_NAME: cache}, anywhere)
    assert not internals.would_compile(target, {CACHE_NAME: cache}, GenerationConfig())
    assert not internals.would_compile(target, {CACHE_NAME: DynamicCache()}, anywhere)


def test_what_a_target_keeps_of_its_context() -> None:
    llama = make_target(num_layers=3)
    assert internals.keeps_dynamic_cache(llama)
    assert not internals.is_stateful(llama)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9))
    assert internals.is_stateful(mamba)
    for target in (llama, mamba):
        name = cache_argument(target)
        output = target.generate(torch.tensor([[1, 2]]), max_new_tokens=2, return_dict_in_generate=True)
        assert output[CACHE_NAME] is not None
        target(torch.tensor([[1, 2]]), **{name: output[CACHE_NAME]})


def test_hooks_show() -> None:
    linear = nn.Linear(2, 2)
    assert internals.runs_as_defined(linear)
    for register in (linear.register_forward_hook, linear.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert internals.num_hooks(linear) == 1
        assert not internals.runs_as_defined(linear)
        handle.remove()
    assert internals.runs_as_defined(linear)
    assert not internals.has_placement_hook(linear)
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu"))
    assert internals.has_placement_hook(linear)
    assert not internals.runs_as_defined(linear)


def test_loaded_parameters_are_told_from_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafter(make_target(num_layers=3)).save_pretrained(tmp_path)
    found = {}

    def initialize(self: GumihoModel, module: nn.Module) -> None:
        found.update({name: internals.was_loaded(p) for name, p in self.named_parameters()})

    monkeypatch.setattr(GumihoModel, "_init_weights", initialize)
    GumihoModel.from_pretrained(tmp_path, target_layer_ids=[0, 2])
    assert [name for name, is_loaded in found.items() if not is_loaded] == ["layer_fusion.weight"]


def test_a_trainer_drives_one_device(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert args.n_gpu in (0, 1)
    args.__dict__["_n_gpu"] = 4
    assert args.n_gpu == 4
    internals.drive_one_device(args)
    assert args.n_gpu == 1
