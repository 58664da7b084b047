"""API keys: what a secret looks like, how it is kept, and what a gateway has to know of a key. Pure.

    fw-3f9c0a61b27d-…43 letters…
       └ in its id  └ 256 random bits

Only SHA-256 of the secret is kept. A slow hash, as passwords need, would gain nothing: nobody guesses 256 random bits,
at whatever speed, and the gateway checks a key with every request. The id stands in the secret so that a gateway finds
the one key to compare with, in constant time, instead of searching by what it must not leak.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Final, Literal, get_args

Role = Literal["infer", "index", "admin"]
Period = Literal["day", "month"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""`infer`: ask models and collections. `index`: write collections. `admin`: operate. None includes another."""
KEY_ID: Final = re.compile(r"key-[0-9a-f]{12}")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SECRET: Final = re.compile(r"fw-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_ID_BYTES: Final = 6
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True)
class ApiKey:
    """A live key as a gateway needs it: whom it names, what it opens and how much; never the secret."""

    id: str
    name: str
    secret_sha256: str = field(repr=False)
    roles: tuple[Role, ...] = ("infer",)
    models: tuple[str, ...] = ("*",)
    """Patterns (fnmatch, case matters) over the model's name as it is asked for: `base:team-*`."""
    rpm: int | None = None
    tpm: int | None = None
    budget_tokens: int | None = None
    budget_period: Period | None = None
    expires_at: datetime | None = None

    def allows(self, model: str) -> bool:
        """Whether this key may ask for `model`."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)

    def expired(self, now: datetime) -> bool:
        """Whether its time is over at `now`."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True)
class Secret:
    """A secret that has just been made. It is shown once and never kept: `text` is not part of its repr."""

    id: str
    """Id of the key that it is the secret of."""
    text: str = field(repr=False)

    @classmethod
    def make(cls) -> "Secret":
        """A new one, from the system's random numbers."""
        id_ = secrets.token_hex(_ID_BYTES)
        return cls(f"key-{id_}", f"fw-{id_}-{secrets.token_urlsafe(_RANDOM_BYTES)}")

    @property
    def sha256(self) -> str:
        """What is kept of it."""
        return sha256_of(self.text)


def period_start(period: Period, now: datetime) -> datetime:
    """Where the day or month of `now` begins, in UTC: from there on a budget is counted."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day.replace(day=1) if period == "month" else day


def sha256_of(secret: str) -> str:
    """What the registry keeps of a secret, and what is compared."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def id_in(secret: str) -> str | None:
    """The id of the key that `secret` says it belongs to; None for what cannot be a secret of ours."""
    match = _SECRET.fullmatch(secret)
    return f"key-{match[1]}" if match else None
