"""Measures drafting for targets with recurrent layers, by replaying the drafts of the demo pair.

    python benchmarks/measure_recurrent.py --traces traces.jsonl --record    # the demo pair's drafts, in some minutes
    python benchmarks/measure_recurrent.py --traces traces.jsonl

No trained pair with such a target is shipped, so the targets are random. In each cycle a recorded tree is drafted, and
the nodes that were accepted then carry the own tokens of the target. The drafter runs, too. A replay takes its cycles
evenly from the recorded ones in order of their accepted tokens, so that its tau is theirs. Times are those of the
process in one thread: the median over turns, in each of which plain decoding and all shapes run.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from demo_pair import DemoPairArguments, parse
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.drafting.drafter import GumihoDrafter
from transformers_gumiho.generation.observers import GenerationObserver, observing
from transformers_gumiho.generation.tree.draft_tree import DraftTree, find_ancestors


WIDTH, VOCAB_SIZE, DEPTH = 768, 4096, 7
SETTINGS = {"tree_depth": DEPTH, "break_even": 1.0}
SIZE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 8,
    "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": 2 * (3 * ["linear_attention"] + ["full_attention"]), "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    },
    "granitemoehybrid": {
        "layer_types": 2 * (3 * ["mamba"] + ["attention"]), "num_attention_heads": 12, "num_key_value_heads": 4,
        "shared_intermediate_size": 3 * WIDTH, "num_local_experts": 0, "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 256,
    },
}  # fmt: skip


@dataclass(kw_only=True)
class RecurrentArguments(DemoPairArguments):
    traces: Path = field(metadata={"help": "JSONL with the cycles of each shape."})
    record: bool = field(default=False, metadata={"help": "Record the cycles of the demo pair on its prompts."})
    kinds: list[str] = field(default_factory=lambda: list(KINDS), metadata={"help": "Types of targets."})
    trees: list[int] = field(default_factory=lambda: [8, 12, 16, 24], metadata={"help": "Nodes of trees; 0 for none."})
    num_prompts: int = field(default=8, metadata={"help": "Prompts to record."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens of each text."})
    repeats: int = field(default=3, metadata={"help": "Turns."})

    @property
    def shapes(self) -> dict[str, dict[str, int]]:
        """The settings of the drafter by what the table calls them: a chain, and trees."""
        shapes = {"chain of 7": (7, 1)} | {f"tree of {nodes}": (nodes, 4) for nodes in filter(None, self.trees)}
        return {name: {"num_assistant_tokens": n, "branching_factor": k} for name, (n, k) in shapes.items()}


class Cycles(GenerationObserver):
    """Keeps the tree of each cycle, and what was accepted of it."""

    def __init__(self) -> None:
        self.trace: list[dict[str, list[int]]] = []

    def on_cycle(self, tree: DraftTree, path: Any) -> None:
        nodes = path.nodes[0, : path.accepted_lengths[0]].tolist()
        self.trace.append({"parents": tree.parents[0].tolist(), "depths": tree.depths[0].tolist(), "accepted": nodes})


def record(args: RecurrentArguments) -> None:
    """Writes the cycles of the demo pair on its prompts, for each shape."""
    target = AutoModelForCausalLM.from_pretrained(args.folders["target"], dtype=torch.float32)
    drafter = GumihoModel.from_pretrained(args.folders["assistant"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.folders["target"])
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in args.texts[: args.num_prompts]]
    call = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "assistant_model": drafter}
    with args.traces.open("w", encoding="utf-8") as file:
        for shape in args.shapes.values():
            drafter.generation_config.update(**shape, **SETTINGS)
            with observing(cycles := Cycles()):
                for ids in prompts:
                    target.generate(ids, **call)
            key = {"nodes": shape["num_assistant_tokens"], "branching": shape["branching_factor"]}
            file.write(json.dumps(key | {"trace": cycles.trace}) + "\n")


def read_trace(traces: Path, shape: dict[str, int]) -> list[dict[str, list[int]]]:
    """Returns the recorded cycles of a shape, of greedy texts."""
    wanted = {"nodes": shape["num_assistant_tokens"], "branching": shape["branching_factor"]}
    for line in traces.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        if wanted.items() <= found.items() and not found.get("sampled"):
            return found["trace"]
    raise SystemExit(f"{traces} has no cycles of {wanted}")


def spread(trace: list[dict[str, list[int]]], num_tokens: int) -> list[dict[str, list[int]]]:
    """Returns as many cycles as commit `num_tokens`, of which the mean accepted tokens are those of the trace."""
    ordered = sorted(trace, key=lambda cycle: len(cycle["accepted"]))
    count = round(num_tokens * len(trace) / sum(len(cycle["accepted"]) for cycle in trace))
    chosen = [ordered[(2 * number + 1) * len(trace) // (2 * count)] for number in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def replaying(trace: list[dict[str, list[int]]], answer: list[int], prompt_length: int) -> Callable[..., DraftTree]:
    """Returns a `GumihoDrafter.draft` that drafts as ever, and returns the recorded trees instead."""
    draft, state = GumihoDrafter.draft, {"cycle": 0, "length": 0}

    def replay(self: GumihoDrafter, committed: Any) -> DraftTree:
        draft(self, committed)
        # In the first call the committed tokens are those of the prompt, moved on by one.
        state["length"] = state["length"] + committed.accepted_lengths[0] if state["length"] else prompt_length + 1
        cycle = trace[state["cycle"] % len(trace)]
        state["cycle"] += 1
        upcoming = [*answer[state["length"] - 1 :], *(DEPTH + 1) * [0]]
        # Nodes beside the accepted path carry tokens that the target does not choose, distinct for siblings.
        tokens = [(upcoming[depth] + 1 + node) % VOCAB_SIZE for node, depth in enumerate(cycle["depths"])]
        for depth, node in enumerate(cycle["accepted"]):
            tokens[node] = upcoming[depth]
        parents, depths = torch.tensor([cycle["parents"]]), torch.tensor([cycle["depths"]])
        ancestors = find_ancestors(parents, DEPTH)
        return DraftTree(torch.tensor([tokens]), parents, depths, torch.zeros(parents.shape), ancestors, DEPTH)

    return replay


def measure(kind: str, args: RecurrentArguments) -> None:
    """Prints the rows of one type of targets."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE | KINDS[kind])).eval()
    drafter = GumihoModel.from_target(target, intermediate_size=2 * WIDTH).eval()
    prompt, length = torch.randint(1, VOCAB_SIZE, (1, 64)), args.max_new_tokens
    call = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": length, "do_sample": False}
    plain = target.generate(prompt, **call)
    traces = {name: spread(read_trace(args.traces, shape), length) for name, shape in args.shapes.items()}
    times: dict[str, list[float]] = {name: [] for name in ("plain", *traces)}
    taus, equal = {"plain": 1.0}, dict.fromkeys(times, "yes")
    for name in args.repeats * [*times]:
        drafted, draft = {}, GumihoDrafter.draft
        if name in traces:
            drafter.generation_config.update(**args.shapes[name], **SETTINGS)
            drafted = {"assistant_model": drafter, "return_dict_in_generate": True}
            draft = replaying(traces[name], plain[0].tolist(), prompt.shape[1])
        with mock.patch.object(GumihoDrafter, "draft", draft):
            start = time.process_time()
            output = target.generate(prompt, **call, **drafted)
            times[name].append(1000 * (time.process_time() - start) / length)
        if name in traces:
            taus[name], output = length / len(output.accepted_lengths[0]), output.sequences
        if not output.equal(plain):
            equal[name] = "NO"
    step = statistics.median(times["plain"])
    for name, own in times.items():
        ms = statistics.median(own)
        print(f"| {kind} | {name} | {ms:.2f} | {step / ms:.2f} | {taus[name]:.2f} | {equal[name]} |", flush=True)


def main() -> None:
    args = parse(RecurrentArguments, __doc__)
    torch.set_num_threads(1)
    if args.record:
        record(args)
        return
    print("| target | drafts | ms per token | times plain | tau | equal to plain |\n|---|---|---|---|---|---|")
    for kind in args.kinds:
        measure(kind, args)


if __name__ == "__main__":
    main()
