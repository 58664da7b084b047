"""The compared servers as child processes on free ports of loopback; it ends what it started, and nothing else.

Each has a home of its own with the models of the current one, and a mark by which its processes are known (`trees`).
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from actors.registry.apikeys import Secret
from app.bench.competitors import NO_EXTRAS, OURS, Extras
from app.bench.homes import beside
from app.bench.load import Ask, Load, authorization, drive
from app.bench.trees import Mark, end, go_on
from cluster import environment
from cluster.errors import DependencyError
from cluster.session import free_port
from cluster.storage import Home
from deployments.llm.config import LLMConfig

START_S: Final = 240.0
_STOP_S: Final = 60.0
_TAIL: Final = 15
"""Lines of a log that are shown when its server does not start."""
_NAMED: Final = (environment.RAY_ADDRESS, environment.DATABASE_URI, environment.TRACKING_URI)
"""What would lead a server to somebody else's cluster or database."""


@dataclass(frozen=True)
class Server:
    """One process tree that answers at `url`."""

    name: str
    url: str
    model: str
    mark: Mark
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    key: str | None = field(default=None, repr=False)
    """The API key that it wants."""

    def drive(self, asks: Sequence[Ask], *, streams: int) -> Load:
        """Ask it all of `asks`, `streams` at once."""
        return asyncio.run(drive(self.url, self.model, asks, streams=streams, key=self.key))


@dataclass(frozen=True)
class Start:
    """How one server is started: which of `competitors`, on what settings, and with what else."""

    kind: str
    config: LLMConfig
    extras: Extras = NO_EXTRAS


@contextmanager
def standing(starts: Mapping[str, Start], scratch: Path) -> Iterator[dict[str, Server]]:
    """The named servers, all of which answer; they start at the same time."""
    with ExitStack() as ending:
        servers = {}
        for name, start in starts.items():
            port = free_port()
            words = (
                *(sys.executable, "-m", "app.bench.competitors", start.kind, str(port)),
                *(start.config.model_dump_json(), start.extras.model_dump_json()),
            )
            (scratch / name).mkdir(parents=True)
            env = {environment.HOME: str(beside(Home.current(), scratch / name).root)}
            key = Secret.make().text if start.kind == OURS else None
            if key:
                env[environment.API_KEY] = key
            servers[name] = ending.enter_context(
                started(
                    name, words, port=port, model=start.config.served_as, log=scratch / f"{name}.log", env=env, key=key
                )
            )
        for server in servers.values():
            wait_until_it_answers(server)
        yield servers


@contextmanager
def started(
    name: str,
    words: Sequence[str],
    *,
    port: int,
    model: str,
    log: Path,
    env: Mapping[str, str],
    key: str | None = None,
) -> Iterator[Server]:
    """The process of a server, which need not answer yet; ended with all that belongs to it."""
    mark = Mark()
    kept = {key: value for key, value in os.environ.items() if key not in _NAMED}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            env={**kept, **env, **mark.environment},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            # A Ctrl-C on our terminal is ours; we end it.
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Server(name, f"http://127.0.0.1:{port}", model, mark, log, process, key)
    finally:
        go_on(mark)  # a paused process hears nothing
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        end(mark)
        process.wait(_STOP_S)


def wait_until_it_answers(server: Server, *, within_s: float = START_S) -> None:
    """Until one short answer came. `DependencyError` with the end of its log if it ends, or takes too long."""
    ask = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    deadline = time.monotonic() + within_s
    said = "nothing listens"
    headers = authorization(server.key)
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=within_s) as client:
        while time.monotonic() < deadline:
            if (code := server.process.poll()) is not None:
                raise _failed(server, f"ended with exit status {code}")
            try:
                answer = client.post("/v1/chat/completions", json=ask)
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return
                said = f"HTTP {answer.status_code}: {answer.text[:300]}"
            time.sleep(0.5)
    raise _failed(server, f"did not answer within {within_s:.0f} s ({said})")


def _failed(server: Server, how: str) -> DependencyError:
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-_TAIL:])
    return DependencyError(
        f"The server {server.name!r} {how}. The end of its log:\n{tail}",
        hint="Leave it out with --against, or mend what it says.",
        retryable=False,
    )
