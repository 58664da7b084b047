"""What a person sees of an evaluation."""

import io

from rich.console import Console

from actors.evaluation.report import Check, EvaluationReport, GateVerdict, Interval, Score, Serving
from app.cli import scores

DIFFERENCE = Interval(value=0.1, low=-0.02, high=0.2, confidence=0.95)


def report(*checks: Check) -> EvaluationReport:
    score = Score(value=0.5, low=0.4, high=0.6, confidence=0.95, correct=200, n=400)
    return EvaluationReport(
        id="eval-1",
        suite="exact-match",
        n=400,
        groups=40,
        scores={"base": score, "adapter": score, "champion": score},
        most_frequent=score,
        champion="triage/3",
        against="the champion triage/3",
        difference=DIFFERENCE,
        differences={"base": DIFFERENCE, "champion": DIFFERENCE},
        verdict=GateVerdict.of(*checks),
        parity="fine",
        candidate_parity="fine",
        serving=Serving(
            requests=20, p50_s=0.2, p99_s=0.3, prompt_tokens=1, generated_tokens=1, tokens_per_s=1234.5,
            usd_per_hour=2, usd_per_million_tokens=0.45,
        ),
        engine_start_s=9,
        answers_path="/answers",
    )  # fmt: skip


def drawn(*checks: Check) -> str:
    console = Console(file=io.StringIO(), width=200, markup=False)
    scores.draw(console, report(*checks), "Run 1")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_check_is_shown_with_its_reason() -> None:
    shown = drawn(
        Check(name="metric", passed=True, reason="+0.100 [+0.020, +0.200]"),
        Check(name="parity", passed=False, reason="2.6 nats apart"),
    )
    assert "Gate: not passed" in shown
    assert "compared with the champion triage/3" in shown
    lines = {line.split()[1]: line for line in shown.splitlines() if "metric" in line or "nats" in line}
    assert "passed" in lines["metric"]
    assert "+0.100" in lines["metric"]
    assert "blocks" in lines["parity"]
    assert "2.6 nats" in lines["parity"]


def test_who_the_champion_is_and_what_answers_cost_is_shown() -> None:
    shown = drawn(Check(name="metric", passed=True, reason="better"))
    assert "Gate: passed" in shown
    assert "champion (triage/3)" in shown
    assert "0.2 s at the median, 0.3 s at p99 (20 requests, one at a time)" in shown
    assert "1,234 tokens/s in batches, $0.45 per million tokens" in shown
