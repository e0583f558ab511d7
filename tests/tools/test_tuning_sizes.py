"""What tuning measures for sizes that fit: how often drafts are accepted, and what cycles cost."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chains import make_chain_drafter, make_chain_target
from targets import make_drafter, make_prompts, make_target
from transformers import PreTrainedModel
from tuning_results import make_result

from transformers_gumiho.decoding import loop
from transformers_gumiho.drafting.settings import DraftingSettings
from transformers_gumiho.drafting.tree_size import COMPILED_TREE_SIZES, sizes_up_to
from transformers_gumiho.measuring.timing import DecodingTime, time_drafted, time_plain
from transformers_gumiho.model.acceptance_curves import AcceptanceCurves
from transformers_gumiho.model.cycle_costs import CycleCostTable
from transformers_gumiho.tuning import (
    Answer,
    Candidate,
    FittedSizes,
    TreeSettings,
    TuningArguments,
    cost_table,
    describe,
    fit_acceptance_curves,
    fit_sizes,
    measure_acceptance_curves,
    measure_cost_table,
)
from transformers_gumiho.tuning.contexts import ending_before, typical_rows
from transformers_gumiho.tuning.cost_table import forcing_table


SETTINGS = {"num_assistant_tokens": 12, "branching_factor": 3, "tree_depth": 7, "draft_temperature": 1.0}


def test_curves_find_how_often_scores_are_right_at_each_depth() -> None:
    generator = np.random.default_rng(0)
    scores, depths = -generator.exponential(2.0, 80000), generator.integers(1, 4, 80000)
    # A drafter that is too sure of itself, the more so the deeper.
    sure = np.array([0.8, 0.6, 0.3])
    curves = fit_acceptance_curves(
        scores, depths, generator.random(len(scores)) < sure[depths - 1] * np.exp(1.3 * scores)
    )
    assert len(curves) == 3
    for depth, curve in enumerate(curves, start=1):
        for score in (-0.05, -0.5, -1.2, -2.5):
            at = torch.tensor([[score]])
            found = AcceptanceCurves(curves).log_probabilities(at, torch.full_like(at, depth, dtype=torch.long)).exp()
            assert float(found) == pytest.approx(sure[depth - 1] * np.exp(1.3 * score), rel=0.12, abs=0.01)
        assert list(curve.scores) == sorted(curve.scores)
        assert list(curve.shares) == sorted(curve.shares)
        assert 0 < curve.shares[0] < curve.shares[-1] <= 1


def test_few_tokens_prove_little() -> None:
    (few,) = fit_acceptance_curves(np.array([-1.0, -np.inf]), np.array([1, 1]), np.array([True, False]))
    of_all = (1 + 20 * np.exp(-13.0)) / 22  # the two together, their mean score being -13
    assert few.shares[0] == pytest.approx((1 + 20 * of_all) / 22, abs=1e-3)
    # A token at depth 2 is taken for one like those at depth 1, which are hundreds.
    scores, depths = np.full(401, -1.0), np.array([1] * 400 + [2])
    first, second = fit_acceptance_curves(scores, depths, np.array([True, False] * 200 + [True]))
    assert first.shares[0] == pytest.approx(0.5, abs=0.02)
    assert second.shares[0] == pytest.approx((1 + 20 * 0.5) / 21, abs=0.02)


def test_curves_count_the_drafted_tokens_of_a_generation() -> None:
    target = make_target(seed=3)
    drafter = make_drafter(target)
    prompts = [make_prompts([length])["input_ids"][0] for length in (4, 6)]
    for sampling in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0}):
        curves, answers = measure_acceptance_curves(target, drafter, prompts, 30, SETTINGS, **sampling)
        assert [len(answer.new_tokens) for answer in answers] == [30, 30]
        assert curves is not None
        assert 1 < len(curves) <= SETTINGS["tree_depth"]
        assert all(0 < min(curve.shares) <= max(curve.shares) <= 1 for curve in curves)
    one_token, _ = measure_acceptance_curves(target, drafter, prompts, 1, SETTINGS)
    assert one_token is None


@pytest.mark.parametrize("size", [0, 1, 2, 3, 12])
def test_forced_size_is_that_of_every_cycle(size: int) -> None:
    target = make_target(seed=3)
    drafter = make_drafter(target, **SETTINGS, cycle_costs=forcing_table(size, "here", "float64"))
    output = target.generate(
        **make_prompts([5]), max_new_tokens=20, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    assert set(output.tree_sizes) == {size}


def test_table_holds_the_medians_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is now faster and now slower, with a slow spell now and then."""
    seen: list[tuple[int, int]] = []
    paddings: list[list[int]] = []
    drift = itertools.cycle([5.0, 1.3, 0.7, 1.0])
    speeds = [next(drift)]

    def drafted(_: Any, __: Any, ids: torch.Tensor, settings: dict[str, Any], **options: Any) -> DecodingTime:
        paddings.append((options["attention_mask"] == 0).sum(dim=1).tolist())
        table = CycleCostTable.parse(settings["cycle_costs"])
        (size,) = (s for s, ms in zip(table.tree_sizes, table.verify_ms[0], strict=True) if ms == 1.0)
        seen.append((len(ids), size))
        verify = 0.010 + 0.001 * len(ids) * size
        verify = speeds[-1] * (verify + float(len(seen) % 7 == 0))
        draft = 0.004 + 0.0001 * settings["num_assistant_tokens"]
        return DecodingTime(verify_seconds=verify, cycle_seconds=verify + speeds[-1] * draft)

    def plain(_: Any, ids: torch.Tensor, **options: Any) -> DecodingTime:
        paddings.append((options["attention_mask"] == 0).sum(dim=1).tolist())
        seconds = speeds[-1] * (0.09 + 0.01 * len(ids))
        speeds.append(next(drift))
        return DecodingTime(num_tokens=10, seconds=seconds)

    monkeypatch.setattr(cost_table, "time_drafted", drafted)
    monkeypatch.setattr(cost_table, "time_plain", plain)
    target = make_target()
    answers = [Answer(torch.arange(40) % 7, 10), Answer(torch.arange(48) % 5, 18)]
    table = measure_cost_table(target, make_drafter(target), answers, SETTINGS, 8, batch_sizes=(1, 2), repeats=1)
    assert (table.batch_sizes, table.tree_sizes) == ((1, 2), (0, 1, 2, 3, 7, 12))
    assert Counter(seen) == {(rows, size): 4 for rows in (1, 2) for size in (0, 1, 2, 3, 7, 12)}
    assert paddings == [[0]] * 28 + [[0, 8]] * 28, "as batches are"
    for rows, verify in zip(table.batch_sizes, table.verify_ms, strict=True):
        assert verify == pytest.approx([10.0 + rows * size for size in table.tree_sizes])
    for draft in table.draft_ms:
        assert draft == pytest.approx((4.1, 4.1, 4.2, 4.3, 4.7, 5.2)), (
            "as much is drafted as is verified, one at least"
        )
    assert table.plain_ms == pytest.approx((10.0, 11.0))
    assert table.dtype == "float64"


def test_target_that_takes_no_padding_is_timed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[torch.Tensor] = []

    def refuse_padding(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
        mask = model_kwargs["attention_mask"]  # none where nothing is padded
        if mask is not None and not mask.all():
            raise ValueError("it cannot verify drafts in a padded batch")

    def timed(*_: Any, attention_mask: torch.Tensor, **__: Any) -> DecodingTime:
        masks.append(attention_mask)
        return DecodingTime(num_tokens=1, seconds=0.01, verify_seconds=0.01, cycle_seconds=0.02)

    monkeypatch.setattr(loop, "check_padding", refuse_padding)
    monkeypatch.setattr(cost_table, "time_drafted", timed)
    monkeypatch.setattr(cost_table, "time_plain", timed)
    target = make_target()
    table = measure_cost_table(
        target, make_drafter(target), [Answer(torch.arange(40) % 7, 10)], SETTINGS, 8, batch_sizes=(2,), repeats=1
    )
    assert table.batch_sizes == (2,)
    assert len(masks) == 4 * 7, "four turns of six sizes and a step"
    assert all(mask.all() for mask in masks)


def test_batches_that_a_target_cannot_verify_are_left_out() -> None:
    target = make_chain_target("rwkv")
    drafter, answers = make_chain_drafter(target), [Answer(torch.arange(40) % 7 + 1, 10)]
    settings = SETTINGS | {"num_assistant_tokens": 3, "branching_factor": 1}
    timed = target, drafter, answers, settings, 4
    assert measure_cost_table(*timed, batch_sizes=(1, 2), repeats=1).batch_sizes == (1,)
    why = r"RwkvForCausalLM cannot verify drafts in batches of \(2,\), time others: .*differs from one token after"
    with pytest.raises(ValueError, match=why):
        measure_cost_table(*timed, batch_sizes=(2,), repeats=1)


def test_compiled_cycles_are_timed_in_sizes_that_they_choose_among(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = DecodingTime(num_tokens=1, seconds=0.01, verify_seconds=0.01, cycle_seconds=0.02)
    monkeypatch.setattr(cost_table, "time_drafted", lambda *_, **__: timed)
    monkeypatch.setattr(cost_table, "time_plain", lambda *_, **__: timed)
    target = make_target()
    target.generation_config.cache_implementation = "static"
    drafter, answers = make_drafter(target), [Answer(torch.arange(40) % 7, 10)]
    for largest, sizes in ((16, (0, 3, 7, 12, 16)), (2, (0, 2))):
        settings = SETTINGS | {"num_assistant_tokens": largest}
        table = measure_cost_table(
            target, drafter, answers, settings, 8, batch_sizes=(1,), repeats=1, sampling={"temperature": 1.0}
        )
        assert table.tree_sizes == sizes
        assert set(sizes) <= set(sizes_up_to(largest, COMPILED_TREE_SIZES)), "another one would never be chosen"


def test_sampled_cycles_are_told_in_the_times_of_the_greedy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is twice as slow when they are timed."""

    runs: Counter[bool] = Counter()

    def drafted(_: Any, __: Any, ids: torch.Tensor, settings: dict[str, Any], **options: Any) -> DecodingTime:
        table = CycleCostTable.parse(settings["cycle_costs"])
        (size,) = (s for s, ms in zip(table.tree_sizes, table.verify_ms[0], strict=True) if ms == 1.0)
        slow = 2.0 if options["do_sample"] else 1.0
        verify, rest = 0.010 + 0.001 * size, 0.004
        if options["do_sample"]:
            rest += 0.001 + 0.001 * min(settings["num_assistant_tokens"], 7)
        return DecodingTime(verify_seconds=slow * verify, cycle_seconds=slow * (verify + rest))

    def plain(*_: Any, **options: Any) -> DecodingTime:
        runs[options["do_sample"]] += 1
        return DecodingTime(num_tokens=1, seconds=2.0 * 0.012 if options["do_sample"] else 0.010)

    monkeypatch.setattr(cost_table, "time_drafted", drafted)
    monkeypatch.setattr(cost_table, "time_plain", plain)
    target = make_target()
    for largest in (12, 2):
        settings = SETTINGS | {"num_assistant_tokens": largest}
        table = measure_cost_table(
            target, make_drafter(target), [Answer(torch.arange(40) % 7, 10)], settings, 8, batch_sizes=(1,), repeats=1,
            sampling={"temperature": 0.9},
        )  # fmt: skip
        assert table.plain_ms == pytest.approx((10.0,))
        assert table.draft_ms == (pytest.approx([4.0] * len(table.tree_sizes)),)
        # A draw is read for each depth, of which there are no more than 7.
        assert table.sampled_draft_ms == (pytest.approx([5.0 + min(max(size, 1), 7) for size in table.tree_sizes]),)
        assert table.sampled_plain_ms == pytest.approx((12.0,))
    # Of each largest size a step for each of three turns and one to warm up, sampled ones three in each of one turn.
    assert runs == {False: 2 * 4, True: 2 * 3 * 2}


@pytest.mark.parametrize("way", ["chain", "static"])
def test_where_all_is_drafted_all_is_timed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is verified, as chains and fixed shapes are drafted whole."""
    drafted: set[int] = set()

    def timed(_: Any, __: Any, ids: torch.Tensor, settings: dict[str, Any], **options: Any) -> DecodingTime:
        drafted.add(settings["num_assistant_tokens"])
        sizes = settings["cycle_costs"]["tree_sizes"]
        noise = 0.001 * (settings["cycle_costs"]["verify_ms"][0].index(1.0) + len(sizes))
        return DecodingTime(num_tokens=1, seconds=0.01, verify_seconds=0.01, cycle_seconds=0.02 + noise)

    monkeypatch.setattr(cost_table, "time_drafted", timed)
    monkeypatch.setattr(cost_table, "time_plain", lambda *_, **__: DecodingTime(num_tokens=1, seconds=0.01))
    target = make_chain_target("rwkv") if way == "chain" else make_target()
    if way == "static":
        target.generation_config.cache_implementation = "static"
    drafter = make_chain_drafter(target) if way == "chain" else make_drafter(target)
    settings = SETTINGS | {"num_assistant_tokens": 7}
    table = measure_cost_table(
        target, drafter, [Answer(torch.arange(40) % 7 + 1, 10)], settings, 8, 1, batch_sizes=(1,)
    )
    assert drafted == {7}
    assert len(set(table.draft_ms[0])) == 1, "what differs is noise"


def test_texts_with_the_padding_token_are_timed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of them is taken for padding, which would be masked."""
    target, masks = make_target(), []
    target.generation_config.pad_token_id = 3
    prompts = torch.tensor([[3, 6, 3], [5, 4, 3]])
    generate = type(target).generate

    def noting_masks(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        masks.append(kwargs["attention_mask"])
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "generate", noting_masks)
    assert time_plain(target, prompts, max_new_tokens=4, do_sample=False).num_tokens == 3
    settings = SETTINGS | {"num_assistant_tokens": 4}
    time_drafted(target, make_drafter(target), prompts, settings, max_new_tokens=4, do_sample=False)
    assert [mask.tolist() for mask in masks] == [[[1, 1, 1]] * 2] * 2
    given = torch.tensor([[0, 1, 1], [1, 1, 1]])
    time_plain(target, prompts, attention_mask=given, max_new_tokens=4, do_sample=False)
    time_drafted(target, make_drafter(target), prompts, settings, attention_mask=given, max_new_tokens=4)
    assert [mask.tolist() for mask in masks[2:]] == [given.tolist()] * 2


def test_rows_of_a_batch_are_different_texts_of_unequal_lengths() -> None:
    answers = [Answer(torch.arange(start, start + 60), 20) for start in (0, 100)]
    rows, mask = typical_rows(answers, 3)
    assert rows.shape == mask.shape == (3, 40), "halfway through the answers"
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0, :38], rows[2, 2:])
    assert mask.sum(dim=1).tolist() == [40, 39, 38], "rows are padded as people's are"
    assert mask[:, -1].tolist() == [1, 1, 1], "on the left"
    assert typical_rows(answers, 50)[1].sum(dim=1).min() == 1


@pytest.mark.parametrize("batch_size", [2, 4, 8, 30])
@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_batch_are_as_different_as_can_be(seed: int, batch_size: int) -> None:
    generator = np.random.default_rng(seed)
    prompts, new = (generator.integers(1, 400, 6) for _ in range(2))
    texts = [
        Answer(torch.arange(before + after) + 1000 * number, int(before))
        for number, (before, after) in enumerate(zip(prompts, new, strict=True))
    ]
    rows, mask = typical_rows(texts, batch_size)
    lengths, numbers = mask.sum(dim=1), rows[:, -1] // 1000
    assert ((lengths.diff() < 0) | (lengths[1:] == 1)).all(), "rows that are alike advance together"
    uses = Counter(numbers.tolist())
    for row, length in enumerate(lengths.tolist()):
        long_enough = [number for number, text in enumerate(texts) if len(text.tokens) >= length]
        assert int(numbers[row]) in long_enough
        assert uses[int(numbers[row])] <= -(-batch_size // len(long_enough)), "as often as others"
    # Also where a target takes no padding: rows of one token would make the same text.
    assert torch.equal(rows // 1000, numbers[:, None].expand_as(rows))


def test_rows_are_as_long_as_those_of_batches_are_on_average() -> None:
    """A batch is as wide as its longest prompt, and takes as many steps as its longest answer."""
    lengths = [(60, 10), (12, 100), (30, 60)]
    answers = [Answer(torch.arange(before + after), before) for before, after in lengths]
    for size in (1, 2, 3, 4):
        widths, shortest = [], []
        for batch in itertools.permutations(lengths, size) if size <= 3 else itertools.product(lengths, repeat=size):
            prompts, new = zip(*batch, strict=True)
            widths += [max(prompts) + step + 0.5 for step in range(max(new))]
            shortest += [min(prompts) + step + 0.5 for step in range(max(new))]
        of_rows = typical_rows(answers, size)[1].sum(dim=1).tolist()
        assert of_rows[0] == pytest.approx(np.mean(widths), abs=2), "longer in larger batches"
        assert of_rows[-1] == pytest.approx(np.mean(shortest), abs=2)


def test_no_cycle_is_timed_where_a_target_has_no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one prompt may be nearly as long, and the answer to another one."""
    ends, timed = set(), DecodingTime(num_tokens=1, seconds=0.01, verify_seconds=0.01, cycle_seconds=0.02)

    def note(*args: Any, max_new_tokens: int, **kwargs: Any) -> DecodingTime:
        (ids,) = (value for value in args if isinstance(value, torch.Tensor))
        ends.add(ids.shape[1] + max_new_tokens)
        return timed

    monkeypatch.setattr(cost_table, "time_drafted", note)
    monkeypatch.setattr(cost_table, "time_plain", note)
    target = make_target()
    drafter, answers = make_drafter(target), [Answer(torch.arange(62) % 7, 60), Answer(torch.arange(50) % 7, 10)]
    for positions, end in ((64, 64), (1000, 82)):
        ends.clear()
        target.config.max_position_embeddings = positions
        measure_cost_table(target, drafter, answers, SETTINGS, 40, batch_sizes=(2,), repeats=1)
        assert max(ends) == end, "the longest text and half of a run, or all positions"


def test_row_that_is_too_short_to_be_cut_keeps_a_token() -> None:
    ids, mask = torch.arange(12).reshape(2, 6), torch.tensor([[1] * 6, [0] * 4 + [1] * 2])
    rows, of_rows = ending_before((ids, mask), 6)
    assert (rows.tolist(), of_rows.tolist()) == ([[0, 1, 2], [6, 7, 8]], [[1, 1, 1], [0, 0, 1]])
    assert mask[1].tolist() == [0] * 4 + [1] * 2, "as they were"
    assert ending_before((ids, mask), 50)[0].tolist() == [[0], [6]]


def test_runs_of_every_length_have_the_same_context_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(seed=3)
    drafter = make_drafter(target)
    contexts = set()

    def note(model: object, drafter: object, ids: torch.Tensor, *args: object, **kwargs: Any) -> DecodingTime:
        contexts.add(ids.shape[1] + kwargs["max_new_tokens"] // 2)
        return DecodingTime(num_tokens=1, seconds=1.0, cycle_seconds=1.0)

    monkeypatch.setattr(cost_table, "time_drafted", note)
    monkeypatch.setattr(cost_table, "time_plain", lambda model, ids, **kwargs: note(model, None, ids, **kwargs))
    answers = [Answer(torch.arange(90) % 7, 20)]
    measure_cost_table(target, drafter, answers, SETTINGS, max_new_tokens=70, repeats=1, batch_sizes=[1, 3])
    assert contexts == {55}


def test_what_is_found_are_settings_of_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_table, "TIMED_BATCHES", (1, 2))
    target = make_target(seed=3)
    drafter = make_drafter(target, num_assistant_tokens=6, branching_factor=3)
    before = drafter.generation_config.to_dict()
    prompts = [make_prompts([length])["input_ids"][0] for length in (4, 6)]
    args = TuningArguments("", "", max_new_tokens=20, max_tree_size=8, repeats=1)
    fitted = fit_sizes(target, drafter, prompts, SETTINGS | {"num_assistant_tokens": 6}, args)
    assert drafter.generation_config.to_dict() == before
    assert list(fitted.measured) == [6, 8]
    for sampled, greedy in (("sampled_draft_ms", "draft_ms"), ("sampled_plain_ms", "plain_ms")):
        assert len(getattr(fitted.table, sampled)) == len(getattr(fitted.table, greedy)) == 2
    fitted = replace(fitted, fixed_speed=0.0)
    candidate = Candidate(TreeSettings(6, 3, 7, 1.0), tau=2.0, cycle_seconds=0.1)
    result = make_result(candidate, {"best": 12.0, "default": 11.0, "plain": 10.0})
    result = type(result)(**vars(result) | {"sizes": fitted})
    drafter.generation_config.update(**result.settings)
    settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, None)
    assert settings.cycle_costs == fitted.table
    assert settings.num_assistant_tokens == fitted.largest


def test_sizes_that_do_not_gain_are_left_out() -> None:
    table = CycleCostTable("m", "float32", (1,), (0, 4), ((8.0, 9.5),), ((2.0, 3.0),), (8.25,))
    sizes = FittedSizes(table, fixed=4, measured={4: 90.0, 8: 95.0}, fixed_speed=100.0, plain=97.0)
    candidate = Candidate(TreeSettings(4, 1, 4, 1.0), tau=1.2, cycle_seconds=0.1)
    result = make_result(candidate, {"best": 12.0, "default": 11.0, "plain": 10.0})
    result = type(result)(**vars(result) | {"sizes": sizes})
    assert (result.settings["num_assistant_tokens"], result.settings["cycle_costs"]) == (4, None)
    assert result.speculation_pays  # with the fixed tree
    assert "fitting gains -5.0%, so the size stays fixed" in describe(result)
    sizes = replace(sizes, measured={4: 90.0, 8: 98.0})
    result = type(result)(**vars(result) | {"sizes": sizes})
    assert result.settings["num_assistant_tokens"] == 8, "by so much two runs differ"
    assert result.settings["cycle_costs"] == table.as_dict()
    assert "fitting gains -2.0%\n" in describe(result) + "\n"


def test_a_table_of_another_tree_is_not_kept() -> None:
    candidate = Candidate(TreeSettings(4, 1, 4, 1.0), tau=1.2, cycle_seconds=0.1)
    assert make_result(candidate, {"best": 12.0, "default": 11.0, "plain": 10.0}).settings["cycle_costs"] is None


def test_gain_is_told() -> None:
    table = CycleCostTable(
        "m", "float32", (1, 8), (0, 4), ((8.0, 9.5), (10.0, 20.0)), ((2.0, 2.5), (4.0, 5.0)), (8.25, 12.0)
    )
    sizes = FittedSizes(table, fixed=4, measured={4: 100.0, 8: 110.0}, fixed_speed=100.0, plain=50.0)
    candidate = Candidate(TreeSettings(4, 1, 4, 1.0), tau=1.2, cycle_seconds=0.1)
    result = make_result(candidate, {"best": 12.0, "default": 11.0, "plain": 10.0})
    text = describe(type(result)(**vars(result) | {"sizes": sizes}))
    assert (
        "\nrows        0       4    plain\n   1     8.00    9.50     8.25\n   8    10.00   20.00    12.00\nof dr"
        in text
    )
    assert "\nrows        0       4\n   1     2.00    2.50\n   8     4.00    5.00\nsizes that fit" in text
    assert (
        "100.0 tokens/s up to 4 drafted, 110.0 tokens/s up to 8 drafted; always 4: 100.0, plain decoding: 50.0; "
        "fitting gains +10.0%"
    ) in text
    assert "PLAIN DECODING IS FASTER" not in text
    table = replace(table, sampled_draft_ms=((3.0, 4.0), (5.0, 7.0)), sampled_plain_ms=(9.0, 14.0))
    text = describe(type(result)(**vars(result) | {"sizes": replace(sizes, table=table)}))
    assert "\nrows        0       4    plain\n   1     3.00    4.00     9.00\n   8     5.00    7.00    14.00\n" in text
