"""The vLLM deployment: one base model, with adapters on top, that is only ready once it is known to be right.

This is where a request becomes a vLLM call: `generate` → Ray's engine → vLLM's own server code.
It knows adapters by version id, path and digest. It knows no aliases, and of the registry only that it likes to hear
what a replica holds: it serves on when the registry is away. `wire` knows the HTTP.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from ray.serve.llm import LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

from actors.evaluation.parity import ParityVerdict, reference
from actors.registry.client import RegistryHandle
from actors.registry.serving import ServingReport
from cluster.errors import DependencyError
from cluster.models import obtain, require_signed
from cluster.signing import Verifier
from cluster.storage import Home
from deployments.llm import failures, templates
from deployments.llm._ray import (
    EngineAdapters,
    EngineDeadError,
    ErrorResponse,
    OneProcessEngine,
    RawRequestInfo,
    VLLMClientError,
    VLLMEngine,
    find_tokenization,
    use_weights,
)
from deployments.llm.adapters import AdapterCache
from deployments.llm.config import LLMConfig
from deployments.llm.keep import Keeper
from deployments.llm.metrics import AdapterMetrics
from deployments.llm.parity import check
from deployments.llm.protocol import Answer, Generation, Kind
from deployments.llm.resident import ResidentAdapters
from deployments.llm.scaling import Demand
from deployments.llm.wire import Outlet
from deployments.logs import join_serve
from deployments.reporting import Reporter, node_address, whoami

_REQUESTS: dict[Kind, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletionRequest),
    "completions": TypeAdapter(CompletionRequest),
    "tokenize": TypeAdapter(TokenizeRequest),
    "detokenize": TypeAdapter(DetokenizeRequest),
}
ENGINE_LOOK_S = 0.25
LAST_WORDS_S = 0.5
"""From the engine's death to the end of its replica: open streams get their error event meanwhile."""

KEEP_WAIT_S = 30.0
"""How long a replica puts off being ready for the adapters of `llm.keep`."""
REGISTRY_PATIENCE_S = 4.0

logger = logging.getLogger(__name__)


class LLMDeployment(LLMServer):
    """One replica: an engine, its adapter cache, and the verdict of its parity check."""

    async def __init__(self, llm_config: Any, *, settings: LLMConfig) -> None:  # type: ignore[misc]  # as Ray's is
        join_serve()
        started = time.monotonic()
        home = Home.current()
        self._settings = settings
        # Weights come to the node where they are needed, not to the machine that built the application.
        self._model = await asyncio.to_thread(obtain, settings.model, home)
        # The engine and the reference of the parity check load these files, both in the lifetime of this replica.
        await asyncio.to_thread(require_signed, self._model, home, Verifier())
        use_weights(llm_config, str(self._model.path))
        self._base: str = llm_config.model_id
        self._source, self._node = whoami()
        self._reporter = Reporter(self._holdings)
        self._verdict: ParityVerdict | None = None
        self._in_hand: Counter[str] = Counter()
        self._running = 0
        self._unanswered = 0
        self._heard = time.monotonic()
        self._beat = 0
        self._demand = Demand()
        # The reference's forward takes seconds, the first time; the engine starts meanwhile.
        expected = asyncio.to_thread(reference, self._model, home) if settings.parity_check else None
        computing = asyncio.create_task(expected) if expected else None
        await super().__init__(
            llm_config,
            engine_cls=OneProcessEngine if llm_config.accelerator_config.kind == "cpu" else VLLMEngine,
        )
        find_tokenization(self.engine)
        self._metrics = AdapterMetrics()
        self._adapters = ResidentAdapters(
            AdapterCache(home, max_rank=settings.max_lora_rank, base=self._model.path),
            EngineAdapters(self.engine),
            limit=settings.max_adapters,
            base=self._base,
            changed=self._adapters_changed,
        )
        source = RegistryHandle(patience_s=REGISTRY_PATIENCE_S)
        self._keeper = Keeper(settings.keep, self._base, source, self._adapters.keep)
        engine_ready = time.monotonic()
        if computing:
            self._verdict = await check(await computing, self._whole_answer, settings.dtype, settings.max_model_len)
            self._refuse_if_wrong(self._verdict)
        else:
            await self._warm_up()
        self._outlet = Outlet(self.generate, host=node_address())
        self._address = await self._outlet.start()
        self._reporter.start()
        await self._keeper.start(wait_s=KEEP_WAIT_S)
        self._watch = asyncio.create_task(self._end_with_the_engine(), name="engine-watch")
        logger.info(
            "%s is ready: engine %.1f s, warm-up and parity %.1f s; parity: %s",
            self._base,
            engine_ready - started,
            time.monotonic() - engine_ready,
            self._verdict or "not checked",
        )

    async def record_replica_metadata(self) -> dict[str, str]:
        """Serve's hook: what it tells every handle of this replica, once it is ready."""
        return {**self._address.published(), **self._settings.build.publish()}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve's hook: what the handles' routers are told again and again (`gateway.placement`, `fleet.Replica`)."""
        self._beat += 1
        return {
            "beat": self._beat,
            "slots": self._settings.max_adapters,
            "resident": {name: self._in_hand[name] for name in self._adapters.names},
            "tokens_in_flight": self._in_hand.total(),
            "running": self._running - self._unanswered,
            # Of vLLM's own queue only a logger hears. A stream without a first token is in it, or in its first step.
            "waiting": self._unanswered,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what its autoscaler is told (`scaling`)."""
        return self._demand.figures(self._running, time.monotonic())

    async def generate(self, generation: Generation) -> AsyncGenerator[Answer]:
        """Run one generation: one whole response, or pieces of server-sent events if `body.stream` is true.

        Raises `RequestError` for what the client can mend, `CapacityError` and `DependencyError`. A fault of the
        engine after the first item is an error event in the stream. The outlet calls it (`wire`).
        """
        name = generation.adapter.engine_name if generation.adapter else ""
        unanswered = 1 if generation.body.get("stream") else 0  # a whole answer begins when it ends
        self._heard = time.monotonic() if self._running == 0 else self._heard
        self._running += 1
        self._unanswered += unanswered
        self._in_hand[name] += generation.tokens
        self._demand.heard(generation.gateway, generation.waiting, time.monotonic())
        try:
            async with aclosing(self._generate(generation)) as answers:
                async for answer in answers:
                    self._heard = time.monotonic()
                    self._unanswered -= unanswered
                    unanswered = 0
                    yield answer
        finally:
            self._running -= 1
            self._unanswered -= unanswered
            self._in_hand[name] -= generation.tokens

    async def describe(self) -> dict[str, Any]:
        """Facts for health and for people: which weights, which precision, what the parity check found."""
        try:
            await self.check_health()
        except EngineDeadError:
            raise failures.engine_lost() from None
        return {
            "replica": self._source,
            "node": self._node,
            "model": self._base,
            "digest": self._model.digest,
            "dtype": self._settings.dtype,
            "running": self._running,
            **self._adapters.describe(),
            "keep_problems": dict(self._keeper.problems),
            "parity": asdict(self._verdict) if self._verdict else None,
        }

    async def engine_adapters(self) -> list[str]:
        """What vLLM itself holds, by its own names: the truth that `describe` is checked against."""
        return sorted(await EngineAdapters(self.engine).held())

    def _holdings(self) -> ServingReport:
        """Which versions this replica holds now and can answer with: the lineage's last but two links."""
        held = list(self._adapters.versions)
        if self._settings.version is not None:
            held.append(self._settings.version)
        return ServingReport(source=self._source, node=self._node, holds=tuple(held))

    async def _generate(self, generation: Generation) -> AsyncGenerator[Answer]:
        request = self._parse(generation)
        # The lease on an adapter ends with the stream, however that ends.
        lease = self._adapters.used(generation.adapter) if generation.adapter else nullcontext(None)
        try:
            async with lease as template:
                if template is not None and "messages" in generation.body:
                    request.chat_template = template
                async with aclosing(self._start(request, generation)) as answers:
                    async for answer in answers:
                        yield _answer(answer, generation.kind)
        except EngineDeadError:
            raise failures.engine_lost() from None
        except VLLMClientError as error:
            raise failures.bad_request(str(error), generation.kind, param=getattr(error, "parameter", None)) from None

    def _parse(self, generation: Generation) -> Any:
        if generation.kind in ("chat", "tokenize"):
            templates.refuse_in(generation.body)
        name = generation.adapter.engine_name if generation.adapter else self._base
        try:
            # The engine's id holds the client's, so that it is found by it. The rest is ours: two requests with one id
            # would answer each other.
            request_id = f"{generation.request_id}-{uuid.uuid4().hex[:8]}"
            facts = {**generation.body, "model": name, "request_id": request_id}
            return _REQUESTS[generation.kind].validate_python(facts)
        except ValidationError as error:
            raise failures.from_validation(error, generation.body) from None
        except (VLLMClientError, ValueError) as error:
            raise failures.bad_request(str(error), generation.kind, param=getattr(error, "parameter", None)) from None

    def _start(self, request: Any, generation: Generation) -> AsyncGenerator[Any]:
        # Not `LLMServer.chat`: it takes the adapter from the options of a call by Ray, and holds pieces back 50 ms so
        # that there are fewer calls.
        answers: AsyncGenerator[Any] = getattr(self.engine, generation.kind)(request, RawRequestInfo(headers={}))
        return answers

    def _adapters_changed(self) -> None:
        """The registry and the metrics hear what is resident, not what was asked for."""
        self._reporter.soon()
        self._metrics.show(self._adapters.versions)

    async def _end_with_the_engine(self) -> None:
        """A replica without an engine is of no use, and Serve calls it unwell only when three checks in a row failed.

        A process that has ended it replaces at once, and no handle asks it again. An engine that hangs is no better.
        """
        try:
            while not self._stalls():
                await asyncio.sleep(ENGINE_LOOK_S)
                await self.engine.check_health()
            logger.error("The engine of %s has said nothing for %g s.", self._base, self._settings.stall_timeout_s)
        except EngineDeadError:
            logger.error("The engine of %s has died.", self._base)
        logger.error("The replica of %s ends, so that Serve starts another.", self._base)
        await asyncio.sleep(LAST_WORDS_S)
        os._exit(1)  # not `sys.exit`: in a task it would only end the task

    def _stalls(self) -> bool:
        return self._running > 0 and time.monotonic() - self._heard > self._settings.stall_timeout_s

    def _refuse_if_wrong(self, verdict: ParityVerdict) -> None:
        if not verdict.passed:
            raise DependencyError(
                f"The engine does not compute what {self._base} computes: {verdict}.",
                hint="Try llm.dtype: float32. If that helps, deployments/engine_plugin has not mended this CPU.",
                retryable=False,
            )

    async def _warm_up(self) -> None:
        # The first request with log-probabilities compiles a kernel (12 s on a busy laptop): before, not in, traffic.
        await self._whole_answer({"prompt": "Hello", "max_tokens": 2, "temperature": 0.0, "logprobs": 1})

    async def _whole_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """A completion by the base, asked inside this process."""
        generation = Generation(kind="completions", body=body, request_id="start")
        async for answer in self._generate(generation):
            if isinstance(answer, dict):
                return answer
        raise failures.engine_lost()


def _answer(item: Any, kind: Kind) -> Answer:
    """One item of Ray's stream as plain values; an error object becomes an exception."""
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if isinstance(item, ErrorResponse):
        raise failures.from_report(item.error.model_dump(), kind)
    assert isinstance(item, BaseModel)
    return item.model_dump(mode="json")
