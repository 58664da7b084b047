"""The native engine on CUDA: the code of the CPU tests with NCCL, one rank for each GPU here, one at least.

`python -m pytest -m gpu tests/gpu` on a machine with a GPU. The model has heads of 16 and rows of 24 tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed
from transformers import LlamaConfig, LlamaForCausalLM

from actors.training.engine import Place
from tests.actors.training.equivalence import Trace, assert_equal, follow, mesh_settings
from tests.actors.training.small import HERE, VOCABULARY, packed_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def exact() -> Iterator[None]:
    """TF32 rounds to 10 bits, which is not what is tested."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("llama-cuda")
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **heads)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    return packed_rows(13, length=24, seed=7)


def work(rank: int, world_size: int, rendezvous: str, results: str, *args: Any) -> None:
    """One rank on its own GPU, in a process of its own."""
    torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("highest")
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    trace, _ = follow(Place(rank, world_size, torch.device("cuda", rank)), *args)
    if rank == 0:
        torch.save((trace.losses, trace.norms, trace.weights), results)
    torch.distributed.destroy_process_group()


def spread(world_size: int, tmp_path: Path, *args: Any) -> Trace:
    tmp_path.mkdir()
    results = str(tmp_path / "trace")
    torch.multiprocessing.spawn(work, (world_size, str(tmp_path / "rendezvous"), results, *args), nprocs=world_size)
    return Trace(*torch.load(results, weights_only=False))


@pytest.mark.parametrize("kind", ["lora", "none"])
@pytest.mark.parametrize("steps", [{}, {"activation_checkpointing": True, "compile": True}], ids=["plain", "compiled"])
def test_a_gpu_learns_what_a_cpu_learns(
    kind: str, steps: dict[str, Any], base: Path, rows: pa.Table, exact: None
) -> None:
    config = mesh_settings(adapter={"kind": kind, "r": 4, "alpha": 8}, **steps)
    found, _ = follow(Place(0, 1, torch.device("cuda", 0)), config, base, rows)
    alone, _ = follow(HERE, mesh_settings(adapter={"kind": kind, "r": 4, "alpha": 8}), base, rows)
    assert_equal(found, alone, rel=1e-4)


@pytest.mark.parametrize("axes", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"tensor": 2}], ids=str)
def test_gpus_learn_what_one_learns(axes: dict[str, Any], base: Path, rows: pa.Table, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    adapter = {"kind": "none"}
    alone = spread(1, tmp_path / "one", mesh_settings(adapter=adapter), base, rows)
    config = mesh_settings(adapter=adapter, parallel={"workers": {"min": 2, "max": 2}, **axes})
    assert_equal(spread(2, tmp_path / "two", config, base, rows), alone)
