"""Which files a `model` of the settings means if it names a version of the registry: pure, on a snapshot, before
anything starts.

tickets@champion    the version that the alias stands at now; who moves it later serves again
tickets/3           exactly this version
tickets             as tickets@champion
"""

import re
from pathlib import Path
from typing import TypeVar

from actors.registry.snapshot import Snapshot, resolve
from cluster.errors import ConfigError
from cluster.model_sources import CATALOG
from cluster.models import served_name
from deployments.embedding.config import EmbeddingConfig
from deployments.llm.config import LLMConfig

_VERSION = re.compile(r"[^@/]+(@[^@/]+|/[0-9]+)?")

Servable = TypeVar("Servable", LLMConfig, EmbeddingConfig)


def may_be(config: LLMConfig | EmbeddingConfig) -> bool:
    """Whether the registry has to be asked: the model store's names and folders come first, as in `obtain`."""
    if config.version is not None or config.model in CATALOG or Path(config.model).expanduser().is_dir():
        return False
    return _VERSION.fullmatch(config.model) is not None


def resolved(config: Servable, known: Snapshot) -> Servable:
    """`config` with the folder of the whole model, or of the embedder, that it names; unchanged if no such name is
    registered.

    `ConfigError` for a version of another kind, `RequestError` (404) for one that is not there.
    """
    if not may_be(config) or ("@" not in config.model and config.model.partition("/")[0] not in known.models):
        return config
    embeds = isinstance(config, EmbeddingConfig)
    route = resolve(known, config.model)
    if route.kind != ("embedder" if embeds else "model"):
        wanted = "an embedder" if embeds else "a whole model"
        raise ConfigError(
            f"{'embedding' if embeds else 'llm'}.model {config.model!r} is the {route.kind} {route.id} on "
            f"{route.base}, not {wanted}.",
            hint=f"Serve {route.base}; clients then ask for {served_name(route.base)}:{route.id}."
            if route.kind == "adapter" and not embeds
            else f"Name {wanted}.",
        )
    return config.model_copy(update={"model": str(known.folder(route).absolute()), "version": route.id})
