"""Access files and folders of checkpoints, safely against crashes.

A checkpoint NAME is written in the folder ``.NAME.<number>``, which is renamed once everything is
on disk, so a folder under its final name is complete. Each writing process holds a shared lock on
``.NAME.<number>.lock``, next to the folder, until its part is on disk; the kernel drops the lock
however the process ends. The next save removes unfinished folders without a lock. Folders are
renamed before they are removed, so that no incomplete folder keeps the final name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..backends.operation_args import flat
from ..errors import CheckpointError
from ..mesh.placement import shape_of
from .manifest import (
    DTYPES_IN_FILES,
    MALFORMED,
    NAME,
    SUFFIX,
    FingerprintFacts,
    Manifest,
    Piece,
    damaged,
    sizes_in,
)

FAILURES = (OSError, SafetensorError)
"""The exceptions of a disk, a file system, or safetensors."""
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}")
_locks: set[int] = set()
"""The file descriptors of this process's locks."""
_OFFSETS = "DCP_SHARDING_INFO"  # torch's key, so that its HuggingFaceStorageReader finds the pieces


class UnfinishedFolder:
    """The locked folder in which ranks write a checkpoint, next to its final path.

    Args:
        path: the folder that another rank has created; "" creates it.

    Raises:
        CheckpointError: the final path exists.
        FileNotFoundError: another job has removed the folder.
    """

    def __init__(self, final: str, path: str = "") -> None:
        self.final, self.path = final, path
        if path:
            self._lock = _lock_file(f"{path}.lock", shared=True)
            if self._lock is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return
        parent, name = os.path.split(final)
        _make_folders(parent)
        check_is_free(final)
        self.path, self._lock = _new_hidden_path(parent, name)
        try:
            os.mkdir(self.path)
        except BaseException:
            self.unlock()
            raise

    def note(self, rank: int, record: Any) -> None:
        """Write the JSON record of ``rank``'s part, for the rank that commits."""
        with open(self._note_of(rank), "w", encoding="utf-8") as file:
            file.write(json.dumps(record))

    def take_notes(self, ranks: Sequence[int]) -> list[Any]:
        """Return the records of ``ranks`` and remove their files."""
        found = []
        for path in map(self._note_of, ranks):
            with open(path, encoding="utf-8") as file:
                found.append(json.load(file))
            os.unlink(path)
        return found

    def _note_of(self, rank: int) -> str:
        return os.path.join(self.path, f"rank-{rank}.json")

    def commit(self, manifest: str) -> None:
        """Write the manifest and rename the folder, safe against crashes."""
        _sync(self.path)
        path = os.path.join(self.path, NAME)
        with open(path, "w", encoding="utf-8") as file:
            file.write(manifest)
        _sync(path)
        _sync(self.path)
        check_is_free(self.final)
        try:
            os.rename(self.path, self.final)
        except OSError:  # another save was faster
            check_is_free(self.final)
            raise
        try:
            _sync(os.path.dirname(self.final))
        except BaseException:  # a crash might undo the rename, so the save has failed
            with suppress(OSError):
                os.rename(self.final, self.path)
            raise

    def unlock(self) -> None:
        _unlock(self.path, self._lock)


def check_is_free(path: str) -> None:
    if os.path.lexists(path):
        raise CheckpointError(
            "cannot save a checkpoint because the path exists",
            where=path,
            expected="a path that does not exist",
            found="a folder" if os.path.isdir(path) else "a file",
            fix="use a new path for each step, or use md.checkpoint.Checkpointer, which does",
        )


def remove_leftovers(parent: str) -> None:
    """Remove ended processes' unfinished folders in ``parent``, if possible."""
    for entry in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
        path = os.path.join(parent, entry.removesuffix(".lock"))
        if entry.endswith(".lock") and _UNFINISHED.fullmatch(os.path.basename(path)):
            with suppress(OSError):
                lock = _lock_file(f"{path}.lock")
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    _unlock(path, lock)


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint; after a crash, the next save removes the rest."""
    parent, name = os.path.split(path)
    hidden, lock = _new_hidden_path(parent, name)
    try:
        os.rename(path, hidden)
        _sync(parent)  # otherwise a crash might restore the name of an incomplete folder
        shutil.rmtree(hidden)
    finally:
        _unlock(hidden, lock)


def write_arrays(
    path: str,
    arrays: Mapping[str, torch.Tensor],
    offsets: Mapping[str, list[int]],
    *,
    sums_on_thread: bool,
) -> tuple[int, dict[str, int]]:
    """Write CPU arrays to a file on disk; return its size and the arrays' CRC-32s.

    Args:
        offsets: each array's start in its global array.
        sums_on_thread: whether to compute checksums on a thread during the write.
    """
    offsets_json = {name: {"saved_offsets": list(offsets[name])} for name in arrays}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", _OFFSETS: json.dumps(offsets_json)}
    with ThreadPoolExecutor(1) as thread:
        # Both release the GIL.
        sums = thread.submit(_sums_of, arrays) if sums_on_thread else None
        save_file(dict(arrays), path, metadata)
        _sync(path)
        return os.stat(path).st_size, sums.result() if sums else _sums_of(arrays)


def _sums_of(arrays: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: crc32(array) for name, array in arrays.items()}


def crc32(array: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous array's bytes."""
    # Arrays of at most one element may have strides of 0.
    return zlib.crc32(flat(array).view(torch.uint8).numpy().data)


class OpenFiles:
    """The opened safetensors files of a checkpoint."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._offsets: dict[str, dict[str, tuple[int, ...]]] = {}

    def get(self, file: str) -> Any:
        """Return the file, opened at first use; raise CheckpointError if damaged."""
        found = self._open.get(file)
        if found is None:
            try:
                found = safe_open(os.path.join(self._folder, file), framework="pt")
            except SafetensorError as error:
                raise damaged(self._folder, f"{file}: {error}") from None
            self._open[file] = found
        return found

    def check(self, piece: Piece, name: str, dtype: str) -> None:
        """Raise CheckpointError unless the file has the piece's dtype, shape and offsets."""
        try:
            found = self._facts_of(piece.file, name)
        except SafetensorError as error:
            raise damaged(self._folder, f"{piece.file}: {error}") from None
        starts = tuple(start for start, _ in piece.box)
        expected_facts = DTYPES_IN_FILES[dtype].in_files, shape_of(piece.box), starts
        if found != expected_facts:
            raise damaged(
                self._folder, f"{piece.file}: {name} is {found}; in the manifest {expected_facts}"
            )

    def header(self, file: str) -> dict[str, FingerprintFacts]:
        """Return {array: (dtype name, shape, offsets)} of a file."""
        return {name: self._facts_of(file, name) for name in list(self.get(file).keys())}

    def _facts_of(self, file: str, name: str) -> FingerprintFacts:
        part = self.get(file).get_slice(name)
        shape = tuple(part.get_shape())
        if file not in self._offsets:
            try:
                offsets_json = json.loads((self.get(file).metadata() or {}).get(_OFFSETS, "{}"))
                self._offsets[file] = {
                    each: sizes_in(facts["saved_offsets"]) for each, facts in offsets_json.items()
                }
            except MALFORMED as error:
                raise damaged(self._folder, f"{file}: {_OFFSETS}: {error!r}") from error
        offsets = self._offsets[file].get(name, (0,) * len(shape))
        if len(offsets) != len(shape):
            found = f"{name} has {len(shape)} dims and offsets {offsets}"
            raise damaged(self._folder, f"{file}: {found}")
        return part.get_dtype(), shape, offsets


def find_files(path: str) -> tuple[str, dict[str, int], str | None]:
    """Return (folder, {file: bytes}, manifest's text or None) of a folder or safetensors file.

    Raises:
        CheckpointError: neither such a file nor a manifest exists.
    """
    if os.path.isfile(path) and path.endswith(SUFFIX):
        folder, file = os.path.split(path)
        return folder, {file: os.stat(path).st_size}, None
    sizes = {}
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        manifest = os.path.join(path, NAME)
        if os.path.isfile(manifest):
            with open(manifest, "rb") as opened:
                # Invalid bytes are damage, which the checksum of the text detects.
                return path, sizes, opened.read().decode(errors="replace")
    if not sizes:
        raise CheckpointError(
            "the path has no checkpoint",
            where=path,
            expected=f"a folder with {NAME} or safetensors files; or a safetensors file",
            found=_found_text(path),
            fix="pass the folder of a saved checkpoint"
            if not (steps := sorted(find_steps(path)))
            else "the path is the root of a "
            f"Checkpointer: load {os.path.join(path, f'step-{steps[-1]}')!r}",
        )
    return path, sizes, None


def check_manifest(folder: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless this rank sees the same manifest file."""
    expected_facts = manifest.ending.encode()
    if not expected_facts:
        return
    with open(os.path.join(folder, NAME), "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - len(expected_facts), 0))
        found = file.read()
    if found != expected_facts:
        raise CheckpointError(
            "this rank sees a different checkpoint at this path than the first rank",
            where=folder,
            expected="one folder shared by all ranks, or copies of it",
            fix="load from a shared file system, or copy the checkpoint to each host",
        )


def find_steps(root: str) -> Iterator[int]:
    """Yield the numbers of complete checkpoints "step-<number>"."""
    for name in os.listdir(root) if os.path.isdir(root) else ():
        match = re.fullmatch(r"step-(0|[1-9]\d*)", name)
        if match and os.path.isfile(os.path.join(root, name, NAME)):
            yield int(match[1])


def lock_folder(path: str) -> int | None:
    """Create and lock a folder; return the lock's descriptor, None if already locked."""
    _make_folders(path)
    return _lock_file(os.path.join(path, ".lock"), os.O_CREAT)


def _found_text(path: str) -> str:
    if os.path.isdir(path):
        return "a folder without these files"
    return "another file" if os.path.lexists(path) else "nothing"


def _make_folders(path: str) -> None:
    """Create a folder and its parents, synced to disk."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_folders(parent)
    with suppress(FileExistsError):  # another process may create it
        os.mkdir(path)
    _sync(parent)


def _sync(path: str) -> None:
    """Flush a file, or a folder's entries, to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _new_hidden_path(parent: str, name: str) -> tuple[str, int]:
    """Return a new hidden path in ``parent``, and its lock's descriptor."""
    while True:
        path = os.path.join(parent, f".{name}.{secrets.token_hex(8)}")
        lock = _lock_file(f"{path}.lock", os.O_CREAT | os.O_EXCL, shared=True)
        if lock is not None:  # otherwise another save removed it as a leftover
            return path, lock


def _unlock(path: str, lock: int | None) -> None:
    """Close a lock, and remove its file if its folder is gone."""
    if not os.path.lexists(path):
        with suppress(OSError):
            os.unlink(f"{path}.lock")
    close_lock(lock)


def _lock_file(path: str, flags: int = 0, *, shared: bool = False) -> int | None:
    """Open and lock a file; return the descriptor, None if another process locked it."""
    # On a file system without locks, return a file that may be new; leftovers count as locked.
    opened = os.open(path, os.O_RDWR | flags, 0o666)
    try:
        fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        is_own = os.fstat(opened).st_ino == os.stat(path).st_ino
    except (BlockingIOError, FileNotFoundError):
        is_own = False
    except OSError:
        is_own = shared or bool(flags & os.O_CREAT)
    if is_own:
        _locks.add(opened)
        return opened
    os.close(opened)
    return None


def close_lock(lock: int | None) -> None:
    """Close a lock's descriptor, if this process took it."""
    if lock is not None and lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _close_copies() -> None:
    """Close a forked child's copies of lock descriptors."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_copies)
