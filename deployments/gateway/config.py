"""Settings of the gateway."""

from pydantic import Field

from cluster.config import Config


class GatewayConfig(Config):
    """Where the HTTP side listens and how long it waits."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    request_timeout_s: float = Field(default=300.0, gt=0)
    max_request_bytes: int = Field(default=8 << 20, ge=1024)
    snapshot_poll_s: float = Field(default=10.0, gt=0)
    """Longest wait of one long poll for a new registry snapshot."""
