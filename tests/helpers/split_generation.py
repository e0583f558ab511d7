"""Generations on a target that is split over processes, run by `torchrun`: each process writes what it got."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from targets import make_drafter, make_prompts, make_target
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from transformers_gumiho import GumihoModel, attached


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {"tensors": split_tensors(folder), "stages": split_layers(folder)}
    (folder / f"process_{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    # With PyTorch 2.13 one process in some twenty aborts in the destructors of its gloo threads, after all is done.
    os._exit(0)


def split_tensors(folder: Path) -> dict[str, Any]:
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto", dtype=torch.float64)
    # Whole in every process.
    drafter = make_drafter(make_target())
    weight = target.model.layers[0].self_attn.q_proj.weight
    # Older versions of transformers keep the process's part as an ordinary parameter.
    part = weight.to_local() if isinstance(weight, DTensor) else weight
    results: dict[str, Any] = {"rows_of_a_process": part.shape[0]}
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
                **make_prompts(lengths), max_new_tokens=20, return_dict_in_generate=True, assistant_model=assistant,
                **settings,
            )  # fmt: skip
            texts.append(output.sequences.tolist())
        tau = sum(output.accepted_lengths[0]) / len(output.accepted_lengths[0])
        results[name] = {"plain": texts[0], "drafted": texts[1], "tau": tau}
    # Ways to give a drafter that reads the target's embedding, or compares it with its own.
    call = {**make_prompts([6, 3]), "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**call).sequences.tolist()
    lent = GumihoModel.from_pretrained(folder / "lent", dtype=torch.float64).eval()
    own = GumihoModel.from_pretrained(folder / "own", dtype=torch.float64).eval()
    results["shares"] = [lent.share_embedding(target), own.share_embedding(target)]
    made = GumihoModel.from_target(target, intermediate_size=48).eval()
    results["made"] = made.embed_tokens.weight.tolist()
    for name, given in (("by folder", folder / "own"), ("lent", folder / "lent"), ("object", lent), ("made", made)):
        drafted = target.generate(**call, assistant_model=given if name in ("object", "made") else str(given))
        results[f"drafter {name}"] = {"plain": plain, "drafted": drafted.sequences.tolist(), "tau": 2}
    with attached(target, str(folder / "lent")):
        drafted = target.generate(**call)
        results["attached"] = {"plain": plain, "drafted": drafted.sequences.tolist(), "tau": 2}
        assert drafted.accepted_lengths
    return results


def split_layers(folder: Path) -> dict[str, Any]:
    target = AutoModelForCausalLM.from_pretrained(
        folder / "target", distributed_config=DistributedConfig(pp_size=2), dtype=torch.float64
    )
    call = {**make_prompts([6]), "max_new_tokens": 8, "do_sample": False}
    results: dict[str, Any] = {"plain": target.generate(**call).tolist()}
    passes: list[int] = []
    target.model.register_forward_hook(lambda *_: passes.append(1))
    for name in ("own", "lent"):
        drafter = GumihoModel.from_pretrained(folder / name, dtype=torch.float64).eval()
        try:
            target.generate(**call, assistant_model=drafter)
        except ValueError as error:
            results[name] = str(error)
        results["passes"] = len(passes)
        with attached(target, drafter):
            results[f"{name} attached"] = target.generate(**call).tolist()
        passes.clear()
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1]))
