"""Settings of one embedding deployment."""

from typing import Annotated

from pydantic import Field

from cluster.config import Config
from deployments.batching.config import EncoderConfig


class PromptsConfig(Config):
    """Text before an input, where the model's own is to be replaced; `""` for none."""

    query: str | None = None
    document: str | None = None
    default: str | None = None
    """Before an input of which the caller says neither; before both where there is no other."""


class EmbeddingConfig(EncoderConfig):
    """One embedding model."""

    dimensions: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Lengths to which vectors may be cut on demand, beside the model's own. Unset: what its config or card says."""
    prompts: PromptsConfig = PromptsConfig()
