import pytest

from actors.evaluation.config import GateConfig
from actors.evaluation.gates import decide
from actors.evaluation.report import Interval


def interval(low: float, high: float, confidence: float = 0.95) -> Interval:
    return Interval(value=(low + high) / 2, low=low, high=high, confidence=confidence)


@pytest.mark.parametrize(
    ("low", "high", "passed"), [(0.01, 0.2, True), (0.0, 0.2, False), (-0.05, 0.3, False), (-0.3, -0.1, False)]
)
def test_only_an_interval_above_zero_passes(low: float, high: float, passed: bool) -> None:
    verdict = decide(GateConfig(), interval(low, high), 400)
    assert verdict.passed is passed
    assert f"{low:+.3f}" in verdict.reason
    assert "400 cases" in verdict.reason


def test_an_interval_at_another_confidence_decides_nothing() -> None:
    with pytest.raises(ValueError, match=r"0\.8"):
        decide(GateConfig(confidence=0.95), interval(0.1, 0.2, confidence=0.8), 400)
