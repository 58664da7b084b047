"""Reading a lock, and comparing an environment with it."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from cluster import lock


def test_names_are_compared_as_pip_compares_them() -> None:
    pins = lock.parse("Flask==3.1.3\nimportlib_metadata==9.1.0  # why\n\n# a comment\nruamel.yaml==1!2.0.post1\n")
    assert pins == {"flask": "3.1.3", "importlib-metadata": "9.1.0", "ruamel-yaml": "1!2.0.post1"}


@pytest.mark.parametrize(
    "line", ["flask", "flask>=3", "flask==3.*", "flask==3; python_version>'3'", "-e .", "flask===3"]
)
def test_a_line_that_leaves_a_choice_is_refused(line: str) -> None:
    with pytest.raises(lock.LockError, match="line 2"):
        lock.parse(f"rich==15.0.0\n{line}\n")


def test_a_name_in_two_spellings_is_given_twice() -> None:
    with pytest.raises(lock.LockError, match="twice"):
        lock.parse("typing_extensions==4.16.0\ntyping-extensions==4.16.0\n")


def test_drift_counts_what_the_lock_names_and_nothing_else() -> None:
    off = lock.drift({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "2.1", "stray": "9"})
    assert off == lock.Drift(missing=("c==3",), differing=("b 2.1, lock wants 2",))
    assert off
    assert not lock.drift({"a": "1"}, {"a": "1", "stray": "9"})


def test_the_first_copy_on_the_path_is_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As setuptools does when it is imported: older copies of other packages, at the end of the path."""
    copy = tmp_path / "packaging-0.1.dist-info"
    copy.mkdir()
    (copy / "METADATA").write_text("Metadata-Version: 2.1\nName: packaging\nVersion: 0.1\n", encoding="utf-8")
    nameless = tmp_path / "half-1.dist-info"
    nameless.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    import importlib_metadata  # it joins sys.meta_path, as in a long-lived process

    assert any(isinstance(finder, importlib_metadata.MetadataPathFinder) for finder in sys.meta_path)
    assert lock.installed()["packaging"].version == "0.1"
    monkeypatch.setattr(sys, "path", [*(each for each in sys.path if each != str(tmp_path)), str(tmp_path)])
    assert lock.installed()["packaging"].version == importlib.metadata.version("packaging") != "0.1"
    assert "half" not in lock.installed()
