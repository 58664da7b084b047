"""Training on CUDA: the code of the CPU tests with NCCL, one rank for each GPU, and the plan's memory beside CUDA's.

`python -m pytest -m gpu tests/gpu` on a machine with a GPU; what needs two is skipped on one, since NCCL takes no two
ranks on a GPU. The model has heads of 16 and rows of 24 tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed
from transformers import LlamaConfig, LlamaForCausalLM

from actors.training.config import TrainConfig
from actors.training.engine import Place
from actors.training.memory import estimate
from actors.training.shape import read
from app.bench import memory
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


def on_two(**changes: Any) -> TrainConfig:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    axes = changes.pop("parallel", {})
    return mesh_settings(parallel={"workers": {"min": 2, "max": 2}, **axes}, **changes)


AXES = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"tensor": 2},
    {"pipeline": 2},
    {"context": 2},
    {"strategy": "zero2"},
]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_gpus_learn_what_one_learns(
    kind: str, axes: dict[str, Any], base: Path, rows: pa.Table, tmp_path: Path
) -> None:
    adapter = {"kind": kind, "r": 4, "alpha": 8}
    config = on_two(adapter=adapter, parallel=axes)
    alone = spread(1, tmp_path / "one", mesh_settings(adapter=adapter), base, rows)
    found = spread(2, tmp_path / "two", config, base, rows)
    if "pipeline" in axes:  # rank 0 has its stage's weights alone
        found, alone = (Trace(each.losses, each.norms, {}) for each in (found, alone))
    assert_equal(found, alone)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_bf16_on_gpus_is_bf16_on_one(kind: str, strategy: str, base: Path, rows: pa.Table, tmp_path: Path) -> None:
    """The same numbers but for what bf16 rounds in another order."""
    few: dict[str, Any] = {"adapter": {"kind": kind, "r": 4, "alpha": 8}, "precision": "bf16", "steps": 4}
    config = on_two(parallel={"strategy": strategy}, **few)
    alone = spread(1, tmp_path / "one", mesh_settings(**few), base, rows)
    found = spread(2, tmp_path / "two", config, base, rows)
    assert found.losses == pytest.approx(alone.losses, rel=1e-2)
    assert found.norms == pytest.approx(alone.norms, rel=5e-2)


def taken(rank: int, world_size: int, rendezvous: str, results: str, case: memory.Case, base: Path) -> None:
    """Bytes at the peak of rank 0 of `case`, as CUDA's allocator counts them."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    place = Place(rank, world_size, torch.device("cuda", rank))
    peak = memory.work(place, case.config(), base, LENGTH, 3)
    if rank == 0:
        Path(results).write_text(str(peak))
    torch.distributed.destroy_process_group()


LENGTH = 512
CASES = [
    memory.Case("ddp", 1),
    memory.Case("ddp", 1, precision="bf16"),
    memory.Case("ddp", 1, adapter="lora", precision="bf16"),
    memory.Case("ddp", 1, adapter="lora", precision="bf16", checkpointing=True),
    memory.Case("ddp"),
    memory.Case("fsdp"),
    memory.Case("fsdp", adapter="lora", precision="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gpus_memory_is_what_the_plan_says(case: memory.Case, tmp_path: Path) -> None:
    if torch.cuda.device_count() < case.ranks:
        pytest.skip("needs two GPUs")
    base = memory.model(tmp_path / "base")
    rendezvous, results = tmp_path / "rendezvous", tmp_path / "peak"
    args = (case.ranks, str(rendezvous), str(results), case, base)
    torch.multiprocessing.spawn(taken, args, nprocs=case.ranks)
    said = estimate(case.config(), read(base), length=LENGTH, on_gpu=True).peak
    assert int(results.read_text()) == pytest.approx(said, rel=memory.TOLERANCE)
