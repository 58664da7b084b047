"""`flywheel bench recovery`: how long a run stands still when a worker is killed, a node is lost, or one comes.

Runs of a tiny model, so that what is measured is the path and not the model: one on a Ray of its own whose worker is
killed, one on a cluster of several nodes. Beside each, what a fresh process needs to import torch and transformers
and to load the same model, measured in the same run with as many processes at once as the group has workers: that part
no framework saves. The bars are for the rest.
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
PARTS: Final = ("notice", "restart", "import", "load", "data", "first step")
_PATIENCE_S: Final = 240.0
_BEFORE: Final = 10
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
    """One event and what came after it, in seconds. `parts` add up to `total`; `fresh`: see `fresh_process`."""

    total: float
    parts: Mapping[str, float]
    fresh: float

    @property
    def beyond(self) -> float:
        return self.total - self.fresh


@dataclass
class _Found:
    """What one run went through, and the account of its rows at its end."""

    recoveries: dict[str, list[Recovery]] = field(default_factory=dict)
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
            results.append(Result.of(f"{event}: fresh process", "s", [one.fresh for one in recoveries]))
            beyond = Result.of(f"{event}: beyond a fresh process", "s", [one.beyond for one in recoveries])
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
    found = _Found()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with _playing(home, {**env, environment.HOME: str(home)}, {"min": 2, "max": 2}, runs, found) as followed:
        for _ in range(runs):
            fresh = fresh_process(home, 2)
            _in_stride(followed, 2)
            began, at = len(followed.happened), time.time()
            os.kill(followed.members()[1][1], signal.SIGKILL)
            _note(found, "worker killed", followed, at, began, workers=2, fresh=fresh)
    return found


def _resized(home: Path, runs: int) -> _Found:
    found = _Found()
    with Raylets({environment.HOME: str(home)}) as cluster:
        env = {**cluster.env, environment.RAY_ADDRESS: cluster.address, environment.HOME: str(home)}
        second = cluster.add()
        with _playing(home, env, {"min": 1, "max": 2}, runs, found) as followed:
            for _ in range(runs):
                fresh = fresh_process(home, 1)
                _in_stride(followed, 2)
                began, at = len(followed.happened), time.time()
                cluster.lose(second)
                _note(found, "node lost", followed, at, began, workers=1, fresh=fresh)
                fresh = fresh_process(home, 2)
                _in_stride(followed, 1)
                began, at = len(followed.happened), time.time()
                second = cluster.add()
                there = followed.until(
                    lambda each: each.what == "nodes" and each.facts["alive"] == 2, after=began, within_s=_PATIENCE_S
                )
                found.started_s.append(there.at - at)
                _note(found, "node added", followed, there.at, began, workers=2, fresh=fresh)
    return found


@contextmanager
def _playing(
    home: Path, env: Mapping[str, str], workers: Mapping[str, int], runs: int, found: _Found
) -> Iterator[Rehearsal]:
    """A run that goes on until it is told to stop; then its account is held against what it had to do."""
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
    _, data = base_and_data(play)
    with Rehearsal(play, env, home / "log") as followed:
        yield followed
        followed.process.send_signal(signal.SIGTERM)
        followed.end()
    found.audit = audit_run(play.run_id, TrainConfig.model_validate(settings), data, play.stage)


def _in_stride(followed: Rehearsal, workers: int) -> None:
    """Wait until the present group has made some steps."""
    first = followed.step(1, workers=workers, after=_last_group(followed), within_s=_PATIENCE_S)
    followed.step(
        first.facts["step"] + _BEFORE, workers=workers, after=followed.happened.index(first), within_s=_PATIENCE_S
    )


def _last_group(followed: Rehearsal) -> int:
    return max((number for number, each in enumerate(followed.happened) if each.what == "group"), default=0)


def _note(found: _Found, event: str, followed: Rehearsal, at: float, began: int, *, workers: int, fresh: float) -> None:
    """Wait for the first step after what happened at `at`; `began` counts what had been told before."""
    followed.until(
        lambda each: each.what == "mark" and each.facts["mark"] == "step" and each.facts["workers"] == workers,
        after=began,
        within_s=_PATIENCE_S,
    )
    since = followed.happened[began:]
    found.recoveries.setdefault(event, []).append(recovery(at, since, fresh))


def recovery(at: float, since: list[Happening], fresh: float) -> Recovery:
    """The split of the time from `at` to the last first step in `since`."""
    last = max(number for number, each in enumerate(since) if each.what == "group")
    noticed = next(each.at for each in since if each.what == "incident")
    marks = {each.facts["mark"]: each.at for each in since[last:] if each.what == "mark"}
    ends = [noticed, *(marks[name] for name in ("called", "started", "loaded", "data", "step"))]
    parts = {part: end - begin for part, begin, end in zip(PARTS, [at, *ends[:-1]], ends, strict=True)}
    return Recovery(ends[-1] - at, parts, fresh)


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
