"""Settings of one embedding deployment."""

from typing import Annotated

from pydantic import Field

from cluster.config import Config
from cluster.models import served_name
from deployments.batching.config import EncoderConfig


class PromptsConfig(Config):
    """Text before an input, where the model's own is to be replaced; `""` for none."""

    query: str | None = None
    document: str | None = None
    default: str | None = None
    """Before an input of which the caller says neither; before both where there is no other."""


class EmbeddingConfig(EncoderConfig):
    """One embedding model.

    `flywheel serve` also takes a registered embedder as `model`, as `name@alias` or `name/3`: clients ask for `name`.
    """

    version: str | None = Field(default=None, pattern=r"^[^@/]+/[1-9][0-9]{0,8}$")
    """The registered version whose folder `model` is. `flywheel serve` sets it; nobody else need."""
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Lengths to which vectors may be cut on demand, beside the model's own. Unset: what its config or card says."""
    prompts: PromptsConfig = PromptsConfig()

    @property
    def served_as(self) -> str:
        """The name that clients ask for."""
        # Before `flywheel serve` has found a registered version, its alias is still there, and no part of the name.
        return self.version.partition("/")[0] if self.version else served_name(self.model.partition("@")[0])
