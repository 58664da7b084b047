"""The routes. Each reads a body, resolves the model, asks a port, and shapes the answer; none decides a status.

Every route but `/healthz` first asks `Access` whose request it is. It knows the ports, not what is behind them:
tests run it on the fakes of `echo.py`, the deployment on Serve handles. A generation goes `_generation` →
`Engine.generate` → `deployments.llm.server.LLMDeployment.generate`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from cluster.errors import FlywheelError, RequestError
from deployments.embedding.port import Embedded, Embedder, Inputs, InputType
from deployments.gateway import metrics as gateway_metrics
from deployments.gateway import models, schemas
from deployments.gateway.access import Access
from deployments.gateway.admission import Admission, Turn
from deployments.gateway.aside import Aside
from deployments.gateway.config import GatewayConfig
from deployments.gateway.errors import fell_silent, out_of_time, problem
from deployments.gateway.keys import Caller
from deployments.gateway.limits import Limiter, Reservation, estimate, require_choices
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Encoder, Served, Target
from deployments.gateway.ports import Collections, Engine
from deployments.gateway.scope import VERSION_HEADER, RequestScope, Trace, read_body, trace_of
from deployments.gateway.session import session_of
from deployments.gateway.stream import StreamAssembler, stamped
from deployments.llm.failures import engine_lost
from deployments.llm.protocol import Answer, Generation, Kind
from deployments.reranking.port import Reranker
from deployments.snapshot import SnapshotFeed

_HEALTH_WAIT_S = 5.0
_STANDINGS = ("ok", "degraded", "unavailable")
_EVENT_STREAM = "text/event-stream"
# A proxy that buffers would hold back a stream until it is over.
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Backend:
    """One base's engine and the queue before it: a slow engine takes no places but its own."""

    engine: Engine
    admission: Admission


@dataclass(frozen=True)
class Parts:
    """Everything that the routes stand on. A part that is not served is None."""

    served: Served
    feed: SnapshotFeed
    metrics: GatewayMetrics
    backends: Mapping[str, Backend] = field(default_factory=dict)
    """One for each of `served.bases`, by name."""
    embedders: Mapping[str, Embedder] = field(default_factory=dict)
    """One for each of `served.embedders`, by name."""
    reranker: Reranker | None = None
    collections: Collections | None = None
    limiter: Limiter = field(default_factory=Limiter)


def create_app(parts: Parts, config: GatewayConfig, *, send_id: bool = True) -> FastAPI:
    """The ASGI application over `parts`. `send_id`: put `x-request-id` into responses; a proxy may do that already."""
    app = FastAPI(title="Flywheel", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        RequestScope,
        metrics=parts.metrics,
        send_id=send_id,
        body_timeout_s=config.body_timeout_s,
        max_held_bytes=config.max_held_bytes,
    )
    app.add_exception_handler(HTTPException, _refuse)
    access = Access(parts.feed, parts.limiter, required=config.require_keys)
    _add_models(app, parts, access)
    _add_generation(app, parts, config, access)
    aside = Aside()
    _add_embeddings(app, parts, config, access, aside)
    _add_reranking(app, parts, config, access, aside)
    _add_collections(app, parts, config, access, aside)
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

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _tokens(request, parts, config, access, "tokenize")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _tokens(request, parts, config, access, "detokenize")


async def _tokens(request: Request, parts: Parts, config: GatewayConfig, access: Access, kind: Kind) -> Response:
    """Text to the model's token ids, or back; nothing is generated and no token is counted."""
    caller = access.admit(request, "infer")
    body, raw = schemas.parse(schemas.TokensBody, await read_body(request, config.max_request_bytes))
    trace = trace_of(request)
    name = body.model or models.only_base(parts.served)
    caller.require_model(name)
    target = models.generator(parts.served, parts.feed.current, name, key=session_of(request, body, caller))
    trace.model, trace.version = target.model, target.version
    reservation = access.reserve(request, caller, raw)
    asked = Generation(kind, raw, request_id=trace.request_id, adapter=target.adapter)
    answers = parts.backends[target.base].engine.generate(asked)
    async with asyncio.timeout(config.request_timeout_s):
        answer = await anext(answers, None)
    await _close(answers)
    if not isinstance(answer, dict):
        raise engine_lost()
    reservation.settle(0)
    return JSONResponse(answer, headers={VERSION_HEADER: target.version})


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
    require_choices(raw, config.max_choices)
    # Resolved once: whatever an alias does from here on, this request ends on the version it began with.
    trace = trace_of(request)
    target = models.generator(parts.served, parts.feed.current, body.model, key=session_of(request, body, caller))
    backend = parts.backends[target.base]
    trace.model, trace.version = target.model, target.version
    reservation = access.reserve(request, caller, raw)
    generation = Generation(
        kind=kind,
        body=body.for_engine(raw),
        request_id=trace.request_id,
        adapter=target.adapter,
        tokens=reservation.tokens,
    )
    async with AsyncExitStack() as held:
        deadline = asyncio.get_running_loop().time() + config.request_timeout_s
        async with asyncio.timeout_at(deadline):
            turn = await held.enter_async_context(
                backend.admission.turn(caller.id or body.user or "", generation.tokens)
            )
        answers = backend.engine.generate(generation)
        held.push_async_callback(_close, answers)
        account = Account(turn, reservation, trace)
        response = await _answered(answers, generation, target, parts, body, deadline, config.idle_timeout_s, account)
        if isinstance(response, HeldStream):
            response.held = held.pop_all()
    return response


class HeldStream(StreamingResponse):
    """A stream that holds its turn and its generation until it is over, also if the client never reads of it."""

    held: AsyncExitStack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held:
            await super().__call__(scope, receive, send)


@dataclass(frozen=True)
class Account:
    """Where the tokens of one generation are charged: its caller's share of the engines, and its key's limits."""

    turn: Turn
    reservation: Reservation
    trace: Trace

    def settle(self, prompt: int, completion: int) -> None:
        self.trace.prompt_tokens, self.trace.completion_tokens = prompt, completion
        self.turn.used = prompt + completion
        self.reservation.settle(prompt, completion)


async def _answered(
    answers: AsyncIterator[Answer],
    generation: Generation,
    target: Target,
    parts: Parts,
    body: schemas.GenerationBody,
    deadline: float,
    idle_s: float,
    account: Account,
) -> Response:
    # The status line must wait for the first answer: a refused request has to be a 4xx, not a broken stream.
    async with asyncio.timeout_at(deadline):
        first = await anext(answers, None)
    if first is None:
        raise engine_lost()
    if isinstance(first, dict):
        return _whole(first, target, parts, account)
    assembler = StreamAssembler(
        model=target.model,
        version=target.version,
        forward_usage=body.wants_usage,
        kind=generation.kind,
        spoken_as=target.adapter.engine_name if target.adapter else target.base,
    )
    events = assembler.feed(first)
    if assembler.fault:
        # Some refusals come from the engine as the first event of a stream.
        raise assembler.fault
    return HeldStream(
        _events(events, answers, assembler, _Patience(deadline, idle_s), parts.metrics, account),
        media_type=_EVENT_STREAM,
        headers={**_STREAM_HEADERS, VERSION_HEADER: target.version},
    )


def _whole(answer: dict[str, Any], target: Target, parts: Parts, account: Account) -> Response:
    usage = answer.get("usage") or {}
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    parts.metrics.tokens(model=target.model, version=target.version, prompt=prompt, completion=completion)
    account.settle(prompt, completion)
    return JSONResponse(
        stamped(answer, model=target.model, version=target.version), headers={VERSION_HEADER: target.version}
    )


@dataclass
class _Patience:
    """How long a stream is waited for: until its deadline, and not so long for any one event."""

    deadline: float
    idle_s: float

    def until(self) -> float:
        return min(self.deadline, asyncio.get_running_loop().time() + self.idle_s)

    def verdict(self) -> FlywheelError:
        """Why the time is over."""
        ended = asyncio.get_running_loop().time() >= self.deadline
        return out_of_time() if ended else fell_silent(self.idle_s)


async def _events(
    events: list[bytes],
    answers: AsyncIterator[Answer],
    assembler: StreamAssembler,
    patience: _Patience,
    metrics: GatewayMetrics,
    account: Account,
) -> AsyncIterator[bytes]:
    """The client's events."""
    try:
        if events:
            yield b"".join(events)
        try:
            while True:
                async with asyncio.timeout_at(patience.until()):
                    answer = await anext(answers, None)
                if answer is None:
                    break
                assert isinstance(answer, bytes)
                if made := assembler.feed(answer):
                    yield b"".join(made)
            last = assembler.close()
        except FlywheelError as error:
            last = assembler.fail(error)
        except TimeoutError:
            last = assembler.fail(patience.verdict())
        account.trace.broke = assembler.fault is not None
        yield b"".join(last)
    finally:
        metrics.tokens(
            model=assembler.model,
            version=assembler.version,
            prompt=assembler.usage.prompt_tokens,
            completion=assembler.usage.completion_tokens,
        )
        _settle(account, assembler)


def _settle(account: Account, assembler: StreamAssembler) -> None:
    """By the usage, which is the last thing that a stream says. Who leaves before it does not get the rest for free."""
    if assembler.usage.prompt_tokens + assembler.usage.completion_tokens:
        account.settle(assembler.usage.prompt_tokens, assembler.usage.completion_tokens)
    elif assembler.fault is None:
        account.reservation.keep()


async def _close(answers: AsyncIterator[Answer]) -> None:
    if (close := getattr(answers, "aclose", None)) is not None:
        await close()


def _add_embeddings(app: FastAPI, parts: Parts, config: GatewayConfig, access: Access, aside: Aside) -> None:
    async def embedded(
        request: Request,
        caller: Caller,
        name: str,
        estimated: int,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> tuple[Encoder, Embedded]:
        """The model that `name` is, and its vectors of `texts`; counted and charged."""
        model = models.embedder(parts.served, name)
        trace = trace_of(request)
        trace.model, trace.version = model.name, model.version
        reservation = access.reserve_tokens(request, caller, estimated)
        async with asyncio.timeout(config.request_timeout_s):
            made = await parts.embedders[model.name].embed(
                texts, input_type=input_type, dimensions=dimensions, truncate=truncate
            )
        count = sum(made.tokens)
        parts.metrics.tokens(model=model.name, version=model.version, prompt=count, completion=0)
        trace.prompt_tokens = count
        reservation.settle(count)
        return model, made

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        caller = access.admit(request, "infer")
        content = await read_body(request, config.max_request_bytes)
        body, estimated = await aside.run(len(content), _read, schemas.EmbeddingsBody, content)
        caller.require_model(body.model)
        model, made = await embedded(
            request,
            caller,
            body.model,
            estimated,
            body.input,
            input_type=body.input_type,
            dimensions=body.dimensions,
            truncate=body.truncate,
        )
        answer = await aside.run(
            made.vectors.nbytes,
            schemas.embeddings_content,
            model.name,
            made.vectors,
            made.tokens,
            body.encoding_format,
        )
        return Response(answer, media_type="application/json", headers={VERSION_HEADER: model.version})

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        caller = access.admit(request, "infer")
        content = await read_body(request, config.max_request_bytes)
        body, estimated = await aside.run(len(content), _read, schemas.ScoreBody, content)
        caller.require_model(body.model)
        model, made = await embedded(request, caller, body.model, estimated, [*body.queries, *body.documents])
        scores = similarity(made.vectors[: len(body.queries)], made.vectors[len(body.queries) :])
        request_id = f"score-{trace_of(request).request_id}"
        answer = schemas.score_response(
            model.name, scores, sum(made.tokens), request_id=request_id, created=int(time.time())
        )
        return JSONResponse(answer, headers={VERSION_HEADER: model.version})


def _read(body_class: type[schemas.Body], content: bytes) -> tuple[schemas.Body, int]:
    """The body, and the tokens that it may need."""
    body, raw = schemas.parse(body_class, content)
    return body, estimate(raw)


def similarity(queries: NDArray[np.float32], documents: NDArray[np.float32]) -> list[float]:
    """Cosine of each document [N, D] with its query [N, D], or with the one query [1, D]."""
    lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
    found: list[float] = ((queries * documents).sum(axis=1) / lengths).tolist()
    return found


def _add_reranking(app: FastAPI, parts: Parts, config: GatewayConfig, access: Access, aside: Aside) -> None:
    @app.post("/v1/rerank")
    async def rerank(request: Request) -> Response:
        caller = access.admit(request, "infer")
        content = await read_body(request, config.max_request_bytes)
        body, estimated = await aside.run(len(content), _pairs, content)
        caller.require_model(body.model)
        model = models.reranker(parts.served, body.model)
        if parts.reranker is None:
            raise RequestError("This application serves no reranker.", status=404, code="model_not_found")
        trace = trace_of(request)
        trace.model, trace.version = model.name, model.version
        reservation = access.reserve_tokens(request, caller, estimated)
        async with asyncio.timeout(config.request_timeout_s):
            made = await parts.reranker.rerank(body.query, body.texts, truncate=body.truncate)
        count = sum(made.tokens)
        parts.metrics.tokens(model=model.name, version=model.version, prompt=count, completion=0)
        trace.prompt_tokens = count
        reservation.settle(count)
        answer = schemas.rerank_response(
            model.name,
            made.scores,
            count,
            request_id=f"rerank-{trace.request_id}",
            top_n=body.top_n,
            documents=body.texts if body.return_documents else None,
        )
        return JSONResponse(answer, headers={VERSION_HEADER: model.version})


def _pairs(content: bytes) -> tuple[schemas.RerankBody, int]:
    """The body, and the tokens that it may need: the query is read again with each document."""
    body, estimated = _read(schemas.RerankBody, content)
    return body, estimated + (len(body.documents) - 1) * estimate({"query": body.query})


def _documents(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The documents to keep, and the tokens that they may need."""
    body, estimated = _read(schemas.DocumentsBody, content)
    return [document.model_dump(exclude_none=True) for document in body.documents], estimated


def _add_collections(app: FastAPI, parts: Parts, config: GatewayConfig, access: Access, aside: Aside) -> None:
    def collections() -> Collections:
        if parts.collections is None:
            raise RequestError("This application serves no collections.", status=404, code="collection_not_found")
        return parts.collections

    @app.post("/v1/collections/{name}/documents")
    async def write(request: Request, name: str) -> Response:
        caller = access.admit(request, "index")
        content = await read_body(request, config.max_request_bytes)
        documents, estimated = await aside.run(len(content), _documents, content)
        reservation = access.reserve_tokens(request, caller, estimated)
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
        checks = {base.part: _base_state(parts, base) for base in parts.served.bases}
        checks |= {one.part: _state(parts.embedders[one.name]) for one in parts.served.embedders}
        if parts.reranker is not None:
            checks["reranking"] = _state(parts.reranker)
        found = dict(zip(checks, await asyncio.gather(*checks.values()), strict=True))
        # The registry may be away: the last snapshot serves on, so that alone makes nothing unwell.
        status = _worst(state.get("status", "unavailable" if "error" in state else "ok") for state in found.values())
        content = {"status": status, "registry": parts.feed.describe(), **found}
        return JSONResponse(content, status_code=503 if status == "unavailable" else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        # `admin`: it names every model and all traffic, also of those that a key which may only infer cannot ask for.
        access.admit(request, "admin")
        return Response(parts.metrics.render(), media_type=gateway_metrics.CONTENT_TYPE)


async def _base_state(parts: Parts, base: Base) -> dict[str, Any]:
    """A base that cannot speak for itself is still called by its name."""
    return {"model": base.name, **await _state(parts.backends[base.name].engine)}


def _worst(states: Iterable[str]) -> str:
    return max(states, key=_STANDINGS.index, default=_STANDINGS[0])


async def _state(part: Engine | Embedder | Reranker) -> dict[str, Any]:
    """What a part says of itself, or why it does not."""
    try:
        async with asyncio.timeout(_HEALTH_WAIT_S):
            return await part.describe()
    except (FlywheelError, TimeoutError) as error:
        return problem(error).body()
