"""The bench of serving without an engine: its load on servers of known delays, arithmetic, prices, process trees."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import typer.main
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from rich.console import Console

from app.bench import load, prices, serve, servers, trees
from app.bench.load import Answer, Ask, Load, drive
from app.bench.report import report
from app.bench.serve import Batch, Size, Turn
from app.bench.servers import Server
from app.bench.trees import Mark
from app.cli import bench, output
from app.cli.bench import _numbers
from cluster.errors import ConfigError, DependencyError
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.config import GatewayConfig
from deployments.gateway.echo import EchoEngine, PushedSnapshots
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Served
from deployments.gateway.usage import Usage
from deployments.snapshot import SnapshotFeed

FIRST_S, PAUSE_S = 0.15, 0.04


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The URL of `app` on loopback: httpx's own transport would hold a stream back until it is over."""
    port = servers.free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


def timed() -> FastAPI:
    """After `FIRST_S` a token every `PAUSE_S`; the model's name says how it goes wrong."""
    app = FastAPI()
    app.state.now = app.state.most = 0

    async def answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
        app.state.now += 1
        app.state.most = max(app.state.most, app.state.now)
        yield event(delta={"role": "assistant", "content": ""})
        await asyncio.sleep(FIRST_S)
        for number in range(body["max_tokens"]):
            if number:
                await asyncio.sleep(PAUSE_S)
            whole = event(delta={"content": "a"})
            yield whole[:9]  # an event may come in two pieces
            yield whole[9:]
        app.state.now -= 1
        if body["model"] == "silent":
            return
        yield event(delta={}, finish_reason="length")
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"] - (body["model"] == "laconic")}
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        if body["model"] != "unended":
            yield b"data: [DONE]\n\n"

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        if body["model"] == "unknown":
            return JSONResponse({"error": "no such model"}, 404)
        return StreamingResponse(answer(body), media_type="text/event-stream")

    return app


async def test_waiting_is_measured_where_it_happens() -> None:
    app = timed()
    async with listening(app) as url:
        found = await drive(url, "timed", [Ask(f"{n}", 6) for n in range(6)], streams=3)
    assert found.faults == []
    assert app.state.most == 3
    assert (found.tokens, found.prompt_tokens) == (36, 42)
    assert [len(answer.arrivals) for answer in found.answers] == [6] * 6
    one = FIRST_S + 5 * PAUSE_S
    assert 2 * one <= found.wall_s < 40 * one
    assert FIRST_S * 1e3 <= found.first_token_ms(0.5) < 40e3 * FIRST_S
    assert 0.8 * PAUSE_S * 1e3 < found.between_tokens_ms(0.5) < 40e3 * PAUSE_S


def test_a_part_arrives_with_its_last_byte() -> None:
    parts = load._Parts()
    first, second = event(delta={"content": "a"}), event(delta={"content": "b"})
    parts.take(event(delta={"role": "assistant", "content": ""}) + first[:7], 1.0)
    parts.take(first[7:], 2.0)
    parts.take(second + second, 3.0)
    parts.take(event(delta={}, finish_reason="length") + b"data: [DONE]", 4.0)
    assert parts.arrivals == [2.0, 3.0, 3.0]
    assert parts.fault(3) == "it ended without [DONE]"
    parts.take(b"\n\n", 5.0)
    parts.tokens = 3
    assert parts.fault(3) is None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("silent", "a finish_reason"),
        ("unended", "[DONE]"),
        ("laconic", "1 tokens, of 2"),
        ("unknown", "HTTP 404"),
    ],
)
async def test_what_does_not_end_well_is_a_fault_and_counts_nothing(model: str, said: str) -> None:
    async with listening(timed()) as url:
        found = await drive(url, model, [Ask("x", 2)], streams=1)
    [fault] = found.faults
    assert said in fault
    assert found.tokens == 0


async def test_nobody_there_is_a_fault() -> None:
    found = await drive(f"http://127.0.0.1:{servers.free_port()}", "m", [Ask("x", 2)], streams=1)
    assert "ConnectError" in found.faults[0]


@pytest.mark.parametrize("breaks_after", [None, 2])
async def test_it_reads_the_gateways_streams(breaks_after: int | None) -> None:
    engine = EchoEngine(pause_s=0.01, breaks_after=breaks_after)
    feed = SnapshotFeed(PushedSnapshots(), poll_s=0.05)
    await feed.start(wait_s=0.5)
    backends = {"smol": Backend(engine, Admission.of(GatewayConfig()))}
    parts = Parts(Served((Base("smol"),)), feed, GatewayMetrics(Usage()), backends)
    try:
        async with listening(create_app(parts, GatewayConfig(require_keys=False))) as url:
            found = await drive(url, "smol", [Ask("one two three", 4)] * 4, streams=2)
    finally:
        await feed.stop()
    assert len(found.faults) == (4 if breaks_after else 0)
    assert found.tokens == (0 if breaks_after else 16)
    assert engine.seen[0].body["ignore_eos"] is True


def test_percentiles_are_values_that_were_seen() -> None:
    assert load.percentile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert load.percentile(list(range(1, 101)), 0.99) == 99
    assert load.percentile([1.0], 0.99) == 1.0


def test_every_server_is_asked_the_same_and_never_twice() -> None:
    size = Size(streams=(2,), rounds=2)
    assert size.requests(2, 0) == size.requests(2, 0)
    asked = [ask.prompt for number in (-1, 0, 1) for ask in size.requests(2, number)]
    assert len(set(asked)) == len(asked) == 3 * 2 * size.asks
    assert serve._order(["a", "b", "c"], 1) == ["b", "c", "a"]


def turn(*, wall_s: float, first: float, pause: float, cpu_s: float, fault: str | None = None) -> Turn:
    """Ten tokens."""
    arrivals = tuple(first + number * pause for number in range(10))
    answers = [Answer(0.0, arrivals, tokens=10, prompt_tokens=20)]
    answers += [Answer(0.0, fault=fault)] if fault else []
    return Turn(Load(wall_s, tuple(answers)), cpu_s, idle={"vllm": 0.01, "flywheel": 0.02, "ray": 0.03}, others=0.5)


def test_ratios_are_those_of_one_round() -> None:
    ours = [
        turn(wall_s=1.0, first=0.2, pause=0.01, cpu_s=0.5),
        turn(wall_s=4.0, first=0.8, pause=0.04, cpu_s=0.5),  # somebody else was busy
    ]
    theirs = [
        turn(wall_s=1.0, first=0.1, pause=0.01, cpu_s=0.25),
        turn(wall_s=4.0, first=0.4, pause=0.04, cpu_s=0.25, fault="HTTP 500"),
    ]
    results, bars = serve.figures({8: {"flywheel": ours, "vllm": theirs}})
    found = {result.name: result for result in results}
    assert found["8 streams: output, flywheel"].median == 6.25
    assert (found["8 streams: output, flywheel"].low, found["8 streams: output, flywheel"].high) == (2.5, 10.0)
    assert found["8 streams: output, flywheel over vllm"].median == 1.0
    assert found["8 streams: first token, p50, vllm"].low == 100
    assert found["8 streams: CPU of a token, flywheel"].median == 50
    assert found["8 streams: CPU of a token, flywheel over vllm"].median == 2.0
    assert found["failed requests, vllm"].high == 1
    assert found["while it waits, vllm"].median == 0.01
    assert {bar.name: (bar.bar, bar.met) for bar in bars} == {
        "8 streams: output, flywheel over vllm": (0.95, True),
        "8 streams: first token, p50, flywheel over vllm": (1.15, False),
        "8 streams: between tokens, p99, flywheel over vllm": (1.1, True),
        "failed requests, flywheel": (0, True),
    }


def test_stock_ray_is_held_to_the_same_output() -> None:
    one = [turn(wall_s=1.0, first=0.2, pause=0.01, cpu_s=0.5)]
    _, bars = serve.figures({1: {"flywheel": one, "ray": one}})
    assert [bar.name for bar in bars] == ["1 streams: output, flywheel over ray", "failed requests, flywheel"]


def test_a_million_tokens_costs_what_the_machine_costs_meanwhile() -> None:
    known = prices.Prices.model_validate(
        {
            "machines": [{"name": "box", "usd_per_hour": 0.36, "source": "us", "as_of": "2026-01-02"}],
            "apis": [
                {
                    "name": "api", "usd_per_million_input_tokens": 0.1, "usd_per_million_output_tokens": 0.4,
                    "source": "them", "as_of": "2026-01-02",
                }
            ],
        }
    )  # fmt: skip
    turns = {32: {"flywheel": [turn(wall_s=0.1, first=0.01, pause=0.02, cpu_s=0.1)]}}
    speeds = serve.speeds(turns, [Batch(tokens=100, wall_s=0.5, cpu_s=1.0)])
    found = prices.compare(known, speeds, prompt_tokens_per_output=2.0)
    assert [(offer.what, offer.usd_per_million_output_tokens) for offer in found] == [
        ("flywheel on box", 1.0), ("hf on box", 0.5), ("api", 0.6)
    ]  # fmt: skip
    assert found[0].p99_between_tokens_ms == 20
    assert (found[0].source, found[0].as_of) == ("us", date(2026, 1, 2))


def test_the_shipped_prices_say_who_says_so_and_when() -> None:
    known = prices.read()
    assert known.machines
    assert known.apis
    assert all(each.source and each.as_of.year >= 2025 for each in (*known.machines, *known.apis))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("machines: []\n", "machines"),
        ("machines: [{name: a, usd_per_hour: 1, source: b, as_of: 2026-01-01, usd: 2}]\n", "usd: unknown key"),
        ("machines: [{name: a, usd_per_hour: 0, source: b, as_of: 2026-01-01}]\n", "usd_per_hour"),
        ("machines: [{name: a, usd_per_hour: 1, source: b}]\n", "as_of: required"),
    ],
)
def test_wrong_prices_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        prices.read(path)


def test_the_command_prints_figures_and_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    one = [turn(wall_s=0.1, first=0.01, pause=0.02, cpu_s=0.1)]
    results, bars = serve.figures({8: {"flywheel": one, "vllm": one}})
    offers = prices.compare(prices.read(), serve.speeds({8: {"flywheel": one}}, []), prompt_tokens_per_output=1)
    asked: list[Any] = []

    def run(size: Size, *_: Any, **told: Any) -> serve.ServeReport:
        asked.append((size, told["against"]))
        plain = report("serve", 1, results, bars).model_dump()
        return serve.ServeReport.model_validate({**plain, "costs": offers})

    monkeypatch.setattr(serve, "run", run)
    for options in ([], ["--json", "--short", "--streams", "8", "--against", "vllm"]):
        out = io.StringIO()
        printer = Console(file=out, width=160, markup=False, emoji=False)
        monkeypatch.setattr(output, "console", printer)
        monkeypatch.setattr(bench, "console", printer)
        typer.main.get_command(bench.cli).main(["serve", *options], standalone_mode=False)
        if options:
            printed = json.loads(out.getvalue().splitlines()[-1])
            assert set(printed) == {"bench", "commit", "machine", "runs", "results", "bars", "costs"}
        else:
            assert "Build or buy" in out.getvalue()
            assert "GPT-4o mini" in out.getvalue()
    assert asked[0] == (Size(), serve.RIVALS)
    assert asked[1] == (Size.short((8,), 3), ("vllm",))


def test_streams_are_numbers() -> None:
    assert _numbers("32,1,8,8") == (1, 8, 32)
    for wrong in ("", "1,x", "0,2"):
        with pytest.raises(ConfigError, match="--streams"):
            _numbers(wrong)


# A child that burns and loses its parent, as Ray's daemons do, and one that hides its environment, below the first.
PROGRAM = """
import os, subprocess, sys, time
inner = [sys.executable, "-c", "import time; time.sleep(60)"]
burn = "import time\\nend = time.process_time() + 0.5\\nwhile time.process_time() < end: pass\\ntime.sleep(60)"
orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}], start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan], check=True)
subprocess.Popen(inner, env={"PATH": os.environ["PATH"]})
time.sleep(60)
"""


@contextmanager
def program(mark: Mark) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env={**os.environ, **mark.environment})
    try:
        yield process
    finally:
        trees.end(mark)
        process.wait(10)


def state(pid: int) -> str:
    """The letter that the kernel has for it: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_program_is_all_that_came_of_it() -> None:
    ours, theirs = Mark(), Mark()
    with program(ours), program(theirs) as other:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = trees.members([ours, theirs])
            if all(len(each) == 3 and sum(each.values()) > 0.5 for each in found.values()):
                break
            time.sleep(0.05)
        assert [len(each) for each in found.values()] == [3, 3]
        assert os.getpid() not in {pid for each in found.values() for pid, _ in each}
        before, after = found[ours], trees.members([ours])[ours]
        assert trees.used_s({}, after) >= 0.5
        assert trees.used_s(before, after) < 0.2
        trees.pause(ours)
        deadline = time.monotonic() + 60  # a process stops when it is next given a CPU
        while time.monotonic() < deadline and {state(pid) for pid, _ in after} != {"T"}:
            time.sleep(0.05)
        assert {state(pid) for pid, _ in after} == {"T"}
        trees.go_on(ours)
        trees.end(ours)
        assert trees.members([ours])[ours] == {}
        assert other.poll() is None
        assert len(trees.members([theirs])[theirs]) == 3


def started(words: list[str], tmp_path: Path, port: int) -> Any:
    return servers.started("fake", words, port=port, model="m", log=tmp_path / "fake.log", env={})


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('no memory for that'); raise SystemExit(3)"]
    with (
        started(words, tmp_path, servers.free_port()) as server,
        pytest.raises(DependencyError, match=r"(?s)exit status 3.*no memory for that"),
    ):
        servers.wait_until_it_answers(server, within_s=90)


def test_a_server_that_never_answers_is_told_and_ended(tmp_path: Path) -> None:
    # It also ignores the wish to end.
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    known: list[Server] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "_STOP_S", 0.5)
        with started([sys.executable, "-c", code], tmp_path, servers.free_port()) as server:
            known.append(server)
            with pytest.raises(DependencyError, match="did not answer within 1 s"):
                servers.wait_until_it_answers(server, within_s=1)
    assert known[0].process.returncode == -9


def test_engine_settings_become_vllms_words() -> None:
    from app.bench.competitors import flags

    assert flags({"max_model_len": 512, "enable_lora": True, "enforce_eager": False}) == [
        "--max-model-len", "512", "--enable-lora", "--no-enforce-eager",
    ]  # fmt: skip
