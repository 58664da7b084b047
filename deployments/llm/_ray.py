"""Private parts of Ray and vLLM that the LLM deployment cannot do without. Nothing else may import them.

ray 2.60.0, vllm 0.32.0. Each line says why, and when it can go.
"""

from typing import Any

# `LLMServer(model_downloader=…)` is public, the class that it wants is not.
# Delete when ray.serve.llm exports LoraModelLoader.
# What a loader returns. Delete together with LoraModelLoader.
from ray.llm._internal.serve.core.configs.llm_config import DiskMultiplexConfig

# What the engine yields when it refuses a request: `ray.serve.llm.openai_api_models.ErrorResponse` is a
# subclass that it never yields. Delete when they are one class.
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse

# Carries the request's headers to the engine; `LLMServer.chat` takes it as its second argument.
from ray.llm._internal.serve.core.protocol import RawRequestInfo

# The engine class that `LLMServer(engine_cls=…)` replaces.
# Delete when the CPU accelerator takes `distributed_executor_backend` from engine_kwargs (see below).
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.llm._internal.serve.utils.lora_serve_utils import LoraModelLoader
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

__all__ = [
    "DiskMultiplexConfig",
    "EngineDeadError",
    "ErrorResponse",
    "LoraModelLoader",
    "OneProcessEngine",
    "RawRequestInfo",
    "VLLMClientError",
    "VLLMEngine",
    "find_tokenization",
    "use_weights",
]


class OneProcessEngine(VLLMEngine):
    """A CPU engine whose worker lives in the engine core's own process.

    Ray forces the "mp" executor on CPU: a third process, and every step's tensors through shared memory. For a
    small model that costs a quarter of the speed. Delete when Ray lets engine_kwargs decide.
    """

    def _prepare_engine_config(self, callback_ctx: Any) -> Any:
        engine_args, frontend_args, engine_config = super()._prepare_engine_config(callback_ctx)
        engine_config.parallel_config.distributed_executor_backend = "uni"
        return engine_args, frontend_args, engine_config


def find_tokenization(engine: Any) -> None:
    """Show a started engine where vLLM keeps what answers `/tokenize` and `/detokenize`.

    vLLM 0.32 calls it `serving_tokenization`, Ray 2.60 looks for `openai_serving_tokenization` and then says that
    the model does not support it. Delete when Ray looks for vLLM's name.
    """
    engine._oai_serving_tokenization = engine._app_state.serving_tokenization


def use_weights(llm_config: Any, path: str) -> None:
    """Point the engine at a folder that was only known on this node, and let Ray download nothing.

    Ray sets the path itself after it has downloaded a model; that step is a task in a fresh process, which
    imports all of vLLM to find that there is nothing to do. Call it inside the replica: it looks at the
    replica's placement group. Delete when `model_source` may be set after the configuration was built.
    """
    llm_config.get_engine_config().hf_model_id = path
    llm_config.get_or_create_callback().ctx.run_init_node = False
