"""API keys in the registry: what a secret is, what the log keeps of it, and when a key is let in no longer."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from actors.registry import views
from actors.registry.apikeys import ApiKey, Role, Secret, id_in, sha256_of
from actors.registry.facts import ApiKeyCreated, ApiKeyRevoked, Event, Fact, decode, encode
from actors.registry.rules import Command, CreateKey, RevokeKey, decide
from actors.registry.state import State, apply, replay, snapshot
from cluster.errors import RequestError, StateError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = ApiKey("key-0123456789ab", "ci", "a" * 64, ("infer", "index"), ("base:team-*",), rpm=60, tpm=9000)


class Log:
    """The pure machine, a minute per command."""

    def __init__(self) -> None:
        self.state, self.now = State(), NOW
        self.events: list[Event] = []

    def do(self, command: Command) -> Fact:
        self.now += timedelta(minutes=1)
        decision = decide(self.state, command, now=self.now)
        for fact in decision.facts:
            self.events.append(Event(self.state.seq + 1, self.now, "ada", fact))
            self.state = apply(self.state, self.events[-1])
        return decision.answer


def test_a_secret_is_long_random_and_names_its_key_but_is_never_printed() -> None:
    secrets = [Secret.make() for _ in range(50)]
    assert len({secret.text for secret in secrets}) == 50
    for secret in secrets:
        random = secret.text.removeprefix(f"fw-{secret.id.removeprefix('key-')}-")
        assert len(random) * 6 >= 256
        assert id_in(secret.text) == secret.id
        assert secret.sha256 == sha256_of(secret.text)
        assert random not in repr(secret)
        assert random not in str(secret)


@pytest.mark.parametrize("text", ["", "fw-", "sk-0123456789ab-" + "x" * 43, "fw-0123456789ab-" + "x" * 42, "fw-é-1"])
def test_what_cannot_be_a_secret_names_no_key(text: str) -> None:
    assert id_in(text) is None


def test_a_key_is_let_in_by_its_hash_and_servers_learn_it() -> None:
    log = Log()
    created = log.do(CreateKey(KEY, "ada"))
    assert isinstance(created, ApiKeyCreated)
    assert (created.by, created.at) == ("ada", log.now)
    assert snapshot(log.state).keys == {KEY.id: KEY}
    assert snapshot(log.state).number == log.state.seq
    assert KEY.secret_sha256 not in repr(KEY)
    assert KEY.secret_sha256 not in repr(created)


def test_the_same_creation_again_is_the_same_key_and_another_one_under_its_id_is_refused() -> None:
    log = Log()
    created = log.do(CreateKey(KEY, "ada"))
    assert log.do(CreateKey(KEY, "ada")) == created
    assert len(log.events) == 1
    with pytest.raises(StateError, match="already"):
        log.do(CreateKey(replace(KEY, secret_sha256="b" * 64), "ada"))


def test_a_revoked_key_is_gone_from_what_servers_know_and_a_second_revocation_says_when_and_why() -> None:
    log = Log()
    log.do(CreateKey(KEY, "ada"))
    revoked = log.do(RevokeKey(KEY.id, "bob", "leaked in a log", "c1"))
    assert isinstance(revoked, ApiKeyRevoked)
    assert snapshot(log.state).keys == {}
    assert snapshot(log.state).number == 2
    assert log.do(RevokeKey(KEY.id, "bob", "leaked in a log", "c1")) == revoked  # its answer was lost
    with pytest.raises(StateError, match=r"revoked already, at 2026-01-01 00:02 UTC by bob: leaked in a log"):
        log.do(RevokeKey(KEY.id, "ada", "to be sure", "c2"))
    assert len(log.events) == 2
    # A creation that was on its way meanwhile does not bring it back.
    log.do(CreateKey(KEY, "ada"))
    assert snapshot(log.state).keys == {}


def test_two_live_keys_do_not_share_a_name_but_a_dead_ones_name_is_free() -> None:
    log = Log()
    soon = NOW + timedelta(minutes=3)
    log.do(CreateKey(replace(KEY, expires_at=soon), "ada"))
    other = replace(KEY, id="key-ffffffffffff")
    with pytest.raises(StateError, match="live API key called 'ci'"):
        log.do(CreateKey(other, "ada"))
    log.do(CreateKey(other, "ada"))  # the first has expired now
    log.do(RevokeKey(other.id, "ada", "rotated", "c1"))
    log.do(CreateKey(replace(KEY, id="key-eeeeeeeeeeee"), "ada"))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"name": "CI"}, "name"),
        ({"id": "ci"}, "id"),
        ({"secret_sha256": "fw-0123456789ab-secret"}, "id"),
        ({"roles": ()}, "roles"),
        ({"roles": ("root",)}, "roles"),
        ({"models": ()}, "models"),
        ({"models": ("",)}, "models"),
        ({"models": ("a\x1b",)}, "models"),
        ({"rpm": 0}, "rpm"),
        ({"tpm": -1}, "tpm"),
        ({"budget_tokens": 5}, "budget_tokens"),
        ({"budget_period": "day"}, "budget_tokens"),
        ({"expires_at": NOW}, "expires_at"),
        ({"expires_at": datetime(2027, 1, 1)}, "expires_at"),
    ],
)
def test_a_key_that_cannot_be_is_refused_with_the_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        Log().do(CreateKey(replace(KEY, **change), "ada"))
    assert refused.value.param == param
    assert refused.value.hint


def test_an_unknown_key_cannot_be_revoked_and_a_reason_is_needed() -> None:
    log = Log()
    with pytest.raises(RequestError, match="no API key 'key-1'") as refused:
        log.do(RevokeKey("key-1", "ada", "why", "c1"))
    assert refused.value.status == 404
    log.do(CreateKey(KEY, "ada"))
    with pytest.raises(RequestError, match="why"):
        log.do(RevokeKey(KEY.id, "ada", " ", "c2"))


def test_a_log_with_keys_reads_back_as_the_same_state() -> None:
    log = Log()
    log.do(CreateKey(replace(KEY, budget_tokens=5, budget_period="month", expires_at=NOW + timedelta(days=9)), "ada"))
    log.do(CreateKey(ApiKey("key-ffffffffffff", "laptop", "c" * 64), "ada"))
    log.do(RevokeKey("key-ffffffffffff", "ada", "lost", "c1"))
    read = [Event(e.seq, e.at, e.by, decode(e.fact.event, encode(e.fact))) for e in log.events]
    assert replay(read) == log.state
    # The same request again, after a restart.
    assert not decide(replay(read), CreateKey(replay(read).live_keys[KEY.id], "ada"), now=log.now).facts


def test_what_people_see_of_keys_is_neither_secret_nor_hash() -> None:
    log = Log()
    log.do(CreateKey(KEY, "ada"))
    log.do(RevokeKey(KEY.id, "bob", "leaked", "c1"))
    (view,) = views.keys(log.state)
    assert (view.name, view.created_by, view.revoked_by, view.why) == ("ci", "ada", "bob", "leaked")
    assert KEY.secret_sha256 not in view.model_dump_json()


@pytest.mark.parametrize(
    ("pattern", "model", "allowed"),
    [
        ("*", "base", True),
        ("base:team-*", "base:team-a@champion", True),
        ("base:team-*", "base:other", False),
        ("base:team-*", "BASE:team-a", False),
        ("base", "base:team-a", False),
    ],
)
def test_patterns_are_over_the_whole_name_as_asked(pattern: str, model: str, allowed: bool) -> None:
    roles: tuple[Role, ...] = ("infer",)
    assert ApiKey("key-1", "k", "", roles, (pattern,)).allows(model) is allowed
