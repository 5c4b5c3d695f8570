"""A machine crashes in the middle of a save: whatever it forgets, the old step loads, or the new.

The operations of a save are noted, and replayed on a model of a file system that forgets: bytes of
a file that no fsync has followed may be missing, torn or there; a name whose folder no fsync has
followed may be as it was before.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import meshdist as md

from .file_operations import Operation, watched

SIZE = 2
RETURNED = "returned"
DRAWS = 6


@dataclass
class File:
    """A file: what is in it, and how much of that is on the disk."""

    data: bytes
    is_synced: bool = False


@dataclass
class Folder:
    """A folder: the names that are on the disk, and the changes that may not be."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, File | Folder]] = field(default_factory=list)
    """Names that go, names that come, of what."""

    def now(self) -> dict[str, File | Folder]:
        """Its names, all changes made."""
        return self.after(self.changes)

    def after(self, changes: Sequence[Any]) -> dict[str, File | Folder]:
        names = dict(self.names)
        for gone, come, what in changes:
            if gone is not None:
                names.pop(gone, None)
            if come is not None:
                names[come] = what
        return names

    def sync(self) -> None:
        self.names, self.changes = self.now(), []


class Disk:
    """A file system that forgets, below one folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.top = Folder()

    def find(self, path: str) -> File | Folder:
        found: File | Folder = self.top
        for name in Path(path).relative_to(self.root).parts:
            assert isinstance(found, Folder)
            found = found.now()[name]
        return found

    def folder_of(self, path: str) -> tuple[Folder, str]:
        parent = self.find(os.path.dirname(path))
        assert isinstance(parent, Folder)
        return parent, os.path.basename(path)

    def replay(self, name: str, paths: tuple[str, ...], data: bytes) -> None:
        """Do an operation as the disk did it."""
        if name == "fsync":
            found = self.find(paths[0])
            if isinstance(found, Folder):
                found.sync()
            else:
                found.is_synced = True
            return
        if name in (RETURNED, "lock"):
            return
        folder, last = self.folder_of(paths[-1])
        if name == "rename":
            first = os.path.basename(paths[0])
            folder.changes.append((first, last, folder.now()[first]))
        elif name in ("unlink", "rmdir"):
            folder.changes.append((last, None, folder.now()[last]))
        else:
            folder.changes.append((None, last, Folder() if name == "mkdir" else File(data)))

    def crash(self, into: str, choose: Choice) -> None:
        """Make a folder as a crash may leave this one."""
        _make(self.top, into, choose)


class Choice:
    """Which changes a crash keeps, and what it leaves of a file: of all alike, or drawn."""

    def __init__(self, keeps: bool | None, part: float | None, seed: int = 0) -> None:
        self._keeps, self._part = keeps, part
        self._random = random.Random(seed)

    def keeps(self) -> bool:
        return self._random.random() < 0.5 if self._keeps is None else self._keeps

    def part(self) -> float:
        return self._random.choice((0.0, 0.5, 1.0)) if self._part is None else self._part


def _make(folder: Folder, path: str, choose: Choice) -> None:
    os.mkdir(path)
    kept = [change for change in folder.changes if choose.keeps()]
    for name, what in folder.after(kept).items():
        below = os.path.join(path, name)
        if isinstance(what, Folder):
            _make(what, below, choose)
        else:
            size = len(what.data) if what.is_synced else int(len(what.data) * choose.part())
            Path(below).write_bytes(what.data[:size])


def choices() -> Iterator[Choice]:
    """Crashes that keep all, or nothing, of names and of bytes; and some that are drawn."""
    for keeps in (True, False):
        for part in (0.0, 0.5, 1.0):
            yield Choice(keeps, part)
    for seed in range(DRAWS):
        yield Choice(None, None, seed)


def save_steps(root: str, steps: Sequence[int], note: Any = None) -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
        checkpoints = md.checkpoint.Checkpointer(root, keep=1, mesh=mesh)
        for step in steps:
            with mesh:
                cut = md.shard(torch.arange(6) + 10 * step, "n@dp")
            checkpoints.save({"cut": cut, "step": step}, step)
            if note is not None and md.get_rank() == 0:
                note(step)

    md.simulate(program, SIZE)


def noted_operations(root: str, steps: Sequence[int]) -> list[tuple[str, tuple[str, ...], bytes]]:
    """Save, and return all operations with the bytes of files, and when the saves returned."""
    noted: list[tuple[str, tuple[str, ...], bytes]] = []

    def act(operation: Operation) -> Any:
        done = operation.do()
        data = Path(operation.path).read_bytes() if operation.name == "write" else b""
        noted.append((operation.name, operation.paths, data))
        return done

    with watched(act):
        save_steps(root, steps, lambda step: noted.append((RETURNED, (str(step),), b"")))
    return noted


def loaded_step(root: str) -> int | None:
    """Load the newest step; return it, if it is whole."""
    state = {"cut": torch.zeros(6, dtype=torch.int64), "step": -1}
    step = md.checkpoint.Checkpointer(root).load(state, verify=True)
    assert step is None or state["step"] == step
    assert step is None or torch.equal(state["cut"], torch.arange(6) + 10 * step)
    return step


def is_a_named_folder_whole(root: str, step: int) -> bool:
    """Whether a step that bears its name has all files; one that does not is not there at all."""
    path = os.path.join(root, f"step-{step}")
    if not os.path.lexists(path):
        return True
    found = md.checkpoint.open(path)
    return found.leaves == {"step": step} and len(found.read("cut")) == 6


def names_in(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def test_a_crash_leaves_the_old_step_or_the_new(tmp_path: Path) -> None:
    root = str(tmp_path / "disk")
    os.mkdir(root)
    noted = noted_operations(f"{root}/run", (1, 2))
    disk = Disk(root)
    returned, seen, number = None, set(), 0
    for name, paths, data in noted:
        if name == "lock":  # the disk is as it was
            continue
        disk.replay(name, paths, data)
        if name == RETURNED:
            returned = int(paths[0])
        for choose in choices():
            into = tmp_path / f"crash-{number}"
            number += 1
            disk.crash(str(into), choose)
            run = str(into / "run")
            step = loaded_step(run)
            assert step in ({None, 1} if returned is None else {returned, returned + 1})
            assert is_a_named_folder_whole(run, 1)
            assert is_a_named_folder_whole(run, 2)
            seen.add(step)
            if number % 10 == 0:
                # What a folder's lock tells is lost with the lock's name: such a folder stays.
                left = {name for name in names_in(run) if f"{name}.lock" not in names_in(run)}
                save_steps(run, (9,))
                assert set(names_in(run)) <= {*left, ".lock", "step-9"} - {"step-1", "step-2"}
                assert loaded_step(run) == 9
            shutil.rmtree(into)
    assert seen == {None, 1, 2}


def test_a_save_has_reached_the_disk_when_it_returns(tmp_path: Path) -> None:
    """Of a first save into folders that were not there, nothing may be lost either."""
    root = str(tmp_path / "disk")
    os.mkdir(root)
    disk = Disk(root)
    for name, paths, data in noted_operations(f"{root}/a/b/run", (1,)):
        disk.replay(name, paths, data)
    for number, choose in enumerate(choices()):
        disk.crash(str(tmp_path / str(number)), choose)
        assert loaded_step(str(tmp_path / str(number) / "a" / "b" / "run")) == 1
