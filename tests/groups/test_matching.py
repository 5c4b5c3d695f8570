"""Receives from anyone over Gloo: compared as any other, in order, and never left waiting."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import meshdist as md
from meshdist.groups.matching import Matching, UnnamedReceive
from tests.load import is_within
from tests.pool import Pool

TAGS = [0, 5, 8191, 8192, (1 << 30) - 3]


def other_size_or_dtype(tag: int, sent: torch.Tensor, taken: torch.Tensor, is_late: bool) -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=20))
    begin = time.monotonic()
    is_sender = md.get_rank() == 0
    time.sleep(0.3 * (is_late == is_sender))
    error = sent_with_the_next_verb(sent, group, tag) if is_sender else refused(taken, group, tag)
    assert is_within(time.monotonic() - begin, 10.0)
    return error


def sent_with_the_next_verb(x: torch.Tensor, group: Any, tag: int = 0, dst: int = 1) -> str:
    """A sender may have gone on before the receiver refuses what it sent."""

    def call() -> None:
        md.send(x, dst, group=group, tag=tag)
        md.barrier(group)

    with pytest.raises(md.AgreementError) as caught:
        call()
    return str(caught.value)


def refused(x: torch.Tensor, group: Any, tag: int = 0, src: int | None = None) -> str:
    with pytest.raises(md.AgreementError) as caught:
        md.recv(x, src, group=group, tag=tag)
    return str(caught.value)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("tag", TAGS)
def test_a_message_of_another_size_is_refused_on_both_sides(
    pool: Pool, tag: int, is_late: bool
) -> None:
    for text in pool.run(other_size_or_dtype, 2, tag, torch.ones(100), torch.ones(96), is_late):
        assert "a message does not fit the tensor that receives it" in text
        assert "rank 0: send((100,) float32, to rank 1" in text
        assert "rank 1: recv((96,) float32, from rank 0" in text


def test_a_message_of_another_dtype_is_refused_on_both_sides(pool: Pool) -> None:
    x = torch.ones(4)
    for text in pool.run(other_size_or_dtype, 2, 9000, x, x.to(torch.int32), False):
        assert "rank 1: recv((4,) int32, from rank 0" in text


def by_name_after_anyone() -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=20))
    x = torch.ones(3)
    if md.get_rank() == 0:
        md.send(x, 1, group=group)
    else:
        md.recv(x, group=group)
    if md.get_rank() == 0:
        return sent_with_the_next_verb(x, group)
    return refused(torch.ones(4), group, src=0)


def test_a_receive_by_name_after_one_from_anyone_is_compared(pool: Pool) -> None:
    for text in pool.run(by_name_after_anyone, 2):
        assert "rank 1: recv((4,) float32, from rank 0" in text


def in_order_of_start(num_before: int) -> list[float]:
    """Rank 1 sends 0, 1, 2, ...; rank 0 starts receives from anyone and by name in turn."""
    group = md.new_group(backend="gloo")
    count = 12
    if md.get_rank() == 1:
        works = [md.isend(torch.tensor([float(i)]), 0, group=group) for i in range(num_before)]
        md.barrier(group)
        works += [
            md.isend(torch.tensor([float(i)]), 0, group=group) for i in range(num_before, count)
        ]
    else:
        if num_before:
            md.barrier(group)
        got = [torch.full((1,), -1.0) for _ in range(count)]
        works = [md.irecv(x, (None, 1)[i % 2], group=group) for i, x in enumerate(got)]
        if not num_before:
            md.barrier(group)
    for work in reversed(works):
        work.wait()
    return [x.item() for x in got] if md.get_rank() == 0 else []


def told_after_both_kinds() -> str:
    """The calls that an error tells are the right ones, however receives were started before."""
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=20))
    if md.get_rank() == 1:
        for _ in range(2):
            md.send(torch.ones(2), 0, group=group)
        return sent_with_the_next_verb(torch.ones(3), group, dst=0)
    for work in [md.irecv(torch.ones(2), src, group=group) for src in (None, 1)]:
        work.wait()
    return refused(torch.ones(4), group, src=1)


def test_an_error_after_receives_of_both_kinds_tells_the_calls_that_differ(pool: Pool) -> None:
    for text in pool.run(told_after_both_kinds, 2):
        assert "rank 0: recv((4,) float32, from rank 1)" in text
        assert "rank 1: send((3,) float32, to rank 0)" in text


@pytest.mark.parametrize("num_before", [0, 5, 12])
def test_receives_take_what_one_sender_sent_in_the_order_of_their_start(
    pool: Pool, num_before: int
) -> None:
    assert pool.run(in_order_of_start, 2, num_before)[0] == [float(i) for i in range(12)]


def while_nobody_waits() -> tuple[bool, int, list[float]]:
    """Rank 0 is in a barrier, to which rank 1 comes only after its send."""
    group = md.new_group(backend="gloo")
    x = torch.zeros(1 << 18)
    if md.get_rank() == 0:
        work = md.irecv(x, group=group)
        md.barrier(group)
        end = time.monotonic() + 10.0
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.01)
        return work.is_success(), work.source_rank(), x[:2].tolist()
    md.send(torch.ones(1 << 18), 0, group=group)
    md.barrier(group)
    return True, 1, [1.0, 1.0]


def test_a_started_receive_goes_on_while_nobody_waits_for_it(pool: Pool) -> None:
    assert pool.run(while_nobody_waits, 2)[0] == (True, 1, [1.0, 1.0])


def from_itself() -> list[Any]:
    group = md.new_group(backend="gloo")
    me = group.rank()
    got = torch.zeros(2)
    receive = md.irecv(got, group=group, tag=1)
    md.isend(torch.full((2,), me + 1.0), group=group, group_dst=me, tag=1).wait()
    receive.wait()
    return [receive.source_rank(), got.tolist()]


@pytest.mark.parametrize("size", [1, 3])
def test_a_receive_from_anyone_meets_what_this_rank_sends_itself_later(
    pool: Pool, size: int
) -> None:
    assert pool.run(from_itself, size) == [[me, [me + 1.0] * 2] for me in range(size)]


def after_many_messages_of_other_tags() -> list[float]:
    """More than the receiver can look back upon: it has to ask the wire."""
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=30))
    x = torch.zeros(1)
    if md.get_rank() == 0:
        md.recv(x, 1, group=group, tag=1)
        got = [x.item()]
        for tag in (7, 7, 2):
            md.recv(x, group=group, tag=tag)
            got.append(x.item())
        for i in range(300):
            md.recv(x, 1, group=group, tag=100 + i)
        return got
    works = [md.isend(torch.tensor([float(i)]), 0, group=group, tag=7) for i in range(2)]
    works += [md.isend(x, 0, group=group, tag=100 + i) for i in range(300)]
    for tag in (1, 2):
        works.append(md.isend(torch.tensor([float(tag)]), 0, group=group, tag=tag))
    for work in works:
        work.wait()
    return []


def test_messages_that_the_receiver_has_not_seen_noted_are_received(pool: Pool) -> None:
    assert pool.run(after_many_messages_of_other_tags, 2)[0] == [1.0, 0.0, 1.0, 2.0]


def nobody_sends(how: str) -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=1))
    if md.get_rank():
        time.sleep(3.0)
        return ""
    x = torch.zeros(3)
    if how == "polls":
        work = md.irecv(x, group=group)
        with pytest.raises(md.BackendError, match="not finished is not known"):
            work.source_rank()
        end = time.monotonic() + 5.0
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.05)
        return str(work.exception())
    call = (
        (lambda: md.irecv(x, group=group).wait())
        if how == "async"
        else lambda: md.recv(x, group=group)
    )
    with pytest.raises(md.CollectiveTimeoutError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("how", ["waits", "async", "polls"])
def test_a_receive_for_which_nobody_sends_times_out(pool: Pool, how: str) -> None:
    text = pool.run(nobody_sends, 2, how)[0]
    assert "was not finished within 1 s" in text
    assert "any rank to send (3,) float32 to this rank under tag 0" in text


def one_is_dead() -> tuple[str, float]:
    group = md.new_group(backend="gloo")
    if md.get_rank() == 1:
        threading.Timer(0.3, os._exit, [9]).start()
        time.sleep(30.0)
    if md.get_rank() == 2:
        time.sleep(4.0)  # lives, and does not send
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(md.BackendError) as caught:
        md.recv(torch.zeros(1), group=group)
    return str(caught.value), time.monotonic() - begin


def test_a_receive_ends_when_one_who_might_send_dies(pool: Pool) -> None:
    text, seconds = pool.outcomes(one_is_dead, 3)[0]
    assert "rank 1 has ended" in text
    assert is_within(seconds, 3.0)


def ended_meanwhile(closes: bool) -> str:
    group = md.new_group(backend="gloo")
    work = md.irecv(torch.zeros(1), group=group)
    assert "meshdist-matching" in [thread.name for thread in threading.enumerate()]
    md.barrier()
    if closes:
        md.destroy_process_group(group)
    elif md.get_rank() == 0:
        group.abort("enough")
    with pytest.raises(md.MeshdistError) as caught:
        work.wait()
    names, end = ["meshdist-matching"], time.monotonic() + 5.0
    while "meshdist-matching" in names and time.monotonic() < end:
        time.sleep(0.05)
        names = [thread.name for thread in threading.enumerate()]
    assert "meshdist-matching" not in names
    return str(caught.value)


def test_an_abort_ends_receives_that_wait_for_their_sender(pool: Pool) -> None:
    for text in pool.run(ended_meanwhile, 2, False):
        assert "irecv on group of ranks 0-1 was aborted" in text
        assert "enough" in text


def test_closing_the_group_ends_receives_that_wait_for_their_sender(pool: Pool) -> None:
    for text in pool.run(ended_meanwhile, 2, True):
        assert "the group was closed while a receive waited for its sender" in text


def the_only_message(group: Any) -> float:
    md.barrier()
    x = torch.zeros(1)
    if md.get_rank() == 0:
        md.recv(x, group=group)
        return x.item()
    md.send(torch.ones(1), 0, group=group)
    return 1.0


def dropped() -> list[float]:
    group = md.new_group(backend="gloo")
    x, y = torch.zeros(1), torch.zeros(1)
    if md.get_rank() == 0:
        md.irecv(x, group=group)  # and its Work is dropped
        gc.collect()
        md.barrier()
        md.recv(y, group=group)
    else:
        md.barrier()
        md.send(torch.ones(1), 0, group=group)
        md.send(torch.full((1,), 2.0), 0, group=group)
    md.barrier()
    return [x.item(), y.item()]


def test_a_receive_whose_work_was_dropped_takes_its_message(pool: Pool) -> None:
    assert pool.run(dropped, 2)[0] == [1.0, 2.0]


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def interrupted() -> float:
    group = md.new_group(backend="gloo")
    if md.get_rank() == 0:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            md.recv(torch.zeros(1), group=group)
        signal.signal(signal.SIGALRM, before)
    return the_only_message(group)


def test_ctrl_c_ends_a_receive_and_leaves_the_message_to_the_next(pool: Pool) -> None:
    assert pool.run(interrupted, 2) == [1.0, 1.0]


def test_a_look_that_was_held_up_does_not_hold_up_the_next() -> None:
    header_table, communicator = mock.Mock(), mock.Mock(rank=0)
    communicator.has_sent_itself.return_value = False
    looks = iter([0.0, 0.5])  # the first is the program's, the second the thread's
    sent = threading.Event()

    def find_sender(tag: int) -> int | None:
        time.sleep(next(looks, 0.0))
        return 1 if sent.is_set() else None

    header_table.find_sender.side_effect = find_sender
    header_table.find_lost.return_value = header_table.note.return_value = None
    matching = Matching(communicator, header_table, mock.Mock(), lambda: False)
    limit = timedelta(seconds=9)
    receive = UnnamedReceive(torch.zeros(1), None, 0, 0, 1, limit, explain=mock.Mock())
    deferred = matching.add(receive, waits=False)
    time.sleep(0.7)
    sent.set()
    time.sleep(0.5)
    assert deferred.started is communicator.start.return_value


def found_while_nobody_waits() -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=20))
    begin = time.monotonic()
    with pytest.raises(md.AgreementError) as caught:
        found_by_the_barrier(group)
    assert is_within(time.monotonic() - begin, 10.0)
    return str(caught.value)


def found_by_the_barrier(group: Any) -> None:
    if md.get_rank() == 1:
        md.send(torch.ones(5), 0, group=group)
    else:
        kept = md.irecv(torch.ones(3), group=group)  # noqa: F841
    md.barrier(group)


def test_a_disagreement_is_told_to_who_waits_for_something_else(pool: Pool) -> None:
    for text in pool.run(found_while_nobody_waits, 2):
        assert "rank 0: irecv((3,) float32, from rank 1)" in text
        assert "rank 1: send((5,) float32, to rank 0)" in text


def in_order_behind_many(count: int) -> list[float]:
    group = md.new_group(backend="gloo")
    got = [torch.full((1,), -1.0) for _ in range(count)]
    if md.get_rank() == 1:
        works = [md.isend(torch.tensor([float(i)]), 0, group=group) for i in range(count)]
    else:
        works = [md.irecv(x, (None, None, 1)[i % 3], group=group) for i, x in enumerate(got)]
    for work in works:
        work.wait()
    return [x.item() for x in got]


def test_any_number_of_messages_under_way_keeps_its_order(pool: Pool) -> None:
    assert pool.run(in_order_behind_many, 2, 500)[0] == [float(i) for i in range(500)]


def objects_from_anyone() -> Any:
    group = md.new_group(backend="gloo")
    if md.get_rank():
        md.send_object_list([md.get_rank(), "x" * md.get_rank()], 0, group=group)
        return None
    found = []
    for _ in range(group.size() - 1):
        taken: list[Any] = [None, None]
        source = md.recv_object_list(taken, group=group)
        found.append((source, taken))
    return sorted(found)


def test_objects_from_anyone(pool: Pool) -> None:
    expected = [(1, [1, "x"]), (2, [2, "xx"])]
    assert pool.run(objects_from_anyone, 3)[0] == expected


def no_objects() -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=20))
    if md.get_rank() == 0:  # as what goes before a list
        return sent_with_the_next_verb(torch.tensor([1, 2, 3], dtype=torch.uint64), group)
    with pytest.raises(md.AgreementError) as caught:
        md.recv_object_list([None], group=group)
    return str(caught.value)


def test_a_tensor_is_no_list_of_objects_from_anyone(pool: Pool) -> None:
    for text in pool.run(no_objects, 2):
        assert "rank 0: send((3,) uint64, to rank 1)" in text
        assert "rank 1: recv_object_list((3,) uint64, from rank 0)" in text
