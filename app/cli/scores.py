"""The picture of an evaluation, which three verbs show."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from app.cli.output import table

if TYPE_CHECKING:
    from actors.evaluation.report import EvaluationReport


def draw(console: Console, report: "EvaluationReport", title: str) -> None:
    """Scores with their intervals, what guessing would give, what answering took, and the gate check by check."""
    names = {"champion": f"champion ({report.champion})"}
    rows = {
        **{names.get(name, name): score for name, score in report.scores.items()},
        "always the most frequent answer": report.most_frequent,
    }
    console.print(
        table(
            f"{title}: exact match on {report.n} held-out cases of {report.groups} groups",
            ["candidate", "exact match", "low", "high"],
            [(name, score.value, score.low, score.high) for name, score in rows.items()],
        )
    )
    serving = report.serving
    price = serving.usd_per_million_tokens
    console.print(
        f"One answer takes {serving.p50_s:.3g} s at the median, {serving.p99_s:.3g} s at p99 "
        f"({serving.requests} requests, one at a time); {serving.tokens_per_s:,.0f} tokens/s in batches"
        + (f", ${price:.3g} per million tokens" if price is not None else ""),
        markup=False,
    )
    verdict = report.verdict
    console.print(
        table(
            f"Gate: {'passed' if verdict.passed else 'not passed'}",
            ["check", "", "why"],
            [
                (check.name, Text("passed", "green") if check.passed else Text("blocks", "bold red"), check.reason)
                for check in verdict.checks
            ],
        )
    )
    console.print(f"The candidate was compared with {report.against}.", markup=False)
