"""Manifests and headers that no save has written: one error on all ranks; nothing has changed."""

from __future__ import annotations

import copy as copies
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import meshdist as md

from .damaged import WHOLES, empty_state, find_error, read_manifest, save_whole, write_manifest

FIRST = "rank-0.safetensors"
SECOND = "rank-1.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "whole"
    save_whole(path)
    return path


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def piece(manifest: dict[str, Any], name: str = "a", file: str = FIRST) -> dict[str, Any]:
    found: dict[str, Any] = manifest["files"][file]["pieces"][name]
    return found


def deep(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(FIRST)

    return change


def set_offsets(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: piece(manifest).update(offsets=value)


def set_shape(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["arrays"]["a"].update(shape=value)


HUGE = 1 << 62
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path upwards": (rename_file("../x.safetensors"), "is not the name of a file in the folder"),
    "an absolute path": (
        rename_file("/etc/x.safetensors"),
        "is not the name of a file in the folder",
    ),
    "a path with a zero": (
        rename_file("a\0.safetensors"),
        "is not the name of a file in the folder",
    ),
    "another suffix": (rename_file("passwd"), "is not the name of a file in the folder"),
    "a file that is not there": (rename_file("x.safetensors"), "no such file"),
    "an overlap": (set_offsets([1, 0]), "pieces [1:4, 0:3] and [3:5, 0:3] overlap"),
    "outside": (set_offsets([4, 0]), "piece [4:7, 0:3] is outside (5, 3)"),
    "a gap": (lambda m: m["files"][FIRST]["pieces"].pop("a"), "pieces have 6 of 15 elements"),
    "a negative offset": (set_offsets([-1, 0]), "[-1, 0] is too large or negative"),
    "a fraction": (set_offsets([0.0, 0]), "[0.0, 0] is not a list of integers"),
    "not a number": (set_offsets([float("nan"), 0]), "[nan, 0] is not a list of integers"),
    "a truth": (set_offsets([False, 0]), "[False, 0] is not a list of integers"),
    "a text": (set_offsets("00"), "'00' is not a list of integers"),
    "nothing": (set_offsets(None), "None is not a list of integers"),
    "another number of offsets": (set_offsets([0]), f"{FIRST}: a has shape (3, 3) at (0,)"),
    "a huge offset": (set_offsets([HUGE, 0]), "is too large or negative"),
    "a huge shape": (set_shape([HUGE, 3]), "is too large or negative"),
    "a shape of many bytes": (set_shape([1 << 40, 1 << 40]), "is too large or negative"),
    "another shape": (set_shape([6, 3]), "pieces have 15 of 18 elements"),
    "another number of dims": (
        set_shape([15]),
        "a piece has a different number of dims than (15,)",
    ),
    "a long text": (set_shape("x" * 10_000_000), "xxx..."),
    "an unknown dtype": (
        lambda m: m["arrays"]["a"].update(dtype="float"),
        "a: unsupported dtype 'float'",
    ),
    "a dtype that is a list": (
        lambda m: m["arrays"]["a"].update(dtype=[1]),
        "a: unsupported dtype '[1]'",
    ),
    "no dtype": (lambda m: m["arrays"]["a"].pop("dtype"), "KeyError('dtype')"),
    "no arrays": (lambda m: m.pop("arrays"), "KeyError('arrays')"),
    "no leaves": (lambda m: m.pop("leaves"), "KeyError('leaves')"),
    "arrays as a list": (lambda m: m.update(arrays=[]), "has no attribute 'items'"),
    "an array as a number": (lambda m: m["arrays"].update(a=3), "TypeError"),
    "a piece of no array": (
        lambda m: m["files"][FIRST]["pieces"].update(z=piece(m)),
        "KeyError('z')",
    ),
    "a checksum as a text": (lambda m: piece(m).update(crc32="1"), "not a list of integers"),
    "an infinite checksum": (
        lambda m: piece(m).update(crc32=float("inf")),
        "not a list of integers",
    ),
    "a size below 0": (lambda m: m["files"][FIRST].update(bytes=-1), "too large or negative"),
    "too few bytes": (
        lambda m: m["files"][FIRST].update(bytes=9),
        f"{FIRST} has 9 bytes, but its pieces have",
    ),
    "another size": (lambda m: m["files"][FIRST].update(bytes=10**6), "in the manifest 1000000"),
    "another version": (lambda m: m.update(version=2), "found:    format 'meshdist', version 2"),
    "another format": (lambda m: m.update(format="x"), "found:    format 'x', version 1"),
    "a long format": (lambda m: m.update(format="x" * 10_000_000), "xxx..."),
    "a piece of an array that is not there": (lambda m: m["arrays"].pop("c"), "KeyError('c')"),
    "a dtype of as many bytes": (
        lambda m: m["arrays"]["b"].update(dtype="uint8"),
        "b has a different dtype in the checkpoint",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_contradicts(name: str, copy: Path) -> None:
    change, text = CHANGES[name]
    manifest = read_manifest(copy)
    change(manifest)
    write_manifest(copy, manifest)
    error = find_error(copy)
    assert error is not None
    assert text in error
    assert len(error) < 1200
    assert f"where:    {copy}" in error
    others = find_error(copy, size=3)
    assert others is not None
    assert others.replace("rank 0, ", "").replace("ranks 0-2, ", "") == error


TEXTS = {
    "no JSON": "{",
    "a number": "1",
    "a list": "[]",
    "nothing": "null",
    "a huge number": "1" * 10_000,
    "a name twice": '{"format": "meshdist", "version": 1, "version": 1}',
    "10 MB of brackets": "[" * 10_000_000,
    "10 MB of spaces": " " * 10_000_000,
    "10 MB of a text": '"' + "x" * 10_000_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_manifest_of_nonsense(name: str, copy: Path) -> None:
    (copy / "manifest.json").write_text(TEXTS[name])
    error = find_error(copy, size=2)
    assert error is not None
    assert "the checkpoint is damaged, or was not written by md.checkpoint.save" in error
    assert "found:    manifest.json: " in error
    if name == "a name twice":
        assert "duplicate names among ['format', 'version']" in error
    assert len(error) < 1200


def test_leaves_that_are_deep(copy: Path) -> None:
    """No reader of JSON takes all of them, nor does pickle, by which they reach other ranks."""
    for depth in (90, 110, 400, 900, 100_000):
        manifest = read_manifest(copy)
        manifest["leaves"]["more"] = 1
        text = json.dumps(manifest)[:-1].replace('"more": 1', f'"more": {"[" * depth}{"]" * depth}')
        write_manifest(copy, text)
        for size in (1, 3):
            error = find_error(copy, size=size)
            if depth == 90:
                assert error is None
            else:
                found = "RecursionError" if depth > 900 else "leaves are nested too deeply"
                assert error is not None
                assert found in error


def test_pieces_that_are_exchanged_are_found(copy: Path) -> None:
    """They have equal shapes: only the files themselves can say where they belong."""
    manifest = read_manifest(copy)
    first, second = (piece(manifest, "b", file) for file in (FIRST, SECOND))
    first["offsets"], second["offsets"] = second["offsets"], first["offsets"]
    write_manifest(copy, manifest)
    for size in (1, 3):
        error = find_error(copy, size=size)
        assert error is not None
        assert f"{FIRST}: b is ('I8', (3,), (0,)); in the manifest ('I8', (3,), (3,))" in error


# -- files without a manifest ---------------------------------------------------------------------


def write_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def fingerprint_of(
    shape: Any, dtype: str = "F32", offsets: Any = None, end: int = 16
) -> dict[str, Any]:
    header: dict[str, Any] = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
    if offsets is not None:
        told = (
            offsets if isinstance(offsets, str) else json.dumps({"a": {"saved_offsets": offsets}})
        )
        header["__metadata__"] = {"DCP_SHARDING_INFO": told}
    return header


HEADERS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "invalid JSON"),
    "no text": (b"\xff\xff", "invalid UTF-8"),
    "a list": (b"[]", "header"),
    "a name twice": (
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        "x.safetensors: ",
    ),
    "a huge shape": (fingerprint_of([1 << 62, 4]), "x.safetensors: "),
    "a negative shape": (fingerprint_of([-4]), "x.safetensors: "),
    "too many bytes": (fingerprint_of([400], end=1600), "x.safetensors: "),
    "another size": (fingerprint_of([3]), "x.safetensors: "),
    "an unknown dtype": (fingerprint_of([4], "F33"), "x.safetensors: "),
    "a dtype that torch lacks": (fingerprint_of([32], "F4"), "a: unsupported dtype 'F4'"),
    "offsets that are no JSON": (fingerprint_of([4], offsets="{"), "JSONDecodeError"),
    "offsets that are a list": (
        fingerprint_of([4], offsets="[]"),
        "DCP_SHARDING_INFO: AttributeError",
    ),
    "offsets without the key": (
        fingerprint_of([4], offsets='{"a": {}}'),
        "KeyError('saved_offsets')",
    ),
    "offsets as a text": (fingerprint_of([4], offsets="0"), "DCP_SHARDING_INFO: "),
    "a negative offset": (fingerprint_of([4], offsets=[-4]), "[-4] is too large or negative"),
    "a fraction": (fingerprint_of([4], offsets=[0.5]), "[0.5] is not a list of integers"),
    "a huge offset": (fingerprint_of([4], offsets=[1 << 62]), "is too large or negative"),
    "a gap": (fingerprint_of([4], offsets=[4]), "a: pieces have 4 of 8 elements"),
    "another number of dims": (
        fingerprint_of([4], offsets=[0, 0]),
        "a has 1 dims and offsets (0, 0)",
    ),
    "deep offsets": (
        fingerprint_of([4], offsets="[" * 100_000),
        "DCP_SHARDING_INFO: RecursionError",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_contradicts(name: str, tmp_path: Path) -> None:
    header, text = HEADERS[name]
    write_file(tmp_path / "x.safetensors", header, bytes(16))
    texts = set()
    for size in (1, 2):

        def program() -> str:
            with pytest.raises(md.CheckpointError) as caught:
                md.checkpoint.load({"a": torch.zeros(4)}, tmp_path)
            return str(caught.value).replace("ranks 0-1, ", "").replace("rank 0, ", "")

        texts |= {program()} if size == 1 else set(md.simulate(program, size))
    (error,) = texts
    assert text in error
    assert "the checkpoint is damaged, or was not written by md.checkpoint.save" in error
    assert len(error) < 1200
    with pytest.raises(md.CheckpointError, match="is damaged"):
        md.checkpoint.open(tmp_path / "x.safetensors")


def test_a_length_of_a_header_that_is_huge(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + bytes(100))
    with pytest.raises(md.CheckpointError, match=r"x\.safetensors: .*header too large"):
        md.checkpoint.open(tmp_path)


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    for second, text in (
        (fingerprint_of([4], offsets=[2]), "a: pieces [0:4] and [2:6] overlap"),
        (fingerprint_of([4]), "a: pieces [0:4] and [0:4] overlap"),
        (fingerprint_of([4], "I32", [4]), "a has different dtypes or dims in two files"),
        (fingerprint_of([4, 1], offsets=[4, 0]), "a has different dtypes or dims in two files"),
        (fingerprint_of([4], offsets=[5]), "a: pieces have 8 of 9 elements"),
    ):
        write_file(tmp_path / "x.safetensors", fingerprint_of([4], offsets=[0]), bytes(16))
        write_file(tmp_path / "y.safetensors", second, bytes(16))
        with pytest.raises(md.CheckpointError, match="is damaged") as caught:
            md.checkpoint.open(tmp_path)
        assert text in str(caught.value)


# -- drawn ----------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 7),
    st.sampled_from([1 << 62, 1 << 80, 0.0, 1.0, float("nan"), float("inf"), 1e300]),
    st.sampled_from(["", "a", "b", "float32", "int8", FIRST, SECOND, "../x.safetensors", "\ud800"]),
    st.lists(st.integers(-1, 6), max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "dtype", "shape"]), st.integers(0, 3), max_size=2),
)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """All dicts and lists in a JSON value, each with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += places_in(value[key])
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_manifests_give_an_error_or_right_values(data: st.DataObject, copy: Path) -> None:
    manifest = read_manifest(copy)
    before = copies.deepcopy(manifest)
    for _ in range(data.draw(st.integers(1, 3))):
        places = places_in(manifest)
        owner, key = data.draw(st.sampled_from(places))
        kind = data.draw(st.sampled_from(["set", "remove", "exchange", "rename"]))
        if kind == "set":
            owner[key] = data.draw(VALUES)
        elif kind == "remove":
            del owner[key]
        elif kind == "exchange":
            other, second = data.draw(st.sampled_from(places))
            values = copies.deepcopy((owner[key], other[second]))
            other[second], owner[key] = values
        elif isinstance(owner, dict):
            owner[data.draw(st.sampled_from(["a", "b", "c", "d", "step", FIRST]))] = owner.pop(key)
    write_manifest(copy, manifest)
    state = empty_state()
    try:
        md.checkpoint.load(state, copy)
    except (md.CheckpointError, md.ShapeError, md.DtypeError):
        pass
    else:
        assert all(torch.equal(state[name], whole) for name, whole in WHOLES.items())
        leaves = manifest["leaves"]
        assert json.dumps([state["step"], state["name"]]) == json.dumps(
            [leaves["step"], leaves["name"]]
        )
    finally:
        write_manifest(copy, before)
