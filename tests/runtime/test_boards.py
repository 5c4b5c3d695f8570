"""Boards: regions, their reuse, and what cannot be reached."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshdist.runtime import boards
from meshdist.runtime.boards import Board, BoardAddress, BoardView, find_board, find_view

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

OWNER = """
import json, sys
from meshdist.runtime.boards import Board
board = Board()
board.reserve(77, 10)[3] = 42
print(json.dumps(board.address.to_json()), flush=True)
input()
"""


@pytest.fixture
def board():
    board = Board()
    yield board
    board.close()


def owner() -> tuple[subprocess.Popen[str], BoardAddress]:
    """A process with a board, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    return process, BoardAddress.from_json(json.loads(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_written_is_found_under_its_key(board: Board) -> None:
    view = BoardView(board.address)
    assert view.find(5, 4) is None and not view.has(5)
    first, second = board.reserve(5, 4), board.reserve(6, 2000)
    first[3] = 2**64 - 1
    second[1999] = 7
    found, other = view.find(5, 4), view.find(6, 2000)
    assert found is not None and found.tolist() == [0, 0, 0, 2**64 - 1]
    assert other is not None and other[1999] == 7 and not any(other[:1999])
    first[0] = 1
    assert found[0] == 1  # one memory
    with pytest.raises(TypeError):
        found[0] = 2  # which its owner alone writes


def test_a_region_that_was_released_is_given_again_and_is_empty(board: Board) -> None:
    view = BoardView(board.address)
    board.reserve(5, 1000)[:] = board.reserve(6, 1000)
    region = board.reserve(7, 1000)
    region[999] = 1
    stale = view.find(7, 1000)
    board.release(7)
    assert not view.has(7) and view.find(7, 1000) is None
    again = board.reserve(8, 1000)
    again[0] = 3
    assert stale is not None and stale[0] == 3  # it is the same memory
    found = view.find(8, 1000)
    assert found is not None and found.tolist() == [3, *[0] * 999]
    assert view.has(5) and view.has(6) and not view.has(7)


def test_regions_of_other_sizes_and_unknown_keys(board: Board) -> None:
    board.release(9)
    board.reserve(1, 10)
    board.release(1)
    board.release(1)
    large = board.reserve(2, 100_000)  # does not fit where the first was
    small = board.reserve(3, 10)
    large[0], small[0] = 1, 2
    assert (large[0], small[0]) == (1, 2)


def test_a_full_board_says_so_and_goes_on(board: Board) -> None:
    whole = boards._BOARD_WORDS
    with pytest.raises(MemoryError, match="the board of this process is full"):
        board.reserve(1, whole)
    assert board.reserve(2, 10)[0] == 0
    for key in range(3, 10_000):
        try:
            board.reserve(key, 1)
        except MemoryError:
            break
    assert 4000 < key < 5000
    board.release(100)
    board.reserve(20_000, 1)[0] = 4
    found = BoardView(board.address).find(20_000, 1)
    assert found is not None and found[0] == 4


def test_threads_get_regions_of_their_own(board: Board) -> None:
    regions: dict[int, memoryview] = {}

    def use(start: int) -> None:
        for key in range(start, start + 50):
            region = regions[key] = board.reserve(key, 600)
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


def test_a_closed_board_is_kept_by_who_has_it() -> None:
    board = Board()
    view = BoardView(board.address)
    region = board.reserve(1, 1)
    board.close()
    assert not view.is_kept() and find_view(board.address) is None
    region[0] = 5
    found = view.find(1, 1)
    assert found is not None and found[0] == 5


def test_a_board_whose_number_was_given_again_is_another(board: Board) -> None:
    old = BoardAddress(os.getpid(), board.address.file, board.address.nonce ^ 1)
    with pytest.raises(OSError, match="is another board"):
        BoardView(old)
    assert find_view(old) is None


def test_other_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    with path.open() as file:
        monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
        assert find_view(BoardAddress(os.getpid(), file.fileno(), 0)) is None
        assert find_view(BoardAddress(os.getpid(), 10**6, 0)) is None


def test_memory_of_the_same_name_that_is_no_board() -> None:
    file = os.memfd_create("meshdist-board")
    try:
        with pytest.raises(OSError, match="is no board"):
            BoardView(BoardAddress(os.getpid(), file, 0))
    finally:
        os.close(file)


def test_a_process_of_another_user_cannot_be_read(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", refuse)
        assert find_view(board.address) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert find_view(board.address) is None
    assert find_view(board.address) is not None


def test_where_the_system_has_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_files()
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert find_board() is None
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", lambda path: False)
        assert find_board() is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        assert find_board() is None
    assert num_files() == before
    board = find_board()
    assert board is not None
    board.close()


def test_nothing_stays_open() -> None:
    before = num_files()
    for _ in range(20):
        board = Board()
        region = board.reserve(1, 10)
        view = BoardView(board.address)
        assert view.find(1, 10) is not None
        board.close()
        del board, region, view
    assert num_files() == before


def test_an_address_goes_through_json() -> None:
    address = BoardAddress(12, 3, 2**62)
    assert BoardAddress.from_json(json.loads(json.dumps(address.to_json()))) == address
