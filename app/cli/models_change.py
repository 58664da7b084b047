"""`flywheel models`, as far as it changes something: aliases, stages, pins, files.

All of it goes through the registry actor, the only writer; if no cluster runs, one is started for the moment that
takes.
"""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from actors.registry import views
from actors.registry.reader import read_state
from actors.registry.rules import shown
from actors.registry.snapshot import Split
from app.cli.output import AsJson, notes, show, table
from app.display import Display
from cluster.errors import ConfigError, DependencyError
from cluster.storage import Home

Name = Annotated[str, typer.Argument(help="Registered name.")]
Reference = Annotated[str, typer.Argument(help="name, name@alias or name/3.")]


def _printable(text: str) -> str:
    if not all(char.isprintable() or char in "\n\t" for char in text):
        raise ConfigError(f"--reason {text!r} holds a character that cannot be shown.", hint="Write it without.")
    return text


Reason = Annotated[str, typer.Option("--reason", help="Why; it is kept for ever.", callback=_printable)]
_SHARE = re.compile(r"([0-9]{1,9})=([0-9]*\.?[0-9]+)(%?)")
_NUMBER = re.compile(r"[0-9]{1,9}")
_AGE = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_to(cli: typer.Typer) -> None:
    """Hang the commands of this module under `flywheel models`."""
    for command, example in (
        (promote, "flywheel models promote error-triage 2 --reason 'passed the gate'"),
        (rollback, "flywheel models rollback error-triage --reason 'answers got worse'"),
        (retire, "flywheel models retire error-triage/1 --reason 'superseded'"),
        (pin, "flywheel models pin error-triage/1 --reason 'for the auditor'"),
        (unpin, "flywheel models unpin error-triage/1 --reason 'the audit is over'"),
        (verify, "flywheel models verify error-triage@champion"),
        (sign, "flywheel models sign error-triage/1"),
        (gc, "flywheel models gc --dry-run"),
        (export, "flywheel models export error-triage@champion --out error-triage.tar"),
        (import_, "flywheel models import error-triage.tar"),
    ):
        cli.command(name=command.__name__.rstrip("_"), epilog=f"Example: `{example}`")(command)


def promote(
    name: Name,
    to: Annotated[str, typer.Argument(help="Number of the version, or shares: 3=0.9,4=0.1.")],
    reason: Reason,
    alias: Annotated[str, typer.Option(help="Alias to move.")] = "champion",
    expected: Annotated[
        str | None, typer.Option(help="Move only if it stands there now (3, or 3=0.9,4=0.1); 0: only if it is new.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also without a passed gate; the history shows it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Let an alias name a version that has passed its gate, or split its traffic over several."""
    from app.pipelines.registry import writer  # imports ray

    split = _split(to)
    before = None if expected is None else {} if expected == "0" else _split(expected)
    with writer(Home.current()) as registry:
        move = registry.promote(name, alias, split, why=reason, expected=before, force=force)
    forced = " (by force)" if move.forced else ""
    show(
        move.model_dump(mode="json"),
        lambda to: to.print(f"{name}@{alias} → {shown(move.split)}{forced}"),
        as_json=as_json,
    )


def rollback(
    name: Name,
    reason: Reason,
    alias: Annotated[str, typer.Option(help="Alias to move back.")] = "champion",
    as_json: AsJson = False,
) -> None:
    """Let an alias stand where it stood before."""
    from app.pipelines.registry import writer  # imports ray

    with writer(Home.current()) as registry:
        move = registry.rollback(name, alias, why=reason)
    show(move.model_dump(mode="json"), lambda to: to.print(f"{name}@{alias} → {shown(move.split)}"), as_json=as_json)


def retire(reference: Reference, reason: Reason, as_json: AsJson = False) -> None:
    """Take a version out of traffic for good. Its facts stay; `gc` may free its files."""
    from app.pipelines.registry import writer  # imports ray

    home = Home.current()
    found = views.find(read_state(home), reference)
    with writer(home) as registry:
        retired = registry.retire(found.id, why=reason)
    show(retired.model_dump(mode="json"), lambda to: to.print(f"{found.id} is retired"), as_json=as_json)


def pin(reference: Reference, reason: Reason, as_json: AsJson = False) -> None:
    """Keep the files of a version, whatever `gc` thinks."""
    _pin(reference, reason, pinned=True, as_json=as_json)


def unpin(reference: Reference, reason: Reason, as_json: AsJson = False) -> None:
    """Take a pin away."""
    _pin(reference, reason, pinned=False, as_json=as_json)


def _pin(reference: str, reason: str, *, pinned: bool, as_json: bool) -> None:
    from app.pipelines.registry import writer  # imports ray

    home = Home.current()
    found = views.find(read_state(home), reference)
    with writer(home) as registry:
        fact = registry.pin(found.id, pinned=pinned, why=reason)
    state = "pinned" if pinned else "not pinned any more"
    show(fact.model_dump(mode="json"), lambda to: to.print(f"{found.id} is {state}"), as_json=as_json)


def verify(
    reference: Annotated[
        str | None, typer.Argument(help="name, name@alias or name/3; left out: every version.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the files of a version again and check them against its digest and its signature."""
    from app.pipelines.versions import verified

    with Display(notes) as display, display.stage("verify"):
        found = verified(Home.current(), reference, display)

    def render(console: Console) -> None:
        rows = [(each.version_id, "whole" if each.key_id else "REFUSED", each.key_id, each.reason) for each in found]
        console.print(table("Verified", ["version", "files", "signed by", "why not"], rows))

    show({"verified": [each.model_dump(mode="json") for each in found]}, render, as_json=as_json)
    if refused := [each.version_id for each in found if not each.key_id]:
        raise DependencyError(
            f"{len(refused)} of {len(found)} versions are not what was registered: {', '.join(refused[:5])}.",
            hint="Nothing will load them. Bring their files back, or promote another version.",
            retryable=False,
        )


def sign(reference: Reference, as_json: AsJson = False) -> None:
    """Sign the files of a version again, if they are those that were registered: after a key had to go, or for a
    version from before signatures."""
    from app.pipelines.versions import sign_again

    with Display(notes) as display, display.stage("sign"):
        found = sign_again(Home.current(), reference)
    show(
        found.model_dump(mode="json"),
        lambda to: to.print(f"{found.version_id} is signed by {found.key_id}"),
        as_json=as_json,
    )


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be freed.")] = False,
    older_than: Annotated[str, typer.Option(help="Leave alone what is younger: 30m, 12h, 7d.")] = "7d",
    as_json: AsJson = False,
) -> None:
    """Free the files that no alias, rollback, parent, run, gate or pin needs. The facts of versions stay."""
    from app.pipelines.registry import writer  # imports ray

    age_s = _age(older_than)
    with writer(Home.current()) as registry:
        found = registry.collect(min_age_s=age_s, dry_run=dry_run)

    def render(console: Console) -> None:
        total = sum(each.size_bytes for each in found.freed)
        if not found.freed:
            console.print(f"Nothing to free: all of it is needed, or younger than {older_than}.")
            return
        rows = [(each.what, f"{each.size_bytes / 1e6:.1f} MB", each.why) for each in found.freed]
        console.print(table("Would be freed" if dry_run else "Freed", ["what", "size", "why"], rows))
        console.print(f"{total / 1e6:.1f} MB; {len(found.kept)} versions stay because something needs them.")
        for path, why in found.left.items():
            console.print(f"Left: {path}: {why}")

    show(found.model_dump(mode="json"), render, as_json=as_json)


def export(
    reference: Reference,
    out: Annotated[Path | None, typer.Option(help="File to write; default: NAME-NUMBER.tar here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version with its lineage and signature into one file, for another installation."""
    from app.pipelines.versions import export_version

    with Display(notes) as display, display.stage("export"):
        found = export_version(Home.current(), reference, out, display)
    show(
        found.model_dump(mode="json"),
        lambda to: to.print(
            f"{found.version_id} → {found.file} ({found.size_bytes / 1e6:.1f} MB, key {found.signed_by})"
        ),
        as_json=as_json,
    )


def import_(
    file: Annotated[Path, typer.Argument(help="A file that `flywheel models export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Register a version of another installation. Its key must be trusted here: `flywheel signers trust`."""
    from app.pipelines.versions import import_version

    with Display(notes) as display, display.stage("import"):
        version = import_version(Home.current(), file, display)
    show(
        version.model_dump(mode="json"),
        lambda to: to.print(f"{version.id} is registered; it passes a gate here before it takes traffic."),
        as_json=as_json,
    )


def _split(text: str) -> Split:
    """`3`, or shares as `3=0.9,4=0.1` or `3=90%,4=10%`."""
    if _NUMBER.fullmatch(text):
        return {int(text): 1.0}
    found: Split = {}
    for part in text.split(","):
        match = _SHARE.fullmatch(part.strip())
        if match is None or int(match[1]) in found:
            raise ConfigError(f"{text!r} is no version and no shares.", hint="Write 3, or 3=0.9,4=0.1.")
        found[int(match[1])] = float(match[2]) / (100 if match[3] else 1)
    return found


def _age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--older-than {text!r} is no age.", hint="Write 30m, 12h or 7d.")
    return int(match[1]) * _UNITS_S[match[2]]
