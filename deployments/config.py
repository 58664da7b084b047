"""Settings of the whole Serve application: it only composes its parts'."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, field_serializer, model_validator

from cluster.config import Config
from cluster.models import served_name
from deployments import registered
from deployments.embedding.config import EmbeddingConfig
from deployments.gateway.config import GatewayConfig
from deployments.llm.config import LLMConfig, ReplicaRange
from deployments.reranking.config import RerankingConfig
from deployments.search.config import SearchConfig

Served = TypeVar("Served", LLMConfig, EmbeddingConfig)


def _several(one: type[Config]) -> BeforeValidator:
    """One model is written without a list; its faults are then named as it was written."""

    def read(written: Any) -> Any:
        if written is None:
            return ()
        return (one.model_validate(written),) if isinstance(written, Mapping | one) else written

    return BeforeValidator(read)


def _parts(first: str, several: Iterable[Served]) -> dict[str, Served]:
    """Each model by the name of its Serve deployment: `first` for the first, with its name added for every other.

    So one that is added below another changes nothing of what runs.
    """
    return {f"{first}-{one.served_as}" if place else first: one for place, one in enumerate(several)}


def _named(several: Iterable[Served], model: str) -> Served | None:
    served = list(several)
    return next((one for one in served if one.served_as == served_name(model)), next(iter(served), None))


class ServeConfig(Config):
    """gateway → LLM engines with adapters; gateway → embedder; gateway → reranker; gateway → collections."""

    name: str = "flywheel"
    gateway: GatewayConfig = GatewayConfig()
    llm: Annotated[tuple[LLMConfig, ...], _several(LLMConfig)] = ()
    """The base models, each an engine of its own: one mapping, or a list of them."""
    embedding: Annotated[tuple[EmbeddingConfig, ...], _several(EmbeddingConfig)] = ()
    """The embedding models: one mapping, or a list of them. New collections are the first's."""
    reranking: RerankingConfig | None = None
    search: SearchConfig = SearchConfig()

    @property
    def engines(self) -> dict[str, LLMConfig]:
        """Each base by the name of its Serve deployment: `llm`, `llm-NAME`, …"""
        return _parts("llm", self.llm)

    @property
    def embedders(self) -> dict[str, EmbeddingConfig]:
        """Each embedder by the name of its Serve deployment: `embedding`, `embedding-NAME`, …"""
        return _parts("embedding", self.embedding)

    def engine_of(self, model: str) -> LLMConfig | None:
        """The base that serves `model` (a name, an id or a path), or else the first.

        A recipe may train on one model and serve what came of it, under another name.
        """
        return _named(self.llm, model)

    def embedder_of(self, model: str) -> EmbeddingConfig | None:
        """The same of embedding models."""
        return _named(self.embedding, model)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        # Of `tickets/3` only the registry knows whether it is a version or an id; `flywheel serve` checks again.
        written: list[tuple[str, LLMConfig | EmbeddingConfig]] = [
            *(("llm", base) for base in self.llm),
            *(("embedding", embedder) for embedder in self.embedding),
        ]
        named = [
            (one.served_as, f"{part}.model {one.model!r}")
            for part, one in written
            if not ("/" in one.model and registered.may_be(one))
        ]
        if self.reranking:
            named.append((self.reranking.served_as, f"reranking.model {self.reranking.model!r}"))
        taken: dict[str, str] = {}
        for name, what in named:
            if name in taken:
                raise ValueError(
                    f"{taken[name]} and {what} would both be served as {name!r}; leave one out, or give its folder "
                    "another name"
                )
            taken[name] = what
        return self

    @field_serializer("llm", "embedding", mode="wrap")
    def _as_written(self, several: tuple[Config, ...], dump: SerializerFunctionWrapHandler) -> Any:
        dumped = dump(several)
        return dumped[0] if len(dumped) == 1 else dumped

    @model_validator(mode="after")
    def _scale_is_reached(self) -> Self:
        for base in self.llm:
            scale = base.replicas
            if isinstance(scale, ReplicaRange) and scale.target_requests > self.gateway.max_running:
                raise ValueError(
                    f"llm.replicas.target_requests {scale.target_requests} is more than gateway.max_running "
                    f"{self.gateway.max_running}: requests would wait beside replicas that are not full enough for "
                    "another to start; lower the one or raise the other"
                )
        return self
