"""Which replicas hold which versions, and what traffic the versions have had: reported by servers, kept in SQL.

These are measurements, not decisions: they stand in tables beside the log, are overwritten as they grow, and
nothing in the state machine depends on them. A report may come twice or late; it carries totals, not differences.
This module knows SQL; it knows neither Ray nor the log.
"""

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Final

from pydantic import Field
from sqlalchemy import BigInteger, Column, Connection, Engine, MetaData, String, Table, insert, inspect, select, update

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


class ServingReport(Config):
    """What a server says of itself. `holds`: the versions that it holds now; None: it holds none by its nature.

    `traffic` are its totals so far of each hour that has changed since its last report.
    """

    source: str
    node: str
    holds: tuple[str, ...] | None = None
    traffic: tuple[Traffic, ...] = ()


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
                _put_traffic(connection, report.source, row)

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


def _put_traffic(connection: Connection, source: str, row: Traffic) -> None:
    key = {"source": source, "version": row.version_id, "hour": _text(row.hour)}
    counts = {name: getattr(row, name) for name in _COUNTS}
    mine = [_TRAFFIC.c[name] == value for name, value in key.items()]
    # Written first, so that SQLite takes its lock at once. Totals only grow: a late report takes nothing back.
    connection.execute(update(_TRAFFIC).where(*mine, _TRAFFIC.c.requests <= row.requests).values(**counts))
    if connection.execute(select(_TRAFFIC.c.requests).where(*mine)).first() is None:
        connection.execute(insert(_TRAFFIC).values(**key, **counts))


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
