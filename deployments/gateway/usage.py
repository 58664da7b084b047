"""What each version has answered, by hour: counted here, reported to the registry as totals. Pure.

Totals, not differences: a report that is lost or comes twice changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from actors.registry.serving import Traffic


@dataclass
class _Count:
    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    changed: bool = False


class Usage:
    """The traffic of one gateway replica since it started. Used from one event loop."""

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._counts: dict[tuple[str, datetime], _Count] = {}

    def answered(self, version: str, *, failed: bool) -> None:
        """One request to a version is over; `failed`: through no fault of its client."""
        count = self._of(version)
        count.requests += 1
        count.failures += failed

    def tokens(self, version: str, *, prompt: int, completion: int) -> None:
        """Tokens that one answer took in and gave out."""
        count = self._of(version)
        count.prompt_tokens += prompt
        count.completion_tokens += completion

    def changed(self) -> tuple[Traffic, ...]:
        """Totals of every hour that has changed since `reported`."""
        return tuple(
            Traffic(
                version_id=version,
                hour=hour,
                requests=count.requests,
                failures=count.failures,
                prompt_tokens=count.prompt_tokens,
                completion_tokens=count.completion_tokens,
            )
            for (version, hour), count in self._counts.items()
            if count.changed
        )

    def reported(self, rows: tuple[Traffic, ...]) -> None:
        """The registry has `rows`. Hours that are over and known to it are forgotten here."""
        this_hour = self._hour()
        for row in rows:
            key = (row.version_id, row.hour)
            count = self._counts[key]
            # What came in while the report was on its way goes with the next one.
            count.changed = (count.requests, count.prompt_tokens, count.completion_tokens) != (
                row.requests,
                row.prompt_tokens,
                row.completion_tokens,
            )
            if not count.changed and row.hour < this_hour:
                del self._counts[key]

    def _of(self, version: str) -> _Count:
        count = self._counts.setdefault((version, self._hour()), _Count())
        count.changed = True
        return count

    def _hour(self) -> datetime:
        return self._clock().replace(minute=0, second=0, microsecond=0)
