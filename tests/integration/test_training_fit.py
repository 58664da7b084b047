"""Real fits on Ray Train: two workers fed by Ray Data learn exactly what one process learns from the same rows.

The first run also loses a worker: the group restarts from the last checkpoint and ends with the same numbers.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from actors.data.version import DataVersion, ShardManifest, SplitManifest
from actors.training.audit import sample_facts
from actors.training.controller import TrainingResult, new_run_id, train
from actors.training.ledger import Ledger, audit
from actors.training.loop import train as learn
from actors.training.order import Order
from actors.training.steps import StepPlan
from cluster.errors import ConfigError
from cluster.models import StoredModel, obtain
from cluster.progress import Progress
from cluster.session import Session
from cluster.storage import Home, write_atomically
from cluster.tracking import MlflowTracker, prepare_tracking
from tests.actors.training.small import HERE, VOCABULARY, Remembered, job, memory_feed, packed_rows, settings

pytestmark = pytest.mark.integration

Trace = tuple[list[float], dict[str, Any]]
"""Loss of every step, and the weights at the end."""

STEPS = 8
ROWS = 13  # an epoch is 3 steps of 4 rows, so the run enters its third


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, store: Home) -> StoredModel:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return obtain(str(folder), store)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home of our own for data and runs: the session's may be kept, and is for whole data versions."""
    return Home(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def tracking_uri(home: Home) -> str:
    return prepare_tracking(home)


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    return packed_rows(ROWS, length=24, seed=7)


@pytest.fixture(scope="module")
def data(rows: pa.Table, store: Home) -> DataVersion:
    """A token version in two files, neither of which ends where a global batch ends."""
    shards = [("train-00000.parquet", rows.slice(0, 7)), ("train-00001.parquet", rows.slice(7))]
    version = DataVersion(
        name="tiny-tokens",
        digest="ab" * 32,
        stage="tokens",
        shape="chat",
        parent=None,
        splits={
            "train": SplitManifest(
                rows=ROWS,
                groups=1,
                files=tuple(ShardManifest(file=name, rows=part.num_rows, sha256="") for name, part in shards),
            )
        },
        quarantined={},
        dropped={},
        config={},
        fingerprint="",
        created_at="2026-01-01T00:00:00Z",
    )
    version.folder(store).mkdir(parents=True)
    for name, part in shards:
        pq.write_table(part, version.folder(store) / name)
    return version


@pytest.fixture(scope="module")
def alone(base: StoredModel, rows: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Losses and final adapter of one process that takes the rows in the order of the plan."""
    told = Remembered()
    folder = tmp_path_factory.mktemp("alone")
    outcome = learn(job(settings(), base.path, folder, ROWS), HERE, memory_feed(rows), told, None)
    return told.losses, load_file(outcome.adapter / "adapter_model.safetensors")


@dataclass(frozen=True)
class Registrar:
    """Notes each checkpoint; the first time it hears of step `die_at`, its worker is killed."""

    notes: Path
    die_at: int | None = None

    def __call__(self, identity: str, step: int, path: str, metrics: Mapping[str, float]) -> None:
        first = not self.notes.exists() or identity not in self.notes.read_text()
        with self.notes.open("a") as file:
            file.write(f"{identity} {path} {metrics['loss']}\n")
        if first and step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Fit:
    result: TrainingResult
    losses: list[float]
    """Of the last steps, all of them if no worker was killed."""
    progress: list[Progress]
    notes: list[str]


def fit(
    base: StoredModel,
    data: DataVersion,
    store: Home,
    tracking_uri: str,
    notes: Path,
    die_at: int | None,
    strategy: str,
) -> Fit:
    tracker = MlflowTracker(tracking_uri)
    run_id = new_run_id("tiny")
    tracked = tracker.begin_run(run_id, experiment="tiny", params={}, tags={})
    progress: list[Progress] = []
    result = train(
        settings(parallel={"strategy": strategy, "workers": {"min": 2, "max": 2}}),
        name="tiny",
        run_id=run_id,
        base=base,
        data=data,
        home=store,
        tracking_uri=tracking_uri,
        tracking_run_id=tracked,
        sink=progress.append,
        on_checkpoint=Registrar(notes, die_at),
    )
    history = tracker.history(tracked, "loss")
    # What a killed worker has measured and not yet told dies with it; what its successor measures does not.
    told = [step for step, _ in history]
    assert told == list(range(STEPS + 1 - len(told), STEPS + 1))
    assert len(told) >= STEPS - (die_at or 0)
    return Fit(result, [loss for _, loss in history], progress, notes.read_text().splitlines())


def assert_same(found: Fit, alone: Trace) -> None:
    losses, weights = alone
    assert found.losses == pytest.approx(losses[-len(found.losses) :], rel=1e-5)
    trained = load_file(found.result.adapter / "adapter_model.safetensors")
    assert trained.keys() == weights.keys()
    for name, tensor in trained.items():
        assert tensor.numpy() == pytest.approx(weights[name].numpy(), rel=1e-3, abs=5e-4)


def test_two_ddp_workers_of_which_one_dies_learn_what_one_process_learns(
    ray_session: Session,
    base: StoredModel,
    data: DataVersion,
    store: Home,
    tracking_uri: str,
    alone: Trace,
    tmp_path: Path,
) -> None:
    found = fit(base, data, store, tracking_uri, tmp_path / "notes", die_at=4, strategy="ddp")
    assert_same(found, alone)
    result = found.result
    assert result.steps == STEPS
    assert result.loss_first == pytest.approx(alone[0][0], rel=1e-5)
    assert result.loss_last == pytest.approx(alone[0][-1], rel=1e-5)
    assert result.checkpoint_id == f"{result.run_id}/step-{STEPS}"
    assert {note.split()[0] for note in found.notes} == {f"{result.run_id}/step-{step}" for step in (2, 4, 6, 8)}
    kept = sorted(path.name for path in (store.runs / result.run_id).glob("step-*"))
    assert kept == ["step-000004", "step-000006", "step-000008"]
    assert not list((store.runs / result.run_id).glob(".partial-*"))
    order = Order.of(StepPlan(ROWS, STEPS, 4, 1, 2), seed=0, shuffle=True)
    ledger = Ledger.from_json((store.runs / result.run_id / kept[-1] / "ledger.json").read_text())
    assert audit(ledger, order, step=STEPS, batch=4, samples=sample_facts(data, store)).exact
    steps = [progress.done for progress in found.progress]
    assert steps[:4] == [1, 2, 3, 4]
    assert 5 in steps
    assert found.progress[0].stage == "train"
    assert found.progress[0].total == STEPS
    assert found.progress[0].note == f"loss {alone[0][0]:.3f}"


@pytest.mark.chaos
def test_two_fsdp_workers_learn_what_one_process_learns(
    ray_session: Session,
    base: StoredModel,
    data: DataVersion,
    store: Home,
    tracking_uri: str,
    alone: Trace,
    tmp_path: Path,
) -> None:
    assert_same(fit(base, data, store, tracking_uri, tmp_path / "notes", die_at=None, strategy="fsdp"), alone)


def test_a_mistake_ends_the_fit_at_once_and_is_named(
    ray_session: Session, base: StoredModel, data: DataVersion, store: Home, tracking_uri: str
) -> None:
    """Found on the workers, where the model is; not tried again, although the run may restart twice."""
    with pytest.raises(ConfigError, match="no_such_layer") as caught:
        train(
            settings(adapter={"target_modules": ("no_such_layer",)}),
            name="tiny",
            run_id=new_run_id("tiny"),
            base=base,
            data=data,
            home=store,
            tracking_uri=tracking_uri,
            tracking_run_id="none",
        )
    assert "q_proj" in str(caught.value.hint)


@dataclass(frozen=True)
class ProcessNote:
    """Notes the process of rank 0 when it has a checkpoint."""

    path: Path

    def __call__(self, identity: str, step: int, path: str, metrics: Mapping[str, float]) -> None:
        write_atomically(self.path, str(os.getpid()))


def test_ctrl_c_stops_the_workers_and_goes_on_to_the_caller(
    ray_session: Session, base: StoredModel, data: DataVersion, store: Home, tracking_uri: str, tmp_path: Path
) -> None:
    """And leaves Ctrl-C as it was: fit() puts a handler of its own in place."""
    handler = signal.getsignal(signal.SIGINT)
    worker = tmp_path / "worker"
    pressed: list[psutil.Process] = []

    def press_ctrl_c(progress: Progress) -> None:
        # A checkpoint is noted a while after its step.
        if progress.done >= 3 and not pressed and worker.exists():
            pressed.append(psutil.Process(int(worker.read_text())))
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(
            settings(steps=100_000),
            name="tiny",
            run_id=new_run_id("tiny"),
            base=base,
            data=data,
            home=store,
            tracking_uri=tracking_uri,
            tracking_run_id="none",
            sink=press_ctrl_c,
            on_checkpoint=ProcessNote(worker),
        )
    assert signal.getsignal(signal.SIGINT) is handler
    assert pressed[0].pid != os.getpid()
    psutil.wait_procs(pressed, timeout=10)
    assert not pressed[0].is_running()


def test_too_few_rows_are_refused_before_any_worker_starts(base: StoredModel, data: DataVersion, store: Home) -> None:
    optimizer = {"global_batch_size": 16}
    with pytest.raises(ConfigError, match="13 rows"):
        train(
            settings(optimizer=optimizer),
            name="tiny",
            run_id=new_run_id("tiny"),
            base=base,
            data=data,
            home=store,
            tracking_uri="",
            tracking_run_id="",
        )
