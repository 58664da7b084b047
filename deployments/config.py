"""Settings of the whole Serve application: it only composes its parts'."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, field_serializer, model_validator

from cluster.config import Config
from cluster.models import served_name
from deployments.embedding.config import EmbeddingConfig
from deployments.gateway.config import GatewayConfig
from deployments.llm import registered
from deployments.llm.config import LLMConfig, ReplicaRange
from deployments.reranking.config import RerankingConfig
from deployments.search.config import SearchConfig


def _several(written: Any) -> Any:
    """One base is written without a list; its faults are then named as it was written."""
    if written is None:
        return ()
    return (LLMConfig.model_validate(written),) if isinstance(written, Mapping | LLMConfig) else written


class ServeConfig(Config):
    """gateway → LLM engines with adapters; gateway → embedder; gateway → reranker; gateway → collections."""

    name: str = "flywheel"
    gateway: GatewayConfig = GatewayConfig()
    llm: Annotated[tuple[LLMConfig, ...], BeforeValidator(_several)] = ()
    """The base models, each an engine of its own: one mapping, or a list of them."""
    embedding: EmbeddingConfig | None = None
    reranking: RerankingConfig | None = None
    search: SearchConfig = SearchConfig()

    @property
    def engines(self) -> dict[str, LLMConfig]:
        """Each base by the name of its Serve deployment: `llm` is the first, `llm-NAME` every other.

        So a base that is added below another changes nothing of what runs.
        """
        return {f"llm-{base.served_as}" if place else "llm": base for place, base in enumerate(self.llm)}

    def engine_of(self, model: str) -> LLMConfig | None:
        """The base that serves `model` (a name, an id or a path), or else the first.

        A recipe may train on one model and serve what came of it, under another name.
        """
        named = (base for base in self.llm if base.served_as == served_name(model))
        return next(named, next(iter(self.llm), None))

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        # Of `tickets/3` only the registry knows whether it is a version or an id; `flywheel serve` checks again.
        known = [base for base in self.llm if not ("/" in base.model and registered.may_be(base))]
        named = [(base.served_as, f"llm.model {base.model!r}") for base in known]
        for part, encoder in (("embedding", self.embedding), ("reranking", self.reranking)):
            if encoder:
                named.append((encoder.served_as, f"{part}.model {encoder.model!r}"))
        taken: dict[str, str] = {}
        for name, what in named:
            if name in taken:
                raise ValueError(
                    f"{taken[name]} and {what} would both be served as {name!r}; leave one out, or give its folder "
                    "another name"
                )
            taken[name] = what
        return self

    @field_serializer("llm", mode="wrap")
    def _as_written(self, bases: tuple[LLMConfig, ...], dump: SerializerFunctionWrapHandler) -> Any:
        dumped = dump(bases)
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
