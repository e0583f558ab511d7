"""The acceptance length of speculative decoding, as a metric of the `evaluate` library."""

from dataclasses import asdict
from typing import Any

import datasets
import evaluate

from transformers_gumiho.tools.metrics import acceptance_statistics


_INPUTS = """
Args:
    predictions (`list[list[int]]`): For each prompt, the output's `accepted_lengths`.
    draft_origins (`list[list[str]]`, *optional*): For each prompt, the output's `draft_origins`, so that cycles
        without drafts do not count in tau.

Returns:
    The fields of `transformers_gumiho.tools.metrics.AcceptanceStatistics`, by name.
"""


class AcceptanceLength(evaluate.Metric):
    """How far drafts were accepted: the mean acceptance length, and the acceptance of each draft position."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
        )

    def _compute(self, predictions: list[list[int]], draft_origins: list[list[str]] | None = None) -> dict[str, Any]:
        return asdict(acceptance_statistics(predictions, draft_origins))
