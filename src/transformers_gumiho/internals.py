"""
What this package relies on of transformers, accelerate, datasets and PyTorch beyond their documented interfaces.

Each private or patched name stands here, once, with the reason; the rooms import the function or the constant. What
an upgrade of those libraries may break is therefore in this file, and `tests/unit/test_internals.py` says what.
"""

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import CompileConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.generation import GenerationMixin
from transformers.integrations import sdpa_attention as _sdpa
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import is_torch_greater_or_equal
from transformers.utils.output_capturing import capture_outputs


# The two steps of `generate()` in whose place this package puts its own: no public way leads a new kind of assistant
# into them. The first checks a call, the second decodes.
VALIDATION_STEP = "_validate_generation_mode"
DECODING_STEP = "_assisted_decoding"
# Decodes without an assistant.
PLAIN_STEP = "_sample"

# By what name models take and return a cache, and `generate()` hands it on: one for all since 5.24.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Where a function keeps the one that `torch.compile` has made it of.
_COMPILED_FROM = "_torchdynamo_orig_callable"

_CPU_ATTENTION_READS_GROUPS = is_torch_greater_or_equal("2.9")

# Names that subclasses in this package give a value or a body to, for transformers to find: there is no other place
# for them than the class. By the class that first has them.
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "transformers.PreTrainedModel": (
        "_can_record_outputs",
        "_init_weights",
        "_keys_to_ignore_on_load_unexpected",
        "_no_split_modules",
        "_skip_keys_device_placement",
        "_supports_attention_backend",
        "_supports_flash_attn",
        "_supports_flex_attn",
        "_supports_sdpa",
        "should_save_on_this_rank",
    ),
    "transformers.GenerationMixin": (VALIDATION_STEP, DECODING_STEP, "adjust_generation_fn"),
    # The loss is averaged over the drafted positions of a whole step, which only the counts of a step can say; and a
    # diverged drafter must not be written over a good checkpoint.
    "transformers.Trainer": ("_get_num_items_in_batch", "_prepare_inputs", "_save_checkpoint"),
}


def generation_step(name: str) -> Callable[..., Any]:
    """Returns a step of `generate()`, as all generating classes have it now."""
    return getattr(GenerationMixin, name)


def replace_generation_step(name: str, step: Callable[..., Any]) -> None:
    """Puts a step of `generate()` in the place of the one that all generating classes have."""
    setattr(GenerationMixin, name, step)


# Of `generate()`, in their order.
_ARGUMENTS_OF_GENERATE = list(inspect.signature(GenerationMixin.generate).parameters)[1:-1]


def named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of `generate()` by their names."""
    if len(args) > len(_ARGUMENTS_OF_GENERATE):
        raise TypeError(
            f"`generate()` takes {len(_ARGUMENTS_OF_GENERATE)} positional arguments at most, got {len(args)}."
        )
    if twice := set(_ARGUMENTS_OF_GENERATE[: len(args)]) & set(kwargs):
        raise TypeError(f"`generate()` got several values for {', '.join(sorted(twice))}.")
    return dict(zip(_ARGUMENTS_OF_GENERATE, args, strict=False)) | kwargs


def prepared_request(target: PreTrainedModel, given: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """
    Returns what a call of `generate()` without an assistant asks for: the settings, and the arguments that choose how
    it decodes. `generate()` prepares both itself, too late to choose another assistant.

    Args:
        target: The target.
        given: The arguments of the call by their names.
    """
    settings = {name: value for name, value in given.items() if name not in _ARGUMENTS_OF_GENERATE}
    settings.pop("trust_remote_code", None)
    streamer, synced_gpus = given.get("streamer"), given.get("synced_gpus")
    mode_kwargs = target._extract_generation_mode_kwargs(None, settings, synced_gpus, None, streamer)
    config, _ = target._prepare_generation_config(given.get("generation_config"), **settings)
    return config, mode_kwargs


def repository_of_call() -> str | None:
    """
    Returns the `custom_generate` of the `generate()` that is running; `None` where none is, or it has no name there.

    transformers hands all arguments of a call to the repository's code but this one, and runs a copy of that code
    that does not know where it came from. A name written into the code when it is pushed would be wrong in every
    clone, fork, renamed repository and local folder. So the name is read in the frame that made the call, where
    alone it is left.
    """
    frame = inspect.currentframe()
    code = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None:
        if frame.f_code is code and isinstance(name := frame.f_locals.get("custom_generate"), str):
            return name
        frame = frame.f_back
    return None


def run_prompt(
    target: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """
    Runs the prompt as plain `generate()` does, with its way of chunking, and returns the model's output.

    Decoding is exact because this pass is transformers' own.
    """
    return target._prefill(input_ids, generation_config, model_kwargs)


def pad_token_id(generation_config: GenerationConfig) -> int | None:
    """
    Returns the token that `generate()` pads with.

    It is settled inside of the call, from several places, and left only as a tensor on the prepared settings.
    """
    token = generation_config._pad_token_tensor
    return None if token is None else int(token)


def would_compile(target: PreTrainedModel, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
    """Whether plain `generate()` would compile the target in this call: then stages of a cycle are compiled, too."""
    return bool(target._valid_auto_compile_criteria(model_kwargs, generation_config))


def compile_on_every_device(**options: Any) -> CompileConfig:
    """Returns settings, with these options, under which `generate()` compiles on every device: it leaves a CPU out."""
    config = CompileConfig(**options)
    config._compile_all_devices = True
    return config


def was_loaded(parameter: torch.Tensor) -> bool:
    """Whether `from_pretrained` has read this parameter, so that it is not to be initialised: only a mark says so."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def is_stateful(target: PreTrainedModel) -> bool:
    """Whether the target keeps a recurrent state, which cannot be cut back to an accepted path."""
    return bool(target._is_stateful)


def keeps_dynamic_cache(target: PreTrainedModel) -> bool:
    """Whether `generate()` gives the target a `DynamicCache`; some models take a cache of another kind."""
    return bool(target._supports_default_dynamic_cache())


def forward_parameters(target: PreTrainedModel) -> dict[str, inspect.Parameter]:
    """
    Returns what a target's `forward` takes, by name. Of one that hands further arguments on (`**kwargs`) also what the
    `forward` takes that it overrides: `generate()` gives both what it gives to all.
    """
    found: dict[str, inspect.Parameter] = {}
    overridden = (vars(kind)["forward"] for kind in type(target).__mro__ if "forward" in vars(kind))
    for forward in (target.forward, *overridden):
        parameters = inspect.signature(forward).parameters
        found = {**parameters, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def cache_argument(target: PreTrainedModel) -> str:
    """
    Returns the argument that the target takes its cache by, which its output has the same name for. Before 5.24
    `generate()` settled it by the name of the class, but for what it made no cache for.
    """
    names = forward_parameters(target)
    if CACHE_NAME == "cache":
        return CACHE_NAME if CACHE_NAME in names or "state" not in names else "state"
    if "mamba" in type(target).__name__.lower():
        return "cache_params"
    return next((name for name in (CACHE_NAME, "cache_params", "state") if name in names), CACHE_NAME)


def attention_implementation(config: PreTrainedConfig) -> str:
    """Returns what the layers that read this config attend with: only its name tells which masks it takes."""
    return config._attn_implementation


def adopt_attention_implementation(config: PreTrainedConfig, other: PreTrainedConfig) -> None:
    """
    Makes the layers that read `config` attend as `other` says: `PreTrainedModel` sets it in the config that the model
    was made of, and in nested ones only where a submodel has them.
    """
    config._attn_implementation = other._attn_implementation


def supports_sdpa(target: PreTrainedModel) -> bool:
    """Whether `sdpa` computes all that the target's layers ask of attention."""
    return bool(target._supports_sdpa)


def attention_function(implementation: str) -> Callable[..., Any]:
    """Returns what layers with this attention implementation call."""
    return ALL_ATTENTION_FUNCTIONS[implementation]


def replace_attention_function(implementation: str, function: Callable[..., Any]) -> None:
    """Makes layers with this attention implementation call this function."""
    AttentionInterface.register(implementation, function)


def attention_file(kind: type) -> Any:
    """Returns the module with a class, or with a base of it, that looks attention functions up; `None` without one."""
    # Not the one that defines the functions, which all models inherit from.
    names = [base.__module__ for base in kind.__mro__ if base.__module__ != AttentionInterface.__module__]
    files = (sys.modules.get(name) for name in names)
    return next((file for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS")), None)


def finds_registered_attention(kind: type, implementation: str) -> bool:
    """Whether layers of a class call what is registered for all models: a file may have functions of its own."""
    return attention_file(kind).ALL_ATTENTION_FUNCTIONS[implementation] is ALL_ATTENTION_FUNCTIONS[implementation]


def eager_attention(kind: type) -> Any:
    """Returns what layers of a class call with `eager`, which every model's code names alike; `None` without one."""
    return getattr(attention_file(kind), "eager_attention_forward", None)


def is_own_sdpa_attention(function: Callable[..., Any]) -> bool:
    """Whether this is transformers' own function for `sdpa`, whose result is known to be what its name says."""
    return function is sdpa_attention_forward


def attention_reads_groups(mask: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether transformers' `sdpa` function leaves grouped keys and values as they are, and PyTorch to read them."""
    return bool(use_gqa_in_sdpa(mask, key, value))


def packs_single_queries() -> bool:
    """Whether transformers' `sdpa` function folds the heads of a group itself for one query: since 5.23."""
    return hasattr(_sdpa, "pack_gqa")


def cpu_attention_reads_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """
    Whether PyTorch's fused attention on CPUs takes grouped keys and values: since 2.9, with heads of one width. Other
    calls go to its plain implementation, which copies them.
    """
    return _CPU_ATTENTION_READS_GROUPS and query.shape[3] == key.shape[3] == value.shape[3]


def can_attend_efficiently(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether PyTorch's memory-efficient kernel takes these: on CUDA, in a type it knows, heads of aligned widths."""
    return (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.dtype == key.dtype == value.dtype == mask.dtype
        and all(states.shape[3] * states.element_size() % 16 == 0 for states in (query, value))
        and not torch.is_grad_enabled()
    )


def memory_efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """
    Attends as `scaled_dot_product_attention` does, with PyTorch's memory-efficient kernel. It is called by its own
    name, as the public way to choose a kernel (`torch.nn.attention.sdpa_kernel`) chooses for all threads.

    Args:
        query (`(B, heads, n, head_dim)`): The queries.
        key (`(B, heads, K, head_dim)`): The keys.
        value (`(B, heads, K, value_dim)`): The values.
        attn_mask (`(B, 1, n, K)`): Added to the scores. Its rows begin at multiples of 16 numbers.
        scale: Of the scores.
    """
    mask = attn_mask.expand(-1, query.shape[1], -1, -1)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    output: torch.Tensor = attend(query, key, value, mask, compute_log_sumexp=False, scale=scale)[0]
    return output


def runs_as_defined(module: nn.Module) -> bool:
    """
    Whether calling the module runs the `forward` of its class and nothing else: no hook, and no other `forward` put
    on the object, as accelerate does where it offloads or splits a model.
    """
    return not (num_hooks(module) or "forward" in vars(module) or has_placement_hook(module))


def without_layer(module: nn.Module, layer: nn.Module) -> nn.Module:
    """
    Returns a copy of the module that shares its layers, but for one, in whose place is the identity. The module itself
    stays as it is, as it may be running in another thread.
    """
    copied = copy.copy(module)
    copied._modules = {name: nn.Identity() if own is layer else own for name, own in module._modules.items()}
    return copied


def num_hooks(module: nn.Module) -> int:
    """Returns how many functions are registered to run before or after the module's `forward`."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def uncompiled(module: nn.Module) -> nn.Module:
    """Returns the module that `torch.compile` was given, of a compiled one."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs a graph, which takes no notice of hooks that are registered later."""
    return module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), _COMPILED_FROM)


def uncompiled_copy(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """
    Returns a copy of a module that runs no graph. It shares the module's weights, and has hooks of its own. The module
    itself stays as it is, as it may be running in another thread.

    Args:
        module: The module.
        replaced: Of its submodules those in whose place the copy has others.
    """
    copied = copy.copy(module)  # without what `compile()` has made
    if (forward := vars(copied).pop("forward", None)) is not None and has_own_forward(module):
        vars(copied)["forward"] = getattr(forward, _COMPILED_FROM, forward)
    copied._modules = module._modules | {
        name: replaced[child] for name, child in module.named_children() if child in replaced
    }
    copied._forward_hooks = copied._forward_hooks.copy()
    return copied


def has_own_forward(module: nn.Module) -> bool:
    """Whether another `forward` than that of its class was put on the module, and not one that is compiled from it."""
    forward = vars(module).get("forward")
    original = getattr(forward, _COMPILED_FROM, forward)
    return forward is not None and getattr(original, "__func__", original) is not type(module).forward


def has_placement_hook(module: nn.Module) -> bool:
    """Whether accelerate moves the module's inputs or weights when it runs."""
    return getattr(module, "_hf_hook", None) is not None


def mark_static_address(tensor: torch.Tensor) -> None:
    """
    Promises that the tensor stays where it lies. A captured graph then reads and writes it there, as it does with
    parameters; otherwise it would copy the tensor for every replay.
    """
    # Without a guard: a tensor of a later call lies elsewhere, and nothing is to be compiled again for it.
    torch._dynamo.mark_static_address(tensor, guard=False)


def num_compiled_graphs() -> int:
    """Returns how many graphs `torch.compile` has made so far: a difference tells what held a run up."""
    graphs: Counter[str] = torch._dynamo.utils.counters["stats"]
    return graphs["unique_graphs"]


@contextmanager
def computing_in_float32() -> Iterator[None]:
    """
    Within it every operation of PyTorch on 16-bit floats computes and returns float32. Weights are converted one at a
    time, for the operation that reads them. What is written in place keeps its type. Kernels that are no operations
    of PyTorch see what comes.
    """
    with _WideOperations(), _WideConvolutions():
        yield


class _WideOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = 1 if func._schema.is_mutable else 0  # an operation in place writes into its first argument
        return func(*args[:kept], *tree_map(_widen, args[kept:]), **tree_map(_widen, kwargs or {}))


class _WideConvolutions(TorchFunctionMode):
    """Convolutions compare the types of their arguments before they are dispatched as operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.functional.conv1d, nn.functional.conv2d):
            args, kwargs = tree_map(_widen, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.to(torch.float32)
    return torch.float32 if value is torch.float16 or value is torch.bfloat16 else value


def drive_one_device(args: Any) -> None:
    """
    Makes a `Trainer` with these `TrainingArguments` drive at most one device in this process. It would wrap the model
    in `DataParallel` wherever it sees several, and there is no argument against that.
    """
    args._n_gpu = min(args.n_gpu, 1)


def dataset_fingerprint(dataset: Any) -> str | None:
    """Returns what `datasets` knows a table by: it changes with the rows. `None` for a stream, which has none."""
    return getattr(dataset, "_fingerprint", None)


__all__ = [
    "CACHE_NAME",
    "DECODING_STEP",
    "OVERRIDDEN",
    "PLAIN_STEP",
    "VALIDATION_STEP",
    "WeightRenaming",
    "adopt_attention_implementation",
    "attention_file",
    "attention_function",
    "attention_implementation",
    "attention_reads_groups",
    "cache_argument",
    "can_attend_efficiently",
    "capture_outputs",
    "compile_on_every_device",
    "computing_in_float32",
    "cpu_attention_reads_groups",
    "dataset_fingerprint",
    "drive_one_device",
    "eager_attention",
    "finds_registered_attention",
    "forward_parameters",
    "generation_step",
    "has_own_forward",
    "has_placement_hook",
    "is_compiled",
    "is_own_sdpa_attention",
    "is_stateful",
    "keeps_dynamic_cache",
    "mark_static_address",
    "memory_efficient_attention",
    "named_arguments",
    "num_compiled_graphs",
    "num_hooks",
    "packs_single_queries",
    "pad_token_id",
    "prepared_request",
    "register_checkpoint_conversion_mapping",
    "replace_attention_function",
    "replace_generation_step",
    "repository_of_call",
    "run_prompt",
    "runs_as_defined",
    "supports_sdpa",
    "uncompiled",
    "uncompiled_copy",
    "was_loaded",
    "without_layer",
    "would_compile",
]
