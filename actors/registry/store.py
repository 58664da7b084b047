"""The log of the registry: an append-only table, one writer at a time.

An append is one transaction, and its commit is the acknowledgement. Whoever opens the log takes the next epoch;
every append checks its epoch in the same transaction, so that an older writer that still lives (a partitioned
node, a second cluster on the same database) can add nothing any more.

This module knows SQL and how a fact is encoded. It does not know what facts mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    func,
    insert,
    inspect,
    literal,
    select,
    update,
)

from actors.registry.facts import Event, Fact, decode, encode
from cluster.database import create_tables, open_engine, sqlite_path, transaction, without_password
from cluster.errors import DependencyError, StateError

_SCHEMA: Final = MetaData()
_EVENTS: Final = Table(
    "registry_events",
    _SCHEMA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(32), nullable=False),
    Column("body", Text, nullable=False),
    # Text, because SQLite has no type that keeps a time zone and microseconds; ISO 8601 in UTC sorts as time does.
    Column("at", String(40), nullable=False),
    Column("by", Text, nullable=False),
)
_WRITER: Final = Table(
    "registry_writer",
    _SCHEMA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
)
_POSITIONS: Final = Table(
    "registry_positions",
    _SCHEMA,
    Column("consumer", String(64), primary_key=True),
    Column("seq", BigInteger, nullable=False),
)


class EventStore(Protocol):
    """A log with one writer. Methods block; they may be called from several threads."""

    epoch: int

    def append(self, facts: Sequence[Fact], *, after: int, at: datetime, by: str) -> tuple[Event, ...]:
        """Add `facts` behind event number `after`, all or none, and return them as events.

        `StateError` if a newer writer has taken over. `DependencyError` if the database fails or the log does not
        end at `after`: then it is unknown whether they stand in the log, and the caller has to `read` before it
        goes on.
        """
        ...

    def read(self, *, after: int = 0, limit: int | None = None) -> list[Event]:
        """The events behind number `after`, in order."""
        ...

    def position(self, consumer: str) -> int:
        """The last event that `consumer` has dealt with; 0 at first."""
        ...

    def advance(self, consumer: str, seq: int) -> None:
        """Keep that `consumer` has dealt with everything up to `seq`; same errors as `append`."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class SqlEventStore:
    """The log in SQLite or PostgreSQL. Opening it fences whoever had it open."""

    def __init__(self, uri: str) -> None:
        self._shown = without_password(uri)
        self._engine: Engine = open_engine(uri)
        create_tables(self._engine, _SCHEMA, _first_epoch)
        with transaction(self._engine) as connection:
            # Write first: on SQLite a transaction that begins with a read cannot wait for a lock later.
            connection.execute(update(_WRITER).where(_WRITER.c.id == 1).values(epoch=_WRITER.c.epoch + 1))
            self.epoch: int = connection.execute(select(_WRITER.c.epoch).where(_WRITER.c.id == 1)).scalar_one()

    def append(self, facts: Sequence[Fact], *, after: int, at: datetime, by: str) -> tuple[Event, ...]:
        events = _events(facts, after, at, by)
        with transaction(self._engine) as connection:
            self._hold(connection)
            _require_end(connection.execute(select(func.max(_EVENTS.c.seq))).scalar_one() or 0, after)
            connection.execute(
                insert(_EVENTS),
                [
                    {
                        "seq": e.seq,
                        "kind": e.fact.event,
                        "body": encode(e.fact),
                        "at": e.at.isoformat(timespec="microseconds"),
                        "by": by,
                    }
                    for e in events
                ],
            )
        return events

    def read(self, *, after: int = 0, limit: int | None = None) -> list[Event]:
        return _read(self._engine, after, limit)

    def position(self, consumer: str) -> int:
        query = select(_POSITIONS.c.seq).where(_POSITIONS.c.consumer == consumer)
        with transaction(self._engine) as connection:
            return connection.execute(query).scalar_one_or_none() or 0

    def advance(self, consumer: str, seq: int) -> None:
        with transaction(self._engine) as connection:
            self._hold(connection)
            moved = connection.execute(update(_POSITIONS).where(_POSITIONS.c.consumer == consumer).values(seq=seq))
            if moved.rowcount == 0:
                connection.execute(insert(_POSITIONS).values(consumer=consumer, seq=seq))

    def close(self) -> None:
        self._engine.dispose()

    def _hold(self, connection: Connection) -> None:
        """Lock the writer's row until the commit, and refuse if it is no longer ours."""
        held = connection.execute(
            update(_WRITER).where(_WRITER.c.id == 1, _WRITER.c.epoch == self.epoch).values(epoch=self.epoch)
        )
        if held.rowcount != 1:
            raise _fenced(self._shown, self.epoch)


def read_log(uri: str) -> list[Event]:
    """Every event of the log at `uri`, for someone who only looks: it fences nobody and creates nothing.

    Where no registry has ever been started there are none.
    """
    file = sqlite_path(uri)
    if file is not None and not file.exists():
        return []
    engine = open_engine(uri)
    try:
        with transaction(engine) as connection:
            begun = inspect(connection).has_table(_EVENTS.name)
        return _read(engine, 0, None) if begun else []
    finally:
        engine.dispose()


@dataclass
class Log:
    """What several `MemoryEventStore`s share, as several processes share a database."""

    events: list[Event] = field(default_factory=list)
    epoch: int = 0
    positions: dict[str, int] = field(default_factory=dict)


class MemoryEventStore:
    """The log in this process's memory, under the same contract; for tests and for a registry that forgets."""

    def __init__(self, log: Log | None = None) -> None:
        self._log = log if log is not None else Log()
        self._log.epoch += 1
        self.epoch = self._log.epoch

    def append(self, facts: Sequence[Fact], *, after: int, at: datetime, by: str) -> tuple[Event, ...]:
        self._hold()
        _require_end(len(self._log.events), after)
        events = _events(facts, after, at, by)
        self._log.events += events
        return events

    def read(self, *, after: int = 0, limit: int | None = None) -> list[Event]:
        return self._log.events[after:][:limit]

    def position(self, consumer: str) -> int:
        return self._log.positions.get(consumer, 0)

    def advance(self, consumer: str, seq: int) -> None:
        self._hold()
        self._log.positions[consumer] = seq

    def close(self) -> None:
        """Memory needs no closing."""

    def _hold(self) -> None:
        if self._log.epoch != self.epoch:
            raise _fenced("in memory", self.epoch)


def _read(engine: Engine, after: int, limit: int | None) -> list[Event]:
    query = select(_EVENTS).where(_EVENTS.c.seq > after).order_by(_EVENTS.c.seq).limit(limit)
    with transaction(engine) as connection:
        rows = connection.execute(query).all()
    return [Event(row.seq, datetime.fromisoformat(row.at), row.by, decode(row.kind, row.body)) for row in rows]


def _events(facts: Sequence[Fact], after: int, at: datetime, by: str) -> tuple[Event, ...]:
    """`facts` as a later `read` gives them back: what lives in memory now must not differ from a replay."""
    kept = [decode(fact.event, encode(fact)) for fact in facts]
    return tuple(Event(after + place, at.astimezone(UTC), by, fact) for place, fact in enumerate(kept, start=1))


def _first_epoch(connection: Connection) -> None:
    """The writers' one row, if there is none yet."""
    if connection.execute(select(func.count()).select_from(_WRITER)).scalar_one() == 0:
        first = select(literal(1), literal(0)).where(~select(_WRITER).exists())
        connection.execute(insert(_WRITER).from_select(["id", "epoch"], first))


def _require_end(end: int, after: int) -> None:
    if end != after:
        raise DependencyError(
            f"The registry's log ends at event {end}, not at {after}; nothing was added to it.",
            hint="An answer of the database was lost, or somebody else wrote. The same command reads the log first.",
        )


def _fenced(database: str, epoch: int) -> StateError:
    return StateError(
        f"Another registry has taken over the database {database}; this one (epoch {epoch}) may not write any more.",
        hint="One registry per database: stop one of the two Ray clusters, or give it another FLYWHEEL_HOME.",
    )
