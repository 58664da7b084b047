"""`flywheel evaluate`: a registered version against base and champion, on the recipe's held-out data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.data.build import build
from actors.evaluation.evaluate import evaluate
from actors.evaluation.report import EvaluationReport
from actors.registry.client import RegistryClient
from actors.registry.facts import AliasMove, EvaluationFact, GateBegun, GateEnded, Version
from actors.registry.rules import LEGAL
from app.display import Display
from app.pipelines import stages
from app.pipelines.train import ground
from app.recipe import Recipe
from app.session import connected
from cluster.errors import ConfigError
from cluster.storage import Home


@dataclass(frozen=True)
class Measured:
    """A version, what was measured of it, and the alias that moved to it."""

    version: Version
    report: EvaluationReport
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
        if version.kind == "embedder":
            raise ConfigError(
                f"{version.id} is an embedder; the suites ask for text.", hint="Name an adapter or a whole model."
            )
        champion = stages.champion(standing, version.name)
        with display.stage("models"):
            (base,) = stages.models(standing, version.base)
        with display.stage("data"):
            examples = build(recipe.data.train.source, recipe.data, home, display)
            stages.record_data(standing.registry, examples)
            cases = stages.held_out(standing, examples)
        # What takes traffic already, or never will again, is measured without a gate.
        gated = "evaluating" in LEGAL[found.stage] or found.stage == "evaluating"
        with display.stage("evaluate"), _gate(standing.registry, version.id if gated else None) as gate:
            report = evaluate(
                recipe.evaluate,
                base=base,
                candidate=stages.candidate(version.kind, home.versions / version.path),
                examples=cases,
                home=home,
                champion=champion,
                dtype=stages.serving_dtype(recipe),
                sink=display,
            )
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
