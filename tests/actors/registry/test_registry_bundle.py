import io
import json
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.registry import bundle, facts
from actors.registry.card import describe
from actors.registry.facts import DataFact, Event, Version
from actors.registry.upload import stage
from cluster import signing
from cluster.errors import ConfigError, StateError
from cluster.signing import Keyring, SignatureError
from cluster.storage import Home, digest_folder
from tests.actors.registry.crashes import every_crash

AT = datetime(2026, 12, 2, 12, tzinfo=UTC)


@pytest.fixture
def here(tmp_path: Path) -> Home:
    return Home(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Home:
    return Home(tmp_path / "there")


def registered(source: Path, home: Home) -> tuple[Version, tuple[Event, ...]]:
    artifact = stage(source, describe(source, kind="adapter", base="b"), home, "triage").artifact
    data = DataFact(id="data-1", name="triage", digest="d", stage="tokens", rows={"train": 3})
    version = Version(
        name="triage",
        kind="adapter",
        source_path=source,
        base="b",
        data_version="data-1",
        id="triage/3",
        number=3,
        digest=artifact.digest,
        path=artifact.path,
        created_at=AT,
    )
    return version, (Event(1, AT, "ann", data), Event(7, AT, "ann", version))


@pytest.fixture
def exported(make_adapter: Callable[..., Path], here: Home, tmp_path: Path) -> Path:
    version, events = registered(make_adapter(), here)
    return bundle.export(version, events, here, tmp_path / "triage.tar", at=AT)


def trust(whom: Home, by: Home) -> None:
    pem = whom.root / "public.pem"
    pem.write_text(Keyring(whom).public_pem())
    Keyring(by).trust(pem)


def visible(home: Home) -> list[str]:
    store = home.versions / "triage"
    return sorted(path.name for path in store.iterdir() if path.name != ".lock") if store.is_dir() else []


def rewritten(source: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], object]) -> Path:
    """The bundle with its members changed, by a writer that believes everything."""
    with tarfile.open(source) as file:
        members = [(one, (file.extractfile(one) or io.BytesIO()).read()) for one in file.getmembers()]
    change(members)
    target = source.with_name("changed.tar")
    with target.open("wb") as out:
        for info, content in members:
            out.write(info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512))
        out.write(bytes(1024))
    return target


def test_a_version_moves_with_its_lineage_and_its_signature(exported: Path, here: Home, there: Home) -> None:
    trust(here, by=there)
    found = bundle.bring_in(exported, there)
    (folder,) = (path for path in (here.versions / "triage").iterdir() if path.is_dir())
    assert digest_folder(found.staged.folder) == digest_folder(folder) == found.version.digest
    assert found.signed_by == found.exported_by == found.staged.artifact.signed_by == Keyring(here).signing_id()
    assert signing.verify(found.staged.folder, there, what="adapter triage/3") == found.signed_by
    assert [event.fact.event for event in found.events] == ["data", "version"]
    assert found.events[1].fact == found.version
    assert found.version.data_version == "data-1"
    assert found.staged.artifact.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert visible(there) == [folder.name, f"{folder.name}.sig"]
    assert bundle.bring_in(exported, there) == found
    assert bundle.bring_in(exported, here).staged.folder == folder


def test_any_tar_can_read_it_and_it_is_always_the_same(
    exported: Path, here: Home, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    with tarfile.open(exported) as file:
        names = file.getnames()
    assert names[:3] == ["bundle.json", "bundle.sig", "version.sig"]
    assert names[4:] == ["files/adapter_config.json", "files/adapter_model.safetensors", "files/flywheel.json"]
    version, events = registered(make_adapter("again"), here)
    version = version.model_copy(update={"source_path": tmp_path / "adapter"})
    again = bundle.export(version, (events[0], Event(7, AT, "ann", version)), here, tmp_path / "again.tar", at=AT)

    def but_its_signature(path: Path) -> list[bytes]:
        with tarfile.open(path) as file:
            members = [one for one in file.getmembers() if one.name != "bundle.sig"]
            return [one.tobuf() + (file.extractfile(one) or io.BytesIO()).read() for one in members]

    assert but_its_signature(exported) == but_its_signature(again)
    with pytest.raises(ConfigError, match="exists already"):
        bundle.export(version, events, here, again, at=AT)


def test_a_strangers_bundle_is_refused_with_the_way_to_trust_it(exported: Path, here: Home, there: Home) -> None:
    with pytest.raises(SignatureError) as refused:
        bundle.bring_in(exported, there)
    key = Keyring(here).signing_id()
    assert refused.value.reason == "unknown_key"
    assert str(key) in refused.value.message
    assert f"flywheel signers trust keys/{key}.pem" in (refused.value.hint or "")
    assert visible(there) == []


def test_what_is_not_whole_is_not_exported(make_adapter: Callable[..., Path], here: Home, tmp_path: Path) -> None:
    version, events = registered(make_adapter(), here)
    (here.versions / version.path / "adapter_config.json").write_text("{}")
    with pytest.raises(SignatureError):
        bundle.export(version, events, here, tmp_path / "triage.tar", at=AT)
    assert not (tmp_path / "triage.tar").exists()


Members = list[tuple[tarfile.TarInfo, bytes]]


def named(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def flip(members: Members) -> None:
    info, content = members[5]
    members[5] = (info, content[:-1] + bytes([content[-1] ^ 1]))


def claim_more(members: Members) -> None:
    members[-1][0].size = 1 << 40


def other_facts(members: Members) -> None:
    info, content = members[0]
    members[0] = named(info.name, content.replace(b"data-1", b"data-2"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (flip, "damaged"),
        (claim_more, "longer than the file"),
        (other_facts, "is not as signed"),
        (lambda members: members.pop(), "damaged|too early"),
        (lambda members: members.pop(2), "stands where version.sig belongs"),
        (lambda members: members.insert(4, named("files/more.json", b"{}")), "stands where"),
        (lambda members: members.append(named("files/z.json", b"{}")), "something follows"),
        (lambda members: members.insert(4, named("../up.json", b"{}")), "cannot be a file"),
        (lambda members: members.insert(4, named("/etc/up.json", b"{}")), "cannot be a file"),
        (lambda members: members.insert(4, named("files/x.json", kind=tarfile.SYMTYPE, link="/etc/passwd")), "a link"),
        (lambda members: members.insert(4, named("files/x.json", kind=tarfile.LNKTYPE, link="bundle.json")), "a link"),
        (lambda members: members.insert(4, named("files/x", kind=tarfile.DIRTYPE)), "a folder"),
        (lambda members: members.insert(4, named("files/x.json", kind=tarfile.FIFOTYPE)), "a device"),
        (lambda members: members.insert(4, named("files/x.json", kind=tarfile.CHRTYPE)), "a device"),
        (lambda members: members.insert(0, named("././@PaxHeader", b"19 comment=hello!!\n", b"x")), "would not write"),
        (lambda members: members.insert(0, named("././@PaxHeader", b"9" * 5000, b"x")), "long extended header"),
        (lambda members: members.insert(0, named("././@LongLink", b"x" * 300, b"L")), "a device"),
    ],
)
def test_what_a_bundle_says_is_not_believed(
    exported: Path, here: Home, there: Home, change: Callable[[Members], object], complaint: str
) -> None:
    trust(here, by=there)
    with pytest.raises((ConfigError, SignatureError), match=complaint):
        bundle.bring_in(rewritten(exported, change), there)
    assert visible(there) == []


def test_what_is_no_bundle_is_refused(tmp_path: Path, there: Home) -> None:
    for content in (b"", b"x" * 5000, bytes(2048)):
        (tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(ConfigError, match="no bundle"):
            bundle.bring_in(tmp_path / "x.tar", there)
    with pytest.raises(ConfigError, match="no file"):
        bundle.bring_in(tmp_path / "nowhere.tar", there)
    with pytest.raises(ConfigError, match="no file"):
        bundle.bring_in(tmp_path, there)


def test_facts_of_a_newer_flywheel_are_named(
    make_adapter: Callable[..., Path], here: Home, there: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Newer(facts.Fact):
        event = "from-the-future"

    version, events = registered(make_adapter(), here)
    path = bundle.export(version, (*events, Event(9, AT, "ann", Newer())), here, tmp_path / "new.tar", at=AT)
    trust(here, by=there)
    with pytest.raises(StateError, match="from-the-future"):
        bundle.bring_in(path, there)
    assert visible(there) == []


def test_a_bundle_that_says_another_name_or_lacks_its_version_is_refused(
    make_adapter: Callable[..., Path], here: Home, there: Home, tmp_path: Path
) -> None:
    version, events = registered(make_adapter(), here)
    trust(here, by=there)
    path = bundle.export(version, events[:1], here, tmp_path / "lacking.tar", at=AT)
    with pytest.raises(ConfigError, match="triage/3 are not in it"):
        bundle.bring_in(path, there)
    lying = version.model_copy(update={"name": "other"})
    path = bundle.export(version, (Event(1, AT, "ann", lying),), here, tmp_path / "lying.tar", at=AT)
    with pytest.raises(ConfigError, match="another name or digest"):
        bundle.bring_in(path, there)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_bundle_never_publishes_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good, _, there = _once(tmp_path_factory)
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = good.with_name("damaged.tar")
    damaged.write_bytes(content)
    try:
        found = bundle.bring_in(damaged, there)
    except (ConfigError, SignatureError):
        assert visible(there) == []
        return
    # A change of what nobody reads (a time in a tar header, a key that came along) is no damage.
    assert digest_folder(found.staged.folder) == found.version.digest
    signing.verify(found.staged.folder, there, what="adapter triage/3", digest=found.version.digest)
    for path in (found.staged.folder, signing.signature_path(found.staged.folder)):
        path.rename(there.root / f"{path.name}-{damaged.stat().st_mtime_ns}")


_MADE: dict[str, tuple[Path, Home, Home]] = {}


def _once(factory: pytest.TempPathFactory) -> tuple[Path, Home, Home]:
    if "it" not in _MADE:
        root = factory.mktemp("bundle")
        here, there = Home(root / "here"), Home(root / "there")
        version, events = registered(_adapter(root / "source"), here)
        trust(here, by=there)
        _MADE["it"] = (bundle.export(version, events, here, root / "good.tar", at=AT), here, there)
    return _MADE["it"]


def _adapter(folder: Path) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "b",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"q_proj.lora_A.weight": np.ones((2, 4), np.float32)}, folder / "adapter_model.safetensors")
    return folder


def die(place: Path) -> None:
    """What is killed: an import."""
    root = place.parents[1]
    bundle.bring_in(root / "good.tar", Home(place / "home"))


@pytest.mark.integration
def test_an_import_that_is_killed_anywhere_leaves_no_version_or_a_whole_signed_one(tmp_path: Path) -> None:
    here = Home(tmp_path / "here")
    version, events = registered(_adapter(tmp_path / "source"), here)
    good = bundle.export(version, events, here, tmp_path / "good.tar", at=AT)
    # Every home of the crashes trusts the exporter: they find its key where theirs would be.
    places = [tmp_path / "deaths" / str(number) for number in range(1, 200)]
    for place in places:
        trust_from(here, Home(place / "home"))
    for place in every_crash(__file__, "die", tmp_path / "deaths"):
        home = Home(place / "home")
        for name in visible(home):
            if not name.startswith(".") and not name.endswith(".sig"):
                signing.verify(home.versions / "triage" / name, home, what="adapter triage/3", digest=version.digest)
        found = bundle.bring_in(good, home)
        signing.verify(found.staged.folder, home, what="adapter triage/3", digest=version.digest)


def trust_from(whom: Home, by: Home) -> None:
    trusted = by.keys / "trusted"
    trusted.mkdir(parents=True)
    for pem in (whom.keys / "trusted").glob("*.pem"):
        (trusted / pem.name).write_bytes(pem.read_bytes())
