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

from triton.backends import backends
from vllm_engine import drafter_of, drafting_with, engine, recorded_chains, write_texts


def main() -> None:
    target, drafter, num_tokens, given = sys.argv[1:]
    settings = json.loads(given)
    # vLLM's builds for CPUs want a Triton that compiles for them; the interpreter serves as well.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    speculative_config = drafting_with(Path(drafter), int(num_tokens), **settings.get("speculative", {}))
    with engine(Path(target), speculative_config, **settings.get("engine", {})) as llm:
        texts: list[list[int]] = []
        with recorded_chains(llm) as steps:
            for _ in range(settings.get("rounds", 1)):
                texts += write_texts(llm, settings["prompts"], settings["max_tokens"], **settings.get("sampling", {}))
        print(json.dumps({"class": type(drafter_of(llm)).__name__, "texts": texts, "steps": steps}), flush=True)


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main()
