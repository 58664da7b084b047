"""`flywheel bench …`: figures of this machine, side by side, as medians of several runs. A missed bar is said."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from app.cli.output import AsJson, notes, show, table
from app.display import Display

if TYPE_CHECKING:
    from app.bench.report import Bar, Report

EXAMPLES = "Example: `flywheel bench registry --json`"
cli = typer.Typer(help="Measure this machine against the bars.", no_args_is_help=True, epilog=EXAMPLES)


@cli.callback()
def bench() -> None:
    """Measure this machine against the bars."""


@cli.command(epilog=EXAMPLES)
def registry(
    versions: Annotated[int, typer.Option(min=10, help="Versions in the registry.")] = 10_000,
    names: Annotated[int, typer.Option(min=2, help="Names that they belong to.")] = 500,
    artifact_mb: Annotated[int, typer.Option(min=1, help="Size of the artifact that is registered, in MB.")] = 1024,
    subscribers: Annotated[int, typer.Option(min=4, help="Long polls that wait for a move.")] = 20,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 3,
    as_json: AsJson = False,
) -> None:
    """The registry, large: artifacts, resolving, registering, pushing, recovery."""
    from app.bench.registry import Size, run  # imports ray

    size = Size(versions, names, artifact_mb, subscribers, runs)
    with Display(notes) as display, display.stage("bench"):
        found = run(size, display)

    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def memory(
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 512,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Peak memory of a rank by strategy, beside the plan's formula."""
    from app.bench.memory import run  # imports torch

    with Display(notes) as display, display.stage("bench"):
        found = run(display, length=length, runs=runs)
    _show(found, as_json=as_json)


def _show(found: "Report", *, as_json: bool) -> None:
    """The report, for a person with its bars beside the figures."""

    def render(console: Console) -> None:
        bars = {bar.name: bar for bar in found.bars}
        rows = [
            (
                each.name,
                each.unit,
                each.median,
                f"{each.low:.4g} to {each.high:.4g}",
                _bar(bars[each.name]) if each.name in bars else None,
                _verdict(bars[each.name].met) if each.name in bars else None,
            )
            for each in found.results
        ]
        console.print(table(found.bench.capitalize(), ["figure", "unit", "median", "seen", "bar", ""], rows))

    show(found.model_dump(mode="json"), render, as_json=as_json)


def _bar(bar: "Bar") -> str:
    return f"at {'most' if bar.direction == 'max' else 'least'} {bar.bar:g}"


def _verdict(met: bool) -> Text:
    return Text("met", style="green") if met else Text("missed", style="bold red")
