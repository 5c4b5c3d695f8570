"""What the core tells when members disagree, die, stop, are too late, or are told to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshdist.backends import native
from tests.load import is_within
from tests.native.ranks import OK, Killed, run_ranks

DTYPES, OPS, STATUSES = native.DTYPES, native.OPS, native.STATUSES
F32, SUM = DTYPES["float32"], OPS["SUM"]
TIMEOUT = 20.0
HUGE = 64 << 20  # elements: long enough to be killed in the middle


def reduce_some(c: Any, count: int = 1000, dtype: str = "float32", op: str = "SUM") -> int:
    x = torch.ones(count, dtype=getattr(torch, dtype))
    before = x.clone()
    status = c.all_reduce(x.data_ptr(), count, DTYPES[dtype], OPS[op], TIMEOUT)
    if status != OK:
        assert torch.equal(x, before)  # no result before the check
    return status


DISAGREEMENTS: dict[str, tuple[Callable[[Any], int], Callable[[Any], int]]] = {
    "operation": (reduce_some, lambda c: c.barrier(TIMEOUT)),
    "dtype": (reduce_some, lambda c: reduce_some(c, dtype="int32")),
    "op": (reduce_some, lambda c: reduce_some(c, op="MAX")),
    "count": (reduce_some, lambda c: reduce_some(c, count=1001)),
    "large count": (lambda c: reduce_some(c, 10**6), lambda c: reduce_some(c, 4)),
    "root": (
        lambda c: c.broadcast(torch.ones(9).data_ptr(), 9, F32, 0, TIMEOUT),
        lambda c: c.broadcast(torch.ones(9).data_ptr(), 9, F32, 1, TIMEOUT),
    ),
    "ragged collective": (
        lambda c: c.all_gather(torch.ones(9).data_ptr(), torch.ones(9).data_ptr(), 3, F32, TIMEOUT),
        lambda c: c.all_to_all([0] * c.size, [0] * c.size, [0] * c.size, [0] * c.size, 1, TIMEOUT),
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_every_rank_learns_that_calls_differ_and_whose(what: str, size: int) -> None:
    usual, other = DISAGREEMENTS[what]

    def body(c: Any) -> Any:
        assert reduce_some(c) == OK
        status = (other if c.rank == 1 else usual)(c)
        failure = c.last_failure()
        assert reduce_some(c) == OK  # the communicator stays in step
        return status, (failure.status, failure.culprit)

    for status, failure in run_ranks(size, body):
        assert status == STATUSES["MISMATCH"]
        assert failure == (STATUSES["MISMATCH"], 1)


def test_sizes_that_do_not_fit_each_other_are_told_to_every_rank() -> None:
    def body(c: Any) -> Any:
        x = torch.ones(100)
        gives = [4, 5, 7] if c.rank == 1 else [4, 5, 6]
        expects = [[4, 5, 6][c.rank]] * 3
        pointers = [x.data_ptr()] * 3
        status = c.all_to_all(pointers, expects, pointers, gives, F32, TIMEOUT)
        failure = c.last_failure()
        assert c.barrier(TIMEOUT) == OK
        return status, failure.text, failure.culprit

    text = "member 1 gives 7 elements to member 2, which expects 6"
    assert run_ranks(3, body) == [(STATUSES["MISMATCH"], text, 2)] * 3


def large_call(c: Any, operation: str) -> int:
    n, count = c.size, HUGE // 8
    x = torch.zeros(count)
    part = count // n
    p = x.data_ptr()
    if operation == "send":
        peer = 1 - c.rank if c.rank < 2 else None
        if peer is None:
            return c.recv(p, count, F32, 1, 3, TIMEOUT)
        return c.send(p, count, F32, peer, 0, TIMEOUT)
    parts = [p + 4 * part * j for j in range(n)]
    return {
        "all_reduce": lambda: c.all_reduce(p, count, F32, SUM, TIMEOUT),
        "reduce": lambda: c.reduce(p, count, F32, SUM, 0, TIMEOUT),
        "broadcast": lambda: c.broadcast(p, count, F32, 0, TIMEOUT),
        "all_gather": lambda: c.all_gather(p, p + 4 * part * c.rank, part, F32, TIMEOUT),
        "gather": lambda: c.gather(
            parts if c.rank == 0 else [], parts[c.rank], part, F32, 0, TIMEOUT
        ),
        "scatter": lambda: c.scatter(
            parts[c.rank], parts if c.rank == 0 else [], part, F32, 0, TIMEOUT
        ),
        "reduce_scatter": lambda: c.reduce_scatter(parts[c.rank], p, part, F32, SUM, TIMEOUT),
        "all_to_all": lambda: c.all_to_all(parts, [part] * n, parts, [part] * n, F32, TIMEOUT),
        "barrier": lambda: c.barrier(TIMEOUT),
    }[operation]()


OPERATIONS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "send",
]


def told(failure: Any) -> tuple[int, int, list[bool]]:
    """What of it can be sent to another process."""
    return failure.status, failure.culprit, failure.has_exited


def until_failure(c: Any, operation: str) -> Any:
    """Call it again and again; one member ends by itself when it was told to."""
    started = time.monotonic()
    while time.monotonic() < started + TIMEOUT:
        status = large_call(c, operation)
        if status != OK:
            failure = c.last_transfer_failure() if operation == "send" else c.last_failure()
            return status, told(failure), time.monotonic()
    return None


@pytest.mark.parametrize("how", [signal.SIGKILL, "exit"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_member_that_dies_in_the_middle_is_noticed_within_a_second(
    operation: str, how: signal.Signals | str
) -> None:
    died: list[float] = []

    def body(c: Any) -> Any:
        if how == "exit" and c.rank == 1:
            threading.Timer(0.25, os._exit, (3,)).start()
        return until_failure(c, operation)

    def meanwhile(pids: list[int]) -> None:
        time.sleep(0.25)
        if how != "exit":
            os.kill(pids[1], how)
        died.append(time.monotonic())

    first, killed, third = run_ranks(3, body, meanwhile=meanwhile)
    assert isinstance(killed, Killed)
    for status, (cause, culprit, has_exited), noticed in (first, third):
        assert status in (STATUSES["DIED"], STATUSES["ABORTED"])
        if operation != "send":
            assert culprit == 1
            assert cause == STATUSES["DIED"]
        assert has_exited == [False, True, False]
        assert is_within(noticed - died[0], 1.3)


def test_a_dead_member_is_noticed_while_another_one_is_late() -> None:
    def body(c: Any) -> Any:
        if c.rank == 2:
            os._exit(3)
        if c.rank == 1:
            time.sleep(TIMEOUT / 4)
        begin = time.monotonic()
        status = c.barrier(TIMEOUT)
        return status, c.last_failure().culprit, time.monotonic() - begin

    first, _, _ = run_ranks(3, body)
    assert first[:2] == (STATUSES["DIED"], 2)
    assert is_within(first[2], 1.0)


def test_a_stopped_member_leads_to_a_timeout_on_all() -> None:
    def body(c: Any) -> Any:
        x = torch.zeros(10**6)
        while (status := c.all_reduce(x.data_ptr(), 10**6, F32, SUM, 0.6)) == OK:
            pass
        return status, c.last_failure().status

    def meanwhile(pids: list[int]) -> None:
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pids[1], signal.SIGCONT)

    results = run_ranks(3, body, meanwhile=meanwhile)
    timeout, aborted = STATUSES["TIMEOUT"], STATUSES["ABORTED"]
    assert all(status in (timeout, aborted) for status, _ in results)
    assert timeout in (results[0][0], results[2][0])
    assert all(cause == timeout for _, cause in results)


def test_a_member_that_does_not_come_leads_to_a_timeout() -> None:
    def body(c: Any) -> Any:
        assert reduce_some(c) == OK
        if c.rank == 1:
            time.sleep(1.0)
            return None
        return c.barrier(0.3), c.last_failure().status

    assert run_ranks(2, body)[0] == (STATUSES["TIMEOUT"], STATUSES["TIMEOUT"])


@pytest.mark.parametrize("computes", [False, True])
def test_an_abort_frees_every_waiter_at_once(computes: bool) -> None:
    def body(c: Any) -> Any:
        x = torch.zeros(5)
        for _ in range(200 * computes):  # next to programs that compute, waits sleep for long
            end = time.perf_counter() + 0.002
            while time.perf_counter() < end:
                pass
            c.barrier(TIMEOUT)
        if c.rank == 0:
            time.sleep(0.1)
            aborted = time.monotonic()
            c.abort()
            return aborted
        outcome = []
        receive = c.recv_async(x.data_ptr(), 5, F32, 0, 0)
        if c.rank == 1:
            outcome.append(c.barrier(TIMEOUT))
        else:
            ticket = c.barrier_async(TIMEOUT)
            outcome.append(receive.wait(TIMEOUT))
            outcome.append(ticket.wait(TIMEOUT))
        freed = time.monotonic()
        outcome.append(receive.wait(TIMEOUT))
        outcome.append(c.barrier(TIMEOUT))
        return outcome, freed

    aborted, *others = run_ranks(3, body)
    for outcome, freed in others:
        assert set(outcome) == {STATUSES["ABORTED"]}
        assert is_within(freed - aborted, 0.05)


def test_closing_frees_this_member_and_tells_the_others() -> None:
    def closes(c: Any) -> Any:
        if c.rank == 1:
            c.close()
            return c.barrier(TIMEOUT)
        status, failure = c.barrier(TIMEOUT), c.last_failure()
        return status, failure.culprit, failure.was_closed, failure.has_exited

    first, closed = run_ranks(2, closes)
    assert closed == STATUSES["CLOSED"]
    assert first == (STATUSES["DIED"], 1, [False, True], [False, False])


def receive_from_anyone(c: Any) -> tuple[int, float, int]:
    x = torch.zeros(4)
    start = time.monotonic()
    status = c.recv(x.data_ptr(), 4, F32, -1, 0, TIMEOUT)
    return status, time.monotonic() - start, c.last_source


def test_a_receive_from_anyone_ends_when_one_who_might_send_dies() -> None:
    def body(c: Any) -> Any:
        if c.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive_from_anyone(c) if c.rank == 0 else time.sleep(1.0)

    (status, seconds, _), killed, _ = run_ranks(3, body)
    assert status == STATUSES["DIED"]
    assert is_within(seconds, 1.0)
    assert isinstance(killed, Killed)


@pytest.mark.parametrize("closes", [False, True])
def test_a_receive_from_anyone_goes_on_when_a_member_leaves_in_good_order(closes: bool) -> None:
    def body(c: Any) -> Any:
        x = torch.zeros(4)
        if c.rank == 0:
            return receive_from_anyone(c)
        if c.rank == 1:
            if closes:
                return c.close()
            c.announce_end()
            os._exit(0)
        time.sleep(0.5)
        return c.send(x.data_ptr(), 4, F32, 0, 0, TIMEOUT)

    (status, _, source), _, sent = run_ranks(3, body)
    assert (status, source, sent) == (OK, 2, OK)


def test_process_handles_are_closed_also_where_nothing_can_be_made_of_them() -> None:
    segment = native.create_segment(2, 4096, 4096, True)
    other = os.memfd_create("other")
    for memory, rank in ((segment, 2), (other, 0)):
        handle = os.pidfd_open(os.getpid())
        with pytest.raises((ValueError, RuntimeError)):
            native.Communicator(memory, rank, [-1, handle])
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
    os.close(segment)
    os.close(other)


@pytest.mark.parametrize("call", ["barrier", "recv", "ticket"])
def test_an_interrupt_reaches_the_program(call: str) -> None:
    def body(c: Any) -> Any:
        x = torch.zeros(1)
        if c.rank == 1:
            time.sleep(1.0)
            return c.barrier(TIMEOUT)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            if call == "barrier":
                c.barrier(TIMEOUT)
            elif call == "recv":
                c.recv(x.data_ptr(), 1, F32, 1, 0, TIMEOUT)
            else:
                c.barrier_async(TIMEOUT).wait(TIMEOUT)
        c.abort()
        return time.monotonic() - started

    seconds, other = run_ranks(2, body)
    assert is_within(seconds, 0.9)
    assert other == STATUSES["ABORTED"]
