"""Engines of vLLM in the tests' own process, on a CPU, and what they draft."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


ROOT = Path(__file__).parents[2]
DEMO_TARGET, DEMO_DRAFTER = (ROOT / "examples" / "demo_pair" / name for name in ("target", "gumiho"))
# Little of everything: prompts longer than a step are cut into pieces, and few requests run at once.
SMALL = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**25, "block_size": 32, "disable_log_stats": False, "seed": 0,
}  # fmt: skip


def drafting_with(drafter: Path, num_tokens: int, **settings: Any) -> dict[str, Any]:
    return {"method": "eagle", "model": str(drafter), "num_speculative_tokens": num_tokens} | settings


@contextmanager
def engine(target: Path, speculative_config: dict[str, Any] | None = None, **settings: Any) -> Iterator[Any]:
    """Yields an `LLM`, and gives its memory back."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(model=str(target), speculative_config=speculative_config, **SMALL | settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def write_texts(llm: Any, prompts: list[Any], max_tokens: int | list[int] = 24, **sampling: Any) -> list[list[int]]:
    """Returns the tokens after each prompt (a text or token ids), by default the greedy ones, `max_tokens` of each."""
    from vllm import SamplingParams

    given = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    settings = {"temperature": 0.0, "ignore_eos": True} | sampling
    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    outputs = llm.generate(given, [SamplingParams(max_tokens=n, **settings) for n in lengths], use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def drafter_of(llm: Any) -> Any:
    """Returns the proposer (of model runner V1) or speculator (of V2) that drafts."""
    runner = runner_of(llm)
    return getattr(runner, "drafter", None) or runner.speculator


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def recorded_chains(llm: Any) -> Iterator[list[list[list[int]]]]:
    """Yields what will hold, for each step, the chains that were drafted for its requests."""
    drafter, steps = drafter_of(llm), []
    propose = drafter.propose

    def recording(*args: Any, **kwargs: Any) -> torch.Tensor:
        chains = propose(*args, **kwargs)
        steps.append(chains.tolist())
        return chains

    drafter.propose = recording
    try:
        yield steps
    finally:
        del drafter.propose


def metric(llm: Any, name: str) -> Any:
    """Returns the value of one of vLLM's metrics since the engine was made."""
    (found,) = [found for found in llm.get_metrics() if found.name == f"vllm:{name}"]
    return found.values if hasattr(found, "values") else found.value


def acceptance_length(llm: Any) -> float:
    drafts, accepted = metric(llm, "spec_decode_num_drafts"), metric(llm, "spec_decode_num_accepted_tokens")
    return 1 + accepted / drafts


def demo_prompts() -> list[str]:
    lines = (ROOT / "examples" / "demo_pair" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
