"""Would another try help? Which errors of a worker are mistakes, and which ones may pass. Pure.

    error                                                               another try
    FlywheelError                                                       as its `retryable` says
    text of a broken connection, gloo, NCCL, CUDA, a timeout            may help
    MemoryError, torch's OutOfMemoryError                               may help (other places, other neighbours)
    OSError: network, timeout, full or failing disk                     may help
    OSError: file not there, no permission, is (no) folder              will not
    RuntimeError: shapes, dtypes, devices that do not fit together      will not
    RuntimeError: anything else                                         may help
    TypeError, ValueError, LookupError, AttributeError, NameError,
    AssertionError, ImportError, ArithmeticError, NotImplementedError,
    RecursionError, SyntaxError                                         will not
    Ray's errors, and every class that is not named here                may help

Whatever its class, an error that comes again at the same step after a restart is a mistake: `Repeats` says so.
Classes are told by their names along the MRO, so that neither torch nor Ray need be imported.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from cluster.errors import FlywheelError

COLLATERAL: Final = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "read error",
    "write error",
    "gloo",
    "nccl",
    "barrier",
    "process group",
    "timed out",
    "socket",
)
"""What the survivors of a dead worker see: the consequence, not the cause."""

_DEVICE: Final = ("cuda", "cudnn", "cublas", "hip error", "device-side", "out of memory", "allocate memory")
_MAY_PASS: Final = frozenset(
    {
        "MemoryError",
        "OutOfMemoryError",
        "ConnectionError",
        "TimeoutError",
        "InterruptedError",
        "BlockingIOError",
        "DistError",
        "AcceleratorError",
        "RayError",
        "RayTrainError",
    }
)
_MISTAKES: Final = frozenset(
    {
        "FileNotFoundError",
        "PermissionError",
        "IsADirectoryError",
        "NotADirectoryError",
        "FileExistsError",
        "TypeError",
        "ValueError",
        "LookupError",
        "AttributeError",
        "NameError",
        "AssertionError",
        "ImportError",
        "ArithmeticError",
        "NotImplementedError",
        "RecursionError",
        "SyntaxError",
    }
)
_SHAPES: Final = re.compile(
    r"shape|size of tensor|sizes? (of|must)|size mismatch|must match|dimension|dtype|same type|expected (scalar|all)"
    r"|invalid for input|index .* out of (range|bounds)|does not require grad|same device|view size|not implemented for"
    r"|error\(s\) in loading state_dict",
    re.IGNORECASE,
)


def is_mistake(error: BaseException) -> bool:
    """Whether another try would only repeat `error`, by the table above."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # Ray's wrapping of what a task raised
        return is_mistake(cause)
    if isinstance(error, FlywheelError):
        return not error.retryable
    if is_collateral(error):
        return False
    names = [kind.__name__ for kind in type(error).__mro__]
    for name in names:  # the most special class decides
        if name in _MAY_PASS:
            return False
        if name in _MISTAKES:
            return True
    text = str(error).lower()
    if "RuntimeError" in names and not any(sign in text for sign in _DEVICE):
        return bool(_SHAPES.search(text))
    return False


def is_collateral(error: BaseException) -> bool:
    """Whether `error` reads like what the peers of a dead worker see."""
    if isinstance(error, FlywheelError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names & {"RuntimeError", "OSError", "DistError", "ValueError"}:
        return False
    text = f"{type(error).__name__} {error}".lower()
    return "DistError" in names or "ConnectionError" in names or any(sign in text for sign in COLLATERAL)


def fingerprint(error: BaseException) -> str:
    """What two errors have in common when they are the same one: class and text, whatever addresses it holds."""
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+|pid[ =]?[0-9]+|:[0-9]{4,5}', '', str(error))}"


@dataclass
class Repeats:
    """Remembers what ended earlier attempts, to know an error that comes again."""

    _seen: set[tuple[str, int]] = field(default_factory=set)

    def again(self, mark: str, step: int) -> bool:
        """Whether `mark` (see `fingerprint`) has ended an attempt at `step` before; from now on it has."""
        known = (mark, step) in self._seen
        self._seen.add((mark, step))
        return known
