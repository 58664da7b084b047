"""Private parts of Ray and vLLM that the LLM deployment cannot do without. Nothing else may import them.

ray 2.60.0, vllm 0.32.0. Each line says why, and when it can go.
"""

from typing import Any

# What the engine yields when it refuses a request: `ray.serve.llm.openai_api_models.ErrorResponse` is a
# subclass that it never yields. Delete when they are one class.
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse

# Carries the request's headers to the engine; its methods take it as their second argument.
from ray.llm._internal.serve.core.protocol import RawRequestInfo

# The engine class that `LLMServer(engine_cls=…)` replaces.
# Delete when the CPU accelerator takes `distributed_executor_backend` from engine_kwargs (see below).
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

__all__ = [
    "EngineAdapters",
    "EngineDeadError",
    "ErrorResponse",
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


class EngineAdapters:
    """The adapters in vLLM's name table (frontend) and in its memory (engine core), always both (`resident.Engine`).

    vLLM's `unload_lora_adapter` only forgets the name (vllm#54839). `add_lora`, `remove_lora` and `lora_requests` are
    public; that Ray's engine gives neither of the two objects is why this is here. Delete when unloading frees memory
    and Ray has a method for it. Nothing is pinned inside vLLM: it also pins the slot of the batch, and with all slots
    pinned the next adapter kills the engine; as long as nobody loads more than `max_cpu_loras`, it evicts nothing.
    """

    def __init__(self, engine: Any) -> None:
        self._client = engine._engine_client
        self._models = engine._oai_models

    async def load(self, name: str, folder: str) -> None:
        """Into memory, then into the table. `ValueError` with vLLM's reason if it refuses."""
        request = LoRARequest(name, self._models.lora_id_counter.inc(1), folder)
        try:
            await self._client.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:
            # It may have failed half way, with its memory taken.
            await self._client.remove_lora(request.lora_int_id)
            raise ValueError(str(error)) from error
        self._models.lora_requests[name] = request

    async def remove(self, name: str) -> None:
        """Out of the table first, so that no request finds what is about to go."""
        request = self._models.lora_requests.pop(name, None)
        if request is not None:
            await self._client.remove_lora(request.lora_int_id)

    def uses(self, name: str) -> bool:
        """Whether a request with it is anywhere in the engine."""
        return any(state.lora_name == name for state in self._client.output_processor.request_states.values())

    async def held(self) -> set[str]:
        """What vLLM itself says: names whose memory is there. An id without a name is given as `#id`."""
        names = {request.lora_int_id: name for name, request in self._models.lora_requests.items()}
        return {names.get(number, f"#{number}") for number in await self._client.list_loras()}
