"""The model store: weights that a run, an engine or an embedder can load, each under one digest.

A reference is a name of the catalog, a Hugging Face id, or the path of a folder. The first two are put into
`FLYWHEEL_HOME/models/<key>/` once, whole or not at all; a folder of the user's stays where it is. Beside the
weights, `<key>.json` keeps the digest, so that a later `obtain` reads no weights, and `<key>.sig` the signature:
`obtain` vouches for what it brings in, and whoever loads it asks `require_signed` first.

This module knows files and digests. How weights come in is `cluster.model_sources`; it knows no torch, no
tokenizer and no engine.
"""

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cluster import model_sources, signing
from cluster.config import nearest
from cluster.errors import ConfigError, DependencyError
from cluster.signing import Verifier
from cluster.storage import (
    Home,
    digest_file,
    digest_of,
    file_digests,
    only_one,
    publish,
    require_file_name,
    write_atomically,
)

logger = logging.getLogger(__name__)

Kind = Literal["causal-lm", "sentence-embedder", "cross-encoder"]

_KIND_NAMES: dict[Kind, str] = {"causal-lm": "base", "sentence-embedder": "embedder", "cross-encoder": "reranker"}
_PATH_STARTS = ("/", ".", "~")
_LAYERED = "config_sentence_transformers.json"
_LAYERS = ("Transformer", "Pooling", "Normalize", "Dense", "Dropout", "LayerNorm", "WeightedLayerPooling")
_LAYER = re.compile(
    r"sentence_transformers\.(?:models|base\.modules|sentence_transformer\.modules)(?:\.[a-z_]+)?\.(?:"
    + "|".join(_LAYERS)
    + ")"
)
_LAYER_FOLDER = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*)?")
_ACTIVATION = re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?[A-Z][A-Za-z]*")
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class StoredModel:
    """One model folder: safetensors, config and tokenizer.

    `digest` is `storage.digest_folder(path)`; `tokenizer_digest` covers the tokenizer's files and the chat
    template, on which an adapter depends as much as on the weights. `source` says where the weights are from.
    """

    name: str
    path: Path
    digest: str
    kind: Kind
    source: str
    tokenizer_digest: str


@dataclass(frozen=True)
class _Manifest:
    """What `<key>.json` keeps. `fingerprint` tells cheaply whether the files are still the digested ones."""

    name: str
    source: str
    kind: Kind
    digest: str
    tokenizer_digest: str
    fingerprint: str
    path: str | None
    """Absolute path of a folder outside the store; None inside it, so that a home can be moved."""


def obtain(reference: str, home: Home) -> StoredModel:
    """The model that `reference` names, fetched or converted first if it is not in the store yet.

    Two processes may ask at once: one works, the other waits for it. Raises `ConfigError` for a reference
    that names nothing or a folder that cannot be served, `DependencyError` if the source is not reachable.
    """
    if reference in model_sources.CATALOG:
        return _stored(model_sources.CATALOG[reference], key=reference, name=reference, home=home)
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return _in_place(folder.resolve(), home)
    if model_sources.is_hub_id(reference) and not reference.startswith(_PATH_STARTS):
        key = require_file_name(reference.replace("/", "--").lower(), what="model reference")
        return _stored(model_sources.Hub(reference), key=key, name=served_name(reference), home=home)
    raise _unknown(reference)


def require_signed(model: StoredModel, home: Home, verifier: Verifier) -> None:
    """Call before a file of `model` is loaded: somebody who is trusted must vouch for the files that `obtain` saw.

    Reads every byte the first time, nothing when the same `verifier` is asked again. Raises `SignatureError`.
    """
    what = f"{_KIND_NAMES[model.kind]} {model.name}"
    signature = signature_of(model.path, home)
    verifier.require(model.path, home, what=what, digest=model.digest, signature=signature)
    if model.path.is_relative_to(home.versions) and not model.digest.startswith(model.path.name):
        # A version's folder is named after what was registered: another one in its place may well be signed.
        raise signing.SignatureError(what, "changed", f"its folder is that of {model.path.name}, its digest another")


def signature_of(folder: Path, home: Home) -> Path:
    """Where the signature of a model folder lies: beside it, or in the store for a user's that came without one."""
    beside = signing.signature_path(folder)
    if beside.exists() or folder.is_relative_to(home.models) or folder.is_relative_to(home.versions):
        return beside
    return home.models / f"{_key_of(folder)}{signing.SIGNATURE_SUFFIX}"


def locate(reference: str, home: Home) -> Path | None:
    """Folder of the model that `reference` names if its files are on this machine, None if `obtain` would fetch it.

    Fetches and digests nothing. Raises `ConfigError` as `obtain` does for what names nothing or cannot be served.
    """
    folder = Path(reference).expanduser()
    if reference in model_sources.CATALOG:
        stored = home.models / reference
    elif folder.is_dir():
        _require_servable(folder)
        return folder.resolve()
    elif reference.startswith(_PATH_STARTS) or not model_sources.is_hub_id(reference):
        raise _unknown(reference)
    else:
        stored = home.models / require_file_name(reference.replace("/", "--").lower(), what="model reference")
    return stored if stored.is_dir() else None


def _unknown(reference: str) -> ConfigError:
    if reference.startswith(_PATH_STARTS):
        return ConfigError(
            f"There is no model folder {reference}.",
            hint="Give the path of a Hugging Face folder with safetensors.",
        )
    meant = nearest(reference, model_sources.CATALOG)
    return ConfigError(
        f"There is no model {reference!r}.",
        hint=(f"Did you mean {meant!r}? " if meant else "")
        + f"Known names: {', '.join(sorted(model_sources.CATALOG))}. Or give a Hugging Face id or a path.",
    )


def installed(home: Home) -> list[StoredModel]:
    """Every model that the store knows and that is still there, by name."""
    found = []
    for path in sorted(home.models.glob("*.json")):
        manifest = _read(path)
        folder = Path(manifest.path) if manifest and manifest.path else path.with_suffix("")
        if manifest and folder.is_dir():
            found.append(_model(manifest, folder))
    return sorted(found, key=lambda model: (model.name, str(model.path)))


def served_name(reference: str) -> str:
    """The name that clients ask for: the last part of a Hugging Face id or path, in lower case."""
    path = Path(reference).expanduser()
    last = path.resolve().name if path.is_dir() else path.name
    return require_file_name(last.lower(), what="model name")


def _stored(source: model_sources.Source, *, key: str, name: str, home: Home) -> StoredModel:
    folder, manifest_path = home.models / key, home.models / f"{key}.json"
    signature = signing.signature_path(folder)
    manifest = _read(manifest_path)
    if manifest and signature.exists() and folder.is_dir() and manifest.fingerprint == _fingerprint(folder):
        return _model(manifest, folder)
    with only_one(home.models / f".{key}.lock"):
        if not folder.is_dir():
            logger.info("putting %s into the model store", name)
            with publish(folder) as scratch:
                source.write(scratch)
                _require_servable(scratch)
                fresh, digests = _describe(scratch, name=name, source=source.describe(), path=None)
                # Before the folder appears: one that lies in the store without a signature is not our work.
                signing.sign(scratch, home, digests, signature=signature)
            _write(manifest_path, fresh)
            return _model(fresh, folder)
        fresh, digests = _describe(folder, name=name, source=source.describe(), path=None)
        manifest = _read(manifest_path)
        if manifest is None:
            # Whoever put it there died before the manifest was written. Its signature was written before that.
            signing.verify(folder, home, what=f"{_KIND_NAMES[fresh.kind]} {name}", digest=fresh.digest)
        elif manifest.digest != fresh.digest:
            raise DependencyError(
                f"The files in {folder} are not those that were stored as {name} "
                f"(digest {fresh.digest[:12]}, stored {manifest.digest[:12]}).",
                hint=f"Delete {folder} and {manifest_path.name} beside it; they are made again when needed.",
                retryable=False,
            )
        elif not signature.exists():
            # From the time before models were signed. The manifest is all that speaks for the files, and it agrees.
            logger.warning("signing %s, which was put into the model store without a signature", name)
            signing.sign(folder, home, digests)
        _write(manifest_path, fresh)
        return _model(fresh, folder)


def _in_place(folder: Path, home: Home) -> StoredModel:
    """A user's folder. It may change under us, so a changed fingerprint means a new digest, not an error.

    Whoever names the folder vouches for it, and so we sign what we see; unless it has a signature of its own
    beside it, or lies in a store of ours, where a signature belongs beside it.
    """
    manifest_path = home.models / f"{_key_of(folder)}.json"
    signature = signature_of(folder, home)
    ours = signature != signing.signature_path(folder)
    with only_one(manifest_path.with_name(f".{manifest_path.stem}.lock")):
        manifest = _read(manifest_path)
        if manifest and manifest.fingerprint == _fingerprint(folder) and (signature.exists() or not ours):
            return _model(manifest, folder)
        _require_servable(folder)
        fresh, digests = _describe(folder, name=served_name(str(folder)), source=f"path {folder}", path=str(folder))
        if ours:
            signing.sign(folder, home, digests, signature=signature)
        _write(manifest_path, fresh)
        return _model(fresh, folder)


def _key_of(folder: Path) -> str:
    """Under which name the store keeps what it knows of a folder outside it."""
    return f"path-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"


def _describe(folder: Path, *, name: str, source: str, path: str | None) -> tuple[_Manifest, dict[str, str]]:
    """The manifest of a folder, and the digests of its files."""
    # Taken before the digests: a file that changes in between makes the next fingerprint differ.
    fingerprint = _fingerprint(folder)
    digests = file_digests(folder)
    manifest = _Manifest(
        name=name,
        source=source,
        kind=_kind(folder),
        fingerprint=fingerprint,
        digest=digest_of(digests),
        tokenizer_digest=tokenizer_digest(folder),
        path=path,
    )
    return manifest, digests


def _model(manifest: _Manifest, folder: Path) -> StoredModel:
    return StoredModel(
        name=manifest.name,
        path=folder,
        digest=manifest.digest,
        kind=manifest.kind,
        source=manifest.source,
        tokenizer_digest=manifest.tokenizer_digest,
    )


def _kind(folder: Path) -> Kind:
    """`modules.json` is sentence-transformers' list of layers; every other model says its architecture."""
    if (folder / "modules.json").is_file():
        crossed = _object(folder / _LAYERED).get("model_type") == "CrossEncoder"
        return "cross-encoder" if crossed else "sentence-embedder"
    try:
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder} is not a model folder: config.json cannot be read ({type(error).__name__}).",
            hint="Give a Hugging Face folder with config.json, tokenizer and *.safetensors.",
        ) from None
    if any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return "causal-lm"
    if any(str(name).endswith("ForSequenceClassification") for name in architectures):
        return "cross-encoder"
    raise ConfigError(
        f"{folder} holds {', '.join(map(str, architectures)) or 'no architecture'}, of no use here.",
        hint="Give a causal language model, a sentence-transformers folder (with modules.json), or a cross-encoder.",
    )


def require_known_modules(folder: Path) -> None:
    """`ConfigError` if a sentence-transformers folder would have anything else imported than its known layers.

    The library (6.2) imports whatever dotted path `modules.json` and a dense layer's `activation_function` name, and
    calls it with what lies in the folder: through joblib or torch that runs a pickle in a file of any name. Of a
    cross-encoder it calls the activation, if it is anything of torch's.
    """
    _require_known_activation(folder)
    if not (folder / "modules.json").is_file():
        return
    layers = _json(folder / "modules.json")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ConfigError(f"{folder}/modules.json is no list of layers.", hint="Save the model with save_pretrained().")
    for layer in layers:
        named, place = str(layer.get("type")), str(layer.get("path", ""))
        if not _LAYER.fullmatch(named) or not _LAYER_FOLDER.fullmatch(place):
            raise ConfigError(
                f"{folder}/modules.json names the layer {named!r} in {place!r}; only sentence-transformers' own layers "
                "are loaded, each from a folder of the model.",
                hint=f"Use {', '.join(_LAYERS)}.",
            )
        activation = _object(folder / place / "config.json").get("activation_function")
        if activation is not None and not _ACTIVATION.fullmatch(str(activation)):
            raise ConfigError(
                f"{folder / place}/config.json names the activation {activation!r}, which is none of torch's.",
                hint="Use one of torch.nn, for example torch.nn.modules.activation.Tanh.",
            )


def _require_known_activation(folder: Path) -> None:
    """As for a layer's: of `torch` there is more to call than activations, `torch.hub` for one."""
    config = _object(folder / "config.json")
    nested = config.get("sentence_transformers")
    for named in (
        _object(folder / _LAYERED).get("activation_fn"),
        nested.get("activation_fn") if isinstance(nested, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    ):
        if named is not None and not _ACTIVATION.fullmatch(str(named)):
            raise ConfigError(
                f"{folder} names the activation {named!r}, which is none of torch's.",
                hint="Use one of torch.nn, for example torch.nn.modules.activation.Sigmoid.",
            )


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file, or if it holds something else."""
    said = _json(path) if path.is_file() else {}
    return said if isinstance(said, dict) else {}


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {type(error).__name__}.", hint="Save the model with save_pretrained()."
        ) from None


def _require_servable(folder: Path) -> None:
    """Safetensors only: a pickle runs its author's code when it is loaded. So does a layer that is not what it says."""
    _kind(folder)
    require_known_modules(folder)
    if any(folder.rglob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.rglob(pattern))
    raise ConfigError(
        f"{folder} has no *.safetensors" + (f", only {', '.join(pickles)}." if pickles else "."),
        hint="Convert it: load it where you trust it, then save_pretrained(folder, safe_serialization=True).",
    )


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files and the chat template in `folder`; over nothing if it has none."""
    total = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            total.update(f"{name}\0{digest_file(folder / name)}\n".encode())
    return total.hexdigest()


def _fingerprint(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        facts = path.stat()
        total.update(f"{path.relative_to(folder).as_posix()}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return total.hexdigest()


def _read(path: Path) -> _Manifest | None:
    """None if there is none or it cannot be read: everything in it can be found again from the files."""
    try:
        return _Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, manifest: _Manifest) -> None:
    write_atomically(path, json.dumps(asdict(manifest), indent=2) + "\n")
