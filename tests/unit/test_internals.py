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
from transformers import TrainingArguments

import transformers_gumiho
from transformers_gumiho import GumihoConfig, GumihoGenerationMixin, GumihoModel, internals
from transformers_gumiho.internals import OVERRIDDEN
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


ROOT = Path(transformers_gumiho.__file__).parent
RELEASES = f"transformers {transformers.__version__}, torch {torch.__version__}"
OVERRIDDEN_NAMES = {name for names in OVERRIDDEN.values() for name in names}

# What is called, replaced or overridden, with its first parameters.
SIGNATURES = {
    "transformers.GenerationMixin._validate_generation_mode": (
        "self, generation_mode, generation_config, generation_mode_kwargs"
    ),
    "transformers.GenerationMixin._assisted_decoding": (
        "self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, "
        "inputs_tensor, assistant_model, assistant_tokenizer, tokenizer"
    ),
    "transformers.GenerationMixin._extract_generation_mode_kwargs": (
        "self, custom_generate, kwargs, synced_gpus, assistant_model, streamer"
    ),
    "transformers.GenerationMixin._prepare_generation_config": "self, generation_config",
    "transformers.GenerationMixin._prepare_cache_for_generation": "self, generation_config, model_kwargs",
    "transformers.GenerationMixin._prefill": "self, input_ids, generation_config, model_kwargs",
    "transformers.GenerationMixin._valid_auto_compile_criteria": "self, model_kwargs, generation_config",
    "transformers.GenerationMixin._supports_default_dynamic_cache": "",
    "transformers.GenerationMixin.adjust_generation_fn": "self, generation_config, from_auto_class, from_pipeline",
    "transformers.PreTrainedModel._init_weights": "self, module",
    # What mixers call, for which the algebra of trees stands in.
    "transformers.models.qwen3_5.modeling_qwen3_5.causal_conv1d_fn": "hidden_states, weight, bias, activation",
    "transformers.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule": (
        "query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel"
    ),
    "transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention": (
        "query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel"
    ),
    "transformers.models.mamba2.modeling_mamba2.mamba2_chunk_scan": (
        "hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit"
    ),
    "transformers.cache_utils.LinearAttentionLayer.update_conv_state": "self, conv_states, state_idx",
    "transformers.cache_utils.LinearAttentionLayer.update_recurrent_state": "self, recurrent_states, state_idx",
    "transformers.PreTrainedModel.save_pretrained": "self, save_directory, is_main_process, state_dict, push_to_hub",
    "transformers.PreTrainedModel._upload_modified_files": "self, working_dir, repo_id, files_timestamps",
    "transformers.PreTrainedModel.should_save_on_this_rank": "self, is_main_process",
    "transformers.Trainer._get_num_items_in_batch": "self, batch_samples, device",
    "transformers.Trainer._get_eval_sampler": "self, eval_dataset",
    "transformers.Trainer._get_train_sampler": "self, train_dataset",
    "transformers.Trainer._prepare_inputs": "self, inputs",
    "transformers.Trainer._save_checkpoint": "self, model, trial",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping": (
        "model_type_or_class_name, mapping, overwrite"
    ),
    "transformers.core_model_loading.WeightRenaming": "source_patterns, target_patterns",
    "transformers.core_model_loading.WeightRenaming.reverse_transform": "self",
    "transformers.integrations.sdpa_attention.sdpa_attention_forward": (
        "module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias"
    ),
    "transformers.integrations.sdpa_attention.use_gqa_in_sdpa": "attention_mask, key, value",
    "transformers.modeling_utils.AttentionInterface.register": "key, value",
    "transformers.utils.output_capturing.capture_outputs": "func",
    "torch._dynamo.mark_static_address": "t, guard",
}


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


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signature(name: str) -> None:
    found = ", ".join(inspect.signature(find(name)).parameters)
    assert found.startswith(SIGNATURES[name]), f"{name} takes ({found}) in {RELEASES}, not ({SIGNATURES[name]}, ...)."


@pytest.mark.parametrize("name", [f"{owner}.{name}" for owner, names in OVERRIDDEN.items() for name in names])
def test_what_is_overridden_is_there_to_be_overridden(name: str) -> None:
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


def test_a_trainer_drives_one_device(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert args.n_gpu in (0, 1)
    args.__dict__["_n_gpu"] = 4
    assert args.n_gpu == 4
    internals.drive_one_device(args)
    assert args.n_gpu == 1
