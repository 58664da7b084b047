"""Which model a name means, and the cards of `/v1/models`. Pure: works on a snapshot, asks nobody.

smollm2-135m-instruct                          a base; a registered whole model is served as one, by its own name
smollm2-135m-instruct:error-triage             the adapter that alias `champion` stands at, or one of several by
                                               their shares of its traffic
smollm2-135m-instruct:error-triage@candidate   … that another alias stands at
smollm2-135m-instruct:error-triage/3           exactly this version
all-minilm-l6-v2                               an embedder; likewise the reranker

An application may serve several bases. An adapter is asked for on the base that it was trained on, and on no other.
No name is altered on the way: case, blanks and look-alike letters count.
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
class Base:
    """One base model, by the name that clients use."""

    name: str
    part: str = "llm"
    """Its Serve deployment, by which health calls it."""
    version: str | None = None
    """The registered version that it is, if it is one."""
    max_model_len: int | None = None

    def fits(self, route: Route) -> bool:
        """Whether `route` is an adapter for these weights.

        A registered model may be called as the base that it came from; adapters of that base are not for it.
        """
        return route.kind == "adapter" and self.version is None and served_name(route.base) == self.name


@dataclass(frozen=True)
class Encoder:
    """An embedder or a reranker, by the name that clients use."""

    name: str
    part: str = "embedding"
    """Its Serve deployment, by which health calls it."""
    registered: str | None = None
    """The registered version that it is, if it is one."""

    @property
    def version(self) -> str:
        """The immutable name of what answers."""
        return self.registered or self.name


@dataclass(frozen=True)
class Served:
    """The models that this application runs. Their names differ (`ServeConfig` sees to it)."""

    bases: tuple[Base, ...] = ()
    embedders: tuple[Encoder, ...] = ()
    reranker: Encoder | None = None
    started: int = 0
    """Unix time; OpenAI's cards want one."""

    def base(self, name: str) -> Base | None:
        """The base of that name."""
        return next((base for base in self.bases if base.name == name), None)

    @property
    def names(self) -> list[str]:
        """Bases in the order of the config, then embedders and the reranker."""
        return [*(base.name for base in self.bases), *(encoder.name for encoder in self.encoders)]

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """Embedders, and the reranker."""
        return (*self.embedders, *filter(None, [self.reranker]))

    def embedder(self, name: str) -> Encoder | None:
        """The embedder of that name."""
        return next((embedder for embedder in self.embedders if embedder.name == name), None)


@dataclass(frozen=True)
class Target:
    """What answers a request: the base, or one immutable adapter version on it.

    `model` is what responses carry as `model`. OpenAI answers `gpt-4o` with the dated name of the snapshot that
    spoke; so do we: `base:error-triage@champion` is answered as `base:error-triage/3`.
    """

    model: str
    version: str
    base: str
    """Whose engine answers."""
    adapter: Adapter | None = None


def generator(served: Served, snapshot: Snapshot, name: str, *, key: str | None = None) -> Target:
    """What generates text for `name`; `key` chooses where an alias's traffic is split (see `resolve`).

    `RequestError` 404 (`model_not_found`), or 400 if it is no generator.
    """
    base_name, colon, reference = name.partition(":")
    if served.embedder(name):
        raise _not_for_this(f"{name!r} makes embeddings, not text.", hint="Use /v1/embeddings.")
    if served.reranker and name == served.reranker.name:
        raise _not_for_this(f"{name!r} ranks documents and makes no text.", hint="Use /v1/rerank.")
    base = served.base(base_name)
    if base is None:
        raise _unknown(name, served.names)
    if not colon:
        return Target(model=base.name, version=base.version or base.name, base=base.name)
    try:
        route = resolve(snapshot, reference, key=key)
    except RequestError as error:
        raise _unknown(name, [], hint=error.hint) from None
    if not base.fits(route):
        raise _unknown(name, [], hint=_elsewhere(served, route))
    return Target(
        model=f"{base.name}:{route.id}",
        version=route.id,
        base=base.name,
        adapter=Adapter(version=route.id, path=str(snapshot.folder(route)), digest=route.digest),
    )


def only_base(served: Served) -> str:
    """The base that a request without `model` means; `RequestError` 400 if there are several, 404 if there is none."""
    match served.bases:
        case (base,):
            return base.name
        case ():
            raise RequestError("This application serves no language model.", status=404, code="model_not_found")
        case _:
            raise RequestError(
                f"`model` is required: this application serves {len(served.bases)} language models.",
                param="model",
                code="invalid_value",
                hint=f"Give one of: {', '.join(base.name for base in served.bases)}.",
            )


def embedder(served: Served, name: str) -> Encoder:
    """The embedder `name`; `RequestError` if it is none."""
    if found := served.embedder(name):
        return found
    hint = f"Use {' or '.join(repr(one.name) for one in served.embedders)}." if served.embedders else None
    if served.base(name.partition(":")[0]):
        raise _not_for_this(f"{name!r} makes text, not embeddings.", hint=hint)
    if served.reranker and name == served.reranker.name:
        raise _not_for_this(f"{name!r} ranks documents and makes no embeddings.", hint=hint)
    raise _unknown(name, served.names)


def reranker(served: Served, name: str) -> Encoder:
    """The reranker, if `name` is its; `RequestError` otherwise."""
    if served.reranker and name == served.reranker.name:
        return served.reranker
    if served.embedder(name) or served.base(name.partition(":")[0]):
        hint = f"Use {served.reranker.name!r}." if served.reranker else "This application serves no reranker."
        raise _not_for_this(f"{name!r} is no reranker.", hint=hint)
    raise _unknown(name, served.names)


def cards(served: Served, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Every name that can be asked for. `parent` is the base; `root` is the immutable name that answers."""
    found = [card for base in served.bases for card in _cards_of(served, base, snapshot)]
    found += [_card(served, encoder.name, root=encoder.version) for encoder in served.encoders]
    return found


def _cards_of(served: Served, base: Base, snapshot: Snapshot) -> list[dict[str, Any]]:
    found = [_card(served, base.name, root=base.name, max_model_len=base.max_model_len)]
    for name in snapshot.names():
        roots = {route.version: f"{base.name}:{route.id}" for route in snapshot.of(name) if base.fits(route)}
        aliases = {alias: roots[number] for alias, number in snapshot.aliases_of(name).items() if number in roots}
        ids = {f"{base.name}:{name}": aliases[DEFAULT_ALIAS]} if DEFAULT_ALIAS in aliases else {}
        ids |= {f"{base.name}:{name}@{alias}": root for alias, root in sorted(aliases.items())}
        ids |= {root: root for root in roots.values()}
        found += [
            _card(served, id_, root=root, parent=base.name, max_model_len=base.max_model_len)
            for id_, root in ids.items()
        ]
    return found


def card(served: Served, snapshot: Snapshot, name: str) -> dict[str, Any]:
    """The card of one name; `RequestError` 404 if nothing answers to it."""
    for found in cards(served, snapshot):
        if found["id"] == name:
            return found
    # Not listed, so it does not exist; resolution says best what is near.
    generator(served, snapshot, name)
    raise _unknown(name, served.names)


def _elsewhere(served: Served, route: Route) -> str:
    if route.kind == "model":
        own = next((base.name for base in served.bases if base.version == route.id), None)
        if own:
            return f"{route.id} is a base of its own here: ask for {own!r}."
        return f"{route.id} is a whole model, a base of its own: `flywheel serve` with serve.llm.model={route.id}."
    home = next((base for base in served.bases if base.fits(route)), None)
    if home:
        return f"{route.id} is an adapter on {home.name}: ask for '{home.name}:{route.id}'."
    return f"{route.id} is an {route.kind} on {served_name(route.base)}."


def _card(
    served: Served, name: str, *, root: str, parent: str | None = None, max_model_len: int | None = None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.started,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


def _not_for_this(what: str, *, hint: str | None) -> RequestError:
    return RequestError(what, param="model", code="model_not_supported", hint=hint)


def _unknown(name: str, served: list[str], *, hint: str | None = None) -> RequestError:
    if hint is None:
        # Whoever gives a Hugging Face id means its last part; who writes it large means it small.
        meant = nearest(name.partition(":")[0].rpartition("/")[2].casefold().strip(), served)
        hint = f"Did you mean {meant!r}?" if meant else f"Served: {', '.join(served) or 'nothing'}; see /v1/models."
    return RequestError(
        f"The model {name!r} does not exist.", status=404, param="model", code="model_not_found", hint=hint
    )
