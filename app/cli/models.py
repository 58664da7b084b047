"""`flywheel models`, as far as it looks: what is registered, how it came to be, what was live when and why.

Reading goes straight to the registry's log, with or without Ray. What changes something is in `models_change`.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from actors.registry import lineage, views
from actors.registry.reader import read_reports, read_state
from actors.registry.rules import shown
from actors.registry.snapshot import Split
from app.cli import models_change
from app.cli.output import AsJson, show, table
from cluster.errors import ConfigError
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel models list` · `flywheel models show error-triage@champion --lineage`"
cli = typer.Typer(help="Registered versions, their aliases and their history.", no_args_is_help=True, epilog=EXAMPLES)

Reference = Annotated[str, typer.Argument(help="name, name@alias or name/3.")]


@cli.command(name="list", epilog="Example: `flywheel models list --json`")
def list_models(as_json: AsJson = False) -> None:
    """Every registered name with its versions and aliases."""
    found = views.models(read_state(Home.current()))

    def render(console: Console) -> None:
        if not found:
            console.print("Nothing is registered yet. `flywheel train error-triage` makes a first version.")
            return
        rows = [
            (model.name, model.kind, model.base, len(model.versions), _stages(model.stages), _aliases(model.splits))
            for model in found
        ]
        columns = ["name", "kind", "base", "versions", "stages", "aliases"]
        console.print(table("Registered models", columns, rows))

    show({"models": [model.model_dump(mode="json") for model in found]}, render, as_json=as_json)


@cli.command(name="show", epilog="Example: `flywheel models show error-triage@champion --lineage`")
def show_version(
    reference: Annotated[str, typer.Argument(help="name, name@alias, name/3; with --lineage any id.")],
    with_lineage: Annotated[
        bool, typer.Option("--lineage", help="From data to traffic: what it was made from and what came of it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """One version: where it came from, how it did, which aliases name it. With --lineage: the whole chain."""
    home = Home.current()
    state = read_state(home)
    holdings, traffic = read_reports(home)
    if with_lineage:
        links = lineage.chain(state, reference, holdings=holdings, traffic=traffic)
        branches = lineage.tree(links)
        show(
            {"start": reference, **lineage.graph(links)},
            lambda to: _print_trees(to, f"Lineage of {reference}", branches),
            as_json=as_json,
        )
        return
    view = views.version(state, reference, holdings=holdings, traffic=traffic)
    show(view.model_dump(mode="json"), lambda to: to.print(_facts(view)), as_json=as_json)


@cli.command(epilog="Example: `flywheel models diff error-triage/1 error-triage/2`")
def diff(first: Reference, second: Reference, as_json: AsJson = False) -> None:
    """The facts in which two versions differ: base, data, recipe, metrics, code, …"""
    state = read_state(Home.current())
    one, other = views.find(state, first), views.find(state, second)
    found = views.differences(one, other)

    def render(console: Console) -> None:
        if not found:
            console.print(f"{one.id} and {other.id} do not differ.")
            return
        rows = [(each.fact, each.first, each.second) for each in found]
        console.print(table(f"{one.id} → {other.id}", ["fact", one.id, other.id], rows))

    differences = [each.model_dump(mode="json") for each in found]
    show({"first": one.id, "second": other.id, "differences": differences}, render, as_json=as_json)


@cli.command(epilog="Example: `flywheel models history error-triage --at 2026-11-30T12:00Z`")
def history(
    name: Annotated[str, typer.Argument(help="Registered name.")],
    at: Annotated[str | None, typer.Option(help="What was live at that time, and why (ISO 8601 with zone).")] = None,
    as_json: AsJson = False,
) -> None:
    """Everything that happened to a name: who, when, why, from where to where."""
    state = read_state(Home.current())
    if at is not None:
        then = views.live_at(state, name, _moment(at))
        live = [each.model_dump(mode="json") for each in then]
        show({"name": name, "at": at, "live": live}, lambda to: _print_live(to, name, at, then), as_json=as_json)
        return
    entries = views.history(state, name)

    def render(console: Console) -> None:
        rows = [
            (
                f"{e.at:%Y-%m-%d %H:%M:%S}",
                e.by,
                f"{e.what}{' by force' if e.forced else ''}",
                e.alias,
                e.previous,
                shown(e.split) if e.split and len(e.split) > 1 else e.version,
                e.why,
            )
            for e in entries
        ]
        console.print(table(f"History of {name}", ["when (UTC)", "who", "what", "alias", "from", "to", "why"], rows))

    show({"name": name, "history": [e.model_dump(mode="json") for e in entries]}, render, as_json=as_json)


models_change.add_to(cli)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--at {text!r} is no time.", hint="Write 2026-11-30T12:00Z.") from None


def _facts(view: views.VersionView) -> Any:
    version = view.version
    facts = {
        "stage": view.stage,
        "gate": f"{view.gate.outcome}: {view.gate.reason}" if view.gate else None,
        "kind": version.kind,
        "base": f"{version.base} ({version.base_digest[:12]})",
        "digest": version.digest[:12],
        "signed by": version.signed_by or None,
        "files": f"{version.path}{' (freed)' if view.collected else ''}",
        "size": f"{version.size_bytes / 1e6:.1f} MB" if version.size_bytes else None,
        "dtype": version.dtype,
        "LoRA rank": version.adapter.rank if version.adapter else None,
        "licence": version.licence,
        "run": f"{view.run.run.id} ({view.run.status})" if view.run else None,
        "checkpoint": version.checkpoint_id,
        "data": version.data_version,
        "recipe": version.recipe_digest[:12] or None,
        "lock": version.lock_digest[:12] or None,
        "code": version.code_commit or None,
        "imported": f"{version.origin.version_id} of {version.origin.exported_by}" if version.origin else None,
        "aliases": ", ".join(view.aliases) or None,
        "pinned": f"{view.pinned.why} ({view.pinned.by})" if view.pinned else None,
        "registered": f"{version.created_at:%Y-%m-%d %H:%M:%S} UTC",
        **version.metrics,
    }
    return table(version.id, ["fact", "value"], [(name, value) for name, value in facts.items() if value is not None])


def _print_trees(console: Console, title: str, branches: Iterable[lineage.Branch]) -> None:
    def grow(tree: Tree, branch: lineage.Branch) -> None:
        link = branch.link
        label = Text.assemble((link.kind, "bold"), f" {link.id}", (f"  {link.note}", "dim") if link.note else "")
        twig = tree.add(label)
        for each in branch.branches:
            grow(twig, each)

    trunk = Tree(title)
    for branch in branches:
        grow(trunk, branch)
    console.print(trunk)


def _print_live(console: Console, name: str, at: str, live: Iterable[views.LiveView]) -> None:
    rows = [
        (
            each.alias,
            shown(each.split),
            f"{each.move.at:%Y-%m-%d %H:%M:%S}",
            each.move.by,
            f"{each.move.action}{' by force' if each.move.forced else ''}: {each.move.why}",
            "; ".join(f"{gate.outcome}: {gate.reason}" for gate in each.gates) or None,
        )
        for each in live
    ]
    if rows:
        console.print(table(f"{name} at {at}", ["alias", "stood at", "since (UTC)", "who", "why", "gate"], rows))
    else:
        console.print(f"No alias of {name} stood anywhere at {at}.")


def _stages(stages: Iterable[str]) -> str:
    listed = list(stages)
    return ", ".join(f"{listed.count(stage)} {stage}" for stage in dict.fromkeys(listed))


def _aliases(splits: dict[str, Split]) -> str:
    return ", ".join(f"{alias} → {shown(split).partition(' ')[2]}" for alias, split in sorted(splits.items()))
