"""`flywheel models`: what is registered, how it came to be, and which version an alias names.

Reading goes straight to the registry's log, with or without Ray. Moving an alias goes through the registry actor,
the only writer; if no cluster runs, one is started for the moment that takes.
"""

from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from actors.registry import views
from actors.registry.reader import read_state
from app.cli.output import AsJson, show, table
from cluster.errors import ConfigError
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel models list` · `flywheel models show error-triage@champion`"
cli = typer.Typer(help="Registered versions, their aliases and their history.", no_args_is_help=True, epilog=EXAMPLES)

Reference = Annotated[str, typer.Argument(help="name, name@alias or name/3.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it is kept for ever.")]


@cli.command(name="list", epilog="Example: `flywheel models list --json`")
def list_models(as_json: AsJson = False) -> None:
    """Every registered name with its versions and aliases."""
    found = views.models(read_state(Home.current()))

    def render(console: Console) -> None:
        if not found:
            console.print("Nothing is registered yet. `flywheel train error-triage` makes a first version.")
            return
        rows = [(model.name, model.kind, model.base, len(model.versions), _aliases(model.aliases)) for model in found]
        console.print(table("Registered models", ["name", "kind", "base", "versions", "aliases"], rows))

    show({"models": [model.model_dump(mode="json") for model in found]}, render, as_json=as_json)


@cli.command(name="show", epilog="Example: `flywheel models show error-triage/1`")
def show_version(reference: Reference, as_json: AsJson = False) -> None:
    """One version: where it came from, how it did, which aliases name it, and its lineage."""
    view = views.version(read_state(Home.current()), reference)
    version = view.version

    def render(console: Console) -> None:
        facts = {
            "kind": version.kind,
            "base": f"{version.base} ({version.base_digest[:12]})",
            "digest": version.digest[:12],
            "files": version.path,
            "run": f"{view.run.run.id} ({view.run.status})" if view.run else None,
            "checkpoint": version.checkpoint_id,
            "data": version.data_version,
            "code": version.code_commit,
            "aliases": ", ".join(view.aliases) or None,
            "registered": f"{version.created_at:%Y-%m-%d %H:%M:%S} UTC",
            **version.metrics,
        }
        console.print(table(version.id, ["fact", "value"], facts.items()))
        tree = Tree("Lineage")
        for link in view.lineage:
            tree.add(Text(f"{link.kind}: {link.id}"))
        console.print(tree)

    show(view.model_dump(mode="json"), render, as_json=as_json)


@cli.command(epilog="Example: `flywheel models history error-triage --at 2026-11-30T12:00+00:00`")
def history(
    name: Annotated[str, typer.Argument(help="Registered name.")],
    at: Annotated[str | None, typer.Option(help="What the aliases named at that time (ISO 8601 with zone).")] = None,
    as_json: AsJson = False,
) -> None:
    """Everything that happened to a name: who, when, why, from where to where."""
    state = read_state(Home.current())
    if at is not None:
        try:
            moment = datetime.fromisoformat(at)
        except ValueError:
            raise ConfigError(f"--at {at!r} is no time.", hint="Write 2026-11-30T12:00+00:00.") from None
        then = views.aliases_at(state, name, moment)
        show({"name": name, "at": at, "aliases": then}, lambda to: to.print(_aliases(then) or "none"), as_json=as_json)
        return
    entries = views.history(state, name)

    def render(console: Console) -> None:
        rows = [(f"{e.at:%Y-%m-%d %H:%M:%S}", e.by, e.what, e.alias, e.previous, e.version, e.why) for e in entries]
        console.print(table(f"History of {name}", ["when (UTC)", "who", "what", "alias", "from", "to", "why"], rows))

    show({"name": name, "history": [e.model_dump(mode="json") for e in entries]}, render, as_json=as_json)


@cli.command(epilog="Example: `flywheel models promote error-triage 2 --reason 'passed the gate'`")
def promote(
    name: Annotated[str, typer.Argument(help="Registered name.")],
    version: Annotated[int, typer.Argument(min=1, help="Number of the version.")],
    reason: Reason,
    alias: Annotated[str, typer.Option(help="Alias to move.")] = "champion",
    expected: Annotated[
        int | None, typer.Option(min=0, help="Move only if it stands there now; 0: only if it is new.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let an alias name a version."""
    from app.pipelines.registry import writer  # imports ray

    with writer(Home.current()) as registry:
        move = registry.promote(name, alias, version, why=reason, expected=expected)
    show(move.model_dump(mode="json"), lambda to: to.print(f"{name}@{alias} → {name}/{move.version}"), as_json=as_json)


@cli.command(epilog="Example: `flywheel models rollback error-triage --reason 'answers got worse'`")
def rollback(
    name: Annotated[str, typer.Argument(help="Registered name.")],
    reason: Reason,
    alias: Annotated[str, typer.Option(help="Alias to move back.")] = "champion",
    as_json: AsJson = False,
) -> None:
    """Let an alias name the version that it named before."""
    from app.pipelines.registry import writer  # imports ray

    with writer(Home.current()) as registry:
        move = registry.rollback(name, alias, why=reason)
    show(move.model_dump(mode="json"), lambda to: to.print(f"{name}@{alias} → {name}/{move.version}"), as_json=as_json)


def _aliases(aliases: dict[str, int]) -> str:
    return ", ".join(f"{alias} → {number}" for alias, number in sorted(aliases.items()))
