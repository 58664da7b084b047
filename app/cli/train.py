"""`flywheel train`: execute a recipe up to its registered version."""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from app import recipe as recipes
from app.cli import scores
from app.cli.output import AsJson, Assignments, notes, show, table
from app.display import Display
from cluster.errors import ConfigError
from cluster.storage import Home

if TYPE_CHECKING:
    from actors.training.ledger import Audit
    from app.pipelines.train import Turn

EXAMPLES = (
    "Examples: `flywheel train error-triage` · `flywheel train my.yaml --set steps=20 --no-evaluate` · "
    "`flywheel train my.yaml --resume RUN` · "
    "`flywheel train --audit RUN`"
)


def run(
    recipe: Annotated[str | None, typer.Argument(help="Recipe: a path or a shipped name.")] = None,
    evaluate: Annotated[bool, typer.Option(help="Evaluate, register and promote as the recipe says.")] = True,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with this run from its last checkpoint.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Begin a new run, though an earlier one is unfinished.")] = False,
    audit: Annotated[
        str | None, typer.Option(metavar="RUN", help="Train nothing; prove which rows a run was trained on.")
    ] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Data, training, evaluation, registration: what the recipe says, on Ray."""
    if audit is not None:
        if recipe is not None or resume is not None or new or assignments or not evaluate:
            raise ConfigError("--audit takes a run and nothing else; it trains nothing.", hint="Leave the rest out.")
        _audit(audit, as_json=as_json)
        return
    if recipe is None:
        raise ConfigError("There is no recipe to train.", hint="`flywheel train --help` shows how it is called.")
    if resume is not None and new:
        raise ConfigError("--resume and --new exclude each other.", hint="Give one of the two.")
    settings = recipes.load(recipe, assignments or ())
    from app.pipelines import train  # imports ray, torch and transformers

    with Display(notes) as display:
        turn = train.run(settings, Home.current(), display, evaluate=evaluate, resume=resume, new=new)
    show(facts(turn), lambda console: draw(console, turn), as_json=as_json)


def _audit(run_id: str, *, as_json: bool) -> None:
    """Exit code 1 if the run lost or repeated a row, or if nothing proves that it did not."""
    from app.pipelines.audit import audit

    found = audit(run_id, Home.current())
    show({"run": run_id, **asdict(found), "exact": found.exact}, partial(_draw_audit, run_id, found), as_json=as_json)
    if not found.exact:
        raise typer.Exit(1)


def _draw_audit(run_id: str, found: "Audit", console: Console) -> None:
    columns = ["epoch", "rows seen", "lost", "repeated", "samples", "left out"]
    rows = [(e.epoch + 1, e.seen, e.lost, e.repeated, e.samples, e.unused) for e in found.epochs]
    total = ("all", found.seen, found.lost, found.repeated, found.samples, "")
    console.print(table(f"Rows of run {run_id} up to step {found.step}", columns, [*rows, total]))
    for doubt in found.doubts:
        console.print(f"Not proven: {doubt}.")
    if found.proven:
        console.print("Proven: seed and data version give the same digests of rows and samples.")


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
