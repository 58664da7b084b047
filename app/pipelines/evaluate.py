"""`flywheel evaluate`: a registered version against base and champion, on the recipe's held-out data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.data.build import build
from actors.data.version import DataVersion
from actors.evaluation.evaluate import Champion, evaluate
from actors.evaluation.report import EvaluationReport
from actors.evaluation.retrieval import RetrievalReport
from actors.registry.client import RegistryClient
from actors.registry.facts import AliasMove, EvaluationFact, GateBegun, GateEnded, Version
from actors.registry.rules import LEGAL
from app.display import Display
from app.pipelines import stages
from app.pipelines.stages import Ground
from app.pipelines.train import ground
from app.recipe import Recipe
from app.session import connected
from cluster.errors import ConfigError
from cluster.models import StoredModel, served_name
from cluster.storage import Home

_Measure = Callable[[Version, Champion | None], EvaluationReport | RetrievalReport]


@dataclass(frozen=True)
class Measured:
    """A version, what was measured of it, and the alias that moved to it."""

    version: Version
    report: EvaluationReport | RetrievalReport
    move: AliasMove | None


def run(recipe: Recipe, home: Home, display: Display, *, reference: str | None, promote: bool) -> Measured:
    """Measure `reference` (default: the newest version of the recipe's name). Needs or starts Ray."""
    wanted = recipe.registration
    if reference is None:
        if wanted is None:
            raise ConfigError("This recipe registers nothing.", hint="Name a version: --version tickets/2.")
        reference = wanted.name
    if promote and (wanted is None or wanted.on_pass is None):
        raise ConfigError("--promote needs `register: {on_pass: ALIAS}` in the recipe.", hint="Add it.")
    with connected(), ground(recipe, home, display) as standing:
        found = standing.registry.show(reference)
        version = found.version
        embeds = version.kind == "embedder"
        if embeds is not (recipe.objective.kind == "contrastive"):
            raise ConfigError(
                f"{version.id} is {'an embedder' if embeds else 'no embedder'}; recipe {recipe.name} of objective "
                f"{recipe.objective.kind} measures by {recipe.evaluate.suites[0]}.",
                hint=f"Give a recipe of objective {'contrastive' if embeds else 'sft'}, or another --version.",
            )
        champion = stages.champion(standing, version.name)
        with display.stage("models"):
            # A version knows its base's name only; the recipe may know where that lies.
            named = served_name(recipe.model.base) == version.base
            (base,) = stages.models(standing, recipe.model.base if named else version.base)
        with display.stage("data"):
            examples = build(recipe.data.train.source, recipe.data, home, display)
            stages.record_data(standing.registry, examples)
            measure = _searching(standing, base, examples) if embeds else _asking(standing, base, examples)
        # What takes traffic already, or never will again, is measured without a gate.
        gated = "evaluating" in LEGAL[found.stage] or found.stage == "evaluating"
        with display.stage("evaluate"), _gate(standing.registry, version.id if gated else None) as gate:
            report = measure(version, champion)
            standing.registry.evaluation(
                EvaluationFact(
                    id=report.id,
                    version_id=version.id,
                    data_version=examples.id,
                    report=report.model_dump(mode="json"),
                    passed=report.verdict.passed,
                )
            )
            if gate is not None:
                stages.end_gate(standing.registry, gate, report)
        move = None
        if promote and report.verdict.passed and wanted is not None and wanted.on_pass is not None:
            move = standing.registry.promote(version.name, wanted.on_pass, version.number, why=report.verdict.reason)
    return Measured(version, report, move)


def _asking(ground: Ground, base: StoredModel, examples: DataVersion) -> _Measure:
    """What asks a version that writes, on the recipe's held-out examples, which are read now."""
    cases = stages.held_out(ground, examples)
    return lambda version, champion: evaluate(
        ground.recipe.evaluate,
        base=base,
        candidate=stages.candidate(version.kind, ground.home.versions / version.path),
        examples=cases,
        home=ground.home,
        champion=champion,
        dtype=stages.serving_dtype(ground.recipe),
        sink=ground.sink,
    )


def _searching(ground: Ground, base: StoredModel, examples: DataVersion) -> _Measure:
    """What searches with a version that embeds, among what the recipe holds out, which is read now."""
    task = stages.held_out_search(ground, examples)
    return lambda version, champion: stages.search(
        ground, base, task, ground.home.versions / version.path, champion=champion
    )


@contextmanager
def _gate(registry: RegistryClient, version_id: str | None) -> Iterator[GateBegun | None]:
    """A gate on the version, abandoned if the block fails; None without a version."""
    if version_id is None:
        yield None
        return
    gate = registry.begin_gate(version_id)
    try:
        yield gate
    except BaseException as error:
        reason = getattr(error, "message", None) or type(error).__name__
        registry.end_gate(GateEnded(gate_id=gate.id, outcome="abandoned", reason=reason))
        raise
