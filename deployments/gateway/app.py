"""The routes. Each reads a body, resolves the model, asks a port, and shapes the answer; none decides a status.

Every route but `/healthz` first asks `Access` whose request it is. It knows the ports, not what is behind them:
tests run it on the fakes of `echo.py`, the deployment on Serve handles. A generation goes `_generation` →
`Engine.generate` → `deployments.llm.server.LLMDeployment.generate`.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from cluster.errors import FlywheelError, RequestError
from deployments.gateway import metrics as gateway_metrics
from deployments.gateway import models, schemas
from deployments.gateway.access import Access
from deployments.gateway.config import GatewayConfig
from deployments.gateway.errors import out_of_time, problem
from deployments.gateway.limits import Limiter, Reservation
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Served, Target
from deployments.gateway.ports import Collections, Embedder, Engine
from deployments.gateway.scope import VERSION_HEADER, RequestScope, read_body, trace_of
from deployments.gateway.snapshot import SnapshotFeed
from deployments.gateway.stream import StreamAssembler, stamped
from deployments.llm.failures import engine_lost
from deployments.llm.protocol import Answer, Generation, Kind

_HEALTH_WAIT_S = 5.0
_EVENT_STREAM = "text/event-stream"
# A proxy that buffers would hold back a stream until it is over.
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Parts:
    """Everything that the routes stand on. A part that is not served is None."""

    served: Served
    feed: SnapshotFeed
    metrics: GatewayMetrics
    engine: Engine | None = None
    embedder: Embedder | None = None
    collections: Collections | None = None
    limiter: Limiter = field(default_factory=Limiter)


def create_app(parts: Parts, config: GatewayConfig, *, send_id: bool = True) -> FastAPI:
    """The ASGI application over `parts`. `send_id`: put `x-request-id` into responses; a proxy may do that already."""
    app = FastAPI(title="Flywheel", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestScope, metrics=parts.metrics, send_id=send_id)
    app.add_exception_handler(HTTPException, _refuse)
    access = Access(parts.feed, parts.limiter, required=config.require_keys)
    _add_models(app, parts, access)
    _add_generation(app, parts, config, access)
    _add_embeddings(app, parts, config, access)
    _add_collections(app, parts, config, access)
    _add_operations(app, parts, access)
    return app


async def _refuse(_: Request, error: Exception) -> Response:
    return problem(error).response()


def _add_models(app: FastAPI, parts: Parts, access: Access) -> None:
    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        caller = access.admit(request, "infer")
        cards = models.cards(parts.served, parts.feed.current)
        return JSONResponse({"object": "list", "data": [card for card in cards if caller.key.allows(card["id"])]})

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(request: Request, model: str) -> Response:
        access.admit(request, "infer").require_model(model)
        return JSONResponse(models.card(parts.served, parts.feed.current, model))


def _add_generation(app: FastAPI, parts: Parts, config: GatewayConfig, access: Access) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _generation(request, parts, config, access, "chat", schemas.ChatBody)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generation(request, parts, config, access, "completions", schemas.CompletionBody)


async def _generation(
    request: Request,
    parts: Parts,
    config: GatewayConfig,
    access: Access,
    kind: Kind,
    body_class: type[schemas.GenerationBody],
) -> Response:
    caller = access.admit(request, "infer")
    body, raw = schemas.parse(body_class, await read_body(request, config.max_request_bytes))
    caller.require_model(body.model)
    # Resolved once: whatever an alias does from here on, this request ends on the version it began with.
    trace = trace_of(request)
    target = models.generator(parts.served, parts.feed.current, body.model, key=body.user or trace.request_id)
    if parts.engine is None:
        raise RequestError("This application serves no language model.", status=404, code="model_not_found")
    trace.model, trace.version = target.model, target.version
    reservation = access.reserve(request, caller, raw)
    generation = Generation(kind=kind, body=body.for_engine(raw), request_id=uuid.uuid4().hex, adapter=target.adapter)
    answers = parts.engine.generate(generation)
    # The status line must wait for the first answer: a refused request has to be a 4xx, not a broken stream.
    deadline = asyncio.get_running_loop().time() + config.request_timeout_s
    async with asyncio.timeout_at(deadline):
        first = await anext(answers, None)
    if first is None:
        raise engine_lost()
    if isinstance(first, dict):
        await _close(answers)
        return _whole(first, target, parts, reservation)
    assembler = StreamAssembler(model=target.model, version=target.version, forward_usage=body.wants_usage, kind=kind)
    events = assembler.feed("".join(first))
    if assembler.fault:
        # Some refusals come from the engine as the first event of a stream.
        await _close(answers)
        raise assembler.fault
    return StreamingResponse(
        _events(events, answers, assembler, deadline, parts.metrics, reservation),
        media_type=_EVENT_STREAM,
        headers={**_STREAM_HEADERS, VERSION_HEADER: target.version},
    )


def _whole(answer: dict[str, Any], target: Target, parts: Parts, reservation: Reservation) -> Response:
    usage = answer.get("usage") or {}
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    parts.metrics.tokens(model=target.model, version=target.version, prompt=prompt, completion=completion)
    reservation.settle(prompt + completion)
    return JSONResponse(
        stamped(answer, model=target.model, version=target.version), headers={VERSION_HEADER: target.version}
    )


async def _events(
    events: list[str],
    answers: AsyncIterator[Answer],
    assembler: StreamAssembler,
    deadline: float,
    metrics: GatewayMetrics,
    reservation: Reservation,
) -> AsyncIterator[str]:
    """The client's events. Leaving early (the client hung up) closes `answers`, which stops the generation."""
    try:
        for event in events:
            yield event
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    answer = await anext(answers, None)
                if answer is None:
                    break
                for event in assembler.feed("".join(answer)):
                    yield event
            last = assembler.close()
        except FlywheelError as error:
            last = assembler.fail(error)
        except TimeoutError:
            last = assembler.fail(out_of_time())
        for event in last:
            yield event
    finally:
        if assembler.fault:
            metrics.stream_broke(model=assembler.model)
        metrics.tokens(
            model=assembler.model,
            version=assembler.version,
            prompt=assembler.usage.prompt_tokens,
            completion=assembler.usage.completion_tokens,
        )
        _settle(reservation, assembler)
        await _close(answers)


def _settle(reservation: Reservation, assembler: StreamAssembler) -> None:
    """By the usage, which is the last thing that a stream says. Who leaves before it does not get the rest for free."""
    if used := assembler.usage.prompt_tokens + assembler.usage.completion_tokens:
        reservation.settle(used)
    elif assembler.fault is None:
        reservation.keep()


async def _close(answers: AsyncIterator[Answer]) -> None:
    if (close := getattr(answers, "aclose", None)) is not None:
        await close()


def _add_embeddings(app: FastAPI, parts: Parts, config: GatewayConfig, access: Access) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        caller = access.admit(request, "infer")
        body, raw = schemas.parse(schemas.EmbeddingsBody, await read_body(request, config.max_request_bytes))
        caller.require_model(body.model)
        model = models.embedder(parts.served, body.model)
        if parts.embedder is None:
            raise RequestError("This application serves no embedding model.", status=404, code="model_not_found")
        trace_of(request).model = trace_of(request).version = model
        reservation = access.reserve(request, caller, raw)
        async with asyncio.timeout(config.request_timeout_s):
            if body.dimensions is not None:
                await _require_dimensions(parts.embedder, body.dimensions)
            made = await parts.embedder.embed(body.input)
        parts.metrics.tokens(model=model, version=model, prompt=sum(made.tokens), completion=0)
        reservation.settle(sum(made.tokens))
        return JSONResponse(
            schemas.embeddings_response(model, made.vectors, made.tokens, body.encoding_format),
            headers={VERSION_HEADER: model},
        )


async def _require_dimensions(embedder: Embedder, asked: int) -> None:
    has = int((await embedder.describe())["dimensions"])
    if asked != has:
        raise RequestError(
            f"This model's vectors have {has} dimensions and cannot be cut to {asked}.",
            param="dimensions",
            code="invalid_value",
            hint="Leave `dimensions` out.",
        )


def _add_collections(app: FastAPI, parts: Parts, config: GatewayConfig, access: Access) -> None:
    def collections() -> Collections:
        if parts.collections is None:
            raise RequestError("This application serves no collections.", status=404, code="collection_not_found")
        return parts.collections

    @app.post("/v1/collections/{name}/documents")
    async def write(request: Request, name: str) -> Response:
        caller = access.admit(request, "index")
        body, raw = schemas.parse(schemas.DocumentsBody, await read_body(request, config.max_request_bytes))
        reservation = access.reserve(request, caller, raw)
        documents = [document.model_dump(exclude_none=True) for document in body.documents]
        async with asyncio.timeout(config.request_timeout_s):
            count = await collections().write(name, documents)
        reservation.keep()  # collections do not say what their embeddings have cost
        return JSONResponse({"object": "collection.write", "collection": name, "written": count})

    @app.post("/v1/collections/{name}/search")
    async def search(request: Request, name: str) -> Response:
        caller = access.admit(request, "infer")
        body, raw = schemas.parse(schemas.SearchBody, await read_body(request, config.max_request_bytes))
        reservation = access.reserve(request, caller, raw)
        async with asyncio.timeout(config.request_timeout_s):
            hits = await collections().search(name, body.query, body.k, body.filter)
        reservation.keep()
        return JSONResponse({"object": "list", "collection": name, "data": hits})


def _add_operations(app: FastAPI, parts: Parts, access: Access) -> None:
    @app.get("/healthz")
    async def health() -> Response:
        parts_there = {"llm": parts.engine, "embedding": parts.embedder}
        checks = {name: _state(part) for name, part in parts_there.items() if part is not None}
        found = dict(zip(checks, await asyncio.gather(*checks.values()), strict=True))
        # The registry may be away: the last snapshot serves on, so that alone makes nothing unwell.
        well = not any("error" in state for state in found.values())
        content = {"status": "ok" if well else "unavailable", "registry": parts.feed.describe(), **found}
        return JSONResponse(content, status_code=200 if well else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        # `admin`: it names every model and all traffic, also of those that a key which may only infer cannot ask for.
        access.admit(request, "admin")
        return Response(parts.metrics.render(), media_type=gateway_metrics.CONTENT_TYPE)


async def _state(part: Engine | Embedder) -> dict[str, Any]:
    """What a part says of itself, or why it does not."""
    try:
        async with asyncio.timeout(_HEALTH_WAIT_S):
            return await part.describe()
    except (FlywheelError, TimeoutError) as error:
        return problem(error).body()
