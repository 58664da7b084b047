"""`flywheel bench …`: figures of this machine, side by side, as medians of several runs. A missed bar is said."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from app.cli.output import AsJson, console, notes, show, table
from app.display import Display
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from app.bench.report import Bar, Report
    from app.bench.serve import ServeReport, Size

EXAMPLES = "Example: `flywheel bench registry --json`"
cli = typer.Typer(help="Measure this machine against the bars.", no_args_is_help=True, epilog=EXAMPLES)


class Contest(StrEnum):
    """What `bench train` compares. (Typer knows no list of literals.)"""

    ENGINE = "engine"
    PATH = "path"


class Way(StrEnum):
    """Who computes in `bench three-ways`."""

    TORCH = "torch"
    COMPILE = "compile"
    JAX = "jax"


class Rival(StrEnum):
    """Whom `bench serve` compares Flywheel with."""

    VLLM = "vllm"
    RAY = "ray"
    HF = "hf"


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


@cli.command(epilog=EXAMPLES)
def train(
    base: Annotated[str, typer.Option(help="Model to train: a name in the catalog, a folder, or a hub id.")] = (
        "smollm2-135m-instruct"
    ),
    contest: Annotated[
        list[Contest] | None,
        typer.Option(help="Engine against TRL, or the path through Ray against a bare loop; default: both."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 4,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 512,
    example: Annotated[int, typer.Option(min=3, help="Tokens of a packed example, on average.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Steps of one turn.")] = 3,
    runs: Annotated[int, typer.Option(min=1, help="Turns of each competitor.")] = 5,
    as_json: AsJson = False,
) -> None:
    """LoRA fine-tuning: our engine beside TRL's trainer, and what Ray costs."""
    from app.bench.train import CONTESTS, Size, run  # imports transformers

    size = Size(batch=batch, length=length, example=example, steps=steps, runs=runs)
    with Display(notes) as display, display.stage("bench"):
        found = run(size, display, base=base, contests=tuple(map(str, contest or CONTESTS)))
    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def checkpoint(
    base: Annotated[Path | None, typer.Option(help="Folder of a model; default: SmolLM2-135M's shape.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="Workers; default: 1, and 2.")] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured alone, and behind a save.")] = 6,
    runs: Annotated[int, typer.Option(min=1, help="Rounds of all measurements.")] = 5,
    as_json: AsJson = False,
) -> None:
    """The stall of a checkpoint beside a plain copy and a synchronous save."""
    from app.bench.checkpoint import Size, run  # imports torch

    with Display(notes) as display, display.stage("bench"):
        found = run(Size(length, steps, runs), display, base=base, ranks=ranks or (1, 2))
    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def three_ways(
    way: Annotated[list[Way] | None, typer.Option(help="Who computes; default: all three.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of one turn.")] = 5,
    runs: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 5,
    as_json: AsJson = False,
) -> None:
    """One small decoder in PyTorch, torch.compile and JAX: speed, compile time, equal losses."""
    from app.bench.three_ways import WAYS, Size, run

    with Display(notes) as display, display.stage("bench"):
        found = run(Size(steps=steps, runs=runs), display, ways=tuple(map(str, way or WAYS)))
    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def recovery(
    runs: Annotated[int, typer.Option(min=1, help="How often each event happens.")] = 3,
    nodes: Annotated[bool, typer.Option(help="Also lose and add a node of a cluster of several.")] = True,
    as_json: AsJson = False,
) -> None:
    """How long a run stands still when a worker is killed, a node is lost, or one comes."""
    from app.bench.recovery import run

    with Display(notes) as display, display.stage("bench"):
        found = run(display, runs=runs, nodes=nodes)
    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def serve(
    base: Annotated[str, typer.Option(help="Model to serve: a name in the catalog, a folder, or a hub id.")] = (
        "smollm2-135m-instruct"
    ),
    streams: Annotated[str, typer.Option(help="How many streams at once, separated by commas.")] = "1,8,32",
    against: Annotated[
        list[Rival] | None,
        typer.Option(help="vLLM's own server, stock ray.serve.llm, a loop of Hugging Face's generate; default: all."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each competitor.")] = 3,
    short: Annotated[bool, typer.Option("--short", help="Few requests and short answers: whether it works.")] = False,
    prices: Annotated[
        Path | None, typer.Option(help="YAML file of what machines and APIs cost; default: examples.")
    ] = None,
    compare_settings: Annotated[
        bool, typer.Option("--compare-settings", help="Instead: the engine alone, one setting changed at a time.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Flywheel's gateway beside vLLM's server and Ray's: speed, waiting, CPU, and what a million tokens costs."""
    from dataclasses import replace

    from app.bench import prices as known
    from app.bench.serve import RIVALS, Size, run

    wanted = _numbers(streams)
    size = Size.short(wanted, rounds) if short else Size(wanted, rounds)
    if compare_settings:
        if against or prices:
            raise ConfigError("--compare-settings takes neither --against nor --prices: it knows no rivals.")
        # Its many variants have a third of the requests each.
        _compare_settings(size if short else replace(size, asks=2), base, as_json=as_json)
        return
    priced = known.read(prices)
    with Display(notes) as display, display.stage("bench"):
        found = run(size, display, base=base, against=tuple(map(str, against or RIVALS)), known=priced)
    _show(found, as_json=as_json)
    if not as_json:
        _show_costs(found)


@cli.command(epilog=EXAMPLES)
def routing(
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the fleet.")] = 64,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters that are asked for.")] = 1000,
    slots: Annotated[int, typer.Option(min=1, help="Adapters that each replica holds.")] = 1000,
    requests: Annotated[int, typer.Option(min=100, help="Requests of one run.")] = 20_000,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions of the measurement.")] = 5,
    as_json: AsJson = False,
) -> None:
    """What choosing a replica costs a gateway, for a large fleet."""
    from app.bench.routing import Size, run

    size = Size(replicas=replicas, adapters=adapters, slots=slots, requests=requests, runs=runs)
    with Display(notes) as display, display.stage("bench"):
        found = run(size, display)
    _show(found, as_json=as_json)


def _compare_settings(size: "Size", base: str, *, as_json: bool) -> None:
    from app.bench import settings

    with Display(notes) as display, display.stage("bench"):
        found = settings.run(size, display, base=base)
    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def adapters(
    base: Annotated[str, typer.Option(help="Model to serve: a name in the catalog, a folder, or a hub id.")] = (
        "smollm2-135m-instruct"
    ),
    number: Annotated[int, typer.Option("--adapters", min=2, help="How many adapters.")] = 64,
    resident: Annotated[int, typer.Option(min=1, help="How many of them a replica holds.")] = 8,
    merged: Annotated[int, typer.Option(min=0, help="Merged models that are loaded one after another.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 3,
    short: Annotated[bool, typer.Option("--short", help="Few adapters, short answers: whether it works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Many adapters on one base, beside one adapter, and beside a merged model for each."""
    from app.bench.adapters import Size, run

    if resident >= number and not short:
        raise ConfigError(f"--resident {resident} holds all of --adapters {number}.", hint="Name more adapters.")
    size = Size.short(rounds) if short else Size(adapters=number, resident=resident, merged=merged, rounds=rounds)
    with Display(notes) as display, display.stage("bench"):
        found = run(size, display, base=base)
    _show(found, as_json=as_json)


@cli.command(epilog=EXAMPLES)
def overload(
    base: Annotated[str, typer.Option(help="Model to serve: a name in the catalog, a folder, or a hub id.")] = (
        "smollm2-135m-instruct"
    ),
    factor: Annotated[float, typer.Option(min=1.5, help="How many times its capacity is asked for.")] = 3.0,
    short: Annotated[bool, typer.Option("--short", help="Half a minute a phase: whether it holds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Goodput when three times as much is asked for as the engine can do: answers in time, refusals, waiting."""
    from dataclasses import replace

    from app.bench.overload import Size, run

    size = replace(Size.short() if short else Size(), factor=factor)
    with Display(notes) as display, display.stage("bench"):
        found = run(size, display, base=base)
    _show(found, as_json=as_json)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        numbers = (0,)
    if numbers[0] < 1:
        raise ConfigError(f"--streams {text} is not a list of numbers.", hint="For example: --streams 1,8,32")
    return numbers


def _show_costs(found: "ServeReport") -> None:
    """Build or buy."""
    rows = [
        (each.what, each.streams, each.usd_per_million_output_tokens, each.p99_between_tokens_ms, f"{each.as_of}")
        for each in found.costs
    ]
    columns = [
        "prompts included, busy all hour",
        "streams",
        "$ for 1M output tokens",
        "ms between tokens, p99",
        "price of",
    ]
    console.print(table("Build or buy", columns, rows))


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
