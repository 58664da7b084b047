"""The door of the version store: which folders may become a version.

Weights are safetensors and nothing else: a pickle runs code when it is loaded. What is not known to be harmless is
refused by name, not skipped. Every header is checked here, before a library that trusts it maps the file. Nothing is
opened before `lstat` has said that it is a file, so neither a FIFO nor a link leads anywhere.

This module looks; it writes nothing, and it does not know versions, numbers or aliases.
"""

import json
import math
import os
import pickletools
import re
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from actors.registry.config import NAME_PATTERN
from actors.registry.facts import AdapterShape
from actors.registry.snapshot import Kind
from cluster.errors import ConfigError
from cluster.models import require_known_modules

WEIGHTS: Final = ".safetensors"
LARGEST_HEADER: Final = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
LARGEST_TEXT: Final = 64 << 20
"""Bytes of any file that is not weights; the largest tokenizers have half of it."""
LONGEST_NAME: Final = 255
"""Bytes of a file's name relative to its folder."""
_MOST_FILES: Final = 10_000
_DEEPEST: Final = 16
_RESERVED: Final = "flywheel.json"
_ALLOWED: Final = frozenset({WEIGHTS, ".json", ".jsonl", ".txt", ".md", ".jinja", ".model", ".yaml"})
_PICKLES: Final = frozenset(
    {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5", ".msgpack"}
)
_MAGIC: Final = (
    (re.compile(rb"\x80[\x00-\x05]"), "a pickle"),
    (re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)"), "a zip archive, as torch.save writes it"),
    (re.compile(rb"\x93NUMPY|\x89HDF|\x7fELF|\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|MZ"), "a binary file"),
)
_CALLS: Final = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "REDUCE", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"})
"""Opcodes of a pickle by which it gets hold of code."""
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class SourceFile:
    """One file of a folder as it was seen. `stamp` changes whenever its content does: size, times and inode."""

    name: str
    path: Path
    size: int
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors header. `nbytes` is its size in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """A folder that may become a version: its files by name, and the tensors of each of its weight files."""

    files: tuple[SourceFile, ...]
    adapter: AdapterShape | None
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def require_name(name: str) -> str:
    """`name`, if a model can be called so; `ConfigError` otherwise."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a model's name.",
            hint="Use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit.",
        )
    return name


def inspect(source: Path, kind: Kind, *, carded: bool = False) -> Inspection:
    """Look through the folder `source`; `ConfigError` names the file that is in the way, and the way out.

    `carded`: it is a version's folder, so a `flywheel.json` belongs into it.
    """
    files = survey(source, carded=carded)
    for file in files:
        _require_harmless(file, source)
    adapter = None
    if kind == "adapter":
        settings, weights = _adapter_files(source, files)
        tensors = {file.name: tensors_of(file.path) for file in files if file.name.endswith(WEIGHTS)}
        adapter = _adapter_shape(settings.path, weights.path, tensors[weights.name])
    else:
        _require_model(source, kind, files)
        tensors = {file.name: tensors_of(file.path) for file in files if file.name.endswith(WEIGHTS)}
    return Inspection(files, adapter, tensors)


def survey(source: Path, *, carded: bool = False) -> tuple[SourceFile, ...]:
    """Every file in `source`, by name, none of them opened; `ConfigError` for what is no plain file or badly named."""
    try:
        root = source.lstat()
    except (OSError, ValueError):
        raise ConfigError(
            f"There is no folder {source} to register.", hint="Give a folder that holds the model's files."
        ) from None
    if stat.S_ISLNK(root.st_mode):
        raise ConfigError(f"{source} is a symbolic link.", hint=f"Give the folder itself: {os.path.realpath(source)}.")
    if not stat.S_ISDIR(root.st_mode):
        raise ConfigError(
            f"There is no folder {source} to register; that is a file.",
            hint="Give a folder that holds the model's files.",
        )
    files: list[SourceFile] = []
    seen: dict[str, str] = {}
    for file in _walk(source, source, ""):
        # macOS and Windows hold `Model.json` and `model.json` for one file, and so might whoever unpacks an export.
        key = folded(file.name)
        if key in seen:
            raise ConfigError(
                f"{file.name!r} and {seen[key]!r} in {source} have the same name on some machines.",
                hint="Rename one of them.",
            )
        seen[key] = file.name
        if key == _RESERVED and not (carded and file.name == _RESERVED):
            raise ConfigError(
                f"{file.name} in {source} has the name of the card, which registration writes itself.",
                hint="Take it out of the folder.",
            )
        files.append(file)
        if len(files) > _MOST_FILES:
            raise ConfigError(f"{source} holds more than {_MOST_FILES} files.", hint="Give the model's folder alone.")
    return tuple(sorted(files, key=lambda file: file.name))


def stamp_of(facts: os.stat_result) -> tuple[int, ...]:
    """What changes whenever a file's content does. Nobody can set the time of a change (ctime) back."""
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


def folded(name: str) -> str:
    """The name as a file system sees it that knows neither case nor forms of accents."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def require_path(name: str, *, where: str) -> str:
    """`name`, if a file of a version can be called so, relative to its folder; `ConfigError` otherwise."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{name!r} in {where} is not UTF-8.", hint="Rename it.") from None
    if length > LONGEST_NAME:
        raise ConfigError(
            f"{name[:60]!r}… in {where} has a name of {length} bytes.", hint=f"Use at most {LONGEST_NAME}."
        )
    parts = name.split("/")
    if "\\" in name or any(unicodedata.category(char)[0] == "C" or char in "\u2028\u2029" for char in name):
        raise ConfigError(
            f"{name!r} in {where} has a name with a control character or backslash.",
            hint="Rename it with letters, digits, '.', '_' and '-'.",
        )
    if len(parts) > _DEEPEST or any(part.startswith(".") or not part.strip() or part != part.strip() for part in parts):
        raise ConfigError(
            f"{name!r} in {where} cannot be a file of a version.",
            hint="Leave out hidden files, '..' and absolute paths.",
        )
    return name


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, from its header; `ConfigError` for a header that promises what is not there.

    As https://github.com/huggingface/safetensors#format says: 8 bytes of length (little-endian), that much JSON, then
    the tensors' bytes without a gap or an overlap.
    """
    try:
        with open_plainly(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
            if length < 0:
                raise _broken(path, "it is shorter than a header's length")
            if length > size - 8:
                raise _broken(path, f"its header would have {length} bytes, but the file ends after {size}")
            if length > LARGEST_HEADER:
                raise _broken(path, f"its header has {length} bytes; {LARGEST_HEADER} is the limit")
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint="Check the folder's permissions.") from None
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({_first_line(error)})") from None
    if not text.startswith(b"{") or not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise _broken(path, "its __metadata__ is not a map of texts")
    return _checked(path, header, size - 8 - length)


def open_plainly(path: Path) -> Any:
    """`path` for reading bytes, if it is a plain file and no link; it never waits for a FIFO's other end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is not a file.", hint="Leave only plain files in the folder.")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, *, limit: int = LARGEST_TEXT) -> str:
    """The text of a small file, in UTF-8; `ConfigError` if there is none, or too much of it."""
    try:
        with open_plainly(path) as file:
            content: bytes = file.read(limit + 1)
        if len(content) > limit:
            raise ConfigError(f"{path} has more than {limit >> 20} MiB.", hint="No model's text files are that large.")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", hint="Check the folder.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8.", hint="Save the model again.") from None


def _walk(root: Path, folder: Path, prefix: str) -> Iterator[SourceFile]:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}.", hint="Check its permissions.") from None
    for entry in found:
        name = prefix + entry.name
        facts = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(facts.st_mode):
            raise ConfigError(
                f"{name!r} in {root} is a symbolic link.",
                hint="Copy the folder with its links resolved: cp -rL FOLDER COPY.",
            )
        require_path(name, where=str(root))
        if stat.S_ISDIR(facts.st_mode):
            yield from _walk(root, Path(entry.path), f"{name}/")
            continue
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(
                f"{name} in {root} is a device, socket or FIFO, not a kind of file that a version may hold.",
                hint="Take it out of the folder.",
            )
        suffix = Path(name).suffix
        if suffix.lower() in _PICKLES:
            raise ConfigError(
                f"{name} in {root} may be a pickle, which runs code when it is loaded.",
                hint="Save the weights as safetensors, and leave optimizer states out of the folder.",
            )
        if suffix not in _ALLOWED:
            raise ConfigError(
                f"{name} in {root} is not a kind of file that a version may hold.",
                hint=f"Leave only {', '.join(sorted(_ALLOWED))} files in the folder.",
            )
        yield SourceFile(
            name=name,
            path=Path(entry.path),
            size=facts.st_size,
            stamp=stamp_of(facts),
        )


def _require_harmless(file: SourceFile, source: Path) -> None:
    """The content of a file that is no weights: no pickle under another name, and not too much of it."""
    if file.name.endswith(WEIGHTS):
        return
    if file.size > LARGEST_TEXT:
        raise ConfigError(
            f"{file.name} in {source} has {file.size >> 20} MiB; {LARGEST_TEXT >> 20} is the limit for what is no "
            f"{WEIGHTS} file.",
            hint="Take data and caches out of the model's folder.",
        )
    try:
        with open_plainly(file.path) as opened:
            content: bytes = opened.read(LARGEST_TEXT)
    except OSError as error:
        raise ConfigError(f"{file.name} in {source} cannot be read: {error.strerror}.", hint="Check it.") from None
    for magic, what in _MAGIC:
        if magic.match(content):
            raise ConfigError(
                f"{file.name} in {source} begins like {what}, whatever its name says.",
                hint="Save the weights as safetensors, and leave everything else that is not text out of the folder.",
            )
    if _runs_code(content):
        raise ConfigError(
            f"{file.name} in {source} is a pickle, whatever its name says, and would run code when it is loaded.",
            hint="Take it out of the folder.",
        )
    if file.name.endswith(".json"):
        try:
            json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{file.name} in {source} is not JSON ({_first_line(error)}).", hint="Save the model again."
            ) from None


def _runs_code(content: bytes) -> bool:
    """Whether it is a pickle of protocol 0 or 1, which has no marker, and gets hold of code."""
    calls = False
    try:
        for opcode, _, _ in pickletools.genops(content):
            calls = calls or opcode.name in _CALLS
            if opcode.name == "STOP":
                return calls
    except Exception:  # noqa: BLE001 (the parser raises whatever the bytes lead it to, and then it is no pickle)
        return False
    return False


def _require_model(source: Path, kind: Kind, files: tuple[SourceFile, ...]) -> None:
    # A sentence-transformers folder may keep its transformer's files one level down.
    if not any(Path(file.name).name == "config.json" for file in files):
        raise ConfigError(f"{source} has no config.json, so it is no {kind}.", hint="Save it with save_pretrained().")
    if not any(file.name.endswith(WEIGHTS) for file in files):
        raise ConfigError(f"{source} has no {WEIGHTS} file.", hint="Save it with save_pretrained(), which writes one.")
    require_known_modules(source)


def _adapter_files(source: Path, files: tuple[SourceFile, ...]) -> tuple[SourceFile, SourceFile]:
    found = {file.name: file for file in files}
    for name in ("adapter_config.json", f"adapter_model{WEIGHTS}"):
        if name not in found:
            raise ConfigError(
                f"{source} has no {name}, so it is no PEFT adapter.", hint="Save it with save_pretrained()."
            )
    return found["adapter_config.json"], found[f"adapter_model{WEIGHTS}"]


def _adapter_shape(settings: Path, weights: Path, tensors: Mapping[str, Tensor]) -> AdapterShape:
    """Rank, alpha and target modules of a PEFT LoRA folder, its weights checked against them."""
    try:
        config: dict[str, Any] = json.loads(read_text(settings))
        if config["peft_type"] != "LORA":
            raise ConfigError(
                f"{settings} is of type {config['peft_type']!r}; only LORA can be served.", hint="Train a LoRA adapter."
            )
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
    downward = {name: tensor.shape for name, tensor in tensors.items() if ".lora_A." in name}
    if not downward:
        raise ConfigError(
            f"{weights} holds no LoRA weights.",
            hint="Save the adapter, not the model, with save_pretrained().",
        )
    for name, size in downward.items():
        if not size or size[0] > highest:
            raise ConfigError(
                f"{name} in {weights} has rank {size[0] if size else 'none'}, but {settings.name} says {highest}.",
                hint="Save both files of the same adapter.",
            )
    return shape.model_copy(update={"rank": highest})


def _checked(path: Path, header: dict[str, Any], size: int) -> dict[str, Tensor]:
    """The header's entries, if they cover exactly the `size` bytes behind it."""
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if not name or any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
            raise _broken(path, f"the name {name!r} of a tensor is empty or holds a control character")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _broken(path, f"{name} has not just a dtype, a shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise _broken(path, f"{name} has the unknown dtype {str(dtype)[:40]!r}")
        # Bounded before they are multiplied: a product of large numbers takes for ever.
        if not _whole_numbers(shape, most=64) or not _whole_numbers(offsets, most=2) or len(offsets) != 2:
            raise _broken(path, f"the shape or the data_offsets of {name} are no sizes")
        begin, end = offsets
        if not begin <= end <= size:
            raise _broken(path, f"{name} would lie at {begin} to {end}, but there are {size} bytes of weights")
        if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
            raise _broken(path, f"{name} has {end - begin} bytes, which is not what its shape and dtype need")
        tensors[name] = Tensor(dtype, tuple(shape), end - begin)
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            raise _broken(path, f"{name} begins at {begin}, where the one before it ends at {reached}")
        reached = end
    if not reached:
        raise ConfigError(f"{path} holds no weights.", hint="Save the model again.")
    if reached != size:
        raise _broken(path, f"{size - reached} bytes at its end belong to no tensor")
    return tensors


def _whole_numbers(values: Any, *, most: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name is given twice")
    return content


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read as safetensors: {why}.", hint="Save it again with safetensors' save_file()."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
