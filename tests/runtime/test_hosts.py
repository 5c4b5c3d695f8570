"""Which host, which process."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from meshdist.runtime import hosts
from meshdist.runtime.hosts import (
    ProcessInfo,
    find_thread_lack,
    free_bytes,
    host_identity,
    is_alive,
    is_stopped,
    my_process_info,
    process_start,
    raise_descriptor_limit,
)
from tests.few_files import room_for
from tests.stopping import stop


def test_this_process_lives() -> None:
    process_info = my_process_info()
    assert process_info.pid == os.getpid()
    assert is_alive(process_info) is True
    assert str(process_info) == f"process {os.getpid()} on {process_info.hostname}"


def test_a_card_goes_through_json() -> None:
    process_info = my_process_info()
    assert ProcessInfo.from_json({**process_info.to_json(), "more": 1}) == process_info


@pytest.mark.parametrize("change", [{"pid": "1"}, {"pid": True}, {"host": None}, {"start": 5}])
def test_what_is_no_card_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="names no process"):
        ProcessInfo.from_json({**my_process_info().to_json(), **change})


def test_files_that_can_still_be_opened() -> None:
    num_open = len(os.listdir("/dev/fd")) - 1
    with room_for(5):
        assert raise_descriptor_limit(5) == ""
        assert raise_descriptor_limit(6) == (
            f"5 more files can be opened of about 6 needed; the limit is {num_open + 5}"
        )
    with room_for(1 - num_open):
        assert raise_descriptor_limit(1).startswith("0 more files can be opened of about 1 ")


def test_the_limit_of_files_is_raised_where_it_is_too_low_and_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd")) - 1
    with room_for(5, num_hard=20):
        assert raise_descriptor_limit(5) == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == num_open + 5  # no need to raise it
        assert raise_descriptor_limit(15) == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == num_open + 20
        assert raise_descriptor_limit(21).startswith(
            "20 more files can be opened of about 21 needed"
        )
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_threads_that_the_control_group_lets_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "pids.max", tmp_path / "pids.current"
    monkeypatch.setattr("meshdist.runtime.hosts.PIDS", files)
    assert find_thread_lack(1000) == ""  # no such group
    files[1].write_text("90\n")
    files[0].write_text("max\n")
    assert find_thread_lack(1000) == ""
    files[0].write_text("100\n")
    assert find_thread_lack(10) == ""
    assert find_thread_lack(11) == ("10 more threads can be started of 11 needed; the limit is 100")
    assert find_thread_lack(2, 5) == ""  # the ranks of a host share the limit
    assert find_thread_lack(2, 6) == (
        "10 more threads can be started of 12 needed by 6 ranks; the limit is 100"
    )


def test_whether_a_process_lives_is_not_known_where_no_file_can_be_opened() -> None:
    process_info, usual = my_process_info(), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, usual[1]))
        assert is_alive(process_info) is None
        unseen = my_process_info()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert unseen == dataclasses.replace(process_info, start="")
    assert is_alive(unseen) is None


def test_a_process_that_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = process_start(child.pid)
        assert start is not None
        process_info = dataclasses.replace(my_process_info(), pid=child.pid, start=start)
        assert is_alive(process_info) is True
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(process_info) is False  # ended, and not waited for yet
    finally:
        child.communicate()
    assert is_alive(process_info) is False
    assert process_start(child.pid) is None


def test_a_process_that_is_stopped() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        process_info = dataclasses.replace(
            my_process_info(), pid=child.pid, start=process_start(child.pid) or ""
        )
        assert not is_stopped(process_info)
        stop(child.pid)
        assert is_stopped(process_info)
        assert not is_stopped(dataclasses.replace(process_info, start="0"))
    finally:
        child.kill()
        child.wait()


def test_a_number_that_was_given_again() -> None:
    process_info = dataclasses.replace(my_process_info(), start="1")
    assert is_alive(process_info) is False


def test_what_cannot_be_seen_from_here() -> None:
    assert (
        is_alive(dataclasses.replace(my_process_info(), host="other/1", hostname="elsewhere"))
        is None
    )


def test_a_host_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = host_identity()
    monkeypatch.setenv("MESHDIST_HOST_ID", "second")
    assert host_identity() == "second"
    monkeypatch.delenv("MESHDIST_HOST_ID")
    assert host_identity() == usual


def test_memory_that_is_free() -> None:
    assert 0 < free_bytes() < 1 << 60


def test_a_control_group_limits_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, used = tmp_path / "most", tmp_path / "used"
    monkeypatch.setattr(hosts, "GROUP_MEMORY", ((str(most), str(used)),))
    unlimited = free_bytes()
    used.write_text("1000\n")
    for limit, found in (("5096\n", 4096.0), ("10\n", 0.0), ("max\n", unlimited)):
        most.write_text(limit)
        assert free_bytes() == pytest.approx(found, rel=0.2)
