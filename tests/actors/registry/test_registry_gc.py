import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.registry import gc
from actors.registry.card import describe
from actors.registry.facts import CheckpointFact, Event, Fact, Pinned, Retired, RunEnded, RunFact, Version
from actors.registry.gc import Found, What, collect, look, plan
from actors.registry.state import State
from actors.registry.upload import Staged, claim, stage
from cluster import signing
from cluster.storage import Home, publish
from tests.actors.registry.crashes import every_crash

NOW = datetime(2026, 12, 2, 12, tzinfo=UTC)
OLD = NOW - timedelta(days=3)
HOME = Home(Path("/home"))


def version(number: int, name: str = "triage", **more: object) -> Version:
    digest = f"{number:02x}" * 32
    facts: dict[str, object] = {
        "name": name,
        "kind": "adapter",
        "source_path": Path("/source"),
        "base": "smollm",
        "id": f"{name}/{number}",
        "number": number,
        "digest": digest,
        "path": Path(name) / digest[:12],
        "created_at": OLD,
    }
    return Version.model_validate(facts | more)


def log(*facts: tuple[str, Fact], at: datetime = OLD) -> dict[str, Event]:
    return {id_: Event(seq, at, "ann", fact) for seq, (id_, fact) in enumerate(facts, 1)}


def state_of(*versions: Version, retired: tuple[int, ...] = (), at: datetime = OLD) -> State:
    """A state in which `versions` of one name are retired or candidates, and nothing else is known."""
    ends = {
        f"triage/{number}#retired": Retired(
            id=f"triage/{number}#retired", version_id=f"triage/{number}", by="ann", why="old", at=at, command="c"
        )
        for number in retired
    }
    entries = log(*((one.id, one) for one in versions)) | log(*ends.items(), at=at)
    return State(
        versions={"triage": versions},
        stages={one.id: "retired" if one.number in retired else "candidate" for one in versions},
        entries=entries,
        history={"triage": tuple(entries.values())},
    )


def found(path: Path, what: What = "version", touched: datetime = OLD) -> Found:
    return Found(what, path, 10, touched)


def folder(one: Version) -> Found:
    return found(HOME.versions / one.path)


def freed(state: State, *things: Found, now: datetime = NOW) -> list[str]:
    return [item.found.path.name for item in plan(state, things, HOME, now=now).free]


def pinned(state: State, number: int) -> State:
    pin = Pinned(version_id=f"triage/{number}", pinned=True, by="ann", why="audit", at=OLD)
    return replace(state, pins={pin.version_id: pin})


def test_only_what_nothing_reaches_is_freed_and_only_after_a_while() -> None:
    one, two = version(1), version(2)
    state = pinned(state_of(one, two, retired=(1,)), 2)
    orphan = found(HOME.versions / "triage" / ("ab" * 6))
    assert freed(state, folder(one), folder(two), orphan) == [folder(one).path.name, "ab" * 6]
    assert freed(state, replace(folder(one), touched_at=NOW), replace(orphan, touched_at=NOW)) == []
    assert freed(state_of(one, two, retired=(1,), at=NOW), folder(one)) == []
    drawn = plan(state, (folder(one),), HOME, now=NOW)
    assert drawn.version_ids == ("triage/1",)
    assert (drawn.size_bytes, drawn.kept) == (10, {"triage/2": "pinned by ann: audit"})
    assert drawn.free[0].why == "triage/1 is retired, and nothing reaches it"
    (item,) = plan(state_of(one), (folder(one),), HOME, now=NOW).free
    assert item.why == "triage/1 is candidate, and nothing reaches it"


def test_what_something_reaches_stays() -> None:
    one, two = version(1), version(2, parent="triage/1")
    state = state_of(one, two, retired=(1, 2))
    everything = (folder(one), folder(two))
    assert len(freed(state, *everything)) == 2
    assert freed(pinned(state, 2), *everything) == []  # a parent stays for its child
    assert freed(pinned(state, 1), *everything) == [folder(two).path.name]
    assert plan(state, everything, HOME, now=NOW, loaded={"triage/2"}).free == ()
    standing = {("triage", "champion"): ({2: 1.0},)}
    assert freed(replace(state, standing=standing), *everything) == []
    split = {("triage", "champion"): ({1: 0.9, 2: 0.1},)}
    assert freed(replace(state, standing=split), *everything) == []


def test_a_run_keeps_its_base_while_it_can_go_on() -> None:
    one = version(1)
    state = state_of(one, retired=(1,))
    run = RunFact(id="run", name="triage", base="/some/path", base_digest=one.digest)
    running = replace(state, entries={**state.entries, **log(("run", run))})
    assert freed(running, folder(one)) == []
    failed = replace(running, ended={"run": RunEnded(run_id="run", status="failed")})
    assert freed(failed, folder(one)) == []
    completed = replace(running, ended={"run": RunEnded(run_id="run", status="completed")})
    assert freed(completed, folder(one)) == [folder(one).path.name]


def test_checkpoints_of_completed_runs_go_unless_a_version_was_made_from_them() -> None:
    run = RunFact(id="run", name="triage", base="b", base_digest="")
    steps = [
        CheckpointFact(id=f"run/step-{step}", run_id="run", step=step, path=HOME.runs / "run" / f"step-{step:06d}")
        for step in (10, 20)
    ]
    made = version(1, checkpoint_id="run/step-20")
    state = pinned(state_of(made), 1)
    state = replace(state, entries={**state.entries, **log(("run", run), *((step.id, step) for step in steps))})
    things = [found(Path(step.path), "checkpoint") for step in steps] + [
        found(HOME.runs / "run" / "step-000030", "checkpoint")
    ]
    assert freed(state, *things) == []
    done = replace(state, ended={"run": RunEnded(run_id="run", status="completed")})
    assert freed(done, *things) == ["step-000010"]
    assert freed(done, *things, now=OLD + timedelta(hours=1)) == []
    gone = replace(done, pins={})
    assert freed(gone, *things) == ["step-000010", "step-000020"]


def test_what_was_exported_goes_with_its_checkpoint_and_what_a_run_may_be_writing_stays(home: Home) -> None:
    folder = home.runs / "run"
    for name in ("step-000010", "export-step-000010", "export-step-000020", "export-mine", ".partial-export-1"):
        (folder / name).mkdir(parents=True)
    run = RunFact(id="run", name="triage", base="b", base_digest="")
    step = CheckpointFact(id="run/step-10", run_id="run", step=10, path="/written/by/somebody/else")
    going_on = replace(State(), entries=log(("run", run), (step.id, step)))
    done = replace(going_on, ended={"run": RunEnded(run_id="run", status="completed")})
    assert collect(plan(going_on, look(home, going_on), home, now=later()), home, lambda: going_on).freed == ()
    outcome = collect(plan(done, look(home, done), home, now=later()), home, lambda: done)
    freed = {(item.found.what, item.found.path.name) for item in outcome.freed}
    assert freed == {
        ("checkpoint", "step-000010"), ("export", "export-step-000010"), ("scratch", ".partial-export-1"),
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {"export-step-000020", "export-mine"}


def test_a_completed_run_s_other_folder_is_looked_at_if_it_ran_here(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "run" / "step-000010"
    folder.mkdir(parents=True)
    run = RunFact(
        id="run", name="t", base="b", base_digest="", recipe={"checkpoint": {"storage": str(tmp_path / "disk")}}
    )
    step = CheckpointFact(id="run/step-10", run_id="run", step=10, path=str(folder))
    done = replace(
        State(),
        entries=log(("run", run), (step.id, step)),
        ended={"run": RunEnded(run_id="run", status="completed")},
    )
    assert look(home, done) == ()  # it came with an import: the path is one of another machine
    (home.runs / "run").mkdir(parents=True)
    outcome = collect(plan(done, look(home, done), home, now=later()), home, lambda: done)
    assert [item.found.path for item in outcome.freed] == [folder]
    assert not folder.exists()


def test_leftovers_go_when_they_are_old_and_trash_at_once() -> None:
    place = HOME.versions / "triage"
    things = [found(place / f".partial-{what}-1", what, at) for what in ("upload", "scratch") for at in (OLD, NOW)]
    assert freed(State(), *things) == [".partial-upload-1", ".partial-scratch-1"]
    assert freed(State(), found(place / ".partial-trash-1", "trash", NOW)) == [".partial-trash-1"]


def test_a_cached_copy_goes_when_its_version_is_no_more() -> None:
    one, two = version(1), version(2)
    state = pinned(state_of(one, two), 2)
    copies = [found(HOME.adapter_cache / one.digest, "cached adapter") for one in (one, two)]
    assert freed(state, *copies) == [one.digest]


@st.composite
def states(draw: st.DrawFn) -> State:
    count = draw(st.integers(1, 7))
    numbers = st.integers(1, count)
    versions = []
    for number in range(1, count + 1):
        parent = draw(st.none() | st.integers(1, number))
        how = draw(st.sampled_from(["parent", "base", "digest"]))
        more = {
            "parent": {"parent": f"triage/{parent}"},
            "base": {"base": f"triage/{parent}"},
            "digest": {"base_digest": f"{parent or 0:02x}" * 32},
        }[how]
        versions.append(version(number, **(more if parent and parent < number else {})))
    retired = tuple(draw(st.sets(numbers)))
    state = state_of(*versions, retired=retired)
    places = draw(st.lists(st.sets(numbers, min_size=1, max_size=2), max_size=3))
    pins = draw(st.sets(numbers, max_size=2))
    run = RunFact(id="run", name="r", base=f"triage/{draw(numbers)}", base_digest="")
    ended = draw(st.sampled_from([None, "failed", "completed"]))
    return replace(
        state,
        standing={("triage", "champion"): tuple(dict.fromkeys(place, 0.5) for place in places)} if places else {},
        pins={f"triage/{n}": Pinned(version_id=f"triage/{n}", pinned=True, by="a", why="w", at=OLD) for n in pins},
        entries={**state.entries, **log(("run", run))},
        ended={"run": RunEnded(run_id="run", status=ended)} if ended else {},
    )


def needed(state: State) -> set[int]:
    """Numbers that must stay, told the slow way."""
    several = state.versions["triage"]
    found = {int(id_.split("/")[1]) for id_ in state.pins}
    for places in state.standing.values():
        found |= set(places[-1])
        found |= {number for place in places for number in place if state.stages[f"triage/{number}"] != "retired"}
    if "run" not in state.ended or state.ended["run"].status != "completed":
        run = state.entries["run"].fact
        assert isinstance(run, RunFact)
        found.add(int(run.base.split("/")[1]))
    while True:
        more = {
            other.number
            for one in several
            if one.number in found
            for other in several
            if other.id in (one.parent, one.base) or other.digest == one.base_digest
        }
        if more <= found:
            return found
        found |= more


@given(states())
@settings(max_examples=150, deadline=None)
def test_nothing_reachable_is_ever_freed_and_everything_else_is(state: State) -> None:
    several = state.versions["triage"]
    gone = set(plan(state, [folder(one) for one in several], HOME, now=NOW).version_ids)
    assert gone == {one.id for one in several} - {f"triage/{number}" for number in needed(state)}


# On the disk


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def store(make_adapter: Callable[..., Path], home: Home) -> Callable[..., Staged]:
    def put(seed: int = 1) -> Staged:
        source = make_adapter(f"source-{seed}-{os.urandom(4).hex()}", seed=seed)
        return stage(source, describe(source, kind="adapter", base="b"), home, "triage")

    return put


def later(days: float = 2) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def touched(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def of(number: int, one: Staged) -> Version:
    return version(number, digest=one.artifact.digest, path=one.artifact.path)


def test_a_collection_frees_folder_and_signature_and_nothing_else(store: Callable[..., Staged], home: Home) -> None:
    one, two = store(1), store(2)
    state = pinned(state_of(of(1, one), of(2, two), retired=(1,)), 2)
    drawn = plan(state, look(home), home, now=later())
    assert one.folder.is_dir()
    outcome = collect(drawn, home, lambda: state)
    assert [item.version_ids for item in outcome.freed] == [("triage/1",)]
    assert outcome.size_bytes > one.artifact.size_bytes
    kept = {two.folder.name, f"{two.folder.name}.sig", ".lock"}
    assert {path.name for path in two.folder.parent.iterdir()} == kept
    assert collect(drawn, home, lambda: state).left == {one.folder: "it is gone already"}


def test_what_is_registered_again_meanwhile_stays(store: Callable[..., Staged], home: Home) -> None:
    one = store(1)
    state = state_of(of(1, one), retired=(1,))
    drawn = plan(state, look(home), home, now=later())
    assert store(1) == one
    outcome = collect(drawn, home, lambda: state)
    assert outcome.freed == ()
    assert "since the plan" in outcome.left[one.folder]
    signing.verify(one.folder, home, what="adapter triage/1")


def test_what_became_reachable_meanwhile_is_put_back(store: Callable[..., Staged], home: Home) -> None:
    one = store(1)
    before = State()
    drawn = plan(before, look(home), home, now=later())
    outcome = collect(drawn, home, lambda: pinned(state_of(of(1, one)), 1))
    assert "something needs it" in outcome.left[one.folder]
    signing.verify(one.folder, home, what="adapter triage/1")


def test_what_is_freed_can_be_registered_again(store: Callable[..., Staged], home: Home) -> None:
    one = store(1)
    collect(plan(State(), look(home), home, now=later()), home, State)
    assert not one.folder.exists()
    assert store(1) == one
    signing.verify(one.folder, home, what="adapter triage/1")


def test_an_upload_that_somebody_works_on_is_left(home: Home) -> None:
    place = home.versions / "triage" / ".partial-upload-1"
    place.parent.mkdir(parents=True)
    with claim(place):
        outcome = collect(plan(State(), look(home), home, now=later()), home, State)
        assert outcome.left == {place: "somebody is writing it"}
    assert [item.found.what for item in collect(plan(State(), look(home), home, now=later()), home, State).freed] == [
        "upload"
    ]
    assert not place.exists()


def test_an_upload_that_is_just_beginning_is_left(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    place = home.versions / "triage" / ".partial-upload-1"
    place.mkdir(parents=True)
    began = threading.Event()
    make_journal = os.open

    def slowly(path: Path, flags: int, mode: int = 0o777) -> int:
        if path == place / "journal":
            began.set()
            time.sleep(0.1)
        return make_journal(path, flags, mode)

    def upload() -> None:
        with claim(place):
            assert not collecting.result(30).freed

    with ThreadPoolExecutor() as pool, monkeypatch.context() as patched:
        patched.setattr("actors.registry.upload.os.open", slowly)
        collecting: Future[gc.Outcome] = Future()
        uploading = pool.submit(upload)
        assert began.wait(30)
        collecting.set_result(collect(plan(State(), look(home), home, now=later()), home, State))
        uploading.result(30)
    assert place.is_dir()


def test_a_copy_of_an_adapter_that_somebody_makes_is_left(home: Home) -> None:
    with publish(home.adapter_cache / ("ab" * 32)) as scratch:
        os.utime(scratch, (0, 0))
        outcome = collect(plan(State(), look(home), home, now=later()), home, State)
        assert outcome.left == {scratch: "somebody is writing it"}
    left = scratch.with_name(".partial-of-the-dead")
    left.mkdir()
    outcome = collect(plan(State(), [Found("scratch", left, 0, touched(left))], home, now=later()), home, State)
    assert [item.found.path for item in outcome.freed] == [left]


def test_a_signature_whose_folder_has_come_since_is_left(store: Callable[..., Staged], home: Home) -> None:
    one = store(1)
    away = one.folder.rename(one.folder.with_name("away"))
    drawn = plan(State(), look(home), home, now=later())
    assert [item.found.what for item in drawn.free] == ["signature"]
    away.rename(one.folder)
    assert "has come" in collect(drawn, home, State).left[signing.signature_path(one.folder)]
    signing.verify(one.folder, home, what="adapter triage/1")


def test_a_version_that_is_freed_while_it_is_looked_at_is_registered_again(
    store: Callable[..., Staged], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = store(1)
    verify, freed = signing.verify, list[gc.Item]()

    def slow(folder: Path, *others: Any, **named: Any) -> str:
        if not freed:
            freed.extend(collect(plan(State(), look(home), home, now=later()), home, State).freed)
        return verify(folder, *others, **named)

    with monkeypatch.context() as patched:
        patched.setattr(signing, "verify", slow)
        assert store(1) == one
    assert [item.found.what for item in freed] == ["version"]
    signing.verify(one.folder, home, what="adapter triage/1")


def test_leftovers_of_a_collection_that_died_go(store: Callable[..., Staged], home: Home) -> None:
    one = store(1)
    one.folder.rename(one.folder.with_name(f"{gc.TRASH_PREFIX}x"))
    outcome = collect(plan(State(), look(home), home, now=later()), home, State)
    assert sorted(item.found.what for item in outcome.freed) == ["signature", "trash"]
    assert [path.name for path in one.folder.parent.iterdir()] == [".lock"]


def test_strangers_and_links_in_the_store_are_left_alone(home: Home, tmp_path: Path) -> None:
    place = home.versions / "triage"
    (place / "notes").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (place / ("ab" * 6)).symlink_to(tmp_path / "elsewhere")
    assert look(home) == ()
    assert look(Home(tmp_path / "nowhere")) == ()


def die(place: Path) -> None:
    """What is killed: a collection of all that no version points to."""
    home = Home(place / "home")
    collect(plan(State(), look(home), home, now=later()), home, State)


@pytest.mark.integration
def test_a_collection_that_is_killed_anywhere_leaves_whole_versions_or_none(
    store: Callable[..., Staged], home: Home, tmp_path: Path
) -> None:
    one = store(1)
    places = [tmp_path / "deaths" / str(number) for number in range(1, 30)]
    for place in places:
        shutil.copytree(home.root, place / "home")
    deaths = every_crash(__file__, "die", tmp_path / "deaths")
    assert 5 < len(deaths) < len(places)
    for place in deaths:
        there = Home(place / "home")
        folder = there.versions / one.artifact.path
        if folder.exists():
            signing.verify(folder, there, what="adapter triage/1", digest=one.artifact.digest)
        collect(plan(State(), look(there), there, now=later()), there, State)
        assert [path.name for path in folder.parent.iterdir()] == [".lock"]
