"""Which errors another try would only repeat."""

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.train import ControllerError, FailureConfig, WorkerGroupError

from actors.training.failures import Repeats, fingerprint, is_collateral, is_mistake
from actors.training.ray_internals import FailureDecision, FailurePolicy
from cluster.errors import ConfigError, DependencyError


def of_torch(work: str) -> RuntimeError:
    """The real error of a piece of torch."""
    try:
        eval(work, {"torch": torch})
    except RuntimeError as error:
        return error
    raise AssertionError(work)


MISTAKES = [
    TypeError("unexpected argument"),
    ValueError("too many values"),
    KeyError("labels"),
    IndexError("list index out of range"),
    AttributeError("no attribute"),
    NameError("x"),
    AssertionError(),
    ModuleNotFoundError("No module named 'x'"),
    ZeroDivisionError(),
    NotImplementedError(),
    RecursionError(),
    UnicodeDecodeError("utf-8", b"", 0, 1, "bad"),
    FileNotFoundError(2, "No such file"),
    PermissionError(13, "Permission denied"),
    ConfigError("a value"),
    of_torch("torch.zeros(2, 3) @ torch.zeros(2, 3)"),
    of_torch("torch.zeros(2) + torch.zeros(3)"),
    of_torch("torch.zeros(4).view(3)"),
    of_torch("torch.zeros(2, dtype=torch.int64) @ torch.zeros(2)"),
    of_torch("torch.zeros(2).backward()"),
    of_torch("torch.nn.Linear(2, 2).load_state_dict({})"),
    RayTaskError("f", "traceback", TypeError("x")).as_instanceof_cause(),
]
MAY_PASS = [
    MemoryError(),
    ConnectionResetError(104, "Connection reset by peer"),
    TimeoutError("timed out"),
    OSError(28, "No space left on device"),
    OSError(5, "Input/output error"),
    RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4222"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered; shape"),
    RuntimeError("something that nobody has seen before"),
    ValueError("Default process group has not been initialized"),
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.distributed.DistNetworkError("The client socket has timed out"),
    torch.distributed.DistBackendError("shape"),
    ActorDiedError(),
    DependencyError("The registry does not answer."),
    Exception("unknown"),
]


def name(error: BaseException) -> str:
    return f"{type(error).__name__}-{str(error)[:30]}"


@pytest.mark.parametrize("error", MISTAKES, ids=name)
def test_a_mistake_is_not_tried_again(error: BaseException) -> None:
    assert is_mistake(error)


@pytest.mark.parametrize("error", MAY_PASS, ids=name)
def test_what_may_pass_is_tried_again(error: BaseException) -> None:
    assert not is_mistake(error)


def test_the_survivors_errors_are_known_as_such() -> None:
    assert is_collateral(RuntimeError("[gloo] Read error [127.0.0.1]:9: Connection reset by peer"))
    assert is_collateral(torch.distributed.DistBackendError("x"))
    assert not is_collateral(RuntimeError("shape '[3]' is invalid for input of size 4"))
    assert not is_collateral(KeyError("gloo"))


def test_what_comes_again_at_the_same_step_is_known() -> None:
    repeats = Repeats()
    mark = fingerprint(RuntimeError("at 0x7f00, port :40123"))
    assert mark == fingerprint(RuntimeError("at 0x7fff, port :51234"))
    assert not repeats.again(mark, 5)
    assert not repeats.again(mark, 6)
    assert not repeats.again("another", 5)
    assert repeats.again(mark, 5)


def test_a_kill_for_memory_in_a_start_is_of_the_same_budget_as_one_later() -> None:
    """Ray's own policy ends the run at the first one."""
    killed = OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")
    policy = FailurePolicy(FailureConfig(max_failures=2))
    decisions = [
        policy.make_decision(error)
        for error in (ControllerError(killed), WorkerGroupError("dead", {0: killed}), ControllerError(killed))
    ]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RETRY, FailureDecision.RAISE]
    assert policy.make_decision(ControllerError(ValueError("a bug"))) == FailureDecision.RAISE
