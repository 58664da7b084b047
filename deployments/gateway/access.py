"""The gate before every route: whose request it is, what it may ask for, and room for it. Knows Starlette, no ports.

A gateway without keys lets everybody in as one caller without limits, so that routes do not know the difference.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request

from actors.registry.apikeys import ROLES, ApiKey, Role
from cluster.errors import DependencyError
from deployments.gateway.keys import Caller, identify
from deployments.gateway.limits import Limiter, Reservation, estimate
from deployments.gateway.scope import trace_of
from deployments.snapshot import SnapshotFeed

_ANYBODY: Final = Caller(ApiKey("", "anybody", "", ROLES))


class Access:
    """Lets requests in by the keys of the feed's snapshot, as of the moment that each comes."""

    def __init__(
        self,
        feed: SnapshotFeed,
        limiter: Limiter,
        *,
        required: bool,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._feed = feed
        self._limiter = limiter
        self._required = required
        self._now = now

    def admit(self, request: Request, role: Role) -> Caller:
        """Whose request it is; 401, 403 or (no registry yet) 503 otherwise.

        Called before a body is read: strangers do not send us bodies.
        """
        if not self._required:
            return _ANYBODY
        if not self._feed.known:
            # 401 would tell owners of good keys to throw them away.
            raise DependencyError(
                "This gateway has not heard from the registry yet, so it knows no API key.",
                hint="Try again soon; `flywheel status` says whether the registry runs.",
            )
        authorization = request.headers.get("authorization")
        caller = identify(authorization, self._feed.current.keys, role=role, now=self._now())
        trace_of(request).key = caller.id
        return caller

    def reserve(self, request: Request, caller: Caller, body: Mapping[str, Any]) -> Reservation:
        """Room for what `body` asks; 429 if there is none. What is not settled when the request ends is refunded."""
        return self.reserve_tokens(request, caller, estimate(body))

    def reserve_tokens(self, request: Request, caller: Caller, tokens: int) -> Reservation:
        """As `reserve`, for a body that has been estimated already."""
        reservation = self._limiter.reserve(caller.key, tokens)
        trace_of(request).reservation = reservation
        return reservation
