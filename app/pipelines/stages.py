"""The stages of a turn from data to a registered version, each one function, in order.

This is a composition root: it hands parts to parts and decides nothing itself. `Ground` is what every stage
stands on; each stage returns a frozen result that the next one takes.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from actors.data.build import build
from actors.data.config import SourceConfig
from actors.data.examples import ChatExample, PairExample, read
from actors.data.pairs import prepare_pairs
from actors.data.prepare import prepare
from actors.data.version import DataVersion
from actors.evaluation import beir, embedding, retrieval
from actors.evaluation.beir import RetrievalTask
from actors.evaluation.config import RetrievalConfig
from actors.evaluation.evaluate import Candidate, Champion
from actors.evaluation.evaluate import evaluate as run_suites
from actors.evaluation.negatives import mine
from actors.evaluation.parity import Dtype
from actors.evaluation.report import EvaluationReport
from actors.evaluation.retrieval import RetrievalReport
from actors.registry.client import RegistryClient
from actors.registry.facts import (
    AliasMove,
    CheckpointFact,
    DataFact,
    EvaluationFact,
    GateBegun,
    GateCheck,
    GateEnded,
    RunEnded,
    RunFact,
    RunIncident,
    Version,
    VersionFact,
)
from actors.registry.rules import LEGAL
from actors.registry.snapshot import Kind
from actors.registry.views import RunView
from actors.training.checkpoint import manifest
from actors.training.checkpoint.storage import open_storage
from actors.training.config import ContrastiveConfig
from actors.training.control import Incident
from actors.training.controller import TrainingResult, new_run_id, planned
from actors.training.controller import train as run_training
from actors.training.fit import resources_per_worker
from actors.training.shape import read as read_shape
from app.pipelines import calibration
from app.pipelines.provenance import code_commit, lock_digest
from app.pipelines.resume import flat, require_checkpoints, taken_up
from app.recipe import Recipe
from cluster.errors import ConfigError, DependencyError, FlywheelError, RequestError
from cluster.models import StoredModel, obtain
from cluster.progress import Progress, Sink
from cluster.storage import Home
from cluster.tracking import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ground:
    """What every stage stands on."""

    recipe: Recipe
    home: Home
    registry: RegistryClient
    tracker: Tracker
    tracking_uri: str
    sink: Sink


@dataclass(frozen=True)
class Data:
    """What a run learns from, and what it is measured on: chat examples, or a search if it learns to embed."""

    examples: DataVersion
    tokens: DataVersion
    held_out: list[ChatExample]
    search: RetrievalTask | None = None


@dataclass(frozen=True)
class Registration:
    """The version that was made, and the alias move it earned, if it did."""

    version: Version
    move: AliasMove | None
    reason: str


def models(ground: Ground, *references: str) -> list[StoredModel]:
    """Bring models into the local store; each is there once, under its digest."""
    stored = []
    for number, reference in enumerate(references, 1):
        ground.sink(Progress("models", number - 1, len(references), "models", note=reference))
        stored.append(obtain(reference, ground.home))
        ground.sink(Progress("models", number, len(references), "models", note=reference))
    return stored


def data(ground: Ground, base: StoredModel) -> Data:
    """Make the data versions that the recipe names: examples as read, and tokens as the trainer eats them."""
    recipe, home = ground.recipe, ground.home
    examples = build(recipe.data.train.source, recipe.data, home, ground.sink)
    record_data(ground.registry, examples)
    if isinstance(recipe.objective, ContrastiveConfig):
        search = held_out_search(ground, examples)  # first, for it may refuse, and what follows takes minutes
        negatives = recipe.objective.loss == "triplet"
        pairs = mined(ground, base, examples) if recipe.data.negatives else examples
        tokens = prepare_pairs(pairs, recipe.data, base.path, home, ground.sink, needs_negatives=negatives)
        record_data(ground.registry, tokens)
        return Data(examples, tokens, [], search)
    tokens = prepare(examples, recipe.data, base.path, home, ground.sink)
    record_data(ground.registry, tokens)
    return Data(examples, tokens, held_out(ground, examples))


def mined(ground: Ground, base: StoredModel, examples: DataVersion) -> DataVersion:
    """`examples` with hard negatives, by the base or by the model that the recipe names for it."""
    negatives = ground.recipe.data.negatives
    model = obtain(negatives.model, ground.home) if negatives and negatives.model else base
    pairs = mine(
        examples, ground.recipe.data, model, ground.home, dtype=embedding_dtype(ground.recipe), sink=ground.sink
    )
    record_data(ground.registry, pairs)
    return pairs


def held_out(ground: Ground, examples: DataVersion) -> list[ChatExample]:
    """The examples that the recipe evaluates on."""
    measure, version = _measured_on(ground, examples)
    limits = [limit for limit in (ground.recipe.evaluate.max_cases, measure.limit) if limit is not None]
    cases = read(version, measure.split, ground.home, limit=min(limits, default=None))
    chats = [case for case in cases if isinstance(case, ChatExample)]
    if not chats:
        raise ConfigError(
            f"{version.id} has no chat examples in its {measure.split} split to evaluate on.",
            hint="Point data.eval at a chat dataset, or give the source more rows.",
        )
    return chats


def held_out_search(ground: Ground, examples: DataVersion) -> RetrievalTask:
    """What the recipe searches and asks for; too few pairs are a `ConfigError` now, not after the training."""
    evaluate = ground.recipe.evaluate
    settings = evaluate.retrieval or RetrievalConfig()
    if settings.beir is not None:
        return beir.read(Path(settings.beir), queries=evaluate.max_cases)
    measure, version = _measured_on(ground, examples)
    pairs = read(version, measure.split, ground.home, limit=measure.limit)
    return retrieval.task_of(
        [pair for pair in pairs if isinstance(pair, PairExample)],
        pool=settings.pool,
        queries=evaluate.max_cases,
    )


def _measured_on(ground: Ground, examples: DataVersion) -> tuple[SourceConfig, DataVersion]:
    """What the recipe evaluates on, and the data version that holds it."""
    recipe = ground.recipe
    measure = recipe.data.eval or recipe.data.train.model_copy(update={"split": "test"})
    if measure.source == recipe.data.train.source:
        return measure, examples
    version = build(measure.source, recipe.data, ground.home, ground.sink)
    record_data(ground.registry, version)
    return measure, version


def train(ground: Ground, base: StoredModel, data: Data, *, resume: RunView | None = None) -> TrainingResult:
    """Train what the recipe says; the run is in the registry from its first moment to its end, however it ends.

    `resume` is the run to go on with; `ConfigError` with the differences if the recipe is not the one it began with.
    """
    recipe, registry = ground.recipe, ground.registry
    planned(recipe, data.tokens)  # refused before there is a run, which would have to be taken up or left
    run = _run(ground, base, data) if resume is None else _taken_up(ground, base, data, resume)
    run_id = run.id
    open_storage(ground.home, run_id, recipe.checkpoint.storage).require_writable()  # said before there is a run
    tracking_run = begin_tracking(ground, run_id, run.recipe, run.code_commit)
    registry.begin_run(run.model_copy(update={"tracking_run": tracking_run}))
    try:
        result = run_training(
            recipe,
            name=recipe.name,
            run_id=run_id,
            base=base,
            data=data.tokens,
            home=ground.home,
            tracking_uri=ground.tracking_uri,
            tracking_run_id=tracking_run,
            sink=ground.sink,
            on_checkpoint=partial(_record_checkpoint, registry, run_id),
            protected=partial(registry.needed_checkpoints, run_id),
            on_incident=partial(_record_incident, registry, run_id),
        )
    except BaseException as error:
        _end_by(ground, tracking_run, run_id, error)
        raise
    verdict = f"{result.steps} steps, loss {result.loss_first:.3f} → {result.loss_last:.3f}"
    end_run(ground, tracking_run, RunEnded(run_id=run_id, status="completed", verdict=verdict))
    _calibrate(ground, base, result)
    return result


def _end_by(ground: Ground, tracking_run: str | None, run_id: str, error: BaseException) -> None:
    """Record that `error` ended the run. A registry that is away then must not be what its user is told instead."""
    if isinstance(error, KeyboardInterrupt):
        ended = RunEnded(run_id=run_id, status="stopped", verdict=str(error) or "stopped by its user")
    else:
        verdict = error.message if isinstance(error, FlywheelError) else f"{type(error).__name__}: {error}"
        ended = RunEnded(run_id=run_id, status="failed", verdict=verdict)
    try:
        end_run(ground, tracking_run, ended)
    except FlywheelError as away:
        logger.warning("the registry does not know that run %s has %s: %s", run_id, ended.status, away)


def _calibrate(ground: Ground, base: StoredModel, result: TrainingResult) -> None:
    """Let the next plan know how fast this run was; a model whose shape cannot be read teaches it nothing."""
    recipe = ground.recipe
    if recipe.objective.kind == "contrastive":
        return  # the speed that a plan asks for is that of full rows of a decoder
    try:
        shape = read_shape(base.path)
        calibration.record(
            ground.home,
            recipe,
            shape,
            length=recipe.data.max_length,
            tokens_per_s=result.tokens_per_s,
            run=result.run_id,
            on_gpu="GPU" in resources_per_worker(recipe),
        )
    except (OSError, ValueError, KeyError) as error:
        logger.warning("run %s says nothing of the machine's speed: %s", result.run_id, error)


def evaluate_embedder(ground: Ground, base: StoredModel, data: Data, result: TrainingResult) -> RetrievalReport:
    """Search with base, champion and what the run made, and ask the gate."""
    assert data.search is not None
    wanted = ground.recipe.registration
    standing = champion(ground, wanted.name) if wanted else None
    report = search(ground, base, data.search, result.adapter, champion=standing)
    _record_evaluation(ground, data, result, report)
    return report


def search(
    ground: Ground, base: StoredModel, task: RetrievalTask, embedder: Path, *, champion: Champion | None
) -> RetrievalReport:
    """What `embedder`, the base and the champion find of `task`, and the gate's verdict."""
    recipe = ground.recipe
    return retrieval.evaluate(
        recipe.evaluate,
        base=base,
        candidate=embedder,
        champion=champion,
        task=task,
        home=ground.home,
        dtype=embedding_dtype(recipe),
        max_tokens=recipe.data.max_length,
        sink=ground.sink,
    )


def evaluate(ground: Ground, base: StoredModel, data: Data, result: TrainingResult) -> EvaluationReport:
    """Measure base, champion and what the run made on the held-out examples, and ask the gate."""
    report = run_suites(
        ground.recipe.evaluate,
        base=base,
        candidate=candidate(made(ground.recipe), result.adapter),
        examples=data.held_out,
        home=ground.home,
        champion=champion(ground, ground.recipe.registration.name) if ground.recipe.registration else None,
        dtype=serving_dtype(ground.recipe),
        sink=ground.sink,
    )
    _record_evaluation(ground, data, result, report)
    return report


def _record_evaluation(
    ground: Ground, data: Data, result: TrainingResult, report: EvaluationReport | RetrievalReport
) -> None:
    ground.registry.evaluation(
        EvaluationFact(
            id=report.id,
            run_id=result.run_id,
            checkpoint_id=result.checkpoint_id,
            data_version=data.examples.id,
            report=report.model_dump(mode="json"),
            passed=report.verdict.passed,
        )
    )


def champion(ground: Ground, name: str) -> Champion | None:
    """The version of `name` at the recipe's alias now; None if the gate does not ask for it or there is none."""
    recipe = ground.recipe
    wanted = recipe.registration
    if recipe.evaluate.gate.beats != "champion" or wanted is None or wanted.on_pass is None:
        return None
    try:
        standing = ground.registry.show(f"{name}@{wanted.on_pass}").version
    except RequestError as error:
        if error.status != 404:
            raise
        return None
    path = ground.home.versions / standing.path
    return Champion(standing.id, path, standing.base_digest, whole=standing.kind != "adapter")


def candidate(kind: Kind, path: Path) -> Candidate:
    """The adapter or whole model in the folder `path`, as evaluation takes it."""
    return Candidate(kind, path, whole=kind == "model")


def made(recipe: Recipe) -> Kind:
    """What a run of `recipe` makes, as the registry calls it."""
    if recipe.objective.kind == "contrastive":
        return "embedder"
    return "model" if recipe.adapter.kind == "none" else "adapter"


def require_kind(ground: Ground) -> None:
    """`ConfigError` now, not after the training, if the name to register under holds versions of another kind."""
    wanted, kind = ground.recipe.registration, made(ground.recipe)
    if wanted is None:
        return
    known = next((model for model in ground.registry.list() if model.name == wanted.name), None)
    if known is not None and known.kind != kind:
        raise ConfigError(
            f"register.name {wanted.name!r} holds versions of kind {known.kind}; "
            f"objective {ground.recipe.objective.kind} with adapter.kind {ground.recipe.adapter.kind} makes one of "
            f"kind {kind}.",
            hint=f"Register it under another name: --set register.name={wanted.name}-{kind}.",
        )


def serving_dtype(recipe: Recipe) -> Dtype:
    """What the engine that will serve computes in: a verdict on another one would be about another one."""
    engine = recipe.serve.engine_of(recipe.model.base) if recipe.serve else None
    return engine.dtype if engine else "bfloat16"


def embedding_dtype(recipe: Recipe) -> embedding.Dtype:
    """The same of what will serve embeddings."""
    embedder = recipe.serve.embedder_of(recipe.model.base) if recipe.serve else None
    return embedder.dtype if embedder else "float32"


def register(
    ground: Ground,
    base: StoredModel,
    data: Data,
    result: TrainingResult,
    report: EvaluationReport | RetrievalReport,
) -> Registration:
    """Make a version of what the run made, give it the gate's verdict, and move the alias if that allows it."""
    wanted = ground.recipe.registration
    if wanted is None:
        raise ConfigError("This recipe has no `register` section.", hint="Add `register: {name: …}`.")
    settings = ground.recipe.model_dump(mode="json", by_alias=True)
    version = ground.registry.register(
        VersionFact(
            name=wanted.name,
            kind=made(ground.recipe),
            source_path=result.adapter,
            base=base.name,
            base_digest=base.digest,
            tokenizer_digest=base.tokenizer_digest,
            run_id=result.run_id,
            checkpoint_id=result.checkpoint_id,
            data_version=data.tokens.id,
            evaluation_id=report.id,
            recipe_digest=_digest(settings),
            lock_digest=lock_digest(),
            code_commit=code_commit(),
            metrics=report.figures,
        ),
        recipe=settings,
        sink=ground.sink,
    )
    if "evaluating" in LEGAL[ground.registry.show(version.id).stage]:  # else this registration has been made before
        end_gate(ground.registry, ground.registry.begin_gate(version.id), report)
    if wanted.on_pass is None:
        return Registration(version, None, "the recipe moves no alias")
    if not report.verdict.passed:
        return Registration(version, None, report.verdict.reason)
    move = ground.registry.promote(wanted.name, wanted.on_pass, version.number, why=report.verdict.reason)
    return Registration(version, move, report.verdict.reason)


def end_gate(registry: RegistryClient, gate: GateBegun, report: EvaluationReport | RetrievalReport) -> None:
    """Give the version of `gate` the verdict of `report`, which is recorded, with all that it looked at."""
    verdict = report.verdict
    registry.end_gate(
        GateEnded(
            gate_id=gate.id,
            outcome="passed" if verdict.passed else "blocked",
            evaluation_id=report.id,
            checks=tuple(GateCheck(name=c.name, passed=c.passed, reason=c.reason) for c in verdict.checks),
            reason=verdict.reason,
        )
    )


def record_data(registry: RegistryClient, version: DataVersion) -> None:
    """Tell the registry of a data version; telling it twice is harmless."""
    registry.data(
        DataFact(
            id=version.id,
            name=version.name,
            digest=version.digest,
            stage=version.stage,
            parent=version.parent,
            rows={name: split.rows for name, split in version.splits.items()},
        )
    )


def _record_checkpoint(
    registry: RegistryClient, run_id: str, checkpoint_id: str, step: int, path: str, metrics: dict[str, float]
) -> None:
    registry.checkpoint(CheckpointFact(id=checkpoint_id, run_id=run_id, step=step, path=path, metrics=metrics))


def _record_incident(registry: RegistryClient, run_id: str, incident: Incident) -> None:
    registry.incident(
        RunIncident(
            id=f"{run_id}/incident-{incident.at:.3f}",
            run_id=run_id,
            kind=incident.kind,
            verdict=incident.verdict,
            hint=incident.hint,
            step=incident.step,
            lost_steps=incident.lost_steps,
            at=datetime.fromtimestamp(incident.at, UTC),
        )
    )


def _run(ground: Ground, base: StoredModel, data: Data) -> RunFact:
    settings = ground.recipe.model_dump(mode="json", by_alias=True)
    return RunFact(
        id=new_run_id(ground.recipe.name),
        name=ground.recipe.name,
        base=base.name,
        base_digest=base.digest,
        data_version=data.tokens.id,
        recipe=settings,
        recipe_digest=_digest(settings),
        code_commit=code_commit(),
    )


def _taken_up(ground: Ground, base: StoredModel, data: Data, view: RunView) -> RunFact:
    settings = ground.recipe.model_dump(mode="json", by_alias=True)
    run = taken_up(view, settings, name=ground.recipe.name, base_digest=base.digest, data_version=data.tokens.id)
    storage = open_storage(ground.home, run.id, ground.recipe.checkpoint.storage)
    last = manifest.latest(storage)
    require_checkpoints(view, last.step if last else None, storage.uri)
    if (commit := code_commit()) != run.code_commit:
        run = run.model_copy(update={"changes": run.changes | {"code": f"{run.code_commit} → {commit}"}})
    return run


def begin_tracking(ground: Ground, run_id: str, settings: dict[str, Any], commit: str) -> str | None:
    """The tracker's id of the run; None if the tracker is away, for a run must not wait for whoever shows it."""
    try:
        return ground.tracker.begin_run(
            run_id, experiment=ground.recipe.name, params=flat(settings), tags={"flywheel.commit": commit}
        )
    except DependencyError as error:
        logger.warning("run %s is not in the tracker: %s", run_id, error)
        return None


def end_run(ground: Ground, tracking_run: str | None, ended: RunEnded) -> None:
    ground.registry.end_run(ended)
    if tracking_run is None:
        return
    try:
        ground.tracker.end_run(tracking_run, ended.status)
    except DependencyError as error:
        logger.warning("the tracker does not know that run %s has ended: %s", ended.run_id, error)


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
