"""`flywheel demo`: one full turn of the wheel, as one readable script.

models → data → train → evaluate → register → serve → index → search, on real parts, in one process tree.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

from actors.data.build import build
from actors.data.version import DataVersion
from actors.evaluation.ranking import Scores
from actors.evaluation.report import EvaluationReport
from actors.training.controller import TrainingResult
from app.display import Display
from app.pipelines import stages
from app.pipelines.ask import Answer, ask
from app.pipelines.index import Indexed, index, pool
from app.pipelines.index import ask as ask_collection
from app.pipelines.serve import running
from app.pipelines.stages import Ground, Registration
from app.pipelines.train import ground
from app.recipe import Recipe
from app.session import connected
from cluster import environment
from cluster.errors import ConfigError
from cluster.models import served_name
from cluster.session import Beacon, require_free_port
from cluster.storage import Home
from cluster.tracking import shown_uri
from deployments.gateway.config import GatewayConfig

STAGES = 8
_QUESTIONS = 4


@dataclass(frozen=True)
class Summary:
    """What the demo did, measured."""

    seconds: float
    stages: dict[str, float]
    result: TrainingResult
    report: EvaluationReport
    registration: Registration
    lineage: tuple[str, ...]
    answers: tuple[Answer, ...]
    indexed: Indexed
    retrieval: Scores
    url: str
    dashboard_url: str | None
    tracking_uri: str
    base_name: str
    adapter_name: str


def run(recipe: Recipe, home: Home, display: Display, *, kept: Callable[[Summary], None] | None = None) -> Summary:
    """Turn the wheel once. `kept`, if given, is called while the application is up; it returns to end it."""
    serving, indexing = recipe.serve, recipe.index
    if serving is None or not serving.llm or not serving.embedding or indexing is None:
        raise ConfigError(
            f"The demo needs serve.llm, serve.embedding and index; {recipe.name!r} lacks one of them.",
            hint="Start from app/recipes/error-triage.yaml.",
        )
    if recipe.registration is None:
        raise ConfigError(f"The demo needs a `register` section; {recipe.name!r} has none.", hint="Add it.")
    if recipe.adapter.kind == "none":
        raise ConfigError(
            "The demo serves a base and an adapter of it side by side; adapter.kind none makes a whole model.",
            hint="`flywheel train` evaluates and registers one; `flywheel serve` with serve.llm.model=NAME@ALIAS "
            "serves it.",
        )
    engine = serving.engine_of(recipe.model.base)
    if engine is None or engine.served_as != served_name(recipe.model.base):
        raise ConfigError(
            f"The demo serves what it trains on; serve.llm serves {', '.join(one.served_as for one in serving.llm)}, "
            f"model.base is {recipe.model.base!r}.",
            hint="Name the same model in both.",
        )
    # Said now, not after five minutes of training.
    require_free_port(serving.gateway.host, serving.gateway.port)
    gateway, key = admitted(serving.gateway)
    served = serving.model_copy(update={"gateway": gateway})
    began = monotonic()

    with connected() as session, ground(recipe, home, display) as standing:
        with display.stage("models"):
            stages.require_kind(standing)
            base, _ = stages.models(standing, recipe.model.base, serving.embedding[0].model)
        with display.stage("data"):
            data = stages.data(standing, base)
            functions = _functions(standing, indexing.source)
        with display.stage("train"):
            result = stages.train(standing, base, data)
        with display.stage("evaluate"):
            report = stages.evaluate(standing, base, data, result)
        with display.stage("register"):
            registration = stages.register(standing, base, data, result, report)

        base_name = engine.served_as
        adapter_name = f"{base_name}:{_reference(registration)}"
        with ExitStack() as up:
            with display.stage("serve"):
                url = up.enter_context(running(served, home, display))
                answers = ask(
                    url,
                    (base_name, adapter_name),
                    data.held_out[:_QUESTIONS],
                    display,
                    max_tokens=recipe.evaluate.max_new_tokens,
                    key=key,
                )
            # Held-out packages only: all of these functions are indexed, and the first ones' docstrings ask for them.
            pairs = pool(functions, home, documents=indexing.documents, splits=("test",))
            with display.stage("index"):
                indexed = index(url, indexing.collection, pairs, display, key=key)
            with display.stage("search"):
                retrieval = ask_collection(url, indexing.collection, pairs[: indexing.queries], display, key=key)
            summary = Summary(
                seconds=monotonic() - began,
                stages=display.times(),
                result=result,
                report=report,
                registration=registration,
                lineage=tuple(f"{link.kind}: {link.id}" for link in standing.registry.lineage(registration.version.id)),
                answers=tuple(answers),
                indexed=indexed,
                retrieval=retrieval,
                url=url,
                dashboard_url=session.dashboard_url,
                tracking_uri=shown_uri(standing.tracking_uri),
                base_name=base_name,
                adapter_name=adapter_name,
            )
            if kept is not None:
                with Beacon.lit(home, address=session.address, gateway_url=url, dashboard_url=session.dashboard_url):
                    kept(summary)
        return summary


def admitted(gateway: GatewayConfig) -> tuple[GatewayConfig, str | None]:
    """`gateway` as the demo runs it, and the API key it asks with: none on loopback, unless the recipe wants keys."""
    if gateway.loopback and "require_keys" not in gateway.model_fields_set:
        gateway = gateway.model_copy(update={"require_keys": False})
    key = environment.api_key() if gateway.require_keys else None
    if gateway.require_keys and key is None:
        raise ConfigError(
            f"The demo asks its own gateway at {gateway.host}, which needs an API key there, and has none.",
            hint="Set serve.gateway.host=127.0.0.1, or run `flywheel keys create demo --role infer --role index` and "
            f"put its secret into {environment.API_KEY}.",
        )
    return gateway, key


def _functions(standing: Ground, source: str) -> DataVersion:
    version = build(source, standing.recipe.data, standing.home, standing.sink)
    stages.record_data(standing.registry, version)
    return version


def _reference(registration: Registration) -> str:
    """By alias if the adapter earned it, else by number: the demo shows what there is."""
    if registration.move is not None:
        return f"{registration.move.name}@{registration.move.alias}"
    return registration.version.id
