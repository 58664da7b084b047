"""Whether a live Ray cluster can place a run's workers. Imports ray."""

import ray

from actors.training.config import TrainConfig
from actors.training.fit import require_room
from app.session import connected
from cluster.errors import CapacityError


def shortage(config: TrainConfig) -> CapacityError | None:
    """What the cluster lacks for `config`, or None. `DependencyError` if no cluster answers."""
    with connected(start=False):
        on_gpu = ray.cluster_resources().get("GPU", 0) >= config.parallel.workers.min
        try:
            require_room(config, {"GPU": 1} if on_gpu else {"CPU": 1})
        except CapacityError as error:
            return error
    return None
