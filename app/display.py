"""Progress that a person watches: live bars on a terminal, plain lines anywhere else.

It turns `cluster.progress.Progress` reports into a picture. It does not know what the work is.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cluster.progress import Progress

_PLAIN_INTERVAL_S = 10.0


@dataclass
class _Stage:
    name: str
    began: float
    ended: float | None = None
    bar: TaskID | None = None
    shown_at: float = 0.0
    first_done: float | None = None
    first_at: float = 0.0
    latest: Progress | None = None

    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def seconds_left(self) -> float | None:
        """From the pace since the first report: start-up time must not count as work."""
        latest = self.latest
        if latest is None or not latest.total or self.first_done is None:
            return None
        advanced = latest.done - self.first_done
        if advanced <= 0:
            return None
        return (time.monotonic() - self.first_at) / advanced * (latest.total - latest.done)


@dataclass
class Display:
    """A sink for progress reports, grouped in numbered stages. Use as a context manager."""

    console: Console
    stages_expected: int | None = None
    _stages: list[_Stage] = field(default_factory=list)
    _bars: Bars | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[facts]}", markup=False),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage of the work; its time is kept for `times`."""
        stage = _Stage(name, time.monotonic())
        self._stages.append(stage)
        self._open(stage)
        try:
            yield
        except BaseException:
            stage.ended = time.monotonic()
            self._close(stage, mark="✗")
            raise
        stage.ended = time.monotonic()
        self._close(stage, mark="✓")

    def __call__(self, progress: Progress) -> None:
        """Take one report; it belongs to the stage that is open."""
        if not self._stages or self._stages[-1].ended is not None:
            return
        stage = self._stages[-1]
        if stage.latest is None or stage.latest.stage != progress.stage or progress.total != stage.latest.total:
            stage.first_done, stage.first_at = progress.done, time.monotonic()
        stage.latest = progress
        if self._bars is not None and stage.bar is not None:
            self._bars.update(stage.bar, total=progress.total, completed=progress.done, facts=_facts(stage))
        elif time.monotonic() - stage.shown_at >= _PLAIN_INTERVAL_S or progress.done == progress.total:
            stage.shown_at = time.monotonic()
            self.console.print(f"  {stage.name}: {_facts(stage)}", highlight=False, markup=False)

    def times(self) -> dict[str, float]:
        """Seconds of each stage so far, in order."""
        return {stage.name: round(stage.seconds(), 1) for stage in self._stages}

    def _title(self, stage: _Stage) -> str:
        number = self._stages.index(stage) + 1
        return f"[{number}/{self.stages_expected}] {stage.name}" if self.stages_expected else stage.name

    def _open(self, stage: _Stage) -> None:
        if self._bars is not None:
            stage.bar = self._bars.add_task(self._title(stage), total=None, facts="")
        else:
            self.console.print(self._title(stage), highlight=False, markup=False)

    def _close(self, stage: _Stage, *, mark: str) -> None:
        if self._bars is not None and stage.bar is not None:
            total = stage.latest.total if stage.latest and stage.latest.total else 1
            completed = total if mark == "✓" else stage.latest.done if stage.latest else 0
            self._bars.update(stage.bar, description=f"{mark} {self._title(stage)}", total=total, completed=completed)
            self._bars.stop_task(stage.bar)
        else:
            self.console.print(f"  {mark} {stage.name}: {stage.seconds():.1f} s", highlight=False, markup=False)


def _facts(stage: _Stage) -> str:
    """`step 12/60 · 512 tokens/s · 1:10 left · loss 0.831`"""
    latest = stage.latest
    if latest is None:
        return ""
    parts = [
        f"{latest.done:.0f}/{latest.total:.0f} {latest.unit}" if latest.total else f"{latest.done:.0f} {latest.unit}"
    ]
    if latest.rate is not None:
        parts.append(f"{latest.rate:.0f} {latest.rate_unit}")
    left = stage.seconds_left()
    if left is not None:
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    if latest.note:
        parts.append(latest.note)
    return " · ".join(parts)
