"""Boards: memory of one process that the other processes of its host can read.

A process has one board per world. What it writes there costs nobody a system call, and nobody else
can write it. The memory has no name in any file system: others open it by way of the process's
own list of open files, which the system grants to the same user alone, and nothing is left behind
when the process ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Board", "BoardAddress", "BoardView", "find_board", "find_view"]

_BOARD_BYTES = 1 << 28  # of address space: memory is taken by what is written alone
_BOARD_WORDS = _BOARD_BYTES // 8
_DIRECTORY_WORDS = 1 << 13
_PAGE_WORDS = mmap.PAGESIZE // 8
_NAME = "meshdist-board"
_LINK = f"/memfd:{_NAME}"  # how the system's list of open files shows it
_NONCE, _COUNT, _ENTRIES = 0, 1, 2  # words of the directory; an entry is a key and where it lies


@dataclass(frozen=True)
class BoardAddress:
    """Where other processes of the host find a board.

    Args:
        pid: the process.
        file: its number for the board's memory.
        nonce: a random number that stands at the beginning of the board.
    """

    pid: int
    file: int
    nonce: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values; ``from_json`` is the way back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BoardAddress:
        """Return the address that ``to_json`` gave."""
        return cls(int(values["pid"]), int(values["file"]), int(values["nonce"]))


class Board:
    """This process's board: regions of 64-bit words, each under a key of its own.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        file = os.memfd_create(_NAME)
        try:
            os.ftruncate(file, _BOARD_BYTES)
            self._words = _mapped(file, mmap.ACCESS_WRITE)
        except OSError:
            os.close(file)
            raise
        self._file = file
        self._end = _DIRECTORY_WORDS
        self._slots: dict[int, _Slot] = {}
        self._free: list[_Slot] = []
        self._lock = threading.Lock()
        self._words[_NONCE] = secrets.randbits(63)
        self.address = BoardAddress(os.getpid(), file, self._words[_NONCE])

    def reserve(self, key: int, num_words: int) -> memoryview:
        """Return new words, all zero, that others find under ``key``.

        Raises:
            MemoryError: the board is full.
        """
        num_words = -(-num_words // _PAGE_WORDS) * _PAGE_WORDS
        with self._lock:
            slot = next((slot for slot in self._free if slot.num_words == num_words), None)
            if slot is None:
                slot = self._new_slot(num_words)
                region = self._words[slot.start : slot.start + num_words]
            else:
                self._free.remove(slot)
                region = self._words[slot.start : slot.start + num_words]
                region.cast("B")[:] = bytes(8 * num_words)
            self._slots[key] = slot
            self._words[slot.entry + 1] = slot.start
            self._words[slot.entry] = key
            self._words[_COUNT] = max((slot.entry - _ENTRIES) // 2 + 1, self._words[_COUNT])
            return region

    def release(self, key: int) -> None:
        """Give a region back, for another key."""
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._words[slot.entry] = 0
                self._free.append(slot)

    def close(self) -> None:
        """Let nobody find the board any more; who has it mapped keeps it."""
        os.close(self._file)

    def _new_slot(self, num_words: int) -> _Slot:
        entry = _ENTRIES + 2 * int(self._words[_COUNT])
        if entry + 2 > _DIRECTORY_WORDS or self._end + num_words > _BOARD_WORDS:
            raise MemoryError("the board of this process is full")
        slot = _Slot(entry, self._end, num_words)
        self._end += num_words
        return slot


@dataclass(frozen=True)
class _Slot:
    entry: int
    start: int
    num_words: int


class BoardView:
    """Another process's board, to read.

    Raises:
        OSError: it cannot be reached from here, or is not the one that was meant.
    """

    def __init__(self, address: BoardAddress) -> None:
        self._path = path = f"/proc/{address.pid}/fd/{address.file}"
        if not self._is_there():  # looked at first: to open some other file might do something
            raise OSError(f"{path} is no board")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(file).st_size != _BOARD_BYTES:
                raise OSError(f"{path} is no board")
            self._words = _mapped(file, mmap.ACCESS_READ)
        finally:
            os.close(file)
        if self._words[_NONCE] != address.nonce:
            raise OSError(f"{path} is another board")

    def is_kept(self) -> bool:
        """Whether the process lives, and has not closed its board."""
        try:
            return self._is_there()
        except PermissionError:  # it lives, and has changed its user
            return True
        except OSError:
            return False

    def _is_there(self) -> bool:
        return os.readlink(self._path).startswith(_LINK)

    def find(self, key: int, num_words: int) -> memoryview | None:
        """Return the words under ``key``, or None while there are none."""
        entry = self._entry(key)
        if entry is None:
            return None
        start = int(self._words[entry + 1])
        return self._words[start : start + num_words] if self._entry(key) == entry else None

    def has(self, key: int) -> bool:
        """Whether there is a region under ``key`` still."""
        return self._entry(key) is not None

    def _entry(self, key: int) -> int | None:
        count = int(self._words[_COUNT])
        keys = self._words[_ENTRIES : _ENTRIES + 2 * count : 2].tolist()
        return _ENTRIES + 2 * keys.index(key) if key in keys else None


def find_board() -> Board | None:
    """Return a new board for this process, or None where the system has none (no memfd)."""
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None
    try:
        return Board()
    except OSError:
        return None


def find_view(address: BoardAddress) -> BoardView | None:
    """Return the board at ``address``, or None where it cannot be reached from here."""
    try:
        return BoardView(address)
    except OSError:
        return None


def _mapped(file: int, access: int) -> memoryview:
    return memoryview(mmap.mmap(file, _BOARD_BYTES, access=access)).cast("Q")
