"""A whole training run in a process of its own, that says what happens in it, line by line.

`Rehearsal` starts and follows one; `python -m app.bench.rehearsal` is one. For benches and tests of recovery: whoever
watches knows every step, every group of workers with its processes, and may end any of them.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_LOOK_S: Final = 0.05
_VOCABULARY: Final = 128
_LOSSES: Final = "losses.jsonl"


@dataclass(frozen=True)
class Play:
    """What is rehearsed: a tiny Llama on `rows` random rows, with `settings` of training, in the home at `home`."""

    home: Path
    settings: Mapping[str, Any]
    rows: int = 64
    length: int = 24
    run_id: str = "rehearsal-1"

    @property
    def stage(self) -> Any:
        """The `Home` it is played in."""
        from cluster.storage import Home

        return Home(Path(self.home))


@dataclass(frozen=True)
class Happening:
    """One line. `what`: nodes, group, mark, step, incident or end; `at` is `time.time`."""

    what: str
    at: float
    facts: Mapping[str, Any]


@dataclass
class Rehearsal:
    """Follows one run. `log` is where its process writes what nobody reads in good times."""

    play: Play
    env: Mapping[str, str]
    log: Path
    happened: list[Happening] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = {**dataclasses.asdict(self.play), "home": str(self.play.home)}
        self._news = threading.Condition()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.bench.rehearsal", json.dumps(spec)],
                env={**self.env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, text=True,
                cwd=Path(__file__).resolve().parents[2],
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, holds: Callable[[Happening], bool], *, after: int = 0, within_s: float = 120) -> Happening:
        """The first happening from number `after` on for which `holds`; `TimeoutError` with the log's end."""
        deadline = time.monotonic() + within_s
        at = after
        with self._news:
            while True:
                while at < len(self.happened):
                    if holds(self.happened[at]):
                        return self.happened[at]
                    at += 1
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and at >= len(self.happened) and self._over):
                    break
                self._news.wait(min(left, 1.0))
        raise TimeoutError(f"it did not happen; last: {self.happened[-3:]}\n{self.log.read_text()[-3000:]}")

    _over = False

    def step(self, step: int, *, workers: int | None = None, after: int = 0, within_s: float = 120) -> Happening:
        """The first time that step `step` (or a later one) is done, by a group of `workers`."""

        def holds(each: Happening) -> bool:
            facts = each.facts
            return each.what == "step" and facts["step"] >= step and workers in (None, facts["workers"])

        return self.until(holds, after=after, within_s=within_s)

    def members(self) -> list[tuple[str, int]]:
        """(node, pid) of the present workers, by rank."""
        groups = [each for each in self.happened if each.what == "group"]
        return [(node, pid) for node, pid in groups[-1].facts["members"]]

    def written(self) -> bool:
        """Whether the run has told of a checkpoint."""
        return (self.play.home / _LOSSES).exists()

    def losses(self) -> dict[int, float]:
        """Loss, to the last digit, by step of a checkpoint; of one that was written twice, the later."""
        lines = (self.play.home / _LOSSES).read_text(encoding="utf-8").splitlines()
        return dict(map(json.loads, lines))

    def incidents(self) -> list[Mapping[str, Any]]:
        """What the run said had happened to its workers."""
        return [each.facts for each in self.happened if each.what == "incident"]

    def end(self, within_s: float = 180) -> Mapping[str, Any]:
        """How it ended: its result, or its error."""
        return self.until(lambda each: each.what == "end", within_s=within_s).facts

    def close(self) -> None:
        """End the process, if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                facts = json.loads(line)
                with self._news:
                    self.happened.append(Happening(facts.pop("what"), facts.pop("at"), facts))
                    self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


@dataclass(frozen=True)
class _Book:
    """The `on_checkpoint` of a rehearsal: one line for each."""

    path: Path

    def __call__(self, _identity: str, step: int, _path: str, metrics: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, metrics["loss"]]) + "\n")


class _Teller:
    """Writes happenings to the real stdout, which Ray and its libraries do not get."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.workers = 0

    def tell(self, what: str, at: float | None = None, **facts: Any) -> None:
        line = json.dumps({"what": what, "at": at or time.time(), **facts})
        with self._lock:
            self._out.write(line + "\n")
            self._out.flush()


def _watch(teller: _Teller, run_id: str, over: threading.Event) -> None:
    """Follow the run's control: its groups, where rank 0 of each has come to, and what happened."""
    import ray
    from ray.exceptions import RayError

    from actors.training.control import Seen, name_of

    groups, incidents, marks, nodes = 0, 0, set[str](), 0
    control = None
    while not over.wait(_LOOK_S):
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive != nodes:
            nodes = alive
            teller.tell("nodes", alive=alive)
        try:
            control = control or ray.get_actor(name_of(run_id))
            seen: Seen = ray.get(control.see.remote(), timeout=5)
        except (ValueError, RayError):
            continue
        for incident in seen.incidents[incidents:]:
            teller.tell("incident", **dataclasses.asdict(incident))
        incidents = len(seen.incidents)
        for group in seen.groups[groups:]:
            marks = set()
            teller.workers = len(group.members)
            teller.tell("group", group.began_at, members=group.members)
        groups = len(seen.groups)
        for mark, at in seen.marks.items():
            if mark not in marks:
                marks.add(mark)
                teller.tell("mark", at, mark=mark, workers=teller.workers)


def base_and_data(play: Play) -> tuple[Any, Any]:
    """The tiny model and the random rows of a play, in its home; made the first time."""
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from actors.data.version import DataVersion, ShardManifest, SplitManifest
    from cluster.models import obtain

    home = play.stage
    folder = home.root / "tiny-llama"
    if not folder.exists():
        torch.manual_seed(0)
        shape = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=_VOCABULARY, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(shape).save_pretrained(folder)
    shard = ShardManifest(file="train-00000.parquet", rows=play.rows, sha256="")
    version = DataVersion(
        name="rehearsal", digest="ab" * 32, stage="tokens", shape="chat", parent=None,
        splits={"train": SplitManifest(rows=play.rows, groups=1, files=(shard,))},
        quarantined={}, dropped={}, config={}, fingerprint="", created_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    if not version.folder(home).exists():
        draw = random.Random(7)
        ids = [[draw.randrange(1, _VOCABULARY) for _ in range(play.length)] for _ in range(play.rows)]
        columns = {"input_ids": ids, "labels": ids, "position_ids": [list(range(play.length))] * play.rows}
        version.folder(home).mkdir(parents=True)
        arrays = {name: pa.array(values, pa.list_(pa.int32())) for name, values in columns.items()}
        samples = [[f"sample-{row}"] for row in range(play.rows)]
        table = pa.table(arrays | {"sample_ids": samples, "row": pa.array(range(play.rows), pa.int64())})
        pq.write_table(table, version.folder(home) / shard.file)
    return obtain(str(folder), home), version


def main(spec: str) -> None:
    """Be the rehearsal that `spec`, a `Play` as JSON, says."""
    from cluster import environment

    play = Play(**json.loads(spec))
    teller = _Teller()
    environment.prepare(Path(play.home))

    from actors.training.config import TrainConfig
    from actors.training.controller import train
    from cluster.errors import FlywheelError
    from cluster.progress import Progress
    from cluster.session import connect

    base, data = base_and_data(play)

    def on_progress(progress: Progress) -> None:
        teller.tell("step", step=progress.done, loss=float(progress.note.split()[-1]), workers=teller.workers)

    with connect():
        over = threading.Event()
        watching = threading.Thread(target=_watch, args=(teller, play.run_id, over), daemon=True)
        watching.start()
        facts: dict[str, Any]
        try:
            result = train(
                TrainConfig.model_validate(play.settings),
                name="rehearsal",
                run_id=play.run_id,
                base=base,
                data=data,
                home=play.stage,
                tracking_uri="",
                tracking_run_id=None,
                sink=on_progress,
                on_checkpoint=_Book(Path(play.home) / _LOSSES),
            )
            facts = {"steps": result.steps, "loss_last": result.loss_last, "loss_first": result.loss_first}
        except FlywheelError as error:
            facts = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        except KeyboardInterrupt as stopped:
            facts = {"stopped": str(stopped)}
        time.sleep(4 * _LOOK_S)  # the last incident is on its way
        over.set()
        watching.join()  # a call to a Ray that is shut down ends the process
    teller.tell("end", **facts)


if __name__ == "__main__":
    main(sys.argv[1])
