"""The torch device mesh of a `Layout`, and the process groups along its axes."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actors.training.layout import AXES, Layout


def build(layout: Layout, device: torch.device) -> DeviceMesh:
    """All five axes, also those of size 1. Called on every rank, once; the default process group must be up."""
    return init_device_mesh(device.type, layout.sizes, mesh_dim_names=AXES)
