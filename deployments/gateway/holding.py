"""How many bytes of clients' bodies, and of answers to them, one gateway holds at a time. Knows no HTTP.

Each body is bounded by itself where it is read; here all of them are together, or a thousand of the largest would end
the process, and with it everybody's streams.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import RateLimitError

_RETRY_AFTER_S = 1.0


class Holding:
    """The bytes of all requests. Used from one event loop."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.held_bytes = 0

    @contextmanager
    def request(self) -> Iterator["Held"]:
        """One request's bytes, which are given back when it is over."""
        held = Held(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.size

    def require_room(self, size: int) -> None:
        """`RateLimitError` 429 if `size` more would be too many; nothing more (a client that hangs up) never is."""
        if size and self.held_bytes + size > self._most:
            raise RateLimitError(
                f"This gateway holds {self.held_bytes} bytes of requests and answers; {size} more would be over its "
                f"limit of {self._most}.",
                retry_after_s=_RETRY_AFTER_S,
                hint="Ask again later, send less at once, or raise gateway.max_held_bytes.",
            )


class Held:
    """The bytes of one request: its body as it came, and what is on its way out."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self.size = 0

    def take(self, size: int) -> None:
        """A piece of the body has come. Raises `RateLimitError`."""
        self._holding.require_room(size)
        self._add(size)

    @contextmanager
    def leaving(self, size: int) -> Iterator[None]:
        """A piece of the answer is being sent. It is there already, so it is counted and never refused."""
        self._add(size)
        try:
            yield
        finally:
            self._add(-size)

    def _add(self, size: int) -> None:
        self.size += size
        self._holding.held_bytes += size
