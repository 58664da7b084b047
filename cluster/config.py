"""The base of every `Config`: frozen, strict, and helpful when a key is wrong.

Each part of Flywheel keeps its `Config` beside the code that reads it; a recipe only composes them.
This module knows pydantic and YAML. It does not know Ray, torch or vLLM, so that reading a recipe is fast.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.errors import ConfigError


class Config(BaseModel):
    """Frozen settings; a key that is not declared is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


AnyConfig = TypeVar("AnyConfig", bound=BaseModel)


class _Strict(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, where PyYAML takes the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; `ConfigError` if it is missing, unreadable or not a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {path}.", hint=f"Check the path; it was looked up from {Path.cwd()}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", hint="Give a UTF-8 YAML file.") from None
    try:
        content = yaml.load(text, Loader=_Strict)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", hint="Mend the line it names.") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds {type(content).__name__}, not a mapping of settings.",
            hint="Start the file with `name: …`.",
        )
    return content


def override(settings: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`settings` with each `a.b=value` of `assignments` put in; values are YAML, `a.0.b` is in a list's first."""
    merged: dict[str, Any] = _copy(settings)
    for assignment in assignments:
        dotted, sign, raw = assignment.partition("=")
        keys = dotted.strip().split(".")
        if not sign or not all(keys):
            raise ConfigError(
                f"--set {assignment!r} is not of the form a.b=value.",
                hint="For example: --set optimizer.learning_rate=1e-4",
            )
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {assignment!r} has a value that is not YAML: {error}", hint="Quote the value."
            ) from None
        target: Any = merged
        for key, inner_key in pairwise(keys):
            inner = target[int(key)] if isinstance(target, list) else target.setdefault(key, {})
            _require_section(inner, key, inner_key, assignment)
            target = inner
        target[int(keys[-1]) if isinstance(target, list) else keys[-1]] = value
    return merged


def _require_section(found: Any, name: str, key: str, assignment: str) -> None:
    """`ConfigError` unless `found`, which `name` is, has room for `key`: a mapping, or a list that is as long."""
    if isinstance(found, list) and not (key.isdecimal() and int(key) < len(found)):
        numbers = f"0 to {len(found) - 1}" if found else "none"
        raise ConfigError(
            f"--set {assignment!r}: {name!r} is a list, and {key!r} is no number in it.",
            hint=f"It has the numbers {numbers}, as in {name}.0; or give the whole list.",
        )
    if not isinstance(found, dict | list):
        raise ConfigError(f"--set {assignment!r}: {name!r} is a value, not a section.", hint="Shorten the dotted name.")


def parse(config_class: type[AnyConfig], settings: Mapping[str, Any], *, source: str) -> AnyConfig:
    """`settings` as a `config_class`; `ConfigError` lists every fault with its dotted key and value."""
    try:
        return config_class.model_validate(settings)
    except ValidationError as error:
        faults = [_explain(config_class, fault) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{source} is not valid:\n" + "\n".join(f"  {fault}" for fault in faults)) from None


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that a person probably meant by `word`, if one is near."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return found[0] if found else None


def _copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in settings.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _copy(value)
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _explain(config_class: type[BaseModel], fault: Mapping[str, Any]) -> str:
    location: tuple[str | int, ...] = fault["loc"]
    dotted = ".".join(str(part) for part in location) or "(the whole)"
    if fault["type"] == "extra_forbidden":
        keys = _keys_at(config_class, location[:-1])
        meant = nearest(str(location[-1]), keys)
        advice = f"did you mean {meant!r}?" if meant else f"known keys: {', '.join(sorted(keys))}"
        return f"{dotted}: unknown key; {advice}"
    if fault["type"] == "missing":
        return f"{dotted}: required, but not given"
    message = str(fault["msg"]).removeprefix("Value error, ")
    # A check of the whole names the values itself; its input is everything.
    return f"{dotted}: {message} (got {fault['input']!r})" if location else message


def _keys_at(config_class: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys that the models reached by `location` declare (a union declares the keys of all its members)."""
    models: list[type[BaseModel]] = [config_class]
    for part in location:
        reached: list[type[BaseModel]] = []
        for model in models:
            for key, field in model.model_fields.items():
                if str(part) in (key, field.alias):
                    reached += _models_in(field.annotation)
        # A union's tag stands in pydantic's location but names no field: stay where we are.
        models = reached or models
    return [field.alias or key for model in models for key, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
