import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from actors.registry.artifacts import LONGEST_NAME, inspect, require_name, require_path, survey, tensors_of
from cluster.errors import ConfigError


def safetensors(path: Path, header: Any, body: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def tensor(begin: int = 0, end: int = 4, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_an_adapter_is_what_its_files_say(make_adapter: Callable[..., Path]) -> None:
    found = inspect(make_adapter(), "adapter")
    assert [file.name for file in found.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert found.adapter is not None
    assert (found.adapter.rank, found.adapter.alpha) == (4, 8)
    assert found.adapter.target_modules == ("q_proj", "v_proj")
    assert {tensor.dtype for tensor in found.tensors["adapter_model.safetensors"].values()} == {"F32"}


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "training_args.bin", "state.pkl", "modeling.py", ".hidden", "a/b.pth", "W.PT", "x.npz"]
)
def test_what_may_run_code_is_refused_by_name(make_adapter: Callable[..., Path], name: str) -> None:
    source = make_adapter()
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")) as refused:
        inspect(source, "adapter")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"\x80\x04\x95 a pickle"),
        ("notes.txt", b"PK\x03\x04 what torch.save writes"),
        ("vocab.txt", b"cos\nsystem\n(S'id'\ntR."),
        ("README.md", b"\x7fELF"),
        ("extra.json", b"cos\nsystem\n(S'id'\ntR."),
        ("extra.json", b"{'not': json}"),
        ("extra.json", b"[" * 200_000),
        ("rows.jsonl", b"\x1f\x8bpacked"),
    ],
)
def test_what_may_run_code_is_refused_by_content(make_adapter: Callable[..., Path], name: str, content: bytes) -> None:
    source = make_adapter()
    (source / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        inspect(source, "adapter")


def test_text_that_only_looks_a_little_like_a_pickle_comes_in(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    (source / "README.md").write_text("can we\nload it?\n")
    (source / "merges.txt").write_text("N.\n")
    (source / "vocab.txt").write_text("")
    assert len(inspect(source, "adapter").files) == 5


def test_a_text_file_has_a_limit(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    with (source / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ConfigError, match=r"tokenizer\.json .* has 64 MiB"):
        inspect(source, "adapter")


def test_links_and_devices_are_refused_without_being_opened(make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    source = make_adapter()
    (tmp_path / "alias").symlink_to(source)
    with pytest.raises(ConfigError, match="alias is a symbolic link"):
        inspect(tmp_path / "alias", "adapter")
    for name, target in {"secrets.json": "/etc/passwd", "folder": "/etc", "dangling.json": "nowhere"}.items():
        (source / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name}.*symbolic link"):
            inspect(source, "adapter")
        (source / name).unlink()
    os.mkfifo(source / "config.json")  # opening it would wait for ever
    with pytest.raises(ConfigError, match="FIFO"):
        inspect(source, "adapter")


@pytest.mark.parametrize(
    "name",
    ["two\nlines.json", "back\\slash.json", "esc\x1b[2J.json", "right\u202eleft.json", " .json", "a/.git/x.json"],
)
def test_a_name_that_could_forge_a_line_or_a_path_is_refused(make_adapter: Callable[..., Path], name: str) -> None:
    source = make_adapter()
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_text("{}")
    with pytest.raises(ConfigError) as refused:
        inspect(source, "adapter")
    assert "\n" not in str(refused.value)


def test_names_that_are_one_on_other_machines_are_refused(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    (source / "ADAPTER_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="same name on some machines"):
        inspect(source, "adapter")


def test_a_name_that_is_not_utf8_is_refused(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    os.close(os.open(os.fsencode(source) + b"/\xff.json", os.O_CREAT))
    with pytest.raises(ConfigError, match="UTF-8"):
        inspect(source, "adapter")


def test_the_card_is_written_by_registration_alone(make_adapter: Callable[..., Path]) -> None:
    source = make_adapter()
    (source / "Flywheel.json").write_text("{}")
    with pytest.raises(ConfigError, match="card"):
        inspect(source, "adapter")
    (source / "Flywheel.json").rename(source / "flywheel.json")
    assert "flywheel.json" in {file.name for file in survey(source, carded=True)}


@given(st.text("ab./~\\\x00\n\u202eé\ud800", max_size=12) | st.text(max_size=8) | st.just("a" * 256))
@settings(max_examples=200, deadline=None)
def test_whatever_name_is_let_in_stays_in_its_folder(name: str) -> None:
    try:
        require_path(name, where="the bundle")
    except ConfigError:
        return
    path = os.path.normpath(f"/store/version/{name}")
    assert path == f"/store/version/{name}"
    assert len(name.encode()) <= LONGEST_NAME
    assert not any(ord(char) < 32 for char in name)


@given(st.lists(st.sampled_from(["..", ".", "", "a", "etc", "a\0b", "~"]), min_size=1, max_size=5).map("/".join))
def test_no_path_climbs(name: str) -> None:
    if {"..", ".", "", "a\0b"} & set(name.split("/")):
        with pytest.raises(ConfigError):
            require_path(name, where="the bundle")


def test_weights_must_be_what_the_configuration_says(make_adapter: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"has rank 8, but adapter_config\.json says 4"):
        inspect(make_adapter(rank=8, recorded_rank=4), "adapter")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"base_model_name_or_path": None}, "which base"),
        ({"r": 0}, "not a LoRA"),
        ({"target_modules": None}, "not a LoRA"),
    ],
)
def test_an_adapter_that_an_engine_could_not_load_is_refused(
    make_adapter: Callable[..., Path], changes: dict[str, object], complaint: str
) -> None:
    source = make_adapter()
    path = source / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=complaint):
        inspect(source, "adapter")


def test_a_full_model_needs_its_configuration_and_weights(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        inspect(source, "model")
    (source / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        inspect(source, "model")
    save_file({"w": np.ones((2, 2), dtype=np.float32)}, source / "model.safetensors")
    assert inspect(source, "model").adapter is None


def test_a_missing_folder_and_an_impossible_name_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        inspect(tmp_path / "nowhere", "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="that is a file"):
        inspect(tmp_path / "file", "model")
    with pytest.raises(ConfigError, match="name"):
        require_name("../up")


def test_the_header_of_a_real_file_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    arrays = {"a": np.zeros((2, 3), np.float16), "b": np.ones(5, np.int64), "empty": np.zeros((0, 4), np.float32)}
    (tmp_path / "w.safetensors").write_bytes(save(arrays, {"format": "pt"}))
    found = tensors_of(tmp_path / "w.safetensors")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        "a": ("F16", (2, 3)),
        "b": ("I64", (5,)),
        "empty": ("F32", (0, 4)),
    }


@pytest.mark.parametrize(
    ("header", "body", "complaint"),
    [
        (b"\x80\x04\x95 not a header at all", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b" {}", b"", "not a JSON object"),
        (b"[" * 100_000, b"", "not JSON"),
        (b'{"a": {}, "a": {}}', b"", "given twice"),
        ({"__metadata__": {"format": 1}}, b"", "__metadata__"),
        ({"__metadata__": []}, b"", "__metadata__"),
        ({"w": tensor()}, b"", "would lie at 0 to 4"),
        ({"w": tensor(end=8)}, b"12345678", "what its shape and dtype need"),
        ({"w": tensor(), "v": tensor()}, b"1234", "begins at 0"),
        ({"w": tensor(), "v": tensor(2, 6)}, b"123456", "begins at 2"),
        ({"w": tensor(), "v": tensor(8, 12)}, b"1234567890ab", "begins at 8"),
        ({"w": tensor()}, b"1234 and more", "belong to no tensor"),
        ({"w": tensor(4, 0)}, b"1234", "would lie"),
        ({"w": tensor(-4, 0)}, b"1234", "no sizes"),
        ({"w": tensor(dtype="OBJECT")}, b"1234", "unknown dtype"),
        ({"w": tensor() | {"dtype": ["F32"]}}, b"1234", "unknown dtype"),
        ({"w": tensor(shape=(True,))}, b"1234", "no sizes"),
        ({"w": tensor(shape=(2**63,))}, b"1234", "no sizes"),
        ({"w": tensor(shape=(1,) * 65)}, b"1234", "no sizes"),
        ({"w": tensor() | {"more": 1}}, b"1234", "not just"),
        ({"w\0": tensor()}, b"1234", "control character"),
        ({"w\n": tensor()}, b"1234", "control character"),
        ({}, b"", "holds no weights"),
    ],
)
def test_a_header_that_promises_what_is_not_there_is_refused(
    tmp_path: Path, header: Any, body: bytes, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tensors_of(safetensors(tmp_path / "w.safetensors", header, body))


@pytest.mark.parametrize("length", [10_000, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match="but the file ends"):
        tensors_of(safetensors(tmp_path / "w.safetensors", {"w": tensor()}, b"1234", length=length))
    (tmp_path / "w.safetensors").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="shorter"):
        tensors_of(tmp_path / "w.safetensors")


def test_an_oversized_header_is_not_read(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "w.safetensors", b"{}", length=100_000_001)
    os.truncate(path, 200_000_000)
    with pytest.raises(ConfigError, match="100000000 is the limit"):
        tensors_of(path)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_damaged_header_gets_past_us_that_the_library_would_refuse(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from safetensors import SafetensorError, safe_open

    content = bytearray(save({"a": np.zeros((2, 3), np.float16), "b": np.ones(5, np.int64)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        ours = set(tensors_of(path))
    except ConfigError:
        return
    try:
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == ours
    except SafetensorError as error:
        pytest.fail(f"we took what the library does not: {error}")
