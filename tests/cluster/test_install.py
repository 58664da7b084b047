"""What the installer decides: which lock, what is damaged, what goes, what pip's failure means."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster import install, lock


def _package(packages: Path, name: str, *, record: bool = True) -> Path:
    metadata = packages / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / name).mkdir()
    (packages / name / "__init__.py").write_text("")
    if record:
        (metadata / "RECORD").write_text(f"{name}/__init__.py,sha256=x,0\n{name}/__pycache__/__init__.pyc,,\n")
    return metadata


def test_only_what_was_cut_off_is_damaged(tmp_path: Path) -> None:
    _package(tmp_path, "whole")
    without_record = _package(tmp_path, "early", record=False)
    without_file = _package(tmp_path, "torn")
    (tmp_path / "torn" / "__init__.py").unlink()
    assert install.damaged(tmp_path) == [without_record, without_file]


def test_strays_are_what_the_lock_does_not_name() -> None:
    installed = {"ray": "2", "pip": "23", "flywheel": "0", "trl": "1"}
    assert install.strays(installed, {"ray": "2"}) == ["trl"]


def test_what_is_built_from_source_is_locked() -> None:
    for kind in ("cpu", "cuda"):
        assert install.FROM_SOURCE.keys() <= lock.parse(lock.path(kind).read_text()).keys()


def test_pips_reason_is_not_buried_under_its_warnings() -> None:
    lines = ["WARNING: Location ignored"] * 300 + ["ERROR: No matching distribution found for torch", "WARNING: again"]
    assert install.explain(lines).strip() == "ERROR: No matching distribution found for torch"


def test_a_failed_connection_is_part_of_the_reason() -> None:
    retry = "WARNING: Retrying (Retry(total=0)) after connection broken"
    said = install.explain([retry, retry, "WARNING: Location ignored", "ERROR: No matching distribution found"])
    assert [line.strip() for line in said.splitlines()] == [retry, "ERROR: No matching distribution found"]


def test_without_an_error_line_the_last_lines_are_the_reason() -> None:
    assert install.explain(["Collecting a", "ModuleNotFoundError: no editables", ""]).splitlines()[-1].strip() == (
        "ModuleNotFoundError: no editables"
    )


def test_progress_counts_packages_and_megabytes() -> None:
    said = "Collecting a\n  Downloading a-1.whl (1.5 MB)\nCollecting b\n  Downloading b-1.whl (500 kB)\n"
    assert install.progress(said, expected=5, unpacked=1) == "2 of 5 fetched, 2 MB"
    said += "Installing collected packages: a, b\n"
    assert install.progress(said, expected=5, unpacked=3) == "3 of 5 unpacked"


def test_the_lock_follows_the_machine_unless_a_person_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.choose_kind(None) == "cpu"
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    program.chmod(0o755)
    assert install.choose_kind(None) == "cuda"
    assert install.choose_kind("cpu") == "cpu"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert install.choose_kind(None) == "cpu"
    with pytest.raises(install.SetupError, match="LOCK=rocm"):
        install.choose_kind("rocm")


def test_a_stamp_names_all_that_the_environment_is_made_from() -> None:
    made = install.fingerprint("a==1", "project")
    assert made == install.fingerprint("a==1", "project")
    assert made != install.fingerprint("a==2", "project")
    assert made != install.fingerprint("a==1", "project 2")


def test_it_starts_under_a_bare_interpreter() -> None:
    """Before set-up there is only the standard library: -S hides site-packages, -B leaves no bytecode."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-S", "-B", "-m", "cluster.install", "--lock", "rocm"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "LOCK=rocm is not known" in ended.stdout
