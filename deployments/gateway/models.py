"""Which model a name means, and the cards of `/v1/models`. Pure: works on a snapshot, asks nobody.

smollm2-135m-instruct                          the base; a registered whole model is served as one, by its own name
smollm2-135m-instruct:error-triage             the adapter that alias `champion` stands at, or one of several by
                                               their shares of its traffic
smollm2-135m-instruct:error-triage@candidate   … that another alias stands at
smollm2-135m-instruct:error-triage/3           exactly this version
all-minilm-l6-v2                               the embedder
"""

from dataclasses import dataclass
from typing import Any

from actors.registry.snapshot import DEFAULT_ALIAS, Route, Snapshot, resolve
from cluster.config import nearest
from cluster.errors import RequestError
from cluster.models import served_name
from deployments.llm.protocol import Adapter

OWNER = "flywheel"


@dataclass(frozen=True)
class Served:
    """The models that this application runs, by the names that clients use. Unset: none of that kind."""

    llm: str | None = None
    embedder: str | None = None
    max_model_len: int | None = None
    started: int = 0
    """Unix time; OpenAI's cards want one."""
    llm_version: str | None = None
    """The registered version that `llm` is, if it is one."""


@dataclass(frozen=True)
class Target:
    """What answers a request: the base, or one immutable adapter version on it.

    `model` is what responses carry as `model`. OpenAI answers `gpt-4o` with the dated name of the snapshot that
    spoke; so do we: `base:error-triage@champion` is answered as `base:error-triage/3`.
    """

    model: str
    version: str
    adapter: Adapter | None = None


def generator(served: Served, snapshot: Snapshot, name: str, *, key: str | None = None) -> Target:
    """What generates text for `name`; `key` chooses where an alias's traffic is split (see `resolve`).

    `RequestError` 404 (`model_not_found`), or 400 if it is no generator.
    """
    base, colon, reference = name.partition(":")
    if base == served.embedder and not colon:
        raise RequestError(
            f"{name!r} makes embeddings, not text.",
            param="model",
            code="model_not_supported",
            hint="Use /v1/embeddings.",
        )
    if served.llm is None or base != served.llm:
        raise _unknown(name, _names(served))
    if not colon:
        return Target(model=base, version=served.llm_version or base)
    try:
        route = resolve(snapshot, reference, key=key)
    except RequestError as error:
        raise _unknown(name, [], hint=error.hint) from None
    if not _fits(served, route):
        raise _unknown(name, [], hint=_elsewhere(route))
    return Target(
        model=f"{base}:{route.id}",
        version=route.id,
        adapter=Adapter(version=route.id, path=str(snapshot.folder(route)), digest=route.digest),
    )


def embedder(served: Served, name: str) -> str:
    """`name`, if it is the embedder; `RequestError` otherwise."""
    if name == served.embedder:
        return name
    if served.llm is not None and name.partition(":")[0] == served.llm:
        raise RequestError(
            f"{name!r} makes text, not embeddings.",
            param="model",
            code="model_not_supported",
            hint=f"Use {served.embedder!r}." if served.embedder else None,
        )
    raise _unknown(name, _names(served))


def cards(served: Served, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Every name that can be asked for. `parent` is the base; `root` is the immutable name that answers."""
    found = []
    if served.llm is not None:
        found.append(_card(served, served.llm, root=served.llm, parent=None))
        for name in snapshot.names():
            routes = [route for route in snapshot.of(name) if _fits(served, route)]
            roots = {route.version: f"{served.llm}:{route.id}" for route in routes}
            aliases = {alias: roots[number] for alias, number in snapshot.aliases_of(name).items() if number in roots}
            if DEFAULT_ALIAS in aliases:
                found.append(_card(served, f"{served.llm}:{name}", root=aliases[DEFAULT_ALIAS], parent=served.llm))
            for alias, root in sorted(aliases.items()):
                found.append(_card(served, f"{served.llm}:{name}@{alias}", root=root, parent=served.llm))
            found += [_card(served, root, root=root, parent=served.llm) for root in roots.values()]
    if served.embedder is not None:
        card = _card(served, served.embedder, root=served.embedder, parent=None)
        found.append({**card, "max_model_len": None})
    return found


def card(served: Served, snapshot: Snapshot, name: str) -> dict[str, Any]:
    """The card of one name; `RequestError` 404 if nothing answers to it."""
    for found in cards(served, snapshot):
        if found["id"] == name:
            return found
    # Not listed, so it does not exist; resolution says best what is near.
    generator(served, snapshot, name)
    raise _unknown(name, _names(served))


def _fits(served: Served, route: Route) -> bool:
    # A registered model may be called as the base that it came from; adapters of that base are not for its weights.
    return route.kind == "adapter" and served.llm_version is None and served_name(route.base) == served.llm


def _elsewhere(route: Route) -> str:
    if route.kind == "model":
        return f"{route.id} is a whole model, a base of its own: `flywheel serve` with serve.llm.model={route.id}."
    return f"{route.id} is an {route.kind} on {served_name(route.base)}."


def _names(served: Served) -> list[str]:
    return [name for name in (served.llm, served.embedder) if name]


def _card(served: Served, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.started,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": served.max_model_len,
    }


def _unknown(name: str, served: list[str], *, hint: str | None = None) -> RequestError:
    if hint is None:
        meant = nearest(name, served)
        hint = f"Did you mean {meant!r}?" if meant else f"Served: {', '.join(served) or 'nothing'}; see /v1/models."
    return RequestError(
        f"The model {name!r} does not exist.", status=404, param="model", code="model_not_found", hint=hint
    )
