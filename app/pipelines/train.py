"""`flywheel train`: data → train → evaluate → register, as the recipe says."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.evaluation.report import EvaluationReport
from actors.evaluation.retrieval import RetrievalReport
from actors.training import support
from actors.training.controller import TrainingResult
from actors.training.fit import require_room, resources_per_worker
from app.display import Display
from app.pipelines import stages
from app.pipelines.registry import mirrored
from app.pipelines.resume import require_choice
from app.pipelines.stages import Data, Ground, Registration
from app.recipe import Recipe
from app.session import connected
from cluster.models import StoredModel
from cluster.storage import Home
from cluster.tracking import MlflowTracker, prepare_tracking


@dataclass(frozen=True)
class Turn:
    """What one turn made. `report` and `registration` are None where the recipe or a flag left them out."""

    base: StoredModel
    data: Data
    result: TrainingResult
    report: EvaluationReport | RetrievalReport | None
    registration: Registration | None


@contextmanager
def ground(recipe: Recipe, home: Home, display: Display) -> Iterator[Ground]:
    """The registry and the tracker of this home, on the Ray session that is connected."""
    uri = prepare_tracking(home)
    with mirrored(home) as registry:
        yield Ground(recipe, home, registry, MlflowTracker(uri), uri, display)


def run(
    recipe: Recipe,
    home: Home,
    display: Display,
    *,
    evaluate: bool = True,
    resume: str | None = None,
    new: bool = False,
) -> Turn:
    """Execute a recipe to its registered version. Needs or starts Ray.

    `resume` is the id of the run to go on with; without it and without `new`, a run of the recipe's name that is not
    completed is a `ConfigError`.
    """
    with connected(), ground(recipe, home, display) as standing:
        require_room(recipe, resources_per_worker(recipe))  # said now, not after the data is prepared
        earlier = standing.registry.run(resume) if resume is not None else None
        if evaluate:
            stages.require_kind(standing)
        if earlier is None and not new:
            require_choice(recipe.name, standing.registry.runs())
        with display.stage("models"):
            (base,) = stages.models(standing, recipe.model.base)
            support.require_kind(recipe, base)
            support.require(recipe, support.shape_of(base.path))  # and not in a worker
        with display.stage("data"):
            data = stages.data(standing, base)
        with display.stage("train"):
            result = stages.train(standing, base, data, resume=earlier)
        if not evaluate:
            return Turn(base, data, result, None, None)
        with display.stage("evaluate"):
            measure = stages.evaluate if recipe.objective.kind == "sft" else stages.evaluate_embedder
            report = measure(standing, base, data, result)
        if recipe.registration is None:
            return Turn(base, data, result, report, None)
        with display.stage("register"):
            registration = stages.register(standing, base, data, result, report)
        return Turn(base, data, result, report, registration)
