"""Whether a live Ray cluster can place a run's workers. Imports ray."""

from actors.training.config import TrainConfig
from actors.training.fit import require_room, resources_per_worker
from app.session import connected
from cluster.errors import CapacityError


def shortage(config: TrainConfig) -> CapacityError | None:
    """What the cluster lacks for `config`, or None. `DependencyError` if no cluster answers."""
    with connected(start=False):
        try:
            require_room(config, resources_per_worker(config))
        except CapacityError as error:
            return error
    return None
