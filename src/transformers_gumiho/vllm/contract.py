"""
Every name of vLLM that the plug-in uses, and a check that the installed vLLM has them.

    python -m transformers_gumiho.vllm.contract

The check reads vLLM's sources and imports nothing, so each of vLLM's processes can run it when it starts. For the same
reason this module needs only the standard library: `transformers_gumiho_vllm` loads it without the package.
"""

import ast
import functools
import hashlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


# The releases that the tests have run with; 0.33 has no build for CPUs, so its Python ran with 0.32's kernels.
TESTED_RELEASES = ("0.31", "0.32", "0.33")

# For each module and name, the members that are used: functions with their parameters in order, other members with
# nothing. "..." at the end means that all further parameters are passed on; without it, further parameters need
# defaults. The member "" is the name itself. A module may import a name, and a class may inherit a method.
HOOKS: dict[tuple[str, str], dict[str, str]] = {
    ("vllm.config", "VllmConfig"): {
        "": "", "kv_transfer_config": "", "parallel_config": "", "scheduler_config": "",
    },
    ("vllm.config.model", "get_config"): {"": "model trust_remote_code revision ..."},
    ("vllm.config.speculative", "SpeculativeConfig"): {
        "method": "", "num_speculative_tokens": "", "draft_model_config": "",
    },
    ("vllm.logger", "init_logger"): {"": "name"},
    ("vllm.lora.layers.base", "BaseLayerWithLoRA"): {"": ""},
    ("vllm.model_executor.layers.linear", "ReplicatedLinear"): {
        "__init__": "self input_size output_size bias params_dtype quant_config prefix return_bias",
    },
    ("vllm.model_executor.layers.logits_processor", "LogitsProcessor"): {
        "scale": "", "soft_cap": "", "forward": "self lm_head hidden_states embedding_bias",
    },
    ("vllm.model_executor.models.llama_eagle", "EagleLlamaForCausalLM"): {
        "__init__": "self vllm_config prefix", "load_weights": "self weights", "config": "", "logits_processor": "",
        "model": "",
    },
    ("vllm.model_executor.models.llama_eagle", "LlamaModel"): {
        "embed_input_ids": "self input_ids", "embed_tokens": "", "fc": "", "quant_config": "",
    },
    ("vllm.model_executor.models.registry", "_ModelRegistry"): {
        "models": "", "register_model": "self model_arch model_cls",
    },
    ("vllm.model_executor.models.utils", "AutoWeightsLoader"): {"load_weights": "self weights"},
    ("vllm.model_executor.models.utils", "maybe_prefix"): {"": "prefix name"},
    ("vllm.model_executor.models.utils", "process_eagle_weight"): {"": "model name"},
    ("vllm.transformers_utils.configs.eagle", "EAGLEConfig"): {"__init__": "self model method"},
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"): {
        "max_query_len": "", "num_actual_tokens": "", "query_start_loc": "", "query_start_loc_cpu": "",
        "slot_mapping": "",
    },
    ("vllm.v1.core.sched.scheduler", "Scheduler"): {
        "make_spec_decoding_stats": "self spec_decoding_stats num_draft_tokens num_accepted_tokens ...",
        "vllm_config": "",
    },
    ("vllm.v1.sample.metadata", "SamplingMetadata"): {"": ""},
    ("vllm.v1.spec_decode.eagle", "EagleProposer"): {
        "__init__": "self vllm_config device runner", "load_model": "self target_model",
        "propose":
            "self num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
            "token_indices_to_sample common_attn_metadata mm_embed_inputs num_rejected_tokens_gpu ...",
        "set_inputs_first_pass": "self target_hidden_states ...",
        "dummy_run": "self ...", "_sample_draft_tokens": "self hidden_states sampling_metadata",
        "_greedy_sample": "self hidden_states", "_last_draft_probs": "", "draft_model_config": "", "method": "",
        "model": "", "num_speculative_tokens": "",
    },
    ("vllm.v1.worker.gpu_input_batch", "InputBatch"): {"req_ids": ""},
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"): {"input_batch": "", "kv_cache_config": ""},
    ("vllm.v1.worker.gpu.spec_decode.eagle.speculator", "EagleSpeculator"): {
        "__init__": "self vllm_config device", "load_model": "self target_model", "propose": "self input_batch ...",
        "capture": "self", "_generate_fused_drafts": "self ...", "_multi_step_decode": "self ...",
        "sample_draft":
            "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits",
        "acceptance_estimator": "", "current_draft_step": "", "draft_logits": "", "draft_model_config": "",
        "draft_tokens": "", "dtype": "", "hidden_size": "", "idx_mapping": "", "max_num_reqs": "", "model": "",
        "num_speculative_steps": "", "seeds": "", "temperature": "",
    },
}  # fmt: skip

# For the methods that the plug-in overrides, `digest` of their sources in the releases above.
DIGESTS = {
    "EagleProposer.__init__": "0612a10d",
    "EagleProposer.load_model": "b2bdf943 8a194cc2",
    "EagleProposer.propose": "0164aa5a",
    "EagleProposer.set_inputs_first_pass": "cba6ffb8",
    "EagleProposer.dummy_run": "b8f1a5c6",
    "EagleProposer._sample_draft_tokens": "dc7b37f2",
    "EagleProposer._greedy_sample": "f54e7d68",
    "EagleSpeculator.__init__": "77b42a07 489a782d",
    "EagleSpeculator.load_model": "b839e899",
    "EagleSpeculator.propose": "7b8eab9e 3b7fe7e1 12123b06",
    "EagleSpeculator.capture": "a4b3cc43 edb5df19",
    "EagleSpeculator._generate_fused_drafts": "b54ffadd e4b2da58",
    "EagleSpeculator._multi_step_decode": "2e09eb09 3aa43be3",
    "EagleSpeculator.sample_draft": "d2289e71 b5416a86 5fc4eda0",
    "EagleLlamaForCausalLM.__init__": "83ff4d1d",
    "EagleLlamaForCausalLM.load_weights": "69e0c78d",
}


class Hook(NamedTuple):
    """
    Attributes:
        name: Name of a function, or of a class and its member.
        fault: What the plug-in misses, as the end of a sentence; `None` if nothing.
        is_changed: Whether its body differs from all tested releases.
    """

    name: str
    fault: str | None
    is_changed: bool


class Sources:
    """The sources of vLLM below the folder `root`, which holds the package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.read, self.definition = functools.cache(self._read), functools.cache(self._definition)

    def _read(self, module: str) -> str:
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(encoding="utf-8")
        return ""

    def _definition(self, module: str, name: str) -> tuple[str, str]:
        """Returns the source of a class or function, and the module that defines it; "" if there is none."""
        source = self.read(module)
        if found := _block(source, name, ""):
            return found, module
        for parent, names in re.findall(r"^from\s+([\w.]+)\s+import\s+(\([^)]*\)|.*)", source, re.MULTILINE):
            if re.search(rf"\b{name}\b", names):
                package = module.rpartition(".")[0]
                return self.definition(importlib.util.resolve_name(parent, package), name)
        return "", module

    def member(self, module: str, name: str, member: str) -> str:
        """Returns the source of a method, or the line that sets an attribute, also from base classes."""
        source, module = self.definition(module, name)
        if found := _block(source, member, "    "):
            return found
        if line := re.search(rf"^ +(?:self\.)?{member}\b *(?::|=[^=]).*", source, re.MULTILINE):
            return line[0].strip()
        bases = re.match(r"class \w+\(([^)]*)\)", source)
        for base in re.findall(r"(?<![\w.=])\w+(?![\w.=])", bases[1]) if bases else ():
            if found := self.member(module, base, member):
                return found
        return ""


def _block(source: str, name: str, indent: str) -> str:
    """Returns the source of the class or function `name` with this indentation, without its decorators."""
    inside = rf"(?:{indent}(?:[ \t)\]#].*)?\n|[ \t]*\n)*"
    found = re.search(rf"^{indent}(?:class|(?:async )?def) {name}\b.*\n{inside}", f"{source}\n", re.MULTILINE)
    # Comments after it belong to the next definition.
    return textwrap.dedent(re.sub(rf"(?:\n(?:{indent}#.*)?)*\Z", "", found[0])) if found else ""


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def read_hooks(root: Path) -> Iterator[Hook]:
    """Yields every hook of the plug-in, as found in the vLLM below the folder `root`."""
    sources = Sources(root)
    for (module, owner), members in HOOKS.items():
        for member, parameters in members.items():
            name = f"{owner}.{member}" if member else owner
            source = sources.member(module, owner, member) if member else sources.definition(module, owner)[0]
            fault = _find_fault(source, parameters.split()) if source else f"is not in {module}"
            yield Hook(name, fault, name in DIGESTS and digest(source) not in DIGESTS[name])


def _find_fault(source: str, needed: list[str]) -> str | None:
    if not needed:
        return None
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        return "is not a function"
    passes_on = needed[-1] == "..."
    needed = [name for name in needed if name != "..."]
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    if lacking := [name for name in needed if name not in names]:
        return f"has no parameter `{lacking[0]}`"
    if [name for name in names if name in needed] != needed:
        return f"has its parameters in another order ({', '.join(names)})"
    optional = names[len(names) - len(given.kwonlyargs) - len(given.defaults) : len(names) - len(given.kwonlyargs)]
    optional += [a.arg for a, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is not None]
    if others := [name for name in names if name not in (*needed, *optional)]:
        return None if passes_on else f"needs `{others[0]}` as well"
    return None


def read_version(root: Path) -> str:
    found = re.search(r"^__version__ = .*'([^'\n]+)'$", Sources(root).read("vllm._version"), re.MULTILINE)
    return found[1] if found else "of an unknown version"


def refusal(hooks: list[Hook], version: str) -> str:
    """Returns why Gumiho cannot be used with a vLLM of these hooks; "" if it can."""
    faults = "; ".join(f"`{hook.name}` {hook.fault}" for hook in hooks if hook.fault)
    return faults and (
        f"The plug-in does not fit vLLM {version}: {faults}. Use vLLM {' or '.join(TESTED_RELEASES)}, or a newer "
        f"transformers-gumiho."
    )


def caution(hooks: list[Hook], version: str) -> str:
    """Returns what is untested with a vLLM of these hooks; "" if nothing is."""
    changed = ", ".join(hook.name for hook in hooks if hook.is_changed)
    if version.startswith(tuple(f"{release}." for release in TESTED_RELEASES)) and not changed:
        return ""
    return f"The Gumiho plug-in has not been tested with vLLM {version}, but with {', '.join(TESTED_RELEASES)}." + (
        f" Since then vLLM has changed {changed}. Compare texts with and without the drafter." if changed else ""
    )


def main() -> int:
    """Prints the contract for the installed vLLM; returns 1 if it is broken."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        sys.stderr.write("vLLM is not installed here.\n")
        return 1
    root = Path(spec.submodule_search_locations[0]).parent
    hooks, version = list(read_hooks(root)), read_version(root)
    for hook in hooks:
        sys.stdout.write(f"{hook.name}: {hook.fault or ('changed' if hook.is_changed else 'ok')}\n")
    broken = refusal(hooks, version)
    sys.stdout.write(f"{broken or caution(hooks, version) or f'The plug-in has been tested with vLLM {version}.'}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
