"""
Every private or patched name of transformers, accelerate, datasets and PyTorch that this package uses.

Each name occurs here, once, with the reason; other modules import the function or the constant. So an upgrade of those
libraries can break only this file, and `tests/unit/test_internals.py` shows what breaks.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_map as map_tree  # noqa: F401
from transformers import CompileConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    register_checkpoint_conversion_mapping as register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming as WeightRenaming
from transformers.generation import GenerationMixin
from transformers.integrations import sdpa_attention as _sdpa
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa as use_gqa_in_sdpa
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface
from transformers.utils import is_torch_greater_or_equal
from transformers.utils.output_capturing import capture_outputs as capture_outputs


# Importing this package replaces these two steps of `generate()`, because there is no public way to add a kind of
# assistant. The first checks a call, the second decodes.
VALIDATION_STEP = "_validate_generation_mode"
DECODING_STEP = "_assisted_decoding"
# Decodes without an assistant.
PLAIN_STEP = "_sample"
# `attach` replaces this one, because only it sees whether a call names an assistant.
ENTRY = "generate"
# The end of `from_pretrained`. It is replaced, too, as no other place says where a model was loaded from.
LOADING_STEP = "adjust_generation_fn"

# Name of the cache in the arguments and outputs of models: the same for all models since transformers 5.24.
_INPUTS_OF_PASSES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _INPUTS_OF_PASSES else "past_key_values"

# Attribute of a compiled function with the original one.
COMPILED_FROM = "_torchdynamo_orig_callable"
# Whether PyTorch's fused attention on CPUs reads grouped keys and values.
CPU_ATTENTION_READS_GROUPS = is_torch_greater_or_equal("2.9")
# Whether transformers' `sdpa` function folds the heads of a group for single queries: since 5.23.
PACKS_SINGLE_QUERIES = hasattr(_sdpa, "pack_gqa")

# transformers' own function for `sdpa`.
SDPA_ATTENTION: Callable[..., Any] = sdpa_attention_forward
# transformers' own attention functions that take no dense mask. They compute what its `sdpa` function computes.
UNMASKED_ATTENTION: tuple[Callable[..., Any], ...] = (flash_attention_forward, flex_attention_forward)
# Implementations that transformers itself registers such functions for, by the start of their names.
UNMASKED_IMPLEMENTATIONS = ("flash_attention_", "flex_attention")
# transformers' own functions that make masks for `sdpa`, for `eager` attention, and for the functions above.
SDPA_MASK, EAGER_MASK = sdpa_mask, eager_mask
PADDING_MASKS: tuple[Callable[..., Any], ...] = (flash_attention_mask, flex_attention_mask)

# Private names that subclasses in this package override, by the class that defines them.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "transformers.PreTrainedModel": (
        "_can_record_outputs", "_init_weights", "_keys_to_ignore_on_load_unexpected", "_no_split_modules",
        "_skip_keys_device_placement", "_supports_attention_backend", "_supports_flash_attn", "_supports_flex_attn",
        "_supports_sdpa", "_upload_modified_files", "should_save_on_this_rank",
    ),
    "transformers.GenerationMixin": (VALIDATION_STEP, DECODING_STEP),
    # The loss is averaged over the drafted positions of all batches of a step; and a diverged drafter must not
    # overwrite a good checkpoint.
    # Lengths of cached rows are known without reading the rows. The drafter to begin with may be the best one.
    "transformers.Trainer": (
        "_evaluate", "_get_eval_sampler", "_get_num_items_in_batch", "_get_train_sampler", "_prepare_inputs",
        "_save_checkpoint",
    ),
}  # fmt: skip


def generation_step(name: str) -> Callable[..., Any]:
    """Returns the current step of `generate()` with this name, which all generating classes share."""
    return getattr(GenerationMixin, name)


# Attribute of a step that was replaced, with what it calls.
_HOOK = "gumiho_hook"


def extend_generation_step(name: str, hook: Callable[..., Any]) -> None:
    """
    Replaces a step of `generate()` for all generating classes by `hook(plain, model, ...)`, where `plain` is the step
    that was there. Doing so again changes nothing. A package that is imported a second time has other hooks, which
    call those of the first.
    """
    plain = generation_step(name)
    if getattr(plain, _HOOK, None) is not hook:
        # `generate()` reads the signature of the methods it calls; `wraps` keeps the original one.
        @functools.wraps(plain)
        def step(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            return hook(functools.partial(plain, self), self, *args, **kwargs)

        setattr(step, _HOOK, hook)
        setattr(GenerationMixin, name, step)


# Steps of the plain loop that no drafted call runs.
STEPS_OF_LOOP = (
    "_update_model_kwargs_for_generation", "_has_unfinished_sequences", "_optimize_model_for_decode",
)  # fmt: skip

# In the order of the signature.
ARGUMENTS_OF_GENERATE = list(inspect.signature(GenerationMixin.generate).parameters)[1:-1]


def prepared_request(target: PreTrainedModel, given: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """
    Returns the generation config of a call without an assistant, with these arguments by name, and the arguments that
    choose the decoding method. `generate()` prepares both itself, too late to choose an assistant.
    """
    settings = {name: value for name, value in given.items() if name not in ARGUMENTS_OF_GENERATE}
    settings.pop("trust_remote_code", None)
    streamer, synced_gpus = given.get("streamer"), given.get("synced_gpus")
    mode_kwargs = target._extract_generation_mode_kwargs(None, settings, synced_gpus, None, streamer)
    config, _ = target._prepare_generation_config(given.get("generation_config"), **settings)
    return config, mode_kwargs


def default_settings() -> dict[str, Any]:
    """Returns the generation settings of calls where neither the caller nor the target gives any."""
    return dict(GenerationConfig._get_default_generation_params())


def given_in_call(target: PreTrainedModel, generation_config: GenerationConfig, name: str) -> Any:
    """Returns a setting that a call itself gives; `None` for the target's own, and for a default, also if given."""
    value = getattr(generation_config, name, None)
    inherited = getattr(target.generation_config, name, None)
    return None if value in (inherited, default_settings().get(name)) else value


def run_prompt(
    target: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """Runs transformers' own prefill, with its chunking; only so decoding is exact. Returns the model's output."""
    return target._prefill(input_ids, generation_config, model_kwargs)


def updated_kwargs(target: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a pass after the one that returned `outputs`, as plain decoding makes them."""
    return dict(target._update_model_kwargs_for_generation(outputs, dict(model_kwargs), is_encoder_decoder=False))


def grows_with_text(target: PreTrainedModel, argument: str) -> bool:
    """Whether [`updated_kwargs`] knows the argument by name, and so makes it as long as the text."""
    updates = (vars(kind).get("_update_model_kwargs_for_generation") for kind in type(target).__mro__)
    return any(argument in update.__code__.co_consts for update in updates if update is not None)


# Releases that mark the caller's cache. In others any cache may be the caller's.
_MARKS_CACHES = "_is_user_defined" in GenerationMixin._prepare_cache_for_generation.__code__.co_names


def is_callers_cache(cache: Any) -> bool:
    """Whether the caller passed this cache to the running call of `generate()`, as far as the release says it."""
    return bool(getattr(cache, "_is_user_defined", not _MARKS_CACHES))


def sampling_warpers(device: torch.device, **settings: Any) -> Any:
    """Returns what `generate()` does to the scores of sampled tokens by these fields of a generation config."""
    config = GenerationConfig(do_sample=True, **settings)
    return GenerationMixin()._get_logits_processor(config, input_ids_seq_length=0, device=device)


def pad_token_id(generation_config: GenerationConfig) -> int | None:
    """Returns the token that `generate()` pads with, which it stores only as a tensor on the prepared config."""
    token = generation_config._pad_token_tensor
    return None if token is None else int(token)


def would_compile(target: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
    """Whether plain `generate()` would compile the target in this call."""
    return bool(target._valid_auto_compile_criteria(model_kwargs, generation_config))


def compile_on_every_device(**options: Any) -> CompileConfig:
    """Returns settings with which `generate()` compiles on every device; by default it does not compile on CPUs."""
    config = CompileConfig(**options)
    config._compile_all_devices = True
    return config


def was_loaded(parameter: torch.Tensor) -> bool:
    """Whether `from_pretrained` has loaded this parameter, so that it must not be initialized."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def is_stateful(target: PreTrainedModel) -> bool:
    """Whether the target keeps a recurrent state, which cannot be cut back to an accepted path."""
    return bool(target._is_stateful)


def keeps_dynamic_cache(target: PreTrainedModel) -> bool:
    """Whether `generate()` gives the target a `DynamicCache`, and not another kind of cache."""
    return bool(target._supports_default_dynamic_cache())


def attention_implementation(config: PreTrainedConfig) -> str:
    """Returns the attention implementation of layers with this config."""
    return config._attn_implementation


def set_attention_implementation(config: PreTrainedConfig, name: str) -> None:
    """Sets the attention implementation of layers with this config, a nested one without a submodel of its own."""
    config._attn_implementation = name


def supports_sdpa(target: Any) -> bool:
    """Whether the target's layers can use `sdpa` attention."""
    return bool(target._supports_sdpa)


def registered_attention(implementation: str) -> Any:
    """Returns the attention function that is registered for all models, if any."""
    return AttentionInterface._global_mapping.get(implementation)


def mask_function(implementation: str) -> Any:
    """Returns the function that makes masks for attention of this name, if any is registered."""
    is_registered = implementation in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation] if is_registered else None


# Functions that mixers call by these names in their files, for several tokens that follow a state: a short
# convolution, and recurrences.
CONVOLUTION = "causal_conv1d_fn"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
SCAN = "mamba2_chunk_scan"
# What layers call that read their states from a cache, and how attention counts positions by its slots.
READS_OF_STATES = {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
COUNT_OF_SLOTS = "get_query_offset"


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Returns what `module.modules()` does, in another order and sooner: each call of `generate()` reads them all."""
    found, known = [module], {module}
    for parent in found:  # grows while it is read
        new = [child for child in parent._modules.values() if child is not None and child not in known]
        known.update(new)
        found += new
    return found


def runs_as_defined(module: nn.Module) -> bool:
    """Whether calling the module runs only the `forward` of its class: without hooks, and none set on the object."""
    return not (num_hooks(module) or "forward" in vars(module) or has_placement_hook(module))


def without_layer(module: nn.Module, layer: nn.Module) -> nn.Module:
    """Returns a copy of the module that shares its layers, except for one that becomes the identity."""
    copied = copy.copy(module)
    copied._modules = {name: nn.Identity() if own is layer else own for name, own in module._modules.items()}
    return copied


def num_hooks(module: nn.Module) -> int:
    """Returns the number of hooks that run before or after the module's `forward`."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the original module of a compiled one, or the module itself."""
    return getattr(module, "_orig_mod", module)


def compiled_module(target: nn.Module) -> nn.Module | None:
    """Returns a module of the target that runs a compiled graph, which ignores hooks that are registered later."""
    for module in modules_of(target):
        if module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), COMPILED_FROM):
            return module
    return None


def has_placement_hook(module: nn.Module) -> bool:
    """Whether accelerate moves the module's inputs or weights when it runs."""
    return getattr(module, "_hf_hook", None) is not None


def execution_device(target: nn.Module) -> torch.device | None:
    """Returns the device that accelerate moves weights to before they compute; `None` if it moves none."""
    for module in target.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if (place := getattr(part, "execution_device", None)) is not None:
                return torch.device(place)
    return None


def is_pipeline_stage(target: PreTrainedModel) -> bool:
    """Whether this process holds only some of the target's layers, and placeholders for the others."""
    return getattr(target, "_pp_stage", None) is not None


def mark_static_address(tensor: torch.Tensor) -> None:
    """
    Marks a tensor whose address does not change. A captured graph then reads and writes it in place; otherwise it
    would copy the tensor in every replay.
    """
    # Without a guard, because a tensor of a later call with another address must not cause a recompilation.
    torch._dynamo.mark_static_address(tensor, guard=False)


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns how often a tensor was written to; `None` for one of inference mode, which does not count it."""
    return None if tensor.is_inference() else tensor._version


def is_in_place(operation: Any) -> bool:
    """Whether an operation of PyTorch's dispatcher writes into its first argument."""
    return bool(operation._schema.is_mutable)


def drive_one_device(args: Any) -> None:
    """Limits a `Trainer` to one device in this process, instead of wrapping the model in `DataParallel`."""
    args._n_gpu = min(args.n_gpu, 1)


def gradients_of_pass(accelerator: Any, model: Any, is_last: bool) -> AbstractContextManager[None]:
    """
    Returns a context in which gradients of a pass are added to those of the step. Processes exchange them in the last
    pass; with DeepSpeed in each one, and it updates the weights in the last.
    """
    accelerator.gradient_state._set_sync_gradients(is_last)
    exchanges = is_last or accelerator.distributed_type == "DEEPSPEED"
    return nullcontext() if exchanges else accelerator.no_sync(model)


def note_best_metric(trainer: Any, metrics: dict[str, float], trial: Any) -> bool:
    """Remembers the metrics of an evaluation if they are the best so far, outside of the steps that do so."""
    return bool(trainer._determine_best_metric(metrics, trial))
