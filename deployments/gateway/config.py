"""Settings of the gateway."""

from pydantic import Field

from cluster.config import Config


class GatewayConfig(Config):
    """Where the HTTP side listens and how long it waits."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    request_timeout_s: float = Field(default=300.0, gt=0)
    max_request_bytes: int = Field(default=8 << 20, ge=1024)
    max_running: int = Field(default=64, ge=1)
    """Generations that one gateway replica has in the engines' hands at a time; more wait their fair turn."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that wait for a turn, of all callers; the next is told 429."""
    max_waiting_per_caller: int = Field(default=64, ge=0)
    max_wait_s: float = Field(default=20.0, gt=0)
    """Longest wait for a turn. Who would wait longer is told 429 at once, with when to ask again."""
    snapshot_poll_s: float = Field(default=10.0, gt=0)
    """Longest wait of one long poll for a new registry snapshot."""
