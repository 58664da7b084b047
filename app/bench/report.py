"""What every bench prints: one JSON object with the machine, the figures as measured, and the bars beside them."""

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from statistics import median
from typing import Any, Literal

import psutil

from app.pipelines.provenance import code_commit
from cluster.config import Config


class Result(Config):
    """One quantity over all runs: the median, and the smallest and largest value seen."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, name: str, unit: str, values: Sequence[float]) -> "Result":
        """The figures of `values`, rounded to what they are worth."""
        digits = [float(f"{value:.4g}") for value in (median(values), min(values), max(values))]
        return cls(name=name, unit=unit, median=digits[0], low=digits[1], high=digits[2], runs=len(values))


class Bar(Config):
    """What a figure has to be at most (`max`) or at least (`min`), and whether it was."""

    name: str
    value: float
    bar: float
    direction: Literal["min", "max"]
    met: bool

    @classmethod
    def at_most(cls, result: Result, bar: float) -> "Bar":
        """The median of `result` must not be above `bar`."""
        return cls(name=result.name, value=result.median, bar=bar, direction="max", met=result.median <= bar)

    @classmethod
    def at_least(cls, result: Result, bar: float) -> "Bar":
        """The median of `result` must not be below `bar`."""
        return cls(name=result.name, value=result.median, bar=bar, direction="min", met=result.median >= bar)


class Report(Config):
    """A bench's outcome. A missed bar is said, not raised."""

    bench: str
    commit: str
    machine: dict[str, Any]
    runs: int
    results: tuple[Result, ...]
    bars: tuple[Bar, ...]


def report(bench: str, runs: int, results: Sequence[Result], bars: Sequence[Bar]) -> Report:
    """The report of a bench that ran here and now."""
    return Report(
        bench=bench, commit=code_commit(), machine=_machine(), runs=runs, results=tuple(results), bars=tuple(bars)
    )


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "ray": metadata.version("ray"),
        "torch": metadata.version("torch"),
    }
