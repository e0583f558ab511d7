"""Results of tuning without any measurement."""

from transformers_gumiho.tuning import Candidate, CycleCosts, TreeSettings, TuningResult, VocabularyChoice


def make_costs(per_node: float) -> CycleCosts:
    verify = {size: 1.0 + per_node * size for size in (1, 4, 16, 64)}
    rest = {(b, d): {1: 0.1 * d, 64: 0.1 * d} for b in (1, 4) for d in (1, 2, 7)}
    return CycleCosts(verify=verify, rest=rest, plain=1.0)


def make_result(
    candidate: Candidate, measured: dict[str, float], vocabulary: VocabularyChoice | None = None
) -> TuningResult:
    calibrated = Candidate(TreeSettings(8, 2, 7, (0.25, 0.5)), tau=3.3, cycle_seconds=0.25)
    return TuningResult(
        best=candidate, default=candidate, measured=measured, contenders=[(calibrated, 12.6), (candidate, 12.0)],
        calibrated=calibrated, constant=candidate, by_size=[candidate, calibrated], costs=make_costs(0.1),
        vocabulary=vocabulary,
    )  # fmt: skip
