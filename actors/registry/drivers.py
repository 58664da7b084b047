"""Runs whose driver died without a word: who still lives, and closing what will never be closed by its owner.

Ray ends a job when its driver dies, and a run with it; Ray's job table is therefore the heartbeat of every run.
A driver's job id is only unique within one Ray cluster, its node id among all clusters: both are asked for.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from actors.registry.facts import Driver, GateBegun, GateEnded, RunEnded, RunFact
from actors.registry.ledger import Ledger
from cluster.errors import FlywheelError

_MAX_JOBS: Final = 10_000
_TIMEOUT_S: Final = 5
_OVER: Final = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})

Verdicts = Mapping[Driver, str]
"""Why each of these drivers counts as dead."""

_logger = logging.getLogger(__name__)


def current() -> Driver:
    """The driver of the Ray job that this process belongs to."""
    import os

    import ray

    context = ray.get_runtime_context()
    return Driver(job_id=context.get_job_id(), node_id=context.get_node_id(), pid=os.getpid())


def dead(drivers: Iterable[Driver], *, nodes: set[str], jobs: Mapping[str, str]) -> dict[Driver, str]:
    """Those of `drivers` whose node is not among the live `nodes`, or whose job has ended in `jobs` (id to status).

    A job that the table does not know counts as alive: only what is known to be over is over.
    """
    verdicts = {}
    for driver in drivers:
        if driver.node_id not in nodes:
            verdicts[driver] = (
                f"Its driver (process {driver.pid}) is gone: its node left the cluster, or the cluster ended."
            )
        elif jobs.get(driver.job_id) in _OVER:
            verdicts[driver] = f"Its driver (process {driver.pid}) ended without reporting the end."
    return verdicts


def ask_ray(drivers: Iterable[Driver]) -> dict[Driver, str]:
    """`dead`, by the node and job tables of the cluster this process belongs to; nothing if they cannot be read."""
    import ray
    from ray.util.state import list_jobs
    from ray.util.state.exception import RayStateApiException
    from requests import RequestException

    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    try:
        found = list_jobs(
            address=ray.get_runtime_context().gcs_address,
            limit=_MAX_JOBS,
            timeout=_TIMEOUT_S,
            raise_on_missing_output=False,
        )
    except (RayStateApiException, RequestException, ConnectionError, RuntimeError) as error:
        _logger.info("Ray's job table cannot be read (is the dashboard on?): %s", error)
        found = []
    return dead(
        drivers,
        nodes=nodes,
        jobs={job.job_id: str(getattr(job.status, "value", job.status)) for job in found},
    )


def close_abandoned(ledger: Ledger, find_dead: Callable[[Iterable[Driver]], Verdicts]) -> None:
    """Record as stopped every running run, and as abandoned every open gate, whose driver is dead.

    What nobody drives is left alone.
    """
    state = ledger.state
    facts: list[RunFact | GateBegun] = [*state.running(), *state.measuring()]
    driven = {fact.id: (fact, fact.driver) for fact in facts if fact.driver is not None}
    if not driven:
        return
    verdicts = find_dead({driver for _, driver in driven.values()})
    for fact, driver in driven.values():
        if driver in verdicts:
            why = verdicts[driver]
            ended: RunEnded | GateEnded = (
                RunEnded(run_id=fact.id, status="stopped", verdict=why, presumed=True)
                if isinstance(fact, RunFact)
                else GateEnded(gate_id=fact.id, outcome="abandoned", reason=why)
            )
            try:
                ledger.commit(ended, by="registry")
            except FlywheelError as error:
                # It ended by itself meanwhile, or the log is down: the next round sees.
                _logger.info("%s was not closed: %s", fact.id, error)
