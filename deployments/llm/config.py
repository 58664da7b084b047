"""Settings of one vLLM deployment."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config import Config
from cluster.models import served_name

AdapterReference = Annotated[str, Field(pattern=r"^[^@/:]+(@[^@/:]+|/[1-9][0-9]{0,8})?$")]


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
    replicas: int = Field(default=1, ge=1)
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
