"""Which replicas hold which versions, what traffic the versions have had, and what each API key has used.

Reported by servers, kept in SQL.

These are measurements, not decisions: they stand in tables beside the log, are overwritten as they grow, and
nothing in the state machine depends on them. A report may come twice or late; it carries totals, not differences.
This module knows SQL; it knows neither Ray nor the log.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Final

from pydantic import Field
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    func,
    insert,
    inspect,
    select,
    update,
)

from actors.registry.apikeys import ApiKey, Period, period_start
from cluster.config import Config
from cluster.database import create_tables, transaction

_SCHEMA: Final = MetaData()
_HOLDINGS: Final = Table(
    "registry_holdings",
    _SCHEMA,
    Column("replica", String(255), primary_key=True),
    Column("version", String(255), primary_key=True),
    Column("since", String(40), primary_key=True),
    Column("node", String(255), nullable=False),
    Column("seen", String(40), nullable=False),
    Column("until", String(40)),
)
_COUNTS: Final = ("requests", "failures", "prompt_tokens", "completion_tokens")
_TRAFFIC: Final = Table(
    "registry_traffic",
    _SCHEMA,
    Column("source", String(255), primary_key=True),
    Column("version", String(255), primary_key=True),
    Column("hour", String(40), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in _COUNTS),
)

_KEY_COUNTS: Final = ("requests", "prompt_tokens", "completion_tokens", "estimated_tokens")
_KEY_USE: Final = Table(
    "registry_key_use",
    _SCHEMA,
    # The hour first: the primary key's index then finds a period, whatever is older.
    Column("hour", String(40), primary_key=True),
    Column("source", String(255), primary_key=True),
    Column("key", String(255), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in _KEY_COUNTS),
)


class Holding(Config):
    """A replica held a version from `since` to `until`; None: it still does, as of `seen`."""

    replica: str
    version_id: str
    node: str
    since: datetime
    seen: datetime
    until: datetime | None = None


class Traffic(Config):
    """What a version answered within one hour, by UTC. Tokens count what was read and written."""

    version_id: str
    hour: datetime
    requests: int = Field(default=0, ge=0)
    failures: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)

    @property
    def day(self) -> date:
        """The UTC day."""
        return self.hour.astimezone(UTC).date()


class KeyUse(Config):
    """What an API key was charged within one hour, by UTC.

    `estimated_tokens` are those of answers whose client left before the engine had counted them.
    """

    key_id: str
    hour: datetime
    requests: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    estimated_tokens: int = Field(default=0, ge=0)

    @property
    def tokens(self) -> int:
        """What counts for a budget."""
        return self.prompt_tokens + self.completion_tokens + self.estimated_tokens

    @property
    def day(self) -> date:
        """The UTC day."""
        return self.hour.astimezone(UTC).date()


@dataclass(frozen=True)
class BudgetUse:
    """Tokens that a key was charged in the period of its budget that began at `since`."""

    since: datetime
    tokens: int


class ServingReport(Config):
    """What a server says of itself. `holds`: the versions that it holds now; None: it holds none by its nature.

    `traffic` and `keys` are its totals so far of each hour that has changed since its last report.
    """

    source: str
    node: str
    holds: tuple[str, ...] | None = None
    traffic: tuple[Traffic, ...] = ()
    keys: tuple[KeyUse, ...] = ()


class ServingBook:
    """The tables. Methods block; they may be called from several threads; `DependencyError` if SQL fails."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        create_tables(engine, _SCHEMA)

    def enter(self, report: ServingReport, *, at: datetime) -> None:
        """Write a report down."""
        with transaction(self._engine) as connection:
            if report.holds is not None:
                _enter_holdings(connection, report, _text(at))
            for row in report.traffic:
                _put_totals(connection, _TRAFFIC, row, source=report.source, version=row.version_id)
            for use in report.keys:
                _put_totals(connection, _KEY_USE, use, source=report.source, key=use.key_id)

    def close_unseen(self, *, before: datetime) -> None:
        """End the holdings of replicas that have said nothing since `before`: they ended when last seen."""
        with transaction(self._engine) as connection:
            connection.execute(
                update(_HOLDINGS)
                .where(_HOLDINGS.c.until.is_(None), _HOLDINGS.c.seen < _text(before))
                .values(until=_HOLDINGS.c.seen)
            )

    def read(self) -> tuple[list[Holding], list[Traffic]]:
        """All holdings, oldest first, and the traffic of all servers together by version and hour."""
        return read_serving(self._engine)

    def budget_use(self, keys: Iterable[ApiKey], *, but: str, now: datetime) -> dict[str, BudgetUse]:
        """What each of `keys` that has a budget has used of its period, by all servers but `but`."""
        found: dict[str, BudgetUse] = {}
        by_period: dict[Period, list[str]] = {}
        for key in keys:
            if key.budget_period is not None:
                by_period.setdefault(key.budget_period, []).append(key.id)
        with transaction(self._engine) as connection:
            for period, ids in by_period.items():
                since = period_start(period, now)
                used = _used_since(connection, since, but=but)
                found |= {id: BudgetUse(since, used.get(id, 0)) for id in ids}
        return found

    def close(self) -> None:
        """Let go of connections."""
        self._engine.dispose()


def read_serving(engine: Engine) -> tuple[list[Holding], list[Traffic]]:
    """As `ServingBook.read`, for someone who only looks: also at a registry that no server has reported to."""
    if not inspect(engine).has_table(_TRAFFIC.name):
        return [], []
    with transaction(engine) as connection:
        rows = connection.execute(select(_HOLDINGS).order_by(_HOLDINGS.c.since)).all()
        counts = connection.execute(select(_TRAFFIC)).all()
    holdings = [
        Holding(
            replica=row.replica,
            version_id=row.version,
            node=row.node,
            since=datetime.fromisoformat(row.since),
            seen=datetime.fromisoformat(row.seen),
            until=datetime.fromisoformat(row.until) if row.until else None,
        )
        for row in rows
    ]
    return holdings, merged(
        Traffic(
            version_id=row.version,
            hour=datetime.fromisoformat(row.hour),
            **{name: getattr(row, name) for name in _COUNTS},
        )
        for row in counts
    )


def read_key_use(engine: Engine) -> list[KeyUse]:
    """What keys were charged by all servers together, by key and hour; nothing if none has reported."""
    if not inspect(engine).has_table(_KEY_USE.name):
        return []
    sums = [func.sum(_KEY_USE.c[name]).label(name) for name in _KEY_COUNTS]
    asked = select(_KEY_USE.c.key, _KEY_USE.c.hour, *sums).group_by(_KEY_USE.c.key, _KEY_USE.c.hour)
    with transaction(engine) as connection:
        rows = connection.execute(asked.order_by(_KEY_USE.c.key, _KEY_USE.c.hour)).all()
    return [
        KeyUse(
            key_id=row.key,
            hour=datetime.fromisoformat(row.hour),
            **{name: int(getattr(row, name)) for name in _KEY_COUNTS},
        )
        for row in rows
    ]


def merged(rows: Iterable[Traffic]) -> list[Traffic]:
    """One row per version and hour, in that order; counts of several servers are added."""
    totals: dict[tuple[str, datetime], dict[str, int]] = {}
    for row in rows:
        total = totals.setdefault((row.version_id, row.hour), dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            total[name] += getattr(row, name)
    return [Traffic(version_id=version, hour=hour, **total) for (version, hour), total in sorted(totals.items())]


def _enter_holdings(connection: Connection, report: ServingReport, now: str) -> None:
    mine = (_HOLDINGS.c.replica == report.source, _HOLDINGS.c.until.is_(None))
    connection.execute(update(_HOLDINGS).where(*mine).values(seen=now))
    open_ = set(connection.execute(select(_HOLDINGS.c.version).where(*mine)).scalars())
    held = set(report.holds or ())
    if gone := open_ - held:
        connection.execute(update(_HOLDINGS).where(*mine, _HOLDINGS.c.version.in_(gone)).values(until=now))
    for version in sorted(held - open_):
        connection.execute(
            insert(_HOLDINGS).values(replica=report.source, version=version, since=now, node=report.node, seen=now)
        )


def _put_totals(connection: Connection, table: Table, row: Traffic | KeyUse, **key: str) -> None:
    """Write the totals of one hour down."""
    whole = {**key, "hour": _text(row.hour)}
    counts = {name: getattr(row, name) for name in (_COUNTS if isinstance(row, Traffic) else _KEY_COUNTS)}
    mine = [table.c[name] == value for name, value in whole.items()]
    # Written first, so that SQLite takes its lock at once. Totals only grow: a late report takes nothing back.
    connection.execute(update(table).where(*mine, table.c.requests <= row.requests).values(**counts))
    if connection.execute(select(table.c.requests).where(*mine)).first() is None:
        connection.execute(insert(table).values(**whole, **counts))


def _used_since(connection: Connection, since: datetime, *, but: str) -> Mapping[str, int]:
    tokens = func.sum(_KEY_USE.c.prompt_tokens + _KEY_USE.c.completion_tokens + _KEY_USE.c.estimated_tokens)
    asked = select(_KEY_USE.c.key, tokens).where(_KEY_USE.c.hour >= _text(since), _KEY_USE.c.source != but)
    return {key: int(used) for key, used in connection.execute(asked.group_by(_KEY_USE.c.key))}


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
