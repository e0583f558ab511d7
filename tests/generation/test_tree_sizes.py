"""`cycle_costs`: trees of the size that fits each cycle, and pauses where drafts are worth nothing. The same texts."""

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from chains import make_chain_drafter, make_chain_target, partly_right_drafts
from cycle_costs import make_cost_table
from targets import make_drafter, make_prompts, make_target, passes_of
from torch._dynamo.utils import counters
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation import TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from transformers_gumiho import GumihoModel
from transformers_gumiho.decoding import upcoming_trees
from transformers_gumiho.decoding.observers import GenerationObserver, observing
from transformers_gumiho.drafting.candidate_generator import GumihoCandidateGenerator
from transformers_gumiho.drafting.committed_tokens import CommittedTokens
from transformers_gumiho.drafting.drafter import GumihoDrafter
from transformers_gumiho.drafting.tree_size import ContextRun, DraftingPause, SizeChoice, SizeReason
from transformers_gumiho.drafting.tree_sizing import LATER_PAUSE, TreeSizing
from transformers_gumiho.internals import CACHE_NAME, compile_on_every_device
from transformers_gumiho.tree.draft_tree import DraftTree
from transformers_gumiho.tree.verification import AcceptedPath


STATIC = {"cache_implementation": "static", "disable_compile": True}
# With these a cycle of a tiny random pair drafts for a while, then pauses, and tries again.
COSTS = {"draft_ms": 6.0, "node_ms": 0.3}
# How often drafted tokens are accepted; flat in the middle, where a token and the one below it are equally likely.
CURVES = [
    {"scores": [-6.0, -4.0, -1.5, 0.0], "shares": [0.01, 0.2, 0.2, 0.9]},
    {"scores": [-5.0, -0.5], "shares": [0.1, 0.6]},
]


class KeepGoing(StoppingCriteria):
    """One of the caller's, that nobody knows: all rows then advance in step."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Cycles(GenerationObserver):
    """Keeps the tree of every cycle, what was committed from it, and why it had its size."""

    def __init__(self) -> None:
        self.trees: list[DraftTree] = []
        self.lengths: list[list[int]] = []
        self.reasons: list[SizeReason] = []

    def on_tree_sized(self, reason: SizeReason) -> None:
        self.reasons.append(reason)

    def on_cycle(self, tree: DraftTree, path: AcceptedPath) -> None:
        self.trees.append(tree)
        self.lengths.append(path.accepted_lengths)


def make_pair(family: str = "llama", costs: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, GumihoModel]:
    target = make_target(family, seed=3)
    settings = {"num_assistant_tokens": 20, "branching_factor": 3} | settings
    return target, make_drafter(target, **settings, cycle_costs=make_cost_table(**COSTS if costs is None else costs))


def has_pauses_and_drafts(sizes: list[int]) -> bool:
    """Whether drafting went on after a pause, and trees had several sizes."""
    drafted = [place for place, size in enumerate(sizes) if size]
    return len(set(sizes)) > 1 and any(b - a > 1 for a, b in pairwise(drafted))


@pytest.mark.parametrize("shapes", [{}, STATIC], ids=["growing", "static"])
@pytest.mark.parametrize("curves", [None, CURVES], ids=["word", "curves"])
@pytest.mark.parametrize(("family", "branching_factor"), [("llama", 1), ("llama", 3), ("gemma3", 3)])
def test_texts_are_those_of_plain_decoding(
    family: str, branching_factor: int, curves: list[dict[str, Any]] | None, shapes: dict[str, Any]
) -> None:
    costs = COSTS | ({} if curves is None else {"greedy": curves, "sampling": curves})
    target, drafter = make_pair(family, costs, branching_factor=branching_factor)
    sizes = []
    for lengths in ([9], [9, 4, 1]):
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
            arguments: dict[str, Any] = {**make_prompts(lengths), "max_new_tokens": 50, **sampling}
            torch.manual_seed(0)
            plain = target.generate(**arguments)
            for lookup in ({}, {"prompt_lookup_num_tokens": 6}):
                torch.manual_seed(0)
                drafted = target.generate(
                    **arguments, assistant_model=drafter, return_dict_in_generate=True, **shapes, **lookup
                )
                assert torch.equal(drafted.sequences, plain)
                sizes.append(drafted.tree_sizes)
    assert any(map(has_pauses_and_drafts, sizes)), "the equality says something only where sizes differ"


@pytest.mark.parametrize("lengths", [[9], [9, 4, 1]], ids=["one", "batch"])
@pytest.mark.parametrize("transition_rank", [0, 4])
@pytest.mark.parametrize("do_sample", [False, True])
def test_trees_of_fewer_nodes_are_the_beginning_of_larger_ones(
    lengths: list[int], transition_rank: int, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few are drafted: one node needs no second serial pass, and two no parallel heads."""
    target, numbers = make_target("llama", seed=3), (1, 2, 3, 5, 12, 32)
    drafter = make_drafter(target, num_assistant_tokens=32, branching_factor=3, transition_rank=transition_rank)
    grow, run = GumihoDrafter._grow_tree, GumihoDrafter._run_serial_head  # noqa: SLF001
    passes: list[Any] = []

    def grow_all(
        self: GumihoDrafter, root: Any, feature: Any, positions: Any, noise: torch.Tensor | None
    ) -> DraftTree:
        trees = {}
        for number in numbers:
            self.draft_at_most(number)
            of_depths = None if noise is None else noise[:, : self.settings.tree_depth]
            passes.clear()
            trees[number] = grow(self, root, feature, positions, of_depths)
            assert len(passes) == (0 if number == 1 else 1)
        for number, tree in trees.items():
            first = trees[32].first(number)
            assert torch.equal(tree.tokens, first.tokens)
            assert torch.equal(tree.parents, first.parents)
            assert torch.equal(tree.ancestors, first.ancestors)
            torch.testing.assert_close(tree.scores, first.scores)
        return trees[32]

    monkeypatch.setattr(GumihoDrafter, "_grow_tree", grow_all)
    monkeypatch.setattr(GumihoDrafter, "_run_serial_head", lambda *args: (passes.append(args), run(*args))[1])
    torch.manual_seed(0)
    drafted = target.generate(**make_prompts(lengths), max_new_tokens=20, do_sample=do_sample, assistant_model=drafter)
    torch.manual_seed(0)
    assert torch.equal(drafted, target.generate(**make_prompts(lengths), max_new_tokens=20, do_sample=do_sample))


@pytest.mark.parametrize("lengths", [[9], [9, 4, 1]], ids=["one", "batch"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_where_little_is_verified_little_is_drafted(lengths: list[int], do_sample: bool) -> None:
    target = make_target("llama", seed=3)
    costs = make_cost_table(node_ms=2.0, plain_ms=40.0) | {"draft_ms": [[1.0, 9.0, 20.0]] * 2}
    drafter = make_drafter(target, num_assistant_tokens=32, branching_factor=3, cycle_costs=costs)
    arguments = {**make_prompts(lengths), "max_new_tokens": 60, "do_sample": do_sample}
    torch.manual_seed(0)
    with observing(seen := Cycles()):
        drafted = target.generate(**arguments, assistant_model=drafter)
    torch.manual_seed(0)
    assert torch.equal(drafted, target.generate(**arguments))
    sizes = [reason.sizes[-1] for reason in seen.reasons if isinstance(reason, SizeChoice)]
    assert len(sizes) == len(seen.reasons), "trials after a pause draft little anyway"
    assert sizes[0] == 32
    assert min(sizes) < drafter.config.max_draft_depth, "shallower trees, too"


@pytest.mark.parametrize("family", ["lfm2", "bloom"])
def test_chains_through_states(family: str) -> None:
    target = make_chain_target(family)
    costs = make_cost_table(draft_ms=14.0, plain_ms=11.0)
    drafter = make_chain_drafter(target, cycle_costs=costs)
    sizes: set[int] = set()
    sizes_at_rest: set[int] = set()
    for lengths in ([5], [4, 17, 9]):
        prompts = make_prompts(lengths)
        for do_sample in (False, True):
            arguments = {**prompts, "max_new_tokens": 50, "do_sample": do_sample, "return_dict_in_generate": True}
            torch.manual_seed(1)
            plain = target.generate(**arguments)
            torch.manual_seed(1)
            drafted = target.generate(**arguments, assistant_model=drafter)
            assert torch.equal(drafted.sequences, plain.sequences)
            assert sum(size > 0 for size in drafted.tree_sizes) < 0.3 * len(drafted.tree_sizes)
            torch.manual_seed(1)
            with observing(seen := Cycles()):
                looked_up = target.generate(**arguments, assistant_model=drafter, prompt_lookup_num_tokens=5)
            assert torch.equal(looked_up.sequences, plain.sequences)
            sizes_at_rest |= {reason.size for reason in seen.reasons if isinstance(reason, DraftingPause)}
            torch.manual_seed(1)
            with partly_right_drafts(plain.sequences, prompts["input_ids"].shape[1]):
                better = target.generate(**arguments, assistant_model=drafter)
            assert torch.equal(better.sequences, plain.sequences)
            sizes |= set(better.tree_sizes)
    assert len(sizes) > 2
    assert max(sizes_at_rest) > 1


class RepeatsLastToken(LogitsProcessor):
    """Depends on the whole prefix and on the order of calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.num_calls += 1
        scores = scores.clone()
        scores[:, input_ids[0, -2]] += 1.0 + 0.1 * ((int(input_ids.sum()) + self.num_calls) % 7)
        return scores


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append([-1])


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_is_returned_and_streamed_is_that_of_plain_decoding(do_sample: bool) -> None:
    target, drafter = make_pair()
    arguments = {
        **make_prompts([9]), "max_new_tokens": 60, "do_sample": do_sample, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True, "output_hidden_states": True,
    }  # fmt: skip
    outputs, streamers = [], []
    for assistant in ({}, {"assistant_model": drafter}):
        streamers.append(Streamed())
        torch.manual_seed(0)
        processed = {"logits_processor": [RepeatsLastToken()], "streamer": streamers[-1]}
        outputs.append(target.generate(**copy.deepcopy(arguments), **processed, **assistant))
    plain, drafted = outputs
    assert has_pauses_and_drafts(drafted.tree_sizes)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert streamers[1].tokens == streamers[0].tokens
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(drafted, name), getattr(plain, name))
    for ours, theirs in zip(drafted.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs)
    # The cache is that of plain decoding: a conversation goes on from it.
    assert drafted[CACHE_NAME].get_seq_length() == plain[CACHE_NAME].get_seq_length()
    for ours, theirs in zip(drafted[CACHE_NAME].layers, plain[CACHE_NAME].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
    lengths = drafted.accepted_lengths[0]
    assert len(lengths) == len(drafted.tree_sizes)
    assert 1 + sum(lengths) == 60
    assert all(length == 1 for length, size in zip(lengths, drafted.tree_sizes, strict=True) if not size)


@pytest.mark.parametrize("shapes", [{}, STATIC], ids=["growing", "static"])
@pytest.mark.parametrize("lengths", [[9], [9, 4, 1]], ids=["one", "batch"])
@pytest.mark.parametrize("target_layer_ids", [None, [0, 1, 2]], ids=["last_layer", "layers"])
def test_drafts_after_a_pause_are_those_without_it(
    lengths: list[int], shapes: dict[str, Any], target_layer_ids: list[int] | None
) -> None:
    """The drafter takes in all that was committed meanwhile."""
    trees: list[dict[tuple[int, int], list[int]]] = []
    target, drafter = make_pair(target_layer_ids=target_layer_ids)
    for costs in (drafter.generation_config.cycle_costs, None):
        drafter.generation_config.cycle_costs = costs
        with observing(seen := Cycles()):
            target.generate(
                **make_prompts(lengths), max_new_tokens=170, do_sample=False, assistant_model=drafter, **shapes
            )
        now, found = [1] * len(lengths), {}
        for tree, accepted in zip(seen.trees, seen.lengths, strict=True):
            for row, length in enumerate(accepted):
                if length:
                    found[row, now[row]] = tree.tokens[row].tolist()
                now[row] += length
        trees.append(found)
    paused, always = trees
    shared = [place for place in paused if place in always and len(paused[place]) > 1]
    assert max(place[1] for place in shared) > LATER_PAUSE, "behind the long pause, too"
    for place in shared:
        assert paused[place] == always[place][: len(paused[place])]


def test_a_batch_is_decoded_for_the_row_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead of four tokens halves what the next one counts; a row that has ended counts nothing."""
    given: list[list[float]] = []
    cut = TreeSizing.cut

    def keeping(self: TreeSizing, tree: DraftTree, weights: list[float], *args: Any) -> DraftTree:
        given.append(weights)
        return cut(self, tree, weights, *args)

    monkeypatch.setattr(TreeSizing, "cut", keeping)
    target, drafter = make_pair(costs={"draft_ms": 0.1, "node_ms": 0.01}, prompt_lookup_num_tokens=6)
    with observing(seen := Cycles()):
        drafted = target.generate(**make_prompts([9, 4, 1]), max_new_tokens=50, assistant_model=drafter)
    plain = target.generate(**make_prompts([9, 4, 1]), max_new_tokens=50, do_sample=False)
    assert torch.equal(drafted, plain)
    assert len(given) == len(seen.lengths), "there is no pause"
    lengths, num_ended = [1, 1, 1], 0
    for weights, accepted in zip(given, seen.lengths, strict=True):
        slowest = min(length for length in lengths if length < 50)
        assert weights == [0.0 if length == 50 else 0.5 ** ((length - slowest) / 4) for length in lengths]
        lengths = [length + number for length, number in zip(lengths, accepted, strict=True)]
        num_ended += 0.0 in weights
    assert num_ended
    assert len({tuple(weights) for weights in given}) > 5


def test_what_is_copied_is_drafted_in_runs_with_costs_too() -> None:
    target, drafter = make_pair(costs={"draft_ms": 3.0, "node_ms": 0.05}, prompt_lookup_num_tokens=5)
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.2}):
        arguments: dict[str, Any] = {**make_prompts([9]), "max_new_tokens": 100, **sampling}
        torch.manual_seed(0)
        plain = target.generate(**arguments)
        torch.manual_seed(0)
        with observing(seen := Cycles()):
            drafted = target.generate(**arguments, assistant_model=drafter)
        assert torch.equal(drafted, plain)
        runs = [reason.size for reason in seen.reasons if isinstance(reason, ContextRun)]
        expected = [reason.expected for reason in seen.reasons if isinstance(reason, ContextRun)]
        estimated = [
            float(tree.scores[0, 1:].exp().sum())
            for tree, reason in zip(seen.trees, seen.reasons, strict=True)
            if isinstance(reason, ContextRun)
        ]
        assert expected[0] == pytest.approx(estimated[0])
        assert all(one <= most + 1e-4 for one, most in zip(expected, estimated, strict=True))
        assert {10, 20} <= set(runs), "twice as many as were right, and at most four times as many as it drafts"
        assert set(runs) <= set(range(6, 21))
        assert {type(reason) for reason in seen.reasons} >= {SizeChoice, ContextRun}
        for reason, tree, length in zip(seen.reasons, seen.trees, seen.lengths, strict=True):
            if isinstance(reason, ContextRun):
                assert tree.tokens.shape[1] == reason.size + 1
                assert tree.depths.tolist() == [list(range(reason.size + 1))]
                assert length[0] <= reason.size + 1


def test_runs_go_on_through_a_pause_and_the_drafter_reads_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that does not fit must not end them; what it drafts after all is what it drafts without a pause."""
    target, drafter = make_pair(costs={"draft_ms": 60.0}, prompt_lookup_num_tokens=5)
    arguments = {**make_prompts([9]), "max_new_tokens": 400, "do_sample": False, "assistant_model": drafter}
    plain = target.generate(**make_prompts([9]), max_new_tokens=400, do_sample=False)
    monkeypatch.setattr(upcoming_trees, "_MOST_UNTOLD", 40)
    drafted: list[dict[int, list[int]]] = []
    draft = GumihoCandidateGenerator.draft_tree
    known: list[int] = []

    def keeping(self: GumihoCandidateGenerator, committed: CommittedTokens) -> DraftTree:
        tree = draft(self, committed)
        known.append(sum(committed.accepted_lengths))
        drafted[-1][sum(known)] = tree.tokens[0].tolist()
        return tree

    monkeypatch.setattr(GumihoCandidateGenerator, "draft_tree", keeping)
    for costs, lookup in ((drafter.generation_config.cycle_costs, 5), (None, 0)):
        drafter.generation_config.cycle_costs = costs
        drafted.append({})
        known.clear()
        with observing(seen := Cycles()):
            assert torch.equal(target.generate(**arguments, prompt_lookup_num_tokens=lookup), plain)
        if costs is not None:
            untold, most_in_run = 0, 0
            for reason, length in zip(seen.reasons, seen.lengths, strict=True):
                most_in_run = max(most_in_run, untold if isinstance(reason, ContextRun) else 0)
                untold = 0 if isinstance(reason, SizeChoice) else untold + length[0]
            assert most_in_run > 80, "more than the drafter may miss where it does not rest"
    with_pauses, always = drafted
    shared = with_pauses.keys() & always.keys()
    assert len(shared) > 1
    assert all(with_pauses[place] == always[place][: len(with_pauses[place])] for place in shared)


def test_without_costs_every_tree_has_the_size_that_is_set() -> None:
    target, drafter = make_pair()
    drafter.generation_config.cycle_costs = None
    with observing(seen := Cycles()):
        output = target.generate(
            **make_prompts([9]), max_new_tokens=40, do_sample=False, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert set(output.tree_sizes) == {20}
    assert seen.reasons == []


def test_every_cycle_tells_why_it_had_its_size() -> None:
    target, drafter = make_pair()
    with observing(seen := Cycles()):
        output = target.generate(
            **make_prompts([9]), max_new_tokens=60, do_sample=False, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert len(seen.reasons) == len(output.tree_sizes)
    for reason, size, tree in zip(seen.reasons, output.tree_sizes, seen.trees, strict=True):
        assert tree.tokens.shape[1] == size + 1
        if isinstance(reason, DraftingPause):
            assert size == 0
            assert reason.drafted_speed < reason.undrafted_speed
        else:
            assert reason.size == size
            assert reason.tokens_per_second[reason.place] == max(reason.tokens_per_second)


@pytest.mark.parametrize("shapes", [{}, STATIC], ids=["growing", "static"])
@pytest.mark.parametrize("branching_factor", [1, 3])
@pytest.mark.parametrize("lengths", [[9], [9, 4, 1]], ids=["one", "batch"])
def test_while_the_drafter_rests_the_context_drafts(
    lengths: list[int], branching_factor: int, shapes: dict[str, Any]
) -> None:
    """Random targets repeat themselves, and this drafter costs more than it gives."""
    target, drafter = make_pair(costs={"draft_ms": 30.0}, branching_factor=branching_factor)
    prompts, lookup = make_prompts(lengths), {"prompt_lookup_num_tokens": 6}
    rests, most = [], {}
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.3}):
        arguments: dict[str, Any] = {**prompts, "max_new_tokens": 80, **sampling}
        if len(lengths) > 1 and sampling["do_sample"]:
            arguments["stopping_criteria"] = [KeepGoing()]
        torch.manual_seed(0)
        plain = target.generate(**arguments)
        for name, options in (("with context", lookup), ("without", {})):
            torch.manual_seed(0)
            with observing(seen := Cycles()):
                drafted = target.generate(**arguments, assistant_model=drafter, **shapes, **options)
            assert torch.equal(drafted, plain)
            pauses = [place for place, reason in enumerate(seen.reasons) if isinstance(reason, DraftingPause)]
            for place in pauses:
                assert seen.trees[place].tokens.shape[1] == seen.reasons[place].size + 1
            most[name] = max(max(seen.lengths[place]) for place in pauses)
            rests.append(len(pauses) / len(seen.reasons))
            has_runs = any(isinstance(reason, ContextRun) for reason in seen.reasons)
            assert has_runs == (name == "with context" and lengths == [9] and branching_factor == 3 and not shapes)
        assert most["with context"] > 3
        assert most["without"] == 1
    assert min(rests) > 0.5


@pytest.mark.parametrize(("lookup", "draft_ms"), [({}, 6.0), ({"prompt_lookup_num_tokens": 6}, 14.0)])
def test_rows_that_advance_by_different_lengths_rest_together(lookup: dict[str, int], draft_ms: float) -> None:
    """Each takes its own draws; at a temperature next to zero they are the greedy tokens."""
    target, drafter = make_pair(costs=COSTS | {"draft_ms": draft_ms}, **lookup)
    prompts = make_prompts([9, 4, 1])
    plain = target.generate(**prompts, max_new_tokens=50, do_sample=False)
    sampling = {"do_sample": True, "temperature": 1e-4, "top_k": 4}
    calls: list[int] = []
    process = TopKLogitsWarper.__call__

    def counting(self: TopKLogitsWarper, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        calls.append(1)
        return process(self, input_ids, scores)

    with pytest.MonkeyPatch.context() as patch, observing(seen := Cycles()):
        patch.setattr(TopKLogitsWarper, "__call__", counting)
        drafted = target.generate(**prompts, max_new_tokens=50, assistant_model=drafter, **sampling)
    assert torch.equal(drafted, plain)
    assert any(len(set(lengths)) > 1 for lengths in seen.lengths)
    assert len(calls) == 1 + sum(map(max, seen.lengths)), "one for each step, whatever the lengths of the rows"
    assert {type(reason) for reason in seen.reasons} == {SizeChoice, DraftingPause}


def test_prompts_of_embeddings_alone_have_pauses_and_drafts_from_the_context() -> None:
    target, drafter = make_pair(prompt_lookup_num_tokens=6)
    embeds = target.get_input_embeddings()(make_prompts([9])["input_ids"])
    arguments = {"inputs_embeds": embeds, "attention_mask": torch.ones(1, 9), "max_new_tokens": 60}
    plain = target.generate(**arguments, do_sample=False)
    drafted = target.generate(**arguments, do_sample=False, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, plain)
    assert has_pauses_and_drafts(drafted.tree_sizes)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[5], [5, 9, 2]], ids=["one", "batch"])
def test_drafter_that_does_not_fit_seldom_drafts(lengths: list[int], sampling: dict[str, Any]) -> None:
    """Random weights, which make it sure of tokens that the target, with a large vocabulary, never takes."""
    target = make_target("llama", vocab_size=500)
    drafter = make_drafter(target, num_assistant_tokens=20, branching_factor=3, draft_temperature=0.02)
    drafter.generation_config.cycle_costs = make_cost_table(plain_ms=12.0)
    num_drafts = 0
    draft = GumihoCandidateGenerator.draft_tree

    def counting(self: GumihoCandidateGenerator, committed: CommittedTokens) -> DraftTree:
        nonlocal num_drafts
        num_drafts += 1
        return draft(self, committed)

    with pytest.MonkeyPatch.context() as patch, observing(seen := Cycles()):
        patch.setattr(GumihoCandidateGenerator, "draft_tree", counting)
        num_passes, _ = passes_of(
            target,
            lambda: target.generate(
                **make_prompts(lengths), max_new_tokens=150, assistant_model=drafter, **sampling
            ),
        )  # fmt: skip
    assert isinstance(seen.reasons[0], SizeChoice)
    assert seen.reasons[0].expected[-1] > 1, "it must be sure of itself"
    assert num_drafts <= 0.1 * num_passes


def test_drafts_that_get_good_are_taken_up_again() -> None:
    """The drafter drafts wrong tokens up to the middle of the text, and right ones from there on."""
    target, drafter = make_pair(branching_factor=1, tree_depth=7, num_assistant_tokens=7, draft_temperature=0.1)
    prompts, middle = make_prompts([9]), 60
    plain = target.generate(**prompts, max_new_tokens=200, do_sample=False)
    draft, length = GumihoCandidateGenerator.draft_tree, [0]

    def better_later(self: GumihoCandidateGenerator, committed: CommittedTokens) -> DraftTree:
        tree = draft(self, committed)
        # The committed tokens of the first call are those of the prompt, moved on by one.
        length[0] = length[0] + committed.accepted_lengths[0] if length[0] else 10
        places = torch.arange(length[0], length[0] + 7).clamp(max=plain.shape[1] - 1)
        tokens = plain[:, places] if length[0] > 9 + middle else 7 - plain[:, places]
        return replace(tree, tokens=torch.cat((tree.tokens[:, :1], tokens), dim=1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GumihoCandidateGenerator, "draft_tree", better_later)
        output = target.generate(
            **prompts, max_new_tokens=200, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, plain)
    sizes, first_good = output.tree_sizes, 0
    while 1 + sum(output.accepted_lengths[0][:first_good]) <= middle:
        first_good += 1
    assert sum(size > 0 for size in sizes[:first_good]) < 12, "wrong drafts are given up"
    tried_again = next(place for place in range(first_good, len(sizes)) if sizes[place])
    assert tried_again - first_good <= 64
    assert all(size > 0 for size in sizes[tried_again + 1 :]), "right ones are not"


@pytest.mark.usefixtures("_forget_compiled")
def test_every_size_has_graphs_of_its_own() -> None:
    target, drafter = make_pair(num_assistant_tokens=7, branching_factor=2)
    config = compile_on_every_device(backend="eager", mode="default", fullgraph=True)
    static = {"cache_implementation": "static", "compile_config": config, "assistant_model": drafter}
    prompt = make_prompts([9])
    plain = target.generate(**prompt, max_new_tokens=30, do_sample=False)
    sizes: set[int] = set()
    for node_ms in (0.3, 0.8, 0.3):
        drafter.generation_config.cycle_costs = make_cost_table(node_ms=node_ms)
        drafted = target.generate(**prompt, max_new_tokens=30, do_sample=False, return_dict_in_generate=True, **static)
        assert torch.equal(drafted.sequences, plain)
        sizes |= set(drafted.tree_sizes)
        # Masks, target and walk of each size; a root alone is not walked. Drafting, and reading what pauses left.
        assert counters["stats"]["unique_graphs"] == 3 * len(sizes) - (0 in sizes) + 2
    assert sizes == {0, 3, 7}


@pytest.mark.usefixtures("_forget_compiled")
def test_trees_of_the_context_alone_take_the_graphs_of_their_size() -> None:
    target, drafter = make_pair(num_assistant_tokens=7, branching_factor=2)
    config = compile_on_every_device(backend="eager", mode="default", fullgraph=True)
    static = {"cache_implementation": "static", "compile_config": config, "assistant_model": drafter}
    prompt = make_prompts([9])
    plain = target.generate(**prompt, max_new_tokens=80, do_sample=False)
    drafted_sizes, alone_sizes = set(), set()
    for draft_ms in (1.0, 30.0):
        drafter.generation_config.cycle_costs = make_cost_table(draft_ms=draft_ms, node_ms=0.6)
        with observing(seen := Cycles()):
            drafted = target.generate(
                **prompt, max_new_tokens=80, do_sample=False, prompt_lookup_num_tokens=7, **static
            )
        assert torch.equal(drafted, plain)
        alone_sizes |= {reason.size for reason in seen.reasons if isinstance(reason, DraftingPause)}
        drafted_sizes |= {reason.size for reason in seen.reasons if isinstance(reason, SizeChoice)}
        sizes = alone_sizes | drafted_sizes
        assert counters["stats"]["unique_graphs"] <= 3 * len(sizes) - (0 in sizes) + 2
    assert max(alone_sizes & drafted_sizes) > 0


@pytest.mark.usefixtures("_forget_compiled")
def test_pauses_are_compiled_once_for_texts_of_any_length() -> None:
    target, drafter = make_pair(num_assistant_tokens=7, branching_factor=2)
    # Drafts are never worth their time.
    drafter.generation_config.cycle_costs = make_cost_table(draft_ms=30, node_ms=0.3)
    config = compile_on_every_device(backend="eager", mode="default", fullgraph=True)
    graphs = []
    for length in range(4, 14):
        target.generate(
            **make_prompts([length]), max_new_tokens=70, do_sample=False, assistant_model=drafter,
            cache_implementation="static", compile_config=config,
        )  # fmt: skip
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * (len(graphs) - 1)


def warnings_of(target: PreTrainedModel, drafter: GumihoModel, caplog: pytest.LogCaptureFixture) -> str:
    logging.get_logger("transformers_gumiho.decoding.upcoming_trees").warning_once.cache_clear()
    caplog.clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            target.generate(**make_prompts([5]), max_new_tokens=4, do_sample=False, assistant_model=drafter)
    return caplog.text


def test_costs_of_another_machine_are_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = make_pair()
    assert "cycle_costs" not in warnings_of(target, drafter, caplog)
    for entry in ({"machine": "a toaster"}, {"dtype": "bfloat16"}):
        drafter.generation_config.cycle_costs = make_cost_table(**COSTS, **entry)
        found = warnings_of(target, drafter, caplog)
        assert found.count("`cycle_costs` were measured on") == 1
        assert next(iter(entry.values())) in found
        assert "Let `gumiho tune` measure here" in found


def test_sampled_cycles_are_sized_by_what_sampled_ones_cost() -> None:
    """Drafting that pays greedily may not pay where each token is drawn."""
    target, drafter = make_pair(num_assistant_tokens=7)
    dear = {"sampled_draft_ms": [[90.0] * 3] * 2, "sampled_plain_ms": [10.0, 10.0]}
    drafted = {}
    for is_sampling in (False, True):
        for name, costs in (("alike", {}), ("dear", dear)):
            drafter.generation_config.cycle_costs = make_cost_table(**COSTS, **costs)
            torch.manual_seed(0)
            output = target.generate(
                **make_prompts([5]), max_new_tokens=40, do_sample=is_sampling, assistant_model=drafter,
                return_dict_in_generate=True,
            )  # fmt: skip
            drafted[is_sampling, name] = sum(output.tree_sizes)
    assert drafted[False, "alike"] == drafted[False, "dear"]
    assert drafted[True, "dear"] < drafted[True, "alike"]


def test_a_warning_does_not_come_in_the_middle_of_a_streamed_text(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = make_pair()
    drafter.generation_config.cycle_costs = make_cost_table(**COSTS, machine="a toaster")
    seen: list[str] = []

    class Stream(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.append(caplog.text)

        def end(self) -> None:
            pass

    warn = logging.get_logger("transformers_gumiho.decoding.upcoming_trees").warning_once
    warn.cache_clear()
    with caplog.at_level("WARNING"):
        options = {"max_new_tokens": 8, "do_sample": False}
        target.generate(**make_prompts([5]), assistant_model=drafter, streamer=Stream(), **options)
    after_prompt = seen[1:]  # the first one is the prompt, which `generate()` streams itself
    assert len(after_prompt) == 8
    assert all("a toaster" in text for text in after_prompt)
