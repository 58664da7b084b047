"""`flywheel bench adapters`: many adapters on one base, beside one adapter, and beside one merged model each.

The same requests go to the same server by turns, and differ in whose adapter they name: always one; one of those that
are resident; one of all, by Zipf's law. So a ratio holds what the mixing in a batch costs, and what the loading does.
The adapters have random weights in the shape that our recipes train: all linear layers.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from app.bench import servers, trees
from app.bench.competitors import OURS, Extras
from app.bench.homes import beside
from app.bench.load import Ask, Load, authorization, percentile, prompts
from app.bench.report import Bar, Report, Result, report
from app.bench.servers import Server, Start
from cluster.errors import DependencyError
from cluster.models import StoredModel, obtain
from cluster.progress import Progress, Sink
from cluster.storage import Home
from deployments.llm.config import LLMConfig

BASE: Final = "smollm2-135m-instruct"
AT_LEAST: Final = 0.8
"""Of one adapter's throughput."""
ONE, RESIDENT, ALL = "one adapter", "resident adapters", "all adapters"
_WORDS: Final = 80
_RANK: Final = 16
_KNOWN_S: Final = 60.0


@dataclass(frozen=True)
class Size:
    """What is asked, of how many adapters, and how many merged models are loaded."""

    adapters: int = 64
    resident: int = 8
    streams: int = 32
    asks: int = 4
    tokens: int = 48
    rounds: int = 3
    merged: int = 2
    exponent: float = 1.0
    """Of Zipf's law: the adapter of rank k is asked for in proportion to 1 / k**exponent."""

    @classmethod
    def short(cls, rounds: int) -> "Size":
        """Says whether it works, and little of speed."""
        return cls(adapters=12, resident=4, streams=8, asks=1, tokens=16, rounds=rounds, merged=1)


@dataclass(frozen=True)
class Way:
    """A turn's requests, by whom they name."""

    names: tuple[str, ...]
    weights: tuple[float, ...]

    def requests(self, size: Size, seed: int) -> list[Ask]:
        """The prompts are the same for every way; they never come again."""
        chance = random.Random(seed)
        words = prompts(size.asks * size.streams, words=_WORDS, seed=seed)
        return [Ask(each, size.tokens, chance.choices(self.names, self.weights)[0]) for each in words]


def ways(names: Sequence[str], size: Size) -> dict[str, Way]:
    """One adapter; those that fit; all of them."""
    weights = tuple(zipf(len(names), size.exponent))
    return {
        ONE: Way(tuple(names[:1]), (1.0,)),
        RESIDENT: Way(tuple(names[: size.resident]), weights[: size.resident]),
        ALL: Way(tuple(names), weights),
    }


def zipf(number: int, exponent: float) -> list[float]:
    """The share of each rank, the most wanted first; they sum to one."""
    weights = [1 / rank**exponent for rank in range(1, number + 1)]
    return [weight / sum(weights) for weight in weights]


@dataclass(frozen=True)
class Merged:
    """One model with one adapter's weights added, served alone: until it answers, and what its processes hold."""

    start_s: float
    memory_gib: float


def run(size: Size, sink: Sink, *, base: str = BASE) -> Report:
    """Start one Flywheel, ask it by turns, end it; then load merged models one after another."""
    config = LLMConfig(
        model=base, max_model_len=512, max_lora_rank=_RANK, max_loras=size.resident, max_adapters=size.resident
    )
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        root = Path(scratch)
        model = obtain(base, beside(Home.current(), root / "home"))
        folders = [root / "adapters" / f"a{number:03}" for number in range(size.adapters)]
        for number, folder in enumerate(folders):
            write_adapter(folder, model.path, seed=number)
        adapter_mib = _adapter_mib(model.path)
        start = Start(OURS, config, Extras(adapters=root / "adapters"))
        sink(Progress("bench", 0, size.rounds, "rounds", note=f"registering {size.adapters} adapters"))
        with servers.standing({OURS: start}, root) as up:
            names = [f"{config.served_as}:{folder.name}" for folder in folders]
            loads, cold = _rounds(up[OURS], ways(names, size), names, size, sink)
            memory = _memory_gib(up[OURS])
        merged = [_merged(model, folder, root / f"merged-{folder.name}", config) for folder in folders[: size.merged]]
    results, bars = figures(size, loads, cold, merged)
    results.append(Result.of("memory of Flywheel with all of them", "GiB", [memory]))
    results.append(Result.of("an adapter's files", "MiB", [adapter_mib]))
    return report("adapters", size.rounds, results, bars)


Loads = Mapping[str, Sequence[Load]]
"""By way, one turn of each round."""
Cold = Mapping[str, Sequence[float]]
"""Milliseconds until the first token, by how far away the adapter was."""
NEVER, EVICTED, THERE = "never loaded before", "evicted before", "resident"


def _rounds(
    server: Server, by_name: Mapping[str, Way], names: Sequence[str], size: Size, sink: Sink
) -> tuple[Loads, Cold]:
    _wait_until_known(server, names)
    sink(Progress("bench", 0, size.rounds, "rounds", note="each adapter once, nothing else to do"))
    # In turn, so that with fewer places than adapters the least recently used one is never there.
    cold = {where: _first_tokens(server, names) for where in (NEVER, EVICTED)}
    cold[THERE] = _first_tokens(server, [names[-1]] * len(names))
    loads: dict[str, list[Load]] = {way: [] for way in by_name}
    for number in range(size.rounds):
        order = list(by_name)[number % len(by_name) :] + list(by_name)[: number % len(by_name)]
        for way in order:
            sink(Progress("bench", number, size.rounds, "rounds", note=way))
            # What is resident when a turn begins is what the way itself would leave.
            server.drive([replace(ask, tokens=1) for ask in by_name[way].requests(size, -1 - number)], streams=4)
            load = server.drive(by_name[way].requests(size, 1 + number), streams=size.streams)
            if len(load.faults) == len(load.answers):
                raise DependencyError(f"Flywheel answers nothing: {load.faults[0]}", retryable=False)
            loads[way].append(load)
    return loads, cold


def _first_tokens(server: Server, names: Sequence[str]) -> list[float]:
    asks = [Ask(f"{time.monotonic_ns()} Hello", 1, name) for name in names]
    load = server.drive(asks, streams=1)
    if load.faults:
        raise DependencyError(f"Flywheel does not answer: {load.faults[0]}", retryable=False)
    return [1e3 * (answer.arrivals[0] - answer.sent) for answer in load.answers]


def _wait_until_known(server: Server, names: Sequence[str]) -> None:
    deadline = time.monotonic() + _KNOWN_S
    with httpx.Client(base_url=server.url, headers=authorization(server.key), trust_env=False) as client:
        while time.monotonic() < deadline:
            known = {model["id"] for model in client.get("/v1/models").json()["data"]}
            if known.issuperset(f"{name}@champion" for name in names):
                return
            time.sleep(0.5)
    raise DependencyError(f"Flywheel does not list its {len(names)} adapters within {_KNOWN_S:.0f} s.")


def figures(size: Size, loads: Loads, cold: Cold, merged: Sequence[Merged]) -> tuple[list[Result], list[Bar]]:
    """All that was measured, and each way over the one with one adapter, round by round."""
    results, bars = [], []
    for way, of_way in loads.items():
        results.append(Result.of(f"output, {way}", "tokens/s", [load.tokens_per_s for load in of_way]))
        results.append(Result.of(f"first token, p50, {way}", "ms", [load.first_token_ms(0.5) for load in of_way]))
        results.append(Result.of(f"first token, p99, {way}", "ms", [load.first_token_ms(0.99) for load in of_way]))
        between = [load.between_tokens_ms(0.99) for load in of_way]
        results.append(Result.of(f"between tokens, p99, {way}", "ms", between))
    for way in (RESIDENT, ALL):
        pairs = zip(loads[way], loads[ONE], strict=True)
        ratios = [ours.tokens_per_s / one.tokens_per_s for ours, one in pairs]
        ratio = Result.of(f"output, {way} over {ONE}", "of it", ratios)
        results.append(ratio)
        if way == ALL:
            bars.append(Bar.at_least(ratio, AT_LEAST))
    faults = Result.of("failed requests", "requests", [float(len(load.faults)) for of in loads.values() for load in of])
    results.append(faults)
    bars.append(Bar(name=faults.name, value=faults.high, bar=0, direction="max", met=faults.high == 0))
    for where, waits in cold.items():
        for share in (0.5, 0.99):
            figure = percentile(waits, share)
            results.append(Result.of(f"first token, p{share:.0%}, {where}".replace("%", ""), "ms", [figure]))
    share = list(accumulate(zipf(size.adapters, size.exponent)))[size.resident - 1]
    results.append(Result.of(f"requests for the {size.resident} most wanted", "of all", [share]))
    if merged:
        results.append(Result.of("a merged model, until it answers", "s", [each.start_s for each in merged]))
        results.append(Result.of("a merged model, memory", "GiB", [each.memory_gib for each in merged]))
    return results, bars


@contextmanager
def _served(folder: Path, config: LLMConfig, scratch: Path) -> Iterator[Server]:
    alone = config.model_copy(update={"model": str(folder)})
    with servers.standing({"vllm": Start("vllm", alone)}, scratch) as up:
        yield up["vllm"]


def _merged(model: StoredModel, adapter: Path, folder: Path, config: LLMConfig) -> Merged:
    """Of vLLM's own server, which is the least that serves a model."""
    merge(model.path, adapter, folder)
    began = time.monotonic()
    with _served(folder, config, folder.with_name(f"{folder.name}-run")) as server:
        return Merged(time.monotonic() - began, _memory_gib(server))


def _memory_gib(server: Server) -> float:
    """What the server's processes have for themselves; shared pages are not counted."""
    total = 0
    for pid, _ in trees.members([server.mark])[server.mark]:
        try:
            total += psutil.Process(pid).memory_full_info().uss
        except psutil.Error:
            continue
    return total / 2**30


def write_adapter(folder: Path, base: Path, *, seed: int) -> None:
    """A PEFT folder for the model in `base`, all linear layers, rank 16, random; small enough to leave it its sense."""
    chance = np.random.default_rng(seed)
    tensors = {}
    for name, (outs, ins) in _linear(base).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = _normal(chance, (_RANK, ins), ins**-0.5)
        tensors[f"base_model.model.{name}.lora_B.weight"] = _normal(chance, (outs, _RANK), 0.01)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": _RANK,
        "lora_alpha": 2 * _RANK, "target_modules": sorted({name.rpartition(".")[2] for name in _linear(base)}),
        "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _normal(chance: np.random.Generator, shape: tuple[int, int], scale: float) -> Any:
    return scale * chance.standard_normal(shape, np.float32)


def _linear(base: Path) -> dict[str, tuple[int, int]]:
    """Shape [out, in] of every linear layer inside the blocks, by its module's name."""
    config = json.loads((base / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def _adapter_mib(base: Path) -> float:
    return sum(4 * _RANK * (outs + ins) for outs, ins in _linear(base).values()) / 2**20


def merge(base: Path, adapter: Path, folder: Path) -> None:
    """The model in `base` with `adapter` added to its weights: W + 2 B A, as its alpha says."""
    import torch  # numpy knows no bfloat16
    from safetensors.torch import load_file as load_tensors
    from safetensors.torch import save_file as save_tensors

    deltas = load_file(adapter / "adapter_model.safetensors")
    folder.mkdir(parents=True)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        weights = load_tensors(path)
        for name in _linear(base):
            if (key := f"{name}.weight") in weights:
                up, down = (deltas[f"base_model.model.{name}.lora_{each}.weight"] for each in "BA")
                added = weights[key].float() + 2 * torch.from_numpy(up @ down)
                weights[key] = added.to(weights[key].dtype)
        save_tensors(weights, folder / path.name, metadata={"format": "pt"})
