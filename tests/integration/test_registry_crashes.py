"""`kill -9` at every write of every operation of the registry leaves what was before it or what is after it."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.registry import gc
from actors.registry.apikeys import ApiKey
from actors.registry.facts import (
    Artifact,
    CheckpointFact,
    Collected,
    DataFact,
    EvaluationFact,
    ExternalMove,
    FeedbackFact,
    GateEnded,
    Origin,
    RunEnded,
    RunFact,
    RunIncident,
    VersionFact,
)
from actors.registry.ledger import Ledger
from actors.registry.rules import Adopt, BeginGate, CreateKey, Pin, Promote, Register, Retire, RevokeKey, Rollback
from actors.registry.state import State, replay
from actors.registry.store import SqlEventStore, read_log
from actors.registry.upload import admit
from cluster.database import sqlite_uri
from cluster.signing import Keyring, verify
from cluster.storage import Home
from tests import postgres as servers
from tests.crashes import Crasher, Kind
from tests.postgres import Postgres

pytestmark = pytest.mark.integration

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
NAME: Final = "triage"
KEY: Final = ApiKey("key-0123456789ab", "laptop", "a" * 64, models=("smol:*",))


@dataclass(frozen=True)
class Scene:
    """A home, a database, and folders outside to register: all that an operation finds. Picklable."""

    root: Path
    uri: str

    @property
    def home(self) -> Home:
        return Home(self.root / "home")

    def adapter(self, seed: int) -> Path:
        return self.root / "sources" / str(seed)


@dataclass(frozen=True)
class Actor:
    """What does an operation: the registry's ledger, and the files beside it."""

    scene: Scene
    store: SqlEventStore
    ledger: Ledger


Operation = Callable[[Actor], object]


def commit(command: Any) -> Operation:
    return _Commit(command)


@dataclass(frozen=True)
class _Commit:
    command: Any

    def __call__(self, actor: Actor) -> object:
        return actor.ledger.commit(self.command, by="ada")


@dataclass(frozen=True)
class _RegisterFolder:
    """Copy, sign and record a folder, as the client does it."""

    seed: int
    run: str | None = "r"

    def __call__(self, actor: Actor) -> object:
        source = actor.scene.adapter(self.seed)
        fact = VersionFact(name=NAME, kind="adapter", source_path=source, base="smol", run_id=self.run)
        actor.ledger.check(fact)
        return actor.ledger.commit(Register(fact, admit(fact, actor.scene.home)), by="ada")


class _Collect:
    """Free what nothing reaches, as the actor does it."""

    def __call__(self, actor: Actor) -> object:
        home, later = actor.scene.home, datetime.now(UTC) + timedelta(days=400)
        plan = gc.plan(actor.ledger.state, gc.look(home), home, now=later)
        if plan.version_ids:
            actor.ledger.commit(Collected(version_ids=plan.version_ids), by="ada")
        return gc.collect(plan, home, lambda: actor.ledger.state)


def promote(version: int, command: str) -> Promote:
    return Promote(NAME, "champion", {version: 1.0}, "ada", "why", command, force=True)


FOUNDATION: Final[tuple[Operation, ...]] = (
    commit(DataFact(id="errors@1", name="errors", digest="d", stage="examples", rows={"train": 3})),
    commit(RunFact(id="r", name=NAME, base="smol", base_digest="d", data_version="errors@1")),
    commit(CheckpointFact(id="r/step-1", run_id="r", step=1, path=Path("/c"), metrics={"loss": 1.5})),
    _RegisterFolder(1),
    _RegisterFolder(2),
    _RegisterFolder(3),
    _RegisterFolder(4, run=None),
    commit(promote(1, "p1")),
    commit(promote(2, "p2")),
    commit(BeginGate(f"{NAME}/3", "ada", "g1")),
    commit(CreateKey(KEY, "ada")),
)
"""What has happened before every operation."""

OPERATIONS: Final[Mapping[str, Operation]] = {
    "data": commit(DataFact(id="errors@2", name="errors", digest="e", stage="tokens", parent="errors@1")),
    "feedback": commit(
        FeedbackFact(id="feedback@1", digest="f", versions=(f"{NAME}/1",), rows=2, since=NOW, until=NOW)
    ),
    "begin-run": commit(RunFact(id="r2", name=NAME, base="smol", base_digest="d", recipe={"steps": 1})),
    "checkpoint": commit(CheckpointFact(id="r/step-2", run_id="r", step=2, path=Path("/c2"))),
    "incident": commit(RunIncident(id="r/i-1", run_id="r", kind="killed", verdict="Rank 1 died.", step=3, at=NOW)),
    "end-run": commit(RunEnded(run_id="r", status="completed", verdict="well")),
    "evaluation": commit(EvaluationFact(id="eval-1", run_id="r", checkpoint_id="r/step-1", passed=True)),
    "register": _RegisterFolder(5),
    "register-again": _RegisterFolder(1),
    "promote": commit(promote(1, "p3")),
    "split": commit(Promote(NAME, "champion", {1: 0.5, 2: 0.5}, "ada", "why", "p4", {2: 1.0}, force=True)),
    "external": commit(Promote(NAME, "champion", {1: 1.0}, "mlflow", "why", "p5", {2: 1.0}, True, True)),
    "external-refused": commit(
        ExternalMove(id="x", name=NAME, alias="champion", version=3, where="MLflow", refused="no", at=NOW)
    ),
    "adopt": commit(
        Adopt(
            (
                DataFact(id="far@1", name="far", digest="d", stage="tokens"),
                RunFact(id="far", name="f", base="b", base_digest=""),
            ),
            Register(
                VersionFact(name="far", kind="adapter", source_path=Path("/far.tar"), base="b", run_id="far"),
                Artifact(path=Path("far/aa"), digest="aa"),
                Origin(version_id="there/7", signed_by="k", exported_at=NOW, exported_by="k"),
            ),
        )
    ),
    "collect": _Collect(),
    "rollback": commit(Rollback(NAME, "champion", "ada", "why", "b1")),
    "begin-gate": commit(BeginGate(f"{NAME}/3", "ada", "g2")),
    "end-gate": commit(GateEnded(gate_id=f"{NAME}/3#gate-1", outcome="passed")),
    "pin": commit(Pin(f"{NAME}/1", True, "ada", "why")),
    "retire": commit(Retire(f"{NAME}/1", "ada", "why", "t1")),
    "create-key": commit(CreateKey(ApiKey("key-0123456789ac", "ci", "b" * 64, rpm=3), "ada")),
    "revoke-key": commit(RevokeKey(KEY.id, "ada", "leaked", "k1")),
}
"""What is killed: one more row is one more operation. It is a function of a module or a picklable object."""


def begin(scene: Scene) -> Actor:
    """A registry on what is there; its clock stands, so that the same facts make the same state."""
    store = SqlEventStore(scene.uri)
    return Actor(scene, store, Ledger(store, clock=lambda: NOW))


def identity(scene: Scene) -> Scene:
    return scene


class Stage:
    """Puts a scene back to how it was before an operation, again and again."""

    def __init__(self, scene: Scene, file: Path | None) -> None:
        self.scene = scene
        self._file = file
        self._rows: servers.Rows = {}

    def keep(self) -> None:
        """What stands now is what `reset` goes back to."""
        saved = self.scene.root / "saved"
        shutil.copytree(self.scene.home.root, saved)
        if self._file is None:
            self._rows = servers.dump(self.scene.uri)
        else:
            shutil.copyfile(self._file, saved / "registry.db")

    def clear(self) -> None:
        """A database that nobody has opened."""
        if self._file is None:
            servers.restore(self.scene.uri, {})
        else:
            for path in self._file.parent.glob(f"{self._file.name}*"):
                path.unlink()

    def reset(self) -> None:
        saved = self.scene.root / "saved"
        shutil.rmtree(self.scene.home.root)
        shutil.copytree(saved, self.scene.home.root, ignore=shutil.ignore_patterns("registry.db"))
        if self._file is None:
            servers.restore(self.scene.uri, self._rows)
        else:
            self.clear()
            shutil.copyfile(saved / "registry.db", self._file)


@pytest.fixture(scope="module")
def crasher() -> Iterator[Crasher]:
    started = Crasher(warm=["psycopg", "sqlalchemy.dialects.postgresql.psycopg", "model_signing.signing"])
    yield started
    started.close()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The foundation, laid once for all operations."""
    root = tmp_path_factory.mktemp("crashes")
    if request.param == "sqlite":
        file: Path | None = root / "registry.db"
        uri = sqlite_uri(root / "registry.db")
    else:
        server: Postgres = request.getfixturevalue("postgres")
        file, uri = None, server.uri(server.create_database())
    scene = Scene(root, uri)
    for seed in (1, 2, 3, 4, 5):
        _write_adapter(scene.adapter(seed), seed)
    Keyring(scene.home).ensure()
    actor = begin(scene)
    for operation in FOUNDATION:
        operation(actor)
    actor.store.close()
    stage = Stage(scene, file)
    stage.keep()
    return stage


def kinds(stage: Stage, operation: str) -> tuple[Kind, ...]:
    """Files are written in the same way whatever the database is: once is enough."""
    return ("sql", "file") if stage.scene.uri.startswith("sqlite") else ("sql",)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_death_anywhere_leaves_before_or_after_and_the_command_again_leads_to_after(
    stage: Stage, crasher: Crasher, name: str
) -> None:
    operation, scene = OPERATIONS[name], stage.scene
    stage.reset()
    before, after = perform(scene, operation)
    outcomes = []
    stage.reset()
    for death in crasher.deaths(begin, operation, scene, root=scene.root, kinds=kinds(stage, name)):
        found, repeated = perform(scene, operation)
        assert found in (before, after), death
        assert repeated == after, death
        outcomes.append(found == after)
        stage.reset()
    if name != "register-again":
        # The very last point comes behind the commit, and once it is committed it stays so.
        assert outcomes == sorted(outcomes)
        assert (outcomes[0], outcomes[-1]) == (False, True)


def test_a_death_in_a_first_start_leaves_a_log_that_can_be_opened(stage: Stage, crasher: Crasher) -> None:
    stage.clear()
    deaths = 0
    for death in crasher.deaths(identity, begin, stage.scene, root=stage.scene.root, kinds=("sql",)):
        actor = begin(stage.scene)
        assert actor.ledger.state == State(), death
        OPERATIONS["begin-run"](actor)
        assert len(read_log(stage.scene.uri)) == 1
        actor.store.close()
        deaths += 1
        stage.clear()
    assert deaths > 6


def perform(scene: Scene, operation: Operation) -> tuple[State, State]:
    """The states that a fresh registry finds and leaves; what it leaves is in the log, and its files are whole."""
    actor = begin(scene)
    found = actor.ledger.state
    operation(actor)
    left = actor.ledger.state
    assert replay(read_log(scene.uri)) == left
    for version in (version for version in left.versions[NAME] if version.id not in left.collected):
        verify(scene.home.versions / version.path, scene.home, what=version.id, digest=version.digest)
    actor.store.close()
    return found, left


def _write_adapter(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "smol", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = np.random.default_rng(seed).standard_normal((2, 8), dtype=np.float32)
    tensors = {"m.q.lora_A.weight": weights, "m.q.lora_B.weight": weights.T.copy()}
    save_file(tensors, folder / "adapter_model.safetensors")
