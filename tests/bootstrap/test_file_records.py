"""The file of file://: who uses it, what is refused, and when it goes."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shlex
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore

import meshdist as md
from meshdist.bootstrap import file_records
from meshdist.bootstrap.file_records import Entry, enter, leave
from tests.inner import my_card


def test_the_ranks_of_one_world_share_a_generation(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    entries = [enter(path, rank, 2) for rank in (0, 1)]
    assert entries[0].generation == entries[1].generation
    assert [entry.rank for entry in entries] == [0, 1]
    assert entries[0].store_path == f"{path}.{entries[0].generation}"


def test_ranks_are_given_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    assert [enter(path, rank, 4).rank for rank in (None, 1, None, None)] == [0, 1, 2, 3]


def test_the_last_one_removes_what_was_made(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    entries = [enter(path, rank, 2) for rank in (0, 1)]
    Path(entries[0].store_path).write_text("keys")
    leave(entries[0])
    assert sorted(tmp_path.iterdir()) == [Path(path), Path(entries[0].store_path)]
    leave(entries[1])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_early_for_the_next_world(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    first = [enter(path, rank, 2) for rank in (0, 1)]
    leave(first[0])
    early = enter(path, 0, 2)
    assert early.generation != first[0].generation
    leave(first[1])
    assert Path(path).exists()
    second = enter(path, 1, 2)
    assert second.generation == early.generation
    leave(early)
    leave(second)
    assert list(tmp_path.iterdir()) == []


def test_nobody_joins_a_world_that_has_failed(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    present = [enter(path, rank, 3) for rank in (0, 1)]
    leave(present[0])
    assert enter(path, 2, 3).generation != present[0].generation


def test_jobs_share_a_file_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    entries = [enter(path, 0, 2, job) for job in ("a", "b", "a")]
    assert entries[0].generation == entries[2].generation
    assert entries[0].generation != entries[1].generation


def test_many_come_and_go_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "meeting")
    errors: list[BaseException] = []

    def visit() -> None:
        try:
            for _ in range(50):
                leave(enter(path, None, 1))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == []


# -- what is refused ----------------------------------------------------------------------------


def crash(monkeypatch: pytest.MonkeyPatch, path: str, rank: int) -> Entry:
    """Enter as a process that has ended since."""
    with monkeypatch.context() as patch:
        dead = dataclasses.replace(my_card(), start="1")
        patch.setattr(file_records, "my_card", lambda: dead)
        return enter(path, rank, 2)


def test_a_leftover_is_refused_with_the_command_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "meeting of two")
    entry = crash(monkeypatch, path, 1)
    Path(entry.store_path).write_text("keys")
    with pytest.raises(md.RendezvousError) as caught:
        enter(path, 0, 2)
    text = str(caught.value)
    assert f"{path} was left behind by a job that crashed" in text
    assert f"whose rank 1 (process {my_card().pid} on {my_card().hostname}) has ended" in text
    command = text.rpartition("then: ")[2]
    assert command == f"rm -f {shlex.quote(path)} {shlex.quote(entry.store_path)}"
    subprocess.run(shlex.split(command), check=True)
    assert list(tmp_path.iterdir()) == []
    assert enter(path, 0, 2).rank == 0


def test_a_full_leftover_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "meeting")
    leave(enter(path, 0, 2))
    enter(path, 0, 2)
    crash(monkeypatch, path, 1)
    with pytest.raises(md.RendezvousError, match="left behind by a job that crashed"):
        enter(path, 0, 2)


def test_a_file_of_somebody_else_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(md.RendezvousError) as caught:
        enter(str(path), 0, 1)
    assert "is in use for something else" in str(caught.value)
    assert "found:    13 bytes that are not as this package writes them" in str(caught.value)
    assert path.read_text() == "years of work"


@pytest.mark.parametrize("content", ["[]", "1", '{"other": 1}', '{"meshdist rendezvous": 1}'])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "meeting"
    path.write_text(content)
    with pytest.raises(md.RendezvousError, match="in use for something else"):
        enter(str(path), 0, 1)
    assert path.read_text() == content


def test_a_record_with_a_changed_byte_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    entry = enter(str(path), 0, 2)
    sound = path.read_bytes()
    refusals = 0
    for place in range(len(sound)):
        for byte in b'x1" ':
            path.write_bytes(sound[:place] + bytes([byte]) + sound[place + 1 :])
            try:
                enter(str(path), 1, 2)
            except md.RendezvousError:
                refusals += 1
    assert refusals > len(sound)
    leave(entry)  # what it cannot find it leaves alone


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    os.mkfifo(path)
    with pytest.raises(
        md.RendezvousError, match="cannot be opened: it is no regular file"
    ) as caught:
        enter(str(path), 0, 1)
    assert caught.value.fix == "name another file"


def test_a_lock_that_another_process_keeps_is_waited_for_no_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    path = tmp_path / "meeting"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(md.RendezvousError, match=r"process \d+ keeps it locked"):
            enter(str(path), 0, 1, timeout=timedelta(seconds=0.3))
        assert time.monotonic() - begin < 10


def test_what_torch_left_behind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    store = FileStore(str(path), -1)
    store.set("key", "value")
    del store
    with pytest.raises(md.RendezvousError, match=r"torch\.distributed leaves such files behind"):
        enter(str(path), 0, 1)


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.touch()
    leave(enter(str(path), 0, 1))
    assert not path.exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(md.RendezvousError, match="cannot be opened: No such file") as caught:
        enter(str(tmp_path / "none" / "meeting"), 0, 1)
    assert caught.value.fix == "make the directory, or name another file"


def test_leaving_after_somebody_removed_the_file(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    entry = enter(str(path), 0, 1)
    path.unlink()
    leave(entry)
    assert not path.exists()
