"""`flywheel models`, as far as it only looks: on a log that a registry has left behind, without Ray."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from actors.registry.facts import Artifact, CheckpointFact, DataFact, EvaluationFact, GateEnded, RunFact, VersionFact
from actors.registry.ledger import Ledger
from actors.registry.rules import BeginGate, Promote, Register
from actors.registry.serving import ServingBook, ServingReport, Traffic
from actors.registry.store import SqlEventStore
from app.cli.models_change import _age, _split
from cluster import environment
from cluster.database import open_engine, sqlite_uri
from cluster.errors import ConfigError
from cluster.storage import Home
from tests.app.test_cli import flywheel

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


class Clock:
    """A minute passes with every command."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        self.now += timedelta(minutes=1)
        return self.now


@pytest.fixture
def registered(tmp_path: Path) -> Path:
    """A home in which `triage` has two versions; the first was champion at 12:07, a split came at 12:11."""
    home = Home(tmp_path / "home")
    home.root.mkdir()
    uri = sqlite_uri(home.registry_database)
    ledger = Ledger(SqlEventStore(uri), clock=Clock())
    commands: list[Any] = [
        DataFact(id="errors@1", name="errors", digest="d", stage="tokens", rows={"train": 9}),
        RunFact(id="triage-1", name="triage", base="smol", base_digest="b", data_version="errors@1"),
        CheckpointFact(id="triage-1/step-5", run_id="triage-1", step=5, path=Path("/c")),
        EvaluationFact(id="eval-1", run_id="triage-1", checkpoint_id="triage-1/step-5", passed=True),
    ]
    for number, content in enumerate(("aa", "bb"), start=1):
        fact = VersionFact(
            name="triage",
            kind="adapter",
            source_path=Path("/s"),
            base="smol",
            run_id="triage-1",
            checkpoint_id="triage-1/step-5",
            evaluation_id="eval-1",
            metrics={"exact_match": number / 4},
        )
        commands.append(Register(fact, Artifact(path=Path("triage") / content, digest=content)))
        if number == 1:
            commands += [
                BeginGate("triage/1", "ada", "g1"),
                GateEnded(gate_id="triage/1#gate-1", outcome="passed", evaluation_id="eval-1", reason="+0.5 on 400"),
                Promote("triage", "champion", {1: 1.0}, "ada", "beats the base", "p1"),
            ]
    commands.append(Promote("triage", "champion", {1: 0.9, 2: 0.1}, "bob", "one in ten", "p2", force=True))
    for command in commands:
        ledger.commit(command, by=getattr(command, "by", "ada"))
    book = ServingBook(open_engine(uri))
    book.enter(ServingReport(source="llm#a", node="n", holds=("triage/1",)), at=NOON)
    row = Traffic(version_id="triage/1", hour=NOON, requests=12, prompt_tokens=5, completion_tokens=7)
    book.enter(ServingReport(source="gateway#a", node="n", traffic=(row,)), at=NOON)
    return tmp_path


def shown(home: Path, *arguments: str) -> dict[str, Any]:
    done = flywheel(home, "models", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_the_lineage_is_a_graph_for_machines_and_a_tree_for_people(registered: Path) -> None:
    graph = shown(registered, "show", "triage@champion", "--lineage")
    ids = {node["id"] for node in graph["nodes"]}
    assert {"errors@1", "triage-1", "triage-1/step-5", "eval-1", "triage/1", "triage@champion#1"} <= ids
    assert {"replica/llm#a", "traffic/triage/1/2026-11-30"} <= ids
    assert ["triage/1", "replica/llm#a"] in graph["edges"]
    assert {node["id"] for node in shown(registered, "show", "errors@1", "--lineage")["nodes"]} >= ids
    done = flywheel(registered, "models", "show", "triage-1/step-5", "--lineage")
    lines = done.stdout.splitlines()
    depth = {
        kind: next(line.index(kind) for line in lines if f"{kind} " in line) for kind in ("data", "run", "traffic")
    }
    assert depth["data"] < depth["run"] < depth["traffic"]
    assert "12 requests" in done.stdout


@pytest.mark.parametrize(
    ("at", "live"),
    [
        ("2026-11-30T12:00Z", []),
        ("2026-11-30T12:08:30Z", [({"1": 1.0}, "ada", "beats the base", ["+0.5 on 400"])]),
        ("2026-11-30T14:30+02:00", [({"1": 0.9, "2": 0.1}, "bob", "one in ten", ["+0.5 on 400"])]),
    ],
)
def test_what_was_live_when_and_why(registered: Path, at: str, live: list[Any]) -> None:
    found = shown(registered, "history", "triage", "--at", at)["live"]
    assert [
        (each["split"], each["move"]["by"], each["move"]["why"], [gate["reason"] for gate in each["gates"]])
        for each in found
    ] == live


def test_tables_say_who_when_why_and_by_force(registered: Path) -> None:
    history = flywheel(registered, "models", "history", "triage").stdout
    for part in ("registered", "gate passed", "beats the base", "promote by force", "versions 1 (90%), 2 (10%)", "bob"):
        assert part in history
    at = flywheel(registered, "models", "history", "triage", "--at", "2026-11-30T12:30Z").stdout
    assert "one in ten" in at
    listed = flywheel(registered, "models", "list").stdout
    assert "champion → 1 (90%), 2 (10%)" in listed
    assert "2 promoted" in listed


def test_a_difference_is_named_by_its_fact(registered: Path) -> None:
    found = shown(registered, "diff", "triage/1", "triage/2")
    facts = {each["fact"]: (each["first"], each["second"]) for each in found["differences"]}
    assert facts["metrics.exact_match"] == ("0.25", "0.5")
    assert facts["digest"] == ("aa", "bb")
    assert "base" not in facts
    assert "do not differ" in flywheel(registered, "models", "diff", "triage/1", "triage@champion").stdout


@pytest.mark.parametrize(
    ("arguments", "part", "code"),
    [
        (("history", "triage", "--at", "yesterday"), "'yesterday' is no time", 2),
        (("history", "triage", "--at", "2026-11-30T12:00"), "no time zone", 1),
        (("show", "triage/7"), "triage/7", 1),
        (("show", "triage-9", "--lineage"), "triage-1", 1),
        (("diff", "triage/1", "trage/2"), "trage", 1),
        (("gc", "--older-than", "soon"), "'soon' is no age", 2),
        (("promote", "triage", "two", "--reason", "why"), "'two' is no version", 2),
        (("import", "nowhere.tar"), "nowhere.tar", 2),
        (("verify",), "triage/1", 1),
        (("sign", "triage/1"), "not those that were registered", 2),
        (("retire", "triage/1", "--reason", "\x1b[31mred"), "cannot be shown", 2),
        (("show", "triage/" + 5000 * "9"), "triage/", 1),
        (("export", "triage/1"), "triage/1", 1),
    ],
)
def test_mistakes_are_named(registered: Path, arguments: tuple[str, ...], part: str, code: int) -> None:
    done = flywheel(registered, "models", *arguments)
    assert done.returncode == code, done.stdout
    assert part in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_shares_and_ages_are_read() -> None:
    assert _split("3") == {3: 1.0}
    assert _split("3=0.9,4=.1") == {3: 0.9, 4: 0.1}
    assert _split("3=90%, 4=10%") == {3: 0.9, 4: 0.1}
    for wrong in ("", "3=", "3=0.5,3=0.5", "a=1", "3=0.9;4=0.1", "-1"):
        with pytest.raises(ConfigError, match="no version and no shares"):
            _split(wrong)
    assert (_age("30m"), _age("7d")) == (1800, 604800)


def test_looking_needs_no_ray(registered: Path) -> None:
    code = (
        "import sys\n"
        "sys.argv = ['flywheel', 'models', 'show', 'triage', '--lineage']\n"
        "from app.__main__ import main\n"
        "try:\n    main()\nfinally:\n    assert 'ray' not in sys.modules and 'mlflow' not in sys.modules\n"
    )
    settings = {**os.environ, environment.HOME: str(registered / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
