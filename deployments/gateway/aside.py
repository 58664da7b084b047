"""Reading and writing large bodies beside the event loop, so that the streams of others go on meanwhile.

Threads share one interpreter: one call into C still keeps everybody waiting. Reading the JSON of the largest body
(8 MiB) is one: 1 ms if it is text, 20 if every letter is escaped, 50 to 70 if it is token ids, and 0.6 s for one who
sends nothing but brackets (on a core of a Xeon). What is Python's own work, which is most of the rest, does not.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

SMALL_BYTES = 32 << 10
"""A body up to this size takes less than a change of threads is worth."""
_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """A few threads for such work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="bodies")

    async def run(self, size_bytes: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """`work(*args, **options)`, in a thread unless what it works on is small."""
        if size_bytes <= SMALL_BYTES:
            return work(*args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **options))
