"""The acceptance length of speculative decoding, as a metric of the `evaluate` library."""

from dataclasses import asdict
from typing import Any

import datasets
import evaluate

from transformers_gumiho.tools.metrics.acceptance import acceptance_statistics


_DESCRIPTION = """\
How far drafts were accepted: the mean acceptance length tau, the acceptance of each draft position, and how many
cycles were how long. A cycle commits the drafted tokens that the target agrees with and one bonus token.
"""

_INPUTS = """
Args:
    predictions (`list[list[int]]`): For each prompt, the tokens that each verification cycle committed, the bonus
        token included: what `generate(..., return_dict_in_generate=True).accepted_lengths` holds.
    max_draft_length (`int`, *optional*): The longest path that could be drafted. By default the longest accepted one.

Returns:
    The fields of `transformers_gumiho.tools.metrics.AcceptanceStatistics`, by name.

Example:

    >>> import evaluate
    >>> from transformers_gumiho.tools.metrics import ACCEPTANCE_LENGTH
    >>> metric = evaluate.load(ACCEPTANCE_LENGTH)
    >>> metric.compute(predictions=[[1, 3], [4]])["tau_macro"]
    3.0
"""


class AcceptanceLength(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, predictions: list[list[int]], max_draft_length: int | None = None) -> dict[str, Any]:
        return asdict(acceptance_statistics(predictions, max_draft_length))
