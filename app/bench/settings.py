"""`flywheel bench serve --compare-settings`: one setting of the engine changed at a time, beside the settings we serve.

Each variant is vLLM's own server, so that the figures are the engine's; it has our settings but for the one. The base
stays up and is asked before or after every variant on the same requests, so that a ratio is one of neighbouring turns.
Variants come a few at a time, because each holds a model. What it finds belongs into `deployments.llm.build`.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from actors.evaluation.parity import ParityReference, reference
from app.bench import servers, trees
from app.bench.competitors import NO_EXTRAS, Extras
from app.bench.homes import beside
from app.bench.report import Report, Result, report
from app.bench.serve import FIGURES, Size, Turn, require_answers, take_turn, warm_up
from app.bench.servers import Server, Start
from cluster.models import obtain
from cluster.progress import Progress, Sink
from cluster.storage import Home
from deployments.llm.config import LLMConfig
from deployments.llm.parity import check

SERVED: Final = "as served"
_AT_ONCE: Final = 3
"""Variants that are up beside the base; each takes some 2 GiB."""


@dataclass(frozen=True)
class Variant:
    """One thing that is not as we serve it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `LLMConfig`."""
    extras: Extras = NO_EXTRAS

    def start(self, config: LLMConfig) -> Start:
        return Start("vllm", config.model_copy(update=dict(self.settings)), self.extras)


def _engine(**settings: Any) -> Extras:
    return Extras(engine=settings)


VARIANTS: Final = (
    Variant("executor in a process of its own", extras=Extras(executor="mp")),
    Variant("2 threads", {"threads": 2}),
    Variant("float32", {"dtype": "float32"}),
    Variant("steps of 256 tokens", extras=_engine(max_num_batched_tokens=256, enable_chunked_prefill=True)),
    Variant("steps of 4096 tokens", extras=_engine(max_num_batched_tokens=4096)),
    Variant("16 sequences", extras=_engine(max_num_seqs=16)),
    Variant("no chunked prefill", extras=_engine(enable_chunked_prefill=False)),
    Variant("no prefix caching", extras=_engine(enable_prefix_caching=False)),
    Variant("blocks of 32", extras=_engine(block_size=32)),
)

Turns = Mapping[int, Mapping[str, Sequence[tuple[Turn, Turn]]]]
"""By streams and variant: its turn and the base's beside it, of each round."""


def run(size: Size, sink: Sink, *, base: str, variants: Sequence[Variant] = VARIANTS) -> Report:
    """Start the base, let the variants come and go beside it."""
    config = LLMConfig(model=base, max_model_len=size.max_model_len)
    turns: dict[int, dict[str, list[tuple[Turn, Turn]]]] = {streams: {} for streams in size.streams}
    parity: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        root = Path(scratch)
        home = beside(Home.current(), root / "home")
        expected = reference(obtain(base, home), home)
        with servers.standing({SERVED: Start("vllm", config)}, root) as standing:
            served = standing[SERVED]
            parity[SERVED] = _nats(served, expected, config)
            warm_up(served, size)
            for first in range(0, len(variants), _AT_ONCE):
                few = {variant.name: variant for variant in variants[first : first + _AT_ONCE]}
                sink(Progress("bench", first, len(variants), "variants", note="starting " + ", ".join(few)))
                with servers.standing({name: each.start(config) for name, each in few.items()}, root) as up:
                    for name, variant in few.items():
                        if "dtype" in variant.settings:
                            parity[name] = _nats(up[name], expected, variant.start(config).config)
                        warm_up(up[name], size)
                    _rounds(size, {SERVED: served, **up}, turns, sink)
    return report("serve-settings", size.rounds, figures(turns, parity), [])


def _rounds(
    size: Size, up: Mapping[str, Server], turns: dict[int, dict[str, list[tuple[Turn, Turn]]]], sink: Sink
) -> None:
    for number in range(size.rounds):
        for streams in size.streams:
            asks = size.requests(streams, number)
            names = list(up)
            seen = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                sink(Progress("bench", number, size.rounds, "rounds", note=f"{streams} streams, {name}"))
                seen[name] = take_turn(up, name, asks, streams)
                require_answers(up[name], seen[name].load)
            for name in names:
                if name != SERVED:
                    turns[streams].setdefault(name, []).append((seen[name], seen[SERVED]))


def figures(turns: Turns, parity: Mapping[str, float]) -> list[Result]:
    """Every variant over the base, and the base by itself."""
    results = []
    for streams, by_variant in turns.items():
        served = [beside for pairs in by_variant.values() for _, beside in pairs]
        for figure in FIGURES:
            name = f"{streams} streams: {figure.name}"
            results.append(Result.of(f"{name}, {SERVED}", figure.unit, [figure.of(turn) for turn in served]))
            for variant, pairs in by_variant.items():
                ratios = [figure.of(turn) / figure.of(beside) for turn, beside in pairs]
                results.append(Result.of(f"{name}, {variant}", "of it", ratios))
    for name, nats in parity.items():
        results.append(Result.of(f"off the reference, {name}", "nats", [nats]))
    return results


def _nats(server: Server, expected: ParityReference, config: LLMConfig) -> float:
    """How far the server's log-probabilities are from those of a float32 forward, in the mean."""

    async def asked() -> float:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=servers.START_S) as client:

            async def ask(body: dict[str, Any]) -> dict[str, Any]:
                answer = await client.post("/v1/completions", json={"model": server.model, **body})
                found: dict[str, Any] = answer.raise_for_status().json()
                return found

            verdict = await check(expected, ask, config.dtype, config.max_model_len)
        return verdict.mean_nats

    trees.go_on(server.mark)
    return asyncio.run(asked())
