"""Who asks: from an `Authorization` header and the snapshot's API keys to a `Caller`, or a refusal. Pure.

401 is the same for no key, an unknown one, a wrong secret, and one that is revoked or expired: whoever holds no key
learns nothing about those that there are. 403 says what a known key lacks; its owner may know.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from actors.registry.apikeys import ApiKey, Role, id_in, sha256_of
from cluster.errors import RequestError

_NO_DIGEST: Final = "0" * 64
"""Compared with where no key was found, so that the answer takes as long."""


@dataclass(frozen=True)
class Caller:
    """Whose request it is."""

    key: ApiKey

    @property
    def id(self) -> str:
        """The key's id: what a trace and usage hold. It is no secret."""
        return self.key.id

    def require_model(self, model: str) -> None:
        """403 (`model_not_allowed`), unless the key may ask for `model`; asked before anything says if it exists."""
        if not self.key.allows(model):
            raise RequestError(
                f"The API key {self.key.name!r} may not use the model {model!r}.",
                status=403,
                param="model",
                code="model_not_allowed",
                hint=f"It may use: {', '.join(self.key.models)}.",
            )


def identify(authorization: str | None, keys: Mapping[str, ApiKey], *, role: Role, now: datetime) -> Caller:
    """The caller, if `authorization` is `Bearer` and the secret of a key that is live at `now` and has `role`.

    `RequestError` 401 (`invalid_api_key`) or 403 (`role_not_allowed`).
    """
    scheme, _, secret = (authorization or "").strip().partition(" ")
    secret = secret.strip()
    key = keys.get(id_in(secret) or "")
    # `compare_digest` of hashes: neither the secret nor its hash can be found letter by letter by the time it takes.
    right = hmac.compare_digest(sha256_of(secret), key.secret_sha256 if key else _NO_DIGEST)
    if key is None or not right or scheme.lower() != "bearer" or key.expired(now):
        raise RequestError(
            "A valid API key is needed.",
            status=401,
            code="invalid_api_key",
            hint="Send `Authorization: Bearer fw-…`; `flywheel keys create NAME` makes a key.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if role not in key.roles:
        raise RequestError(
            f"The API key {key.name!r} has not the role {role!r} that this route needs.",
            status=403,
            code="role_not_allowed",
            hint=f"It has: {', '.join(key.roles)}. `flywheel keys create NAME --role {role}` makes one that may.",
        )
    return Caller(key)
