"""Who vouches for a model's files: keys, signatures over whole folders, and verification that fails closed.

    folder/        what is loaded
    folder.sig     who says that these are the files: a Sigstore bundle over every file's name and SHA-256

    keys/signing.pem          the key that this installation signs with (private, NIST P-256, mode 0600)
    keys/trusted/<id>.pem     public keys whose signatures are believed, its own among them

Whoever loads a model calls `verify` (or a `Verifier`, which remembers) before it opens a file of it. There is no
switch to load without. Nothing here needs a network: no certificates, no transparency log, keys only.

The format is that of the package `model-signing` 1.1.1, and its own command line verifies it as well:
`model_signing verify key --no-ignore-git-paths --signature folder.sig --public_key keys/trusted/<id>.pem folder`.
This is the only module that knows the package. It is imported where it is used, because it takes half a second.
"""

import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster import telemetry
from cluster.errors import ConfigError, DependencyError
from cluster.storage import Home, digest_of, file_digests, only_one, write_atomically

logger = logging.getLogger(__name__)

Reason = Literal["unsigned", "unknown_key", "changed", "bad_signature"]

SIGNATURE_SUFFIX = ".sig"
MAX_SIGNATURE_BYTES = 16 << 20
"""Room for the names and digests of 50,000 files; more is not read."""
_FEWEST_DIGITS = 12
_MAX_PEM_BYTES = 64 << 10
_CURVES = ("secp256r1", "secp384r1", "secp521r1")  # those that model-signing takes

_HINTS: dict[Reason, str] = {
    "unsigned": "Only signed models are loaded. Register or obtain it again where its files can be trusted.",
    "unknown_key": "If you know who signed it, get their public key and run `flywheel signers trust FILE`.",
    "changed": "Restore the files that were signed, or make them again.",
    "bad_signature": "Restore the .sig file beside it, or sign again where the files can be trusted.",
}


class SignatureError(DependencyError):
    """A model that is not loaded, because nobody who is trusted vouches for its files as they are.

    `reason`: it is `unsigned`; signed with an `unknown_key`; its files have `changed` since; or `bad_signature`,
    for what is beside it is no signature, or one that its key did not make.
    """

    def __init__(self, what: str, reason: Reason, why: str) -> None:
        super().__init__(f"{what[:1].upper()}{what[1:]} cannot be loaded: {why}.", hint=_HINTS[reason], retryable=False)
        self.reason: Reason = reason


def signature_path(folder: Path) -> Path:
    """Where the signature of a folder of ours lies: beside it, because it covers every file inside."""
    return folder.with_name(folder.name + SIGNATURE_SUFFIX)


def sign(folder: Path, home: Home, digests: Mapping[str, str] | None = None, *, signature: Path | None = None) -> str:
    """Sign every file of `folder` with the key of `home`, which is made if there is none; returns its id.

    `digests`: the folder's `file_digests`, if they are known; then no file is read. `signature`: where to put it,
    if not beside the folder. Raises `ConfigError` if the key cannot be used or is not trusted here.
    """
    from model_signing import signing

    keyring = Keyring(home)
    key_id = keyring.ensure()
    if key_id not in keyring.ids():
        raise ConfigError(
            f"{keyring.private_path} is not trusted here, so what it signs could not be loaded.",
            hint="Move it away and run `flywheel signers init` for a new one.",
        )
    known = file_digests(folder) if digests is None else digests
    target = signature or signature_path(folder)
    with tempfile.TemporaryDirectory(prefix="flywheel-sign-") as scratch:
        made = Path(scratch) / "signature"
        config = signing.Config().use_elliptic_key_signer(private_key=keyring.private_path)  # type: ignore[no-untyped-call]
        name = target.name.removesuffix(SIGNATURE_SUFFIX)
        config.set_hashing_config(_known_digests(lambda: known, name)).sign(folder, made)
        write_atomically(target, made.read_text(encoding="utf-8"))
    return key_id


def verify(folder: Path, home: Home, *, what: str, digest: str | None = None, signature: Path | None = None) -> str:
    """The id of the trusted key that vouches for the files of `folder` as they are now; each is read once.

    `what` names it in messages, log and metric; its first word is the kind: `adapter triage/3`. `digest`: what the
    caller was told to load (`storage.digest_folder`, or its first 12 digits or more, as version folders are named);
    without it another signed folder in its place would do.
    `signature`: where it lies, if not beside the folder. Raises `SignatureError` and nothing else.
    """
    try:
        return _verify(folder, home, what, digest, signature or signature_path(folder))
    except SignatureError as refused:
        logger.error("refused to load %s (%s): %s", folder, refused.reason, refused)
        telemetry.count(
            "flywheel_model_refused",
            "Models that were not loaded because their signature did not hold.",
            {"reason": refused.reason, "what": what.partition(" ")[0]},
        )
        raise


class Verifier:
    """`verify` once for each folder and digest, however often and from however many threads it is asked.

    A replica has one for as long as it lives. A refusal goes to all who wait for it and is not remembered. What was
    verified is not looked at again: whoever can change files under a running process needs no other way in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verified: dict[tuple[Path, str | None], Future[str]] = {}

    def require(
        self, folder: Path, home: Home, *, what: str, digest: str | None = None, signature: Path | None = None
    ) -> str:
        """As `verify`, and at once if this folder has passed with this digest before."""
        key = (folder.absolute(), digest)
        with self._lock:
            flight = self._verified.get(key)
            first = flight is None
            if flight is None:
                flight = self._verified[key] = Future()
        if not first:
            return flight.result()
        try:
            flight.set_result(verify(folder, home, what=what, digest=digest, signature=signature))
        except BaseException as error:
            with self._lock:
                del self._verified[key]
            flight.set_exception(error)
            raise
        return flight.result()


@dataclass(frozen=True)
class TrustedKey:
    """A public key whose signatures are believed. `hint` is how a signature names its key (SHA-256 of its PEM)."""

    id: str
    curve: str
    path: Path
    hint: str


class Keyring:
    """The keys of one installation. A key's id: first 16 hex digits of the SHA-256 of its DER public key."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._trusted = home.keys / "trusted"
        self.private_path = home.keys / "signing.pem"

    def ensure(self) -> str:
        """The id of the key that we sign with; a new pair is made and trusted if there is none, once for all who ask.

        Raises `ConfigError` if there is one that cannot be used.
        """
        self._home.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        with only_one(self._home.keys / ".lock"):
            found = self.signing_id()
            if found is not None:
                return found
            private = ec.generate_private_key(ec.SECP256R1())
            pem = private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            # Trusted first: whoever dies in between leaves a public key whose private half nobody has.
            key_id = self._keep(private.public_key())
            write_atomically(self.private_path, pem.decode(), mode=0o600)
            logger.info("made signing key %s", key_id)
            return key_id

    def signing_id(self) -> str | None:
        """The id of the key that we sign with, None if there is none. `ConfigError` if it cannot be used."""
        try:
            if self.private_path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"Others than its owner can use {self.private_path}.",
                    hint=f"chmod 600 {self.private_path}; if others may have read it, replace the key.",
                )
            private = serialization.load_pem_private_key(self.private_path.read_bytes(), password=None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"{self.private_path} cannot be read as a private key ({type(error).__name__}).",
                hint="Restore it from a copy, or move it away and run `flywheel signers init`.",
            ) from None
        return _id(_require_elliptic(private.public_key(), self.private_path))

    def ids(self) -> list[str]:
        """Ids of the trusted keys, sorted."""
        return [key.id for key in self.trusted()]

    def trusted(self) -> list[TrustedKey]:
        """The trusted keys by id. A file that is no such key, or not under its own id, is not trusted."""
        return sorted(self._read_trusted(), key=lambda key: key.id)

    def trust(self, pem_path: Path) -> str:
        """Believe signatures of the public key in `pem_path` from now on; returns its id.

        Raises `ConfigError` for anything but one elliptic-curve public key, saying what it is.
        """
        return self._keep(_read_public(pem_path))

    def distrust(self, key_id: str, *, force: bool = False) -> list[Path]:
        """Believe the key no longer; returns the signatures of this installation that do not hold any more.

        Our own key needs `force`; its private half is then put aside, and a new one is made when it is needed.
        Raises `ConfigError` for a key that is not trusted, and for our own without `force`.
        """
        key = next((key for key in self.trusted() if key.id == key_id), None)
        if key is None:
            raise ConfigError(
                f"There is no trusted key {key_id!r}.", hint=f"Trusted are: {', '.join(self.ids()) or 'none'}."
            )
        broken = [path for path in self._signatures() if _signer(path) == key.hint]
        ours = key_id == self.signing_id()
        if ours and not force:
            raise ConfigError(
                f"{key_id} is the key that this installation signs with; {_counted(broken, self._home)} "
                "signed with it could not be loaded any more.",
                hint="If it must go, because it leaked: --force. Then `flywheel models sign` what you trust.",
            )
        key.path.unlink(missing_ok=True)
        if ours:
            self.private_path.rename(self.private_path.with_name(f"retired-{key_id}.pem"))
        logger.warning("key %s is no longer trusted; %s are refused", key_id, _counted(broken, self._home))
        return broken

    def public_pem(self) -> str:
        """The public half of the key that we sign with, for others to trust. Makes the pair if there is none."""
        self.ensure()
        private = serialization.load_pem_private_key(self.private_path.read_bytes(), password=None)
        return _pem(_require_elliptic(private.public_key(), self.private_path)).decode()

    def _keep(self, public: ec.EllipticCurvePublicKey) -> str:
        key_id = _id(public)
        write_atomically(self._trusted / f"{key_id}.pem", _pem(public).decode())
        return key_id

    def _read_trusted(self) -> Iterator[TrustedKey]:
        for path in self._trusted.glob("*.pem"):
            try:
                public = _read_public(path)
            except ConfigError as error:
                logger.warning("not a trusted key: %s", error)
                continue
            if _id(public) != path.stem:
                logger.warning("not a trusted key: %s holds key %s", path, _id(public))
                continue
            yield TrustedKey(path.stem, public.curve.name, path, _hint(public))

    def _signatures(self) -> list[Path]:
        """Every signature over a model of this installation."""
        found = [*self._home.models.glob(f"*{SIGNATURE_SUFFIX}"), *self._home.versions.glob(f"*/*{SIGNATURE_SUFFIX}")]
        return sorted(path for path in found if not path.name.startswith("."))


def _verify(folder: Path, home: Home, what: str, digest: str | None, signature: Path) -> str:
    def refused(reason: Reason, why: str) -> SignatureError:
        return SignatureError(what, reason, why)

    try:
        bundle = _read_bundle(signature)
        hint = _named_key(bundle)
    except FileNotFoundError:
        raise refused("unsigned", "it has no signature") from None
    except (_Unusable, OSError) as error:
        why = str(error) if isinstance(error, _Unusable) else f"cannot be read ({type(error).__name__})"
        raise refused("bad_signature", f"its signature {why}") from None
    key = next((key for key in Keyring(home).trusted() if key.hint == hint), None)
    if key is None:
        raise refused("unknown_key", "it is signed with a key that is not trusted here")

    from model_signing import verifying

    found: dict[str, str] | None = None

    def read() -> Mapping[str, str]:
        # Called by the package once the signature itself has held: for a forged one no file is read.
        nonlocal found
        try:
            found = file_digests(folder)
        except ConfigError as error:
            logger.error("%s", error)
            raise refused("changed", "it holds something that was not signed and is no ordinary file") from None
        except OSError as error:
            raise refused("changed", f"its files cannot be read ({type(error).__name__})") from None
        return found

    config = verifying.Config()  # type: ignore[no-untyped-call]
    try:
        config.use_elliptic_key_verifier(public_key=key.path)
        config.set_hashing_config(_known_digests(read, folder.name)).verify(folder, signature)
    except SignatureError:
        raise
    except Exception as error:  # noqa: BLE001  # the package raises whatever its parsers and cryptography raise
        if found is None:
            logger.error("%s: %s: %s", signature, type(error).__name__, error)
            raise refused("bad_signature", "its signature was not made by the key that it names") from None
        raise refused("changed", _differences(bundle, found)) from None
    assert found is not None
    actual = digest_of(found)
    if digest is not None and (len(digest) < _FEWEST_DIGITS or not actual.startswith(digest)):
        raise refused("changed", f"its files have digest {actual[:12]}, not {digest[:12]}: another version's files")
    return key.id


def _known_digests(digests: Callable[[], Mapping[str, str]], name: str) -> Any:
    """A `hashing.Config` of the package that asks `digests` instead of reading the folder, and ignores no file.

    The package would read gigabytes a second time, leave `.git*` out, and leave out what a signature tells it to
    ignore. `hash` is public and so is all that it builds, save `Digest` and what `model_signing.manifest` calls
    itself: stable "only internally" (1.1.1). Delete when the package takes digests.
    """
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class KnownDigests(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:  # noqa: ARG002
            items = [
                manifest.FileManifestItem(path=PurePosixPath(file), digest=Digest("sha256", bytes.fromhex(value)))
                for file, value in digests().items()
            ]
            how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
            return manifest.Manifest(name, items, manifest.SerializationType.from_args(how))

    return KnownDigests()  # type: ignore[no-untyped-call]


class _Unusable(Exception):
    """Why a file is no signature that we can use, as the rest of a sentence that begins with "its signature"."""


def _read_bundle(path: Path) -> dict[str, Any]:
    """The JSON object in a signature file. `_Unusable` if it is none; `OSError` if it cannot be read."""
    # Not followed if it is a link, not waited for if it is a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise _Unusable("is no file")
        if facts.st_size > MAX_SIGNATURE_BYTES:
            raise _Unusable(f"has {facts.st_size >> 20} MiB, more than any signature")
        content = file.read(MAX_SIGNATURE_BYTES)
    try:
        bundle = json.loads(content)
    except (ValueError, RecursionError):
        bundle = None
    if not isinstance(bundle, dict):
        raise _Unusable("cannot be read as one")
    return bundle


def _named_key(bundle: dict[str, Any]) -> str:
    """The hint of the key that a bundle says it is made with. The package accepts bundles without; we do not."""
    try:
        hint = bundle["verificationMaterial"]["publicKey"]["hint"]
    except (KeyError, TypeError):
        hint = None
    if not isinstance(hint, str):
        raise _Unusable("names no key")
    return hint


def _signer(signature: Path) -> str | None:
    try:
        return _named_key(_read_bundle(signature))
    except (_Unusable, OSError):
        return None


def _differences(bundle: dict[str, Any], found: Mapping[str, str]) -> str:
    """What is not as signed, as a clause. The signature of `bundle` has held."""
    try:
        payload = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
        signed = {one["name"]: one["digest"] for one in payload["predicate"]["resources"]}
    except (KeyError, TypeError, ValueError):
        return "its files are not those that were signed"
    told = [
        *(f"{name} is missing" for name in sorted(signed.keys() - found.keys())),
        *(f"{name} is not as signed" for name in sorted(signed.keys() & found.keys()) if signed[name] != found[name]),
        *(f"{name} was not signed" for name in sorted(found.keys() - signed.keys())),
    ]
    if not told:
        return "its files are not those that were signed"
    return told[0] + (f", and {len(told) - 1} more" if len(told) > 1 else "")


def _read_public(path: Path) -> ec.EllipticCurvePublicKey:
    """The one elliptic-curve public key in a PEM file; `ConfigError` that says what it is if it is something else."""
    try:
        if not path.is_file():
            raise ConfigError(f"There is no file {path}.", hint="Give a PEM file.")
        with path.open("rb") as file:
            content = file.read(_MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint="Give a PEM file.") from None
    hint = "Give a public key as `flywheel signers export --out FILE` writes it."
    if b"PRIVATE KEY" in content:
        raise ConfigError(f"{path} holds a private key. It has not been copied.", hint=f"{hint} Keep the private half.")
    if len(content) > _MAX_PEM_BYTES:
        raise ConfigError(f"{path} is too large for a key.", hint=hint)
    blocks = content.count(b"-----BEGIN ")
    if blocks != 1:
        raise ConfigError(f"{path} holds {f'{blocks} keys' if blocks else 'no PEM key'}.", hint=hint)
    if b"-----BEGIN CERTIFICATE" in content:
        raise ConfigError(f"{path} holds a certificate, not a key.", hint=hint)
    try:
        public = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} cannot be read as a public key.", hint=hint) from None
    return _require_elliptic(public, path)


def _require_elliptic(public: object, path: Path) -> ec.EllipticCurvePublicKey:
    hint = f"Only keys on {', '.join(_CURVES)} are used; `flywheel signers init` makes one on {_CURVES[0]}."
    if not isinstance(public, ec.EllipticCurvePublicKey):
        kind = type(public).__name__.removesuffix("PublicKey").lstrip("_")
        raise ConfigError(f"{path} holds a key of kind {kind}, not on an elliptic curve.", hint=hint)
    if public.curve.name not in _CURVES:
        raise ConfigError(f"{path} holds a key on the curve {public.curve.name}.", hint=hint)
    return public


def _id(public: ec.EllipticCurvePublicKey) -> str:
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()[:16]


def _pem(public: ec.EllipticCurvePublicKey) -> bytes:
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _hint(public: ec.EllipticCurvePublicKey) -> str:
    return hashlib.sha256(_pem(public)).hexdigest()


def _counted(signatures: list[Path], home: Home) -> str:
    versions = sum(path.is_relative_to(home.versions) for path in signatures)
    return f"{versions} versions and {len(signatures) - versions} base models"
