"""`flywheel data`: make a data version, and look into one."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from actors.data.config import DataConfig
from app import recipe as recipes
from app.cli.output import AsJson, Assignments, notes, show, table
from app.display import Display
from cluster.config import override, parse
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
    _show_version(version, as_json=as_json)


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
    _show_version(version, as_json=as_json, rows=[asdict(row) for row in rows])


def _settings(source: str, assignments: list[str]) -> tuple[DataConfig, str]:
    """A recipe's data section if `source` is one, else the defaults for that source."""
    is_recipe = source.endswith((".yaml", ".yml")) or source in recipes.shipped()
    if is_recipe:
        config = recipes.load(source, assignments).data
        return config, config.train.source
    settings = override({"data": {"train": {"source": source}}}, assignments)
    return parse(DataConfig, settings["data"], source=f"The data settings of {source}"), source


def _show_version(version: Any, *, as_json: bool, rows: list[dict[str, Any]] | None = None) -> None:
    def render(console: Console) -> None:
        console.print(
            table(
                f"{version.id} ({version.stage}, {version.shape})",
                ["split", "rows", "groups"],
                [(name, split.rows, split.groups) for name, split in version.splits.items()],
            )
        )
        if version.parent:
            console.print(f"Made from {version.parent}.")
        if version.quarantined:
            console.print(table("Quarantined", ["reason", "rows"], version.quarantined.items()))
        for row in rows or []:
            console.print_json(data=row)

    show(version.model_dump(mode="json") | ({"examples": rows} if rows else {}), render, as_json=as_json)
