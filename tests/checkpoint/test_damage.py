"""Bytes that flip, files that are missing, short or long: an error, on all ranks, or no harm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import meshdist as md

from .damaged import WHOLES, empty_state, find_error, read_manifest, save_whole

FILES = ("rank-0.safetensors", "rank-1.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "whole"
    save_whole(path)
    assert find_error(path, verify=True) is None
    return path


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def header_bytes(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.mark.parametrize(
    "bits",
    [0x01, pytest.param(0x10, marks=pytest.mark.soak), pytest.param(0xFF, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_no_flipped_byte_gives_wrong_values(name: str, bits: int, copy: Path) -> None:
    file = copy / name
    whole = file.read_bytes()
    first = 0 if name == "manifest.json" else header_bytes(file)
    num_harmless = 0
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= bits
        file.write_bytes(flipped)
        error = find_error(copy, verify=True)
        if name == "manifest.json":
            assert error is not None
        elif place < first:  # what the manifest says too is compared, without verify=True as well
            assert (find_error(copy) is None) == (error is None)
            num_harmless += error is None
        else:
            assert error is not None
            assert f"{name}: the bytes of " in error
            assert "have changed" in error
    assert num_harmless < 60  # of words that nothing reads, and of offsets that are 0


def test_a_flipped_byte_is_found_on_all_ranks(copy: Path) -> None:
    file = copy / FILES[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for size in (2, 3, 5):
        error = find_error(copy, verify=True, size=size)
        assert error is not None
        assert "the checkpoint is damaged, or was not written by md.checkpoint.save" in error
        assert "fix:      load an older checkpoint" in error


def test_files_that_are_missing_short_or_long(copy: Path) -> None:
    for name in FILES:
        file = copy / name
        whole = file.read_bytes()
        said = f"in the manifest {len(whole)} bytes"
        for data in (None, b"", whole[:-1], whole[:100], whole + b"\0", whole + whole):
            if data is None:
                file.unlink()
                found = "no such file"
            else:
                file.write_bytes(data)
                found = f"{len(data)} bytes"
            for size in (1, 3):
                error = find_error(copy, size=size)
                assert error is not None
                assert f"found:    {name}: {found}; {said}" in error
                assert (
                    "the checkpoint is damaged, or was not written by md.checkpoint.save" in error
                )
        file.unlink()
        file.mkdir()
        assert "no such file" in str(find_error(copy))
        file.rmdir()
        file.write_bytes(whole)
    assert find_error(copy) is None


def test_files_of_another_checkpoint_are_found(copy: Path) -> None:
    """Names, sizes and headers are equal, values are not."""
    first, second = (copy / name for name in FILES)
    (copy / "kept").write_bytes(first.read_bytes())
    shutil.copy(second, first)
    assert find_error(copy) is not None
    shutil.copy(copy / "kept", first)
    other = copy.parent / "other"

    def program() -> None:
        with md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)):
            cut = {name: md.shard(WHOLES[name] + 1, "n@dp ...") for name in ("a", "b")}
            md.checkpoint.save({**cut, "c": WHOLES["c"], "step": 5, "name": "run"}, other)

    md.simulate(program, 2)
    shutil.copy(other / FILES[1], second)
    assert f"{FILES[1]}: the bytes of " in str(find_error(copy, verify=True, size=3))


def test_a_manifest_that_is_missing_or_empty(copy: Path) -> None:
    manifest = copy / "manifest.json"
    text = manifest.read_text()
    for data in (b"", text[:-1].encode(), text[: len(text) // 2].encode(), b"\xff\xfe"):
        manifest.write_bytes(data)
        for size in (1, 2):
            error = find_error(copy, size=size)
            assert error is not None
            assert "manifest.json: " in error
    # Without it the folder is such as other tools write: arrays, and no leaves.
    manifest.unlink()
    assert "the checkpoint lacks 2 names of the state" in str(find_error(copy))
    arrays = {name: x for name, x in empty_state().items() if name in WHOLES}
    md.checkpoint.load(arrays, copy)
    assert all(torch.equal(arrays[name], whole) for name, whole in WHOLES.items())
    with pytest.raises(
        md.CheckpointError, match="verify=True requires checksums, which the files lack"
    ):
        md.checkpoint.load(arrays, copy, verify=True)


def test_a_file_that_goes_during_a_load_is_an_error(copy: Path) -> None:
    opened = md.checkpoint.open(copy)
    (copy / FILES[1]).unlink()
    with pytest.raises(
        md.CheckpointError, match="failed because of a disk or file system error"
    ) as caught:
        opened.read("a")
    assert FILES[1] in str(caught.value)
    assert "files" in read_manifest(copy)


def test_folders_that_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    (tmp_path / "y.safetensors").symlink_to("nowhere")
    for path, found in (
        (tmp_path, "a folder without these files"),
        (tmp_path / "none", "nothing"),
        (__file__, "another file"),
    ):
        with pytest.raises(md.CheckpointError, match="the path has no checkpoint") as caught:
            md.checkpoint.open(path)
        assert f"found:    {found}" in str(caught.value)
        assert "the path has no checkpoint" in str(find_error(path, size=3))
