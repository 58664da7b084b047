"""`flywheel status`: what runs here, what is served, what has been made."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from app.cli.output import AsJson, show, table
from cluster.storage import Home

if TYPE_CHECKING:
    from app.pipelines.status import Status

EXAMPLES = "Example: `flywheel status --json`"


def run(as_json: AsJson = False) -> None:
    """Ray, the application, the latest runs and the registered models of this FLYWHEEL_HOME."""
    from app.pipelines.status import status  # imports ray

    found = status(Home.current())
    show(_facts(found), lambda console: _draw(console, found), as_json=as_json)


def _facts(found: "Status") -> dict[str, Any]:
    return {
        "home": found.home,
        "cluster": found.cluster,
        "trouble": found.trouble,
        "applications": found.applications,
        "deployments": [asdict(each) for each in found.deployments],
        "gateway": found.gateway,
        "runs": [view.model_dump(mode="json") for view in found.runs],
        "models": [view.model_dump(mode="json") for view in found.models],
    }


def _draw(console: Console, found: "Status") -> None:
    if found.cluster is None:
        console.print(f"Ray: {found.trouble}")
    else:
        cpus = found.cluster["resources"].get("CPU", 0)
        free = found.cluster["available"].get("CPU", 0)
        console.print(
            f"Ray: {found.cluster['address']}, {found.cluster['nodes']} nodes, {free:g} of {cpus:g} CPUs free"
        )
    for name, state in found.applications.items():
        console.print(f"Application {name}: {state}")
    if found.deployments:
        parts = [(each.name, each.status, _counted(each.replicas), each.why) for each in found.deployments]
        console.print(table("Deployments", ["deployment", "status", "replicas", "why"], parts))
    if found.gateway is not None:
        console.print(f"Gateway: {found.gateway['url']}, HTTP {found.gateway['status'] or 'no answer'}")
    for part in _parts(found):
        if replicas := [_replica(facts, str(part.get("model", "-"))) for facts in part.get("replicas", ())]:
            columns = ["model", "replica", "running", "adapters in it", "standing"]
            console.print(table("Replicas of language models", columns, replicas))
    if failed := _failed_adapters(found):
        console.print(table("Adapters that could not be loaded", ["version", "last tried", "why"], failed))
    rows = [
        (
            view.run.id,
            view.status,
            max((c.step for c in view.checkpoints), default=None),
            len(view.incidents),
            view.verdict or (view.incidents[-1].verdict if view.incidents else ""),
        )
        for view in found.runs
    ]
    console.print(table("Latest runs", ["run", "status", "last checkpoint", "incidents", "verdict"], rows))
    aliases = [
        (f"{model.name}@{alias}", f"{model.name}/{number}", model.base)
        for model in found.models
        for alias, number in sorted(model.aliases.items())
    ]
    console.print(table("Aliases", ["alias", "version", "base"], aliases))


def _failed_adapters(found: "Status") -> list[tuple[str, str, str]]:
    """Of all replicas that answered, and only while the last try has failed."""
    failed = [each for part in _parts(found) for each in part.get("adapters_failed", {}).items()]
    lost = [each for part in _parts(found) for each in part.get("keep_problems", {}).items()]
    return [(version, fault["at"], fault["why"]) for version, fault in failed] + [
        (name, "-", why) for name, why in lost
    ]


def _parts(found: "Status") -> list[dict[str, Any]]:
    """What the gateway's health says of each part; language models have replicas and adapters."""
    health = found.gateway["health"] if found.gateway else None
    states = health.values() if isinstance(health, dict) else ()
    return [state for state in states if isinstance(state, dict)]


def _replica(facts: dict[str, Any], model: str) -> tuple[str, str, int | None, str, str]:
    standing = facts["error"]["message"] if "error" in facts else "well"
    if "silent_s" in facts:
        standing = f"has said nothing for {facts['silent_s']:g} s"
    name, resident = str(facts.get("replica", "-")), facts.get("adapters", ())
    return str(facts.get("model", model)), name, facts.get("running"), ", ".join(resident) or "none", standing


def _counted(states: dict[str, int]) -> str:
    return ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items()) if count) or "none"
