"""Serve's seam for the choice of a replica.

Alone in its module: Serve copies the module of a router by value into every process that has a handle, and the class
of a request's `Router` must be one and the same there.
"""

from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.gateway.placement import Router


class PlacementRouter(RequestRouter):
    """Serve's seam for the choice of a replica. Calls that carry no `Router` (health) go anywhere."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        carried = pending_request.args[0] if pending_request.args else None
        return carried.ranked(candidate_replicas) if isinstance(carried, Router) else [candidate_replicas]
