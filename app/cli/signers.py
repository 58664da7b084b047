"""`flywheel signers`: the key that this installation signs models with, and the keys whose signatures it believes.

Signing and verifying happen by themselves (`cluster.signing`); this is for telling installations about each other.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.cli.output import AsJson, show, table
from cluster.errors import ConfigError
from cluster.signing import Keyring
from cluster.storage import Home, write_atomically

EXAMPLES = "Examples: `flywheel signers list` · `flywheel signers export --out ours.pem`"
cli = typer.Typer(help="Signers: who may vouch for a model here.", no_args_is_help=True, epilog=EXAMPLES)


@cli.command(epilog="Example: `flywheel signers init`")
def init(as_json: AsJson = False) -> None:
    """Make the key pair that models are signed with. The first signature would, too; one that exists is kept."""
    keyring = Keyring(Home.current())
    before = keyring.signing_id()
    key_id = keyring.ensure()
    made = before is None
    show(
        {"id": key_id, "made": made, "private_path": str(keyring.private_path)},
        lambda to: to.print(f"{'Made' if made else 'There is'} signing key {key_id}: {keyring.private_path}"),
        as_json=as_json,
    )


@cli.command(name="list", epilog="Example: `flywheel signers list --json`")
def list_keys(as_json: AsJson = False) -> None:
    """Every trusted key, and which of them is ours."""
    keyring = Keyring(Home.current())
    ours, trusted = keyring.signing_id(), keyring.trusted()

    def render(console: Console) -> None:
        if not trusted:
            console.print("No key is trusted yet. `flywheel signers init` makes one; so does the first model.")
            return
        rows = [(key.id, key.curve, "signs here" if key.id == ours else "trusted", key.path) for key in trusted]
        console.print(table("Keys", ["key", "curve", "what for", "file"], rows))

    keys = [{"id": key.id, "curve": key.curve, "signs": key.id == ours, "path": str(key.path)} for key in trusted]
    show({"signing": ours, "keys": keys}, render, as_json=as_json)


@cli.command(epilog="Example: `flywheel signers trust theirs.pem`")
def trust(
    file: Annotated[Path, typer.Argument(help="Public key (PEM) as `flywheel signers export` writes it.")],
    as_json: AsJson = False,
) -> None:
    """Believe the signatures of another installation's key from now on."""
    keyring = Keyring(Home.current())
    before = keyring.ids()
    key_id = keyring.trust(file)
    known = key_id in before
    show(
        {"id": key_id, "new": not known},
        lambda to: to.print(f"Key {key_id} {'was trusted already' if known else 'is trusted from now on'}."),
        as_json=as_json,
    )


@cli.command(epilog="Example: `flywheel signers distrust 3f0c9a6d21b84e57`")
def distrust(
    key: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `flywheel signers list` shows it.")],
    force: Annotated[bool, typer.Option("--force", help="Also the key that this installation signs with.")] = False,
    as_json: AsJson = False,
) -> None:
    """Believe a key no longer: what it has signed is not loaded any more, by processes that start from now on."""
    broken = Keyring(Home.current()).distrust(key, force=force)

    def render(console: Console) -> None:
        console.print(f"Key {key} is no longer trusted.")
        if broken:
            console.print(table("Not loaded any more", ["signature"], [[path] for path in broken]))

    show({"id": key, "refused": [str(path) for path in broken]}, render, as_json=as_json)


@cli.command(epilog="Example: `flywheel signers export --out ours.pem`")
def export(
    out: Annotated[Path | None, typer.Option(help="File to write; unset: print it.")] = None,
    as_json: AsJson = False,
) -> None:
    """The public half of the key that we sign with, for others to trust."""
    keyring = Keyring(Home.current())
    pem = keyring.public_pem()
    key_id = keyring.signing_id()
    if out is not None:
        if out.exists():
            raise ConfigError(f"{out} exists.", hint="Give the name of a new file.")
        write_atomically(out, pem)

    def render(console: Console) -> None:
        console.print(pem.rstrip() if out is None else f"Public key {key_id}: {out}", soft_wrap=True)

    show({"id": key_id, "pem": pem, "path": str(out) if out else None}, render, as_json=as_json)
