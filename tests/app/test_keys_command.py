"""`flywheel keys`: what is shown of API keys, and what is refused before a cluster is started for it."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.registry.apikeys import ApiKey, sha256_of
from actors.registry.facts import ApiKeyCreated, ApiKeyRevoked
from actors.registry.ledger import Ledger
from actors.registry.reader import read_state
from actors.registry.rules import CreateKey, RevokeKey
from actors.registry.serving import KeyUse, ServingBook, ServingReport
from actors.registry.store import SqlEventStore
from app.cli import keys, output
from app.pipelines import registry as pipeline
from cluster import environment
from cluster.database import open_engine, sqlite_uri
from cluster.errors import ConfigError, FlywheelError, RequestError, StateError
from cluster.storage import Home


class Writer:
    """The registry's ledger where the command finds its client, without Ray between."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def create_key(self, key: ApiKey) -> ApiKeyCreated:
        answer = self._ledger.commit(CreateKey(key, "ada"), by="ada")
        assert isinstance(answer, ApiKeyCreated)
        return answer

    def revoke_key(self, key_id: str, *, why: str) -> ApiKeyRevoked:
        answer = self._ledger.commit(RevokeKey(key_id, "ada", why, f"c-{why}"), by="ada")
        assert isinstance(answer, ApiKeyRevoked)
        return answer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    monkeypatch.setenv(environment.HOME, str(home.root))
    monkeypatch.delenv(environment.DATABASE_URI, raising=False)

    @contextmanager
    def writer(to: Home) -> Iterator[Writer]:
        store = SqlEventStore(sqlite_uri(to.registry_database))
        yield Writer(Ledger(store))
        store.close()

    monkeypatch.setattr(pipeline, "writer", writer)
    return home


@pytest.fixture
def run(home: Home, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `flywheel keys …` and returns what it prints; an error comes out as itself."""

    def call(*arguments: str) -> str:
        printed = io.StringIO()
        monkeypatch.setattr(output.console, "file", printed)
        result = CliRunner().invoke(keys.cli, list(arguments))
        if isinstance(result.exception, FlywheelError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return printed.getvalue()

    return call


def test_a_secret_is_shown_once_and_only_its_hash_is_kept(home: Home, run: Any) -> None:
    made = json.loads(run("create", "ci", "--role", "infer", "--role", "index", "--model", "b:team-*", "--json"))
    assert made["secret"].startswith("fw-")
    assert (made["roles"], made["models"], made["rpm"]) == (["infer", "index"], ["b:team-*"], None)
    assert read_state(home).live_keys[made["id"]].secret_sha256 == sha256_of(made["secret"])
    assert made["secret"] not in run("list", "--json")
    assert sha256_of(made["secret"]) not in run("list", "--json")
    for file in (path for path in home.root.rglob("*") if path.is_file()):
        assert made["secret"].encode() not in file.read_bytes()


def test_people_see_the_secret_on_a_line_of_its_own(run: Any) -> None:
    lines = run("create", "laptop").splitlines()
    assert [line for line in lines if line.startswith("fw-") and len(line) == 59]
    assert "infer on every model" in lines[0]


def test_limits_and_an_end_are_kept_with_the_key(run: Any) -> None:
    limits = ("--rpm", "60", "--tpm", "9000", "--budget-tokens", "5", "--per", "month", "--expires", "2d")
    made = json.loads(run("create", "ci", *limits, "--json"))
    assert (made["rpm"], made["tpm"], made["budget_tokens"], made["budget_period"]) == (60, 9000, 5, "month")
    left = datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)
    assert 1.99 < left.total_seconds() / 86400 <= 2
    listed = run("list")
    assert made["id"] in listed  # whole, to be copied
    assert "5 tokens/month" in listed


def test_a_revoked_key_leaves_the_list_unless_asked_for(run: Any) -> None:
    made = json.loads(run("create", "ci", "--json"))
    run("revoke", made["id"], "--reason", "leaked")
    assert json.loads(run("list", "--json"))["keys"] == []
    assert "flywheel keys create" in run("list")
    (seen,) = json.loads(run("list", "--revoked", "--json"))["keys"]
    assert (seen["standing"], seen["why"]) == ("revoked", "leaked")
    with pytest.raises(StateError, match="revoked already"):
        run("revoke", made["id"], "--reason", "again")


def test_use_is_shown_by_key_and_by_day_and_beside_the_budget(home: Home, run: Any) -> None:
    assert "No gateway" in run("usage")
    budget = ("--budget-tokens", "500", "--per", "month")
    made, idle = (json.loads(run("create", name, *budget, "--json")) for name in ("ci", "idle"))
    assert json.loads(run("usage", "--json"))["keys"] == []
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    rows = (
        KeyUse(key_id=made["id"], hour=now, requests=2, prompt_tokens=30, completion_tokens=4, estimated_tokens=1),
        KeyUse(key_id=made["id"], hour=now - timedelta(days=40), requests=1, prompt_tokens=1000),
    )
    book = ServingBook(open_engine(sqlite_uri(home.registry_database)))
    book.enter(ServingReport(source="gateway#a", node="n", keys=rows), at=now)
    book.close()
    (used,) = json.loads(run("usage", "--json"))["keys"]
    assert used["today"] == {"requests": 2, "prompt_tokens": 30, "completion_tokens": 4, "estimated_tokens": 1}
    assert (used["month"]["requests"], used["total"]["prompt_tokens"]) == (2, 1030)
    assert (used["budget_used"], sorted(used["days"])[-1]) == (35, now.date().isoformat())
    assert "35 used" in run("list")
    listed = {key["id"]: key["budget_used"] for key in json.loads(run("list", "--json"))["keys"]}
    assert listed == {made["id"]: 35, idle["id"]: 0}
    by_day = run("usage", made["id"])
    assert str(now.date()) in by_day
    assert str((now - timedelta(days=40)).date()) in by_day


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("create", "ci", "--role", "root"), RequestError, "root"),
        (("create", "ci", "--budget-tokens", "5"), RequestError, "per"),
        (("create", "C I"), RequestError, "'C I'"),
        (("create", "ci", "--per", "week"), ConfigError, "'week'"),
        (("create", "ci", "--expires", "soon"), ConfigError, "'soon'"),
        (("create", "ci", "--expires", "0d"), ConfigError, "'0d'"),
        (("revoke", "key-9", "--reason", "x"), RequestError, "'key-9'"),
        (("usage", "nobody"), RequestError, "'nobody'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_cluster_is_started(
    run: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], error: type[Exception], said: str
) -> None:
    def never(_: Home) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(pipeline, "writer", never)
    with pytest.raises(error, match=said):
        run(*arguments)
