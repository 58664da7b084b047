"""Settings of the gateway."""

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from cluster.config import Config


class GatewayConfig(Config):
    """Where the HTTP side listens and how long it waits."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1)
    """Gateways behind the one address. Each lets a key have its share of its requests and tokens a minute."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Longest answer, from the request to its last byte."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client may take to send its body."""
    idle_timeout_s: float = Field(default=60.0, gt=0)
    """Longest silence within a stream that has begun; then it ends with an error event."""
    max_request_bytes: int = Field(default=8 << 20, ge=1024)
    max_held_bytes: int = Field(default=128 << 20, ge=1024)
    """Bodies of all requests that one gateway replica has, as they came, and answers that are on their way out. The
    next is told 429. Read, a text takes as much again, and a token id up to nine times what it took."""
    max_choices: int = Field(default=128, ge=1)
    """Answers that one generation may ask for: `n` to each of its prompts."""
    max_running: int = Field(default=64, ge=1)
    """Generations that one gateway replica has in the hands of each replica of a base; more wait their fair turn."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests that wait for a turn, of all callers; the next is told 429."""
    max_waiting_per_caller: int = Field(default=64, ge=0)
    max_wait_s: float = Field(default=20.0, gt=0)
    """Longest wait for a turn. Who would wait longer is told 429 at once, with when to ask again."""
    snapshot_poll_s: float = Field(default=10.0, gt=0)
    """Longest wait of one long poll for a new registry snapshot."""
    require_keys: bool = True
    """Whether every route but `/healthz` needs an API key (`flywheel keys create`)."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the gateway."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _one_fits(self) -> Self:
        if self.max_held_bytes < self.max_request_bytes:
            raise ValueError(
                f"max_held_bytes {self.max_held_bytes} is less than max_request_bytes {self.max_request_bytes}: the "
                "largest body could never come; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _closed_to_strangers(self) -> Self:
        if not self.require_keys and not self.loopback:
            raise ValueError(
                f"require_keys: false would open {self.host!r} to everybody who can reach it; leave it out and run "
                "`flywheel keys create NAME`, or set host to 127.0.0.1"
            )
        return self
