"""Receives that name no sender: what ends them, what they take, and what they leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.inner import deadlines
from tests.load import is_within
from tests.operations.cases import BACKENDS
from tests.pool import Pool

PROCESSES = {"shm": ("shm", ""), "gloo": ("gloo", ""), "gloo across hosts": ("gloo", "ABABA")}
LIMIT = timedelta(seconds=30)
SOON_S = 8.0


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except md.MeshdistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def polled(x: torch.Tensor, group: Any) -> None:
    work = md.irecv(x, group=group)
    end = time.monotonic() + LIMIT.total_seconds()
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    if (error := work.exception()) is not None:
        raise error


RECEIVES: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "waits": lambda x, group: md.recv(x, group=group),
    "started": lambda x, group: md.irecv(x, group=group).wait(),
    "polled": polled,
}


# -- members that end -----------------------------------------------------------------------------


def one_is_killed(how: str, folder: str) -> tuple[str, float]:
    """Rank 1 is killed while rank 0 receives; the others could still send, and do not."""
    group, over = md.new_group(timeout=LIMIT), Path(folder, "over")
    rank, x = md.get_rank(), torch.zeros(1)
    md.barrier(group)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank > 1:
        deadlines.wait_until(over.exists, deadlines.Deadline(LIMIT.total_seconds()))
        return "", 0.0
    begin = time.monotonic()
    error = error_of(lambda: RECEIVES[how](x, group))
    over.touch()
    return error, time.monotonic() - begin


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 5))])
@pytest.mark.parametrize("how", RECEIVES)
@pytest.mark.parametrize("name", PROCESSES)
def test_the_death_of_a_member_ends_it(
    name: str, how: str, size: int, pool: Pool, tmp_path: Path
) -> None:
    backend, hosts = PROCESSES[name]
    more = {"backend": backend, "hosts": hosts[:size]}
    error, seconds = pool.outcomes(one_is_killed, size, how, str(tmp_path), **more)[0]
    assert error.startswith("BackendError: ") and "from any rank" in error
    assert "rank 1 has ended" in error
    assert is_within(seconds, SOON_S)


def one_after_the_other_leaves(how: str) -> tuple[int, list[float], str]:
    """Rank 1 closes the group; rank 2 sends a message long after that, and closes it, too."""
    group, rank, x = md.new_group(timeout=LIMIT), md.get_rank(), torch.zeros(1)
    md.barrier(group)
    sender, error = -1, ""
    if rank == 0:
        sender = md.recv(x, group=group)
        begin = time.monotonic()
        error = error_of(lambda: RECEIVES[how](x, group))
        assert is_within(time.monotonic() - begin, SOON_S)
    else:
        if rank == 2:
            time.sleep(2.5)
            md.send(torch.full((1,), 2.0), 0, group=group)
        md.destroy_process_group(group)
    md.barrier()
    return sender, x.tolist(), error


@pytest.mark.parametrize("name", [*PROCESSES, pytest.param("mpi", marks=pytest.mark.mpi)])
def test_it_ends_once_all_others_have_left(name: str, pool: Pool) -> None:
    sender, found, error = BACKENDS[name](pool, one_after_the_other_leaves, 3, "waits")[0]
    assert (sender, found) == (2, [2.0])
    assert error.startswith("BackendError: ") and "has " in error.split("found:")[1]


@pytest.mark.parametrize("how", ["started", pytest.param("polled", marks=pytest.mark.soak)])
def test_a_started_receive_ends_once_all_others_have_left(how: str, pool: Pool) -> None:
    for name in ("gloo", "gloo across hosts"):
        found = BACKENDS[name](pool, one_after_the_other_leaves, 3, how)[0]
        assert found[:2] == (2, [2.0])
        assert found[2].startswith("BackendError: ")


def aborted(how: str) -> str:
    group = md.new_group(timeout=LIMIT)
    md.barrier(group)
    if md.get_rank() == 1:
        time.sleep(0.5)
        group.abort("enough")
        return ""
    return error_of(lambda: RECEIVES[how](torch.zeros(1), group))


@pytest.mark.parametrize("how", RECEIVES)
@pytest.mark.parametrize("name", [*PROCESSES, pytest.param("mpi", marks=pytest.mark.mpi)])
def test_an_abort_ends_it(name: str, how: str, pool: Pool) -> None:
    error = BACKENDS[name](pool, aborted, 2, how)[0]
    assert error.startswith("AbortedError: ") and "rank 1: enough" in error


def closed() -> str:
    group = md.new_group(timeout=LIMIT)
    work = md.irecv(torch.zeros(1), group=group)
    md.barrier()
    md.destroy_process_group(group)
    begin = time.monotonic()
    error = error_of(work.wait)
    assert is_within(time.monotonic() - begin, SOON_S)
    return error


@pytest.mark.parametrize("name", [*PROCESSES, pytest.param("mpi", marks=pytest.mark.mpi)])
def test_the_end_of_its_group_ends_it(name: str, pool: Pool) -> None:
    for error in BACKENDS[name](pool, closed, 2):
        assert "irecv on group of ranks 0-1" in error and "closed" in error, error


# -- what it takes --------------------------------------------------------------------------------


def from_all_in_any_order(num_messages: int) -> list[tuple[int, float]]:
    """All ranks but 0 send at once; rank 0 has started all of its receives."""
    group, rank, size = md.new_group(), md.get_rank(), md.get_world_size()
    if rank:
        sent = [torch.full((2,), float(number)) for number in range(num_messages)]
        for work in [md.isend(x, 0, group=group, tag=3) for x in sent]:
            work.wait()
        return []
    taken = [torch.zeros(2) for _ in range(num_messages * (size - 1))]
    works = [md.irecv(x, group=group, tag=3) for x in taken]
    for work in reversed(works):
        work.wait()
    return [(work.source_rank(), x[1].item()) for work, x in zip(works, taken, strict=True)]


@pytest.mark.parametrize("name", BACKENDS)
def test_all_messages_of_all_senders_arrive(name: str, pool: Pool) -> None:
    found = BACKENDS[name](pool, from_all_in_any_order, 4, 40)[0]
    for sender in (1, 2, 3):
        assert [x for source, x in found if source == sender] == [float(n) for n in range(40)]


def in_turn_with_named() -> list[float]:
    """Rank 1 sends 0, 1, 2, ...; rank 0 starts receives from anyone and by name in turn."""
    group, count = md.new_group(), 12
    if md.get_rank() == 1:
        works = [md.isend(torch.tensor([float(i)]), 0, group=group) for i in range(count)]
        taken = []
    else:
        taken = [torch.full((1,), -1.0) for _ in range(count)]
        works = [md.irecv(x, (None, 1)[i % 2], group=group) for i, x in enumerate(taken)]
    for work in works:
        work.wait()
    return [x.item() for x in taken]


@pytest.mark.parametrize("name", BACKENDS)
def test_receives_of_both_kinds_share_the_messages(name: str, pool: Pool) -> None:
    found, expected = BACKENDS[name](pool, in_turn_with_named, 2)[0], [float(i) for i in range(12)]
    if "gloo" in name or "hosts" in name:  # Gloo serves those first that name their sender
        found = sorted(found)
    assert found == expected


def by_tag() -> list[float]:
    group, taken = md.new_group(), [torch.zeros(1) for _ in range(3)]
    if md.get_rank():
        for tag in range(3):
            md.send(torch.full((1,), float(tag)), 0, group=group, tag=tag)
        return []
    works = [md.irecv(x, group=group, tag=tag) for tag, x in reversed([*enumerate(taken)])]
    for work in works:
        work.wait()
    return [x.item() for x in taken]


@pytest.mark.parametrize("name", BACKENDS)
def test_it_takes_messages_of_its_tag_alone(name: str, pool: Pool) -> None:
    assert BACKENDS[name](pool, by_tag, 2)[0] == [0.0, 1.0, 2.0]


def from_itself() -> tuple[int, list[float]]:
    group, x = md.new_group(), torch.zeros(2)
    me = group.rank()
    sent = md.isend(torch.full((2,), me + 1.0), group=group, group_dst=me, tag=1)
    receive = md.irecv(x, group=group, tag=1)
    sent.wait()
    receive.wait()
    return receive.source_rank(), x.tolist()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", BACKENDS)
def test_it_takes_what_its_rank_has_sent_itself(name: str, size: int, pool: Pool) -> None:
    expected = [(me, [me + 1.0] * 2) for me in range(size)]
    assert BACKENDS[name](pool, from_itself, size) == expected


def objects() -> Any:
    group = md.new_group()
    if md.get_rank():
        md.send_object_list([md.get_rank(), "x" * md.get_rank()], 0, group=group)
        return None
    found = []
    for _ in range(group.size() - 1):
        taken: list[Any] = [None, None]
        found.append((md.recv_object_list(taken, group=group), taken))
    return sorted(found)


@pytest.mark.parametrize("name", BACKENDS)
def test_objects_from_anyone(name: str, pool: Pool) -> None:
    assert BACKENDS[name](pool, objects, 3)[0] == [(1, [1, "x"]), (2, [2, "xx"])]


# -- what does not fit ----------------------------------------------------------------------------


def another(sent: torch.Tensor, taken: torch.Tensor, tag: int, is_named_later: bool) -> str:
    """Rank 1 sends what does not fit: to a receive from anyone, or to one after such a one."""
    group = md.new_group(timeout=timedelta(seconds=2))
    if is_named_later:
        if md.get_rank():
            md.send(taken, 0, group=group, tag=tag)
        else:
            md.recv(taken, group=group, tag=tag)
    if md.get_rank():
        work = md.isend(sent, 0, group=group, tag=tag)
        time.sleep(4.0)  # its last call is still this one
        error_of(work.wait)
        return ""
    source = 1 if is_named_later else None
    return error_of(lambda: md.recv(taken, source, group=group, tag=tag))


@pytest.mark.parametrize("is_named_later", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "tag", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (5, 8192, (1 << 30) - 3))]
)
@pytest.mark.parametrize("name", ["gloo", "gloo across hosts"])
def test_gloo_leaves_a_message_of_another_size_until_the_timeout(
    name: str, tag: int, is_named_later: bool, pool: Pool
) -> None:
    given = torch.ones(100), torch.ones(96), tag, is_named_later
    error = BACKENDS[name](pool, another, 2, *given)[0]
    assert error.startswith("CollectiveTimeoutError: "), error
    assert "recv((96,) float32" in error and "isend((100,) float32, to rank 0" in error


@pytest.mark.parametrize(
    "name", ["gloo", "gloo across hosts", pytest.param("mpi", marks=pytest.mark.mpi)]
)
def test_a_message_of_another_dtype_is_left_until_the_timeout(name: str, pool: Pool) -> None:
    x = torch.ones(4)
    error = BACKENDS[name](pool, another, 2, x, x.int(), 0, False)[0]
    assert error.startswith("CollectiveTimeoutError: "), error
    assert "recv((4,) int32, from any rank)" in error and "isend((4,) float32, to rank 0" in error


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["shm", "simulated"])
def test_a_message_of_another_size_raises_where_it_arrives(
    name: str, count: int, pool: Pool
) -> None:
    error = BACKENDS[name](pool, another, 2, torch.ones(count), torch.ones(96), 0, False)[0]
    assert error.startswith("MismatchError: message mismatch: a send does not match its receive"), (
        error
    )
    assert "(96,)" in error


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("count", "told"),
    [
        (2, "a message of 8 bytes arrived for a receive of 384 bytes"),
        (200, "a longer message arrived for a receive of 384 bytes"),
    ],
)
@pytest.mark.parametrize("is_named_later", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_mpi_raises_where_a_message_of_another_size_arrives(
    count: int, told: str, is_named_later: bool, pool: Pool
) -> None:
    given = torch.ones(count), torch.ones(96), 0, is_named_later
    error = BACKENDS["mpi"](pool, another, 2, *given)[0]
    assert error.startswith("BackendError: recv on ") and told in error, error


def nobody_sends(how: str) -> str:
    group = md.new_group(timeout=timedelta(seconds=1))
    error = "" if md.get_rank() else error_of(lambda: RECEIVES[how](torch.zeros(3), group))
    md.barrier()
    return error


@pytest.mark.parametrize("how", RECEIVES)
@pytest.mark.parametrize("name", [*PROCESSES, pytest.param("mpi", marks=pytest.mark.mpi)])
def test_a_receive_for_which_nobody_sends_times_out(name: str, how: str, pool: Pool) -> None:
    error = BACKENDS[name](pool, nobody_sends, 2, how)[0]
    assert "timed out after 1 s" in error
    assert "any rank to send (3,) float32 to this rank with tag 0" in error
