"""
What the plug-in calls and overrides in vLLM beside its public interface. Each module that uses one of these names
compares it where it is imported: only in processes with a Gumiho drafter.
"""

import inspect
from collections.abc import Callable
from typing import Any


# The releases that the tests have run with; 0.33 has no build for CPUs, so its Python ran with 0.32's kernels.
TESTED_RELEASES = ("0.31", "0.32", "0.33")

# The parameters of functions, in order. "..." at the end means that all further parameters are passed on; without it,
# further parameters need defaults.
SIGNATURES = {
    "AutoWeightsLoader.load_weights": "self weights",
    "EAGLEConfig.__init__": "self model method",
    "EagleLlamaForCausalLM.__init__": "self vllm_config prefix",
    "EagleLlamaForCausalLM.load_weights": "self weights",
    "EagleProposer.__init__": "self vllm_config device runner",
    "EagleProposer.load_model": "self target_model",
    "EagleProposer.propose":
        "self num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
        "token_indices_to_sample common_attn_metadata mm_embed_inputs num_rejected_tokens_gpu ...",
    "EagleProposer.set_inputs_first_pass": "self target_hidden_states ...",
    "EagleProposer.dummy_run": "self ...",
    "EagleProposer._sample_draft_tokens": "self hidden_states sampling_metadata",
    "EagleProposer._greedy_sample": "self hidden_states",
    "EagleSpeculator.__init__": "self vllm_config device",
    "EagleSpeculator.load_model": "self target_model",
    "EagleSpeculator.propose": "self input_batch ...",
    "EagleSpeculator.capture": "self",
    "EagleSpeculator._generate_fused_drafts": "self ...",
    "EagleSpeculator._multi_step_decode": "self ...",
    "EagleSpeculator.sample_draft":
        "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits",
    "LlamaModel.embed_input_ids": "self input_ids",
    "LogitsProcessor.forward": "self lm_head hidden_states embedding_bias",
    "ReplicatedLinear.__init__": "self input_size output_size bias params_dtype quant_config prefix return_bias",
    "maybe_prefix": "prefix name",
    "process_eagle_weight": "model name",
}  # fmt: skip
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_signatures(*owners: Any) -> None:
    """
    Compares functions and classes of the installed vLLM with the table.

    Raises:
        ImportError: A method is missing, or its parameters differ.
    """
    faults = []
    for owner in owners:
        for name, needed in SIGNATURES.items():
            if name.partition(".")[0] == owner.__name__:
                method = name.partition(".")[2]
                function = getattr(owner, method, None) if method else owner
                fault = "is missing" if function is None else _fault(function, needed)
                faults += [f"`{name}` {fault}"] if fault else []
    if faults:
        raise ImportError(
            f"The Gumiho plug-in does not fit this vLLM: {'; '.join(faults)}. Use vLLM "
            f"{' or '.join(TESTED_RELEASES)}, or a newer transformers-gumiho."
        )


def _fault(function: Callable[..., Any], needed: str) -> str | None:
    """Returns in what the parameters of a function differ from the needed ones; `None` for nothing."""
    parameters = inspect.signature(function).parameters
    names = [name for name in needed.split() if name != "..."]
    if lacking := [name for name in names if name not in parameters]:
        return f"has no parameter `{lacking[0]}`"
    if [name for name in parameters if name in names] != names:
        return f"has its parameters in another order ({', '.join(parameters)})"
    # What the plug-in does not pass has to have a default.
    passes_on = needed.endswith("...")
    for name, parameter in parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind not in _ANY_NUMBER
        if is_required and name not in names and not passes_on:
            return f"needs `{name}` as well"
    return None


def caution(version: str) -> str:
    """Returns what to say of a release of vLLM that no test has run with; "" for the others."""
    if version.startswith(tuple(f"{release}." for release in TESTED_RELEASES)):
        return ""
    return (
        f"The Gumiho plug-in has not been tested with vLLM {version}, but with {', '.join(TESTED_RELEASES)}. Compare "
        f"texts with and without the drafter."
    )
