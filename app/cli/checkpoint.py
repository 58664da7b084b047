"""`flywheel checkpoint`: what a run has saved, whether it is whole, and models made of it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.cli.output import AsJson, notes, show, table
from app.display import Display
from app.pipelines import checkpoint as pipeline
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel checkpoint list my-run` · `flywheel checkpoint export my-run ./adapter`"
cli = typer.Typer(help="Checkpoints of runs: list, verify, export.", no_args_is_help=True, epilog=EXAMPLES)

Reference = Annotated[str, typer.Argument(help="RUN, or RUN/step-40.")]


@cli.command(name="list", epilog="Example: `flywheel checkpoint list error-triage-1a2b3c4d --json`")
def list_checkpoints(
    run: Annotated[str, typer.Argument(help="Id of a run, as `flywheel status` shows it.")], as_json: AsJson = False
) -> None:
    """Every checkpoint of a run: committed, half-written or damaged, and what keeps it."""
    found = pipeline.listing(Home.current(), run)

    def render(console: Console) -> None:
        rows = [
            (
                each.name,
                f"{each.saved_at:%Y-%m-%d %H:%M:%S}" if each.saved_at else None,
                _size(each.size_bytes),
                each.condition if not each.why else f"{each.condition}: {each.why}",
                each.metrics.get("loss"),
                each.kept,
            )
            for each in found.checkpoints
        ]
        console.print(table(f"{run} in {found.uri}", ["checkpoint", "when (UTC)", "size", "is", "loss", "kept"], rows))

    show(found.model_dump(mode="json"), render, as_json=as_json)


@cli.command(epilog="Example: `flywheel checkpoint verify error-triage-1a2b3c4d/step-40`")
def verify(reference: Reference, as_json: AsJson = False) -> None:
    """Read every file and compare it with the digest it was saved with; exit 1 if one is not as it was."""
    with Display(notes) as display, display.stage("verify"):
        verdicts = pipeline.verify(Home.current(), reference, display)

    def render(console: Console) -> None:
        rows = [
            (each.name, _size(each.size_bytes), each.condition, each.why or "every file is as it was")
            for each in verdicts
        ]
        console.print(table(f"Verified {reference}", ["checkpoint", "size", "is", "why"], rows))

    show(
        {"reference": reference, "verified": [each.model_dump(mode="json") for each in verdicts]},
        render,
        as_json=as_json,
    )
    if any(each.condition != "committed" for each in verdicts):
        raise typer.Exit(1)


@cli.command(epilog="Example: `flywheel checkpoint export error-triage-1a2b3c4d ./merged --merged`")
def export(
    reference: Reference,
    target: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    merged: Annotated[bool, typer.Option("--merged", help="The base with the adapter added to its weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model as safetensors that Hugging Face, PEFT and vLLM load."""
    made = pipeline.export(Home.current(), reference, target, merged=merged)
    show(
        made.model_dump(mode="json"),
        lambda console: console.print(f"{made.checkpoint}: {made.what} in {made.target} ({_size(made.size_bytes)})"),
        as_json=as_json,
    )


def _size(count: int) -> str:
    return f"{count / 2**10:.1f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"
