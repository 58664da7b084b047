"""End-to-end tests run the real command in a process of its own, with a home of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import environment
from cluster.models import obtain
from cluster.storage import Home

ROOT = Path(__file__).resolve().parents[2]
PORT = 18431


@pytest.fixture
def fresh_home(home: Home, tmp_path: Path) -> Iterator[Home]:
    """An empty FLYWHEEL_HOME but for the models, whose conversion other tests have paid for."""
    for name in ("smollm2-135m-instruct", "all-minilm-l6-v2"):
        obtain(name, home)
    shutil.copytree(home.models, tmp_path / "home" / "models")
    yield Home(tmp_path / "home")
    shutil.rmtree(tmp_path / "home", ignore_errors=True)


def command(home: Home, *arguments: str) -> dict[str, object]:
    """Arguments of `subprocess.Popen` for one `flywheel` command on `home`."""
    kept = {name: value for name, value in os.environ.items() if name not in environment.library_settings(home.root)}
    for name in (environment.RAY_ADDRESS, "RAY_AUTH_TOKEN_PATH", *environment.library_settings_names()):
        kept.pop(name, None)
    return {
        "args": [sys.executable, "-m", "app", *arguments],
        "cwd": ROOT,
        "env": {**kept, environment.HOME: str(home.root), "PYTHONUNBUFFERED": "1"},
        "text": True,
        "stdin": subprocess.DEVNULL,
    }
