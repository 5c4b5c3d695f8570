"""Blocking messages of plain tensors: the fast path of shared memory, beside the slow.

A program puts a ``Spy`` in the place of its group's fast path, or None to take the slow one.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.backends.native_core import core
from meshdist.backends.operation_args import LARGEST_TAG
from tests.backends.fast_paths import Spy, opened, seconds_until_interrupted
from tests.load import is_within
from tests.operations.cases import BACKENDS
from tests.pool import Failure, Pool

pytestmark = pytest.mark.skipif(core is None, reason="no native core here")
ON = ["shm"]
MIB = 1 << 20


def in_turn(send: Callable[[int], None], recv: Callable[[int], Any]) -> list[Any]:
    """Every member sends to every other one, one pair after the other; what was received."""
    group = md.group.WORLD
    found = []
    for source, target in itertools.permutations(range(group.size()), 2):
        if group.rank() == source:
            send(target)
        elif group.rank() == target:
            found.append(recv(source))
    return found


def both_paths(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Any]:
    """What is received by turns, and the notes; in each turn other members take the fast path."""
    group, spy = opened()
    recorder = group.open_device_group("cpu").recorder
    results, notes = [], []
    num_calls = 2 * 3 * (group.size() - 1)
    for turn in range(1 << group.size()):
        is_fast = bool(turn >> group.rank() & 1)
        group.fast_path = spy if is_fast else None
        spy.answers.clear()
        found = []
        for tag in (0, 7, 1 << 14):

            def send(peer: int, tag: int = tag) -> None:
                md.send(torch.full(shape, group.rank() + 2 * peer).to(dtype), peer, tag=tag)

            def recv(peer: int, tag: int = tag) -> Any:
                x = torch.zeros(shape, dtype=dtype)
                return md.recv(x, peer, tag=tag), x.flatten()[-3:].tolist()

            found.append(in_turn(send, recv))
        results.append(found)
        assert spy.answers == [True] * num_calls * is_fast
        called = [recorder.find_note(recorder.num_notes - k) for k in range(num_calls)]
        notes.append([[one.call.operation, one.arguments, one.where] for one in called])
    assert all(result == results[0] for result in results)
    assert all(note == notes[0] for note in notes)
    return [results[0][0], notes[0][0]]


@pytest.mark.parametrize(
    ("size", "dtype", "shape"),
    [
        (2, torch.float32, (3,)),
        (2, torch.bfloat16, ()),
        (2, torch.bool, (1,)),
        (2, torch.int64, (0, 2)),
        (2, torch.float64, (300, 1, 700)),
        (2, torch.uint8, (1,) * 6),
        (3, torch.int32, (2, 1, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ON)
def test_members_on_both_paths_meet(
    backend: str, size: int, dtype: torch.dtype, shape: tuple[int, ...], pool: Pool
) -> None:
    found = BACKENDS[backend](pool, both_paths, size, dtype, shape)
    for rank, (received, (operation, argument, where)) in enumerate(found):
        for (source, numbers), other in zip(
            received, [one for one in range(size) if one != rank], strict=True
        ):
            one = torch.tensor(source + 2 * rank).to(dtype).item()
            assert source == other
            assert numbers == [one] * min(3, torch.Size(shape).numel())
        assert operation in ("send", "recv")
        assert argument.startswith(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}, ")
        assert argument.endswith("tag 16384")
        assert "in send" in where or "in recv" in where


def left_alone() -> tuple[list[str], int]:
    group, spy = opened()
    x, other = torch.ones(2, 2), 1 - group.rank()
    tensors = {
        "strided": x[:, 0],
        "a leaf": torch.ones(2, requires_grad=True),
        "with history": torch.ones(2, requires_grad=True) * 2,
        "a parameter": torch.nn.Parameter(x),
        "negated": torch._neg_view(x),
        "complex": x.to(torch.complex64),
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
        "an array": x.numpy(),
        "nothing": None,
    }
    tags = [True, -1, LARGEST_TAG + 1, 1 << 70, 1.0, "0", None]
    calls = {name: (one, other, 0) for name, one in tensors.items()}
    calls.update({f"tag {tag!r}": (x, other, tag) for tag in tags})
    calls["itself"] = (x, group.rank(), 0)
    before = group.open_device_group("cpu").recorder.num_notes
    taken = [name for name, call in calls.items() if spy.send(*call) is not False]
    taken += [name for name, call in calls.items() if spy.recv(*call) is not False]
    return taken, group.open_device_group("cpu").recorder.num_notes - before


@pytest.mark.parametrize("backend", ON)
def test_what_is_not_plain_is_left_alone(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, left_alone, 2) == [([], 0)] * 2


def refusals() -> list[str]:
    opened()
    rank, x = md.get_rank(), torch.ones(2)
    told = []
    calls: list[Callable[[], Any]] = [
        lambda: md.send(x, 1 - rank, tag=-1),
        lambda: md.recv(x, 1 - rank, tag=True),
        lambda: md.send(x, rank),
        lambda: md.recv(x, rank),
        lambda: md.send(x, 5),
        lambda: md.send(x),
        lambda: md.recv(x, 0, group_src=0),
        lambda: md.send(None, 1 - rank),
        lambda: md.recv(torch.ones(1).expand(3), 1 - rank),
    ]
    for call in calls:
        with pytest.raises(md.MeshdistError) as caught:
            call()
        told.append(str(caught.value).splitlines()[0])
    return told


@pytest.mark.parametrize("backend", ON)
def test_wrong_arguments_are_told_as_ever(backend: str, pool: Pool) -> None:
    for told in BACKENDS[backend](pool, refusals, 2):
        assert [one.split(": ", 1)[-1] for one in told] == [
            "tag is -1",
            "tag must be an integer",
            "send between a rank and itself would never return",
            "recv between a rank and itself would never return",
            "dst=5 is not a member of the world",
            "send needs dst or group_dst",
            "recv got both src and group_src",
            told[7].split(": ", 1)[-1],
            told[8].split(": ", 1)[-1],
        ]
        assert "NoneType" in told[7]
        assert "its elements share memory" in told[8]


def mismatch(ways: str, first: str) -> list[str]:
    """A message that does not fit: by the ways of sender and receiver, and who comes first."""
    group, spy = opened()
    rank = group.rank()
    group.fast_path = spy if ways.split()[rank] == "fast" else None
    md.barrier()
    if first == ("receiver", "sender")[rank]:
        time.sleep(0.3)
    x = torch.ones(3) if rank == 0 else torch.ones(4, dtype=torch.int32)

    def exchange() -> None:
        if rank == 0:
            md.send(x, 1, tag=3)
            md.recv(x, 1)  # a sender may learn of it later
        else:
            md.recv(x, 0, tag=3)

    with pytest.raises(md.MismatchError) as caught:
        exchange()
    with pytest.raises(md.MeshdistError):
        md.send(x, 1 - rank)  # broken now
    return str(caught.value).splitlines()


@pytest.mark.parametrize("first", ["sender", "receiver"])
@pytest.mark.parametrize("ways", ["fast fast", "fast slow", "slow fast"])
@pytest.mark.parametrize("backend", ON)
def test_a_message_that_does_not_fit_is_told_on_both_sides(
    backend: str, ways: str, first: str, pool: Pool
) -> None:
    for lines in BACKENDS[backend](pool, mismatch, 2, ways, first):
        text = "\n".join(lines)
        assert lines[0].endswith("message mismatch: a send does not match its receive")
        assert "send((3,) float32, to rank 1, tag 3) at " in text
        assert "recv((4,) int32, from rank 0, tag 3) at " in text
        assert "in exchange" in text


def in_any_mix(seed: int) -> int:
    """Many messages to and from all members, each by another way; they arrive in their order."""
    group, spy = opened()
    rank, size = group.rank(), group.size()
    draw, mine = random.Random(seed), random.Random(100 * seed + rank)
    counts: dict[tuple[int, int, int], int] = {}
    works = []
    for _ in range(300):
        source, target = draw.sample(range(size), 2)
        tag, count = draw.choice([0, 0, 5]), draw.choice([1, 7, 5000, 70_000])
        lane = (source, target, tag)
        number = counts[lane] = counts.get(lane, 0) + 1
        way = mine.choice(["fast", "fast", "slow", "later", "batch"])
        group.fast_path = spy if way == "fast" else None
        if rank == source:
            x = torch.full((count,), float(number))
            if way == "batch":
                works += [
                    (one, x, 0)
                    for one in md.batch_isend_irecv([md.P2POp(md.isend, x, target, tag=tag)])
                ]
            elif way == "later":
                works.append((md.isend(x, target, tag=tag), x, 0))
            else:
                md.send(x, target, tag=tag)
        elif rank == target:
            x = torch.zeros(count)
            if way in ("later", "batch"):
                works.append((md.irecv(x, source, tag=tag), x, number))
            else:
                assert md.recv(x, source, tag=tag) == source
                assert x[0] == x[-1] == number
    for work, x, number in works:
        work.wait()
        assert number == 0 or x[0] == x[-1] == number
    return sum(spy.answers)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ON)
def test_both_paths_in_any_mix_keep_the_order(backend: str, size: int, pool: Pool) -> None:
    for num_fast in BACKENDS[backend](pool, in_any_mix, size, 7):
        assert num_fast > 20


def from_any() -> list[Any]:
    """Receives that name no sender, one that does while such a one waits, and fast senders."""
    group, _ = opened()
    rank, found = group.rank(), []
    if rank:
        for number in range(20):
            md.send(torch.tensor([100.0 * rank + number]), 0)
        md.barrier()
        md.send(torch.tensor([float(rank)]), 0, tag=1)
        return []
    for _ in range(40):
        x = torch.zeros(1)
        found.append((md.recv(x), x.item()))
    x, y = torch.zeros(1), torch.zeros(1)
    work = md.irecv(x, tag=1)
    md.barrier()
    work.wait()
    other = 3 - work.source_rank()
    assert md.recv(y, other, tag=1) == other
    assert sorted([x.item(), y.item()]) == [1.0, 2.0]
    return found


@pytest.mark.parametrize("backend", ON)
def test_receives_from_anyone_meet_fast_sends(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, from_any, 3)[0]
    for sender in (1, 2):
        numbers = [number for source, number in found if source == sender]
        assert numbers == [100.0 * sender + number for number in range(20)]


def named_behind_any() -> list[float]:
    """The first message is for who came first, though the second knows its sender."""
    group, _ = opened()
    if group.rank() == 0:
        md.barrier()
        for number in (1.0, 2.0):
            md.send(torch.tensor([number]), 1)
        return []
    x, y = torch.zeros(1), torch.zeros(1)
    work = md.irecv(x)
    md.barrier()
    md.recv(y, 0)
    work.wait()
    return [x.item(), y.item()]


@pytest.mark.parametrize("backend", ON)
def test_a_receive_waits_behind_one_from_anyone(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, named_behind_any, 2)[1] == [1.0, 2.0]


def everybody_sends_first(num_messages: int) -> tuple[float, list[bool]]:
    """More than members keep notes of ahead of each other."""
    _, spy = opened()
    other, x, total = 1 - md.get_rank(), torch.zeros(1), 0.0
    for number in range(num_messages):
        md.send(torch.tensor([float(number)]), other)
    for _ in range(num_messages):
        md.recv(x, other)
        total += x.item()
    for _ in range(20):  # in which they read of each other's
        time.sleep(0.005)
        md.send(x, other)
        md.recv(x, other)
    return total, spy.answers[-2:]


@pytest.mark.parametrize("backend", ON)
def test_small_messages_are_sent_before_anybody_receives(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, everybody_sends_first, 2, 400)
    assert found == [(399 * 200.0, [True, True])] * 2


def of_size(num_bytes: int) -> list[bool]:
    group, spy = opened()
    x = torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)
    y = torch.zeros_like(x)
    if group.rank() == 0:
        md.send(x, 1)
    else:
        md.recv(y, 0)
        assert torch.equal(x, y)
    return spy.answers


@pytest.mark.parametrize("num_bytes", [4096, 4097, 65_536, MIB, 16 * MIB + 1])
@pytest.mark.parametrize("backend", ON)
def test_messages_of_every_size(backend: str, num_bytes: int, pool: Pool) -> None:
    assert BACKENDS[backend](pool, of_size, 2, num_bytes) == [[True]] * 2


def in_subgroups() -> list[Any]:
    rank = md.get_rank()
    reversed_pair = md.new_group([2, 0], sort_ranks=False)
    found = []
    if rank != 1:
        md.all_reduce(torch.ones(1), group=reversed_pair)
        spy = reversed_pair.fast_path = Spy(reversed_pair.fast_path)
        x, place = torch.tensor([float(rank)]), reversed_pair.rank()
        y = torch.zeros(1)
        if place == 0:
            md.send(x, 0, group=reversed_pair)
            found.append(md.recv(y, group_src=1, group=reversed_pair))
        else:
            found.append(md.recv(y, 2, group=reversed_pair))
            md.send(x, group_dst=0, group=reversed_pair)
        found += [y.item(), len(spy.answers)]
    md.barrier()
    return found


@pytest.mark.parametrize("backend", ON)
def test_peers_are_named_by_global_rank_or_place(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, in_subgroups, 3) == [[2, 2.0, 2], [], [0, 0.0, 2]]


def failing(operation: str, how: str) -> tuple[str, float]:
    group = md.new_group(timeout=timedelta(seconds=3.0 if how == "is late" else 30.0))
    md.all_reduce(torch.ones(1), group=group)
    spy = group.fast_path = Spy(group.fast_path)
    md.barrier()
    if md.get_rank() == 1:
        time.sleep(0.2)
        if how == "aborts":
            group.abort("enough")
        if how == "dies":
            os._exit(7)
        md.barrier()  # it never comes
        return "", 0.0
    begin = time.monotonic()
    x = torch.ones(MIB)  # more than goes without a receiver
    with pytest.raises(md.MeshdistError) as caught:
        md.send(x, 1, group, tag=2) if operation == "send" else md.recv(x, 1, group, tag=2)
    took = time.monotonic() - begin
    assert spy.answers == []  # it raised
    assert caught.value.__cause__ is None
    with pytest.raises(md.MeshdistError):
        md.send(x, 1, group)  # broken now
    if how != "dies":
        md.barrier()
    return f"{type(caught.value).__name__}: {caught.value}", took


WAITS = {
    "send": "rank 1 to receive (1048576,) float32 from this rank with tag 2",
    "recv": "rank 1 to send (1048576,) float32 to this rank with tag 2",
}
FAILURES = {
    "is late": "CollectiveTimeoutError: {operation} on group of ranks 0-1 timed out after 3 s",
    "aborts": "AbortedError: {operation} on group of ranks 0-1 was aborted",
    "dies": "BackendError: {operation} on group of ranks 0-1 failed on backend 'shm'",
}


@pytest.mark.parametrize("operation", ["send", "recv"])
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("shm", "is late"),
        ("shm", "aborts"),
        ("shm", "dies"),
    ],
)
def test_failures_are_told_as_ever(backend: str, operation: str, how: str, pool: Pool) -> None:
    if how == "dies":
        found = pool.outcomes(failing, 2, operation, how, backend="shm")[0]
        assert not isinstance(found, Failure), found.exception
    else:
        found = BACKENDS[backend](pool, failing, 2, operation, how)[0]
    text, took = found
    assert text.startswith(FAILURES[how].format(operation=operation))
    direction = "to" if operation == "send" else "from"
    assert (
        f"{operation}((1048576,) float32, {direction} rank 1, tag 2) on group of ranks 0-1 at "
        in text
    )
    assert "in failing" in text
    assert is_within(took, 10.0)
    if how == "is late":
        assert WAITS[operation] in text
        assert "rank 1: last" in text
        assert "pass the same tag, dtype and number of elements to send and recv" in text
    if how == "dies":
        assert "rank 1 has ended" in text


def interrupted(operation: str) -> float:
    group = md.new_group()
    md.all_reduce(torch.ones(1), group=group)
    group.fast_path = Spy(group.fast_path)
    md.barrier()
    if md.get_rank() == 1:
        md.barrier()  # it never comes
        return 0.0
    x = torch.ones(MIB)
    call = {"send": md.send, "recv": md.recv}[operation]
    took = seconds_until_interrupted(lambda: call(x, 1, group))
    md.barrier()
    return took


@pytest.mark.parametrize("operation", ["send", "recv"])
@pytest.mark.parametrize("backend", ON)
def test_ctrl_c_ends_it(backend: str, operation: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, interrupted, 2, operation)[0] < 10.0


def destroyed_meanwhile() -> str:
    group = md.new_group()
    md.all_reduce(torch.ones(1), group=group)
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(md.BackendError) as caught:
            md.recv(torch.zeros(100_000), 1, group=group)
        told.append(str(caught.value))

    if md.get_rank() == 0:
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        md.destroy_process_group(group)
        waiting.join()
    md.barrier()
    return "".join(told)


def test_a_group_destroyed_by_another_thread_is_told_in_words(pool: Pool) -> None:
    text = BACKENDS["shm"](pool, destroyed_meanwhile, 2)[0]
    assert text.startswith("recv on group of ranks 0-1 failed on backend 'shm'")
    assert "where:    rank 0, recv((100000,) float32, from rank 1" in text


def beside_a_thread() -> bool:
    """Another thread goes on while this one waits."""
    group, _ = opened()
    md.barrier()
    if group.rank() == 1:
        time.sleep(0.5)
        md.send(torch.ones(1), 0)
        return True
    counted = []
    is_over = threading.Event()

    def count() -> None:
        while not is_over.is_set():
            counted.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    md.recv(torch.ones(1), 1)
    is_over.set()
    thread.join()
    return len(counted) > 50


@pytest.mark.parametrize("backend", ON)
def test_other_threads_go_on_meanwhile(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, beside_a_thread, 2) == [True, True]


def backward_after_writes() -> str:
    group, spy = opened()
    x = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)
    product = (weight * x).sum()
    if group.rank() == 0:
        md.send(x, 1)
        product.backward()  # what is sent is only read
        return ""
    md.recv(x, 0)
    assert spy.answers == [True]
    with pytest.raises(RuntimeError) as caught:
        product.backward()
    return str(caught.value)


@pytest.mark.parametrize("backend", ON)
def test_autograd_learns_of_what_is_received(backend: str, pool: Pool) -> None:
    sent, received = BACKENDS[backend](pool, backward_after_writes, 2)
    assert sent == ""
    assert "modified by an inplace operation" in received


def told() -> list[str]:
    group, _ = opened()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("meshdist.collectives")
    log.addHandler(handler)
    x = torch.ones(3)
    for level in (5, logging.NOTSET):
        log.setLevel(level)
        md.send(x, 1) if group.rank() == 0 else md.recv(x, 0)
    log.removeHandler(handler)
    return lines


@pytest.mark.parametrize("backend", ON)
def test_they_give_way_to_the_log_of_all_collectives(backend: str, pool: Pool) -> None:
    first, second = BACKENDS[backend](pool, told, 2)
    assert len(first) == len(second) == 1
    assert "send((3,) float32, to rank 1)" in first[0]
    assert "recv((3,) float32, from rank 0)" in second[0]


def forked_and_closed() -> list[Any]:
    group = md.new_group()
    x, other = torch.ones(1), 1 - md.get_rank()
    md.all_reduce(x, group=group)
    fast = group.fast_path
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, f"{fast.send(x, other, 0)} {fast.recv(x, other, 0)}".encode())
        os._exit(0)
    os.wait()
    found = [os.read(reader, 20).decode()]
    md.destroy_process_group(group)
    with pytest.raises(md.GroupClosedError) as caught:
        md.send(x, other, group)
    return [*found, str(caught.value).splitlines()[0]]


def test_a_forked_child_and_a_closed_group_take_the_slow_path(pool: Pool) -> None:
    for forked, closed in pool.run(forked_and_closed, 2, backend="shm"):
        assert forked == "False False"
        assert "was closed" in closed
