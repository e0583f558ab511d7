"""
Runs vLLM's model runner V2 on a CPU, with Triton's interpreter; a program of its own, as vLLM looks for Triton when it
is imported.

    python vllm_interpreted.py TARGET DRAFTER NUM_TOKENS SETTINGS

SETTINGS is JSON: `speculative`, `engine` and `sampling`, which are passed on, `prompts` of token ids, `max_tokens` and
`rounds`. The last line that is written is JSON: the class that drafts, the texts, and the chains of each step.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends import backends
from vllm_engine import drafter_of, drafting_with, engine, recorded_chains, write_texts


def draw(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    *_: Any,
    logits_cache: torch.Tensor,
    logits_cache_col: torch.Tensor,
    **__: Any,
) -> torch.Tensor:
    """What vLLM's `gumbel_sample` does for drafts; the interpreter does not know a mask of its kernel."""
    rows = idx_mapping.long()
    is_request = rows >= 0
    logits_cache[rows[is_request], int(logits_cache_col)] = logits[is_request].to(logits_cache.dtype)
    temperatures = temperature[rows.clamp(min=0)].float().where(is_request, 1.0)
    return (logits.float() / temperatures[:, None]).softmax(dim=-1).multinomial(1)[:, 0]


def main() -> None:
    target, drafter, num_tokens, given = sys.argv[1:]
    settings = json.loads(given)
    # vLLM's builds for CPUs want a Triton that compiles for them; the interpreter serves as well.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    import vllm.v1.worker.gpu.spec_decode.speculator as speculator

    speculator.gumbel_sample = draw
    speculative_config = drafting_with(Path(drafter), int(num_tokens), **settings.get("speculative", {}))
    with engine(Path(target), speculative_config, **settings.get("engine", {})) as llm:
        texts: list[list[int]] = []
        with recorded_chains(llm) as steps:
            for _ in range(settings.get("rounds", 1)):
                texts += write_texts(llm, settings["prompts"], settings["max_tokens"], **settings.get("sampling", {}))
        found = {"class": type(drafter_of(llm)).__name__, "texts": texts, "steps": steps}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main()
