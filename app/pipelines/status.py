"""`flywheel status`: what runs, what is served, and what it stands on."""

from dataclasses import dataclass
from typing import Any

import httpx

from actors.registry import views
from actors.registry.reader import read_state
from app.session import connected
from cluster.errors import ConfigError, DependencyError
from cluster.session import Beacon
from cluster.storage import Home


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


def status(home: Home, *, runs: int = 10) -> Status:
    """The registry's log always; Ray and Serve if a cluster runs; the gateway if it answers."""
    state = read_state(home)
    cluster, applications, trouble = _cluster()
    return Status(
        home=str(home.root),
        cluster=cluster,
        trouble=trouble,
        applications=applications,
        gateway=_gateway(home),
        runs=views.runs(state)[:runs],
        models=views.models(state),
    )


def _cluster() -> tuple[dict[str, Any] | None, dict[str, str], str | None]:
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
            found = serve.status().applications
            return facts, {name: str(application.status.value) for name, application in found.items()}, None
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
