"""`flywheel evaluate`: a registered version against base and champion, on the recipe's held-out data."""

from dataclasses import dataclass

from actors.data.build import build
from actors.evaluation.evaluate import evaluate
from actors.evaluation.report import EvaluationReport
from actors.registry.facts import AliasMove, EvaluationFact, Version
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
        version = standing.registry.show(reference).version
        champion = stages.champion(standing, version.name)
        with display.stage("models"):
            (base,) = stages.models(standing, version.base)
        with display.stage("data"):
            examples = build(recipe.data.train.source, recipe.data, home, display)
            stages.record_data(standing.registry, examples)
            cases = stages.held_out(standing, examples)
        with display.stage("evaluate"):
            report = evaluate(
                recipe.evaluate,
                base=base,
                adapters={stages.CANDIDATE: version.path},
                examples=cases,
                home=home,
                champion=champion,
                dtype=stages.serving_dtype(recipe),
                sink=display,
            )
        standing.registry.evaluation(
            EvaluationFact(
                id=report.id,
                run_id=version.run_id,
                checkpoint_id=version.checkpoint_id,
                data_version=examples.id,
                report=report.model_dump(mode="json"),
                passed=report.verdict.passed,
            )
        )
        move = None
        if promote and report.verdict.passed and wanted is not None and wanted.on_pass is not None:
            move = standing.registry.promote(version.name, wanted.on_pass, version.number, why=report.verdict.reason)
    return Measured(version, report, move)
