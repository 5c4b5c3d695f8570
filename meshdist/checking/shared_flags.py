"""Share words of memory that one process writes and other processes of its host read.

Access takes no system call. The memory has no file name: processes of the same user open it through
``/proc/PID/fd``, and it is freed when the process ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..runtime.deadlines import Deadline

_TOTAL_BYTES = 1 << 28  # of address space: only written pages use memory
TOTAL_WORDS = _TOTAL_BYTES // 8
_DIRECTORY_WORDS = 1 << 13
_PAGE_WORDS = mmap.PAGESIZE // 8
SILENT_S = 1.0
_NAME = "meshdist-words"
_LINK = f"/memfd:{_NAME}"  # its name in the system's list of open files
# Words of the directory; an entry is a key and the position of its region.
_NONCE, _COUNT, _IS_FULL, _ENTRIES = 0, 1, 2, 3
_MOST_ENTRIES = (_DIRECTORY_WORDS - _ENTRIES) // 2


class FlagsAddress(NamedTuple):
    """The address at which other processes of the host find shared words.

    Args:
        file: the process's descriptor of that memory.
        nonce: a random number stored at its start.
    """

    pid: int
    file: int
    nonce: int


class SharedFlags:
    """Regions of 64-bit words that this process shares, each under a key.

    Raises:
        OSError: the system does not support such memory.
    """

    def __init__(self) -> None:
        file = os.memfd_create(_NAME)
        try:
            os.ftruncate(file, _TOTAL_BYTES)
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
        self.address = FlagsAddress(os.getpid(), file, self._words[_NONCE])

    def reserve(self, key: int, num_words: int) -> memoryview:
        """Return ``num_words`` or more new words, all zero, that others find under ``key``.

        Raises:
            MemoryError: the memory is full.
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
        """Free the region under ``key``, for a later region of its size."""
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._words[slot.entry] = 0
                self._free.append(slot)

    def close(self) -> None:
        """Prevent other processes from opening the memory; views that exist stay valid."""
        os.close(self._file)

    def _new_slot(self, num_words: int) -> _Slot:
        entry = _ENTRIES + 2 * int(self._words[_COUNT])
        if entry + 2 > _DIRECTORY_WORDS or self._end + num_words > TOTAL_WORDS:
            self._words[_IS_FULL] = 1
            raise MemoryError("the shared words of this process are full")
        slot = _Slot(entry, self._end, num_words)
        self._end += num_words
        return slot


@dataclass(frozen=True)
class _Slot:
    entry: int
    start: int
    num_words: int


class SharedFlagsView:
    """Another process's shared words, mapped for reading.

    Raises:
        OSError: the memory is inaccessible, or belongs to a different process.
    """

    def __init__(self, address: FlagsAddress) -> None:
        self._path = path = f"/proc/{address.pid}/fd/{address.file}"
        if not self._is_there():  # checked first: opening another file could have effects
            raise OSError(f"{path} is no memory of meshdist")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.fstat(file).st_size != _TOTAL_BYTES:
                raise OSError(f"{path} is no memory of meshdist")
            self._words = _mapped(file, mmap.ACCESS_READ)
        finally:
            os.close(file)
        if self._words[_NONCE] != address.nonce:
            raise OSError(f"{path} is the memory of another process")

    def is_kept(self) -> bool:
        """Return whether the process is alive and has not closed its shared words."""
        try:
            return self._is_there()
        except PermissionError:  # it is alive, and has changed its user
            return True
        except OSError:
            return False

    def _is_there(self) -> bool:
        return os.readlink(self._path).startswith(_LINK)

    def find(self, key: int, num_words: int) -> memoryview | None:
        """Return the words under ``key``, or None while it does not exist."""
        entry = self._entry(key)
        if entry is None:
            return None
        start = int(self._words[entry + 1])
        words = self._words[start : start + num_words]
        return words if len(words) == num_words and self._entry(key) == entry else None

    def is_full(self) -> bool:
        """Return whether the process failed to reserve a region, so regions may be missing."""
        return bool(self._words[_IS_FULL])

    def has(self, key: int) -> bool:
        return self._entry(key) is not None

    def _entry(self, key: int) -> int | None:
        count = min(int(self._words[_COUNT]), _MOST_ENTRIES)
        keys = self._words[_ENTRIES : _ENTRIES + 2 * count : 2].tolist()
        return _ENTRIES + 2 * keys.index(key) if key in keys else None


class Regions:
    """The regions of a group's other members, found as soon as they exist.

    Args:
        find: returns a member's shared words (None if inaccessible) and region key; None while
            unknown.
    """

    def __init__(self, find: Callable[[int], tuple[SharedFlagsView | None, int] | None]) -> None:
        self._find = find
        self._found: dict[int, tuple[SharedFlagsView | None, int]] = {}

    def find(self, member: int, num_words: int) -> memoryview | None:
        """Return ``num_words`` words of ``member``, or None while not found."""
        view, key = self._look(member)
        return None if view is None else view.find(key, num_words)

    def reaches(self, member: int) -> bool:
        """Return whether this process will find a region that ``member`` reserves."""
        view, _ = self._look(member)
        return view is not None and not view.is_full()

    def _look(self, member: int) -> tuple[SharedFlagsView | None, int]:
        if member not in self._found:
            found = self._find(member)
            if found is None:
                return None, 0
            self._found[member] = found
        return self._found[member]

    def is_current(self, member: int) -> bool:
        """Return whether a member's words, once found, are still reserved for this group."""
        view, key = self._found.get(member, (None, 0))
        return view is not None and view.has(key)

    def is_alive(self, member: int) -> bool:
        """Return whether a member's words were found, and its process can still write."""
        view, _ = self._found.get(member, (None, 0))
        return view is not None and view.is_kept() and self.is_current(member)


class Heartbeats:
    """Heartbeats that show a host's lowest live process, and the number it published last.

    Args:
        mine: this process's words, or None.
        regions: the regions of the ``num_lower`` lower processes.
    """

    # Each process counts its beats in shared words, next to the number that it publishes:
    #
    #     rank 0   beat 812   number 3
    #     rank 1   beat 809   number 3     reads the words of rank 0
    #     rank 2   beat 811   number 3     reads the words of rank 0
    #
    # If rank 0 ends, its words disappear. If it is stopped or starved, its beat stays equal for a
    # second. Then rank 1 counts as the lowest until rank 0 beats again.

    def __init__(self, mine: memoryview | None, regions: Regions, num_lower: int) -> None:
        self._mine, self._regions = mine, regions
        self._beats = [(-1, Deadline(0.0))] * num_lower

    def beat(self, number: int) -> None:
        """Increment this process's heartbeat and publish ``number``, the latest signal's."""
        if self._mine is not None:
            self._mine[0], self._mine[1] = self._mine[0] + 1, number

    def find_published(self) -> int | None:
        """Return the number that the lowest live process publishes; None if this is the lowest."""
        for member, (beat, silence) in enumerate(self._beats):
            words = self._regions.find(member, _PAGE_WORDS)
            if words is not None and self._regions.is_alive(member):
                if words[0] != beat:
                    silence = Deadline(SILENT_S)
                    self._beats[member] = words[0], silence
                if not silence.is_over:
                    return words[1]
        return None


def make_shared_words() -> SharedFlags | None:
    """Return new shared words for this process, or None if the system has no memfd."""
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None
    try:
        return SharedFlags()
    except OSError:
        return None


@cache
def words_of_process() -> SharedFlags | None:
    """Return this process's shared words for torch's groups, or None if not supported."""
    return make_shared_words()


os.register_at_fork(after_in_child=words_of_process.cache_clear)


def find_view(address: FlagsAddress) -> SharedFlagsView | None:
    """Return the shared words at ``address``, or None if inaccessible."""
    try:
        return SharedFlagsView(address)
    except OSError:
        return None


def _mapped(file: int, access: int) -> memoryview:
    return memoryview(mmap.mmap(file, _TOTAL_BYTES, access=access)).cast("Q")
