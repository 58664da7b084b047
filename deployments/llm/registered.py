"""Which files `llm.model` means if it names a version of the registry: pure, on a snapshot, before anything starts.

tickets@champion    the version that the alias stands at now; who moves it later serves again
tickets/3           exactly this version
tickets             as tickets@champion
"""

import re
from pathlib import Path

from actors.registry.snapshot import Snapshot, resolve
from cluster.errors import ConfigError
from cluster.model_sources import CATALOG
from cluster.models import served_name
from deployments.llm.config import LLMConfig

_VERSION = re.compile(r"[^@/]+(@[^@/]+|/[0-9]+)?")


def may_be(config: LLMConfig) -> bool:
    """Whether the registry has to be asked: the model store's names and folders come first, as in `obtain`."""
    if config.version is not None or config.model in CATALOG or Path(config.model).expanduser().is_dir():
        return False
    return _VERSION.fullmatch(config.model) is not None


def resolved(config: LLMConfig, known: Snapshot) -> LLMConfig:
    """`config` with the folder of the whole model that it names; unchanged if no such name is registered.

    `ConfigError` for a version that is no whole model, `RequestError` (404) for one that is not there.
    """
    if "@" not in config.model and config.model.partition("/")[0] not in known.models:
        return config
    route = resolve(known, config.model)
    if route.kind != "model":
        raise ConfigError(
            f"llm.model {config.model!r} is the {route.kind} {route.id} on {route.base}, not a whole model.",
            hint=f"Serve {route.base}; clients then ask for {served_name(route.base)}:{route.id}."
            if route.kind == "adapter"
            else "Name a whole model.",
        )
    return config.model_copy(update={"model": str(known.folder(route).absolute()), "version": route.id})
