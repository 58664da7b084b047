"""The folder of HAProxy's sockets: nobody else's, and no grave of clusters that have ended."""

import socket
from pathlib import Path

import pytest

from cluster import environment, haproxy
from cluster.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "h"
    monkeypatch.setenv("RAY_SERVE_HAPROXY_SOCKET_PATH", str(made / "admin.sock"))
    assert environment.haproxy_folder() == made
    return made


def cluster(folder: Path, name: str) -> socket.socket:
    """The admin socket of a HAProxy that runs."""
    (folder / name).mkdir()
    (folder / name / "haproxy.cfg").touch()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / name / "admin.sock"))
    listening.listen()
    return listening


def test_what_ended_clusters_have_left_is_cleared_and_nothing_else(folder: Path) -> None:
    haproxy.prepare_folder()
    cluster(folder, "ended").close()
    (folder / "begins").mkdir()
    with cluster(folder, "runs"):
        haproxy.prepare_folder()
        assert {path.name for path in folder.iterdir()} == {"runs", "begins"}


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        haproxy.prepare_folder()
