"""The picture of an evaluation, which three verbs show."""

from typing import TYPE_CHECKING

from rich.console import Console

from app.cli.output import table

if TYPE_CHECKING:
    from actors.evaluation.report import EvaluationReport


def draw(console: Console, report: "EvaluationReport", title: str) -> None:
    """Scores with their intervals, what guessing would give, and the gate's verdict."""
    rows = {**report.scores, "always the most frequent answer": report.most_frequent}
    console.print(
        table(
            f"{title}: exact match on {report.n} held-out cases of {report.groups} groups",
            ["candidate", "exact match", "low", "high"],
            [(name, score.value, score.low, score.high) for name, score in rows.items()],
        )
    )
    console.print(f"Gate: {'passed' if report.verdict.passed else 'not passed'}. {report.verdict.reason}", markup=False)
