"""The demo at a smaller size, against real parts: what it prints must agree with what it left behind."""

import json
import signal
import subprocess
import time

import pytest

from actors.registry.reader import read_state
from cluster.storage import PARTIAL_PREFIX, Home
from tests.e2e.conftest import SMALL, command
from tests.processes import all_gone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SETTINGS = [word for assignment in SMALL for word in ("--set", assignment)]


def test_one_turn_of_the_wheel(fresh_home: Home) -> None:
    done = subprocess.run(**command(fresh_home, "demo", "--json", *SETTINGS), capture_output=True, timeout=840)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])

    assert list(summary["stages"]) == [
        "models", "data", "train", "evaluate", "register", "serve", "index", "search",
    ]  # fmt: skip
    assert "[3/8] train" in done.stderr
    assert "8/8 steps" in done.stderr
    assert "tokens/s" in done.stderr

    assert summary["train"]["steps"] == 8
    assert summary["train"]["loss_last"] < summary["train"]["loss_first"]

    scores = summary["evaluation"]["scores"]
    assert set(scores) == {"base", "adapter"}
    for score in scores.values():
        assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
        assert score["n"] == 64

    # The alias moves if and only if the gate was passed, and the log says the same as the summary.
    passed = summary["evaluation"]["verdict"]["passed"]
    assert (summary["alias"] == "error-triage@champion") is passed
    state = read_state(fresh_home)
    assert state.split("error-triage", "champion") == ({1: 1.0} if passed else None)
    assert state.stages["error-triage/1"] == ("promoted" if passed else "blocked")
    assert state.run_status(summary["run"]) == "completed"
    chain = [line.split(":")[0] for line in summary["lineage"]]
    made = ["data", "data", "run", "checkpoint", "evaluation", "version", "gate", *(["alias"] if passed else [])]
    assert [kind for kind in chain if kind not in ("replica", "traffic")] == made
    assert "replica" in chain, "the engine held it, and said so"

    models = {answer["model"] for answer in summary["answers"]}
    assert len(models) == 2
    assert all(answer["same"] for answer in summary["answers"]), "streamed and whole answers differ"
    assert {answer["version"] for answer in summary["answers"]} >= {"error-triage/1"}

    assert summary["index"]["documents"] == 160
    metrics = summary["retrieval"]["metrics"]
    assert metrics["recall@1"]["value"] <= metrics["recall@10"]["value"]
    # MiniLM finds most functions by their docstring in so small a pool; chance would be 10 in 160.
    assert metrics["recall@10"]["value"] > 0.5

    assert all_gone(fresh_home.root, within_s=20) == {}
    assert list(fresh_home.root.rglob(f"{PARTIAL_PREFIX}*")) == []


@pytest.mark.chaos
def test_ctrl_c_in_training_leaves_nothing_running_and_nothing_half_registered(fresh_home: Home) -> None:
    settings = [*SETTINGS, "--set", "steps=400"]
    demo = subprocess.Popen(**command(fresh_home, "demo", *settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert demo.stderr is not None
    lines: list[str] = []
    for line in demo.stderr:
        lines.append(line)
        if "/400 steps" in line:
            break
    else:
        pytest.fail("training never reported a step:\n" + "".join(lines[-30:]))
    began = time.monotonic()
    demo.send_signal(signal.SIGINT)
    _, rest = demo.communicate(timeout=90)
    assert demo.returncode == 130, rest[-3000:]
    assert "Traceback" not in rest
    assert time.monotonic() - began < 60

    assert all_gone(fresh_home.root, within_s=20) == {}
    state = read_state(fresh_home)
    assert state.versions == {}
    (run,) = [event.fact for event in state.entries.values() if event.fact.event == "run"]
    assert state.run_status(run.id) == "stopped"  # type: ignore[union-attr]
    assert list(fresh_home.root.rglob(f"{PARTIAL_PREFIX}*")) == []
