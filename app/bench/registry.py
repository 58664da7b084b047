"""`flywheel bench registry`: what the registry costs when it is large.

A registry of its own, in a scratch home and a Ray of its own, is filled with versions that have facts but no files.
Then, on that registry: resolving against a client's snapshot, registering, the model listing, a move reaching
subscribers in other processes, and the actor coming back after `kill -9`. Apart from it: a large artifact's way into
the version store, side by side with a plain copy of the same files.
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import ray
from safetensors.numpy import save_file

from actors.registry.client import RegistryClient, RegistryHandle
from actors.registry.facts import Artifact, Fact, Version, VersionFact
from actors.registry.rules import Promote, decide
from actors.registry.snapshot import resolve
from actors.registry.state import replay
from actors.registry.store import SqlEventStore
from actors.registry.upload import admit, plain_copy
from app.bench.report import Bar, Report, Result, report
from app.session import connected
from cluster import environment
from cluster.database import sqlite_uri
from cluster.progress import Progress, Sink
from cluster.storage import Home
from deployments.gateway.models import Base, Served, cards

_BASE = "smollm2-135m-instruct"
_PROCESSES = 4
_MOVES = 20


@dataclass(frozen=True)
class Size:
    """How large: versions in so many names, the artifact in MB, subscribers, and repetitions of each measurement."""

    versions: int = 10_000
    names: int = 500
    artifact_mb: int = 1024
    subscribers: int = 20
    runs: int = 3


def run(size: Size, sink: Sink) -> Report:
    """Measure everything; needs about as much disk as three artifacts, under the system's temporary folder."""
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        folder = Path(scratch)
        sink(Progress("bench", 0, 4, "parts", note="artifacts"))
        results = _artifacts(folder, size)
        sink(Progress("bench", 1, 4, "parts", note=f"{size.versions} versions"))
        home = _own_home(folder / "home")
        fill(home, size.versions, size.names)
        with connected():
            RegistryClient.start(home)
            sink(Progress("bench", 2, 4, "parts", note="resolve, register, list, push"))
            registry = RegistryClient.connect(by="bench")
            results += [*_reading(registry, size), *_registering(registry, home, size), *_pushing(registry, size)]
            sink(Progress("bench", 3, 4, "parts", note="kill -9"))
            results.append(_recovering(registry, size))
        sink(Progress("bench", 4, 4, "parts"))
    bars = {
        "upload_vs_copy": 1.2,
        "resolve": 20.0,
        "register": 50.0,
        "push_to_all": 200.0,
        "recovery": 3.0,
    }
    return report(
        "registry", size.runs, results, [Bar.at_most(each, bars[each.name]) for each in results if each.name in bars]
    )


def _own_home(root: Path) -> Home:
    """A home that has nothing to do with the user's, for this process and all that it starts."""
    root.mkdir()
    for named in (environment.RAY_ADDRESS, environment.DATABASE_URI, environment.TRACKING_URI):
        os.environ.pop(named, None)
    os.environ[environment.HOME] = str(root)
    environment.prepare(root)
    return Home(root)


def fill(home: Home, versions: int, names: int) -> None:
    """A log with so many versions, one alias per name; written as one transaction, as no user of it could."""
    store = SqlEventStore(sqlite_uri(home.registry_database))
    now = datetime.now(UTC)
    made: list[Fact] = []
    for place in range(versions):
        name, number = f"model-{place % names:03d}", 1 + place // names
        made.append(
            Version(
                id=f"{name}/{number}",
                name=name,
                number=number,
                kind="adapter",
                source_path=Path("/bench"),
                base=_BASE,
                path=Path(name) / f"{place:012x}",
                digest=f"{place:064x}",
                created_at=now,
            )
        )
    state = replay(store.append(made, after=0, at=now, by="bench"))
    moves: list[Fact] = []
    for name in state.versions:
        command = Promote(name, "champion", {1: 1.0}, "bench", "bench", f"fill-{name}", force=True)
        moves += decide(state, command, now=now).facts
    store.append(moves, after=state.seq, at=now, by="bench")
    store.close()


def _artifacts(folder: Path, size: Size) -> list[Result]:
    source = _adapter(folder / "source", size.artifact_mb)
    fact = VersionFact(name="large", kind="adapter", source_path=source, base=_BASE)
    copies, uploads = [], []
    for number in range(size.runs):
        began = time.perf_counter()
        plain_copy(source, folder / f"copy-{number}")
        copies.append(time.perf_counter() - began)
        shutil.rmtree(folder / f"copy-{number}")
        began = time.perf_counter()
        admit(fact, Home(folder / f"upload-{number}"))
        uploads.append(time.perf_counter() - began)
        shutil.rmtree(folder / f"upload-{number}")
    shutil.rmtree(source)
    return [
        Result.of("plain_copy", "s", copies),
        Result.of("upload", "s", uploads),
        Result.of("upload_vs_copy", "ratio", [ours / theirs for ours, theirs in zip(uploads, copies, strict=True)]),
    ]


def _reading(registry: RegistryClient, size: Size) -> list[Result]:
    snapshot = registry.snapshot()
    references = [f"model-{number % size.names:03d}" for number in range(2000)]
    references = [name if place % 2 else f"{name}/1" for place, name in enumerate(references)]
    times, listings = [], []
    served = Served(bases=(Base(_BASE),))
    for _ in range(size.runs):
        each = []
        for reference in references:
            began = time.perf_counter_ns()
            resolve(snapshot, reference, key="somebody")
            each.append((time.perf_counter_ns() - began) / 1e3)
        times.append(median(each))
        began_s = time.perf_counter()
        cards(served, snapshot)
        listings.append((time.perf_counter() - began_s) * 1e3)
    return [Result.of("resolve", "µs", times), Result.of("list_models", "ms", listings)]


def _registering(registry: RegistryClient, home: Home, size: Size) -> list[Result]:
    medians = []
    for turn in range(size.runs):
        times = []
        for number in range(40):
            fact = VersionFact(name="model-000", kind="adapter", source_path=Path("/bench"), base=_BASE)
            artifact = Artifact(path=Path("model-000") / f"new-{turn}-{number}", digest=f"new-{turn}-{number}")
            (home.versions / artifact.path).mkdir(parents=True)
            began = time.perf_counter()
            registry.record(fact, artifact)
            times.append((time.perf_counter() - began) * 1e3)
        medians.append(median(times))
    return [Result.of("register", "ms", medians)]


class Subscribers:
    """Some long polls in one process; says when each of them has seen a move."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[int, list[float]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Returns the number of the snapshot that all of them have."""
        handle = RegistryHandle()
        first = await handle.snapshot()
        self._tasks = [asyncio.create_task(self._follow(handle)) for _ in range(self._count)]
        return first.number

    async def _follow(self, handle: RegistryHandle) -> None:
        known = await handle.snapshot()
        while True:
            known = await handle.wait_snapshot(known, 30)
            self._seen.setdefault(known.number, []).append(time.time())

    async def seen(self, number: int) -> list[float]:
        """Wall-clock times at which each subscriber had the snapshot `number`, once all have it."""
        async with asyncio.timeout(30):
            while len(self._seen.get(number, ())) < self._count:
                await asyncio.sleep(0.005)
        return self._seen[number]


def _pushing(registry: RegistryClient, size: Size) -> list[Result]:
    each = max(1, size.subscribers // _PROCESSES)
    others = [ray.remote(Subscribers).options(num_cpus=0).remote(each) for _ in range(_PROCESSES)]
    ray.get([other.start.remote() for other in others])
    time.sleep(1)  # the long polls stand
    firsts, lasts = [], []
    for move in range(_MOVES):
        began = time.time()
        registry.promote("model-001", "champion", 1 + (move + 1) % 2, why="bench", force=True)
        number = registry.status().snapshot
        seen = [
            moment - began for times in ray.get([other.seen.remote(number) for other in others]) for moment in times
        ]
        firsts.append(median(seen) * 1e3)
        lasts.append(max(seen) * 1e3)
    for other in others:
        ray.kill(other)
    return [Result.of("push_to_one", "ms", firsts), Result.of("push_to_all", "ms", lasts)]


def _recovering(registry: RegistryClient, size: Size) -> Result:
    times = []
    for _ in range(size.runs):
        os.kill(registry.pid(), signal.SIGKILL)
        began = time.perf_counter()
        registry.snapshot()
        times.append(time.perf_counter() - began)
        time.sleep(1)
    return Result.of("recovery", "s", times)


def _adapter(folder: Path, megabytes: int) -> Path:
    """A LoRA folder of that size, of random numbers: nothing that a disk could compress."""
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": _BASE, "r": 64, "lora_alpha": 64, "target_modules": ["q"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    width = megabytes * 2**20 // (2 * 4 * 64)
    random = np.random.default_rng(0).standard_normal((64, width), dtype=np.float32)
    save_file({"m.q.lora_A.weight": random, "m.q.lora_B.weight": random.T.copy()}, folder / "adapter_model.safetensors")
    return folder
