"""How many replicas the demand asks for: what a replica says of it, and what Serve's autoscaler makes of that. Pure.

Serve counts calls that it carries. Ours are only reserved by it (`choose_replica`) and then go past it, and most of a
crowd waits in the gateways' fair queues, where Serve does not look (ray 2.60). So the demand takes another way: each
generation tells its replica how many wait behind it at its gateway, a replica reports that and what it has in hand by
Serve's hook `record_autoscaling_stats`, and the policy adds both up, with what waits in Serve for a replica.

Serve copies the policy by value into its controller, which may know no code of ours: this module imports none.
"""

import math
from typing import Any

IN_HAND = "in_hand"
WAITING = "waiting:"
"""… and the gateway's name: several replicas hear of one queue, which counts once."""
BELIEVED_S = 10.0
"""A queue moves with every answer that ends. Who says nothing of it for this long has none, or is gone."""
FORGOTTEN_S = 60.0
LOOK_BACK_S = 15.0
"""The demand is a mean over this long, so that a burst of a second starts no engine."""


class Demand:
    """What one replica knows of the demand: its own requests, and the gateways' queues."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[int, float]] = {}

    def heard(self, gateway: str, waiting: int, now_s: float) -> None:
        """So many wait at that gateway, it said."""
        self._queues[gateway] = (waiting, now_s)

    def figures(self, in_hand: int, now_s: float) -> dict[str, float]:
        """For `record_autoscaling_stats`. A queue that is over is told as 0 for a while: the last word would stand."""
        self._queues = {name: told for name, told in self._queues.items() if now_s - told[1] < FORGOTTEN_S}
        queues = {
            f"{WAITING}{name}": float(waiting if now_s - at < BELIEVED_S else 0)
            for name, (waiting, at) in self._queues.items()
        }
        return {IN_HAND: float(in_hand), **queues}


def desired_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: the demand ÷ `target_ongoing_requests`. Serve adds its delays and bounds."""
    figures = context.aggregated_metrics or {}
    in_hand = figures.get(IN_HAND)
    if not in_hand:
        # No replica has reported yet: no news is not that nobody asks.
        return max(1, context.target_num_replicas), {}
    waiting = sum(max(told.values()) for name, told in figures.items() if name.startswith(WAITING) and told)
    demand = sum(in_hand.values()) + waiting + (context.total_queued_requests or 0.0)
    return max(1, math.ceil(demand / context.config.target_ongoing_requests)), {}
