"""`flywheel keys`: the API keys that the gateway lets in, what each may ask for, and how much.

Reading needs no cluster. Writing goes through the registry actor, the only writer; if no cluster runs, one is started
for the moment that takes. Gateways that run learn of it within a moment, as they learn of an alias.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from actors.registry import views
from actors.registry.apikeys import ROLES, ApiKey, Secret
from actors.registry.reader import read_state
from actors.registry.rules import CreateKey, RevokeKey, decide
from app.cli.models_change import Reason
from app.cli.output import AsJson, show, table
from cluster.errors import ConfigError
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel keys create laptop` · `flywheel keys list` · `flywheel keys revoke ID --reason lost`"
cli = typer.Typer(help="API keys: who may ask the gateway, for what, how often.", no_args_is_help=True, epilog=EXAMPLES)
_EXPIRY = re.compile(r"([0-9]{1,5})([hd])")


@cli.command(epilog="Example: `flywheel keys create ci --model 'smollm2-135m-instruct:*' --rpm 60 --tpm 20000`")
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is: what lists, logs and usage call it.")],
    role: Annotated[
        list[str] | None, typer.Option(help=f"What it opens: {', '.join(ROLES)}; may be given often.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Models it may ask for, as a pattern: 'base:team-*'; may be given often.")
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests a minute; unset: no limit.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens a minute; unset: no limit.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens for each period of --per.")] = None,
    per: Annotated[str | None, typer.Option(help="Period of the budget: day or month (UTC).")] = None,
    expires: Annotated[str | None, typer.Option(help="After what time it opens nothing: 12h, 90d.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key. Its secret is shown this once, and kept nowhere."""
    secret = Secret.make()
    facts: dict[str, Any] = {
        "id": secret.id,
        "name": name,
        "secret_sha256": secret.sha256,
        "roles": tuple(dict.fromkeys(role or ("infer",))),
        "models": tuple(dict.fromkeys(model or ("*",))),
        "rpm": rpm,
        "tpm": tpm,
        "budget_tokens": budget_tokens,
        "budget_period": _period(per),
        "expires_at": _moment(expires),
    }
    key = ApiKey(**facts)
    home = Home.current()
    # What cannot be is refused before a cluster is started for it.
    decide(read_state(home), CreateKey(key, ""), now=datetime.now(UTC))
    from app.pipelines.registry import writer  # imports ray

    def render(console: Console) -> None:
        console.print(f"API key {created.id} ({created.name}): {_opens(created.roles, created.models)}.")
        console.print(Text(secret.text, "bold"), soft_wrap=True)
        console.print("Keep it now: it is not shown again. Clients take it from FLYWHEEL_API_KEY, or as an OpenAI key.")

    with writer(home) as registry:
        created = registry.create_key(key)
        # In here: whatever happens from now on, the secret must reach its owner.
        plain = created.model_dump(mode="json", exclude={"secret_sha256"})
        show({**plain, "secret": secret.text}, render, as_json=as_json)


@cli.command(name="list", epilog="Example: `flywheel keys list --json`")
def list_keys(
    revoked: Annotated[bool, typer.Option("--revoked", help="Also those that are revoked or expired.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every API key that is let in, with what it opens and its limits. Never its secret."""
    now = datetime.now(UTC)
    known = views.keys(read_state(Home.current()))
    shown = [key for key in known if revoked or _standing(key, now) == "live"]

    def render(console: Console) -> None:
        if not shown:
            console.print("No API key is let in. `flywheel keys create NAME` makes one.")
            return
        columns = ["id", "name", "opens", "limits", "standing"]
        rows = [(key.id, key.name, _opens(key.roles, key.models), _limits(key), _standing(key, now)) for key in shown]
        console.print(table("API keys", columns, rows))

    listed = [{**key.model_dump(mode="json"), "standing": _standing(key, now).partition(":")[0]} for key in shown]
    show({"keys": listed}, render, as_json=as_json)


@cli.command(epilog="Example: `flywheel keys revoke key-3f9c0a61b27d --reason 'it was in a log'`")
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `flywheel keys list` shows it.")],
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Let a key in no longer. Gateways that run refuse it within a moment; there is no way back."""
    home = Home.current()
    decide(read_state(home), RevokeKey(key, "nobody yet", reason, ""), now=datetime.now(UTC))
    from app.pipelines.registry import writer  # imports ray

    with writer(home) as registry:
        revoked = registry.revoke_key(key, why=reason)
    show(
        revoked.model_dump(mode="json", exclude={"command"}),
        lambda to: to.print(f"API key {revoked.key_id} is revoked."),
        as_json=as_json,
    )


def _standing(key: views.KeyView, now: datetime) -> str:
    if key.revoked_at is not None:
        return f"revoked: {key.why}"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "live"


def _opens(roles: tuple[str, ...], models: tuple[str, ...]) -> str:
    return f"{', '.join(roles)} on {', '.join('every model' if each == '*' else each for each in models)}"


def _limits(key: views.KeyView) -> str:
    limits = [f"{key.rpm} requests/min" if key.rpm else "", f"{key.tpm} tokens/min" if key.tpm else ""]
    budget = f"{key.budget_tokens} tokens/{key.budget_period}" if key.budget_tokens else ""
    return "\n".join(filter(None, (*limits, budget))) or "none"


def _period(text: str | None) -> str | None:
    if text not in (None, "day", "month"):
        raise ConfigError(f"--per {text!r} is no period of a budget.", hint="Write day or month.")
    return text


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    match = _EXPIRY.fullmatch(text)
    if match is None or not int(match[1]):
        raise ConfigError(f"--expires {text!r} is no time to live.", hint="Write 12h or 90d.")
    return datetime.now(UTC) + timedelta(hours=int(match[1]) * (24 if match[2] == "d" else 1))
