"""Shared words: regions, their reuse, and what cannot be reached."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshdist.checking import shared_flags
from meshdist.checking.shared_flags import (
    FlagsAddress,
    Heartbeats,
    Regions,
    SharedFlags,
    SharedFlagsView,
    find_view,
    make_shared_words,
)
from tests.load import is_within

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

OWNER = """
import json, sys
from meshdist.checking.shared_flags import SharedFlags
words = SharedFlags()
words.reserve(77, 10)[3] = 42
print(json.dumps(words.address), flush=True)
input()
"""


@pytest.fixture
def words():
    words = SharedFlags()
    yield words
    words.close()


def owner() -> tuple[subprocess.Popen[str], FlagsAddress]:
    """A process with shared words, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    return process, FlagsAddress(*json.loads(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def memory_of(words: SharedFlags) -> memoryview:
    """All the words of a process, directory included."""
    return memoryview(mmap.mmap(words.address.file, 0)).cast("Q")


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_written_is_found_under_its_key(words: SharedFlags) -> None:
    view = SharedFlagsView(words.address)
    assert view.find(5, 4) is None and not view.has(5)
    first, second = words.reserve(5, 4), words.reserve(6, 2000)
    first[3] = 2**64 - 1
    second[1999] = 7
    found, other = view.find(5, 4), view.find(6, 2000)
    assert found is not None and found.tolist() == [0, 0, 0, 2**64 - 1]
    assert other is not None and other[1999] == 7 and not any(other[:1999])
    first[0] = 1
    assert found[0] == 1  # one memory
    with pytest.raises(TypeError):
        found[0] = 2  # which its owner alone writes


@pytest.mark.parametrize("start", [2**25 - 3, 2**25, 2**63, 2**64 - 1])
def test_a_region_that_does_not_lie_in_the_words_is_none(words: SharedFlags, start: int) -> None:
    view = SharedFlagsView(words.address)
    words.reserve(5, 4)
    memory_of(words)[3] = start
    assert view.find(5, 4) is None


def test_a_count_beyond_the_directory_is_cut(words: SharedFlags) -> None:
    view = SharedFlagsView(words.address)
    words.reserve(5, 4)
    memory_of(words)[1] = 2**64 - 1
    begin = time.monotonic()
    assert all(view.has(5) and not view.has(6) for _ in range(20))
    assert is_within(time.monotonic() - begin, 1.0)


def test_a_region_that_was_released_is_given_again_and_is_empty(words: SharedFlags) -> None:
    view = SharedFlagsView(words.address)
    words.reserve(5, 1000)[:] = words.reserve(6, 1000)
    region = words.reserve(7, 1000)
    region[999] = 1
    stale = view.find(7, 1000)
    words.release(7)
    assert not view.has(7) and view.find(7, 1000) is None
    again = words.reserve(8, 1000)
    again[0] = 3
    assert stale is not None and stale[0] == 3  # it is the same memory
    found = view.find(8, 1000)
    assert found is not None and found.tolist() == [3, *[0] * 999]
    assert view.has(5) and view.has(6) and not view.has(7)


def test_regions_of_other_sizes_and_unknown_keys(words: SharedFlags) -> None:
    words.release(9)
    words.reserve(1, 10)
    words.release(1)
    words.release(1)
    large = words.reserve(2, 100_000)  # does not fit where the first was
    small = words.reserve(3, 10)
    large[0], small[0] = 1, 2
    assert (large[0], small[0]) == (1, 2)


def test_full_words_say_so_and_go_on(words: SharedFlags) -> None:
    whole = shared_flags.TOTAL_WORDS
    view = SharedFlagsView(words.address)
    regions = Regions({0: (view, 5)}.get)
    assert regions.reaches(0) and not view.is_full()
    with pytest.raises(MemoryError, match="the shared words of this process are full"):
        words.reserve(1, whole)
    assert view.is_full() and not regions.reaches(0)  # a region that lacks may have been asked for
    assert words.reserve(2, 10)[0] == 0
    for key in range(3, 10_000):
        try:
            words.reserve(key, 1)
        except MemoryError:
            break
    assert 4000 < key < 5000
    words.release(100)
    words.reserve(20_000, 1)[0] = 4
    found = SharedFlagsView(words.address).find(20_000, 1)
    assert found is not None and found[0] == 4


def test_threads_get_regions_of_their_own(words: SharedFlags) -> None:
    regions: dict[int, memoryview] = {}

    def use(start: int) -> None:
        for key in range(start, start + 50):
            region = regions[key] = words.reserve(key, 600)
            region[:] = memoryview(bytes(str(key).zfill(8), "ascii") * len(region)).cast("Q")

    threads = [threading.Thread(target=use, args=(100 * i + 1,)) for i in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for key, region in regions.items():
        assert region.tobytes() == bytes(str(key).zfill(8), "ascii") * len(region)


def test_another_process_is_read_and_its_end_is_seen() -> None:
    process, address = owner()
    try:
        view = find_view(address)
        assert view is not None and view.is_kept()
        found = view.find(77, 10)
        assert found is not None and found[3] == 42
    finally:
        end(process)
    assert not view.is_kept()
    assert found[3] == 42  # what was mapped can be read still
    assert find_view(address) is None


def test_closed_words_are_kept_by_a_process_that_has_them_mapped() -> None:
    words = SharedFlags()
    view = SharedFlagsView(words.address)
    region = words.reserve(1, 1)
    words.close()
    assert not view.is_kept() and find_view(words.address) is None
    region[0] = 5
    found = view.find(1, 1)
    assert found is not None and found[0] == 5


def test_memory_whose_number_was_given_again_is_another(words: SharedFlags) -> None:
    old = FlagsAddress(os.getpid(), words.address.file, words.address.nonce ^ 1)
    with pytest.raises(OSError, match="is the memory of another process"):
        SharedFlagsView(old)
    assert find_view(old) is None


def test_other_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    with path.open() as file:
        monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
        assert find_view(FlagsAddress(os.getpid(), file.fileno(), 0)) is None
        assert find_view(FlagsAddress(os.getpid(), 10**6, 0)) is None


def test_memory_of_the_same_name_that_is_not_ours() -> None:
    file = os.memfd_create("meshdist-words")
    try:
        with pytest.raises(OSError, match="is no memory of meshdist"):
            SharedFlagsView(FlagsAddress(os.getpid(), file, 0))
    finally:
        os.close(file)


def test_a_process_of_another_user_cannot_be_read(
    words: SharedFlags, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", reject)
        assert find_view(words.address) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", reject)
        assert find_view(words.address) is None
    assert find_view(words.address) is not None


def test_where_the_system_has_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_files()
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert make_shared_words() is None
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", lambda path: False)
        assert make_shared_words() is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        assert make_shared_words() is None
    assert num_files() == before
    words = make_shared_words()
    assert words is not None
    words.close()


def test_nothing_stays_open() -> None:
    before = num_files()
    for _ in range(20):
        words = SharedFlags()
        region = words.reserve(1, 10)
        view = SharedFlagsView(words.address)
        assert view.find(1, 10) is not None
        words.close()
        del words, region, view
    assert num_files() == before


def test_an_address_goes_through_json() -> None:
    address = FlagsAddress(12, 3, 2**62)
    assert FlagsAddress(*json.loads(json.dumps(address))) == address


def test_regions_are_found_once_they_are_known(words: SharedFlags) -> None:
    places: dict[int, tuple[SharedFlagsView | None, int]] = {1: (None, 5)}
    regions = Regions(places.get)
    assert regions.find(0, 4) is regions.find(1, 4) is None
    assert not regions.is_current(0) and not regions.is_alive(1)
    places[0] = SharedFlagsView(words.address), 5
    assert regions.find(0, 4) is None  # the memory is there, the region is not
    assert [regions.reaches(member) for member in range(3)] == [True, False, False]
    words.reserve(5, 4)[2] = 9
    found = regions.find(0, 4)
    assert found is not None and found.tolist() == [0, 0, 9, 0]
    assert regions.is_current(0) and regions.is_alive(0)
    words.release(5)
    assert not regions.is_current(0) and not regions.is_alive(0)


def test_the_lowest_that_is_alive_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    num = 512
    words = [memoryview(bytearray(8 * num)).cast("Q") for _ in range(3)]
    gone = {0, 1}

    class Found(Regions):
        def find(self, member: int, num_words: int) -> memoryview | None:
            assert num_words == num
            return None if member in gone else words[member]

        def is_alive(self, member: int) -> bool:
            return member not in gone

    signs = [Heartbeats(words[rank], Found(lambda _: None), rank) for rank in range(3)]
    assert [one.find_published() for one in signs] == [
        None,
        None,
        None,
    ]  # the others are not there yet
    gone.clear()
    signs[0].beat(7)
    signs[1].beat(5)
    assert [one.find_published() for one in signs] == [None, 7, 7]
    gone.add(0)  # it ends
    assert [one.find_published() for one in signs[1:]] == [None, 5]
    gone.clear()  # as if it were there still, but stopped
    monkeypatch.setattr(shared_flags, "SILENT_S", 0.0)
    signs[1].beat(6)
    assert [signs[2].find_published(), signs[2].find_published()] == [
        7,
        7,
    ]  # for a second from its last beat
    signs[0].beat(8)
    signs[1].beat(8)
    assert signs[1].find_published() is None
    assert signs[2].find_published() is None
    monkeypatch.undo()
    signs[0].beat(9)
    assert [one.find_published() for one in signs] == [None, 9, 9]
    nothing = Heartbeats(None, Found(lambda _: None), 0)
    nothing.beat(3)
    assert nothing.find_published() is None
