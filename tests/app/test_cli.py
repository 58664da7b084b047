"""The command line as a user meets it: help with examples, exit codes, errors without tracebacks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cluster import environment

VERBS = (
    "doctor",
    "demo",
    "plan",
    "data",
    "train",
    "evaluate",
    "models",
    "keys",
    "signers",
    "bench",
    "serve",
    "index",
    "search",
    "chat",
    "status",
)
NESTED = (
    "data build",
    "data show",
    "models list",
    "models show",
    "models history",
    "models promote",
    "models rollback",
    "models diff",
    "models retire",
    "models pin",
    "models unpin",
    "models verify",
    "models sign",
    "models gc",
    "models export",
    "models import",
    "bench registry",
    "bench memory",
    "bench routing",
    "keys create",
    "keys list",
    "keys revoke",
    "signers init",
    "signers list",
    "signers trust",
    "signers distrust",
    "signers export",
)
ROOT = Path(__file__).resolve().parents[2]


def flywheel(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own, with an empty home."""
    settings = {environment.HOME: str(tmp_path / "home"), "COLUMNS": "200", "NO_COLOR": "1", **variables}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("verb", [*VERBS, *NESTED])
def test_every_verb_has_help_with_an_example(tmp_path: Path, verb: str) -> None:
    done = flywheel(tmp_path, *verb.split(), "--help")
    assert done.returncode == 0
    assert f"flywheel {verb}" in done.stdout
    assert "Example" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part", "code"),
    [
        (("plan", "nosuch"), "There is no recipe 'nosuch'", 2),
        (("plan", "error-triage", "--set", "optimiser.learning_rate=1"), "did you mean 'optimizer'?", 2),
        (("plan", "error-triage", "--set", "steps"), "--set 'steps' is not of the form", 2),
        (("plan", "error-triag"), "There is no recipe 'error-triag'; did you mean 'error-triage'?", 2),
        (("train", "missing.yaml"), "There is no recipe 'missing.yaml'", 2),
        (("models", "show", "weather"), "weather", 1),
        (("models", "history", "weather"), "weather", 1),
        (("data", "show", "weather"), "There is no data version 'weather'", 2),
        (("search", "c", "q", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be reached", 1),
        (("chat", "m", "hello", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9 cannot be reached", 1),
        (("search", "c", "q", "--url", "http://[::1"), "'http://[::1' is no address", 2),
        (("chat", "m", "hello", "--url", "localhost:8000"), "'localhost:8000' is no address", 2),
        (("frobnicate",), "No such command 'frobnicate'", 2),
        (("plan",), "Missing argument 'recipe'", 2),
        (("plann",), "Did you mean 'plan'", 2),
    ],
)
def test_a_users_mistake_is_named_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], part: str, code: int
) -> None:
    done = flywheel(tmp_path, *arguments)
    assert done.returncode == code, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("address", "part"), [("127.0.0.1:1", "cannot be reached"), ("http://127.0.0.1:8265", "dashboard")]
)
def test_a_ray_that_is_not_there_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, part: str
) -> None:
    monkeypatch.setenv(environment.RAY_ADDRESS, address)
    began = time.monotonic()
    promoted = flywheel(tmp_path, "models", "promote", "a", "1", "--reason", "why")
    assert promoted.returncode != 0
    assert part in promoted.stderr
    assert address in promoted.stderr
    assert "Traceback" not in promoted.stderr
    status = flywheel(tmp_path, "status")
    assert status.returncode == 0
    assert part in status.stdout
    assert time.monotonic() - began < 40


def test_json_output_and_json_errors_are_one_object(tmp_path: Path) -> None:
    plan = flywheel(tmp_path, "plan", "error-triage", "--json")
    assert {line["name"] for line in json.loads(plan.stdout)["lines"]} >= {"batch", "data", "disk"}


@pytest.mark.parametrize(
    ("arguments", "key", "codes"),
    [
        # doctor imports vLLM: a quarter of a minute on two cores
        pytest.param(("doctor",), "checks", (0, 1), marks=pytest.mark.integration),
        (("plan", "error-triage"), "lines", (0, 1)),
        (("models", "list"), "models", (0,)),
        (("plan", "nosuch"), "error", (2,)),
        (("plan",), "error", (2,)),
        (("nosuch",), "error", (2,)),
        (("models", "promote", "nosuch", "1"), "error", (2,)),
        (("models", "show", "weather"), "error", (1,)),
        (("models", "history", "weather"), "error", (1,)),
        (("data", "show", "weather"), "error", (2,)),
        (("train", "nosuch"), "error", (2,)),
        (("evaluate", "nosuch"), "error", (2,)),
        (("serve", "nosuch"), "error", (2,)),
        (("demo", "nosuch"), "error", (2,)),
        (("chat", "m"), "error", (2,)),
        (("chat", "m", "hello", "--url", "http://127.0.0.1:9"), "error", (1,)),
        (("search", "c", "q", "--url", "http://127.0.0.1:9"), "error", (1,)),
        (("index", "c", "weather"), "error", (2,)),
    ],
)
def test_json_is_one_object_also_when_it_is_an_error(
    tmp_path: Path, arguments: tuple[str, ...], key: str, codes: tuple[int, ...]
) -> None:
    done = flywheel(tmp_path, *arguments, "--json")
    assert done.returncode in codes, done.stderr
    assert key in json.loads(done.stdout)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("home", "part"),
    [("~nouser/x", "no home folder for FLYWHEEL_HOME=~nouser/x"), ("/etc/passwd/x", "/etc/passwd is not a folder")],
)
@pytest.mark.parametrize("arguments", [("models", "list"), ("search", "c", "q"), ("doctor",)])
def test_a_home_that_cannot_be_used_is_named(tmp_path: Path, arguments: tuple[str, ...], home: str, part: str) -> None:
    done = flywheel(tmp_path, *arguments, FLYWHEEL_HOME=home)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "app", "models", "list", "--json"],
            cwd=ROOT,
            env={**os.environ, environment.HOME: str(tmp_path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: No space left on device."
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", ["--help", "plan error-triage", "models list --json"])
def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path, arguments: str) -> None:
    script = f'{sys.executable} -m app {arguments} | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, environment.HOME: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_ctrl_c_says_stopped_and_exits_130(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app", "chat", "m", "--url", "http://127.0.0.1:9"],
        cwd=ROOT,
        env={**os.environ, environment.HOME: str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asked:
        assert asked.stderr is not None
        assert asked.stderr.read(4) == b"you:"
        asked.send_signal(signal.SIGINT)
        _, rest = asked.communicate(timeout=30)
    assert asked.returncode == 130
    assert rest.decode().strip() == "Stopped."


def test_an_ascii_terminal_gets_a_plan_and_whole_json(tmp_path: Path) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    drawn = flywheel(tmp_path, "plan", "error-triage", **ascii_only)
    assert "Fits." in drawn.stdout
    assert "Traceback" not in drawn.stderr
    lines = [
        json.loads(flywheel(tmp_path, "plan", "error-triage", "--json", **more).stdout) for more in ({}, ascii_only)
    ]
    assert lines[0]["lines"][0] == lines[1]["lines"][0]


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b"{}", b'{"data": 1}'])
def test_a_server_that_is_not_the_gateway_is_named(tmp_path: Path, body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    paths: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for arguments in (("search", "a/b c?", "q"), ("chat", "m", "hello")):
            done = flywheel(tmp_path, *arguments, "--url", url)
            assert done.returncode == 1, done.stdout
            assert f"What answers at {url} is not the gateway" in done.stderr
        server.shutdown()
    assert paths[0] == "/v1/collections/a%2Fb%20c%3F/search"


def test_an_empty_installation_answers_reading_verbs(tmp_path: Path) -> None:
    listed = flywheel(tmp_path, "models", "list")
    assert listed.returncode == 0
    assert "Nothing is registered yet" in listed.stdout


def test_planning_imports_no_heavy_library(tmp_path: Path) -> None:
    script = (
        "import sys; from app.cli.application import cli; from app.pipelines.plan import plan; "
        "from app.recipe import load; from cluster.storage import Home; from pathlib import Path; "
        "plan(load('error-triage'), Home(Path(sys.argv[1])), Path(sys.argv[1])); "
        "print(*sorted({'ray', 'torch', 'vllm', 'transformers', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""
