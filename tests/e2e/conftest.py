"""End-to-end tests run the real command in a process of its own, with a home of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import environment
from cluster.models import obtain
from cluster.storage import Home

ROOT = Path(__file__).resolve().parents[2]
PORT = 26400
SMALL = (
    "steps=8",
    "checkpoint.every_steps=4",
    "data.train.limit=400",
    "evaluate.max_cases=64",
    "index.documents=160",
    "index.queries=40",
    f"serve.gateway.port={PORT}",
)
"""What makes the demo's recipe small."""


@pytest.fixture
def fresh_home(home: Home, tmp_path: Path) -> Iterator[Home]:
    """An empty FLYWHEEL_HOME but for what other tests have paid for: models, trust in their key, compiled kernels."""
    for name in ("smollm2-135m-instruct", "all-minilm-l6-v2"):
        obtain(name, home)
    for folder in ("models", "keys/trusted", "cache/vllm", "cache/inductor"):
        if (home.root / folder).is_dir():
            shutil.copytree(home.root / folder, tmp_path / "home" / folder)
    yield Home(tmp_path / "home")
    shutil.rmtree(tmp_path / "home", ignore_errors=True)


def clean_environment(home: Home) -> dict[str, str]:
    """The environment of a user who has set FLYWHEEL_HOME and nothing else of ours.

    Ray and others set variables of this process once they are used in it (RAY_AUTH_MODE for one); a command must
    not depend on what tests before it have used.
    """
    ours = environment.library_settings_names()
    theirs = ("RAY_", "VLLM_", "HF_", "MLFLOW_", "SERVE_", "FLYWHEEL_")
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith(theirs)}
    return {**kept, environment.HOME: str(home.root), "PYTHONUNBUFFERED": "1"}


def command(home: Home, *arguments: str) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for one `flywheel` command on `home`."""
    return {
        "args": [sys.executable, "-m", "app", *arguments],
        "cwd": ROOT,
        "env": clean_environment(home),
        "text": True,
        "stdin": subprocess.DEVNULL,
    }
