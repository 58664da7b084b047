"""What each version has answered and each API key was charged, by hour: counted here, reported as totals. Pure.

Totals, not differences: a report that is lost or comes twice changes nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Generic, TypeVar

from actors.registry.serving import KeyUse, Traffic

_Row = TypeVar("_Row", Traffic, KeyUse)


@dataclass
class _Count:
    amounts: dict[str, int] = field(default_factory=dict)
    changed: bool = False


class _Hourly(Generic[_Row]):
    """Counts by name and hour since this gateway replica started. Used from one event loop."""

    def __init__(
        self, make: Callable[[str, datetime, dict[str, int]], _Row], *, clock: Callable[[], datetime] | None = None
    ) -> None:
        self._make: Callable[[str, datetime, dict[str, int]], _Row] = make
        self._clock = clock or (lambda: datetime.now(UTC))
        self._counts: dict[tuple[str, datetime], _Count] = {}

    def changed(self) -> tuple[_Row, ...]:
        """Totals of every hour that has changed since `reported`."""
        return tuple(
            self._make(name, hour, count.amounts) for (name, hour), count in self._counts.items() if count.changed
        )

    def reported(self, rows: Iterable[_Row]) -> None:
        """The registry has `rows`. Hours that are over and known to it are forgotten here."""
        this_hour = self._hour()
        for row in rows:
            key = (row.version_id if isinstance(row, Traffic) else row.key_id, row.hour)
            count = self._counts[key]
            # What came in while the report was on its way goes with the next one.
            count.changed = self._make(*key, count.amounts) != row
            if not count.changed and row.hour < this_hour:
                del self._counts[key]

    def _add(self, name: str, **amounts: int) -> None:
        count = self._counts.setdefault((name, self._hour()), _Count())
        count.changed = True
        for what, amount in amounts.items():
            count.amounts[what] = count.amounts.get(what, 0) + amount

    def _hour(self) -> datetime:
        return self._clock().replace(minute=0, second=0, microsecond=0)


class Usage(_Hourly[Traffic]):
    """The traffic of each version."""

    def __init__(self, *, clock: Callable[[], datetime] | None = None) -> None:
        super().__init__(lambda version, hour, counts: Traffic(version_id=version, hour=hour, **counts), clock=clock)

    def answered(self, version: str, *, failed: bool) -> None:
        """One request to a version is over; `failed`: through no fault of its client."""
        self._add(version, requests=1, failures=int(failed))

    def tokens(self, version: str, *, prompt: int, completion: int) -> None:
        """Tokens that one answer took in and gave out."""
        self._add(version, prompt_tokens=prompt, completion_tokens=completion)


@dataclass(frozen=True, slots=True)
class Charge:
    """What one request has cost its key. `estimated`: nobody will know, so it is what was reserved."""

    prompt: int = 0
    completion: int = 0
    estimated: int = 0

    @property
    def tokens(self) -> int:
        """What limits and budgets count."""
        return self.prompt + self.completion + self.estimated


class KeyUsage(_Hourly[KeyUse]):
    """What each API key was charged."""

    def __init__(self, *, clock: Callable[[], datetime] | None = None) -> None:
        super().__init__(lambda key, hour, counts: KeyUse(key_id=key, hour=hour, **counts), clock=clock)

    def charged(self, key_id: str, charge: Charge) -> None:
        """One request of a key is over."""
        self._add(
            key_id,
            requests=1,
            prompt_tokens=charge.prompt,
            completion_tokens=charge.completion,
            estimated_tokens=charge.estimated,
        )
