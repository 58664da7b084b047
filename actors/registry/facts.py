"""What the registry's log is made of: facts, each one thing that happened, as pydantic models that never change.

`event` names a fact's kind in the log. A field that is added later has a default, so that an old log can be read.
Nothing here decides anything; that is `rules`. Pure: no Ray, no SQL, no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from actors.registry.apikeys import Period, Role
from actors.registry.snapshot import Kind, Split
from cluster.config import Config
from cluster.errors import StateError

RunStatus = Literal["running", "completed", "failed", "stopped"]
Stage = Literal["candidate", "evaluating", "passed", "blocked", "promoted", "retired"]


class Fact(Config):
    """Something that happened. `event` names it in the log."""

    # A loss can be NaN; as JSON's null it could not be read back.
    model_config = ConfigDict(ser_json_inf_nan="strings")
    event: ClassVar[str]


class DataFact(Fact):
    """A data version exists. `rows` counts each split; `parent` is the data version or feedback set it is made from."""

    event: ClassVar[str] = "data"
    id: str
    name: str
    digest: str
    stage: Literal["examples", "tokens"]
    parent: str | None = None
    rows: dict[str, int] = Field(default_factory=dict)


class FeedbackFact(Fact):
    """A set of judged answers exists: `rows` answers that `versions` gave to traffic between `since` and `until`."""

    event: ClassVar[str] = "feedback"
    id: str
    digest: str
    versions: tuple[str, ...]
    rows: int = Field(ge=0)
    since: datetime
    until: datetime


class Driver(Config):
    """The process that drives a run or a gate, as Ray knows it: enough to tell later whether it still lives."""

    job_id: str
    node_id: str
    pid: int


class RunFact(Fact):
    """A training run began (or was taken up again by another driver)."""

    event: ClassVar[str] = "run"
    id: str
    name: str
    base: str
    base_digest: str
    data_version: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    recipe_digest: str = ""
    code_commit: str = ""
    tracking_run: str | None = None
    driver: Driver | None = None
    changes: dict[str, str] = Field(default_factory=dict)
    """What is set otherwise than in `recipe` since the run was taken up again, by the setting's path."""


class CheckpointFact(Fact):
    """A run committed a checkpoint. `id` is `run/step-N`, `path` its folder or its `s3://…`."""

    event: ClassVar[str] = "checkpoint"
    id: str
    run_id: str
    step: int = Field(ge=0)
    path: str
    metrics: dict[str, float] = Field(default_factory=dict)

    @field_validator("path", mode="before")
    @classmethod
    def _text(cls, path: Any) -> Any:
        """A path of this machine may be given as one."""
        return str(path) if isinstance(path, Path) else path


class RunEnded(Fact):
    """A run is over. `verdict` is one line for a person; `presumed`: concluded by the registry, not said by the run."""

    event: ClassVar[str] = "run-ended"
    run_id: str
    status: Literal["completed", "failed", "stopped"]
    verdict: str = ""
    presumed: bool = False


class RunIncident(Fact):
    """A run lost workers, or was resized; it went on, or ended by it. `verdict` and `hint` are for a person.

    `step` steps were done then; `lost_steps` of them, since the last commit, had to be trained again.
    """

    event: ClassVar[str] = "run-incident"
    id: str
    run_id: str
    kind: str
    verdict: str
    hint: str = ""
    step: int = Field(ge=0)
    lost_steps: int = Field(default=0, ge=0)
    at: datetime


class EvaluationFact(Fact):
    """A candidate was measured. `passed` is the gate's verdict, `report` the whole report."""

    event: ClassVar[str] = "evaluation"
    id: str
    run_id: str | None = None
    checkpoint_id: str | None = None
    data_version: str | None = None
    version_id: str | None = None
    """The version that was measured; None for one that was measured before it was registered."""
    report: dict[str, Any] = Field(default_factory=dict)
    passed: bool


class VersionFact(Config):
    """What a caller asks to register: the folder at `source_path`, and where it comes from.

    Ids that are given must be known to the registry. `base` names the model an adapter belongs to, or the model
    that a full model or embedder was trained from; if that is a version here, `parent` is its id.
    """

    name: str
    kind: Kind
    source_path: Path
    base: str
    base_digest: str = ""
    tokenizer_digest: str = ""
    parent: str | None = None
    run_id: str | None = None
    checkpoint_id: str | None = None
    data_version: str | None = None
    evaluation_id: str | None = None
    recipe_digest: str = ""
    lock_digest: str = ""
    code_commit: str = ""
    licence: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)


class AdapterShape(Config):
    """What an engine must allow to load a LoRA adapter, read from its files."""

    rank: int = Field(ge=1)
    alpha: float
    target_modules: tuple[str, ...]


class Artifact(Config):
    """Files that lie in the version store, whole and signed. `digest` is `cluster.storage.digest_folder` of them.

    `path` is relative to the version store, so that a home can be moved (an absolute one, of older logs, stays so).
    """

    path: Path
    digest: str
    signed_by: str = ""
    """Id of the key whose signature lies beside the folder; empty in logs older than signatures."""
    size_bytes: int = Field(default=0, ge=0)
    adapter: AdapterShape | None = None
    dtype: str | None = None
    licence: str | None = None
    chat_template_digest: str | None = None


class Origin(Config):
    """Where an imported version comes from: its id there, and the key that signed it there."""

    version_id: str
    signed_by: str
    exported_at: datetime
    exported_by: str


class Version(VersionFact, Fact):
    """A registered version: its number never changes, nor do the files at `path` (see `Artifact`)."""

    event: ClassVar[str] = "version"
    id: str
    number: int = Field(ge=1)
    digest: str
    path: Path
    signed_by: str = ""
    size_bytes: int = 0
    adapter: AdapterShape | None = None
    dtype: str | None = None
    chat_template_digest: str | None = None
    origin: Origin | None = None
    created_at: datetime

    @field_validator("path")
    @classmethod
    def _relative(cls, path: Path, info: ValidationInfo) -> Path:
        """An older log holds absolute paths, always `…/versions/<name>/<12 digits>`: its home may have moved since."""
        return Path(info.data["name"]) / path.name if path.is_absolute() and "name" in info.data else path


class GateCheck(Config):
    """One thing that a gate looked at, with the numbers in its reason."""

    name: str
    passed: bool
    reason: str


class GateBegun(Fact):
    """A version is being measured by a gate. `was` is the stage it comes back to if the gate is abandoned."""

    event: ClassVar[str] = "gate-begun"
    id: str
    version_id: str
    was: Stage
    by: str
    at: datetime
    driver: Driver | None = None
    command: str


class GateEnded(Fact):
    """A gate's verdict with its evidence. `abandoned`: whoever drove it died, or gave it up."""

    event: ClassVar[str] = "gate-ended"
    gate_id: str
    outcome: Literal["passed", "blocked", "abandoned"]
    evaluation_id: str | None = None
    checks: tuple[GateCheck, ...] = ()
    reason: str = ""


class AliasMove(Fact):
    """An alias moved.

    `split` is the share of traffic of each version, `version` the one with the largest; `previous_split` and
    `previous` are the same of where it stood before (empty and None: it is new). `command` is the caller's id of the
    request. `gates` are the last verdicts that stood on its versions. `external`: somebody moved it in MLflow, and it
    was followed. `forced`: without a passed gate.
    """

    event: ClassVar[str] = "alias"
    id: str
    name: str
    alias: str
    version: int
    split: Split
    previous: int | None
    previous_split: Split = Field(default_factory=dict)
    by: str
    why: str
    at: datetime
    action: Literal["promote", "rollback", "external"] = "promote"
    forced: bool = False
    gates: tuple[str, ...] = ()
    command: str

    @model_validator(mode="before")
    @classmethod
    def _undivided(cls, values: Any) -> Any:
        """A move of an older log names one version only."""
        if isinstance(values, dict) and "split" not in values and "version" in values:
            before = values.get("previous")
            values = {**values, "split": {values["version"]: 1.0}, "previous_split": {before: 1.0} if before else {}}
        return values


class ExternalMove(Fact):
    """Somebody moved an alias in `where`, which the rules do not allow: it was put back. `version` None: deleted."""

    event: ClassVar[str] = "external-move"
    id: str
    name: str
    alias: str
    version: int | None
    where: str
    refused: str
    at: datetime


class Retired(Fact):
    """A version left traffic for good. Its facts stay; its files may be freed."""

    event: ClassVar[str] = "retired"
    id: str
    version_id: str
    by: str
    why: str
    at: datetime
    command: str


class Pinned(Fact):
    """Garbage collection must leave a version alone (`pinned`), or need not any more."""

    event: ClassVar[str] = "pin"
    version_id: str
    pinned: bool
    by: str
    why: str
    at: datetime


class Collected(Fact):
    """The files of these versions are being freed: from here on nothing may be routed to them."""

    event: ClassVar[str] = "collected"
    version_ids: tuple[str, ...]


class Restored(Fact):
    """The files of a collected version lie in the version store again."""

    event: ClassVar[str] = "restored"
    version_id: str
    path: Path


class ApiKeyCreated(Fact):
    """An API key exists. Its secret was shown to whoever made it and is nowhere kept: only its SHA-256 is here."""

    event: ClassVar[str] = "api-key"
    id: str
    name: str
    secret_sha256: str = Field(repr=False)
    roles: tuple[Role, ...]
    models: tuple[str, ...] = ("*",)
    rpm: int | None = None
    tpm: int | None = None
    budget_tokens: int | None = None
    budget_period: Period | None = None
    expires_at: datetime | None = None
    by: str
    at: datetime


class ApiKeyRevoked(Fact):
    """An API key opens nothing any more."""

    event: ClassVar[str] = "api-key-revoked"
    key_id: str
    by: str
    why: str
    at: datetime
    command: str


_FACTS: Final[Mapping[str, type[Fact]]] = {
    fact.event: fact
    for fact in (
        DataFact,
        FeedbackFact,
        RunFact,
        CheckpointFact,
        RunEnded,
        RunIncident,
        EvaluationFact,
        Version,
        GateBegun,
        GateEnded,
        AliasMove,
        ExternalMove,
        Retired,
        Pinned,
        Collected,
        Restored,
        ApiKeyCreated,
        ApiKeyRevoked,
    )
}


@dataclass(frozen=True)
class Event:
    """A fact in the log: its place, when it was acknowledged, and who said it."""

    seq: int
    at: datetime
    by: str
    fact: Fact


AnyFact = TypeVar("AnyFact", bound=Fact)


def portable(fact: AnyFact) -> AnyFact:
    """The fact without what means something else in another installation: ids of versions, drivers, MLflow's ids."""
    match fact:
        case RunFact():
            return fact.model_copy(update={"driver": None, "tracking_run": None})
        case EvaluationFact():
            return fact.model_copy(update={"version_id": None})
        case FeedbackFact():
            return fact.model_copy(update={"versions": ()})
        case _:
            return fact


def encode(fact: Fact) -> str:
    """The fact as the log keeps it."""
    return fact.model_dump_json()


def decode(event: str, body: str) -> Fact:
    """The fact of a line of the log; `StateError` for one that a newer Flywheel has written, or that is damaged."""
    if event not in _FACTS:
        raise StateError(
            f"The registry's log holds an event {event!r}, which this version of Flywheel does not know.",
            hint="Run the version of Flywheel that wrote it, or a newer one.",
        )
    try:
        return _FACTS[event].model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its body"
        raise StateError(
            f"The registry's log holds a {event!r} that this version of Flywheel cannot read: {where}: {first['msg']}.",
            hint="Run the version of Flywheel that wrote it, or a newer one.",
        ) from None
