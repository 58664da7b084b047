"""The torch device mesh of a `Layout`, the process groups along its axes, and the parts of tensors spread over it."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from actors.training.layout import AXES, Layout


def build(layout: Layout, device: torch.device) -> DeviceMesh:
    """All five axes, also those of size 1. Called on every rank, once; the default process group must be up."""
    return init_device_mesh(device.type, layout.sizes, mesh_dim_names=AXES)


def replicas(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that hold equal weights and see different tokens where nothing is sharded (ddp)."""
    return _joined(mesh, "replicate", "context")


def shards(mesh: DeviceMesh, strategy: str) -> DeviceMesh:
    """(shard,) or (replicate, shard): the ranks that see different tokens, as `fully_shard` takes them.

    Context ranks see different parts of the same rows. They hold a shard each, as data ranks do: whoever asks for
    shards asks for less memory, and long sequences are where memory is short. Under ddp each shard is the whole.
    """
    if strategy == "ddp":
        return DeviceMesh._concatenate([replicas(mesh), mesh["shard"]])
    parts = _joined(mesh, "shard", "context")
    return parts if mesh["replicate"].size() == 1 else DeviceMesh._concatenate([mesh["replicate"], parts])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`; all of it if it is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`, on every rank. Collective if it is spread."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _joined(mesh: DeviceMesh, first: str, second: str) -> DeviceMesh:
    """Two axes as one. `_flatten` and `_concatenate` are private in torch 2.13; delete this when they are not."""
    return mesh[first] if mesh[second].size() == 1 else mesh[first, second]._flatten(f"{first}_{second}")
