"""`flywheel status`: what runs, what is served, and what it stands on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatus

from actors.registry import views
from actors.registry.reader import read_state
from app.session import connected
from cluster.errors import ConfigError, DependencyError
from cluster.session import Beacon
from cluster.storage import Home


@dataclass(frozen=True)
class Deployed:
    """One deployment as Serve has it: how many replicas in which state, and why it is not well if it is not."""

    application: str
    name: str
    status: str
    replicas: dict[str, int]
    why: str | None = None


@dataclass(frozen=True)
class Status:
    """One look at an installation. `cluster` and `gateway` are None where nothing runs; `trouble` says why."""

    home: str
    cluster: dict[str, Any] | None
    trouble: str | None
    applications: dict[str, str]
    gateway: dict[str, Any] | None
    runs: tuple[views.RunView, ...]
    models: tuple[views.ModelView, ...]
    deployments: tuple[Deployed, ...] = ()


def status(home: Home, *, runs: int = 10) -> Status:
    """The registry's log always; Ray and Serve if a cluster runs; the gateway if it answers."""
    state = read_state(home)
    cluster, served, trouble = _cluster()
    return Status(
        home=str(home.root),
        cluster=cluster,
        trouble=trouble,
        applications={name: str(application.status.value) for name, application in served.items()},
        deployments=tuple(deployed(served)),
        gateway=_gateway(home),
        runs=views.runs(state)[:runs],
        models=views.models(state),
    )


def deployed(applications: Mapping[str, ApplicationStatusOverview]) -> Iterator[Deployed]:
    """Every deployment of Serve's applications, in their order."""
    for application, overview in applications.items():
        for name, state in overview.deployments.items():
            well = state.status in (DeploymentStatus.HEALTHY, DeploymentStatus.UPDATING)
            yield Deployed(
                application,
                name,
                str(state.status.value),
                {str(getattr(each, "value", each)): count for each, count in state.replica_states.items()},
                None if well or not state.message else reason(state.message),
            )


def reason(message: str) -> str:
    """The last line of what Serve says: of a traceback, that is the error."""
    return message.strip().splitlines()[-1].strip()


def _cluster() -> tuple[dict[str, Any] | None, Mapping[str, ApplicationStatusOverview], str | None]:
    try:
        with connected(start=False) as session:
            import ray
            from ray import serve

            facts = {
                "address": session.address,
                "nodes": sum(1 for node in ray.nodes() if node["Alive"]),
                "resources": ray.cluster_resources(),
                "available": ray.available_resources(),
            }
            return facts, serve.status().applications, None
    except (DependencyError, ConfigError) as error:
        return None, {}, f"{error.message} {error.hint}"


def _gateway(home: Home) -> dict[str, Any] | None:
    beacon = Beacon.read(home)
    if beacon is None or beacon.gateway_url is None:
        return None
    try:
        health = httpx.get(f"{beacon.gateway_url}/healthz", timeout=5)
        return {"url": beacon.gateway_url, "status": health.status_code, "health": health.json()}
    except (httpx.HTTPError, ValueError) as error:
        return {"url": beacon.gateway_url, "status": None, "health": str(error)}
