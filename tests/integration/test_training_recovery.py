"""Runs that lose workers, nodes, patience or their driver: each goes on exactly, and says in one line what happened."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.train import TrainingFailedError
from ray.train.v2._internal.execution.controller.state import RestartingState, RunningState

from actors.training.audit import audit_run
from actors.training.config import ElasticConfig, TrainConfig
from actors.training.control import Incident, Seen, name_of
from actors.training.controller import TrainingResult, train
from actors.training.ray_internals import RunWatch
from app.bench.raylets import Raylets
from app.bench.rehearsal import Happening, Play, Rehearsal, base_and_data
from cluster import environment
from cluster.errors import CapacityError, TrainingError
from cluster.progress import Progress, Sink, silent
from cluster.session import Session

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 60
SETTINGS: dict[str, Any] = {
    "adapter": {"r": 4, "alpha": 8, "dropout": 0.1},
    "optimizer": {"learning_rate": 2e-2, "global_batch_size": 4, "micro_batch_size": 1},
    "checkpoint": {"every_steps": 5},
    "precision": "fp32",
    "steps": STEPS,
    "parallel": {"workers": {"min": 2, "max": 2}, "threads_per_worker": 1},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery")


def play(root: Path, **changes: Any) -> Play:
    return Play(root, {**SETTINGS, **changes})


def run(
    root: Path, run_id: str, *, sink: Sink = silent, incidents: Path | None = None, **changes: Any
) -> TrainingResult:
    acted = play(root, **changes)
    base, data = base_and_data(acted)
    return train(
        TrainConfig.model_validate(acted.settings),
        name="recovery",
        run_id=run_id,
        base=base,
        data=data,
        home=acted.stage,
        tracking_uri="",
        tracking_run_id=None,
        sink=sink,
        on_incident=Noted(incidents) if incidents else lambda incident: None,
    )


class Noted:
    """Writes the verdict of each incident to a file; it is called in another process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, incident: Incident) -> None:
        with self._path.open("a") as file:
            file.write(f"{incident.verdict}\n")


def seen(run_id: str) -> Seen:
    found: Seen = ray.get(ray.get_actor(name_of(run_id)).see.remote())
    return found


def kill_rank_1(run_id: str, killed: list[int]) -> None:
    """SIGKILL to its process, once; `killed` is told of it."""
    group = seen(run_id).group
    assert group is not None
    if not killed:
        killed.append(group.members[1][1])
        os.kill(killed[0], signal.SIGKILL)


def test_a_killed_run_that_is_taken_up_learns_exactly_what_an_undisturbed_one_learns(
    ray_session: Session, root: Path, tmp_path: Path
) -> None:
    losses: dict[str, dict[int, str]] = {"straight": {}, "killed": {}}

    def note(run_id: str, progress: Progress) -> None:
        losses[run_id][progress.done] = progress.note

    straight = run(root, "straight", sink=lambda progress: note("straight", progress))
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        note("killed", progress)
        if progress.done >= 20:
            kill_rank_1("killed", killed)

    with pytest.raises(TrainingError, match=r"^Rank 1 of 2 on node .* \(process \d+\) died: killed") as caught:
        run(root, "killed", sink=kill, failures={"max": 0}, incidents=tmp_path / "incidents")
    assert str(killed[0]) in caught.value.message
    assert "micro_batch_size" in str(caught.value.hint)
    (verdict,) = (tmp_path / "incidents").read_text().splitlines()
    assert "after the commit of step" in verdict or "nothing is lost" in verdict

    again = run(root, "killed", sink=lambda progress: note("killed", progress), failures={"max": 0})
    assert again.loss_last == straight.loss_last, "to the last bit"
    assert again.loss_first == straight.loss_first
    assert again.loss_tokens == straight.loss_tokens
    assert losses["killed"] == losses["straight"]


@pytest.mark.chaos
def test_a_run_of_two_zero_ranks_goes_on_as_one_of_fsdp(ray_session: Session, root: Path) -> None:
    """Also on Ray Train: what DeepSpeed's ranks have saved, another strategy reads, on as many workers as there are."""
    sizes = {"learning_rate": 2e-3, "global_batch_size": 4}  # with a larger one, rounding grows from step to step
    plain: dict[str, Any] = {"adapter": {"r": 4, "alpha": 8}, "optimizer": sizes}
    one = {"strategy": "fsdp", "workers": {"min": 1, "max": 1}, "threads_per_worker": 1}
    straight = run(root, "one", **plain, parallel=one)
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.done >= 20:
            kill_rank_1("zero", killed)

    with pytest.raises(TrainingError, match="Rank 1 of 2"):
        run(root, "zero", **plain, parallel={**one, "strategy": "zero3", "workers": {"min": 2, "max": 2}},
            failures={"max": 0}, sink=kill)  # fmt: skip
    first: list[int] = []
    again = run(root, "zero", **plain, parallel=one, sink=lambda progress: first.append(progress.done))
    assert first[0] > 15, "it goes on"
    assert again.loss_last == pytest.approx(straight.loss_last, rel=1e-5)
    assert again.loss_tokens == straight.loss_tokens
    settings = TrainConfig.model_validate(play(root, **plain, parallel=one).settings)
    _, data = base_and_data(play(root))
    assert audit_run("zero", settings, data, play(root).stage).exact


def test_workers_for_which_there_will_never_be_room_are_refused_at_once(ray_session: Session, root: Path) -> None:
    began = time.monotonic()
    with pytest.raises(CapacityError, match=r"64 training workers of 1 CPU each.*it lacks \d+ more CPU"):
        run(
            root,
            "roomless",
            parallel={"workers": {"min": 64, "max": 64}},
            optimizer={"global_batch_size": 64},
        )
    assert time.monotonic() - began < 10


def test_a_run_does_not_wait_for_room_for_ever(ray_session: Session) -> None:
    """Ray's elastic policy would: below `workers.min` it decides nothing, again and again."""
    config = ElasticConfig(room_timeout_s=0.2, notice_s=0.05)
    watch = RunWatch(None, config, workers=3, elastic=True, run_folder="", on_incident=lambda incident: None)
    lost = RestartingState(training_failed_error=TrainingFailedError("its node is gone"))
    watch.after_controller_state_update(RunningState(), lost)
    time.sleep(0.3)
    with pytest.raises(
        TrainingError, match=r"no room for 3 training workers for 0 s; the cluster has 1 nodes"
    ) as caught:
        watch.after_controller_state_update(lost, lost)
    assert "room_timeout_s" in str(caught.value.hint)


def here(root: Path) -> dict[str, str]:
    """The environment of a rehearsal that starts a Ray of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, environment.HOME: str(root)}


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def commits(followed: Rehearsal) -> list[int]:
    return sorted(followed.losses())


def test_a_worker_told_to_end_a_worker_that_hangs_and_a_driver_told_to_stop(stage: Path, tmp_path: Path) -> None:
    """SIGTERM to a worker makes a checkpoint; SIGSTOP is found out and named; SIGTERM to the driver saves and ends."""
    changes = {"steps": 100_000, "checkpoint": {"every_steps": 100_000}, "elastic": {"stuck_after_s": 12}}
    with Rehearsal(play(stage, **changes), here(stage), tmp_path / "log") as followed:
        followed.step(3)
        os.kill(followed.members()[1][1], signal.SIGTERM)
        deadline = time.monotonic() + 120
        while not followed.written() and time.monotonic() < deadline:
            time.sleep(0.1)
        (saved,) = commits(followed)

        began = len(followed.happened)
        stopped = followed.members()[1]
        os.kill(stopped[1], signal.SIGSTOP)
        incident = followed.until(lambda each: each.what == "incident", after=began)
        verdict = incident.facts["verdict"]
        assert verdict.startswith(f"Rank 1 of 2 on node {stopped[0]} (process {stopped[1]}) is stuck, and the other 1")
        assert "has not answered" in verdict
        resumed = followed.until(lambda each: each.what == "step" and each.at > incident.at, after=began)
        assert resumed.facts["step"] > saved
        assert not psutil.pid_exists(stopped[1])

        members = followed.members()
        assert stopped not in members
        followed.process.send_signal(signal.SIGTERM)
        ended = followed.end()
        assert ended["stopped"].startswith("stopped by SIGTERM after step")
        assert followed.process.wait(timeout=30) == 0
        last = commits(followed)[-1]
        assert f"step {last}," in ended["stopped"]
        psutil.wait_procs([psutil.Process(pid) for _, pid in members if psutil.pid_exists(pid)], timeout=10)
        assert [pid for _, pid in members if psutil.pid_exists(pid)] == []


def resizes(followed: Rehearsal) -> list[Happening]:
    return [each for each in followed.happened if each.what == "incident" and each.facts["kind"] == "resize"]


@pytest.mark.chaos
def test_a_run_shrinks_when_a_node_is_lost_and_grows_without_repeating_a_step(stage: Path, tmp_path: Path) -> None:
    changes = {
        "steps": 100_000,
        "checkpoint": {"every_steps": 20},
        "parallel": {"workers": {"min": 1, "max": 2}, "threads_per_worker": 1},
    }
    with Raylets({environment.HOME: str(stage)}) as cluster:
        lost = cluster.add()
        env = {**cluster.env, environment.RAY_ADDRESS: cluster.address, environment.HOME: str(stage)}
        with Rehearsal(play(stage, **changes), env, tmp_path / "log") as followed:
            followed.step(25, workers=2, within_s=240)
            began = len(followed.happened)
            cluster.lose(lost)
            alone = followed.step(1, workers=1, after=began, within_s=240)
            (incident,) = followed.incidents()
            assert incident["kind"] == "node"
            assert "was lost with its node" in incident["verdict"]
            followed.step(alone.facts["step"] + 10, workers=1, after=began)

            began = len(followed.happened)
            cluster.add()
            both = followed.step(1, workers=2, after=began, within_s=240)
            (resize,) = resizes(followed)
            assert resize.facts["verdict"].startswith("Resized from 1 to 2 workers")
            assert resize.facts["lost_steps"] == 0
            before = [
                each.facts["step"] for each in followed.happened[: followed.happened.index(both)] if each.what == "step"
            ]
            assert both.facts["step"] == max(before) + 1, "nothing is trained again"
            followed.process.send_signal(signal.SIGTERM)
            assert "stopped" in followed.end()
