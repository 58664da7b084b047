"""vLLM's two tables, name and memory, are changed together; what vLLM itself does: test_serve_adapters.py."""

from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.llm._ray import EngineAdapters


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int) -> int:
        self.value += by
        return self.value


class Client:
    """The engine core, seen from the frontend: memory by number, and a fault that comes after it was taken."""

    def __init__(self) -> None:
        self.memory: set[int] = set()
        self.fault: Exception | None = None
        self.output_processor = SimpleNamespace(request_states={"r": SimpleNamespace(lora_name="a@1")})

    async def add_lora(self, request: LoRARequest) -> bool:
        self.memory.add(request.lora_int_id)
        if self.fault:
            raise self.fault
        return True

    async def remove_lora(self, number: int) -> bool:
        self.memory.discard(number)
        return True

    async def list_loras(self) -> set[int]:
        return self.memory


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def adapters(client: Client) -> EngineAdapters:
    models = SimpleNamespace(lora_requests={}, lora_id_counter=Counter())
    return EngineAdapters(SimpleNamespace(_engine_client=client, _oai_models=models))


async def test_removing_takes_the_name_and_the_memory(client: Client, adapters: EngineAdapters) -> None:
    for name in ("a@1", "b@1"):
        await adapters.load(name, f"/cache/{name}")
    assert await adapters.held() == {"a@1", "b@1"}
    await adapters.remove("a@1")
    assert (await adapters.held(), client.memory) == ({"b@1"}, {2})
    await adapters.load("a@1", "/cache/a@1")
    assert client.memory == {2, 3}


async def test_a_load_that_fails_half_way_leaves_nothing(client: Client, adapters: EngineAdapters) -> None:
    client.fault = Exception("Call to add_lora method failed: shapes differ")
    with pytest.raises(ValueError, match="shapes differ"):
        await adapters.load("a@1", "/cache/a")
    assert await adapters.held() == set()


async def test_a_dead_engine_is_not_the_adapters_fault(client: Client, adapters: EngineAdapters) -> None:
    client.fault = EngineDeadError()
    with pytest.raises(EngineDeadError):
        await adapters.load("a@1", "/cache/a")


async def test_a_slot_that_nobody_knows_shows(client: Client, adapters: EngineAdapters) -> None:
    client.memory.add(7)
    assert await adapters.held() == {"#7"}


def test_it_knows_which_adapters_requests_are_on(adapters: EngineAdapters) -> None:
    assert adapters.uses("a@1")
    assert not adapters.uses("b@1")
