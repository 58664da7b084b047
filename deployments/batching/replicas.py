"""An encoder's server as a Serve deployment: the options that all of them share."""

from typing import Any

from ray import serve
from ray.serve import Application

from cluster import environment
from deployments.batching.config import EncoderConfig

ONGOING_REQUESTS = 256
"""Calls that one replica has in hand. The bounds that matter are the queue's."""
HEALTH_PERIOD_S = 5
START_TRIES = 2


def deployment(server: type[Any], config: EncoderConfig, *, name: str) -> Application:
    """The deployment `name` of `server`, which is made from `config`."""
    return (
        serve.deployment(server)
        .options(
            name=name,
            num_replicas=config.replicas,
            max_ongoing_requests=ONGOING_REQUESTS,
            max_surge_percent=100,  # an update leaves no gap
            health_check_period_s=HEALTH_PERIOD_S,
            max_constructor_retry_count=START_TRIES,
            ray_actor_options={
                "num_cpus": config.threads,
                "num_gpus": config.gpus,
                "runtime_env": {"env_vars": environment.for_workers()},
            },
        )
        .bind(config)
    )
