"""Tells what choosing the size of each cycle's tree can gain over the best fixed size, whatever the choice is made by.

    python benchmarks/bound_sizes.py --cost_table costs.json

Every text is decoded in cycles that verify the root of a tree alone, so that the drafter drafts after each of its
tokens. As it reads nothing but committed tokens, these are the trees that any way of decoding meets at that place, and
which of the drafted tokens are accepted is in the text. So all ways can be played through with the times of a table
(`measure_sizes.py --cost_table`), and one that knows the future is the bound. With `--prompt_lookup_num_tokens` the
trees hold what the context drafts, too. Nothing is timed.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import HfArgumentParser, PreTrainedModel, logging

from transformers_gumiho import GumihoCandidateGenerator, GumihoModel
from transformers_gumiho.drafting.committed_tokens import CommittedTokens
from transformers_gumiho.drafting.context_branch import ContextBranch
from transformers_gumiho.drafting.context_drafts import ContextDrafts
from transformers_gumiho.drafting.settings import DraftingSettings
from transformers_gumiho.drafting.tree_size import TREE_SIZES, SizeChoice, choose_size, path_probabilities, sizes_up_to
from transformers_gumiho.drafting.tree_sizing import TreeSizing
from transformers_gumiho.measuring.decoding_settings import decoding_settings
from transformers_gumiho.measuring.loading import load_pair
from transformers_gumiho.measuring.prompts import encode_turn, read_questions
from transformers_gumiho.model.acceptance_curves import AcceptanceCurves
from transformers_gumiho.model.cycle_costs import BatchCosts, CycleCostTable
from transformers_gumiho.tree.draft_tree import DraftTree, bare_root


DEMO_PAIR = Path(__file__).parent.parent / "examples" / "demo_pair"


@dataclass
class BoundArguments:
    cost_table: str = field(metadata={"help": "A JSON file that says what cycles cost."})
    target: str = field(default=str(DEMO_PAIR / "target"), metadata={"help": "The target."})
    assistant: str = field(default=str(DEMO_PAIR / "gumiho"), metadata={"help": "The Gumiho drafter."})
    prompts: str = field(default=str(DEMO_PAIR / "prompts.jsonl"), metadata={"help": "Prompts, one a line."})
    dtype: str = "float32"
    max_size: int = field(default=24, metadata={"help": "Drafted tokens of the largest tree."})
    prompt_lookup_num_tokens: int | None = field(
        default=None,
        metadata={"help": "Also draft so many tokens from the context; 0 for none (default: the drafter's setting)."},
    )
    first_prompt: int = 8
    num_prompts: int = 12
    max_new_tokens: int = 128
    temperature: float = field(default=0.0, metadata={"help": "Of the texts, each with its own seed; 0 is greedy."})


@dataclass
class Text:
    """
    A text with the drafter's trees.

    Attributes:
        prompt: Its tokens.
        tokens: Those of the answer.
        trees: Of one row, after each token of the answer but the last.
    """

    prompt: list[int]
    tokens: list[int]
    trees: list[DraftTree]

    def accepted(self, place: int, tree: DraftTree) -> list[int]:
        """Returns the drafted tokens of a tree after a token that are the text's, as their numbers, increasing."""
        children = {
            pair: node
            for node, pair in enumerate(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True))
            if node
        }
        numbers, node = [], 0
        for token in self.tokens[place + 1 :]:
            if (node := children.get((node, token), 0)) == 0:
                break
            numbers.append(node)
        return numbers

    def advance(self, place: int, tree: DraftTree) -> int:
        """Returns the tokens that a cycle commits there which verifies this tree."""
        return min(1 + len(self.accepted(place, tree)), len(self.trees) - place)


@contextmanager
def recording(trees: list[DraftTree]) -> Iterator[None]:
    """Keeps the trees that are drafted within it; what is verified is their roots."""
    draft = GumihoCandidateGenerator.draft_tree

    def draft_and_keep(self: GumihoCandidateGenerator, committed: CommittedTokens) -> DraftTree:
        trees.append(draft(self, committed))
        return bare_root(trees[-1].tokens[:, 0])

    GumihoCandidateGenerator.draft_tree = draft_and_keep  # type: ignore[method-assign]
    try:
        yield
    finally:
        GumihoCandidateGenerator.draft_tree = draft  # type: ignore[method-assign]


@torch.inference_mode()
def read_text(args: BoundArguments, target: PreTrainedModel, drafter: GumihoModel, prompt: list[int]) -> Text:
    """Decodes after a prompt, with the state of the global generator where tokens are sampled."""
    trees: list[DraftTree] = []
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    own = {"num_assistant_tokens": args.max_size, "cycle_costs": None, "prompt_lookup_num_tokens": None}
    with decoding_settings(drafter, own), recording(trees):
        ids = target.generate(
            torch.tensor([prompt], device=target.device), assistant_model=drafter,
            max_new_tokens=args.max_new_tokens, **sampling,
        )  # fmt: skip
    tokens = ids[0, len(prompt) :].tolist()
    return Text(prompt, tokens, trees[: len(tokens) - 1])


def read_texts(args: BoundArguments) -> tuple[list[Text], CycleCostTable, "Lookup | None"]:
    """Returns the texts that are played, those of one token left out, what cycles cost, and how the context drafts."""
    table = CycleCostTable.parse(json.loads(Path(args.cost_table).read_text(encoding="utf-8")))
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype)
    if args.prompt_lookup_num_tokens is not None:
        drafter.generation_config.prompt_lookup_num_tokens = args.prompt_lookup_num_tokens
    lookup = lookup_of(drafter)
    questions = read_questions(args.prompts, num_questions=args.first_prompt + args.num_prompts)[args.first_prompt :]
    prompts = [encode_turn(tokenizer, question.turns[:1], []) for question in questions]
    texts = []
    for number, prompt in enumerate(prompts):
        torch.manual_seed(number)
        texts.append(read_text(args, target, drafter, prompt))
    return [text for text in texts if text.trees], table, lookup


@dataclass(frozen=True)
class Lookup:
    """Drafts from the context: how many tokens at most, after how many newest ones."""

    num_tokens: int
    max_ngram_size: int = 2


def lookup_of(drafter: GumihoModel) -> Lookup | None:
    """Returns how the context drafts by the drafter's settings, `None` where it does not."""
    settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)
    if settings.branching_factor == 1:
        raise SystemExit("Chains are not played through: give a drafter whose `branching_factor` is 2 or more.")
    if not settings.prompt_lookup_num_tokens:
        return None
    return Lookup(settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size)


class Way:
    """
    A way of decoding a text: in each cycle a tree of fixed size.

    Args:
        size: The drafted tokens.

    Attributes:
        most_from_context: The most tokens of a path that the context drafts.
        has_runs: Whether what the context drafts is verified alone, and more of it, where it was right.
    """

    has_runs = True

    def __init__(self, size: int):
        self.size = self.most_from_context = size

    def rests(self) -> bool:
        """Whether the drafter rests in the next cycle."""
        return False

    def takes_run(self, branch: ContextBranch) -> bool:
        """Whether the next cycle verifies all of a branch, and nothing else."""
        return True

    def size_at_rest(self, branch: ContextBranch | None) -> int:
        """Returns how many tokens of the context's branch are verified where the drafter rests."""
        return 0

    def tree(self, place: int, drafted: DraftTree, branch: ContextBranch | None) -> DraftTree:
        """Returns what is verified of a drafter's tree and the context's branch."""
        tree = drafted.first(self.size)
        return tree if branch is None else branch.added_to(tree, is_chain=False)

    def cycle_ms(self, costs: BatchCosts, num_verified: int) -> float:
        """Returns the milliseconds of a cycle that verifies so many tokens of the newest tree."""
        return float(costs.cycle_ms(num_verified))

    def observe(self, num_tokens: int, num_right: int) -> None:
        """Takes in what came of a cycle: its tokens, and how many of the branch were right."""


class ContextAlone(Way):
    """
    The drafter always rests: plain decoding, with what the context drafts as far as it is worth its time. (Decoding
    takes it only where that is clearly faster.)
    """

    has_runs = False

    def __init__(self, costs: BatchCosts, max_size: int):
        self.costs, self.most_from_context = costs, max_size

    def rests(self) -> bool:
        return True

    def size_at_rest(self, branch: ContextBranch | None) -> int:
        if branch is None:
            return 0
        probabilities = path_probabilities(branch.scores)
        sizes = [size for size in TREE_SIZES if size <= probabilities.shape[1]]
        return choose_size(probabilities, sizes, self.costs, drafter_rests=True).size


class SizesThatFit(Way):
    """What decoding does with `cycle_costs`."""

    def __init__(self, costs: BatchCosts, curves: AcceptanceCurves | None, max_size: int):
        # Runs are longer than what the context drafts otherwise.
        self.size = 0
        self.sizing, self.most_from_context = TreeSizing(costs, curves), max_size

    def rests(self) -> bool:
        return self.sizing.pauses()

    def takes_run(self, branch: ContextBranch) -> bool:
        return self.sizing.takes_run(branch)

    def size_at_rest(self, branch: ContextBranch | None) -> int:
        return self.sizing.size_at_rest([1.0], branch)

    def tree(self, place: int, drafted: DraftTree, branch: ContextBranch | None) -> DraftTree:
        num_drafted = self.sizing.num_to_draft(drafted.tokens.shape[1] - 1, [1.0], branch)
        tree = self.sizing.weigh(drafted.first(num_drafted))
        if branch is not None:
            tree = branch.added_to(tree, is_chain=False)
        return self.sizing.cut(tree, [1.0], branch)

    def cycle_ms(self, costs: BatchCosts, num_verified: int) -> float:
        assert isinstance(self.sizing.reason, SizeChoice)
        return self.sizing.reason.cycle_ms[self.sizing.reason.place]

    def observe(self, num_tokens: int, num_right: int) -> None:
        self.sizing.observe([num_tokens], [num_right])


class AtRate(Way):
    """
    Sizes by expectation: a token more must not take longer than tokens take on the whole (Dinkelbach's method). It
    looks at trees before it decides how much of them to draft, if anything, so decoding cannot do quite as well.
    """

    has_runs = False

    def __init__(self, costs: BatchCosts, curves: AcceptanceCurves | None, rate: float):
        self.costs, self.rate, self.sizing = costs, rate, TreeSizing(costs, curves)

    def tree(self, place: int, drafted: DraftTree, branch: ContextBranch | None) -> DraftTree:
        tree = self.sizing.weigh(drafted)
        scores = tree.scores[:, 1:].numpy(force=True)
        found = choose_size(path_probabilities(scores), sizes_up_to(scores.shape[1]), self.costs)
        gains = 1 + np.array(found.expected) - self.rate * np.array(found.cycle_ms)
        best = int(gains.argmax())
        # A tree of nothing stands for a step without the drafter.
        return tree.first(found.sizes[best] if gains[best] > 1 - self.rate * self.costs.plain_ms else 0)


@dataclass
class Play:
    """What a way of decoding did: milliseconds by the table, tokens, cycles."""

    ms: float = 0.0
    num_tokens: int = 0
    num_cycles: int = 0

    def add(self, other: "Play") -> None:
        self.ms, self.num_tokens = self.ms + other.ms, self.num_tokens + other.num_tokens
        self.num_cycles += other.num_cycles

    @property
    def speed(self) -> float:
        """Tokens per millisecond."""
        return self.num_tokens / self.ms


def play_text(text: Text, costs: BatchCosts, way: Way, lookup: Lookup | None, nothing_is_rest: bool) -> Play:
    place, played, num_tokens = 0, Play(), 0

    def read(starts: list[int]) -> list[list[int]]:
        return [[*text.prompt, *text.tokens[: place + 1]][starts[0] :]]

    context, most = None, 0
    if lookup is not None:
        # As decoding does: no path is longer than a tree has tokens.
        most = min(lookup.num_tokens, way.most_from_context)
        context = ContextDrafts(read, [0], most, lookup.max_ngram_size, vocab_size=1 << 62)
    while place < len(text.trees):
        # As in decoding, the pass over a run chooses a token, too.
        longest = len(text.tokens) - place - 1
        lengths = range(max(way.size, most) + 1, longest) if way.has_runs else range(0)
        branch = None if context is None else context.draft(torch.device("cpu"), lengths)
        if num_tokens:
            way.observe(num_tokens, 0 if context is None else context.num_right[0])
        root, rests = text.trees[place].tokens[:, 0], way.rests()
        is_run = branch is not None and branch.is_run and way.takes_run(branch)
        if context is not None and branch is not None and branch.is_run and not is_run:
            branch = context.refuse(branch)
        if branch is not None and is_run:
            length = branch.tokens.shape[1]
            tree, ms = branch.alone(root, length, length), float(costs.undrafted_ms(length))
        elif not rests:
            tree = way.tree(place, text.trees[place], branch)
            num_drafted = tree.tokens.shape[1] - 1
            is_rest = nothing_is_rest and num_drafted == 0
            ms = costs.plain_ms if is_rest else way.cycle_ms(costs, num_drafted)
        else:
            size = way.size_at_rest(branch)
            tree = bare_root(root) if branch is None or size == 0 else branch.alone(root, size, way.most_from_context)
            ms = float(costs.undrafted_ms(size))
        num_tokens = text.advance(place, tree)
        played.add(Play(ms, num_tokens, 1))
        place += num_tokens
    return played


def play(
    texts: list[Text],
    costs: BatchCosts,
    make_way: Callable[[], Way],
    lookup: Lookup | None = None,
    nothing_is_rest: bool = False,
) -> Play:
    """
    Plays all texts through.

    Args:
        texts: The texts.
        costs: What cycles cost.
        make_way: Makes the way of decoding, anew for each text.
        lookup: How the context drafts, if it does.
        nothing_is_rest: A drafted tree that is cut to nothing costs no more than a step of plain decoding.
    """
    whole = Play()
    for text in texts:
        whole.add(play_text(text, costs, make_way(), lookup, nothing_is_rest))
    return whole


def play_by_rate(texts: list[Text], costs: BatchCosts, curves: AcceptanceCurves | None) -> Play:
    """Plays all texts through with the sizes that are best by expectation; the rate is found by trying."""
    rate, played = 1 / costs.plain_ms, Play()
    for _ in range(6):
        played = play(texts, costs, partial(AtRate, costs, curves, rate), nothing_is_rest=True)
        rate = played.speed
    return played


def play_knowing_all(texts: list[Text], costs: BatchCosts, max_size: int) -> Play:
    """Plays all texts through with the sizes that are best, as one knows who knows what will be accepted."""
    cycle_ms = costs.cycle_ms(range(max_size + 1)).tolist()
    played = Play()
    for text in texts:
        # From each place on to the end: the least milliseconds, and the cycles that take them.
        best = [Play(0.0, 0, 0)]
        for place in reversed(range(len(text.trees))):
            accepted, left = text.accepted(place, text.trees[place]), len(best)
            steps = [(costs.plain_ms, 1)]
            steps += [(ms, min(1 + sum(n <= size for n in accepted), left)) for size, ms in enumerate(cycle_ms)]
            options = [(ms + best[-tokens].ms, ms, tokens) for ms, tokens in steps]
            _, ms, tokens = min(options)
            rest = best[-tokens]
            best.append(Play(ms + rest.ms, tokens + rest.num_tokens, 1 + rest.num_cycles))
        played.add(best[-1])
    return played


def rows_of(
    texts: list[Text],
    costs: BatchCosts,
    curves: AcceptanceCurves | None,
    max_size: int,
    lookup: Lookup | None = None,
) -> Iterator[tuple[str, Play]]:
    yield "plain decoding", play(texts, costs, partial(ContextAlone, costs, max_size))
    if lookup is not None:
        yield "the context alone", play(texts, costs, partial(ContextAlone, costs, max_size), lookup)
    sizes = [size for size in sizes_up_to(max_size) if size]
    fixed = {size: play(texts, costs, partial(Way, size), lookup) for size in sizes}
    best = max(fixed, key=lambda size: fixed[size].speed)
    yield f"the best fixed size, {best}", fixed[best]
    each = Play()
    for text in texts:
        each.add(max((play([text], costs, partial(Way, size), lookup) for size in sizes), key=lambda one: one.speed))
    yield "the best fixed size of each text", each
    yield "sizes that fit", play(texts, costs, partial(SizesThatFit, costs, curves, max_size), lookup)
    if lookup is None:
        yield "best by expectation", play_by_rate(texts, costs, curves)
        yield "knowing what will be accepted", play_knowing_all(texts, costs, max_size)


def main() -> None:
    (args,) = HfArgumentParser(BoundArguments, description=__doc__).parse_args_into_dataclasses()
    logging.set_verbosity_error()
    texts, table, lookup = read_texts(args)
    is_sampling = args.temperature > 0
    costs, curves = table.for_batch(1, is_sampling), table.curves(is_sampling)
    print(f"{sum(len(text.trees) for text in texts)} places of {len(texts)} texts")
    played = dict(rows_of(texts, costs, curves, args.max_size, lookup))
    best = next(one for name, one in played.items() if name.startswith("the best fixed size,"))
    plain = played["plain decoding"]
    print("| way | speed-up by the table | against the best fixed size | tau |\n|---|---|---|---|")
    for name, one in played.items():
        gain, tau = one.speed / best.speed - 1, one.num_tokens / one.num_cycles
        print(f"| {name} | {one.speed / plain.speed:.2f} | {gain:+.1%} | {tau:.2f} |")


if __name__ == "__main__":
    main()
