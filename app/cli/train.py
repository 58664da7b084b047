"""`flywheel train`: execute a recipe up to its registered version."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from app import recipe as recipes
from app.cli import scores
from app.cli.output import AsJson, Assignments, notes, show, table
from app.display import Display
from cluster.storage import Home

if TYPE_CHECKING:
    from app.pipelines.train import Turn

EXAMPLES = "Examples: `flywheel train error-triage` · `flywheel train my.yaml --set steps=20 --no-evaluate`"


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe: a path or a shipped name.")],
    evaluate: Annotated[bool, typer.Option(help="Evaluate, register and promote as the recipe says.")] = True,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Data, training, evaluation, registration: what the recipe says, on Ray."""
    settings = recipes.load(recipe, assignments or ())
    from app.pipelines import train  # imports ray, torch and transformers

    with Display(notes) as display:
        turn = train.run(settings, Home.current(), display, evaluate=evaluate)
    show(facts(turn), lambda console: draw(console, turn), as_json=as_json)


def facts(turn: "Turn") -> dict[str, Any]:
    """The turn as plain values for `--json`."""
    registration = turn.registration
    return {
        "run": turn.result.run_id,
        "steps": turn.result.steps,
        "loss_first": turn.result.loss_first,
        "loss_last": turn.result.loss_last,
        "tokens_per_s": turn.result.tokens_per_s,
        "checkpoint": turn.result.checkpoint_id,
        "data": turn.data.tokens.id,
        "evaluation": turn.report.model_dump(mode="json") if turn.report else None,
        "version": registration.version.id if registration else None,
        "alias": f"{registration.move.name}@{registration.move.alias}" if registration and registration.move else None,
    }


def draw(console: Console, turn: "Turn") -> None:
    """The turn for a person."""
    result = turn.result
    console.print(
        table(
            f"Run {result.run_id}",
            ["steps", "loss at first", "loss at last", "tokens/s", "checkpoint"],
            [(result.steps, result.loss_first, result.loss_last, result.tokens_per_s, result.checkpoint_id)],
        )
    )
    if turn.report is not None:
        scores.draw(console, turn.report, f"Run {result.run_id}")
    if turn.registration is not None:
        move = turn.registration.move
        where = f"{move.name}@{move.alias} → {turn.registration.version.id}" if move else "no alias moved"
        console.print(f"Registered {turn.registration.version.id}; {where}.")
