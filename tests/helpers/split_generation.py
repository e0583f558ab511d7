"""A generation on a target split by its tensor-parallel plan, run by `torchrun`: each process writes what it got."""

import json
import os
import sys
from pathlib import Path

import torch
from targets import make_drafter, make_prompts, make_target
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto", dtype=torch.float64)
    # Whole in every process.
    drafter = make_drafter(make_target())
    weight = target.model.layers[0].self_attn.q_proj.weight
    # Older versions of transformers keep the process's part as an ordinary parameter.
    part = weight.to_local() if isinstance(weight, DTensor) else weight
    results = {"rows_of_a_process": part.shape[0]}
    for name, lengths, settings in (
        ("greedy", [6], {"do_sample": False}),
        ("batch", [6, 3], {"do_sample": False}),
        ("static", [6], {"do_sample": False, "cache_implementation": "static"}),
        ("sampled", [6], {"do_sample": True}),
    ):
        texts = []
        for assistant in (None, drafter):
            torch.manual_seed(0)
            output = target.generate(
                **make_prompts(lengths), max_new_tokens=40, return_dict_in_generate=True, assistant_model=assistant,
                **settings,
            )  # fmt: skip
            texts.append(output.sequences.tolist())
        tau = sum(output.accepted_lengths[0]) / len(output.accepted_lengths[0])
        results[name] = {"plain": texts[0], "drafted": texts[1], "tau": tau}
    (folder / f"process_{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    # With PyTorch 2.13 one process in some twenty aborts in the destructors of its gloo threads, after all is done.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
