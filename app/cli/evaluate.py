"""`flywheel evaluate`: measure a registered version against base and champion, again."""

from typing import Annotated

import typer
from rich.console import Console

from app import recipe as recipes
from app.cli import scores
from app.cli.output import AsJson, Assignments, notes, show
from app.display import Display
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel evaluate error-triage` · `flywheel evaluate my.yaml --version tickets/2 --promote`"


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")],
    version: Annotated[
        str | None, typer.Option(help="name, name@alias or name/3; default: the newest of the recipe's name.")
    ] = None,
    promote: Annotated[bool, typer.Option(help="Move the recipe's alias to it if the gate is passed.")] = False,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Run the recipe's suite on held-out data with base, champion and version, and ask the gate."""
    settings = recipes.load(recipe, assignments or ())
    from app.pipelines import evaluate  # imports ray and vllm

    with Display(notes) as display:
        measured = evaluate.run(settings, Home.current(), display, reference=version, promote=promote)
    report = measured.report

    def render(console: Console) -> None:
        scores.draw(console, report, measured.version.id)
        if measured.move is not None:
            console.print(f"{measured.move.name}@{measured.move.alias} → {measured.version.id}")

    alias = f"{measured.move.name}@{measured.move.alias}" if measured.move else None
    facts = {"version": measured.version.id, "alias": alias, "evaluation": report.model_dump(mode="json")}
    show(facts, render, as_json=as_json)
