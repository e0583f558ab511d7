"""Tells what choosing the size of each cycle's tree can gain over the best fixed size, whatever the choice is made by.

    python benchmarks/bound_sizes.py --cost_table costs.json

Every text is decoded plainly once. Then the drafter drafts the largest tree after each of its tokens, and the target
tells which of the drafted tokens it would accept. As the drafter reads nothing but committed tokens, these are the
trees that any way of decoding meets at that place; so all ways can be played through with the times of a table
(`measure_sizes.py --cost_table`), and one that knows the future is the bound. Nothing is timed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import HfArgumentParser, PreTrainedModel, logging

from transformers_gumiho import GumihoModel
from transformers_gumiho.decoding.observers import GenerationObserver, observing
from transformers_gumiho.drafting.tree_size import choose_size, path_probabilities, sizes_up_to
from transformers_gumiho.drafting.tree_sizing import TreeSizing
from transformers_gumiho.measuring.decoding_settings import decoding_settings
from transformers_gumiho.measuring.loading import load_pair
from transformers_gumiho.measuring.prompts import encode_turn, padded_batches, read_questions
from transformers_gumiho.model.cycle_costs import AcceptanceCurve, BatchCosts, CycleCostTable
from transformers_gumiho.tree.draft_tree import DraftTree
from transformers_gumiho.tree.verification import AcceptedPath


DEMO_PAIR = Path(__file__).parent.parent / "examples" / "demo_pair"


@dataclass
class BoundArguments:
    cost_table: str = field(metadata={"help": "A JSON file that says what cycles cost."})
    target: str = field(default=str(DEMO_PAIR / "target"), metadata={"help": "The target."})
    assistant: str = field(default=str(DEMO_PAIR / "gumiho"), metadata={"help": "The Gumiho drafter."})
    prompts: str = field(default=str(DEMO_PAIR / "prompts.jsonl"), metadata={"help": "Prompts, one a line."})
    dtype: str = "float32"
    max_size: int = field(default=24, metadata={"help": "Drafted tokens of the largest tree."})
    first_prompt: int = 8
    num_prompts: int = 12
    max_new_tokens: int = 128
    batch_size: int = field(default=32, metadata={"help": "Places of a text that are drafted after together."})


@dataclass
class Place:
    """
    A place of a text: its last token is the root of a tree.

    Attributes:
        tree: Of one row.
        accepted: The drafted tokens that the target accepts, as their numbers in the tree, increasing.
        num_left: Tokens of the text that come after its last one.
    """

    tree: DraftTree
    accepted: list[int]
    num_left: int = 1

    @property
    def scores(self) -> np.ndarray:
        return self.tree.scores[:, 1:].numpy(force=True).astype(np.float64)

    def advance(self, size: int) -> int:
        """Returns the tokens that a cycle commits here which verifies the first `size` drafted tokens."""
        return min(1 + sum(number <= size for number in self.accepted), self.num_left)


class _Stop(Exception):
    """Ends a generation after its first cycle."""


class _FirstCycle(GenerationObserver):
    def __init__(self) -> None:
        self.places: list[Place] = []

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        for row, length in enumerate(path.accepted_lengths):
            part = {name: getattr(tree, name)[row : row + 1].clone() for name in _TENSORS}
            self.places.append(Place(DraftTree(**part, max_depth=tree.max_depth), path.nodes[row, 1:length].tolist()))
        raise _Stop


_TENSORS = ("tokens", "parents", "depths", "scores", "ancestors")


@torch.inference_mode()
def read_text(
    args: BoundArguments, target: PreTrainedModel, tokenizer: Any, drafter: GumihoModel, prompt: list[int]
) -> list[Place]:
    """Returns the places of a text: after its first token, its second, and so on to the last but one."""
    ids = torch.tensor([prompt], device=target.device)
    text = target.generate(ids, max_new_tokens=args.max_new_tokens, do_sample=False)[0, len(prompt) :].tolist()
    # Each generation chooses the next token by itself and drafts after it.
    begins = [prompt + text[:place] for place in range(len(text) - 1)]
    places: list[Place] = []
    for batch in padded_batches(tokenizer, begins, args.batch_size, target.device):
        first = _FirstCycle()
        try:
            with observing(first):
                target.generate(**batch, assistant_model=drafter, max_new_tokens=64, do_sample=False)
        except _Stop:
            places += first.places
    # In low precision a batch may choose another token at a near-tie: the text is played up to there.
    parted = [i for i, place in enumerate(places) if int(place.tree.tokens[0, 0]) != text[i]]
    places = places[: parted[0]] if parted else places
    for index, place in enumerate(places):
        place.num_left = len(places) - index
    return places


@dataclass
class Play:
    """What a way of decoding did: milliseconds by the table, tokens, cycles."""

    ms: float = 0.0
    num_tokens: int = 0
    num_cycles: int = 0

    def add(self, ms: float, num_tokens: int) -> None:
        self.ms, self.num_tokens, self.num_cycles = self.ms + ms, self.num_tokens + num_tokens, self.num_cycles + 1


def play(texts: list[list[Place]], costs: BatchCosts, choose: Callable[[Place], int | None]) -> Play:
    """Plays all texts through; `choose` gives the size of a tree, `None` for a step without a draft."""
    played = Play()
    for places in texts:
        at = 0
        while at < len(places):
            size = choose(places[at])
            tokens = 1 if size is None else places[at].advance(size)
            played.add(costs.plain_ms if size is None else float(costs.cycle_ms(size)), tokens)
            at += tokens
    return played


def play_sizing(texts: list[list[Place]], costs: BatchCosts, curve: AcceptanceCurve | None) -> Play:
    """Plays all texts through with the sizes that decoding chooses."""
    played = Play()
    for places in texts:
        sizing, at = TreeSizing(costs, curve), 0
        while at < len(places):
            if sizing.pauses():
                played.add(costs.plain_ms, 1)
                at += 1
                continue
            size = sizing.cut(places[at].tree, [True]).tokens.shape[1] - 1
            tokens = places[at].advance(size)
            sizing.observe([tokens])
            # A tree that is cut to nothing was drafted, too.
            played.add(float(costs.cycle_ms(size)), tokens)
            at += tokens
    return played


def play_by_rate(texts: list[list[Place]], costs: BatchCosts, curve: AcceptanceCurve | None) -> Play:
    """
    Plays all texts through with the sizes that are best by expectation: a token more must not take longer than
    tokens take on the whole (Dinkelbach's method), which is found by trying. It looks at trees before it decides not
    to draft them, so decoding cannot do quite as well.
    """
    rate, played = 1 / costs.plain_ms, Play()
    for _ in range(6):

        def choose(place: Place, rate: float = rate) -> int | None:
            sizes = sizes_up_to(place.scores.shape[1])
            found = choose_size(path_probabilities(place.scores, curve), sizes, costs)
            gains = 1 + np.array(found.expected) - rate * np.array(found.cycle_ms)
            best = int(gains.argmax())
            return sizes[best] if gains[best] > 1 - rate * costs.plain_ms else None

        played = play(texts, costs, choose)
        rate = played.num_tokens / played.ms
    return played


def play_knowing_all(texts: list[list[Place]], costs: BatchCosts, max_size: int) -> Play:
    """Plays all texts through with the sizes that are best, as one knows who knows what will be accepted."""
    sizes = range(max_size + 1)
    cycle_ms = costs.cycle_ms(sizes)
    played = Play()
    for places in texts:
        left = np.zeros(len(places) + 1)
        chosen: list[tuple[float, int]] = []
        for at in reversed(range(len(places))):
            options = [(costs.plain_ms, 1), *((float(cycle_ms[s]), places[at].advance(s)) for s in sizes)]
            best = min(options, key=lambda option: option[0] + left[at + option[1]])
            left[at] = best[0] + left[at + best[1]]
            chosen.insert(0, best)
        at = 0
        while at < len(places):
            played.add(*chosen[at])
            at += chosen[at][1]
    return played


def rows_of(
    texts: list[list[Place]], costs: BatchCosts, curve: AcceptanceCurve | None, max_size: int
) -> Iterator[tuple[str, Play]]:
    yield "plain decoding", play(texts, costs, lambda place: None)
    fixed = {size: play(texts, costs, lambda place, size=size: size) for size in sizes_up_to(max_size) if size}
    best = min(fixed, key=lambda size: fixed[size].ms / fixed[size].num_tokens)
    yield f"the best fixed size, {best}", fixed[best]
    own = [[play([text], costs, lambda place, size=size: size) for size in fixed] for text in texts]
    each = [min(plays, key=lambda one: one.ms / one.num_tokens) for plays in own]
    yield "the best fixed size of each text", Play(*(sum(getattr(one, n) for one in each) for n in vars(each[0])))
    yield "sizes that fit", play_sizing(texts, costs, curve)
    yield "best by expectation", play_by_rate(texts, costs, curve)
    yield "knowing what will be accepted", play_knowing_all(texts, costs, max_size)


def main() -> None:
    (args,) = HfArgumentParser(BoundArguments, description=__doc__).parse_args_into_dataclasses()
    logging.set_verbosity_error()
    table = CycleCostTable.parse(json.loads(Path(args.cost_table).read_text(encoding="utf-8")))
    costs, curve = table.for_batch(1), table.curve(is_sampling=False)
    target, tokenizer, drafter = load_pair(args.target, args.assistant, args.dtype)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    questions = read_questions(args.prompts, num_questions=args.first_prompt + args.num_prompts)
    with decoding_settings(drafter, {"num_assistant_tokens": args.max_size, "cycle_costs": None}):
        texts = [
            read_text(args, target, tokenizer, drafter, encode_turn(tokenizer, question.turns[:1], []))
            for question in questions[args.first_prompt :]
        ]
    print(f"{sum(map(len, texts))} places of {len(texts)} texts")
    played = dict(rows_of([text for text in texts if text], costs, curve, args.max_size))
    best = next(one for name, one in played.items() if name.startswith("the best fixed size,"))
    plain = played["plain decoding"]
    print("| way | speed-up by the table | against the best fixed size | tau |\n|---|---|---|---|")
    for name, one in played.items():
        speed, tau = one.num_tokens / one.ms, one.num_tokens / one.num_cycles
        print(
            f"| {name} | {speed / (plain.num_tokens / plain.ms):.2f} | {speed / (best.num_tokens / best.ms) - 1:+.1%} "
            f"| {tau:.2f} |"
        )


if __name__ == "__main__":
    main()
