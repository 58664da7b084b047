"""`flywheel keys`: the API keys that the gateway lets in, what each may ask for, and how much.

Reading needs no cluster; what keys have used is as fresh as the last reports of the gateways. Writing goes through the
registry actor, the only writer; if no cluster runs, one is started for the moment that takes. Gateways that run learn
of it within a moment, as they learn of an alias.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from actors.registry import views
from actors.registry.apikeys import ROLES, ApiKey, Secret
from actors.registry.reader import read_state, read_uses
from actors.registry.rules import CreateKey, RevokeKey, decide
from app.cli.models_change import Reason
from app.cli.output import AsJson, show, table
from cluster.config import nearest
from cluster.errors import ConfigError, RequestError
from cluster.storage import Home

EXAMPLES = "Examples: `flywheel keys create laptop` · `flywheel keys usage` · `flywheel keys revoke ID --reason lost`"
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
    """Every API key that is let in, with what it opens, its limits, and the use of its budget. Never its secret."""
    home, now = Home.current(), datetime.now(UTC)
    known = views.keys(read_state(home))
    shown = [key for key in known if revoked or _standing(key, now) == "live"]
    uses = read_uses(home)
    used = {key.id: views.key_use(key, uses, now) for key in shown}

    def render(console: Console) -> None:
        if not shown:
            console.print("No API key is let in. `flywheel keys create NAME` makes one.")
            return
        columns = ["id", "name", "opens", "limits", "standing"]
        rows = [
            (key.id, key.name, _opens(key.roles, key.models), _limits(key, used[key.id]), _standing(key, now))
            for key in shown
        ]
        console.print(table("API keys", columns, rows))

    listed = [
        {
            **key.model_dump(mode="json"),
            "standing": _standing(key, now).partition(":")[0],
            "budget_used": used[key.id].budget_used,
        }
        for key in shown
    ]
    show({"keys": listed}, render, as_json=as_json)


@cli.command(epilog="Example: `flywheel keys usage ci --json`")
def usage(
    name: Annotated[str | None, typer.Argument(help="Name or id of keys; left out: all that were used.")] = None,
    as_json: AsJson = False,
) -> None:
    """What keys were charged, as gateways have reported it: by key; with a NAME also by UTC day."""
    home, now = Home.current(), datetime.now(UTC)
    known = views.keys(read_state(home))
    asked = [key for key in known if name in (None, key.name, key.id)]
    if not asked and name is not None:
        near = nearest(name, [key.name for key in known])
        raise RequestError(
            f"There is no API key {name!r}.",
            status=404,
            hint=f"Did you mean {near!r}?" if near else "`flywheel keys list --revoked` shows all there are.",
        )
    uses = read_uses(home)
    found = [view for key in asked if (view := views.key_use(key, uses, now)).total.requests or name is not None]

    def render(console: Console) -> None:
        if not found:
            console.print("No gateway has reported a request with an API key.")
            return
        columns = ["id", "name", "requests today", "tokens today", "requests this month", "tokens this month", "budget"]
        rows = [
            (
                *(view.id, view.name, view.today.requests, view.today.tokens),
                *(view.month.requests, view.month.tokens, _budget(view)),
            )
            for view in found
        ]
        console.print(table("Use of API keys (UTC)", columns, rows))
        for view in found if name is not None else ():
            columns = ["day", "requests", "prompt tokens", "completion tokens", "estimated tokens"]
            days = [
                (day, use.requests, use.prompt_tokens, use.completion_tokens, use.estimated_tokens)
                for day, use in view.days.items()
            ]
            console.print(table(f"{view.id} by day", columns, days))

    show({"keys": [view.model_dump(mode="json") for view in found]}, render, as_json=as_json)


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


def _limits(key: views.KeyView, use: views.KeyUseView) -> str:
    limits = [f"{key.rpm} requests/min" if key.rpm else "", f"{key.tpm} tokens/min" if key.tpm else ""]
    return "\n".join(filter(None, (*limits, _budget(use)))) or "none"


def _budget(use: views.KeyUseView) -> str:
    if use.budget_tokens is None:
        return ""
    return f"{use.budget_tokens} tokens/{use.budget_period}\n({use.budget_used} used)"


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
