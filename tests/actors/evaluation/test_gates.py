"""Each check blocks by itself, and says why in numbers."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from actors.evaluation import gates
from actors.evaluation.config import BudgetConfig, GateConfig, SliceConfig
from actors.evaluation.gates import Evidence, decide
from actors.evaluation.parity import ParityVerdict
from actors.evaluation.report import Check, GateVerdict, Interval, Serving, Slice
from actors.evaluation.suites import Case

PARITY = ParityVerdict(True, 0.06, 0.3, 0.12, "13 of 13 the same")
SERVING = Serving(
    requests=40, p50_s=0.2, p99_s=0.35, prompt_tokens=4000, generated_tokens=1000, tokens_per_s=500.0,
    usd_per_hour=1.8, usd_per_million_tokens=1.0,
)  # fmt: skip


def interval(low: float, high: float, confidence: float = 0.95) -> Interval:
    return Interval(value=(low + high) / 2, low=low, high=high, confidence=confidence)


def a_slice(name: str, low: float, high: float) -> Slice:
    return Slice(name=name, n=30, groups=9, candidate=0.3, against=0.6, difference=interval(low, high, 0.99))


def evidence(**changes: Any) -> Evidence:
    usual = Evidence(
        against="the champion triage/3",
        n=400,
        groups=40,
        difference=interval(0.05, 0.15),
        slices=[a_slice("KeyError", -0.05, 0.2)],
        parity=PARITY,
        serving=SERVING,
    )
    return replace(usual, **changes)


def blocking(verdict: GateVerdict) -> dict[str, str]:
    return {check.name: check.reason for check in verdict.checks if not check.passed}


STRICT = GateConfig(budget=BudgetConfig(p99_latency_s=0.5, usd_per_million_tokens=2, usd_per_hour=1.8))


def test_a_candidate_that_passes_everything_passes() -> None:
    verdict = decide(STRICT, evidence())
    assert verdict.passed
    assert [check.name for check in verdict.checks] == [
        "metric", "slices", "parity", "budget_latency", "budget_price",
    ]  # fmt: skip
    assert "champion triage/3" in verdict.reason


@pytest.mark.parametrize(
    ("low", "high", "passed"), [(0.01, 0.2, True), (0.0, 0.2, False), (-0.05, 0.3, False), (-0.3, -0.1, False)]
)
def test_only_an_interval_above_zero_passes(low: float, high: float, passed: bool) -> None:
    verdict = decide(GateConfig(), evidence(difference=interval(low, high)))
    assert verdict.passed is passed
    assert f"{low:+.3f}" in verdict.reason
    assert "400 cases" in verdict.reason
    assert set(blocking(verdict)) == (set() if passed else {"metric"})


def test_too_few_groups_are_named_as_the_reason() -> None:
    verdict = decide(GateConfig(), evidence(groups=1, difference=interval(-1, 1)))
    assert "1 group cannot show a difference, it takes at least 6" in verdict.reason


def test_a_slice_that_clearly_lost_blocks_and_is_named() -> None:
    verdict = decide(STRICT, evidence(slices=[a_slice("KeyError", -0.5, -0.1), a_slice("OSError", 0.0, 0.2)]))
    assert set(blocking(verdict)) == {"slices"}
    assert "1 of 2 slices by label" in verdict.reason
    assert "'KeyError' 0.600 → 0.300, -0.300 [-0.500, -0.100] on 30 cases" in verdict.reason


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.05), (-0.15, -0.01)])
def test_a_loss_that_may_be_luck_or_is_allowed_does_not_block(low: float, high: float) -> None:
    verdict = decide(STRICT, evidence(slices=[a_slice("KeyError", low, high)]))
    assert verdict.passed
    assert f"{low:+.3f}" in verdict.checks[1].reason


def test_many_lost_slices_are_counted_and_the_evidence_stays_small() -> None:
    lost = [a_slice(f"label {number}", -0.6, -0.2) for number in range(200)]
    check = decide(STRICT, evidence(slices=lost)).checks[1]
    assert "and 197 more" in check.reason
    assert len(check.details["lost"]) == gates.SLICES_KEPT
    assert len(check.model_dump_json()) < 5000


def test_slices_can_be_left_out_and_parity_cannot() -> None:
    verdict = decide(GateConfig(slices=None), evidence(slices=[]))
    assert [check.name for check in verdict.checks] == ["metric", "parity"]


def test_an_engine_that_computes_another_candidate_blocks() -> None:
    wrong = ParityVerdict(False, 2.6, 11.0, 0.12, "0 of 13 the same")
    verdict = decide(STRICT, evidence(parity=wrong))
    assert set(blocking(verdict)) == {"parity"}
    assert "2.6000 nats in the mean (at most 11.000; 0.12 allowed)" in verdict.reason
    assert "0 of 13" in verdict.reason


def test_an_engine_that_returns_nan_blocks_and_is_still_json() -> None:
    verdict = decide(STRICT, evidence(parity=ParityVerdict(False, math.nan, math.nan, 0.12, "0 of 13 the same")))
    json.dumps(verdict.model_dump(mode="json"), allow_nan=False)
    assert set(blocking(verdict)) == {"parity"}


def test_a_slow_candidate_blocks() -> None:
    gate = GateConfig(budget=BudgetConfig(p99_latency_s=0.3))
    verdict = decide(gate, evidence())
    assert set(blocking(verdict)) == {"budget_latency"}
    assert "0.350 s over 40 requests, one at a time; 0.3 s would be allowed" in verdict.reason


def test_a_dear_candidate_blocks() -> None:
    gate = GateConfig(budget=BudgetConfig(usd_per_million_tokens=0.9, usd_per_hour=1.8))
    verdict = decide(gate, evidence())
    assert set(blocking(verdict)) == {"budget_price"}
    assert "$1 at 500 tokens/s and $1.8 per hour; $0.9 would be allowed" in verdict.reason


def test_all_that_blocks_is_in_the_reason() -> None:
    verdict = decide(GateConfig(budget=BudgetConfig(p99_latency_s=0.1)), evidence(difference=interval(-0.1, 0.1)))
    assert set(blocking(verdict)) == {"metric", "budget_latency"}
    assert all(reason in verdict.reason for reason in blocking(verdict).values())


def test_an_interval_at_another_confidence_decides_nothing() -> None:
    with pytest.raises(ValueError, match=r"0\.8"):
        decide(GateConfig(confidence=0.95), evidence(difference=interval(0.1, 0.2, confidence=0.8)))


def test_a_verdict_cannot_contradict_its_checks() -> None:
    with pytest.raises(ValidationError, match="if and only if"):
        GateVerdict(passed=True, reason="", checks=(Check(name="metric", passed=False, reason=""),))
    with pytest.raises(ValidationError, match="if and only if"):
        GateVerdict(passed=True, reason="", checks=())


def cases(labels: dict[str, int], *, groups: int = 10) -> list[Case]:
    named = [label for label, count in labels.items() for _ in range(count)]
    return [Case(str(number), [], label, f"package {number % groups}") for number, label in enumerate(named)]


def test_slices_are_the_answers_with_enough_cases_and_the_worst_comes_first() -> None:
    asked = cases({"KeyError": 30, "`KeyError`.": 10, "OSError": 30, "Rare": 19})
    candidate = [case.reference == "OSError" for case in asked]
    found = gates.slices(SliceConfig(min_cases=20), 0.95, asked, candidate, [not one for one in candidate])
    assert [(one.name, one.n, one.difference.value) for one in found] == [("KeyError", 40, -1.0), ("OSError", 30, 1.0)]
    assert (found[0].candidate, found[0].against, found[0].groups) == (0.0, 1.0, 10)
    # Two looks share the error that the gate allows.
    assert found[0].difference.confidence == pytest.approx(0.975)
    assert found[0].difference.high < 0


def test_a_slice_from_too_few_groups_is_not_proof_of_a_loss() -> None:
    asked = cases({"KeyError": 40}, groups=3)
    (found,) = gates.slices(SliceConfig(), 0.95, asked, [False] * 40, [True] * 40)
    assert (found.difference.value, found.difference.high) == (-1.0, 1.0)


def test_a_slice_that_is_one_group_is_asked_about_itself() -> None:
    asked = cases({"KeyError": 120}, groups=3)
    found = gates.slices(SliceConfig(by="group"), 0.95, asked, [False] * 120, [True] * 120)
    assert [one.name for one in found] == ["package 0", "package 1", "package 2"]
    assert all(one.difference.high < 0 for one in found)


def test_free_text_answers_make_no_slices() -> None:
    asked = cases({f"answer {number}": 1 for number in range(50)})
    assert gates.slices(SliceConfig(), 0.95, asked, [True] * 50, [True] * 50) == []
    assert decide(GateConfig(), evidence(slices=[])).passed
