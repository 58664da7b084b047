"""A signature holds for exactly the files that were signed, by exactly a key that is trusted; all else is refused."""

import base64
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import signing
from cluster.errors import ConfigError
from cluster.signing import Keyring, SignatureError, Verifier, sign, signature_path, verify
from cluster.storage import Home, digest_folder, file_digests

FILES = {"config.json": b'{"r": 8}', "model.safetensors": bytes(range(256)), "inner/.gitattributes": b"* -text\n"}


def write_model(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path, home: Home) -> Path:
    folder = write_model(tmp_path / "model")
    sign(folder, home)
    return folder


def refusal(folder: Path, home: Home, digest: str | None = None) -> SignatureError:
    with pytest.raises(SignatureError) as caught:
        verify(folder, home, what="adapter triage/3", digest=digest)
    assert caught.value.message.startswith("Adapter triage/3 cannot be loaded: ")
    assert str(folder.parent) not in f"{caught.value.message} {caught.value.hint}", "clients are shown this"
    assert not caught.value.retryable
    return caught.value


def test_what_was_signed_is_vouched_for_by_its_key(model: Path, home: Home) -> None:
    [key] = Keyring(home).ids()
    assert verify(model, home, what="base tiny") == key == Keyring(home).signing_id()
    assert verify(model, home, what="base tiny", digest=digest_folder(model)) == key


def test_known_digests_are_signed_without_reading(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model")
    digests = file_digests(folder)
    with monkeypatch.context() as patched:
        patched.setattr(signing, "file_digests", lambda _: pytest.fail("the files were read again"))
        sign(folder, home, digests)
    verify(folder, home, what="base tiny")


def test_a_folder_that_is_not_ours_is_signed_elsewhere(tmp_path: Path, home: Home) -> None:
    folder = write_model(tmp_path / "theirs")
    sign(folder, home, signature=home.models / "path-1.sig")
    assert not signature_path(folder).exists()
    verify(folder, home, what="base theirs", signature=home.models / "path-1.sig")
    assert refusal(folder, home).reason == "unsigned"


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def swap(model: Path) -> None:
    one, other = model / "config.json", model / "model.safetensors"
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda model: flip(model / "config.json"), "config.json is not as signed"),
        (lambda model: (model / "config.json").unlink(), "config.json is missing"),
        (lambda model: (model / "extra.py").write_text(""), "extra.py was not signed"),
        (lambda model: (model / ".git").mkdir() or (model / ".git" / "x").write_text(""), ".git/x was not signed"),
        (lambda model: (model / ".gitattributes").write_text(""), ".gitattributes was not signed"),
        (lambda model: (model / "config.json").rename(model / "c.json"), "config.json is missing, and 1 more"),
        (swap, "config.json is not as signed, and 1 more"),
        (lambda model: (model / "link").symlink_to(__file__), "no ordinary file"),
        (lambda model: model.rename(model.with_name("gone")), "cannot be read"),
    ],
)
def test_other_files_than_were_signed_are_refused_by_name(
    model: Path, home: Home, damage: Callable[[Path], None], told: str
) -> None:
    damage(model)
    found = refusal(model, home)
    assert (found.reason, told in found.message) == ("changed", True), found.message


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Home]:
    root = tmp_path_factory.mktemp("signed")
    sign(write_model(root / "model"), Home(root))
    return root / "model", Home(root)


@settings(deadline=None, max_examples=50)  # files are written and keys computed with
@given(st.sampled_from(sorted(FILES)), st.integers(0, 1 << 20), st.integers(1, 255))
def test_any_flipped_byte_is_refused(shared: tuple[Path, Home], name: str, place: int, mask: int) -> None:
    folder, home = shared
    content = bytearray(FILES[name])
    content[place % len(content)] ^= mask
    (folder / name).write_bytes(content)
    try:
        assert refusal(folder, home).reason == "changed"
    finally:
        (folder / name).write_bytes(FILES[name])


@settings(deadline=None, max_examples=50)  # files are written and keys computed with
@given(st.integers(0, 1 << 20), st.integers(0, 255))
def test_no_damage_to_a_signature_makes_it_hold_for_others_or_raises_anything_else(
    shared: tuple[Path, Home], place: int, byte: int
) -> None:
    folder, home = shared
    path = signature_path(folder)
    good = path.read_bytes()
    damaged = bytearray(good)
    damaged[place % len(damaged)] = byte
    path.write_bytes(damaged)
    try:
        verify(folder, home, what="base tiny")  # some bytes are only layout
        reason = "none"
    except SignatureError as refused:
        reason = refused.reason
    finally:
        path.write_bytes(good)
    assert reason in ("none", "bad_signature", "unknown_key")


def rewritten(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    bundle = json.loads(path.read_text())
    change(bundle)
    path.write_text(json.dumps(bundle))


def forged(bundle: dict[str, object]) -> None:
    envelope = bundle["dsseEnvelope"]
    assert isinstance(envelope, dict)
    payload = base64.b64decode(envelope["payload"]).replace(b'"allow_symlinks": false', b'"allow_symlinks": true')
    envelope["payload"] = base64.b64encode(payload).decode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(500)),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("{}"),
        lambda path: rewritten(path, lambda bundle: bundle.pop("dsseEnvelope")),
        lambda path: rewritten(path, lambda bundle: bundle["dsseEnvelope"].update(signatures=[])),
        lambda path: rewritten(path, lambda bundle: bundle["verificationMaterial"]["publicKey"].pop("hint")),
        lambda path: rewritten(path, lambda bundle: bundle.update(mediaType="text/plain")),
        lambda path: rewritten(path, forged),
        lambda path: path.unlink() or path.mkdir(),
        lambda path: path.unlink() or os.mkfifo(path),
        lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"),
        lambda path: os.truncate(path, signing.MAX_SIGNATURE_BYTES + 1),
    ],
)
def test_what_is_no_signature_is_refused_before_a_file_is_read(
    model: Path, home: Home, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(signature_path(model))
    monkeypatch.setattr(signing, "file_digests", lambda _: pytest.fail("files were read for a bad signature"))
    assert refusal(model, home).reason == "bad_signature"


def test_nobody_vouches_for_what_is_not_signed(model: Path, home: Home) -> None:
    signature_path(model).unlink()
    assert refusal(model, home).reason == "unsigned"


def test_a_signature_of_other_files_does_not_hold(model: Path, home: Home, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    flip(other / "config.json")
    sign(other, home)
    signature_path(other).replace(signature_path(model))
    assert refusal(model, home).reason == "changed"


def test_a_signed_folder_of_another_version_is_refused(model: Path, home: Home, tmp_path: Path) -> None:
    wanted = digest_folder(model)
    other = write_model(tmp_path / "other")
    flip(other / "config.json")
    sign(other, home)
    verify(other, home, what="adapter triage/2")
    found = refusal(other, home, digest=wanted)
    assert found.reason == "changed"
    assert wanted[:12] in found.message
    verify(other, home, what="adapter triage/2", digest=digest_folder(other)[:12])
    for too_few in ("", digest_folder(other)[:11]):
        assert refusal(other, home, digest=too_few).reason == "changed"


def test_a_stranger_is_not_believed_until_trusted(model: Path, home: Home, tmp_path: Path) -> None:
    theirs = Home(tmp_path / "theirs")
    sign(model, theirs)
    assert refusal(model, home).reason == "unknown_key"
    (tmp_path / "their.pem").write_text(Keyring(theirs).public_pem())
    key = Keyring(home).trust(tmp_path / "their.pem")
    assert verify(model, home, what="base tiny") == key == Keyring(theirs).signing_id()
    assert Keyring(home).distrust(key) == []
    assert refusal(model, home).reason == "unknown_key"


def test_a_signature_that_names_a_trusted_key_but_is_anothers_is_refused(
    model: Path, home: Home, tmp_path: Path
) -> None:
    [ours] = Keyring(home).trusted()
    sign(model, Home(tmp_path / "theirs"))
    rewritten(signature_path(model), lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint=ours.hint))
    assert refusal(model, home).reason == "bad_signature"


def test_a_refusal_survives_the_way_to_another_process(model: Path, home: Home) -> None:
    signature_path(model).unlink()
    found = pickle.loads(pickle.dumps(refusal(model, home)))
    assert isinstance(found, SignatureError)
    assert (found.reason, found.status, found.retryable) == ("unsigned", 503, False)


def test_a_refusal_is_logged_in_one_line(model: Path, home: Home, caplog: pytest.LogCaptureFixture) -> None:
    signature_path(model).unlink()
    with caplog.at_level(logging.ERROR):
        refusal(model, home)
    [line] = [record.getMessage() for record in caplog.records if record.name == signing.__name__]
    assert str(model) in line
    assert "(unsigned)" in line
    assert "triage/3" in line


def test_each_byte_is_read_once(model: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest_file = __import__("cluster.storage", fromlist=["digest_file"]).digest_file
    monkeypatch.setattr("cluster.storage.digest_file", lambda path: (read.append(path), digest_file(path))[1])
    verify(model, home, what="base tiny", digest=None)
    assert sorted(path.relative_to(model).as_posix() for path in read) == sorted(FILES)


def test_many_loads_verify_once_and_a_refusal_is_not_remembered(
    model: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def slow(folder: Path, *args: object, **named: object) -> str:
        nonlocal calls
        calls += 1
        time.sleep(0.05)
        return verify(folder, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(signing, "verify", slow)
    verifier, start = Verifier(), threading.Barrier(8)

    def load(_: int) -> str | None:
        start.wait()
        try:
            return verifier.require(model, home, what="base tiny", digest="d" if broken else None)
        except SignatureError as refused:
            return refused.reason

    with ThreadPoolExecutor(8) as pool:
        broken = False
        assert len(set(pool.map(load, range(8)))) == 1
        assert calls == 1
        broken = True
        assert set(pool.map(load, range(8))) == {"changed"}
    assert calls == 2
    with pytest.raises(SignatureError):
        verifier.require(model, home, what="base tiny", digest="d")
    assert calls == 3


def test_one_key_however_many_ask_at_once(home: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: Keyring(home).ensure(), range(8)))
    assert sorted(made) == Keyring(home).ids()
    assert Keyring(home).private_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.integration  # seconds: processes
def test_one_key_however_many_processes_ask_at_once(home: Home) -> None:
    program = "import sys; from pathlib import Path; from cluster.storage import Home; from cluster.signing import Keyring; print(Keyring(Home(Path(sys.argv[1]))).ensure())"  # noqa: E501
    command = [sys.executable, "-c", program, str(home.root)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    made = {process.communicate(timeout=60)[0].strip() for process in running}
    assert sorted(made) == Keyring(home).ids()


@pytest.mark.integration  # seconds: a process that imports the package
def test_the_packages_own_command_line_verifies_what_we_sign(model: Path, home: Home) -> None:
    [key] = Keyring(home).trusted()
    command = [sys.executable, "-m", "model_signing", "verify", "key", "--no-ignore-git-paths"]
    command += ["--signature", str(signature_path(model)), "--public_key", str(key.path), str(model)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    flip(model / "config.json")
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode != 0


def test_a_private_key_that_others_can_read_is_not_used(model: Path, home: Home) -> None:
    Keyring(home).private_path.chmod(0o640)
    with pytest.raises(ConfigError) as caught:
        sign(model, home)
    assert "chmod 600" in str(caught.value.hint)
    verify(model, home, what="base tiny")  # believing needs no private key


def test_a_key_that_is_not_trusted_signs_nothing(model: Path, home: Home) -> None:
    Keyring(home).trusted()[0].path.unlink()
    with pytest.raises(ConfigError, match="not trusted"):
        sign(model, home)


def test_a_broken_private_key_is_named_and_never_replaced(home: Home) -> None:
    Keyring(home).ensure()
    Keyring(home).private_path.write_text("-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match=r"signing\.pem cannot be read"):
        Keyring(home).ensure()


def test_a_trusted_key_under_another_name_or_of_no_use_is_not_believed(model: Path, home: Home) -> None:
    [key] = Keyring(home).trusted()
    key.path.with_name("0123456789abcdef.pem").write_bytes(key.path.read_bytes())
    key.path.write_text("no key")
    assert Keyring(home).ids() == []
    assert refusal(model, home).reason == "unknown_key"


def test_our_own_key_goes_only_by_force_and_a_new_one_takes_its_place(home: Home) -> None:
    folder = write_model(home.versions / "triage" / "0123456789ab")
    key = sign(folder, home)
    with pytest.raises(ConfigError, match="1 versions and 0 base models"):
        Keyring(home).distrust(key)
    assert Keyring(home).ids() == [key]
    assert Keyring(home).distrust(key, force=True) == [signature_path(folder)]
    assert refusal(folder, home).reason == "unknown_key"
    assert sign(folder, home) != key
    assert (home.keys / f"retired-{key}.pem").exists()
    with pytest.raises(ConfigError, match="no trusted key"):
        Keyring(home).distrust(key)


SUBJECT = serialization.PublicFormat.SubjectPublicKeyInfo
PEM = serialization.Encoding.PEM


def private_pem() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda: private_pem(), "private key. It has not been copied"),
        (lambda: b"hello", "no PEM key"),
        (lambda: b"", "no PEM key"),
        (lambda: b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "cannot be read as a public key"),
        (lambda: b"-----BEGIN CERTIFICATE-----\n", "a certificate"),
        (lambda: b"-----BEGIN PUBLIC KEY-----\n" * 2, "2 keys"),
        (lambda: b"x" * 100_000, "too large"),
        (lambda: rsa.generate_private_key(65537, 1024).public_key().public_bytes(PEM, SUBJECT), "kind RSA"),
        (lambda: ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(PEM, SUBJECT), "kind Ed25519"),
        (lambda: ec.generate_private_key(ec.SECP256K1()).public_key().public_bytes(PEM, SUBJECT), "curve secp256k1"),
    ],
)
def test_only_a_public_key_on_a_known_curve_is_trusted(
    tmp_path: Path, home: Home, content: Callable[[], bytes], told: str
) -> None:
    path = tmp_path / "given.pem"
    path.write_bytes(content())
    with pytest.raises(ConfigError) as caught:
        Keyring(home).trust(path)
    assert told in caught.value.message
    assert not home.keys.exists()


def test_a_file_that_is_not_there_is_no_key(tmp_path: Path, home: Home) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        Keyring(home).trust(tmp_path / "absent.pem")
