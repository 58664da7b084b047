"""The comparison, on made-up engines. That real ones pass or fail is tests/integration/test_engine.py's affair."""

import math

import pytest

from actors.evaluation.parity import Observed, ParityCase, ParityReference, compare, longest_run

EXPECTED = ParityReference("d", [ParityCase([1, 2, 3], [-1.0, -2.0], [4, 5]), ParityCase([6, 7], [-0.5], [8])])


def observed(shift: float = 0.0, *, last: int = 8) -> list[Observed]:
    return [Observed([-1.0 + shift, -2.0 - shift], [4, 5]), Observed([-0.5 + shift], [last])]


def test_an_engine_within_rounding_passes() -> None:
    verdict = compare(EXPECTED, observed(0.05), "bfloat16")
    assert verdict.passed
    assert (verdict.mean_nats, verdict.max_nats) == pytest.approx((0.05, 0.05))


def test_what_is_rounding_in_bfloat16_is_a_fault_in_float32() -> None:
    assert not compare(EXPECTED, observed(0.05), "float32").passed


def test_one_other_sure_token_is_a_fault_though_all_log_probabilities_agree() -> None:
    verdict = compare(EXPECTED, observed(last=9), "bfloat16")
    assert not verdict.passed
    assert "2 of 3" in str(verdict)


def test_an_engine_that_stops_early_fails() -> None:
    first, second = observed()
    assert not compare(EXPECTED, [Observed(first.logprobs, [4]), second], "bfloat16").passed


def test_an_engine_that_returns_nan_fails() -> None:
    assert not compare(EXPECTED, observed(math.nan), "bfloat16").passed


def test_a_missing_answer_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare(EXPECTED, observed()[:1], "bfloat16")


@pytest.mark.parametrize(
    ("flags", "run"),
    [("", (0, 0)), ("..", (0, 0)), ("xx", (0, 2)), (".x.xxx.", (3, 6)), ("xx.xx", (0, 2)), ("...x", (3, 4))],
)
def test_the_longest_run_of_sure_tokens(flags: str, run: tuple[int, int]) -> None:
    assert longest_run([flag == "x" for flag in flags]) == run


def test_a_recipe_may_ask_for_more_than_the_dtype_explains() -> None:
    assert not compare(EXPECTED, observed(0.05), "bfloat16", 0.01).passed
    assert compare(EXPECTED, observed(0.05), "float32", 0.06).tolerance_nats == 0.06
