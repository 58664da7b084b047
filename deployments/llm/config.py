"""Settings of one vLLM deployment."""

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config import Config
from cluster.models import served_name
from deployments.llm.protocol import Build

AdapterReference = Annotated[str, Field(pattern=r"^[^@/:]+(@[^@/:]+|/[1-9][0-9]{0,8})?$")]


class ReplicaRange(Config):
    """As many replicas as the demand asks for: requests in the engines' hands and those that wait for them."""

    min: int = Field(default=1, ge=0)
    max: int = Field(ge=1)
    target_requests: int = Field(default=32, ge=1)
    """Requests that one replica should have, running and waiting. An engine batches: up to some 32 at once each one
    more costs the others little, and beyond that it mostly makes them wait. Half of `gateway.max_running`, so that
    more replicas are on their way before the gateway lets requests wait."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    """How long the demand must have been too large. Short: who waits meanwhile waits for a start as well."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """How long it must have been too small. Long: a start costs half a minute or more, and a full load of weights."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min == 0:
            raise ValueError(
                "min 0 would answer nobody for as long as an engine takes to start, half a minute or more; the least "
                "is 1 (to free the machine, end the application)"
            )
        if self.max < self.min:
            raise ValueError(f"max {self.max} is less than min {self.min}")
        return self


class LLMConfig(Config):
    """One base model, served by vLLM with adapters on top."""

    model: str
    """Name in the model store, Hugging Face id or path; the name that clients ask for is its last part.

    `flywheel serve` also takes a registered whole model, as `name@alias` or `name/3`: clients ask for `name`.
    """
    version: str | None = Field(default=None, pattern=r"^[^@/]+/[1-9][0-9]{0,8}$")
    """The registered version whose folder `model` is. `flywheel serve` sets it; nobody else need."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_model_len: int = Field(default=2048, ge=64)
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] = 16
    max_loras: int = Field(default=4, ge=1)
    """Adapters in one batch."""
    max_adapters: int = Field(default=16, ge=1)
    """Adapters resident in a replica's memory."""
    keep: tuple[AdapterReference, ...] = ()
    """Adapters that every replica loads before it is ready, and never evicts: `name`, `name@alias` or `name/3`.

    They follow the registry: where an alias moves, its new version is loaded, and the old one may go.
    """
    tool_parser: str | None = Field(default=None, min_length=1)
    """vLLM's name for the form in which this model writes its calls of tools, for example `hermes`.

    Unset: a request that brings `tools` is refused unless its `tool_choice` is `none`.
    """
    replicas: Annotated[int, Field(ge=1)] | ReplicaRange = 1
    """A fixed number, or `{min: 1, max: 4}`: then by demand."""
    surge: bool = True
    """Start the new replica of an update before an old one stops. It needs room for one more replica on the cluster;
    without that room, set false: then an update of a single replica is a gap of one start, told as 503."""
    stall_timeout_s: float = Field(default=120.0, ge=10)
    """An engine with requests in hand that has said nothing for this long hangs: its replica ends and is replaced."""
    kv_cache_gib: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    """OpenMP threads of one replica on CPU."""
    parity_check: bool = True
    """Compare the engine with the reference forward before the replica says it is ready."""

    @property
    def served_as(self) -> str:
        """The name that clients ask for."""
        # Before `flywheel serve` has found a registered version, its alias is still there, and no part of the name.
        return self.version.partition("/")[0] if self.version else served_name(self.model.partition("@")[0])

    @property
    def build(self) -> Build:
        """By which replicas and gateways of one deployment know each other; how many replicas there are is no part."""
        said = self.model_dump_json(exclude={"replicas", "surge"})
        return Build(self.served_as, hashlib.sha256(said.encode()).hexdigest()[:16])

    @model_validator(mode="after")
    def _kept_fit(self) -> Self:
        if len(set(self.keep)) > self.max_adapters:
            raise ValueError(
                f"keep names {len(set(self.keep))} adapters, but a replica holds max_adapters {self.max_adapters}"
            )
        return self

    @model_validator(mode="after")
    def _resident_covers_batch(self) -> Self:
        if self.max_adapters < self.max_loras:
            raise ValueError(
                f"max_adapters {self.max_adapters} is less than max_loras {self.max_loras}: "
                "a batch could not hold what it may mix"
            )
        return self
