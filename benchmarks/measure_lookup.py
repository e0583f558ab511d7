"""Times drafts from the context in one cycle: looking up what followed the newest tokens, and merging it with a tree.

    python benchmarks/measure_lookup.py

The text is random, with passages that were there before. In every cycle a few tokens of it are committed.
"""

import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser

from transformers_gumiho.drafting.context_drafts import ContextDrafts
from transformers_gumiho.tree.draft_tree import DraftTree, build_tree, extend_level, first_level


VOCAB_SIZE = 49152
PASSAGE = 40
WIDTH = 4


@dataclass
class LookupArguments:
    lengths: list[int] = field(default_factory=lambda: [128, 1024, 8192, 16384], metadata={"help": "Of the context."})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8], metadata={"help": "Rows."})
    num_nodes: int = field(default=12, metadata={"help": "Drafted tokens of the tree."})
    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 4
    num_committed: int = field(default=3, metadata={"help": "Tokens that a cycle commits."})
    num_cycles: int = 100


def make_text(length: int, number: random.Random) -> list[int]:
    """Returns `length` tokens, of which about half are in passages that are quoted."""
    tokens = [number.randrange(VOCAB_SIZE) for _ in range(PASSAGE)]
    while len(tokens) < length:
        begin = number.randrange(max(len(tokens) - PASSAGE, 1))
        tokens += tokens[begin : begin + PASSAGE] + [number.randrange(VOCAB_SIZE) for _ in range(PASSAGE)]
    return tokens[:length]


def make_tree(batch_size: int, num_nodes: int) -> DraftTree:
    """Returns a tree of two levels, as two serial steps draft it."""

    def candidates(num_parents: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = batch_size, num_parents, WIDTH
        return torch.randint(VOCAB_SIZE, shape), (-torch.rand(shape)).sort(dim=2, descending=True).values

    first = first_level(*candidates(1), num_nodes)
    levels = [first, extend_level(first, *candidates(WIDTH), num_nodes)]
    return build_tree(torch.zeros(batch_size, dtype=torch.long), levels, num_nodes, max_depth=len(levels))


def measure(length: int, batch_size: int, args: LookupArguments) -> tuple[float, float, float]:
    """Returns median milliseconds of looking up and of merging, and the share of cycles with something to merge."""
    number = random.Random(0)
    texts = [make_text(length + args.num_cycles * args.num_committed, number) for _ in range(batch_size)]
    committed = length

    def read(starts: list[int]) -> list[list[int]]:
        return [text[start:committed] for text, start in zip(texts, starts, strict=True)]

    drafts = ContextDrafts(
        read, [0] * batch_size, args.prompt_lookup_num_tokens, args.max_matching_ngram_size, VOCAB_SIZE
    )
    tree, lookups, merges = make_tree(batch_size, args.num_nodes), [], []
    drafts.draft(torch.device("cpu"))  # reads all of the context
    for _ in range(args.num_cycles):
        committed += args.num_committed
        begin = time.perf_counter()
        branch = drafts.draft(torch.device("cpu"))
        lookups.append(time.perf_counter() - begin)
        if branch is not None:
            begin = time.perf_counter()
            branch.added_to(tree, is_chain=False)
            merges.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(lookups), 1e3 * statistics.median(merges), len(merges) / args.num_cycles


def main() -> None:
    (args,) = HfArgumentParser(LookupArguments, description=__doc__).parse_args_into_dataclasses()
    print("| context | rows | looking up | merging | cycles that merge |\n|---|---|---|---|---|")
    for length in args.lengths:
        for batch_size in args.batch_sizes:
            lookup, merge, share = measure(length, batch_size, args)
            print(f"| {length} | {batch_size} | {lookup:.3f} ms | {merge:.3f} ms | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
