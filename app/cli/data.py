"""`flywheel data`: make a data version, and look into one."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from actors.data.config import DataConfig
from app import recipe as recipes
from app.cli.output import AsJson, Assignments, notes, show, table
from app.display import Display
from cluster.config import Config, nearest, override, parse
from cluster.errors import ConfigError
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel data build python-errors` · `flywheel data show python-errors -n 3`"
cli = typer.Typer(help="Data versions: build one, show one.", no_args_is_help=True, epilog=EXAMPLES)


@cli.command(epilog="Examples: `flywheel data build tickets.jsonl` · `flywheel data build error-triage`")
def build(
    source: Annotated[str, typer.Argument(help="A mined dataset, a file or folder of yours, or a recipe.")],
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Read, validate, split and deduplicate a source into an immutable version."""
    config, name = _settings(source, assignments or [])
    from actors.data.build import build as make  # imports ray
    from app.pipelines.registry import writer
    from app.pipelines.stages import record_data

    home = Home.current()
    with Display(notes) as display, writer(home) as registry, display.stage("data"):
        version = make(name, config, home, display)
        record_data(registry, version)
    _show_version(version, home, as_json=as_json)


@cli.command(name="show", epilog="Example: `flywheel data show python-errors --split test -n 3`")
def show_version(
    reference: Annotated[str, typer.Argument(help="Name (newest version) or name@digest.")],
    split: Annotated[str, typer.Option(help="train or test")] = "train",
    number: Annotated[int, typer.Option("-n", min=0, help="Rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """What a version holds, where it came from, and its first rows."""
    from actors.data.examples import read
    from actors.data.version import load

    home = Home.current()
    version = load(home, reference)
    if split not in version.splits:
        raise ConfigError(f"{version.id} has no split {split!r}.", hint=f"It has: {', '.join(sorted(version.splits))}.")
    rows = read(version, split, home, limit=number) if version.stage == "examples" and number else []
    _show_version(version, home, as_json=as_json, rows=[asdict(row) for row in rows])


class _Settings(Config):
    """What can be set without a recipe; a class of its own, so that faults are named as they were written."""

    data: DataConfig


def _settings(source: str, assignments: list[str]) -> tuple[DataConfig, str]:
    """A recipe's data section if `source` is one, else the defaults for that source."""
    is_recipe = source.endswith((".yaml", ".yml")) or source in recipes.shipped()
    if is_recipe:
        config = recipes.load(source, assignments).data
        return config, config.train.source
    settings = override({"data": {"train": {"source": source}}}, assignments)
    for key in settings:
        if key in DataConfig.model_fields:
            raise ConfigError(f"--set {key}: unknown key.", hint=f"Write data.{key}.")
        if key != "data":
            known = [f"data.{field}" for field in DataConfig.model_fields]
            meant = nearest(f"data.{key}", known)
            raise ConfigError(
                f"--set {key}: unknown key; without a recipe there is only `data`.",
                hint=f"Did you mean {meant}?" if meant else f"Known: {', '.join(known)}.",
            )
    config = parse(_Settings, settings, source=f"What was set for {source}").data
    return config, config.train.source


def _show_version(version: Any, home: Home, *, as_json: bool, rows: list[dict[str, Any]] | None = None) -> None:
    quarantine = version.quarantine(home) if version.quarantined else None

    def render(console: Console) -> None:
        # A line of its own, never folded: it is there to be copied.
        console.print(Text(version.id), soft_wrap=True)
        splits = [(name, split.rows, split.groups) for name, split in version.splits.items()]
        console.print(table(f"{version.stage}, {version.shape}", ["split", "rows", "groups"], splits))
        if version.parent:
            console.print(Text(f"Made from {version.parent}."), soft_wrap=True)
        if version.dropped:
            console.print(table("Dropped", ["rule", "rows"], version.dropped.items()))
        if quarantine:
            console.print(table("Quarantined", ["reason", "rows"], version.quarantined.items()))
            console.print(Text(f"Each with its reason in {quarantine}"), soft_wrap=True)
        for warning in _warnings(version):
            console.print(Text(f"Warning: {warning}"), soft_wrap=True)
        for row in rows or []:
            console.print_json(data=row)

    facts = version.model_dump(mode="json")
    if quarantine:
        facts["quarantine"] = str(quarantine)
    show(facts | ({"examples": rows} if rows else {}), render, as_json=as_json)


def _warnings(version: Any) -> list[str]:
    empty = [name for name, split in version.splits.items() if not split.rows]
    found = [f"the {name} split is empty." for name in empty]
    if "test" in empty and (near := version.dropped.get("near-duplicate-of-train")):
        found[empty.index("test")] += (
            f" {near} rows left it as near duplicates of train rows: raise data.near_duplicate_similarity"
            f" (now {version.config.get('near_duplicate_similarity')}; 1 drops equal texts only)."
        )
    return found
