"""Disks that are full, read-only, or fail: one error on all ranks, and no file is left over."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checkpoint import files
from meshdist.checkpoint.saving import SaveJob
from tests.pool import Pool

from .file_operations import Operation, watched

MAKING = ("mkdir", "write", "rename")
SAYS = {errno.ENOSPC: "No space left on device", errno.EIO: "Input/output error"}


def state_of(value: float, num_elements: int = 12) -> dict[str, Any]:
    mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
    rows = md.NamedSharding(mesh, md.P("dp"))
    return {"x": md.full((num_elements, 2), value, sharding=rows), "step": int(value)}


def find_error(path: Path, size: int = 3, num_elements: int = 12, call: str = "save") -> str | None:
    """Save on some ranks; return the error of all of them, or None."""

    def program() -> str | None:
        try:
            saved = getattr(md.checkpoint, call)(state_of(2.0, num_elements), path)
            if saved is not None:
                saved.wait()
        except md.CheckpointError as error:
            return str(error)
        return None

    (found,) = set(md.simulate(program, size))
    return found


class FailFrom:
    """Let an operation fail: that of a number, or all from it on that need room on the disk."""

    def __init__(self, number: int, code: int, *, is_lasting: bool) -> None:
        self._left, self._code, self._is_lasting = number, code, is_lasting
        self.failed: list[str] = []

    def __call__(self, operation: Operation) -> Any:
        self._left -= 1
        if self._left == -1 or (self._left < 0 and self._is_lasting and operation.name in MAKING):
            self.failed.append(operation.name)
            if operation.name == "write" and not operation.path.endswith(".lock"):
                operation.tear()
            raise OSError(self._code, os.strerror(self._code), operation.path)
        return operation.do()


@pytest.mark.parametrize(
    ("code", "is_lasting"), [(errno.ENOSPC, True), (errno.EIO, False)], ids=["full", "faulty"]
)
def test_a_disk_that_fails_at_any_operation(code: int, is_lasting: bool, tmp_path: Path) -> None:
    root = tmp_path / "folder" / "below"
    number, texts = 0, set()
    while True:
        act = FailFrom(number, code, is_lasting=is_lasting)
        with watched(act):
            error = find_error(root / "new")
        if not act.failed:
            break
        left = sorted(os.listdir(root)) if root.exists() else []
        if error is None:  # the disk has no locks; or all is there, and a lock could not be removed
            assert act.failed[0] in ("lock", "unlink")
            assert md.checkpoint.open(root / "new").leaves == {"step": 2}
        else:
            # A name that the disk may forget is taken back, unless that fails too: all is whole.
            is_there = act.failed == ["fsync", "rename"] and left == ["new"]
            assert is_there or left == []
            assert "checkpoint.save failed because of a disk or file system error" in error
            assert SAYS[code] in error
            texts.add(error.splitlines()[1].split(",")[0])
        assert find_error(root / "next") is None
        whole = ["new", "next"] if (root / "new").exists() else ["next"]
        assert sorted(os.listdir(root)) == whole
        for name in whole:
            assert md.checkpoint.open(root / name).read("x").tolist() == [[2.0, 2.0]] * 12
        subprocess.run(["rm", "-r", str(tmp_path / "folder")], check=True)
        number += 1
    assert number > 12
    assert "  where:    rank 0" in texts
    assert len(texts) > 1


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where the system lets us mount it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs the rights to mount it")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_disk_that_is_full(call: str, mounted: Path) -> None:
    assert find_error(mounted / "old", call=call) is None
    for size in (1, 2, 3):
        error = find_error(mounted / "new", size, 100_000, call)
        assert error is not None
        assert f"checkpoint.{call} failed because of a disk or file system error" in error
        assert "No space left on device" in error
        assert os.listdir(mounted) == ["old"]
    assert md.checkpoint.open(mounted / "old").leaves == {"step": 2}


def test_a_disk_that_is_read_only(mounted: Path) -> None:
    assert find_error(mounted / "old") is None
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    for size in (1, 3):
        error = find_error(mounted / "new", size)
        assert error is not None
        assert "checkpoint.save failed because of a disk or file system error" in error
        assert "Read-only file system" in error
        assert f"where:    {'rank 0, ' if size > 1 else ''}{mounted}/" in error

        def keep() -> None:
            md.checkpoint.Checkpointer(mounted).save(state_of(3.0), 3)

        with pytest.raises(md.CheckpointError, match="Read-only file system"):
            md.simulate(keep, size)

        def load() -> bool:
            state = state_of(0.0)
            md.checkpoint.load(state, mounted / "old", verify=True)
            return bool((state["x"].local == 2).all())

        assert all(md.simulate(load, size))
    assert os.listdir(mounted) == ["old"]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_path_that_is_taken(call: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name, found in (("file", "a file"), ("folder", "a folder"), ("link", "a file")):
        error = find_error(tmp_path / name, size, call=call)
        assert error is not None
        assert "cannot save a checkpoint because the path exists" in error
        assert "expected: a path that does not exist" in error
        assert f"found:    {found}\n" in error
        assert "or use md.checkpoint.Checkpointer, which does" in error
    assert "Not a directory" in str(find_error(tmp_path / "file" / "below", size, call=call))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("size", [2, 3])
def test_a_folder_that_a_rank_does_not_see(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isdir = os.path.isdir

    def sees(path: Any) -> bool:
        is_local = md.is_initialized() and md.get_rank() == size - 1 and "/.new." in str(path)
        return isdir(path) and not is_local

    monkeypatch.setattr(os.path, "isdir", sees)
    error = find_error(tmp_path / "new", size)
    assert error is not None
    assert "this rank cannot see the folder that the first rank created" in error
    assert f"where:    rank {size - 1}, {tmp_path}/.new." in error
    assert "expected: a file system shared by all ranks" in error
    assert "fix:      save to a shared file system" in error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["save", "save_async"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_cannot_copy_its_part(
    backend: str, call: str, pool: Pool, tmp_path: Path
) -> None:
    def program(root: str) -> tuple[str, list[str]]:
        views = SaveJob.views
        if md.get_rank() == 1:

            def fail(_: SaveJob) -> Any:
                raise MemoryError("no memory for a copy")

            SaveJob.views = fail  # type: ignore[method-assign]
        state = {"x": torch.ones(3)}

        def save() -> None:
            saved = getattr(md.checkpoint, call)(state, f"{root}/new")
            saved.wait()

        with pytest.raises(md.CheckpointError) as caught:
            save()
        SaveJob.views = views  # type: ignore[method-assign]
        md.barrier()
        left = os.listdir(root)
        md.barrier()
        md.checkpoint.save(state, f"{root}/next")
        return str(caught.value), left

    (first, *others) = pool.run(program, 3, str(tmp_path), backend=backend)
    assert others == [first, first]
    text, left = first
    assert f"checkpoint.{call}: MemoryError: no memory for a copy" in text
    assert "where:    rank 1" in text
    assert left == []
    assert os.listdir(tmp_path) == ["next"]


def test_a_disk_that_fails_during_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays are read by several ranks, small ones by one."""
    rows = 20_000

    def save() -> None:
        md.checkpoint.save({**state_of(2.0, rows), "small": torch.ones(2)}, tmp_path / "a")

    md.simulate(save, 2)
    get_tensor = files.OpenFiles.get
    outcomes = set()
    for number in range(40):
        left = number

        class Failing:
            """A file of safetensors whose arrays cannot be read from a number of reads on."""

            def __init__(self, opened: Any) -> None:
                self._opened = opened

            def get_tensor(self, name: str) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return self._opened.get_tensor(name)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._opened, name)

        monkeypatch.setattr(
            files.OpenFiles, "get", lambda self, file: Failing(get_tensor(self, file))
        )

        def load() -> str | None:
            state = {**state_of(0.0, rows), "small": torch.zeros(2)}
            try:
                md.checkpoint.load(state, tmp_path / "a")
            except md.CheckpointError as error:
                return str(error)
            return None if bool((state["x"].local == 2).all()) else "wrong"

        found = set(md.simulate(load, 3))
        assert len(found) == 1
        outcomes |= found
        if found == {None}:
            break
    texts = [text for text in outcomes if text is not None]
    assert None in outcomes
    assert len(texts) > 1
    for text in texts:
        assert "checkpoint.load: cannot read a file; the values of the state are undefined" in text
        assert "Input/output error" in text
        assert "load again, or load another checkpoint, before you use the state" in text
