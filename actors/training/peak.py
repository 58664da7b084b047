"""The most memory that a piece of work takes in this process, beyond what it had before.

On CUDA the allocator counts. On a CPU it is the resident set, which means something only if freed memory goes back
to the system at once: start the process with `ENV`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

ENV = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""glibc keeps freed blocks by default, and DTensors and buckets of many sizes leave holes of gigabytes."""


@dataclass
class Peak:
    """Bytes; filled when the block ends."""

    bytes: int = 0


@contextmanager
def measured(device: torch.device) -> Iterator[Peak]:
    """The peak inside the block, above where it began."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel forgets its high-water mark
    before = _status("VmRSS")
    yield peak
    peak.bytes = _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
