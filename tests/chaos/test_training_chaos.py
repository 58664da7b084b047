"""Everything at once: a run of 200 steps loses a worker ten times, then a node, and gets one; its rows and losses do
not show it. `make chaos`; not part of `make test`, for it takes minutes.

The moments and the victims are drawn: `FLYWHEEL_CHAOS_SEED` (default 0) makes other ones. What it did is printed.
"""

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from actors.training.audit import audit_run
from actors.training.config import TrainConfig
from app.bench.raylets import Node, Raylets
from app.bench.rehearsal import Happening, Play, Rehearsal, base_and_data
from cluster import environment

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

STEPS, KILLS, ROWS = 200, 10, 100
SEED = int(os.environ.get("FLYWHEEL_CHAOS_SEED", "0"))
PATIENCE_S = 240.0
LAST = 20
"""Steps at the end in which nothing happens: the run must not be over before its last mishap."""
SETTINGS: dict[str, Any] = {
    # No dropout: its random numbers are a rank's, and another number of ranks draws others.
    "adapter": {"r": 4, "alpha": 8, "dropout": 0.0},
    # Many micro-batches: steps that take a while, so that a mishap hits the step that was drawn and not a later one.
    # An epoch is three steps, and leaves out four rows.
    "optimizer": {"learning_rate": 2e-3, "global_batch_size": 64, "micro_batch_size": 1},
    "checkpoint": {"every_steps": 5},
    "precision": "fp32",
    "steps": STEPS,
    "parallel": {"workers": {"min": 1, "max": 2}, "threads_per_worker": 1},
    "elastic": {"regrow_s": 3},
    "failures": {"max": KILLS + 1},  # the lost node is one, too
}


@dataclass(frozen=True)
class Mishap:
    """What happens once step `step` is done, after `delay_s`."""

    step: int
    delay_s: float
    kind: Literal["kill", "lose", "add"]


def script(draw: random.Random) -> list[Mishap]:
    steps = sorted(draw.sample(range(3, STEPS - LAST), KILLS + 2))
    lose, add = sorted(draw.sample(range(KILLS + 2), 2))
    kinds: dict[int, Literal["lose", "add"]] = {lose: "lose", add: "add"}
    return [Mishap(step, draw.uniform(0, 0.5), kinds.get(number, "kill")) for number, step in enumerate(steps)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Raylets]:
    with Raylets({environment.HOME: str(tmp_path)}) as started:
        yield started


def test_ten_kills_and_two_resizes_leave_no_trace_in_rows_or_losses(cluster: Raylets, tmp_path: Path) -> None:
    second = cluster.add()
    undisturbed = play(tmp_path, "undisturbed")
    with follow(undisturbed, cluster) as followed:
        assert followed.end(within_s=600)["steps"] == STEPS
        wanted = followed.losses()

    began_s = time.monotonic()
    disturbed = play(tmp_path, "disturbed")
    with follow(disturbed, cluster) as followed:
        for mishap in script(draw := random.Random(SEED)):
            second = suffer(followed, mishap, draw, cluster, second)
        ended = followed.end(within_s=600)
        losses, incidents = followed.losses(), followed.incidents()
    assert ended.get("steps") == STEPS, ended

    kinds = Counter(each["kind"] for each in incidents)
    account = audited(disturbed)
    worst = max(abs(losses[step] - loss) / abs(loss) for step, loss in wanted.items())
    sys.stdout.write(
        f"\nseed {SEED}: {time.monotonic() - began_s:.0f} s; {dict(kinds)}; "
        f"{sum(each['lost_steps'] for each in incidents)} steps done again; rows: {account.seen} seen, "
        f"{account.lost} lost, {account.repeated} repeated; losses differ by {worst:.1e} at most\n"
    )
    assert kinds.total() == KILLS + 2, kinds
    assert kinds["resize"] == 1
    assert kinds["node"] == 1
    assert account.exact, account.doubts
    assert account.seen == STEPS * SETTINGS["optimizer"]["global_batch_size"]
    assert losses.keys() >= wanted.keys()  # the resize made one more checkpoint
    assert worst < 1e-5
    assert ended["loss_last"] == pytest.approx(wanted[STEPS], rel=1e-5)


def play(root: Path, name: str) -> Play:
    home = root / name
    home.mkdir()
    return Play(home, SETTINGS, rows=ROWS, run_id=name)


def follow(acted: Play, cluster: Raylets) -> Rehearsal:
    env = {**cluster.env, environment.RAY_ADDRESS: cluster.address, environment.HOME: str(acted.home)}
    return Rehearsal(acted, env, acted.home / "log")


def suffer(followed: Rehearsal, mishap: Mishap, draw: random.Random, cluster: Raylets, second: Node) -> Node:
    """Let it happen, and wait until the next group makes steps; the node that may be lost is given back."""
    followed.step(mishap.step, after=last_group(followed), within_s=PATIENCE_S)
    time.sleep(mishap.delay_s)
    began = len(followed.happened)
    workers = len(followed.members())
    if mishap.kind == "kill":
        os.kill(draw.choice(followed.members())[1], signal.SIGKILL)
    elif mishap.kind == "lose":
        cluster.lose(second)
        workers = 1
    else:
        second = cluster.add()
        workers = 2

    def steps_again(each: Happening) -> bool:
        if each.what == "end":  # the few steps after the last kill may be over before anybody looks
            return True
        return each.what == "mark" and each.facts["mark"] == "step" and each.facts["workers"] == workers

    followed.until(steps_again, after=began, within_s=PATIENCE_S)
    return second


def last_group(followed: Rehearsal) -> int:
    return max((number for number, each in enumerate(followed.happened) if each.what == "group"), default=0)


def audited(acted: Play) -> Any:
    _, data = base_and_data(acted)
    return audit_run(acted.run_id, TrainConfig.model_validate(acted.settings), data, acted.stage)
