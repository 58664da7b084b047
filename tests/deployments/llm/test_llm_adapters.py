import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cluster.errors import CapacityError, DependencyError, RequestError
from cluster.signing import Keyring, SignatureError, sign, signature_path
from cluster.storage import Home, digest_folder
from deployments.llm.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterCache, first_misfit
from deployments.llm.protocol import Adapter

WIDTH = 8
PREFIX = "base_model.model.layers.0.q_proj"


def registered(folder: Path, *, rank: int = 8, version: str = "triage/1", extra: str | None = None) -> Adapter:
    """A version as the registry leaves it: its files, and their signature beside them, in the home of the cache."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps({"r": rank}))
    a = np.full((rank, WIDTH), len(version), dtype=np.float32)
    save_file({f"{PREFIX}.lora_A.weight": a, f"{PREFIX}.lora_B.weight": a.T.copy()}, folder / WEIGHTS_FILE)
    if extra:
        (folder / extra).write_bytes(b"")
    sign(folder, Home(folder.parent / "home"))
    return Adapter(version, str(folder), digest_folder(folder))


def again_signed(adapter: Adapter) -> Adapter:
    """The adapter with its files as they are now."""
    folder = Path(adapter.path)
    sign(folder, Home(folder.parent / "home"))
    return Adapter(adapter.version, adapter.path, digest_folder(folder))


def made(tmp_path: Path, cache: type[AdapterCache] = AdapterCache) -> AdapterCache:
    base = tmp_path / "base"
    base.mkdir(exist_ok=True)
    save_file({"layers.0.q_proj.weight": np.zeros((WIDTH, WIDTH), dtype=np.float32)}, base / "model.safetensors")
    return cache(Home(tmp_path / "home"), max_rank=16, base=base)


@pytest.fixture
def cache(tmp_path: Path) -> AdapterCache:
    return made(tmp_path)


async def test_a_copy_outlives_its_source(cache: AdapterCache, tmp_path: Path) -> None:
    adapter = registered(tmp_path / "v1")
    folder = await cache.fetch(adapter)
    shutil.rmtree(tmp_path / "v1")
    signature_path(tmp_path / "v1").unlink()
    assert await cache.fetch(adapter) == folder
    assert digest_folder(folder) == adapter.digest


async def test_a_copy_is_as_young_as_its_last_use_however_old_its_source_is(
    cache: AdapterCache, tmp_path: Path
) -> None:
    adapter = registered(tmp_path / "v1")
    os.utime(tmp_path / "v1", (0, 0))
    began_s = time.time() - 1
    folder = await cache.fetch(adapter)
    assert folder.stat().st_mtime > began_s
    os.utime(folder, (0, 0))
    await made(tmp_path).fetch(adapter)
    assert folder.stat().st_mtime > began_s


async def test_many_at_once_make_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(AdapterCache):
        copies = 0

        def _copy(self, adapter: Adapter, target: Path) -> None:
            type(self).copies += 1
            super()._copy(adapter, target)

    cache, adapter = made(tmp_path, Counting), registered(tmp_path / "v1")
    folders = await asyncio.gather(*(cache.fetch(adapter) for _ in range(20)))
    assert len(set(folders)) == 1
    assert Counting.copies == 1


async def test_one_that_hangs_up_does_not_take_the_copy_from_the_others(cache: AdapterCache, tmp_path: Path) -> None:
    adapter = registered(tmp_path / "v1")
    first, second = (asyncio.create_task(cache.fetch(adapter)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).is_dir()


@pytest.mark.parametrize("damage", ["vanished", "cut short"])
async def test_a_copy_that_was_damaged_is_made_anew_before_it_is_used(
    cache: AdapterCache, tmp_path: Path, damage: str
) -> None:
    adapter = registered(tmp_path / "v1")
    weights = await cache.fetch(adapter) / WEIGHTS_FILE
    if damage == "vanished":
        weights.unlink()
    else:
        weights.write_bytes(b"w")
    assert digest_folder(await cache.fetch(adapter)) == adapter.digest


async def test_a_cache_of_an_earlier_process_is_verified_and_used(tmp_path: Path) -> None:
    adapter = registered(tmp_path / "v1")
    folder = await made(tmp_path).fetch(adapter)
    gone = Adapter(adapter.version, str(tmp_path / "gone"), adapter.digest)
    assert await made(tmp_path).fetch(gone) == folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda v1: flip(v1 / WEIGHTS_FILE), "changed"),
        (lambda v1: (v1 / "README.md").write_text(""), "changed"),
        (lambda v1: (v1 / "README.md").symlink_to(v1 / CONFIG_FILE), "changed"),
        (lambda v1: signature_path(v1).unlink(), "unsigned"),
        (lambda v1: signature_path(v1).write_text("{}"), "bad_signature"),
        (lambda v1: sign(v1, Home(v1.parent / "stranger")), "unknown_key"),
    ],
)
async def test_what_nobody_vouches_for_is_refused_with_version_and_reason(
    cache: AdapterCache, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    adapter = registered(tmp_path / "v1")
    damage(tmp_path / "v1")
    with pytest.raises(SignatureError, match="triage/1") as caught:
        await cache.fetch(adapter)
    assert (caught.value.reason, caught.value.status, caught.value.retryable) == (reason, 503, False)
    assert str(tmp_path) not in f"{caught.value.message}{caught.value.hint}"
    assert [path.name for path in (tmp_path / "home" / "cache" / "adapters").iterdir()] == [".lock"]


async def test_a_signed_folder_of_another_version_is_refused(cache: AdapterCache, tmp_path: Path) -> None:
    adapter, other = registered(tmp_path / "v1"), registered(tmp_path / "v2", rank=4)
    swapped = Adapter(adapter.version, other.path, adapter.digest)
    with pytest.raises(SignatureError, match=rf"digest {other.digest[:12]}, not {adapter.digest[:12]}"):
        await cache.fetch(swapped)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
async def test_a_copy_of_an_earlier_process_without_a_good_signature_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    adapter = registered(tmp_path / "v1")
    copy = await made(tmp_path).fetch(adapter)
    damage(signature_path(copy))
    assert await made(tmp_path).fetch(adapter) == copy
    assert signature_path(copy).read_bytes() == signature_path(tmp_path / "v1").read_bytes()


async def test_a_key_that_is_no_longer_trusted_ends_with_the_process(tmp_path: Path) -> None:
    adapter = registered(tmp_path / "v1")
    cache = made(tmp_path)
    copy = await cache.fetch(adapter)
    Keyring(Home(tmp_path / "home")).trusted()[0].path.unlink()
    assert await cache.fetch(adapter) == copy, "verified once for each replica and digest"
    with pytest.raises(SignatureError):
        await made(tmp_path).fetch(adapter)


async def test_a_failure_is_not_remembered(cache: AdapterCache, tmp_path: Path) -> None:
    adapter = registered(tmp_path / "v1")
    moved = (tmp_path / "v1").rename(tmp_path / "elsewhere")
    with pytest.raises(DependencyError) as caught:
        await cache.fetch(adapter)
    assert str(tmp_path) not in f"{caught.value.message}{caught.value.hint}"
    moved.rename(tmp_path / "v1")
    assert (await cache.fetch(adapter)).is_dir()


@pytest.mark.parametrize("call", ["sendfile", "mkdir", "replace"])
async def test_a_full_disk_is_said_to_be_one_and_leaves_nothing_half_made(
    cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    adapter = registered(tmp_path / "v1")
    with monkeypatch.context() as disk:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        disk.setattr(os, call, full)
        with pytest.raises(CapacityError, match="triage/1 cannot be loaded: the disk of a serving node is full"):
            await cache.fetch(adapter)
    folder = await cache.fetch(adapter)
    assert digest_folder(folder) == adapter.digest
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [adapter.digest]


async def test_pickles_and_incomplete_folders_are_refused(cache: AdapterCache, tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="safetensors"):
        await cache.fetch(registered(tmp_path / "v1", extra="adapter_model.bin"))
    bare = registered(tmp_path / "v2")
    (tmp_path / "v2" / WEIGHTS_FILE).unlink()
    sign(tmp_path / "v2", Home(tmp_path / "home"))
    with pytest.raises(DependencyError, match=WEIGHTS_FILE):
        await cache.fetch(Adapter("triage/2", bare.path, digest_folder(tmp_path / "v2")))


async def test_the_rank_that_counts_is_the_largest_of_any_module(cache: AdapterCache, tmp_path: Path) -> None:
    adapter = registered(tmp_path / "v1")
    (tmp_path / "v1" / CONFIG_FILE).write_text(json.dumps({"r": 8, "rank_pattern": {"q_proj": 32}}))
    with pytest.raises(RequestError, match=r"rank 32.*at most 16"):
        await cache.fetch(again_signed(adapter))


async def test_its_own_chat_template_comes_with_it(cache: AdapterCache, tmp_path: Path) -> None:
    plain, own, broken = (registered(tmp_path / name, version=f"{name}/1") for name in ("plain", "own", "broken"))
    (tmp_path / "own" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    own, broken = again_signed(own), again_signed(broken)
    for adapter, template in ((plain, None), (own, "{{ messages }}")):
        await cache.fetch(adapter)
        assert cache.template(adapter) == template
    with pytest.raises(DependencyError, match="chat template cannot be read"):
        await cache.fetch(broken)


async def test_a_rank_that_the_engine_cannot_take_is_the_requests_fault(cache: AdapterCache, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"rank 32.*at most 16"):
        await cache.fetch(registered(tmp_path / "v1", rank=32))


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("base_model.model.layers.0.up.lora_A.weight", (4, 16), None),
        ("base_model.model.layers.0.up.lora_B.weight", (32, 4), None),
        ("base_model.model.layers.0.up.lora_A.weight", (4, 12), "up is 32 × 16, the adapter's A is 4 × 12"),
        ("base_model.model.layers.0.up.lora_B.weight", (16, 4), "up is 32 × 16, the adapter's B is 16 × 4"),
        ("base_model.model.layers.1.up.lora_A.weight", (4, 99), None),
        ("base_model.model.lm_head.modules_to_save.weight", (1, 1), None),
    ],
)
def test_matrices_must_fit_the_weights_they_go_onto(name: str, shape: tuple[int, int], why: str | None) -> None:
    found = first_misfit({name: shape}, {"layers.0.up.weight": (32, 16)})
    assert (found is None) == (why is None)
    assert why is None or why in str(found)


async def test_an_adapter_for_another_base_is_refused(tmp_path: Path, cache: AdapterCache) -> None:
    adapter = registered(tmp_path / "v1")
    save_file({"layers.0.q_proj.weight": np.zeros((4, 4), dtype=np.float32)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(RequestError, match="does not fit base"):
        await cache.fetch(adapter)


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_weights_that_are_no_numbers_are_refused_with_their_name(
    cache: AdapterCache, tmp_path: Path, value: float
) -> None:
    """In one batch with others they would spoil the others' answers too."""
    adapter = registered(tmp_path / "v1")
    weights = Path(adapter.path) / WEIGHTS_FILE
    tensors = load_file(weights)
    tensors[f"{PREFIX}.lora_B.weight"][3, 2] = value
    save_file(tensors, weights)
    with pytest.raises(RequestError, match=r"triage/1 holds NaN or infinity in .*lora_B") as caught:
        await cache.fetch(again_signed(adapter))
    assert (caught.value.status, caught.value.code) == (422, "adapter_invalid")
