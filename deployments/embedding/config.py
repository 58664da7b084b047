"""Settings of one embedding deployment."""

from typing import Annotated, Literal

from pydantic import Field

from cluster.config import Config


class PromptsConfig(Config):
    """Text before an input, where the model's own is to be replaced; `""` for none."""

    query: str | None = None
    document: str | None = None
    default: str | None = None
    """Before an input of which the caller says neither; before both where there is no other."""


class EmbeddingConfig(Config):
    """One embedding model."""

    model: str
    dtype: Literal["bfloat16", "float32"] = "float32"
    max_tokens: int | None = Field(default=None, ge=8)
    """Longest input in tokens; unset: the model's own limit."""
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Lengths to which vectors may be cut on demand, beside the model's own. Unset: what its config or card says."""
    prompts: PromptsConfig = PromptsConfig()
    batch_tokens: int = Field(default=4096, ge=64)
    """Padded tokens of one forward pass at the most."""
    batch_wait_s: float = Field(default=0.005, ge=0)
    max_queued: int = Field(default=4096, ge=1)
    """Texts that may wait; beyond, 503 with Retry-After."""
    replicas: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    gpus: float = Field(default=0, ge=0)
    """Share of a GPU for each replica; 0: it works on the CPU."""
