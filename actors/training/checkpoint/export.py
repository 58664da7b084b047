"""From a checkpoint's shards to folders that others load: Hugging Face and PEFT, in safetensors, in one process.

Knows transformers and PEFT, and imports them late: writing an adapter needs neither.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from actors.training.checkpoint import manifest, shards
from actors.training.checkpoint.manifest import Checkpoint
from actors.training.checkpoint.storage import FolderStorage, RunStorage
from actors.training.job import Position
from cluster.errors import CapacityError, ConfigError, TrainingError
from cluster.models import TOKENIZER_FILES
from cluster.storage import DISK_FULL, publish

WEIGHTS: Final = "weights/"

_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_BESIDE_WEIGHTS: Final = (*TOKENIZER_FILES, "generation_config.json")

What = Literal["adapter", "merged", "model"]


def write_adapter(folder: Path, target: Path, config: str) -> None:
    """Write the adapter whose shards lie in `folder` as PEFT and vLLM load it. `config`: its `adapter_config.json`."""
    target.mkdir(parents=True, exist_ok=True)
    with _errors_of_the_disk():
        save_file(shards.read_whole(folder, WEIGHTS), target / _ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (target / _ADAPTER_CONFIG).write_text(config, encoding="utf-8")


def export(
    storage: RunStorage,
    checkpoint: Checkpoint,
    target: Path,
    *,
    merged: bool = False,
    base: Callable[[str, str], Path] | None = None,
) -> What:
    """Write the model of `checkpoint` to the new folder `target`: its adapter, the base with it merged, or all of it.

    Every file that is read is digested first. `base`: called with the base's name and digest, it gives the folder,
    for which somebody who is trusted vouches; only an adapter by itself needs none. `ConfigError` if `target` exists,
    or if there is nothing to merge; `TrainingError` if the checkpoint is damaged; `CapacityError` if a disk is full.
    """
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists.", hint="Name a folder that does not exist yet.")
    with storage.opened(checkpoint.name) as fetch:
        adapted = any(file.startswith(f"{manifest.ADAPTER}/") for file in checkpoint.files)
        if merged and not adapted:
            raise ConfigError(
                f"{checkpoint.name} holds a whole model: there is no adapter to merge.", hint="Leave out --merged."
            )
        wanted = [
            file
            for file in checkpoint.files
            if file == manifest.MODEL or file.startswith(f"{manifest.ADAPTER}/") == adapted
        ]
        try:
            folder = fetch(wanted)
            wrong = manifest.changed(folder, checkpoint, wanted)
        except manifest.NO_FILE as error:
            wrong = (str(error.filename or error),)
        if wrong and checkpoint.name not in storage.listing():
            raise ConfigError(f"{checkpoint.name} has just been removed by its run.", hint="Export another step.")
        if wrong:
            raise TrainingError(
                f"{checkpoint.name} is damaged: {', '.join(wrong)}.", hint="Export another step; see checkpoint list."
            )
        with _room_for(target), publish(target) as scratch:
            if adapted and not merged:
                for file in wanted:  # and nothing else that may lie beside them
                    if file != manifest.MODEL:
                        shutil.copyfile(folder / file, scratch / Path(file).name)
                return "adapter"
            facts = json.loads((folder / manifest.MODEL).read_text(encoding="utf-8"))
            if base is None:
                raise ConfigError("A whole model is exported beside its base.", hint="Say where the base lies.")
            base_folder = base(facts["base"], facts["base_digest"])
            model = _merged(base_folder, folder / manifest.ADAPTER) if merged else _model(base_folder, folder)
            _save(model, base_folder, scratch)
    return "merged" if merged else "model"


def artifact(storage: RunStorage, position: Position, run_folder: Path, base: Path, *, write: bool) -> Path:
    """The folder on this machine of what a run has made: an adapter as PEFT loads it, or a Hugging Face model.

    An adapter that lies in a folder of checkpoints is there already; anything else is exported into the run's folder,
    unless it has been. Of an embedder it is always the whole, in which its adapter is merged: what serves embedders
    takes no adapters beside them. Only a caller who is to `write` reads or writes; all get the path.
    """
    name = manifest.name_of(position.step)
    embeds = _embeds(base)
    if not embeds and isinstance(storage, FolderStorage) and (storage.folder / name / manifest.ADAPTER).is_dir():
        return storage.folder / name / manifest.ADAPTER
    target = run_folder / f"export-{name}"
    if write and not target.exists():
        checkpoint = manifest.find(storage, position.step, run_id=position.run_id)
        adapted = any(file.startswith(f"{manifest.ADAPTER}/") for file in checkpoint.files)
        export(storage, checkpoint, target, merged=embeds and adapted, base=lambda *_: base)
    return target


def _embeds(base: Path) -> bool:
    return (base / "modules.json").is_file()


def _merged(base: Path, adapter: Path) -> Any:
    if _embeds(base):
        from actors.training import embedder

        return embedder.merged(base, adapter)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Added up in fp32: in bf16 a small update would be rounded away.
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def _model(base: Path, folder: Path) -> Any:
    if _embeds(base):
        from actors.training import embedder

        return embedder.with_weights(base, shards.read_whole(folder, WEIGHTS))
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = shards.read_whole(folder, WEIGHTS)
    expected = dict(model.named_parameters())
    strange = weights.keys() ^ expected.keys()
    if strange:
        raise TrainingError(
            f"The checkpoint does not fit {base}: {', '.join(sorted(strange)[:3])}.",
            hint="The base may have been replaced since the run.",
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(weights[name])
    model.tie_weights()
    return model


def _save(model: Any, base: Path, target: Path) -> None:
    """In the dtype that the base is stored in, with its tokenizer."""
    stored = json.loads((base / "config.json").read_text(encoding="utf-8"))
    named = str(stored.get("dtype") or stored.get("torch_dtype") or "float32")
    with _errors_of_the_disk():
        if _embeds(base):
            from actors.training import embedder

            embedder.save(model, target, dtype=getattr(torch, named))
        else:
            model.to(getattr(torch, named)).save_pretrained(target, safe_serialization=True)
    for name in _BESIDE_WEIGHTS:
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)


@contextmanager
def _errors_of_the_disk() -> Iterator[None]:
    """What safetensors could not write, as the `OSError` that it was: it has an exception of its own for all."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


@contextmanager
def _room_for(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise CapacityError(
            f"There is no room for {target}: {error.strerror}.", hint="Free some disk there, or name another folder."
        ) from None
