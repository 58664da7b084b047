"""From our settings to the Serve application of one vLLM deployment, through the public `ray.serve.llm`.

Settings → settings: it starts nothing, fetches nothing and looks at no machine; `gpu` is told, not found out.
"""

from typing import Any

from ray.serve import Application
from ray.serve.llm import LLMConfig as RayLLMConfig
from ray.serve.llm import build_llm_deployment
from vllm.tool_parsers import ToolParserManager

from cluster import environment
from cluster.config import nearest
from cluster.errors import ConfigError
from deployments.llm.config import LLMConfig
from deployments.llm.scaling import LOOK_BACK_S, desired_replicas
from deployments.llm.server import LLMDeployment

HEALTH_PERIOD_S = 1
"""How soon Serve sees that a replica's process has ended, and starts another."""
ROUTING_REPORT_S = 1.0
"""How often a replica says what it holds and how loaded it is; between two reports a gateway counts for itself."""
HEALTH_TIMEOUT_S = 10
"""Long: a busy CPU can keep a replica's event loop for seconds. Three in a row, and Serve replaces a replica that
hangs: after half a minute. The gateways pass it by long before (`wire`, `placement.Dispatcher.doubt`)."""
SURGE_PERCENT = 100
"""An update starts as many new replicas as there are old ones, if there is room, before it stops any of these."""
SHUTDOWN_WAIT_S = 60
"""Streams in flight may end when a replica is replaced."""
START_TRIES = 2
"""A fault of the engine's arithmetic does not go away by trying; a second try is for the machine's bad luck."""

_OWN_LOGGING = {"VLLM_CONFIGURE_LOGGING": "0"}
"""vLLM 0.32 sets up logging when it is imported, by `dictConfig`, which closes every handler of the process: after it
nothing that the replica says, Serve's own lines included, would reach Serve's log file. Its warnings come by stderr."""


def build(config: LLMConfig, *, name: str, gpu: bool) -> Application:
    """The deployment `name` of one base model and its adapters, on CPU or on one GPU for each replica."""
    return build_llm_deployment(
        ray_config(config, gpu=gpu),
        bind_kwargs={"settings": config},
        override_serve_options={"name": name, "max_constructor_retry_count": START_TRIES},
    )


def ray_config(config: LLMConfig, *, gpu: bool) -> RayLLMConfig:
    """`config` in Ray's words. `ConfigError` for a tool parser that vLLM does not have."""
    _require_tool_parser(config.tool_parser)
    return RayLLMConfig(
        # The replica replaces the source by the folder that it has obtained on its own node.
        model_loading_config={"model_id": config.served_as, "model_source": config.model},
        accelerator_config={"kind": "gpu" if gpu else "cpu"},
        placement_group_config=None if gpu else {"bundles": [{"CPU": config.threads}]},
        server_cls=LLMDeployment,
        engine_kwargs=_engine_settings(config, gpu=gpu),
        # No `lora_config`: Ray would count adapters a second time, with a limit of its own (see resident.py).
        deployment_config={
            **_scale(config),
            "max_surge_percent": SURGE_PERCENT if config.surge else 0,
            "ray_actor_options": {"num_cpus": 0},
            "request_router_config": {
                "request_router_class": "deployments.gateway.serve_router:PlacementRouter",
                "request_routing_stats_period_s": ROUTING_REPORT_S,
            },
            "health_check_period_s": HEALTH_PERIOD_S,
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
            "graceful_shutdown_timeout_s": SHUTDOWN_WAIT_S,
        },
        runtime_env={
            "env_vars": {**environment.for_workers(), **_OWN_LOGGING, **({} if gpu else _cpu_environment(config))}
        },
    )


def _require_tool_parser(name: str | None) -> None:
    known = ToolParserManager.list_registered()
    if name is not None and name not in known:
        meant = nearest(name, known)
        raise ConfigError(
            f"llm.tool_parser: vLLM has no {name!r}.",
            hint=f"Did you mean {meant!r}?" if meant else f"It has: {', '.join(known)}.",
        )


def _scale(config: LLMConfig) -> dict[str, Any]:
    scale = config.replicas
    if isinstance(scale, int):
        return {"num_replicas": scale}
    return {
        "autoscaling_config": {
            "min_replicas": scale.min,
            "max_replicas": scale.max,
            "target_ongoing_requests": scale.target_requests,
            "upscale_delay_s": scale.upscale_delay_s,
            "downscale_delay_s": scale.downscale_delay_s,
            "look_back_period_s": LOOK_BACK_S,
            "policy": {"policy_function": f"{desired_replicas.__module__}:{desired_replicas.__name__}"},
        }
    }


def _engine_settings(config: LLMConfig, *, gpu: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "enable_lora": True,
        "max_lora_rank": config.max_lora_rank,
        "max_loras": config.max_loras,
        # The same number as `ResidentAdapters` is given, which makes room before it loads: vLLM never evicts by itself.
        "max_cpu_loras": config.max_adapters,
        # `usage.prompt_tokens_details.cached_tokens`, as OpenAI's: what of the prompt was in the prefix cache.
        "enable_prompt_tokens_details": True,
        # For the adapter's own; the replica refuses a client's (see templates.py).
        "trust_request_chat_template": True,
    }
    if config.tool_parser is not None:
        settings |= {"enable_auto_tool_choice": True, "tool_call_parser": config.tool_parser}
    # With adapters vLLM's CPU platform compiles nothing anyway; saying so saves the attempt.
    return settings if gpu else {**settings, "enforce_eager": True}


def _cpu_environment(config: LLMConfig) -> dict[str, str]:
    return {
        # One thread per replica gives 80 % of the speed of two, on half the CPU, and stands contention.
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        # vLLM would pin its threads to cores by itself; every replica, and every other engine, to the same.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
