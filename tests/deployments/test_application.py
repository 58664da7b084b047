"""How the application is put together, without starting it. Importing it brings in vLLM's configuration: seconds."""

import inspect

import pytest
import yaml

from cluster.config import parse
from cluster.errors import ConfigError
from deployments.config import ServeConfig
from deployments.llm.config import LLMConfig

CONFIG = ServeConfig.model_validate(
    {
        "gateway": {"port": 18555},
        "llm": {"model": "smollm2-135m-instruct", "threads": 2, "max_lora_rank": 32, "kv_cache_gib": 3},
        "embedding": {"model": "all-minilm-l6-v2"},
    }
)

TRACE = "The deployment failed to start.\nTraceback (most recent call last):\n  File x"


def test_a_batch_may_not_mix_more_adapters_than_are_resident() -> None:
    with pytest.raises(ConfigError, match="max_adapters 2 is less than max_loras 4"):
        parse(LLMConfig, {"model": "m", "max_adapters": 2, "max_loras": 4}, source="test")


@pytest.mark.integration
def test_what_print_config_prints_builds_the_same_application() -> None:
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    from deployments import application

    printed = yaml.safe_load(yaml.safe_dump(application.deploy_config(CONFIG)))
    schema = ServeDeploySchema.model_validate(printed)
    deployed = schema.applications[0]
    builder = import_attr(deployed.import_path)
    (parameter,) = inspect.signature(builder).parameters.values()
    assert parameter.annotation.model_validate(deployed.args) == CONFIG
    assert schema.http_options.port == 18555
    assert "FLYWHEEL_HOME" in deployed.runtime_env["env_vars"]


@pytest.mark.integration
def test_an_application_of_nothing_is_refused() -> None:
    from deployments import application

    with pytest.raises(ConfigError, match="neither"):
        application.build(ServeConfig())


@pytest.mark.integration
def test_the_same_settings_make_an_engine_for_cpu_and_for_gpu() -> None:
    from deployments.llm.build import ray_config

    (base,) = CONFIG.llm
    cpu, gpu = (ray_config(base, gpu=flag) for flag in (False, True))
    assert (cpu.accelerator_config.kind, gpu.accelerator_config.kind) == ("cpu", "gpu")
    environment = cpu.runtime_env["env_vars"]
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("2", "3")
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} & set(gpu.runtime_env["env_vars"])
    assert cpu.get_engine_config().placement_bundles == [{"CPU": 2}]
    assert gpu.get_engine_config().placement_bundles == [{"GPU": 1}]
    assert {**gpu.engine_kwargs, "enforce_eager": True} == cpu.engine_kwargs
    assert cpu.engine_kwargs["max_lora_rank"] == 32


@pytest.mark.integration
def test_vllm_has_the_replicas_limit_of_adapters_and_ray_has_none() -> None:
    from deployments.llm.build import ray_config

    made = ray_config(LLMConfig(model="smol", max_loras=3, max_adapters=5), gpu=False)
    assert (made.engine_kwargs["max_loras"], made.engine_kwargs["max_cpu_loras"]) == (3, 5)
    assert made.multiplex_config() is None


@pytest.mark.integration
def test_a_tool_parser_that_vllm_does_not_have_is_named_with_the_nearest() -> None:
    from deployments.llm.build import ray_config

    made = ray_config(LLMConfig(model="smol", tool_parser="hermes"), gpu=False)
    assert made.engine_kwargs["tool_call_parser"] == "hermes"
    assert made.engine_kwargs["enable_auto_tool_choice"]
    with pytest.raises(ConfigError, match="'hermess'") as caught:
        ray_config(LLMConfig(model="smol", tool_parser="hermess"), gpu=False)
    assert "'hermes'" in str(caught.value.hint)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (f"{TRACE}\nValueError: deep\n\nDuring:\ncluster.errors.ConfigError: No model 'x'.", "No model 'x'."),
        (f"{TRACE}\ntorch.OutOfMemoryError: 3 GiB", "torch.OutOfMemoryError: 3 GiB"),
        ("No node has 4 CPUs.", "No node has 4 CPUs."),
    ],
)  # fmt: skip
def test_what_a_replica_said_is_found_in_serves_message(message: str, reason: str) -> None:
    from deployments import application

    assert application.reason(message) == reason
