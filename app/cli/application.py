"""The table of verbs. Each verb's module owns its options and its picture; the work is in app.pipelines."""

import typer

from app.cli import (
    bench,
    chat,
    checkpoint,
    data,
    demo,
    doctor,
    evaluate,
    index,
    keys,
    models,
    plan,
    search,
    serve,
    signers,
    status,
    train,
)

cli = typer.Typer(
    name="flywheel",
    help="Turn data into served small language models and embedding models, on Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)

for verb in (doctor, demo, plan, train, evaluate, serve, index, search, chat, status):
    cli.command(name=verb.__name__.rpartition(".")[2], epilog=verb.EXAMPLES)(verb.run)
cli.add_typer(data.cli, name="data")
cli.add_typer(models.cli, name="models")
cli.add_typer(checkpoint.cli, name="checkpoint")
cli.add_typer(keys.cli, name="keys")
cli.add_typer(signers.cli, name="signers")
cli.add_typer(bench.cli, name="bench")
