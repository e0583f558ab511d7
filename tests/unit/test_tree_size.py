"""How many drafted tokens are verified: as many as make most of the time, and none where that is not worth it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cycle_costs import make_cost_table

from transformers_gumiho.drafting.context_branch import ContextBranch
from transformers_gumiho.drafting.draft_budget import DraftBudget
from transformers_gumiho.drafting.tree_size import (
    TREE_SIZES,
    ContextRun,
    DraftingPause,
    SizeChoice,
    choose_size,
    path_probabilities,
    row_weights,
    sizes_up_to,
)
from transformers_gumiho.drafting.tree_sizing import (
    FIRST_PAUSE,
    LATER_PAUSE,
    TRIAL_SIZE,
    AcceptanceCorrection,
    BackOff,
    TreeSizing,
)
from transformers_gumiho.model.acceptance_curves import AcceptanceCurve, AcceptanceCurves
from transformers_gumiho.model.cycle_costs import BatchCosts, CycleCostTable
from transformers_gumiho.tree.draft_tree import DraftTree, choose_nodes


CPU = torch.device("cpu")


def costs_of(batch_size: int = 1, **entries: float) -> BatchCosts:
    return CycleCostTable.parse(make_cost_table(**entries)).for_batch(batch_size)


def random_tree(seed: int, batch_size: int, num_nodes: int) -> DraftTree:
    """Returns a tree in which each node hangs below any earlier one."""
    generator = torch.Generator().manual_seed(seed)
    parents = [[0, *(int(torch.randint(n, (), generator=generator)) for n in range(1, num_nodes + 1))]] * batch_size
    own = -torch.rand(batch_size, num_nodes + 1, generator=generator)
    own[:, 0] = 0.0
    scores = own.clone()
    for node in range(1, num_nodes + 1):
        scores[:, node] += scores[:, parents[0][node]]
    tokens = torch.arange(num_nodes + 1).expand(batch_size, -1)
    return choose_nodes(tokens, scores, torch.tensor(parents), num_nodes, num_nodes)


@pytest.mark.parametrize("seed", range(20))
def test_chosen_size_is_the_best_of_all(seed: int) -> None:
    generator = np.random.default_rng(seed)
    batch_size, num_drafted = int(generator.integers(1, 9)), int(generator.integers(1, 64))
    scores = -np.sort(generator.exponential(generator.uniform(0.5, 8.0), (batch_size, num_drafted)), axis=1)
    correction = float(generator.uniform(0.05, 1.5))
    draft_ms, node_ms = float(generator.uniform(0.5, 9.0)), float(generator.uniform(0, 1))
    costs = costs_of(batch_size, draft_ms=draft_ms, node_ms=node_ms)
    sizes = sizes_up_to(num_drafted)
    assert sizes[0] == 0
    assert sizes[-1] == num_drafted

    def speed(size: int) -> float:
        accepted = sum(math.exp(score) for row in scores.tolist() for score in row[:size])
        # The table says so: the root's 10 ms, and as much for each further node of each row.
        return (batch_size + correction * accepted) / (10.0 + node_ms * (batch_size * (size + 1) - 1) + draft_ms)

    choice = choose_size(path_probabilities(scores), sizes, costs, correction)
    assert choice.size == max(sizes, key=speed)
    for size, found in zip(sizes, choice.tokens_per_second, strict=True):
        assert found == pytest.approx(1e3 * speed(size) / batch_size)


def test_larger_batches_choose_smaller_trees() -> None:
    scores = np.log(np.linspace(0.9, 0.01, 40))[None]
    sizes = []
    for batch_size in (1, 2, 4, 8):
        probabilities = path_probabilities(np.repeat(scores, batch_size, axis=0))
        sizes.append(choose_size(probabilities, sizes_up_to(40), costs_of(batch_size, node_ms=1.0)).size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_curves_put_shares_for_probabilities() -> None:
    curves = AcceptanceCurves((AcceptanceCurve((-4.0, -1.0, 0.0), (0.01, 0.1, 0.8)), AcceptanceCurve((-1.0,), (0.5,))))
    scores = torch.tensor([[0.0, -1.0, -0.5], [-4.0, -6.0, -math.inf]])
    found = curves.log_probabilities(scores, torch.ones(2, 3, dtype=torch.long)).exp()
    expected = [[0.8, 0.1, math.sqrt(0.08)], [0.01, 0.01 * math.exp(-2), 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))
    # The last curve is that of all deeper tokens.
    scores, depths = torch.tensor([[0.0, -1.0, -2.0, -0.5, -math.inf]]), torch.tensor([[2, 3, 9, 1, 2]])
    found = curves.log_probabilities(scores, depths).exp()
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5, 0.5 / math.e, math.sqrt(0.08), 0.0]]))
    # A token of chains that advance together is accepted where all rows accept it.
    rows = np.log(np.array([[0.5, 0.25], [0.8, 0.4]]))
    assert path_probabilities(rows, rows_together=True) == pytest.approx(np.array([[0.4, 0.1]] * 2))


def test_prefix_of_a_tree_is_a_tree() -> None:
    tree = random_tree(seed=3, batch_size=2, num_nodes=20)
    for size in range(21):
        part = tree.first(size)
        assert part.tokens.shape == (2, size + 1)
        assert (part.parents[:, 1:] < torch.arange(1, size + 1)).all()
        assert part.depths.max() <= part.max_depth <= tree.max_depth
        assert torch.equal(part.ancestors.sum(dim=2) - 1, part.depths)


def test_correction_follows_what_is_accepted() -> None:
    correction = AcceptanceCorrection()
    assert correction.factor == 1
    for _ in range(30):
        correction.observe(expected=4.0, accepted=1.0)
    assert correction.factor == pytest.approx(0.25, abs=0.05)
    for _ in range(60):
        correction.observe(expected=2.0, accepted=3.0)
    assert 1.3 < correction.factor < 1.5


def paused_cycles(back_off: BackOff, tokens: float, cycle_ms: float) -> int:
    """Takes in a cycle that drafted, and returns the cycles of the pause after it."""
    back_off.observe(tokens, cycle_ms)
    num_paused = 0
    while back_off.pauses():
        num_paused += 1
    return num_paused


def test_later_pauses_are_longer_and_begin_anew_after_success() -> None:
    back_off = BackOff(plain_ms=10.0)
    back_off.expect(40.0, 15.0)
    assert back_off.drafted_speed == pytest.approx(2 * 100), "to be sure is not to be right"
    pauses = [paused_cycles(back_off, tokens, 15.0) for tokens in [1.0] * 12 + [6.0] * 4 + [1.0] * 20]
    # Each cycle of one token takes half a step of plain decoding more than that: two steps may be lost.
    assert pauses[:4] == [0] * 4
    assert pauses[4:12] == [FIRST_PAUSE, *[LATER_PAUSE] * 7]
    assert pauses[12:16] == [0] * 4, "drafts are worth their time again"
    failing = [place for place, pause in enumerate(pauses[16:]) if pause]
    assert 4 <= failing[0] < 18, "what was good once is soon forgotten"
    assert pauses[16:][failing[0] :][:3] == [FIRST_PAUSE, LATER_PAUSE, LATER_PAUSE]


def test_pauses_begin_anew_where_what_was_lost_is_regained() -> None:
    back_off = BackOff(plain_ms=10.0)
    back_off.expect(1.0, 15.0)
    pauses = [paused_cycles(back_off, tokens, 15.0) for tokens in [1.0] * 5 + [3.0] + [1.0] * 4]
    # Two tokens were lost, of which a trial of three regains one and a half.
    assert pauses == [0] * 4 + [FIRST_PAUSE] + [0] * 4 + [LATER_PAUSE]
    pauses = [paused_cycles(back_off, tokens, 15.0) for tokens in [4.0] + [1.0] * 6]
    assert pauses == [0] * 6 + [FIRST_PAUSE]


@pytest.mark.parametrize(("share", "most_paused", "least_speed"), [(0.75, 0.04, 1.4), (0.3, 1.0, 0.96)])
def test_chance_ends_in_few_pauses(share: float, most_paused: float, least_speed: float) -> None:
    """Texts of 128 tokens whose drafts are accepted one after the other as if by dice, in cycles of two steps."""
    numbers, num_paused, num_drafted, num_tokens = np.random.default_rng(0), 0, 0, 0
    for _ in range(100):
        back_off, length = BackOff(plain_ms=10.0), 0
        while length < 128:
            tokens = 1 + int((numbers.random(6) < share).cumprod().sum())
            paused = paused_cycles(back_off, tokens, 20.0)
            num_drafted, num_paused, length = num_drafted + 1, num_paused + paused, length + tokens + paused
        num_tokens += length
    assert num_paused <= most_paused * (num_paused + num_drafted)
    assert num_tokens / (2 * num_drafted + num_paused) >= least_speed


def test_observed_acceptance_decides() -> None:
    """A drafter that is sure of tokens which the target does not take."""
    sizing = TreeSizing(costs_of(), sizes=TREE_SIZES)
    tree = random_tree(seed=0, batch_size=1, num_nodes=20)
    drafted, sizes = 0, []
    for _ in range(300):
        if sizing.pauses():
            assert sizing.size_at_rest([1.0], None) == 0
            assert isinstance(sizing.reason, DraftingPause)
            assert sizing.reason.drafted_speed < sizing.reason.undrafted_speed == pytest.approx(100)
        else:
            sizes.append(sizing.cut(tree, [1.0]).tokens.shape[1] - 1)
            assert isinstance(sizing.reason, SizeChoice)
            drafted += 1
        sizing.observe([1])
    assert drafted <= 10
    assert sizes[0] > TRIAL_SIZE
    assert max(sizes[-3:]) <= TRIAL_SIZE


def test_rows_count_as_much_as_they_weigh() -> None:
    """One that has ended weighs nothing, and one that is ahead of others less than these."""
    tree = random_tree(seed=0, batch_size=3, num_nodes=20)
    sure = tree.scores.clone()
    sure[1:, 1:] = -20.0
    tree = replace(tree, scores=sure)
    sizes = [
        TreeSizing(costs_of(3, draft_ms=10.0, node_ms=0.1)).cut(tree, weights).tokens.shape[1]
        for weights in ([1.0, 0.0, 0.0], [0.4, 0.4, 0.4], [0.3, 1.0, 1.0], [0.01, 1.0, 1.0])
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]


def test_a_lead_of_four_tokens_counts_half() -> None:
    assert row_weights([10, 14, None, 18, 12]) == [1.0, 0.5, 0.0, 0.25, 0.5**0.5]
    assert row_weights([None, None]) == [0.0, 0.0]
    assert row_weights([3]) == [1.0]
    assert 0 < row_weights([1, 100_000])[1] < 1e-4, "it is open, however far it is ahead"


def test_a_batch_whose_slowest_row_gains_nothing_rests() -> None:
    """However much the rows gain that are ahead of it, it ends last."""
    tree = random_tree(seed=1, batch_size=2, num_nodes=20)
    rests = []
    for weights in ([1.0, 1.0], [0.05, 1.0]):
        sizing, num_rests = TreeSizing(costs_of(2, draft_ms=8.0)), 0
        for _ in range(100):
            if sizing.pauses():
                sizing.size_at_rest(weights, None)
                num_rests += 1
                sizing.observe([1, 1])
            else:
                sizing.cut(tree, weights)
                sizing.observe([5, 1])
        rests.append(num_rests)
    assert rests[0] == 0
    assert rests[1] > 80


def test_at_rest_what_a_row_gains_that_is_ahead_is_lost() -> None:
    """The other row gets one token of each such cycle, so that nothing is gained by verifying more."""
    branch = ContextBranch.make([[7] * 6] * 2, [[-0.1] * 6, [-math.inf] * 6], CPU)
    sizes = {}
    for lead in (0, 2, 4):
        sizing = TreeSizing(costs_of(2, draft_ms=6.0, node_ms=1.5))
        while not sizing.pauses():
            sizing.cut(random_tree(seed=0, batch_size=2, num_nodes=20), [1.0, 1.0], branch)
            sizing.observe([1, 1], [0, 0])
        sizes[lead] = sizing.size_at_rest(row_weights([10 + lead, 10]), branch)
    assert sizes[0] >= 4
    assert sizes[2] == sizes[4] == 0


def test_at_rest_only_what_is_clearly_faster_is_verified() -> None:
    """Of two sizes that cost nearly the same a table may tell the wrong one, and plain decoding is never slower."""
    sizes = {}
    for gain in (0.05, 0.1, 0.2):  # a cycle takes a hundredth longer with the token
        branch = ContextBranch.make([[7]], [[math.log(gain)]], CPU)
        sizing = TreeSizing(costs_of(draft_ms=6.0, node_ms=0.1))
        while not sizing.pauses():
            sizing.cut(random_tree(seed=0, batch_size=1, num_nodes=20), [1.0], branch)
            sizing.observe([1], [0])
        sizes[gain] = sizing.size_at_rest([1.0], branch)
    assert sizes == {0.05: 0, 0.1: 0, 0.2: 1}


def test_drafter_rests_where_the_context_alone_is_faster() -> None:
    """It adds nothing to a context that is always right, and is taken up again when that is always wrong."""
    drafted = random_tree(seed=0, batch_size=1, num_nodes=20)
    log_probs = [math.log(0.9)] * 6
    branch = ContextBranch.make([[7] * 6], [log_probs], CPU)
    # Cycles in which the drafter rests take 10 ms and 0.5 for each token of the context's, others 6 ms more.
    costs = costs_of(draft_ms=6.0, node_ms=0.5)
    best = max(range(7), key=lambda size: (1 + sum(0.9**depth for depth in range(1, size + 1))) / (10 + 0.5 * size))
    sizing = TreeSizing(costs)
    num_drafted = {True: 0, False: 0}
    for cycle in range(240):
        is_right = cycle < 80
        if sizing.pauses():
            assert sizing.size_at_rest([1.0], branch) == best
            assert isinstance(sizing.reason, DraftingPause)
            assert sizing.reason.size == best
            assert sizing.reason.drafted_speed < sizing.reason.undrafted_speed
        else:
            tree = sizing.cut(branch.added_to(sizing.weigh(drafted), is_chain=False), [1.0], branch)
            assert tree.tokens.shape[1] > 1
            num_drafted[is_right] += 1
        # The drafter's own tokens are right where the context's are not.
        sizing.observe([7 if is_right else 5], [6 if is_right else 0])
    assert num_drafted[True] < 10
    assert num_drafted[False] >= 160 - LATER_PAUSE


def test_what_the_context_alone_would_have_done_is_counted_in_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a branch get one token each, and rows that advance together as many as the worst of them."""
    seen: list[tuple[float, ...]] = []
    monkeypatch.setattr(BackOff, "observe", lambda self, *args: seen.append(args))
    tree, costs = random_tree(seed=0, batch_size=3, num_nodes=12), costs_of(3, node_ms=0.1)
    branch = ContextBranch.make([[7] * 6] * 3, [[-0.1] * 6, [-0.1] * 6, [-math.inf] * 6], CPU)
    ways = ({}, 6, (6 + 3 + 0) / 3), ({"rows_together": True}, 0, 0), ({"in_lockstep": True}, 0, 0)
    for options, size, accepted in ways:
        sizing = TreeSizing(costs, **options)
        drafted = sizing.cut(tree, [1.0] * 3, branch).tokens.shape[1] - 1
        # What was committed happens to be right in the third row, too, whose branch was not worth being drafted.
        sizing.observe([7, 4, 7], [6, 3, 6])
        assert sizing.size_at_rest([1.0] * 3, branch) == size
        plain_ms, node_ms = 10 + 2 * 0.1, 3 * 0.1
        assert seen[-1] == pytest.approx(
            (6.0, float(costs.cycle_ms(drafted)), 1 + accepted, plain_ms + size * node_ms)
        )  # fmt: skip


def test_what_the_context_would_have_done_counts_in_the_row_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what the drafter did: both are compared."""
    seen: list[tuple[float, ...]] = []
    monkeypatch.setattr(BackOff, "observe", lambda self, *args: seen.append(args))
    tree, costs = random_tree(seed=0, batch_size=2, num_nodes=12), costs_of(2, node_ms=0.1)
    branch = ContextBranch.make([[7] * 6] * 2, [[-0.1] * 6] * 2, CPU)
    weights = row_weights([14, 10])
    sizing = TreeSizing(costs)
    sizing.cut(tree, weights, branch)
    sizing.observe([5, 2], [4, 1])
    tokens, _, undrafted_tokens, _ = seen[-1]
    ahead = weights[0] ** 4
    assert tokens == pytest.approx((5 * ahead + 2) / (ahead + 1))
    assert undrafted_tokens == pytest.approx(1 + (4 * ahead + 1) / (ahead + 1))


def dear_drafts(batch_size: int, node_ms: float) -> BatchCosts:
    """Returns costs of cycles in which a drafted token takes as long as a verified one of a row."""
    draft_ms = [[1.0, 1.0 + 8 * node_ms, 1.0 + 64 * node_ms]] * 2
    return CycleCostTable.parse(make_cost_table(node_ms=node_ms) | {"draft_ms": draft_ms}).for_batch(batch_size)


def test_where_small_trees_are_verified_no_large_ones_are_drafted() -> None:
    sizing = TreeSizing(dear_drafts(8, node_ms=1.0))
    drafted, verified = [], []
    for cycle in range(60):
        # Of these trees few nodes are worth their time, then nearly all.
        tree = random_tree(seed=cycle, batch_size=8, num_nodes=24)
        tree = replace(tree, scores=tree.scores * (3.0 if cycle < 20 else 1e-3))
        drafted.append(sizing.num_to_draft(24, [1.0] * 8))
        verified.append(sizing.cut(sizing.weigh(tree.first(drafted[-1])), [1.0] * 8).tokens.shape[1] - 1)
        sizing.observe([verified[-1] + 1] * 8)
        assert isinstance(sizing.reason, SizeChoice)
        assert sizing.reason.cycle_ms[-1] == pytest.approx(10 + 8 * drafted[-1] + 7 + 1 + drafted[-1])
    assert drafted[0] == 24, "nothing is known yet"
    assert max(drafted[1:20]) <= 8
    assert drafted[-20:] == verified[-20:] == [24] * 20, "where more is worth its time it is drafted"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_rows", [1, 4])
def test_as_much_is_drafted_as_would_nearly_have_been_best(seed: int, num_rows: int) -> None:
    generator = np.random.default_rng(seed)
    costs, most = dear_drafts(4, node_ms=float(generator.uniform(0.02, 0.4))), 20
    budget, trees = DraftBudget(costs, TREE_SIZES, most), []
    for _ in range(12):
        assert budget.choose(num_rows) == (largest_good_budget(trees, costs, most, num_rows) if trees else most)
        trees.append(generator.random(most).cumprod() ** generator.uniform(0.05, 0.5))
        budget.observe(trees[-1])


def test_rows_that_have_ended_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(DraftBudget, "choose", lambda budget, num_rows: asked.append(num_rows) or 4)
    sizing = TreeSizing(costs_of(4))
    assert [sizing.num_to_draft(20, weights) for weights in ([1.0] * 4, [0.0, 1.0, 0.0, 0.2])] == [4, 4]
    assert asked == [4, 2]


def largest_good_budget(trees: list[np.ndarray], costs: BatchCosts, most: int, num_rows: int) -> int:
    """Returns the largest number of drafted tokens with which the trees make nearly most of their time."""

    def speed(drafted: int) -> float:
        tokens = ms = 0.0
        for tree in trees:
            options = [
                (1 + float(tree[:size].sum()), float(costs.cycle_ms(size, drafted)))
                for size in (0, *sizes_up_to(most))
                if size <= drafted
            ]
            got, taken = max(options, key=lambda option: option[0] / option[1])
            tokens, ms = tokens + got, ms + taken
        return tokens / ms

    speeds = {size: speed(size) for size in sizes_up_to(most) if size}
    return max(size for size in speeds if speeds[size] >= (1 - 0.01 / num_rows) * max(speeds.values()))


def test_what_was_not_drafted_is_judged_by_what_was() -> None:
    """A text that gets easier has larger trees drafted again, and one that does not has none."""
    found = {}
    for is_easier in (False, True):
        budget = DraftBudget(dear_drafts(1, node_ms=0.8), TREE_SIZES, 16)
        hard, easy = 0.5 * 0.6 ** np.arange(16), 0.99 ** np.arange(16)
        for cycle in range(60):
            tree = easy if is_easier and cycle >= 20 else hard
            found[is_easier, cycle] = budget.choose(1)
            budget.observe(tree[: found[is_easier, cycle]])
    assert max(found[is_easier, cycle] for is_easier in (False, True) for cycle in range(5, 20)) <= 4
    assert max(found[False, cycle] for cycle in range(20, 60)) <= 4
    assert found[True, 59] == 16


def test_room_for_the_context_is_as_much_as_is_worth_verifying() -> None:
    tree, costs = random_tree(seed=0, batch_size=1, num_nodes=24), dear_drafts(1, node_ms=1.5)
    tree = replace(tree, scores=tree.scores * 5.0)
    drafted = []
    for log_prob in (-4.0, -0.01):
        branch = ContextBranch.make([[77] * 6], [[log_prob] * 6], CPU)
        sizing = TreeSizing(costs)
        for _ in range(6):
            drafted.append(sizing.num_to_draft(24, [1.0], branch))
            own = sizing.weigh(tree.first(drafted[-1]))
            sizing.cut(branch.added_to(own, is_chain=False), [1.0], branch)
            sizing.observe([7 if log_prob > -1 else 1], [6 if log_prob > -1 else 0])
    alone, with_branch = drafted[4], drafted[-1]
    assert alone <= 3
    assert alone + 5 <= with_branch <= alone + 8, "once, and not as tokens of the drafter's, too"


def test_trials_draft_little() -> None:
    # Where drafting more costs nothing, too.
    sizing, tree = TreeSizing(costs_of()), random_tree(seed=0, batch_size=1, num_nodes=20)
    drafted = []
    for _ in range(100):
        if not sizing.pauses():
            drafted.append(sizing.num_to_draft(20, [1.0]))
            sizing.cut(sizing.weigh(tree.first(drafted[-1])), [1.0])
        else:
            sizing.size_at_rest([1.0], None)
        sizing.observe([1])
    assert drafted[-2:] == [TRIAL_SIZE] * 2


def test_whether_drafting_pays_is_told_by_the_row_that_is_behind() -> None:
    """A batch takes as long as that one, however much the others get."""
    tree, costs = random_tree(seed=0, batch_size=2, num_nodes=12), costs_of(2, draft_ms=8.0, node_ms=0.1)
    for lengths, rests in (([10, 10], False), ([14, 10], True)):
        sizing = TreeSizing(costs)
        for _ in range(4):
            assert not sizing.pauses()
            sizing.cut(tree, row_weights(lengths))
            sizing.observe([5, 1])
            if sizing.is_pausing:
                break
        assert sizing.is_pausing == rests, lengths


def test_a_branch_alone_is_a_tree() -> None:
    branch = ContextBranch.make([[7, 8, 9], [4, 5, 6]], [[-0.1, -0.2, -0.3], [-0.5, -math.inf, -math.inf]], CPU)
    root = torch.tensor([1, 2])
    for size in (1, 2, 3):
        tree = branch.alone(root, size, num_nodes=5)
        assert tree.tokens.tolist() == [[1, 7, 8, 9][: size + 1], [2, 4, 5, 6][: size + 1]]
        expected = choose_nodes(
            tree.tokens, tree.scores, torch.tensor([[0, 0, 1, 2][: size + 1]] * 2), num_nodes=size, max_depth=size
        )
        for name in ("tokens", "parents", "depths", "scores", "ancestors", "max_depth"):
            ours, theirs = getattr(tree, name), getattr(expected, name)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, name
    torch.testing.assert_close(tree.scores[0], torch.tensor([0.0, -0.1, -0.3, -0.6]))


def test_runs_are_taken_where_they_are_worth_their_time() -> None:
    """By the costs, and by what came of those before."""
    branch = ContextBranch.make([[7] * 20], [[math.log(0.95)] * 20], CPU, is_run=True)
    expected = sum(0.95**depth for depth in range(1, 21))
    for draft_ms, node_ms, is_taken in ((4.0, 0.1, True), (4.0, 4.0, True), (0.1, 4.0, False), (40.0, 8.0, False)):
        sizing = TreeSizing(costs_of(draft_ms=draft_ms, node_ms=node_ms))
        tree = sizing.cut(random_tree(seed=0, batch_size=1, num_nodes=12), [1.0])
        sizing.observe([4])
        assert isinstance(sizing.reason, SizeChoice)
        assert sizing.takes_run(branch) == is_taken, (tree.tokens.shape, sizing.reason)
        if is_taken:
            assert sizing.reason == ContextRun(20, pytest.approx(expected), pytest.approx(10 + 20 * node_ms))
    # Each time the context is sure, and only the first of twenty tokens is right.
    sizing = TreeSizing(costs_of(draft_ms=1.0, node_ms=0.3))
    sizing.cut(random_tree(seed=0, batch_size=1, num_nodes=12), [1.0])
    sizing.observe([4])
    taken = []
    for _ in range(400):
        taken.append(sizing.takes_run(branch))
        if taken[-1]:
            assert sizing.reason.size == 20
            sizing.observe([2])
    assert taken[0]
    assert 20 < sum(taken) < 120, "given up, and tried again now and then"
    pauses = [len(list(group)) for is_taken, group in itertools.groupby(taken) if not is_taken]
    assert max(pauses[:-1]) < 10, "what happens once is soon forgotten"


def test_who_rests_is_told_what_is_faster() -> None:
    """Drafts from the context that mislead are slower than plain decoding, which is then the measure."""
    back_off = BackOff(plain_ms=10.0)
    while not back_off.num_left:
        back_off.observe(1.2, 13.0, undrafted_tokens=1.0, undrafted_ms=12.0)
    assert back_off.drafted_speed < 100
    assert back_off.context_speed < 100
    assert back_off.undrafted_speed == pytest.approx(100)
    assert back_off.pauses()


@pytest.mark.parametrize("num_nodes", [1, 7, 24, 63])
def test_weighed_trees_keep_their_order(num_nodes: int) -> None:
    """Whatever floating point does between the points of a curve: who is above, is as likely at least."""
    tree = random_tree(seed=2, batch_size=2, num_nodes=num_nodes)
    generator = torch.Generator().manual_seed(num_nodes)
    for _ in range(50):
        # Many that are equal, or differ in the last bit.
        scores = tree.scores.clone()
        scores[:, 1:] = -0.7 * torch.randint(1, 4, (2, num_nodes), generator=generator) / 3
        scores[:, 1:] += 1e-7 * torch.randn(2, num_nodes, generator=generator)
        scores[:, 1:] = scores[:, 1:].sort(dim=1, descending=True).values
        points = sorted((-torch.rand(6, generator=generator, dtype=torch.float64)).tolist())
        shares = torch.rand(6, generator=generator, dtype=torch.float64).sort().values.clamp(min=1e-3).tolist()
        curve, other = AcceptanceCurve(tuple(points), tuple(shares)), AcceptanceCurve((-1.0, 0.0), (0.1, 0.9))
        sizing = TreeSizing(costs_of(2), AcceptanceCurves((other, curve)))
        weighed = sizing.weigh(replace(tree, scores=scores)).scores
        assert (weighed.diff(dim=1) <= 0).all()
        assert (weighed[:, 0] == 0).all()
    close = AcceptanceCurves((AcceptanceCurve((-1.0, -1.0 + 1e-12), (0.2, 0.4)),)).log_probabilities(
        torch.tensor([[-2.0, -1.0, 0.0]]), torch.ones(1, 3, dtype=torch.long)
    )
    close = close[0].exp()
    assert close.isfinite().all()
    assert (close.diff() >= 0).all()


def test_what_is_accepted_seldom_gives_way_to_the_context() -> None:
    """A drafter that is sure of tokens which the target seldom takes."""
    tree = random_tree(seed=0, batch_size=1, num_nodes=6)
    branch = ContextBranch.make([[91, 92, 93]], [[-0.7] * 3], CPU)
    sure = replace(tree, scores=-0.01 * torch.arange(7.0)[None])
    kept = {}
    for curve in (None, AcceptanceCurves((AcceptanceCurve((-1.0, 0.0), (0.01, 0.1)),))):
        sizing = TreeSizing(costs_of(), curve)
        kept[curve is not None] = set(branch.added_to(sizing.weigh(sure), is_chain=False).tokens[0].tolist())
    assert not kept[False] & {91, 92, 93}
    assert kept[True] >= {91, 92, 93}
