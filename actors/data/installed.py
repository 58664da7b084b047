"""Which Python source files are installed beside the running interpreter, and who ships each of them.

Owns the walk over site-packages and the standard library and the grouping that the split rests on. Reads
file names and wheel metadata (`RECORD`, PyPA's "recording installed projects"), never a source file's text.
"""

import importlib.metadata
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = "python-stdlib"

SKIPPED_FOLDERS = frozenset(
    {
        # Tests raise and document what their subject does: near copies with worse text.
        "tests", "test", "testing", "idlelib",
        # Copies of packages that are mostly installed under their own name as well.
        "_vendor", "_vendored", "vendored", "vendor", "_distutils", "third_party", "thirdparty", "externals",
        # Not the package itself; some distributions even drop these at the top of site-packages.
        "docs", "doc", "examples", "benchmarks", "scripts", "node_modules", "__pycache__", "site-packages",
        "dist-packages", "lib-dynload",
    }
)  # fmt: skip
MAX_FILE_BYTES = 400_000
"""Larger files are tables and generated clients; they cost most of the parsing time and give few texts."""


@dataclass(frozen=True)
class SourceFile:
    """One file to mine. `name` is its path below site-packages or the standard library, with `/`."""

    path: str
    name: str
    group: str
    package: str
    version: str
    size_bytes: int
    modified_ns: int


def installed_files() -> list[SourceFile]:
    """Every file worth mining, sorted by name; distributions that share a top-level name share a group."""
    roots = sysconfig.get_paths()
    sites = dict.fromkeys(Path(roots[key]) for key in ("purelib", "platlib"))
    found: dict[str, SourceFile] = {}
    for site in sites:
        owners = _owners(site)
        groups = group_by_shipping((name.partition("/")[0], package) for name, (package, _) in owners.items())
        for path, name, stat in _walk(site):
            top = name.partition("/")[0]
            package, version = owners.get(name, (top.removesuffix(".py"), ""))
            group = groups.get(top, top.removesuffix(".py"))
            found[name] = SourceFile(path, name, group, package, version, stat.st_size, stat.st_mtime_ns)
    for path, name, stat in _walk(Path(roots["stdlib"])):
        found[f"{STANDARD_LIBRARY}/{name}"] = SourceFile(
            path,
            f"{STANDARD_LIBRARY}/{name}",
            STANDARD_LIBRARY,
            STANDARD_LIBRARY,
            platform.python_version(),
            stat.st_size,
            stat.st_mtime_ns,
        )
    return [found[name] for name in sorted(found)]


def group_by_shipping(shipped: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Top-level name → group, from (top-level name, distribution) of every file.

    What one distribution ships together (`torch`, `torchgen`) and what several put under one name (`mlflow`,
    `google`) is written by the same people about the same things, so it must not stand on both sides of a
    split. A group is a connected component, named after the distribution that has most files in it.
    """
    files = Counter(shipped)
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for top, package in files:
        parent[root(f"top:{top}")] = root(f"package:{package}")
    sizes: dict[str, Counter[str]] = {}
    for (_, package), count in files.items():
        sizes.setdefault(root(f"package:{package}"), Counter())[package] += count
    names = {node: min(counts, key=lambda package: (-counts[package], package)) for node, counts in sizes.items()}
    return {top: names[root(f"top:{top}")] for top, _ in files}


def _owners(site: Path) -> dict[str, tuple[str, str]]:
    """File name below `site` → (distribution, version), from the RECORD of every installed wheel."""
    owners: dict[str, tuple[str, str]] = {}
    distributions = importlib.metadata.distributions(path=[str(site)])
    for name, distribution in sorted((str(found.name).lower(), found) for found in distributions):
        version = distribution.version
        for line in (distribution.read_text("RECORD") or "").splitlines():
            file = line.rsplit(",", 2)[0].strip('"')
            if file.endswith(".py") and not file.startswith("..") and SKIPPED_FOLDERS.isdisjoint(file.split("/")):
                owners.setdefault(file, (name, version))
    return owners


def _walk(root: Path) -> Iterable[tuple[str, str, os.stat_result]]:
    prefix = len(str(root)) + 1
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for file in sorted(files):
            tested = file.startswith("test_") or file.endswith("_test.py") or file == "conftest.py"
            if not file.endswith(".py") or tested:
                continue
            path = os.path.join(folder, file)  # noqa: PTH118 - 30,000 files: pathlib doubles the time
            stat = os.stat(path)  # noqa: PTH116
            if 0 < stat.st_size <= MAX_FILE_BYTES:
                yield path, path[prefix:].replace(os.sep, "/"), stat
