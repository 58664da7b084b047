"""The Serve application: gateway → language models, embedders, reranker, collections. It only composes.

`build` is what `serve deploy` imports (`deployments.application:build`) and what `run` starts; `deploy_config`
is the YAML for the former. Which model, which port, how many replicas: `ServeConfig` says.
"""

import re
import time
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from cluster import environment
from cluster.errors import ConfigError, DependencyError
from cluster.models import locate
from cluster.storage import Home
from deployments import listening
from deployments.config import ServeConfig
from deployments.embedding.server import build as build_embedding
from deployments.gateway.deployment import Gateway
from deployments.llm.build import SURGE_PERCENT
from deployments.llm.build import build as build_llm
from deployments.llm.preflight import check as check_llm
from deployments.reranking.server import build as build_reranking
from deployments.search.server import build as build_search

IMPORT_PATH = "deployments.application:build"
GATEWAY_REQUESTS = 1000
"""Requests that one gateway replica has in hand; it waits much and computes little."""
_GATEWAY_ENVIRONMENT = {
    # One event loop. The gateway never blocks, and each piece of a stream would change threads on its way out.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
SHUTDOWN_WAIT_S = 60
ANSWER_WAIT_S = 30.0
_EXCEPTION = re.compile(r"^(?:cluster\.errors\.\w+: (?=.)|(?=[\w.]+(?:Error|Exception): ))(.+)$", re.MULTILINE)


def build(config: ServeConfig) -> Application:
    """The whole application. Needs a connection to Ray, to see whether the cluster has GPUs; starts nothing."""
    if not config.llm and not config.embedding and config.reranking is None:
        raise ConfigError(
            "serve names neither an llm nor an embedding or a reranking model.", hint="Give serve.llm.model."
        )
    gpu = ray.cluster_resources().get("GPU", 0) > 0
    engines = {name: build_llm(base, name=name, gpu=gpu) for name, base in config.engines.items()}
    embedders = {name: build_embedding(one, name=name) for name, one in config.embedders.items()}
    search = build_search(config.search, list(embedders.values())) if embedders else None
    reranking = build_reranking(config.reranking) if config.reranking else None
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        name="gateway",
        num_replicas=config.gateway.replicas,
        max_ongoing_requests=GATEWAY_REQUESTS,
        max_surge_percent=SURGE_PERCENT,
        graceful_shutdown_timeout_s=SHUTDOWN_WAIT_S,
        ray_actor_options={
            "num_cpus": 0,
            "runtime_env": {"env_vars": {**environment.for_workers(), **_GATEWAY_ENVIRONMENT}},
        },
    )
    return gateway.bind(config, engines, embedders, search, reranking)


def run(config: ServeConfig) -> str:
    """Start the application on the connected Ray and wait until it answers; returns the gateway's URL.

    Raises `DependencyError` with the reason if a part cannot start, for example if the parity check fails;
    `ConfigError` if Serve runs already and listens at another address.
    """
    preflight(config, Home.current())
    listening.require(config.gateway.host, config.gateway.port)
    serve.start(proxy_location="HeadOnly", http_options=_http(config))
    try:
        serve.run(build(config), name=config.name, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise DependencyError(
            f"The application {config.name!r} did not start. {_first_fault(config.name) or error}",
            hint="What served before serves on; a replica of it that dies is not replaced until a good configuration "
            "is deployed. All that the replicas said is in Ray's log folder, under serve/.",
            retryable=False,
        ) from None
    _wait_until_it_answers(url(config))
    return url(config)


def preflight(config: ServeConfig, home: Home) -> None:
    """Refuse what can be known to fail before anything that runs is touched. `ConfigError` names the setting.

    Weights may be on the replicas' nodes only: a model that is not in this machine's store is not looked into.
    """
    for encoder in (*config.embedding, *filter(None, [config.reranking])):
        locate(encoder.model, home)
    for base in config.llm:
        if (folder := locate(base.model, home)) is not None:
            check_llm(base, folder)


def _first_fault(name: str) -> str | None:
    """Why the first deployment that cannot start does not, in its own words."""
    application = serve.status().applications.get(name)
    for deployment, state in (application.deployments if application else {}).items():
        if state.status == "DEPLOY_FAILED" or state.status == "UNHEALTHY":
            return f"{deployment}: {reason(state.message)}"
    return None


def reason(message: str) -> str:
    """What went wrong, out of Serve's message: the last exception of its traceback, if it holds one."""
    faults = _EXCEPTION.findall(message)
    return str(faults[-1]).strip() if faults else message


def _wait_until_it_answers(base_url: str) -> None:
    """A running replica is not yet a reachable one: the first call through each handle finds its way first."""
    deadline = time.monotonic() + ANSWER_WAIT_S
    while True:
        try:
            answer = httpx.get(f"{base_url}/healthz", timeout=ANSWER_WAIT_S)
            if answer.is_success:
                return
            said = answer.text
        except httpx.HTTPError as error:
            said = str(error)
        if time.monotonic() > deadline:
            raise DependencyError(f"The application runs, but is not well: {said}", retryable=False)
        time.sleep(0.2)


def stop() -> None:
    """Stop every Serve application of the connected Ray, and its HTTP proxy."""
    serve.shutdown()


def url(config: ServeConfig) -> str:
    """Where clients find the gateway; the OpenAI SDK's `base_url` is this with `/v1`."""
    host = "127.0.0.1" if config.gateway.host in ("0.0.0.0", "::") else config.gateway.host
    return f"http://{host}:{config.gateway.port}"


def deploy_config(config: ServeConfig) -> dict[str, Any]:
    """What `serve deploy` takes, as plain data for YAML."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": _http(config),
        "applications": [
            {
                "name": config.name,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": config.model_dump(mode="json", exclude_none=True),
                "runtime_env": {"env_vars": environment.for_deployments()},
            }
        ],
    }


def _http(config: ServeConfig) -> dict[str, Any]:
    # No timeout of the proxy's own: it would cut a long stream without a word. The gateway has one, with words.
    return {"host": config.gateway.host, "port": config.gateway.port}
