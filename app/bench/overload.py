"""`flywheel bench overload`: what the gateway still does when it is asked for three times what the engine can.

Arrivals are open-loop (Poisson): nobody waits for an answer before the next comes, and nobody who is refused comes
again. Goodput is output tokens by the clock, of answers that were whole within `deadline_s` of their sending; an
answer that comes too late is worth nothing. First a closed loop finds what the engine can do; then the same is asked
for once, and then `factor` times.

`python -m app.bench.overload CONFIG` is the server that it starts.
"""

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx

from app.bench import servers
from app.bench.homes import beside
from app.bench.load import Answer, Ask, answer_to, drive, percentile, prompts
from app.bench.report import Bar, Report, Result, report
from cluster import environment
from cluster.models import obtain
from cluster.progress import Progress, Sink, silent
from cluster.session import free_port
from cluster.storage import Home
from deployments.config import ServeConfig
from deployments.llm.config import LLMConfig

BASE: Final = "smollm2-135m-instruct"
GOODPUT_BAR: Final = 0.9
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class Size:
    """How much is asked for, and how."""

    running: int = 16
    """Generations at a time (`gateway.max_running`), and the streams of the closed loop."""
    tokens: int = 48
    words: int = 40
    seconds: float = 60.0
    """Of arrivals that are measured, after `settle_s` that fill the queue."""
    settle_s: float = 15.0
    factor: float = 3.0
    wait_s: float = 8.0
    """`gateway.max_wait_s`."""
    deadline_s: float = 20.0
    """A caller's patience: the longest wait for a turn, and twice what a generation takes when all places are taken."""
    max_model_len: int = 512

    @classmethod
    def short(cls) -> "Size":
        """Says whether it holds, and little of how well."""
        return cls(running=8, tokens=24, seconds=25.0, settle_s=8.0, wait_s=5.0, deadline_s=12.0)


@dataclass(frozen=True)
class Phase:
    """Open-loop arrivals at one rate: what was counted in the measured seconds."""

    asked_per_s: float
    goodput: float
    """Output tokens/s of answers in time."""
    answered_s: tuple[float, ...]
    """How long each answer took that came, in time or not."""
    late: int
    refused: int
    """Told 429."""
    refused_with_when: int
    """… and when to ask again."""
    faults: Counter[str]
    """Everything else, by its beginning."""


def run(size: Size, sink: Sink, *, base: str = BASE) -> Report:
    """Start the application on a Ray of its own, load it, end it."""
    model = obtain(base, Home.current())
    config = ServeConfig.model_validate(
        {
            "gateway": {
                "port": free_port(),
                "require_keys": False,
                "max_running": size.running,
                "max_wait_s": size.wait_s,
            },
            "llm": LLMConfig(model=str(model.path), max_model_len=size.max_model_len).model_dump(),
        }
    )
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        sink(Progress("bench", 0, 3, "phases", note="starting the application"))
        home = Path(scratch) / "home"
        home.mkdir()
        words = (sys.executable, "-m", "app.bench.overload", config.model_dump_json())
        with servers.started(
            "flywheel",
            words,
            port=config.gateway.port,
            model=config.llm[0].served_as,
            log=Path(scratch) / "flywheel.log",
            env={environment.HOME: str(beside(Home.current(), home).root)},
        ) as server:
            servers.wait_until_it_answers(server)
            return asyncio.run(measured(server.url, server.model, size, sink))


async def measured(url: str, model: str, size: Size, sink: Sink) -> Report:
    """The three phases against a server that answers."""
    asks = _asks(size, 4 * size.running, seed=1)
    await drive(url, model, [replace(ask, tokens=4) for ask in asks[: size.running]], streams=size.running)
    sink(Progress("bench", 0, 3, "phases", note="what it can do"))
    closed = await drive(url, model, asks, streams=size.running)
    capacity = closed.tokens_per_s / size.tokens
    phases = []
    for number, factor in enumerate((1.0, size.factor), 1):
        sink(Progress("bench", number, 3, "phases", note=f"{factor:g} × {capacity:.2f} requests/s"))
        phases.append(await open_loop(url, model, size, rate=factor * capacity, seed=10 + number))
        await asyncio.sleep(size.wait_s)  # the queue of one phase is no part of the next
    return _report(closed.tokens_per_s, *phases, size=size)


async def open_loop(url: str, model: str, size: Size, *, rate: float, seed: int) -> Phase:
    """Arrivals at `rate` a second for `settle_s + seconds`; only what ends in the last `seconds` counts."""
    chance = random.Random(seed)
    count = int(rate * (size.settle_s + size.seconds)) + 1
    refusals: Counter[bool] = Counter()
    began = time.perf_counter()
    opens, closes = began + size.settle_s, began + size.settle_s + size.seconds

    async def note(response: httpx.Response) -> None:
        if response.status_code == 429 and opens <= time.perf_counter() < closes:
            refusals["retry-after" in response.headers] += 1

    ends: list[tuple[float, Answer]] = []

    async def one(client: httpx.AsyncClient, ask: Ask) -> None:
        answer = await answer_to(client, ask.body(model))
        ends.append((time.perf_counter(), answer))

    async with httpx.AsyncClient(
        base_url=url,
        timeout=_PATIENCE_S,
        trust_env=False,  # a proxy of the machine's is not for loopback
        limits=httpx.Limits(max_connections=None),
        event_hooks={"response": [note]},
    ) as client:
        tasks, at = [], began
        for ask in _asks(size, count, seed=seed):
            at += chance.expovariate(rate)
            if at >= closes:
                break
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(one(client, ask)))
        await asyncio.gather(*tasks)
    return counted([(end, each) for end, each in ends if opens <= end < closes], refusals, size, rate)


def counted(ends: Sequence[tuple[float, Answer]], refusals: Counter[bool], size: Size, rate: float) -> Phase:
    """What the answers of the measured seconds were worth."""
    took = {id(answer): end - answer.sent for end, answer in ends if answer.fault is None}
    good = [answer for _, answer in ends if answer.fault is None and took[id(answer)] <= size.deadline_s]
    faults = Counter(
        answer.fault[:60] for _, answer in ends if answer.fault and not answer.fault.startswith("HTTP 429")
    )
    return Phase(
        asked_per_s=rate,
        goodput=sum(answer.tokens for answer in good) / size.seconds,
        answered_s=tuple(took.values()),
        late=len(took) - len(good),
        refused=sum(refusals.values()),
        refused_with_when=refusals[True],
        faults=faults,
    )


def _asks(size: Size, count: int, *, seed: int) -> list[Ask]:
    return [Ask(prompt, size.tokens) for prompt in prompts(count, words=size.words, seed=seed)]


def _report(closed: float, once: Phase, over: Phase, *, size: Size) -> Report:
    peak = max(closed, once.goodput)
    ratio = Result.of("goodput over the peak", "ratio", [over.goodput / peak])
    told = over.refused_with_when / over.refused if over.refused else 1.0
    results = [
        Result.of(f"closed loop, {size.running} streams", "tokens/s", [closed]),
        Result.of("goodput at 1 ×", "tokens/s", [once.goodput]),
        Result.of(f"goodput at {size.factor:g} ×", "tokens/s", [over.goodput]),
        ratio,
        *(
            figure
            for name, phase in (("1 ×", once), (f"{size.factor:g} ×", over))
            for figure in (
                Result.of(f"answer, p50, at {name}", "s", [percentile(phase.answered_s, 0.5)]),
                Result.of(f"answer, p99, at {name}", "s", [percentile(phase.answered_s, 0.99)]),
                Result.of(f"late at {name}", "answers", [phase.late]),
                Result.of(f"refused (429) at {name}", "requests", [phase.refused]),
                Result.of(f"other faults at {name}", "requests", [sum(phase.faults.values())]),
            )
        ),
        Result.of("429 that say when to ask again", "ratio", [told]),
    ]
    bars = [
        Bar.at_least(ratio, GOODPUT_BAR),
        Bar.at_least(results[-1], 1.0),
        Bar.at_most(next(each for each in results if each.name == f"other faults at {size.factor:g} ×"), 0.0),
    ]
    found = report("overload", 1, results, bars)
    faults: dict[str, Any] = {"faults": dict(once.faults + over.faults)} if once.faults or over.faults else {}
    return found.model_copy(update={"machine": {**found.machine, **faults}})


def _terminated(*_: object) -> NoReturn:
    sys.exit(0)


def _serve(config: ServeConfig) -> None:
    from app.pipelines import serve
    from cluster.session import connect

    with connect(), serve.running(config, Home.current(), silent):
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    environment.prepare()
    _serve(ServeConfig.model_validate_json(sys.argv[1]))
