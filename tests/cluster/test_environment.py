"""Where databases are: a setting that is read in one place, and reaches no worker's environment."""

import json
import subprocess
from pathlib import Path

import pytest

from cluster import environment
from cluster.errors import ConfigError

SCRIPT = Path(environment.__file__).with_name("haproxy.sh")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("FLYWHEEL_DATABASE_URI", environment.database_uri),
        ("FLYWHEEL_TRACKING_URI", environment.tracking_uri),
    ],
)
def test_the_uri_of_a_database(name: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(read)
    assert read() is None
    monkeypatch.setenv(name, " ")
    assert read() is None
    monkeypatch.setenv(name, "postgresql://ada:s3cret@db/x ")
    assert read() == "postgresql://ada:s3cret@db/x"
    # Ray shows a worker's environment in its dashboard.
    assert "s3cret" not in str(environment.for_workers())
    monkeypatch.setenv(name, "sqlite:///here.db")
    with pytest.raises(ConfigError, match=f"{name}=sqlite:///here.db is not an absolute path"):
        read()


RAYS = """\
global
    stats socket /run/x/admin.sock mode 666 level admin expose-fd listeners
defaults
    option splice-request
    option splice-response
    errorfile 502 /run/x/500.http
    errorfile 503 /run/x/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \\'%[path]\\' not found."
backend http-app
    server one 127.0.0.1:30000 check
listen stats
  bind *:8404
  stats enable
"""
"""Lines of a configuration as Ray 2.60 writes it. That it still does is seen by test_serve_application.py."""


def test_haproxys_configuration_is_mended_and_haproxy_gets_its_words(tmp_path: Path) -> None:
    (tmp_path / "haproxy.cfg").write_text(RAYS)
    words = [str(SCRIPT), "-db", "-f", str(tmp_path / "haproxy.cfg"), "-sf", "12"]
    environ = {"PATH": "/usr/bin:/bin", "FLYWHEEL_HAPROXY": "/bin/echo"}
    said = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout
    assert said.split() == words[1:]
    mended = (tmp_path / "haproxy.cfg").read_text()
    binds = [line.split()[1] for line in mended.splitlines() if line.split()[0] == "bind"]
    assert binds == [f"unix@{tmp_path}/prometheus.sock", "127.0.0.1:8000", f"unix@{tmp_path}/stats.sock"]
    assert "mode 666" not in mended
    assert "splice" not in mended
    assert "status 503 content-type application/json" in mended
    assert {line.split()[2] for line in mended.splitlines() if "errorfile" in line} == {f"{tmp_path}/away.http"}
    head, _, body = (tmp_path / "away.http").read_text().partition("\n\n")
    assert "Retry-After: 5" in head
    assert f"Content-Length: {len(body)}" in head
    assert json.loads(body)["error"]["code"] == "overloaded"
    before = mended
    subprocess.run(words, env=environ, check=True, capture_output=True)
    assert (tmp_path / "haproxy.cfg").read_text() == before  # a reload that Ray has written nothing for


def test_who_wants_serves_own_proxy_gets_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in environment.serve_settings_names():
        monkeypatch.delenv(name, raising=False)
    assert environment.library_settings(tmp_path)[environment.HAPROXY_SWITCH] == "1"
    monkeypatch.setenv(environment.HAPROXY_SWITCH, "0")
    assert environment.HAPROXY_SWITCH not in environment.library_settings(tmp_path)
    assert environment.haproxy_folder() is None
    assert environment.for_workers()[environment.HAPROXY_SWITCH] == "0"
    # A cluster that somebody else runs has decided already.
    assert environment.HAPROXY_SWITCH not in environment.for_deployments()


def test_haproxys_sockets_have_short_enough_names() -> None:
    folder = environment.haproxy_folder()
    assert folder is not None
    node, takes_over = "f" * 56, ".1234567.tmp"
    assert len(str(folder / node / f"prometheus.sock{takes_over}")) <= 107
