"""What may enter the version store, and how it gets there whole.

Weights are safetensors and nothing else: a pickle runs code when it is loaded. What is not known to be harmless is
refused by name, not skipped. This module knows files; it does not know versions, numbers or aliases.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from actors.registry.config import NAME_PATTERN
from actors.registry.snapshot import Kind
from actors.registry.state import AdapterShape, Artifact, VersionFact
from cluster.errors import ConfigError, DependencyError
from cluster.storage import Home, digest_folder, publish, require_file_name

_WEIGHTS: Final = ".safetensors"
_ALLOWED: Final = frozenset({_WEIGHTS, ".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".yaml"})
_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_FOLDER_DIGITS: Final = 12


def admit(fact: VersionFact, home: Home) -> Artifact:
    """Check the folder `fact.source_path` and copy it to `versions/<name>/<12 digits of its digest>`.

    Safe to repeat and to run twice at once: content that lies there already is used. A process that dies in here
    leaves at most a folder that no version points to.
    Raises `ConfigError` for a folder that cannot be registered.
    """
    if not NAME_PATTERN.fullmatch(fact.name):
        raise ConfigError(
            f"{fact.name!r} cannot be a model's name.",
            hint="Use lower-case letters, digits, '.', '_' or '-'.",
        )
    source = fact.source_path
    _require_harmless(source)
    adapter = _adapter_shape(source) if fact.kind == "adapter" else None
    if adapter is None:
        _require_model(source, fact.kind)
    digest = digest_folder(source)
    target = home.versions / require_file_name(fact.name, what="model's name") / digest[:_FOLDER_DIGITS]
    if not target.is_dir():
        with publish(target) as scratch:
            shutil.copytree(source, scratch, dirs_exist_ok=True)
            if digest_folder(scratch) != digest:
                raise ConfigError(
                    f"{source} changed while it was being copied.",
                    hint="Register a folder that nobody writes to.",
                )
    if digest_folder(target) != digest:
        raise DependencyError(
            f"{target} does not hold what its name says: somebody changed it.",
            hint="Move that folder away and register again; versions that point to it are damaged.",
            retryable=False,
        )
    return Artifact(path=target, digest=digest, adapter=adapter)


def _require_harmless(source: Path) -> None:
    if not source.is_dir():
        raise ConfigError(
            f"There is no folder {source} to register.", hint="Give a folder that holds the model's files."
        )
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_symlink():
            raise ConfigError(
                f"{name} in {source} is a symbolic link.", hint="Copy the folder with its links resolved."
            )
        if path.is_dir():
            continue
        if path.suffix in _PICKLES:
            raise ConfigError(
                f"{name} in {source} may be a pickle, which runs code when it is loaded.",
                hint="Save the weights as safetensors, and leave optimizer states out of the folder.",
            )
        if not path.is_file() or path.suffix not in _ALLOWED:
            raise ConfigError(
                f"{name} in {source} is not a kind of file that a version may hold.",
                hint=f"Leave only {', '.join(sorted(_ALLOWED))} files in the folder.",
            )


def _require_model(source: Path, kind: Kind) -> None:
    # A sentence-transformers folder may keep its transformer's files one level down.
    if not list(source.rglob("config.json")):
        raise ConfigError(f"{source} has no config.json, so it is no {kind}.", hint="Save it with save_pretrained().")
    weights = sorted(source.rglob(f"*{_WEIGHTS}"))
    if not weights:
        raise ConfigError(f"{source} has no {_WEIGHTS} file.", hint="Save it with save_pretrained(), which writes one.")
    for path in weights:
        _shapes(path)


def _adapter_shape(source: Path) -> AdapterShape:
    """Rank, alpha and target modules of a PEFT LoRA folder, its weights checked against them."""
    settings, weights = source / "adapter_config.json", source / f"adapter_model{_WEIGHTS}"
    for path in (settings, weights):
        if not path.is_file():
            raise ConfigError(
                f"{source} has no {path.name}, so it is no PEFT adapter.",
                hint="Save it with save_pretrained().",
            )
    try:
        config: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
        if config["peft_type"] != "LORA":
            raise ConfigError(f"{settings} is of type {config['peft_type']!r}; only LORA can be served.")
        if not config["base_model_name_or_path"]:
            raise ConfigError(f"{settings} does not say which base it belongs to.", hint="Set base_model_name_or_path.")
        targets = config["target_modules"]
        shape = AdapterShape(
            rank=config["r"],
            alpha=config["lora_alpha"],
            target_modules=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        )
        highest = max([shape.rank, *config.get("rank_pattern", {}).values()])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{settings} is not a LoRA configuration: {error!r}", hint="Save it with save_pretrained()."
        ) from None
    downward = {name: size for name, size in _shapes(weights).items() if ".lora_A." in name}
    if not downward:
        raise ConfigError(
            f"{weights} holds no LoRA weights.",
            hint="Save the adapter, not the model, with save_pretrained().",
        )
    for name, size in downward.items():
        if size[0] > highest:
            raise ConfigError(f"{name} in {weights} has rank {size[0]}, but {settings.name} says {highest}.")
    return shape.model_copy(update={"rank": highest})


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, from the file's header."""
    try:
        with safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from None
    if not any(math.prod(shape) for shape in shapes.values()):
        raise ConfigError(f"{path} holds no weights.")
    return shapes
