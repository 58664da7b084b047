"""One home folder and one Ray for the whole session; every test that needs them shares them.

The environment is prepared at import, before any test module can import ray, vllm or transformers.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import environment

# Models cost a conversion; a developer may keep them between sessions by setting FLYWHEEL_TEST_HOME.
_KEPT = os.environ.get("FLYWHEEL_TEST_HOME")
_ROOT = Path(_KEPT) if _KEPT else Path(tempfile.mkdtemp(prefix="flywheel-test-"))
for _named in (environment.RAY_ADDRESS, environment.DATABASE_URI, environment.TRACKING_URI):
    os.environ.pop(_named, None)
os.environ[environment.HOME] = str(_ROOT)
environment.prepare(_ROOT)

from actors.registry.client import RegistryClient  # noqa: E402
from cluster.session import Session, connect  # noqa: E402
from cluster.storage import Home  # noqa: E402
from tests.postgres import Postgres, server  # noqa: E402
from tests.serving import ServeApp, running  # noqa: E402

# A shell that starts pytest in its background has it ignore Ctrl-C, and what we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def home() -> Home:
    """The session's FLYWHEEL_HOME."""
    return Home(_ROOT)


def pytest_unconfigure() -> None:
    """Remove the home, also of a session in which no test asked for it, unless FLYWHEEL_TEST_HOME names it."""
    if not _KEPT:
        shutil.rmtree(_ROOT, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_session(home: Home) -> Iterator[Session]:
    """The one Ray cluster of the session, with room for every actor the tests start."""
    with connect(num_cpus=8) as session:
        yield session


@pytest.fixture(scope="session")
def registry(home: Home, ray_session: Session) -> RegistryClient:
    """The session's registry actor."""
    return RegistryClient.start(home)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The one PostgreSQL of the session, real, on loopback; each test makes databases of its own in it."""
    with server() as started:
        yield started


@pytest.fixture(scope="session")
def serve_app(home: Home, registry: RegistryClient) -> Iterator[ServeApp]:
    """The one Serve application of the session: gateway, vLLM, embedder and collections, all real."""
    with running(home, registry) as app:
        yield app


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on several ranks says so by its fixture; it is too slow for `make unit`.

    What needs the Serve application comes last: it has two engines, and while it is up all else is slower.
    """
    for item in items:
        if "gang" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
    items.sort(key=lambda item: item.get_closest_marker("serve") is not None)
