"""The picture of an evaluation, which three verbs show."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from actors.evaluation.report import EvaluationReport, GateVerdict
from app.cli.output import table

if TYPE_CHECKING:
    from actors.evaluation.retrieval import RetrievalReport  # imports ray

_SHOWN = ("recall@1", "recall@10", "mrr@100", "ndcg@10")


def draw(console: Console, report: "EvaluationReport | RetrievalReport", title: str) -> None:
    """What was measured of base, candidate and champion, and the gate check by check."""
    if isinstance(report, EvaluationReport):
        _answers(console, report, title)
    else:
        _searches(console, report, title)
    _gate(console, report.verdict)
    console.print(f"The candidate was compared with {report.against}.", markup=False)


def _answers(console: Console, report: EvaluationReport, title: str) -> None:
    """Scores with their intervals, what guessing would give, and what answering took."""
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


def _searches(console: Console, report: "RetrievalReport", title: str) -> None:
    """What the candidate finds and what each of the others does, at each length of a vector."""
    names = {"champion": f"champion ({report.champion})"}
    rows = [
        (
            one.dimension,
            metric,
            names.get(rival, rival),
            one.scores[rival].metrics[metric].value,
            one.scores["candidate"].metrics[metric].value,
            lifts[metric].low,
            lifts[metric].high,
        )
        for one in report.lengths
        for rival, lifts in one.lifts.items()
        for metric in _SHOWN
    ]
    console.print(
        table(
            f"{title}: {report.n} held-out queries of {report.groups} groups, among {report.pool} documents",
            ["dims", "metric", "against", "it finds", "candidate finds", "lift at least", "lift at most"],
            rows,
        )
    )
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report.seconds.items())
    console.print(f"Embedding took: {took}.", markup=False)


def _gate(console: Console, verdict: GateVerdict) -> None:
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
