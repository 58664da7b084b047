"""The engine on DeepSpeed's ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054), stages 1, 2 and 3.

Stage 1 spreads the optimizer's state over the data ranks, stage 2 the gradients too, stage 3 the weights too, frozen
ones included. DeepSpeed owns the backward pass and the step; it keeps an fp32 master copy of what learns, also where
the weights are fp32 already. AdamW is torch's, so nothing has to be compiled.

What a checkpoint needs is gathered and given back through DeepSpeed's functions for whole tensors, one parameter at
a time (docs/decisions/0010-one-form-of-checkpoint.md).

Written for DeepSpeed 0.19.8. Beside its documented functions it uses `deepspeed.ops.__compatible_ops__`,
`groups._release_process_group_references` and the optimizers' flat partitions: what to look at after an upgrade.
"""

import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.tensor import DTensor, Shard

from actors.training import adapter, mesh, objectives, optimizer
from actors.training.batching import MicroBatch
from actors.training.config import TrainConfig
from actors.training.engine import Place, StepResult
from actors.training.layout import Layout

_BUCKET = 5_000_000
"""Elements that are reduced or gathered at once. DeepSpeed's default of 5e8 holds 1.9 GiB for the smallest model."""


class ZeroEngine:
    """ZeRO-1, -2 and -3, with the optimizer on the device or on the CPU. See `engine.Engine`."""

    def __init__(self, config: TrainConfig, base: Path, base_name: str, place: Place, layout: Layout) -> None:
        self._deepspeed = _deepspeed(place)
        self._alone = not torch.distributed.is_initialized()
        if self._alone:  # DeepSpeed asks for a process group of one, too
            backend = "nccl" if place.device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(
                backend, store=torch.distributed.HashStore(), rank=0, world_size=place.world_size
            )
        self._deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
        self._mesh = mesh.build(layout, place.device)["shard"]
        self._data = layout.data
        self._stage = int(config.parallel.strategy.removeprefix("zero"))
        self.model = adapter.trainable(config, base, base_name, place.device)
        self._learning = adapter.learning(self.model)
        if config.activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.compile:
            for layer in self.model.get_decoder().layers:
                layer.compile()
        # DeepSpeed makes its master copies from weights that it has rounded. Those that this changes are kept.
        fine = {name: part.detach().clone() for name, part in self._learning.items() if _rounds(config, part)}
        self._adamw = optimizer.build(config.optimizer, self._learning.values())
        # Stage 1 in bf16 makes its moments by a step without gradients, which must not decay the weights.
        optimizer.set_learning_rate(self._adamw, 0.0)
        self._linear = torch.nn.functional.linear  # stage 3 puts another in its place, for the whole process
        with redirect_stdout(StringIO()):
            self._engine, self._zero, *_ = self._deepspeed.initialize(
                model=objectives.build(config, self.model),
                optimizer=self._adamw,
                config=_settings(config, self._stage, layout),
                dist_init_required=False,
            )
        self._engine.train()
        self._begin()
        self._put({f"weights/{name}": part for name, part in fine.items()})

    def step(self, micro: Sequence[MicroBatch], *, loss_tokens: float, learning_rate: float) -> StepResult:
        optimizer.set_learning_rate(self._adamw, learning_rate)
        # DeepSpeed averages over the data ranks; times their number makes it the sum.
        scale = self._data / loss_tokens
        summed = 0.0
        for index, batch in enumerate(micro):
            self._engine.set_gradient_accumulation_boundary(index == len(micro) - 1)
            loss = self._engine(batch.input_ids, batch.labels, batch.position_ids)
            self._engine.backward(loss * scale, scale_wrt_gas=False)
            summed += loss.item()
        self._engine.step()
        # A gradient that is not finite makes DeepSpeed leave out the step.
        norm = float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.inf
        return StepResult(summed, norm)

    def state(self) -> dict[str, torch.Tensor]:
        """Each rank keeps a share of rows of every tensor, as FSDP does, not the whole."""
        utils = self._deepspeed.utils
        found = {f"weights/{n}": self._share(utils.safe_get_full_fp32_param(p)) for n, p in self._learning.items()}
        for moment in optimizer.MOMENTS:
            found |= {
                f"{moment}/{name}": self._share(utils.safe_get_full_optimizer_state(part, moment))
                for name, part in self._learning.items()
            }
        return found

    def load(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        self._put(state)
        for flat in self._partitions():
            self._adamw.state[flat]["step"].fill_(step)

    def close(self) -> None:
        self._engine.destroy()
        torch.nn.functional.linear = self._linear
        # The process's next engine may have another process group.
        self._deepspeed.utils.groups._release_process_group_references()
        if self._alone:
            torch.distributed.destroy_process_group()

    def _partitions(self) -> list[torch.Tensor]:
        """The flat fp32 tensors that AdamW works on: this rank's part of all that learns."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self._zero, name):  # stage 3; stages 1 and 2; stage 1 in bf16
                return list(getattr(self._zero, name))
        raise AttributeError(f"{type(self._zero).__name__} has no partitions of a known name")

    def _begin(self) -> None:
        """Make the moments, zero, so that there is a state to save or to fill before the first step."""
        for flat in self._partitions():
            made = self._adamw.state[flat]
            made.setdefault("step", torch.zeros((), dtype=torch.float32))
            for moment in optimizer.MOMENTS:
                made.setdefault(moment, torch.zeros_like(flat, requires_grad=False))
            for tensor in made.values():
                tensor.zero_()
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _put(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set master copies, moments and the weights that the model computes with from tensors of `state`."""
        utils = self._deepspeed.utils
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            part = self._learning[name]
            whole = mesh.whole(tensor)
            if self._stage == 3:
                piece = self._piece(part, whole)
                if kind == "weights":
                    utils.safe_set_local_fp32_param(part, piece)
                    part.ds_tensor.data.copy_(piece)
                else:
                    utils.safe_set_local_optimizer_state(part, piece, kind)
            elif kind == "weights":
                utils.safe_set_full_fp32_param(part, whole)
            else:
                utils.safe_set_full_optimizer_state(part, whole, kind)
        if state and self._stage < 3:
            self._zero.update_lp_params()

    def _share(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of `whole`, as a DTensor sharded over the data ranks in its first dimension."""
        rows = -(-whole.shape[0] // self._data)
        mine = whole.narrow(0, *_range(whole.shape[0], rows, self._mesh.get_local_rank())).clone()
        return DTensor.from_local(
            mine, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _piece(self, part: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Stage 3: this rank's piece of a flattened parameter. The last piece is padded to the others' length."""
        length = part.ds_tensor.numel()
        start, count = _range(whole.numel(), length, self._mesh.get_local_rank())
        return torch.nn.functional.pad(whole.flatten().narrow(0, start, count), (0, length - count))


def _range(total: int, size: int, index: int) -> tuple[int, int]:
    """Start and length of the part `index` when `total` is cut into parts of `size`."""
    start = min(total, index * size)
    return start, min(size, total - start)


def _rounds(config: TrainConfig, part: torch.Tensor) -> bool:
    return config.precision == "bf16" and not torch.equal(part, part.to(torch.bfloat16).to(part.dtype))


def _deepspeed(place: Place) -> Any:
    """The package, imported so that it takes our device, compiles nothing and does not write to stdout."""
    os.environ["DS_ACCELERATOR"] = place.device.type
    if place.device.index is not None:
        os.environ["LOCAL_RANK"] = str(place.device.index)
    with redirect_stdout(StringIO()):
        import deepspeed
        import deepspeed.ops
    # It calls these in every step, under their names of before torch 2.13.
    warnings.filterwarnings(
        "ignore", r"`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning
    )
    # An all-reduce through shared memory for inference, which it would otherwise compile at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    log = logging.getLogger("DeepSpeed")
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.propagate = True
    return deepspeed


def _settings(config: TrainConfig, stage: int, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's own configuration. What its defaults would do otherwise is said where it is not plain."""
    sizes = config.optimizer
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": _BUCKET,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,  # by default the weights of a small model stay gathered
        }
    if config.parallel.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "gradient_accumulation_steps": sizes.global_batch_size // (sizes.micro_batch_size * layout.data),
        "gradient_clipping": sizes.max_grad_norm,  # by default 1.0
        "bf16": {"enabled": config.precision == "bf16"},
        # In bf16 it would add up micro-batches and ranks in bf16.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
