"""CUDA tensors over MPI: which way is chosen, and the way by host memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

import meshdist as md
from meshdist.errors import BackendError
from meshdist.reduce_ops import ReduceOp
from meshdist.wires.mpi import communicator as mpi, staging
from meshdist.wires.mpi.staging import StagedCommunicator
from tests.inner import (
    Communicator,
    Deadline,
    Opening,
    Operation,
    PreparedCall,
    WireAborted,
    WireFailure,
    WireTimeout,
    find_wire,
    get_wire,
    get_world,
    operations as worker_queue,
    wait_until,
)
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.wires.direct import Direct
from tests.wires.verb_table import OnDevice, check_every_verb

SECONDS = timedelta(seconds=20)


def test_the_library_says_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def __init__(self, *arguments: Any) -> None:
            self.wire, self.rank, self.size = "mpi", 0, 1

    class Link:
        MPI = None

    monkeypatch.setattr(mpi, "open_link", lambda opening: (Link(), None))
    monkeypatch.setattr(mpi, "MpiCommunicator", Made)
    for device_type, is_aware, kind in (
        ("cpu", False, Made),
        ("cuda", True, Made),
        ("cuda", False, StagedCommunicator),
    ):
        monkeypatch.setattr(mpi, "is_cuda_aware", lambda MPI, answer=is_aware: answer)
        opening: Any = Opening(None, None, (0,), 0, device_type, SECONDS)  # type: ignore[arg-type]
        assert type(mpi.MpiWire().open(opening)) is kind


def test_the_table_promises_no_more_than_staging() -> None:
    wire = find_wire("mpi")
    assert wire.support("all_gather", "cuda", torch.float32) == "built"
    assert wire.support("all_gather", "cpu", torch.float32) == "native"
    assert wire.support("all_gather", "xpu", torch.float32) == ""


class Event:
    """Stands in for a CUDA event: reached when the test says so."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        assert self.is_reached.wait(20)
        if self.error is not None:
            raise self.error

    def reach(self) -> None:
        self.is_reached.set()


class LateEvent:
    """Stands in for a CUDA event that is reached after some time."""

    def __init__(self, seconds: float) -> None:
        self.synchronize = partial(time.sleep, seconds)


class Noted(Operation):
    """Done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def finish(self, timeout: timedelta) -> None:
        if not wait_until(self.poll, Deadline(timeout)):
            raise WireTimeout.after(timeout)

    def poll(self) -> bool:
        return self.is_done


class Host(Communicator):
    """Notes what starts, and doubles what it is to reduce."""

    def __init__(self) -> None:
        super().__init__("noting", 0, 2)
        self.started: list[str] = []
        self.waiting: list[bool] = []
        self.operations: list[Noted] = []
        self.threads: set[int] = set()
        self.failure: BaseException | None = None
        self.is_aborted = False
        self.is_closed = False

    def start(self, prepared: PreparedCall) -> Operation:
        name, outputs = prepared.way, prepared.outputs
        if name == "all_reduce":
            outputs[0].mul_(2)
            name = f"all_reduce {outputs[0].numel()}"
        elif name == "all_gather":
            outputs[0].copy_(torch.cat([*prepared.inputs] * 2))
        elif name in ("broadcast", "recv"):
            outputs[0].fill_(7 if name == "broadcast" else 9)
        if self.failure is not None:
            raise self.failure
        self.threads.add(threading.get_ident())
        self.waiting.append(prepared.waits)
        self.operations.append(Noted())
        self.operations[-1].is_done = prepared.waits
        self.started.append(name)
        return self.operations[-1]

    def wait_for(self, condition: Callable[[], bool], timeout: timedelta) -> None:
        def check() -> None:
            if self.is_aborted:
                raise WireAborted("aborted while waiting")

        if not wait_until(condition, Deadline(timeout), check):
            raise WireTimeout.after(timeout)

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True


class Staged:
    """A staged communicator over a host that notes, and the events of its copies, in order."""

    def __init__(self) -> None:
        self.host = Host()
        self.wire = StagedCommunicator(self.host)
        self.events: list[Event] = []

    def mark(self, tensors: Sequence[torch.Tensor]) -> list[Event]:
        if not tensors:
            return []
        self.events.append(Event())
        return self.events[-1:]

    def reduce(self, count: int, *, waits: bool = False) -> tuple[torch.Tensor, Operation]:
        x = torch.ones(count)
        return x, Direct(self.wire, SECONDS, waits=waits).all_reduce(x, ReduceOp.SUM)

    def has_started(self, *names: str) -> bool:
        """Whether these, and no others, have started or soon do."""
        wait_until(lambda: len(self.host.started) >= len(names), Deadline(SECONDS))
        return self.host.started == list(names)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Staged]:
    made = Staged()
    monkeypatch.setattr(staging, "_events", made.mark)
    monkeypatch.setattr(worker_queue, "_GRACE_S", 0.1)
    yield made
    for event in made.events:
        event.reach()
    made.wire.close()


def test_a_verb_goes_on_while_its_copies_are_under_way(staged: Staged) -> None:
    x, operation = staged.reduce(3)
    assert not operation.poll()
    assert staged.host.started == []
    with pytest.raises(WireTimeout, match=r"not finished after 0\.05 s"):
        operation.finish(timedelta(seconds=0.05))
    staged.events[0].reach()
    assert staged.has_started("all_reduce 3")  # though nothing asks for it
    assert not operation.poll()
    assert x.tolist() == [1.0] * 3
    staged.host.operations[0].is_done = True
    assert operation.poll()
    operation.finish(SECONDS)
    assert x.tolist() == [2.0] * 3


def test_operations_start_in_the_order_of_their_calls(staged: Staged) -> None:
    staged.reduce(1)
    staged.reduce(2)
    more = [
        Direct(staged.wire, SECONDS).recv(torch.empty(1), 1, 0),
        Direct(staged.wire, SECONDS).send(torch.empty(1), 1, 0),
        Direct(staged.wire, SECONDS).barrier(),
    ]
    for event in staged.events[1:]:
        event.reach()
    time.sleep(0.02)
    assert staged.host.started == []
    assert not any(one.poll() for one in more)
    staged.events[0].reach()
    assert staged.has_started("all_reduce 1", "all_reduce 2", "recv", "send", "barrier")


def test_where_nothing_is_queued_a_caller_that_waits_starts_it_itself(staged: Staged) -> None:
    threading.Timer(0.02, lambda: staged.events[0].reach()).start()
    x, operation = staged.reduce(2, waits=True)
    assert staged.host.started == ["all_reduce 2"]
    assert staged.host.waiting == [True]
    operation.finish(SECONDS)
    assert x.tolist() == [2.0, 2.0]
    Direct(staged.wire, SECONDS).barrier()  # has nothing to wait for
    assert staged.host.started == ["all_reduce 2", "barrier"]
    assert staged.host.threads == {threading.get_ident()}


def test_a_caller_that_waits_comes_after_all_that_is_queued(staged: Staged) -> None:
    staged.reduce(1)
    x, operation = staged.reduce(2, waits=True)
    staged.events[1].reach()
    threading.Timer(0.02, staged.events[0].reach).start()
    assert staged.has_started("all_reduce 1", "all_reduce 2")
    # The thread that starts them does not wait for one: another may be needed for it to end.
    assert staged.host.waiting == [False, False]
    staged.host.operations[1].is_done = True
    operation.finish(SECONDS)
    assert x.tolist() == [2.0, 2.0]


def test_where_one_cannot_start_none_after_it_does(staged: Staged) -> None:
    operations = [staged.reduce(count)[1] for count in (1, 2, 3)]
    staged.host.failure = WireFailure("the store is lost")
    for event in staged.events:
        event.reach()
    for operation in reversed(operations):
        with pytest.raises(WireFailure, match="the store is lost"):
            operation.finish(SECONDS)
        assert operation.poll()
    staged.host.failure = None
    with pytest.raises(WireFailure, match="the store is lost"):
        Direct(staged.wire, SECONDS).barrier()
    assert staged.host.started == []


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_of_the_device_is_a_failure(staged: Staged, waits: bool) -> None:
    def fail(x: Any) -> list[Event]:
        event = staged.mark(x)[0]
        event.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        event.reach()
        return [event]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_events", fail)
        with pytest.raises(WireFailure, match=r"^CUDA error: an illegal memory"):
            staged.reduce(1, waits=waits)[1].finish(SECONDS)
    with pytest.raises(WireFailure, match="RuntimeError: CUDA error: an illegal memory access"):
        Direct(staged.wire, SECONDS).barrier()


def test_after_ctrl_c_as_a_verb_begins_none_starts(staged: Staged) -> None:
    staged.host.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        Direct(staged.wire, SECONDS).barrier()
    staged.host.failure = None
    with pytest.raises(WireFailure, match="an earlier call did not start: KeyboardInterrupt"):
        Direct(staged.wire, SECONDS).barrier()
    assert staged.host.started == []


def test_an_abort_ends_what_is_queued(staged: Staged) -> None:
    operations = [staged.reduce(count)[1] for count in (1, 2)]
    waiting = threading.Thread(target=lambda: outcomes.append(ending_of(operations[0])))
    outcomes: list[str] = []
    waiting.start()
    staged.wire.abort()
    waiting.join(20)
    assert outcomes == ["WireAborted"]
    assert staged.host.is_aborted
    assert all(one.poll() for one in operations)
    assert [ending_of(one) for one in operations] == ["WireAborted"] * 2
    for event in staged.events:
        event.reach()
    with pytest.raises(WireAborted):
        staged.reduce(3)[1].finish(SECONDS)
    assert staged.host.started == []


def ending_of(operation: Operation) -> str:
    try:
        operation.finish(SECONDS)
    except WireFailure as failure:
        return type(failure).__name__
    return "done"


@pytest.mark.parametrize("end", ["leave", "close"])
def test_what_is_queued_at_the_end_starts_if_it_soon_can(staged: Staged, end: str) -> None:
    staged.reduce(1)
    staged.reduce(2)
    for event in staged.events:
        threading.Timer(0.02, event.reach).start()
    getattr(staged.wire, end)()
    assert staged.host.started == ["all_reduce 1", "all_reduce 2"]


def test_what_cannot_start_before_the_end_fails(staged: Staged) -> None:
    _, operation = staged.reduce(1)
    staged.wire.close()
    assert staged.host.is_closed
    assert operation.poll()
    staged.events[0].reach()
    assert ending_of(operation) == "WireAborted"
    assert staged.host.started == []


def test_the_host_is_given_copies_and_writes_what_a_verb_writes_alone(staged: Staged) -> None:
    x, y, out = torch.ones(2), torch.ones(2), torch.zeros(4)
    operations = [
        Direct(staged.wire, SECONDS).broadcast(x, 0),  # this member's own
        Direct(staged.wire, SECONDS).broadcast(y, 1),
        Direct(staged.wire, SECONDS).all_gather(out, x),
    ]
    for event in staged.events:
        event.reach()
    assert staged.has_started("broadcast", "broadcast", "all_gather")
    for operation, noted in zip(operations, staged.host.operations, strict=True):
        noted.is_done = True
        operation.finish(SECONDS)
    assert x.tolist() == [1.0] * 2
    assert y.tolist() == [7.0] * 2
    assert out.tolist() == [1.0] * 4


def test_only_a_receive_has_a_source(staged: Staged) -> None:
    _, operation = staged.reduce(1)
    with pytest.raises(BackendError, match="only a receive has a source"):
        operation.source()


def by_copies() -> list[str]:
    """The staging itself does not ask on which device a tensor lies."""
    world = get_world()
    members = tuple(range(world.size))
    store = PrefixStore("staged", world.store)
    wire = get_wire("mpi").open(Opening(store, lambda: store, members, world.rank, "cpu", SECONDS))
    staged = StagedCommunicator(wire)
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    found = [check_every_verb(staged, dtypes, waits=waits) for waits in (False, True)]
    generator = random.Random(world.rank)  # every member's copies take their own time
    with pytest.MonkeyPatch.context() as patch:
        late = lambda x: [LateEvent(generator.choice([0.0, 0.0001, 0.002]))]  # noqa: E731
        patch.setattr(staging, "_events", late)
        found += [check_every_verb(staged, dtypes, waits=waits) for waits in (False, True)]
        found.append(overlapping(staged, generator))
    staged.close()
    return found


def overlapping(wire: Communicator, generator: random.Random) -> str:
    """Twenty calls in flight, finished in an order of each member's own."""
    tensors = [torch.full((n + 1,), float(n)) for n in range(20)]
    operations = [Direct(wire, SECONDS).all_reduce(x, ReduceOp.SUM) for x in tensors]
    for place in generator.sample(range(20), 20):
        operations[place].finish(SECONDS)
    return str([x.tolist() for x in tensors] == [[3.0 * n] * (n + 1) for n in range(20)])


@pytest.mark.mpi
def test_every_verb_by_copies_in_host_memory(pool: Pool) -> None:
    found = job_of(pool, 3).run_in_world(by_copies)
    assert [of_rank.pop() for of_rank in found] == ["True"] * 3
    # Of each run the same bits on every member, and of all runs.
    assert len({digest for of_rank in found for digest in of_rank}) == 1


def on_a_gpu() -> list[list[float]]:
    torch.cuda.set_device(0)
    x = torch.full((1000,), float(md.get_rank() + 1), device="cuda")
    md.all_reduce(x)
    parts = [torch.empty(2, device="cuda") for _ in range(2)]
    md.all_gather(parts, x[:2] + md.get_rank())
    y = torch.zeros(3, device="cuda")
    if md.get_rank() == 0:
        md.send(torch.full((3,), 7.0, device="cuda"), 1)
    else:
        md.recv(y, 0)
    return [x[:1].tolist(), torch.cat(parts).tolist(), y.tolist()]


def in_two_groups() -> list[float]:
    """Rank 0 has a call of the first group queued while it waits in the second."""
    world = get_world()
    members, wires = tuple(range(world.size)), []
    for name in ("first", "second"):
        keys = partial(PrefixStore, name, world.store)
        opening = Opening(keys(), keys, members, world.rank, "cpu", SECONDS)
        wires.append(StagedCommunicator(get_wire("mpi").open(opening)))
    x, y = torch.ones(3), torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_events", lambda _: [LateEvent(0.2)] if world.rank == 0 else [])
        waits = world.rank > 0
        operation = Direct(wires[0], SECONDS, waits=waits).all_reduce(x, ReduceOp.SUM)
    if waits:
        operation.finish(SECONDS)
    Direct(wires[1], SECONDS, waits=True).all_reduce(y, ReduceOp.SUM).finish(SECONDS)
    operation.finish(SECONDS)
    for wire in wires:
        wire.close()
    return [*x.tolist(), *y.tolist()]


@pytest.mark.mpi
def test_what_is_queued_starts_while_another_group_is_waited_for(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(in_two_groups) == [[2.0] * 6] * 2


def kinds_of_communicators() -> list[list[bool]]:
    """Of two groups of meshes, which share their communicators: which are staged."""
    groups = [md.init_device_mesh("cpu", (md.get_world_size(),)).get_group() for _ in range(2)]
    opened = [[g.open_channel(kind).communicator for kind in ("cpu", "cuda")] for g in groups]
    assert opened[0] == opened[1]
    md.barrier()
    return [[isinstance(each, StagedCommunicator) for each in of_group] for of_group in opened]


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 2, 3])
def test_cuda_tensors_have_a_communicator_of_their_own(pool: Pool, size: int) -> None:
    found = job_of(pool, size).run_in_world(kinds_of_communicators)
    assert found == [[[False, True]] * 2] * size


def verbs_on_a_gpu() -> list[str]:
    torch.cuda.set_device(0)
    wire = md.group.WORLD.open_channel("cuda").communicator
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    device = OnDevice(wire, "cuda")
    return [check_every_verb(device, dtypes, waits=waits) for waits in (False, True)]


@pytest.mark.gpu
@pytest.mark.mpi
def test_every_verb_on_cuda_tensors_matches_numpy(pool: Pool) -> None:
    found = job_of(pool, 2).run_in_world(verbs_on_a_gpu)
    assert len({digest for of_rank in found for digest in of_rank}) == 1


def behind_long_kernels() -> tuple[bool, bool, list[float]]:
    """Whether starting is fast, whether the verb then is not done, and the sums."""
    torch.cuda.set_device(0)
    tensors = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    md.all_reduce(tensors[0])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    works = []
    for number, x in enumerate(tensors):
        torch.cuda._sleep(200_000_000)  # at least a tenth of a second
        x.fill_(float(number + md.get_rank()))
        works.append(md.all_reduce(x, async_op=True))
    is_fast, is_early = time.perf_counter() - begin < 0.1, not works[0].is_completed()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        works[3].wait()
        last = float(tensors[3].sum())
    for work in works[:3]:
        work.wait()
    return is_fast, is_early, [float(x[-1]) for x in tensors[:3]] + [last / (1 << 20)]


@pytest.mark.gpu
@pytest.mark.mpi
def test_async_verbs_do_not_wait_for_the_kernels_before_them(pool: Pool) -> None:
    found = job_of(pool, 2).run_in_world(behind_long_kernels)
    assert found == [(True, True, [1.0, 3.0, 5.0, 7.0])] * 2


@pytest.mark.gpu
@pytest.mark.mpi
def test_cuda_tensors(pool: Pool) -> None:
    found = job_of(pool, 2).run_in_world(on_a_gpu)
    gathered = [3.0, 3.0, 4.0, 4.0]
    assert found == [[[3.0], gathered, [0.0] * 3], [[3.0], gathered, [7.0] * 3]]


def of_cupy() -> list[float]:
    import cupy

    x = cupy.full(4, float(md.get_rank() + 1), dtype="float32")
    md.all_reduce(x)
    return x.get().tolist()


@pytest.mark.gpu
@pytest.mark.mpi
def test_cupy_arrays(pool: Pool) -> None:
    pytest.importorskip("cupy")
    assert job_of(pool, 2).run_in_world(of_cupy) == [[3.0] * 4] * 2
