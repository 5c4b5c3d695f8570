"""Shared memory among processes: what the table of collectives does not ask, and all of it on 8
ranks."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import meshdist as md
from meshdist.backends.shm import communicator as shm
from tests.load import is_within
from tests.operations import oracle
from tests.operations.cases import is_legal, run_cases, sample
from tests.operations.plans import OPERATIONS, Case
from tests.pool import Pool

LIMIT = timedelta(seconds=30)
SLOT = 256 * 1024
# Each example is a world of its own; the pool is one for all of them.
DRAWN = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
DRAWN_LONG = settings(DRAWN, max_examples=300)


def on(pool: Pool, fn: Callable[..., Any], size: int, *args: Any, **more: Any) -> list[Any]:
    return pool.run(fn, size, *args, backend="shm", **more)


# -- every collective, on up to 8 ranks ------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 6, 7, 8])
def test_every_collective_on_more_ranks_than_cores(size: int, pool: Pool) -> None:
    run_cases("shm", sample(size, 3), pool)


# Around the borders of slots and of the lines that small messages travel in.
COUNTS = st.one_of(
    st.integers(0, 40),
    st.sampled_from([16, 1024, SLOT // 8, SLOT // 4]).flatmap(
        lambda near: st.integers(near - 3, near + 3)
    ),
)


@st.composite
def cases(draw: Any, size: int) -> Case:
    name = draw(st.sampled_from(list(OPERATIONS)))
    operation = OPERATIONS[name]
    shape = (draw(COUNTS), *draw(st.sampled_from([(), (1,), (2,)])))
    op = draw(st.sampled_from(oracle.OPS)) if operation.reduces else None
    kinds = [kind for kind in oracle.DTYPES if op is None or oracle.has_meaning(op, kind)]
    is_uneven = draw(st.booleans()) and is_legal(name, shape, True)
    if not is_legal(name, shape, is_uneven):
        shape = (draw(st.integers(1, 40)), 2)
    return Case(
        name,
        size,
        "torch",
        draw(st.sampled_from(kinds)),
        op,
        shape,
        draw(st.sampled_from(["plain", "strided"])),
        is_uneven,
        draw(st.sampled_from(operation.forms)),
        draw(st.integers(0, size - 1)) if operation.root else None,
        bool(operation.root) and draw(st.booleans()),
        operation.takes_async and draw(st.booleans()),
    )


BATCHES = st.integers(1, 8).flatmap(lambda size: st.lists(cases(size), min_size=3, max_size=8))


@DRAWN
@given(batch=BATCHES)
def test_drawn_calls_hold_what_numpy_holds(pool: Pool, batch: list[Case]) -> None:
    run_cases("shm", batch, pool)


@pytest.mark.soak
@DRAWN_LONG
@given(batch=BATCHES)
def test_many_drawn_calls_hold_what_numpy_holds(pool: Pool, batch: list[Case]) -> None:
    run_cases("shm", batch, pool)


@pytest.mark.soak
@pytest.mark.parametrize("size", range(1, 9))
def test_every_collective_in_all_dtypes_on_up_to_8_ranks(size: int, pool: Pool) -> None:
    run_cases("shm", sample(size, 150), pool)


# -- bits -----------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def digests(count: int) -> list[str]:
    """Of sums of random numbers in every floating dtype, twice, the second time on a new group."""
    rank, size = md.get_rank(), md.get_world_size()
    found = []
    for group in (None, md.new_group()):
        for dtype in FLOATS:
            generator = torch.Generator().manual_seed(count * 10 + rank)
            kind = torch.complex64 if dtype.is_complex else torch.float32
            x = torch.randn(count * size, generator=generator, dtype=kind).to(dtype)
            block = torch.empty(count, dtype=dtype)
            md.reduce_scatter_tensor(block, x, group=group)
            whole = torch.empty_like(x)
            md.all_gather_into_tensor(whole, block, group=group)
            md.all_reduce(x, group=group)
            for y in (x, whole):
                found.append(hashlib.sha256(bytes(y.view(torch.uint8).numpy())).hexdigest())
    return found


@pytest.mark.parametrize(("size", "count"), [(2, 3), (3, 1000), (5, 40_001)])
def test_sums_have_the_same_bits_on_all_ranks_and_from_run_to_run(
    size: int, count: int, pool: Pool
) -> None:
    first = on(pool, digests, size, count)
    half = len(first[0]) // 2
    for found in [*first, *on(pool, digests, size, count)]:
        assert found == first[0]
        assert found[:half] == found[half:]


# -- in flight ------------------------------------------------------------------------------------


def a_thousand_in_order() -> list[int]:
    """A thousand collectives on one tensor, each on what the one before left in it."""
    rank, size = md.get_rank(), md.get_world_size()
    x = torch.tensor([1, rank])
    works = []
    for number in range(1000):
        if number % 3 == 0:
            works.append(md.all_reduce(x, async_op=True))
        elif number % 3 == 1:
            works.append(md.broadcast(x, number % size, async_op=True))
        else:
            works.append(md.reduce(x, number % size, async_op=True))
    for work in reversed(works):
        work.wait()
    return [int(value) for value in x]


def test_a_thousand_collectives_in_flight_run_in_order(pool: Pool) -> None:
    size = 3
    wanted = [[1, rank] for rank in range(size)]
    wrap = 2**64
    for number in range(1000):
        total = [sum(column) % wrap for column in zip(*wanted, strict=True)]
        if number % 3 == 0:
            wanted = [list(total) for _ in range(size)]
        elif number % 3 == 1:
            wanted = [list(wanted[number % size]) for _ in range(size)]
        else:
            wanted[number % size] = total
    signed = [[value - wrap if value >= wrap // 2 else value for value in row] for row in wanted]
    assert on(pool, a_thousand_in_order, size) == signed


def tensors_kept() -> list[int]:
    """How many tensors live after their collectives: waited for, dropped, and dropped long ago."""
    x = torch.ones(10)
    kept = []
    for is_waited_for in (True, False):
        seen = []
        for _ in range(200):
            y = x.clone()
            seen.append(weakref.ref(y))
            work = md.all_reduce(y, async_op=True)
            if is_waited_for:
                work.wait()
            del y, work
        md.barrier()
        kept.append(sum(one() is not None for one in seen))
    for _ in range(200):
        md.all_reduce(x, async_op=True).wait()
    return [*kept, sum(one() is not None for one in seen)]


def test_tensors_in_flight_live_and_are_let_go(pool: Pool) -> None:
    for waited_for, _, dropped_long_ago in on(pool, tensors_kept, 2):
        assert waited_for == 0
        assert dropped_long_ago == 0


def last_elements_around_a_close() -> list[tuple[float, float]]:
    """The end of what a collective in flight writes, when its group is closed, and later."""
    found = []
    for delay_s in (0.0, 0.001, 0.003, 0.006):
        group = md.new_group([md.get_rank()])
        x, result = torch.ones(1 << 25), torch.zeros(1 << 25)
        md.all_gather_into_tensor(result, x, group=group, async_op=True)
        time.sleep(delay_s)
        group.open_device_group("cpu").communicator.close()
        before = result[-1].item()
        time.sleep(0.1)
        found.append((before, result[-1].item()))
    return found


def test_a_closed_group_writes_to_no_tensor(pool: Pool) -> None:
    for found in on(pool, last_elements_around_a_close, 2):
        assert all(before == after for before, after in found)


def lives_of_a_dropped_receive() -> list[bool]:
    """Whether a tensor lives whose receive was dropped: before it is done, and some calls later."""
    if md.get_rank() == 1:
        md.barrier()
        md.send(torch.ones(3), 0)
        md.barrier()
    else:
        x = torch.zeros(3)
        seen = weakref.ref(x)
        md.irecv(x, 1)
        del x
        found = [seen() is not None]
        md.barrier()
        md.barrier()
    for _ in range(2):
        md.all_reduce(torch.ones(1), async_op=True).wait()
    return [*found, seen() is not None] if md.get_rank() == 0 else []


def test_a_tensor_lives_as_long_as_a_message_writes_to_it(pool: Pool) -> None:
    assert on(pool, lives_of_a_dropped_receive, 2) == [[True, False], []]


# -- messages -------------------------------------------------------------------------------------

Message = tuple[int, int, int, int]  # source, target, tag, number of elements
LARGEST_TAG = 2**30 - 3
TAGS = st.sampled_from([0, 1, 2, 77, LARGEST_TAG])
MESSAGES = st.integers(1, 4).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(
            st.tuples(
                st.integers(0, size - 1),
                st.integers(0, size - 1),
                TAGS,
                st.sampled_from([0, 1, 5, 1000, 16 * 1024, 100_000]),
            ),
            max_size=25,
        ),
        st.integers(0, 2**32),
    )
)


def exchange(messages: list[Message], seed: int) -> list[str]:
    """All messages at once, posted in an order of each rank's own; what came wrongly."""
    rank = md.get_rank()
    # Messages of one source, target and tag keep their order; else every rank takes its own.
    lanes: dict[Any, list[tuple[str, int]]] = {}
    for number, (source, target, tag, _) in enumerate(messages):
        if source == rank:
            lanes.setdefault(("send", target, tag), []).append(("send", number))
        if target == rank:
            lanes.setdefault(("recv", source, tag), []).append(("recv", number))
    draw = random.Random(seed + rank)
    turns = [lane for lane, several in lanes.items() for _ in several]
    draw.shuffle(turns)
    works = []
    received = {}
    for lane in turns:
        way, number = lanes[lane].pop(0)
        source, target, tag, count = messages[number]
        content = torch.arange(count, dtype=torch.float32) + number
        if way == "send":
            works.append(md.isend(content, target, tag=tag))
        else:
            received[number] = torch.empty(count)
            works.append(md.irecv(received[number], source, tag=tag))
    draw.shuffle(works)
    for work in works:
        work.wait()
    wrong = [
        f"message {number}"
        for number, x in received.items()
        if not torch.equal(x, torch.arange(x.numel(), dtype=torch.float32) + number)
    ]
    md.barrier()
    return wrong


@DRAWN
@given(drawn=MESSAGES)
def test_drawn_messages_all_arrive(pool: Pool, drawn: tuple[int, list[Message], int]) -> None:
    size, messages, seed = drawn
    assert on(pool, exchange, size, messages, seed) == [[]] * size


@pytest.mark.soak
@DRAWN_LONG
@given(drawn=MESSAGES)
def test_many_drawn_messages_all_arrive(pool: Pool, drawn: Any) -> None:
    size, messages, seed = drawn
    assert on(pool, exchange, size, messages, seed) == [[]] * size


def test_large_messages_both_ways_beside_a_collective(pool: Pool) -> None:
    def program() -> Any:
        rank, peer = md.get_rank(), 1 - md.get_rank()
        got, given_ = torch.empty(2_000_000), torch.full((2_000_000,), float(rank))
        receive = md.irecv(got, peer, tag=LARGEST_TAG)
        late = md.irecv(torch.empty(1), peer, tag=9)  # is sent last of all
        reduced = torch.ones(300_000)
        work = md.all_reduce(reduced, async_op=True)
        send = md.isend(given_, peer, tag=LARGEST_TAG)
        receive.wait()
        work.wait()
        send.wait()
        assert not late.is_completed()
        md.barrier()
        md.send(torch.ones(1), peer, tag=9)
        late.wait()
        return got[-1].item(), reduced[-1].item()

    assert on(pool, program, 2) == [(1.0, 2.0), (0.0, 2.0)]


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "recv", "wait"])
def test_other_threads_run_while_one_waits(call: str, pool: Pool) -> None:
    def program() -> int:
        x = torch.ones(4)
        md.barrier()
        if md.get_rank() == 1:
            time.sleep(0.4)
            md.send(x, 0) if call == "recv" else None
        steps, done = [0], threading.Event()

        def count() -> None:
            while not done.is_set():
                steps[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        if call == "recv":
            md.recv(x, 1) if md.get_rank() == 0 else None
        elif call == "barrier":
            md.barrier()
        elif call == "wait":
            md.all_reduce(x, async_op=True).wait()
        else:
            md.all_reduce(x)
        seen = steps[0]
        done.set()
        thread.join()
        return seen

    assert on(pool, program, 2)[0] > 20


# -- what members notice about each other ---------------------------------------------------------

BACKGROUND: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sizes": (
        lambda: md.all_reduce(torch.ones(6), async_op=True),
        lambda: md.all_reduce(torch.ones(4), async_op=True),
    ),
    "one waits": (
        lambda: md.all_reduce(torch.ones(6), async_op=True),
        lambda: md.all_reduce(torch.ones(6), op=md.ReduceOp.MAX),
    ),
    "roots": (
        lambda: md.broadcast(torch.ones(2), 0, async_op=True),
        lambda: md.broadcast(torch.ones(2), 2, async_op=True),
    ),
    "operations": (
        lambda: md.all_gather_into_tensor(torch.ones(6), torch.ones(2), async_op=True),
        lambda: md.reduce_scatter_tensor(torch.ones(2), torch.ones(6), async_op=True),
    ),
    "splits": (
        lambda: md.all_to_all_single(
            torch.ones(3), torch.ones(3), [1, 1, 1], [1, 1, 1], async_op=True
        ),
        lambda: md.all_to_all_single(
            torch.ones(3), torch.ones(4), [1, 1, 1], [1, 1, 2], async_op=True
        ),
    ),
    "large": (
        lambda: md.all_reduce(torch.ones(3_000_000), async_op=True),
        lambda: md.all_reduce(torch.ones(3_000_001), async_op=True),
    ),
}


def finish(work: md.Work | None) -> None:
    if work is not None:
        work.wait()


def disagreeing_in_the_background(name: str) -> Any:
    """The second call differs on rank 1; its error, and the next one's on the same group."""
    x = torch.ones(3)
    md.all_reduce(x)
    beside = md.new_group()
    call = BACKGROUND[name][md.get_rank() == 1]
    told = []
    for attempt in (call, lambda: md.all_reduce(x), lambda: md.barrier()):
        with pytest.raises(md.MeshdistError) as caught:
            finish(attempt())
        told.append((type(caught.value).__name__, str(caught.value)))
    md.all_reduce(x, group=beside)
    assert x.tolist() == [9.0] * 3
    return told


@pytest.mark.parametrize("name", BACKGROUND)
def test_calls_in_flight_that_differ_raise_on_every_rank(name: str, pool: Pool) -> None:
    for (kind, text), *later in on(pool, disagreeing_in_the_background, 3, name):
        assert kind == "MismatchError"
        assert text.startswith("collective mismatch: ranks made different calls as call 2\n")
        assert "ranks 0, 2: " in text and "rank 1: " in text, text
        assert text.count("test_communicator.py:") >= 2
        for kind_later, text_later in later:
            assert kind_later == "MismatchError", text_later


@pytest.mark.parametrize("what", ["size", "dtype"])
@pytest.mark.parametrize("is_receiver_first", [False, True])
def test_a_message_that_does_not_fit_raises_on_both_sides(
    what: str, is_receiver_first: bool, pool: Pool
) -> None:
    def program() -> Any:
        rank = md.get_rank()
        if (rank == 0) == is_receiver_first:
            time.sleep(0.2)
        other = torch.ones(5) if what == "size" else torch.ones(4, dtype=torch.int64)
        calls = [
            # A small message may have left already.
            lambda: (md.send(torch.ones(4), 1, tag=3), md.barrier()),
            lambda: md.recv(other, 0, tag=3),
            lambda: md.barrier(),
        ]
        with pytest.raises(md.MismatchError) as caught:
            calls[rank]()
        return str(caught.value)

    for text in on(pool, program, 3):
        assert text.startswith("message mismatch: a send does not match its receive")
        assert "(4,) float32" in text
        assert ("(5,) float32" if what == "size" else "(4,) int64") in text
        assert text.count("test_communicator.py:") >= 2


def test_a_timeout_tells_who_has_come(pool: Pool) -> None:
    def program() -> Any:
        group = md.new_group(timeout=timedelta(seconds=0.6))
        x = torch.ones(7)
        md.all_reduce(x, group=group)
        if md.get_rank() == 1:
            time.sleep(2.0)
            return None
        with pytest.raises(md.MeshdistError) as caught:
            md.all_reduce(x, group=group)
        return type(caught.value).__name__, str(caught.value)

    found = on(pool, program, 3)
    for rank in (0, 2):
        kind, text = found[rank]
        assert kind == "CollectiveTimeoutError", text
        assert text.startswith("all_reduce on group of ranks 0-2 timed out after 0.6 s")
        assert "rank 1: did not reach this call; last call 1 on group of ranks 0-2" in text
        assert f"rank {2 - rank}: reached this call" in text


@pytest.mark.parametrize("call", ["all_reduce", "recv", "wait"])
def test_an_abort_by_another_thread_frees_all_ranks(call: str, pool: Pool) -> None:
    def program() -> Any:
        rank = md.get_rank()
        group = md.new_group()
        x = torch.ones(100_000)
        begin = time.monotonic()
        if rank == 1:
            threading.Timer(0.3, group.abort, ("the data has ended",)).start()
        calls = {
            "all_reduce": lambda: md.all_reduce(x, group=group),
            "recv": lambda: md.recv(x, 2, group=group),
            "wait": lambda: md.all_reduce(x, group=group, async_op=True).wait(),
        }
        if rank == 2:  # it does not come to the others' call
            calls[call] = lambda: md.recv(x, 0, group=group)
        with pytest.raises(md.AbortedError) as caught:
            calls[call]()
        seconds = time.monotonic() - begin
        with pytest.raises(md.AbortedError):
            md.barrier(group)
        y = torch.ones(1)
        md.all_reduce(y)
        return str(caught.value), seconds, y.item()

    for text, seconds, total in on(pool, program, 3):
        assert "rank 1: the data has ended" in text
        assert is_within(seconds, 3.0)
        assert total == 3.0


def test_all_to_all_of_a_list_onto_itself_in_any_order(pool: Pool) -> None:
    def program() -> list[list[int]]:
        rank, n = md.get_rank(), md.get_world_size()
        found = []
        for order in (range(n), reversed(range(n)), [1, 2, 0]):
            parts = [torch.full((50_000,), 10 * rank + j) for j in range(n)]
            md.all_to_all([parts[j] for j in order], parts)
            found.append([int(part.unique().item()) for part in parts])
        return found

    for rank, found in enumerate(on(pool, program, 3)):
        came = [rank, 10 + rank, 20 + rank]
        assert found == [came, came[::-1], [came[2], came[0], came[1]]]


# -- tensors in shared memory ---------------------------------------------------------------------


def test_a_shared_tensor_has_a_storage_of_its_own(pool: Pool) -> None:
    def program() -> Any:
        rank = md.get_rank()
        group = md.new_group()
        x = md.shared_empty((5, 3), group=group).fill_(rank)
        md.barrier()
        x.as_strided((15,), (1,), 0).add_(1.0)  # counts from the begin of the storage
        md.barrier()
        found = [x.storage_offset(), x.untyped_storage().nbytes(), x.min().item(), x.max().item()]
        md.all_reduce(x, group=group)
        group.close()
        return [*found, x.min().item(), x.max().item()]

    assert on(pool, program, 3) == [[0, 60, r + 1.0, r + 1.0, 6.0, 6.0] for r in range(3)]


def mapped_bytes() -> int:
    """How much of this process's address space is memory of shared tensors."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:meshdist-shared" in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            total += end - begin
    return total


def test_shared_memory_that_there_is_not(pool: Pool) -> None:
    def rejected(group: md.ProcessGroup) -> str:
        with patch.object(shm, "free_bytes", lambda: 1e6):
            try:
                md.shared_empty(1_000_000, dtype=torch.uint8, group=group)
            except md.BackendError as error:  # pytest would keep it, and the group with it
                return str(error)
        return ""

    def program() -> str:
        group = md.new_group()
        told = rejected(group)
        x = md.shared_empty(1000, group=group).fill_(1.0)
        md.all_reduce(x, group=group)
        assert x.sum() == 2000
        group.close()
        return told

    for text in on(pool, program, 2):
        assert "2,007,040 bytes are needed, but only 1,000,000 are free" in text


def test_shared_memory_ends_with_its_last_tensor(pool: Pool) -> None:
    def program() -> Any:
        group = md.new_group()
        seen = [mapped_bytes()]
        for _ in range(20):
            x = md.shared_empty(1 << 20, dtype=torch.uint8, group=group)
            md.all_reduce(x.zero_(), group=group)
        seen.append(mapped_bytes())
        del x
        md.barrier(group)  # the last ones are let go by all before a call after this one
        md.barrier(group)
        seen.append(mapped_bytes())
        group.close()
        return seen

    for before, within, after in on(pool, program, 3):
        assert after <= before  # an earlier test may have left a tensor in this process
        # The last tensor may be there, and the tensor before it.
        assert within - before <= 2 * 3 * ((1 << 20) + 4096)


def test_shared_memory_serves_whoever_still_has_a_tensor(pool: Pool) -> None:
    def program() -> Any:
        rank = md.get_rank()
        group = md.new_group()
        x = md.shared_empty(50_000, group=group).fill_(rank)
        y = md.shared_empty(50_000, group=group).fill_(rank)
        if rank != 1:
            del x
        md.barrier(group)
        mine = x.fill_(7.0) if rank == 1 else torch.empty(50_000)
        md.broadcast(mine, 1, group=group)  # read where rank 1 has it
        md.all_reduce(y, group=group)
        is_kept = mapped_bytes() > 2 * 3 * 50_000 * 4
        if rank == 1:
            del x
        del mine
        md.barrier(group)
        md.all_reduce(y, group=group)
        return y.unique().tolist(), is_kept, mapped_bytes() < 2 * 3 * 50_000 * 4

    assert on(pool, program, 3) == [([9.0], True, True)] * 3


def test_a_forked_child_keeps_its_parent_s_shared_memory(pool: Pool) -> None:
    def program() -> Any:
        group = md.new_group()
        x = md.shared_empty(1000, group=group).fill_(1.0)
        child = os.fork()
        if child == 0:
            del x
            os._exit(0)
        os.waitpid(child, 0)
        md.barrier(group)
        md.barrier(group)
        is_mapped = mapped_bytes() > 0
        md.all_reduce(x, group=group)
        return is_mapped, x.sum().item()

    assert on(pool, program, 2) == [(True, 2000.0)] * 2


# -- processes ------------------------------------------------------------------------------------


def test_a_forked_child_raises_and_leaves_its_parent_alone(pool: Pool) -> None:
    def program() -> Any:
        x = torch.ones(4)
        work = md.all_reduce(x, async_op=True)
        work.wait()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                told = []
                for call in (
                    lambda: md.all_reduce(x),
                    lambda: md.send(x, 0),
                    lambda: md.all_reduce(x, async_op=True),
                ):
                    with pytest.raises(md.WorldError):
                        call()
                    told.append("raised")
                os.write(write, ",".join(told).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        told = os.read(read, 1000).decode()
        os.close(read)
        os.close(write)
        md.all_reduce(x)
        md.all_reduce(x, async_op=True).wait()
        return told, x.tolist()

    for told, values in on(pool, program, 2):
        assert told == ",".join(["raised"] * 3)
        assert values == [8.0] * 4


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_256_mib(size: int, pool: Pool) -> None:
    def program() -> Any:
        rank = md.get_rank()
        x = torch.full((64 << 20,), float(rank + 1))
        md.all_reduce(x)
        total = size * (size + 1) / 2
        assert bool((x == total).all())
        x.fill_(rank)
        md.broadcast(x, size - 1)
        assert bool((x == size - 1).all())
        x.fill_(rank)
        y = torch.empty_like(x)
        md.all_to_all_single(y, x)
        assert [chunk[0].item() for chunk in y.chunk(size)] == list(range(size))
        works = [md.irecv(y, (rank - 1) % size), md.isend(x, (rank + 1) % size)]
        for work in works:
            work.wait()
        assert bool((y == (rank - 1) % size).all())

    on(pool, program, size, timeout_s=300.0)


def rounds_of_several_threads() -> list[float]:
    """Messages to itself; what each thread starts looks after what the others have in flight."""
    found: list[float] = []

    def pass_rounds(tag: int) -> None:
        for _ in range(300):
            x = torch.zeros(2)
            works = [md.irecv(x, 0, tag=tag), md.isend(torch.ones(2), 0, tag=tag)]
            for work in reversed(works):
                work.wait()
            found.append(x.sum().item())

    md.barrier()
    threads = [threading.Thread(target=pass_rounds, args=(tag,)) for tag in range(4)]
    sys.setswitchinterval(1e-6)  # threads change between any two steps
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(0.005)
    return found


def test_threads_start_calls_beside_each_other(pool: Pool) -> None:
    assert pool.run(rounds_of_several_threads, 1, backend="shm") == [[2.0] * 1200]
