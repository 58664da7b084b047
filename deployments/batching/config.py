"""Settings that every encoder has, whatever it makes of a text."""

from typing import Literal

from pydantic import Field

from cluster.config import Config
from cluster.models import served_name


class EncoderConfig(Config):
    """One model that reads many callers' texts in common batches. What may wait is bounded in three measures, because
    a call can be large in each: in texts, in tokens and in bytes. Beyond, 429 with Retry-After."""

    model: str
    """Name in the model store, Hugging Face id or path; the name that clients ask for is its last part."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    max_tokens: int | None = Field(default=None, ge=8)
    """Longest input in tokens; unset: the model's own limit."""
    batch_tokens: int = Field(default=4096, ge=64)
    """Padded tokens of one forward pass at the most."""
    batch_wait_s: float = Field(default=0.005, ge=0)
    max_queued: int = Field(default=4096, ge=1)
    """Texts that may wait."""
    max_queued_tokens: int = Field(default=1 << 20, ge=64)
    """Tokens of all texts that wait."""
    max_queued_bytes: int = Field(default=64 << 20, ge=1024)
    """Bytes of all texts that are not tokenised yet."""
    replicas: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1)
    gpus: float = Field(default=0, ge=0)
    """Share of a GPU for each replica; 0: it works on the CPU."""

    @property
    def served_as(self) -> str:
        """The name that clients ask for."""
        return served_name(self.model)
