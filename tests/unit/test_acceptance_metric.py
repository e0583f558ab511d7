"""The metric that turns accepted lengths into tau."""

import evaluate
import pytest

from transformers_gumiho.tools.metrics import ACCEPTANCE_LENGTH


@pytest.fixture(scope="module")
def metric() -> evaluate.Metric:
    return evaluate.load(ACCEPTANCE_LENGTH)


def test_counts_cycles_and_prompts(metric: evaluate.Metric) -> None:
    # Five cycles that commit 3, 1, 1, 2 and 3 tokens.
    result = metric.compute(predictions=[[3, 1, 1], [], [2, 3]])
    assert result["tau_micro"] == pytest.approx(10 / 5)
    assert result["tau_macro"] == pytest.approx((5 / 3 + 5 / 2) / 2)
    assert result["acceptance_per_position"] == pytest.approx([3 / 5, 2 / 5])
    # Every token of a cycle but the bonus token is an accepted draft.
    assert 1 + sum(result["acceptance_per_position"]) == pytest.approx(result["tau_micro"])


def test_cycles_without_drafts_do_not_count_in_tau(metric: evaluate.Metric) -> None:
    """The metric takes what the output has. A row that ended early has fewer cycles than its batch."""
    origins = ["drafter", "pause", "drafter", "end"]
    result = metric.compute(predictions=[[3, 1, 2, 1], [4, 1]], draft_origins=[origins, origins])
    assert result["tau_micro"] == pytest.approx((3 + 2 + 4) / 3)
    assert result["tau_macro"] == pytest.approx((2.5 + 4) / 2)
    assert result["tokens_per_pass"] == pytest.approx(12 / 6)
    assert result["paused_share"] == pytest.approx(2 / 6)
    paused = metric.compute(predictions=[[1, 1]], draft_origins=[["pause", "pause"]])
    assert paused["tau_micro"] is None
    assert paused["acceptance_per_position"] == []
    assert paused["tokens_per_pass"] == 1.0


@pytest.mark.parametrize(
    ("predictions", "settings", "message"),
    [
        ([[], []], {}, "no cycles"),
        ([[2, 0]], {}, "at least its bonus token, got a length of 0"),
        ([[9, 1]], {"draft_origins": [["drafter"]]}, "a list for each prompt, with an entry for each of its cycles"),
    ],
)
def test_refuses_what_no_decoding_gives(
    metric: evaluate.Metric, predictions: list[list[int]], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=predictions, **settings)
