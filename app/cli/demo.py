"""`flywheel demo`: turn the wheel once, and show what came of it."""

import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from app import recipe as recipes
from app.cli import scores
from app.cli.output import AsJson, Assignments, notes, show, table
from app.display import Display
from cluster.storage import Home
from cluster.telemetry import quiet_imports

if TYPE_CHECKING:
    from app.pipelines.demo import Summary

EXAMPLES = "Examples: `flywheel demo` · `flywheel demo --keep` · `flywheel demo --set steps=20 --json`"
_RETRIEVAL = ("recall@1", "recall@10", "mrr", "ndcg@10")


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")] = "error-triage",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the application up until Ctrl-C.")] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Run every stage on real parts: models, data, train, evaluate, register, serve, index, search."""
    settings = recipes.load(recipe, assignments or ())
    home = Home.current()
    with quiet_imports(home):
        from app.pipelines import demo  # imports ray, torch, transformers and vllm

    def wait(summary: "Summary") -> None:
        show(_facts(summary), lambda console: _draw(console, summary, kept=keep), as_json=as_json)
        up = Text(f"\nThe application is up at {summary.url}.", "bold")
        notes.print(up.append(" Press Ctrl-C here to stop it.", "not bold"))
        try:
            signal.pause()
        except KeyboardInterrupt:
            notes.print("\nStopping …")

    with Display(notes, demo.STAGES) as display:
        summary = demo.run(settings, home, display, kept=wait if keep else None)
    if not keep:
        show(_facts(summary), lambda console: _draw(console, summary, kept=keep), as_json=as_json)


def _facts(summary: "Summary") -> dict[str, Any]:
    """The summary as plain values for `--json`."""
    version, move = summary.registration.version, summary.registration.move
    return {
        "seconds": round(summary.seconds, 1),
        "stages": summary.stages,
        "run": summary.result.run_id,
        "train": {
            "steps": summary.result.steps,
            "loss_first": summary.result.loss_first,
            "loss_last": summary.result.loss_last,
            "tokens_per_s": summary.result.tokens_per_s,
        },
        "evaluation": summary.report.model_dump(mode="json"),
        "version": version.id,
        "digest": version.digest,
        "alias": f"{move.name}@{move.alias}" if move else None,
        "reason": summary.registration.reason,
        "lineage": list(summary.lineage),
        "answers": [asdict(answer) | {"same": answer.same} for answer in summary.answers],
        "index": asdict(summary.indexed),
        "retrieval": summary.retrieval.model_dump(mode="json"),
        "url": summary.url,
        "dashboard": summary.dashboard_url,
    }


def _draw(console: Console, summary: "Summary", *, kept: bool) -> None:
    report, registration = summary.report, summary.registration
    console.print()
    console.print(table("Stages", ["stage", "seconds"], summary.stages.items()))
    scores.draw(console, report, f"Run {summary.result.run_id}")
    move = registration.move
    moved = f"{move.name}@{move.alias} → {registration.version.id}" if move else f"not moved: {registration.reason}"
    console.print(f"Alias: {moved}\n", markup=False)
    console.print(
        table(
            "The same questions to both, through the OpenAI client",
            ["question", "expected", "base", "adapter", "streamed the same"],
            [
                (
                    _short(ours.question),
                    ours.expected,
                    _short(base.answer),
                    _short(ours.answer),
                    "yes" if base.same and ours.same else "NO",
                )
                for base, ours in zip(summary.answers[::2], summary.answers[1::2], strict=True)
            ],
        )
    )
    retrieval = summary.retrieval
    console.print(
        table(
            f"{retrieval.n} held-out docstrings among {summary.indexed.documents} functions",
            ["metric", "value", "low", "high"],
            [(name, s.value, s.low, s.high) for name, s in retrieval.metrics.items() if name in _RETRIEVAL],
        )
    )
    console.print(Panel(Text("\n".join(summary.lineage)), title="Lineage", title_align="left", expand=False))
    console.print("Look around:")
    for command in (
        f"flywheel models show {registration.version.id}",
        f"flywheel models history {registration.version.name}",
        f"mlflow ui --backend-store-uri {summary.tracking_uri}",
        f"Ray dashboard: {summary.dashboard_url}" if kept else "flywheel demo --keep      # then, in another terminal:",
        f'flywheel chat {summary.adapter_name} "division by zero"',
        f'flywheel search {summary.indexed.collection} "read a file in chunks"',
    ):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
