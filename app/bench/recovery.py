"""`flywheel bench recovery`: how long a run stands still when a worker is killed, a node is lost, or one comes.

Runs of a tiny model, so that what is measured is the path and not the model: one on a Ray of its own whose worker is
killed, one on a cluster of several nodes. Beside each, what a fresh process needs to import torch and transformers
and to load the same model, before and after the run (in it, the run would slow it down), with as many processes at
once as the new group has workers: that part no framework saves. The bars are for the rest.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from actors.training.audit import audit_run
from actors.training.config import TrainConfig
from actors.training.ledger import Audit
from app.bench.raylets import Raylets
from app.bench.rehearsal import Happening, Play, Rehearsal, base_and_data
from app.bench.report import Bar, Report, Result, report
from cluster import environment
from cluster.progress import Progress, Sink

KILL_BAR_S: Final = 5.0
RESIZE_BAR_S: Final = 15.0
_WORKERS: Final = {"worker killed": 2, "node lost": 1, "node added": 2}
"""The events, and the workers of the group that comes after."""
PARTS: Final = ("notice", "restart", "import", "load", "data", "first step")
_PATIENCE_S: Final = 240.0
_BEFORE: Final = 40
"""Steps that a group makes before something happens to it: it is in its stride, and has a checkpoint behind it."""
_FRESH: Final = """
import json, sys, time
began = time.perf_counter()
import torch, transformers
from transformers import AutoModelForCausalLM
imported = time.perf_counter()
torch.set_num_threads(1)
AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
print(json.dumps([imported - began, time.perf_counter() - imported]))
"""


@dataclass(frozen=True)
class Recovery:
    """One event and what came after it, in seconds. `parts` add up to `total`."""

    total: float
    parts: Mapping[str, float]


@dataclass
class _Found:
    """What one run went through, and the account of its rows at its end."""

    recoveries: dict[str, list[Recovery]] = field(default_factory=dict)
    fresh_s: dict[int, list[float]] = field(default_factory=dict)
    """Of `fresh_process`, by how many at once."""
    started_s: list[float] = field(default_factory=list)
    """From `ray start` to the node being in the cluster."""
    audit: Audit | None = None


def run(sink: Sink, *, runs: int = 3, nodes: bool = True) -> Report:
    """Kill a worker `runs` times; lose and add a node `runs` times unless `nodes` is false."""
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        sink(Progress("bench", 0, 1 + nodes, "runs", note="a worker is killed"))
        found = [_killed(Path(scratch) / "killed", runs)]
        if nodes:
            sink(Progress("bench", 1, 2, "runs", note="a node is lost, a node is added"))
            found.append(_resized(Path(scratch) / "resized", runs))
    results, bars = _figures(found)
    return report("recovery", runs, results, bars)


def _figures(found: list[_Found]) -> tuple[list[Result], list[Bar]]:
    results, bars = [], []
    for each in found:
        for event, recoveries in each.recoveries.items():
            bar = KILL_BAR_S if event == "worker killed" else RESIZE_BAR_S
            results.append(Result.of(f"{event}: to the first new step", "s", [one.total for one in recoveries]))
            for part in PARTS:
                results.append(Result.of(f"{event}: {part}", "s", [one.parts[part] for one in recoveries]))
            fresh = Result.of(f"{event}: fresh process", "s", each.fresh_s[_WORKERS[event]])
            beyond = Result.of(
                f"{event}: beyond a fresh process", "s", [one.total - fresh.median for one in recoveries]
            )
            results.append(fresh)
            results.append(beyond)
            bars.append(Bar.at_most(beyond, bar))
            if event == "node added":
                results.append(Result.of("node added: its own start, before", "s", each.started_s))
        assert each.audit is not None
        which = "kills" if "worker killed" in each.recoveries else "resizes"
        for name, rows in (("lost", each.audit.lost), ("repeated", each.audit.repeated)):
            result = Result.of(f"{which}: rows {name}, of {each.audit.seen}", "rows", [float(rows)])
            results.append(result)
            bars.append(Bar.at_most(result, 0.0))
        proven = Result.of(f"{which}: account proven", "yes", [float(each.audit.proven)])
        results.append(proven)
        bars.append(Bar.at_least(proven, 1.0))
    return results, bars


def _killed(home: Path, runs: int) -> _Found:
    found, play = _Found(), _play(home, {"min": 2, "max": 2}, runs)
    _measure_fresh(found, home, runs, 2)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with _playing(play, {**env, environment.HOME: str(home)}, found) as followed:
        for _ in range(runs):
            _in_stride(followed, 2)
            began, at = len(followed.happened), time.time()
            os.kill(followed.members()[1][1], signal.SIGKILL)
            _note(found, "worker killed", followed, at, began)
    _measure_fresh(found, home, runs, 2)
    return found


def _resized(home: Path, runs: int) -> _Found:
    found, play = _Found(), _play(home, {"min": 1, "max": 2}, runs)
    _measure_fresh(found, home, runs, 1, 2)
    with Raylets({environment.HOME: str(home)}) as cluster:
        env = {**cluster.env, environment.RAY_ADDRESS: cluster.address, environment.HOME: str(home)}
        second = cluster.add()
        with _playing(play, env, found) as followed:
            for _ in range(runs):
                _in_stride(followed, 2)
                began, at = len(followed.happened), time.time()
                cluster.lose(second)
                _note(found, "node lost", followed, at, began)
                _in_stride(followed, 1)
                began, at = len(followed.happened), time.time()
                second = cluster.add()
                there = followed.until(
                    lambda each: each.what == "nodes" and each.facts["alive"] == 2, after=began, within_s=_PATIENCE_S
                )
                found.started_s.append(there.at - at)
                _note(found, "node added", followed, there.at, began)
    _measure_fresh(found, home, runs, 1, 2)
    return found


def _play(home: Path, workers: Mapping[str, int], runs: int) -> Play:
    """A run that goes on until it is told to stop."""
    home.mkdir()
    settings: dict[str, Any] = {
        "adapter": {"r": 4, "alpha": 8},
        "optimizer": {"global_batch_size": 4, "micro_batch_size": 1},
        "precision": "fp32",
        "steps": 1_000_000,
        "parallel": {"workers": workers, "threads_per_worker": 1},
        "failures": {"max": runs},
    }
    play = Play(home, settings)
    base_and_data(play)
    return play


@contextmanager
def _playing(play: Play, env: Mapping[str, str], found: _Found) -> Iterator[Rehearsal]:
    """The run; at its end its account is held against what it had to do."""
    with Rehearsal(play, env, play.home / "log") as followed:
        yield followed
        _in_stride(followed, 2)
        followed.process.send_signal(signal.SIGTERM)
        followed.end()
    _, data = base_and_data(play)
    found.audit = audit_run(play.run_id, TrainConfig.model_validate(play.settings), data, play.stage)


def _measure_fresh(found: _Found, home: Path, runs: int, *sizes: int) -> None:
    for size in sizes:
        found.fresh_s.setdefault(size, []).extend(fresh_process(home, size) for _ in range(runs))


def _in_stride(followed: Rehearsal, workers: int) -> None:
    """Wait until the present group has made some steps."""
    first = followed.step(1, workers=workers, after=_last_group(followed), within_s=_PATIENCE_S)
    followed.step(
        first.facts["step"] + _BEFORE, workers=workers, after=followed.happened.index(first), within_s=_PATIENCE_S
    )


def _last_group(followed: Rehearsal) -> int:
    return max((number for number, each in enumerate(followed.happened) if each.what == "group"), default=0)


def _note(found: _Found, event: str, followed: Rehearsal, at: float, began: int) -> None:
    """Wait for the first step after what happened at `at`; `began` counts what had been told before."""
    workers = _WORKERS[event]
    followed.until(
        lambda each: each.what == "mark" and each.facts["mark"] == "step" and each.facts["workers"] == workers,
        after=began,
        within_s=_PATIENCE_S,
    )
    since = followed.happened[began:]
    found.recoveries.setdefault(event, []).append(recovery(at, since))


def recovery(at: float, since: list[Happening]) -> Recovery:
    """The split of the time from `at` to the last first step in `since`."""
    last = max(number for number, each in enumerate(since) if each.what == "group")
    noticed = next(each.at for each in since if each.what == "incident")
    marks = {each.facts["mark"]: each.at for each in since[last:] if each.what == "mark"}
    ends = [noticed, *(marks[name] for name in ("called", "started", "loaded", "data", "step"))]
    parts = {part: end - begin for part, begin, end in zip(PARTS, [at, *ends[:-1]], ends, strict=True)}
    return Recovery(ends[-1] - at, parts)


def fresh_process(home: Path, at_once: int) -> float:
    """Seconds that the slowest of `at_once` fresh processes needs to import torch and transformers and load the model.

    What Python itself needs to start is not in it.
    """
    base = str(home / "tiny-llama")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", _FRESH, base], stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(at_once)
    ]
    return max(float(sum(json.loads(process.communicate(timeout=120)[0]))) for process in processes)
