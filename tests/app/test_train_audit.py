"""`flywheel train --audit`: what it says of runs that took every row once, of those that did not, and of none."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from actors.data import version
from actors.data.version import DataVersion, SplitContent
from actors.registry.facts import RunFact
from actors.registry.store import SqlEventStore
from actors.training.checkpoint.saver import Checkpoints
from actors.training.checkpoint.storage import open_storage
from actors.training.config import TrainConfig
from actors.training.job import Position
from actors.training.ledger import Notes
from actors.training.order import Order
from app.pipelines.audit import audit
from cluster.database import sqlite_uri
from cluster.errors import ConfigError, RequestError, StateError
from cluster.storage import Home
from tests.actors.training.small import packed_rows
from tests.app.test_cli import flywheel

ROWS, BATCH, SEED = 21, 4, 3
RUN = "sums-1"
ORDER = Order(rows=ROWS, epoch_rows=20, seed=SEED)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def prepared(home: Home) -> tuple[DataVersion, list[list[str]]]:
    """A token version, and the samples in each of its rows."""
    table = packed_rows(ROWS, length=8, seed=1)
    content = SplitContent(table=table, digest="d", groups=1)
    data = version.store(
        home,
        name="sums.tokens",
        stage="tokens",
        shape="chat",
        parent=None,
        contents={"train": content},
        rejected=[],
        dropped={},
        config={},
        fingerprint="f",
    )
    return data, table.column("sample_ids").to_pylist()


def begin(home: Home) -> list[list[str]]:
    """A run in the registry, of the data version that is made; gives the samples of each row."""
    data, samples = prepared(home)
    config = TrainConfig.model_validate({"seed": SEED, "optimizer": {"global_batch_size": BATCH}})
    settings = {**config.model_dump(mode="json"), "name": "sums", "model": {"base": "tiny"}, "max_failures": 3}
    home.registry_database.parent.mkdir(parents=True, exist_ok=True)
    store = SqlEventStore(sqlite_uri(home.registry_database))
    fact = RunFact(id=RUN, name="sums", base="tiny", base_digest="b", data_version=data.id, recipe=settings)
    store.append([fact], after=0, at=datetime.now(UTC), by="test")
    store.close()
    return samples


def commit(home: Home, samples: list[list[str]], step: int, spans: list[tuple[int, int]]) -> None:
    """The run's checkpoint of `step`, with an account of these positions."""
    notes = Notes(ORDER)
    for first, end in spans:
        rows = ORDER.rows_at(first, end)
        notes.add(np.arange(first, end), rows, [sample for row in rows.tolist() for sample in samples[row]])
    position = Position(RUN, step=step, rows=step * BATCH, loss_first=2.0, loss_last=1.0, loss_tokens=9)
    policy = TrainConfig().checkpoint
    checkpoints = Checkpoints(open_storage(home, RUN), run_id=RUN, policy=policy)
    checkpoints.save({"weights/w": torch.zeros(2)}, position, ledger=notes.take().to_json())
    checkpoints.finish(insist=True)


def test_a_run_that_took_every_row_once_is_proven(home: Home, tmp_path: Path) -> None:
    samples = begin(home)
    commit(home, samples, 2, [(0, 8)])
    commit(home, samples, 8, [(0, 20), (20, 32)])
    done = flywheel(tmp_path, "train", "--audit", RUN)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Rows of run {RUN} up to step 8" in done.stdout
    assert "Proven" in done.stdout
    told = json.loads(flywheel(tmp_path, "train", "--audit", RUN, "--json").stdout)
    assert (told["step"], told["seen"], told["lost"], told["repeated"], told["exact"]) == (8, 32, 0, 0, True)
    assert [epoch["seen"] for epoch in told["epochs"]] == [20, 12]
    assert [epoch["unused"] for epoch in told["epochs"]] == [1, 1]
    assert told["samples"] == sum(len(samples[row]) for row in ORDER.rows_at(0, 32))


def test_rows_that_were_lost_or_repeated_are_counted_and_fail(home: Home, tmp_path: Path) -> None:
    samples = begin(home)
    commit(home, samples, 5, [(0, 8), (4, 8), (12, 20)])
    done = flywheel(tmp_path, "train", "--audit", RUN, "--json")
    told = json.loads(done.stdout)
    assert (told["seen"], told["lost"], told["repeated"], told["proven"]) == (16, 4, 4, True)
    assert done.returncode == 1


def test_other_samples_than_those_of_the_data_version_are_no_proof(home: Home) -> None:
    samples = begin(home)
    commit(home, [[*of_row[:-1], "another"] for of_row in samples], 5, [(0, 20)])
    found = audit(RUN, home)
    assert (found.lost, found.repeated, found.proven) == (0, 0, False)
    assert found.doubts[0].startswith("epoch 0: other samples were read than the data version has")


def test_an_account_that_somebody_changed_is_not_believed(home: Home) -> None:
    samples = begin(home)
    commit(home, samples, 5, [(0, 12)])
    path = home.runs / RUN / "step-000005" / "ledger.json"
    path.write_text(path.read_text().replace("[0, 12, 1]", "[0, 20, 1]"))
    with pytest.raises(StateError, match=f"step-000005 of run {RUN} was changed"):
        audit(RUN, home)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop_columns(["sample_ids"]), "has no sample_ids"),
        (
            lambda table: table.set_column(table.column_names.index("sample_ids"), "sample_ids", [["s"] * ROWS]),
            "has string as sample_ids",
        ),
        (lambda table: table.slice(0, 3), "21 rows"),
        (None, "cannot be read"),
    ],
)
def test_data_that_is_not_what_it_was_is_said(
    home: Home, change: Callable[[pa.Table], pa.Table] | None, said: str
) -> None:
    commit(home, begin(home), 5, [(0, 20)])
    [path] = home.data.glob("*/*/train-00000.parquet")
    if change is None:
        path.write_bytes(path.read_bytes()[:-100])
    else:
        pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(StateError, match=said) as caught:
        audit(RUN, home)
    assert str(path) in caught.value.message


def test_a_run_that_is_not_there_or_has_no_checkpoint_is_said(home: Home, tmp_path: Path) -> None:
    begin(home)
    with pytest.raises(ConfigError, match=RUN):
        audit(RUN, home)
    with pytest.raises(RequestError, match="sums-2") as caught:
        audit("sums-2", home)
    assert caught.value.status == 404
    assert caught.value.hint == f"Near it: {RUN}."
    with pytest.raises(RequestError, match="no run ''") as caught:
        audit("", home)
    assert "flywheel status" in str(caught.value.hint)
    done = flywheel(tmp_path, "train", "--audit", "sums-2")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "sums-2" in done.stderr
