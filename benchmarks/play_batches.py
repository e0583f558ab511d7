"""Plays batches through with recorded trees: how their sizes are best chosen, told without a clock.

    python benchmarks/play_batches.py --cost_table costs.json --batch_sizes 4 8

As in `bound_sizes.py`, texts are decoded once, and the drafter's trees kept after each of their tokens. Then batches
of these texts, put together at random, are played through: with trees of fixed sizes, with sizes that fit by the mean
of the rows, and with sizes that fit as decoding chooses them, for the rows that are behind, also for a drafter that is
as sure and always wrong. A batch takes as long as its slowest row; what cycles cost is the table's. With `--shortest
16` texts end anywhere from their 16th token on, as answers do in a chat; without, most of them are as long as
`--max_new_tokens`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from bound_sizes import BoundArguments, Lookup, Text, read_texts
from transformers import HfArgumentParser, logging

from transformers_gumiho.drafting.context_branch import ContextBranch
from transformers_gumiho.drafting.context_drafts import ContextDrafts
from transformers_gumiho.drafting.tree_size import SizeChoice, row_weights
from transformers_gumiho.drafting.tree_sizing import TreeSizing
from transformers_gumiho.model.cycle_costs import BatchCosts, CycleCostTable
from transformers_gumiho.tree.draft_tree import DraftTree, bare_root


Weights = Callable[[Sequence[int | None]], list[float]]


@dataclass
class BatchArguments(BoundArguments):
    batch_sizes: list[int] = field(default_factory=lambda: [4, 8])
    fixed_sizes: list[int] = field(default_factory=lambda: [2, 3, 4, 6, 8, 12], metadata={"help": "Of fixed trees."})
    num_rounds: int = field(default=4, metadata={"help": "How often the texts are put into batches."})
    shortest: int | None = field(
        default=None, metadata={"help": "End texts at random, at this number of tokens at least (default: nowhere)."}
    )
    seed: int = 0


def equal_weights(lengths: Sequence[int | None]) -> list[float]:
    """Returns what a further token counts where all rows that are open count the same."""
    return [float(length is not None) for length in lengths]


class PlayedBatch:
    """
    A batch of texts that is being decoded.

    Args:
        texts: One in each row.
        lookup: How the context drafts, if it does.
        most_from_context: The most tokens of a path that it drafts.
    """

    def __init__(self, texts: Sequence[Text], lookup: Lookup | None, most_from_context: int):
        self.texts = texts
        self.places = [0] * len(texts)
        self.context = None
        if lookup is not None:
            most = min(lookup.num_tokens, most_from_context)
            starts = [0] * len(texts)
            self.context = ContextDrafts(self._read, starts, most, lookup.max_ngram_size, vocab_size=1 << 62)

    def _read(self, starts: list[int]) -> list[list[int]]:
        rows = zip(self.texts, self.places, starts, strict=True)
        return [[*text.prompt, *text.tokens[: place + 1]][start:] for text, place, start in rows]

    @property
    def lengths(self) -> list[int | None]:
        """The tokens of each row so far, `None` where it has ended."""
        rows = zip(self.texts, self.places, strict=True)
        return [place + 1 if place < len(text.trees) else None for text, place in rows]

    @property
    def drafted(self) -> DraftTree:
        """What the drafter drafts now."""
        rows = zip(self.texts, self.places, strict=True)
        trees = [text.trees[min(place, len(text.trees) - 1)] for text, place in rows]
        stacked = {
            item.name: torch.cat([getattr(tree, item.name) for tree in trees])
            for item in fields(DraftTree)
            if item.name != "max_depth"
        }
        return DraftTree(**stacked, max_depth=max(tree.max_depth for tree in trees))

    def look_up(self) -> ContextBranch | None:
        """Returns what the context drafts now."""
        return None if self.context is None else self.context.draft(torch.device("cpu"))

    def advance(self, tree: DraftTree) -> list[int]:
        """Returns the tokens that each row commits of a tree; 0 where it had ended."""
        accepted = []
        for row, text in enumerate(self.texts):
            is_open = self.places[row] < len(text.trees)
            accepted.append(text.advance(self.places[row], _row_of(tree, row)) if is_open else 0)
            self.places[row] += accepted[-1]
        return accepted


def _row_of(tree: DraftTree, row: int) -> DraftTree:
    tensors = {item.name: getattr(tree, item.name) for item in fields(DraftTree)}
    return DraftTree(
        **{name: value[row : row + 1] if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}
    )


def play_fixed(texts: Sequence[Text], costs: BatchCosts, size: int, lookup: Lookup | None) -> float:
    """Returns the milliseconds that trees of a fixed size take."""
    batch, ms = PlayedBatch(texts, lookup, size), 0.0
    while any(length is not None for length in batch.lengths):
        branch, tree = batch.look_up(), batch.drafted.first(size)
        batch.advance(tree if branch is None else branch.added_to(tree, is_chain=False))
        ms += float(costs.cycle_ms(size))
    return ms


def play_fitting(
    texts: Sequence[Text], costs: BatchCosts, sizing: TreeSizing, lookup: Lookup | None, weigh: Weights = row_weights
) -> Iterator[tuple[int, float]]:
    """Yields the drafted tokens of each cycle where sizes fit, and the milliseconds that it takes."""
    most = texts[0].trees[0].tokens.shape[1] - 1
    batch, accepted = PlayedBatch(texts, lookup, most), []
    while any(length is not None for length in batch.lengths):
        branch, drafted, weights = batch.look_up(), batch.drafted, weigh(batch.lengths)
        if accepted:
            sizing.observe(accepted, () if batch.context is None else batch.context.num_right)
        if sizing.pauses():
            size, root = sizing.size_at_rest(weights, branch), drafted.tokens[:, 0]
            tree = bare_root(root) if branch is None or size == 0 else branch.alone(root, size, most)
            yield size, float(costs.undrafted_ms(size))
        else:
            tree = sizing.weigh(drafted.first(sizing.num_to_draft(most, weights, branch)))
            tree = tree if branch is None else branch.added_to(tree, is_chain=False)
            tree = sizing.cut(tree, weights, branch)
            assert isinstance(sizing.reason, SizeChoice)
            yield sizing.reason.size, sizing.reason.cycle_ms[sizing.reason.place]
        accepted = batch.advance(tree)


def ended_at_random(text: Text, number: random.Random, shortest: int) -> Text:
    """Returns the beginning of a text, of at least `shortest` tokens."""
    length = number.randint(min(shortest, len(text.tokens)), len(text.tokens))
    return Text(text.prompt, text.tokens[:length], text.trees[: length - 1])


def always_wrong(text: Text) -> Text:
    """Returns a text whose trees hold tokens that none has, with the scores that they had."""
    trees = [
        replace(tree, tokens=torch.cat((tree.tokens[:, :1], torch.full_like(tree.tokens[:, 1:], -1)), dim=1))
        for tree in text.trees
    ]
    return Text(text.prompt, text.tokens, trees)


def put_into_batches(texts: list[Text], batch_size: int, args: BatchArguments) -> list[list[Text]]:
    """Returns batches of texts, in which each text is as often as there are rounds, but for what is left over."""
    if batch_size > len(texts):
        raise SystemExit(f"Batches of {batch_size} need as many texts, got {len(texts)}: raise --num_prompts.")
    number, batches = random.Random(args.seed), []
    for _ in range(args.num_rounds):
        shuffled = number.sample(texts, len(texts))
        if args.shortest is not None:
            shuffled = [ended_at_random(text, number, max(args.shortest, 2)) for text in shuffled]
        batches += [shuffled[k : k + batch_size] for k in range(0, len(texts) - batch_size + 1, batch_size)]
    return batches


def speeds_of(
    batches: list[list[Text]], table: CycleCostTable, args: BatchArguments, lookup: Lookup | None
) -> Iterator[tuple[str, float]]:
    """Yields the speed of each way, plain decoding's being 1."""
    is_sampling = args.temperature > 0
    costs, curves = table.for_batch(len(batches[0]), is_sampling), table.curves(is_sampling)
    plain_ms = sum(max(len(text.trees) for text in texts) for texts in batches) * costs.plain_ms
    for size in args.fixed_sizes:
        yield f"trees of {size}", plain_ms / sum(play_fixed(texts, costs, size, lookup) for texts in batches)
    wrong = [[always_wrong(text) for text in texts] for texts in batches]
    for name, played, weigh in (
        ("for the mean of the rows", batches, equal_weights),
        ("for those that are behind", batches, row_weights),
        ("with a drafter that is always wrong", wrong, row_weights),
    ):
        cycles = [
            ms for texts in played for _, ms in play_fitting(texts, costs, TreeSizing(costs, curves), lookup, weigh)
        ]
        yield f"sizes that fit, {name}", plain_ms / sum(cycles)


def main() -> None:
    (args,) = HfArgumentParser(BatchArguments, description=__doc__).parse_args_into_dataclasses()
    logging.set_verbosity_error()
    texts, table, lookup = read_texts(args)
    batches = {size: put_into_batches(texts, size, args) for size in args.batch_sizes}
    speeds = {size: dict(speeds_of(batches[size], table, args, lookup)) for size in args.batch_sizes}
    print(f"| way | {' | '.join(f'batches of {size}' for size in args.batch_sizes)} |")
    print(f"|---|{'---|' * len(args.batch_sizes)}")
    for name in speeds[args.batch_sizes[0]]:
        print(f"| {name} | {' | '.join(f'{speeds[size][name]:.2f}' for size in args.batch_sizes)} |")


if __name__ == "__main__":
    main()
