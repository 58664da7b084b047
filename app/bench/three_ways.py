"""`flywheel bench three-ways`: one small decoder in PyTorch, in torch.compile, and in JAX.

The same Llama-like model, written plainly twice: as a function of its weights in torch, run eagerly and compiled, and
as a function of its weights in jax.numpy. All three begin with the same weights, see the same tokens in fp32 and learn
by the same plain gradient descent, so that what differs is who computes it. Each runs in a process of its own, by
turns. Read the two models side by side: they are meant for that. JAX is optional: `pip install -e '.[jax]'`.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.bench.report import Bar, Report, Result, report
from app.bench.turns import Referee, Ticket
from cluster.errors import DependencyError
from cluster.progress import Progress, Sink

WAYS: Final = ("torch", "compile", "jax")
AGREE: Final = 1e-4
"""How far the losses of three ways may be apart, relative, at any step. Sums in fp32 have their own order each."""
_RATE: Final = 0.1
_EPSILON: Final = 1e-5
_THETA: Final = 10_000.0

Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Size:
    """The model; its losses are compared over `losses` steps, and then each way has `runs` turns of `steps` steps."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    hidden: int = 768
    words: int = 4096
    batch: int = 4
    length: int = 128
    losses: int = 20
    steps: int = 5
    runs: int = 5
    threads: int = os.cpu_count() or 1


def run(size: Size, sink: Sink, *, ways: tuple[str, ...] = WAYS) -> Report:
    """Train the model in each of the ways. `DependencyError` if one of them is not installed."""
    if "jax" in ways and find_spec("jax") is None:
        raise DependencyError(
            "JAX is not installed.",
            hint="Install it with `.venv/bin/pip install -e '.[jax]'`, or leave it out: --way torch --way compile.",
            retryable=False,
        )
    results: list[Result] = []
    steps: dict[str, list[float]] = {way: [] for way in ways}
    with Referee() as referee:
        losses, compiled = {}, {}
        for number, way in enumerate(ways):
            sink(Progress("bench", number, len(ways) + 1, "parts", note=way))
            referee.admit(way, play, way, size)
            compiled[way] = referee.said[way]
            losses[way] = referee.turn(way, size.losses - 1).said
        sink(Progress("bench", len(ways), len(ways) + 1, "parts", note="by turns"))
        for _ in range(size.runs):
            for way in ways:
                steps[way].append(referee.turn(way, size.steps).wall_s / size.steps)
    for way in ways:
        results.append(Result.of(f"{way}: step", "ms", [each * 1e3 for each in steps[way]]))
        results.append(Result.of(f"{way}: first step", "s", [compiled[way]]))
        if way != ways[0]:
            over = [ours / first for ours, first in zip(steps[way], steps[ways[0]], strict=True)]
            results.append(Result.of(f"{way}: step over {ways[0]}'s", "ratio", over))
    apart = Result.of("losses apart", "relative", [difference(list(losses.values()))])
    return report("three-ways", size.runs, [*results, apart], [Bar.at_most(apart, AGREE)])


def difference(losses: list[list[float]]) -> float:
    """The largest relative distance between any two ways at any step."""
    return float(max((max(each) - min(each)) / abs(min(each)) for each in zip(*losses, strict=True)))


def play(ticket: Ticket, way: str, size: Size) -> None:
    """Train in one way for as long as the referee lasts; says how long the first step took, and then the losses."""
    make = {"torch": in_torch, "compile": in_torch_compiled, "jax": in_jax}[way]
    batches = tokens(size)
    step = make(size, weights(size))
    began = time.perf_counter()
    losses = [step(batches[0])]
    ticket.mark(time.perf_counter() - began)
    while len(losses) < size.losses + size.runs * size.steps:
        losses.append(step(batches[len(losses) % len(batches)]))
        ticket.mark(losses[: size.losses])


def weights(size: Size) -> Weights:
    """The same ones for every way: normal, of the width's inverse root; norms of ones. Matrices are [in, out]."""
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return np.asarray(draw.standard_normal((rows, columns)) / np.sqrt(rows), np.float32)

    made = {"embedding": matrix(size.words, size.width), "norm": np.ones(size.width, np.float32)}
    for layer in range(size.layers):
        made |= {f"{layer}.{name}": matrix(size.width, size.width) for name in ("query", "key", "value", "out")}
        made |= {f"{layer}.{name}": matrix(size.width, size.hidden) for name in ("gate", "up")}
        made[f"{layer}.down"] = matrix(size.hidden, size.width)
        made |= {f"{layer}.{name}": np.ones(size.width, np.float32) for name in ("before", "between")}
    return made


def tokens(size: Size) -> list[npt.NDArray[np.int64]]:
    """Eight batches of [batch, length + 1] random tokens: each is to predict the next."""
    draw = np.random.default_rng(1)
    return [draw.integers(0, size.words, (size.batch, size.length + 1)) for _ in range(8)]


def rotation(size: Size) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), [length, head width]."""
    half = size.width // size.heads // 2
    angles = np.outer(np.arange(size.length), _THETA ** (-np.arange(half) / half))
    angles = np.concatenate([angles, angles], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


Step = Callable[[npt.NDArray[np.int64]], float]
"""One step of training on a batch; its loss before the step."""


def in_torch(size: Size, start: Weights, *, compiled: bool = False) -> Step:
    """PyTorch, eager, or with loss and gradient compiled."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(size.threads)
    w = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in start.items()}
    cosines, sines = map(torch.from_numpy, rotation(size))

    def normed(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON) * weight

    def heads(x: Any) -> Any:  # [B, T, H·D] → [B, H, T, D]
        return x.unflatten(-1, (size.heads, -1)).transpose(1, 2)

    def turned(x: Any) -> Any:
        left, right = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-right, left], dim=-1) * sines

    def loss(batch: Any) -> Any:
        x = w["embedding"][batch[:, :-1]]
        for layer in range(size.layers):
            y = normed(x, w[f"{layer}.before"])
            query, key, value = (heads(y @ w[f"{layer}.{name}"]) for name in ("query", "key", "value"))
            y = functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2) @ w[f"{layer}.out"]
            y = normed(x, w[f"{layer}.between"])
            x = x + (functional.silu(y @ w[f"{layer}.gate"]) * (y @ w[f"{layer}.up"])) @ w[f"{layer}.down"]
        logits = normed(x, w["norm"]) @ w["embedding"].T
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    run = torch.compile(loss, dynamic=False) if compiled else loss

    def step(batch: npt.NDArray[np.int64]) -> float:
        value = run(torch.from_numpy(batch))
        value.backward()
        with torch.no_grad():
            for weight in w.values():
                weight -= _RATE * weight.grad
                weight.grad = None
        return float(value.detach())

    return step


def in_torch_compiled(size: Size, start: Weights) -> Step:
    """`in_torch` under torch.compile."""
    return in_torch(size, start, compiled=True)


def in_jax(size: Size, start: Weights) -> Step:
    """JAX, with the whole step under `jit`. XLA on a CPU takes what threads it finds: those this process may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: size.threads])
    import jax
    from jax import numpy as jnp

    cosines, sines = map(jnp.asarray, rotation(size))
    causal = jnp.tril(jnp.ones((size.length, size.length), bool))

    def normed(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + _EPSILON) * weight

    def heads(x: Any) -> Any:  # [B, T, H·D] → [B, H, T, D]
        return x.reshape(*x.shape[:2], size.heads, -1).swapaxes(1, 2)

    def turned(x: Any) -> Any:
        left, right = jnp.split(x, 2, axis=-1)
        return x * cosines + jnp.concatenate([-right, left], axis=-1) * sines

    def loss(w: Any, batch: Any) -> Any:
        x = w["embedding"][batch[:, :-1]]
        for layer in range(size.layers):
            y = normed(x, w[f"{layer}.before"])
            query, key, value = (heads(y @ w[f"{layer}.{name}"]) for name in ("query", "key", "value"))
            scores = turned(query) @ turned(key).swapaxes(2, 3) / np.sqrt(size.width // size.heads)
            y = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ value
            x = x + y.swapaxes(1, 2).reshape(x.shape) @ w[f"{layer}.out"]
            y = normed(x, w[f"{layer}.between"])
            x = x + (jax.nn.silu(y @ w[f"{layer}.gate"]) * (y @ w[f"{layer}.up"])) @ w[f"{layer}.down"]
        logits = normed(x, w["norm"]) @ w["embedding"].T
        right = jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - right).mean()

    @jax.jit
    def learned(w: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, batch)
        return value, {name: weight - _RATE * gradient[name] for name, weight in w.items()}

    now = {name: jnp.asarray(value) for name, value in start.items()}

    def step(batch: npt.NDArray[np.int64]) -> float:
        nonlocal now
        value, now = learned(now, batch.astype(np.int32))
        jax.block_until_ready(now)
        return float(value)

    return step
