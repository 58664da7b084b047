"""Settings of registration."""

import re

from pydantic import Field, field_validator

from cluster.config import Config

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
# MLflow takes no '.' in an alias and keeps some for itself; what it could not show is refused where a person can react.
ALIAS_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
RESERVED_ALIAS = re.compile(r"latest|v[0-9]+")
ACTOR_NAME = "registry"
NAMESPACE = "flywheel"


class RegisterConfig(Config):
    """Under which name a result is registered, and which alias moves if the gate is passed."""

    name: str
    on_pass: str | None = Field(default="champion")

    @field_validator("name", "on_pass")
    @classmethod
    def _valid(cls, value: str | None) -> str | None:
        if value is not None and not NAME_PATTERN.fullmatch(value):
            raise ValueError("use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit")
        return value

    @field_validator("on_pass")
    @classmethod
    def _an_alias(cls, value: str | None) -> str | None:
        if value is not None and not ALIAS_PATTERN.fullmatch(value):
            raise ValueError("an alias holds no '.'; use lower-case letters, digits, '_' or '-'")
        if value is not None and RESERVED_ALIAS.fullmatch(value):
            raise ValueError("this alias is reserved; choose a role: champion, canary, …")
        return value
