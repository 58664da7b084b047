"""A gang of processes that talk over gloo, kept between calls: their imports cost more than what they compute.

For benches and tests, where what several ranks do is looked at without Ray around it.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from actors.training.engine import Place


class Gang:
    """`run` calls one function on every rank of a fresh process group and gives back what each returned."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """`env` is set in the processes before anything is imported there."""
        self._env = dict(env or {})
        self._members: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
        """`work(place, *args)` on every rank; `work` is a function of a module, `args` can be pickled.

        A rank that raises fails the call with that rank's traceback; one that hangs fails it with its number.
        """
        while len(self._members) < world_size:
            self._members.append(_start(self._env))
        with tempfile.TemporaryDirectory(prefix="flywheel-gang-") as folder:
            members = self._members[:world_size]
            for rank, (_, pipe) in enumerate(members):
                pipe.send((rank, world_size, str(Path(folder) / "rendezvous"), work, args))
            answers: dict[int, tuple[bool, Any]] = {}
            waiting = {rank: pipe for rank, (_, pipe) in enumerate(members)}
            while waiting:
                ready = wait(list(waiting.values()), timeout_s)
                if not ready:
                    self.close()
                    raise TimeoutError(f"ranks {sorted(waiting)} of {world_size} did not answer: {answers}")
                for rank, pipe in [item for item in waiting.items() if item[1] in ready]:
                    del waiting[rank]
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = (False, "the process died")
        failed = [f"rank {rank}: {answer}" for rank, (fine, answer) in sorted(answers.items()) if not fine]
        if failed:
            self.close()  # the others' process group may be in any state
            raise AssertionError("\n".join(failed))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members = []


def _start(env: Mapping[str, str]) -> tuple[Any, Connection]:
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    before = dict(os.environ)
    os.environ |= env
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ |= before
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, rendezvous, work, args = pipe.recv()
        except EOFError:
            return
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        try:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
            )
            answer = (True, work(Place(rank, world_size, torch.device("cpu")), *args))
        except BaseException:  # noqa: BLE001 (the test's process says it)
            answer = (False, traceback.format_exc())
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        pipe.send(answer)
