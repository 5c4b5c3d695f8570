"""A collective in flight: a request that the test finishes, and requests of real backends."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import WorkResult

import meshdist as md
from meshdist.backends import work as work_module
from meshdist.backends.requests import BackendFailure, BackendTimeout, Request
from meshdist.backends.work import Work
from meshdist.errors import BackendError, CollectiveTimeoutError
from tests.load import is_within
from tests.mpi_job import job_of


class Hand(Request):
    """An operation moved by hand."""

    def __init__(self, sender: int | None = None) -> None:
        self.sender = sender
        self.is_done = False
        self.failure: Exception | None = None
        self.waited: list[timedelta] = []
        self.lasts_s = 0.0

    def finish(self, timeout: timedelta) -> None:
        self.waited.append(timeout)
        if self.failure is not None:
            raise self.failure
        if self.lasts_s > timeout.total_seconds():
            raise BackendTimeout("not in time")
        self.is_done = True

    def poll(self) -> bool:
        return self.is_done

    def source(self) -> int:
        return super().source() if self.sender is None else self.sender


def explain(failure: BackendFailure, note: int) -> Exception:
    late = isinstance(failure, BackendTimeout)
    return (CollectiveTimeoutError if late else BackendError)(f"explained: {failure}")


def work_of(
    hand: Hand,
    copy_back=None,
    timeout_s: float = 9.0,
    is_transfer: bool = False,
    hand_back=None,
) -> Work:
    x = torch.ones(2)
    timeout = timedelta(seconds=timeout_s)
    names = ("operation", "a group")
    return Work(hand, timeout, explain, [x], copy_back, *names, is_transfer, _sync_cupy=hand_back)


def broken_hand() -> Hand:
    hand = Hand()
    hand.failure, hand.is_done = BackendFailure("cut"), True
    return hand


def test_waiting_copies_back_once_and_zero_means_the_groups_timeout() -> None:
    hand, copied = Hand(), []
    work = work_of(hand, copy_back=lambda: copied.append(1))
    assert not work.is_completed() and not work.is_success()
    assert work.wait() is True and work.wait(timedelta(seconds=1)) is True
    work.synchronize()
    assert copied == [1]
    assert hand.waited == [timedelta(seconds=9)]
    assert work.is_completed() and work.is_success() and work.exception() is None


WATCHER = "meshdist-futures"
"""The thread that completes futures."""


def test_each_thread_that_has_waited_hands_back() -> None:
    hand, seen = Hand(), []
    work = work_of(
        hand,
        copy_back=lambda: seen.append("copied"),
        hand_back=lambda: seen.append(threading.current_thread().name),
    )
    assert not work.is_completed() and seen == []
    future = work.get_future()
    hand.is_done = True
    torch._C.Future.wait(future)
    assert seen == ["copied"]
    work.wait()
    work.synchronize()
    work.result()
    assert work.is_completed() and work.is_success()
    future.wait()
    future.then(lambda done: done.value()).wait()
    # The last two: in the callback, which the watcher may run, and behind it.
    assert seen[0] == "copied" and {*seen[1:]} <= {threading.current_thread().name, WATCHER}
    assert seen.count(threading.current_thread().name) >= 7 and len(seen) >= 9


def test_a_collective_that_failed_hands_nothing_back() -> None:
    seen = []
    work = work_of(broken_hand(), hand_back=lambda: seen.append(1))
    with pytest.raises(BackendError):
        work.wait()
    assert work.is_completed()
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    assert seen == []


def test_a_collective_that_is_only_polled_ends_at_its_timeout() -> None:
    hand = Hand()
    hand.failure = BackendTimeout("not finished after 0.001 s")
    work = work_of(hand, timeout_s=0.1)
    begin = time.monotonic()
    time.sleep(0.15)
    assert not work.is_completed()  # the time is counted from here
    while not work.is_completed():
        time.sleep(0.01)
    took = time.monotonic() - begin
    assert took >= 0.25
    assert is_within(took, 5.0)
    assert str(work.exception()) == "explained: not finished after 0.1 s"
    with pytest.raises(CollectiveTimeoutError):
        work.wait()


def polled(kind: str) -> tuple[str, float]:
    """What a rank learns that polls a collective to which the other does not come."""
    x = torch.ones(3)
    group = md.new_group([0, 1], timeout=timedelta(seconds=1))
    if md.get_rank() == 1:
        md.monitored_barrier(timeout=timedelta(seconds=20))
        return "", 0.0
    work = {
        "collective": lambda: md.all_reduce(x, group=group, async_op=True),
        "receive": lambda: md.irecv(x, 1, group),
        "receive from anyone": lambda: md.irecv(x, group=group),
    }[kind]()
    begin = time.monotonic()
    while not work.is_completed() and time.monotonic() - begin < 15.0:
        time.sleep(0.01)
    took = time.monotonic() - begin
    md.monitored_barrier(timeout=timedelta(seconds=20))
    return type(work.exception()).__name__, took


@pytest.mark.parametrize("kind", ["collective", "receive", "receive from anyone"])
@pytest.mark.parametrize("backend", ["gloo", "shm", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_no_collective_is_polled_in_vain_for_ever(backend: str, kind: str, pool) -> None:
    if backend == "mpi":
        found = job_of(pool, 2).run_in_world(polled, kind)
    else:
        found = pool.run(polled, 2, kind, backend=backend)
    told, took = found[0]
    assert told == "CollectiveTimeoutError"
    assert took > 0.9
    assert is_within(took, 5.0)


def test_its_repr_has_collective_group_and_state_without_a_poll() -> None:
    hand = Hand()
    work = Work(hand, timedelta(seconds=9), explain, [], None, "all_reduce", "the world")
    assert repr(work) == "<Work: all_reduce on the world, not known to be finished>"
    assert hand.waited == []
    work.wait()
    assert repr(work) == "<Work: all_reduce on the world, finished>"
    broken = work_of(broken_hand())
    broken.is_completed()
    assert repr(broken) == "<Work: operation on a group, failed with BackendError>"


@pytest.mark.parametrize("backend", ["gloo", "simulated"])
def test_each_collective_names_itself(backend: str, pool) -> None:
    def program() -> list[str]:
        x, peer = torch.ones(2), 1 - md.get_rank()
        works = [
            md.all_reduce(torch.ones(2), async_op=True),
            md.all_gather([torch.ones(2), torch.ones(2)], x, async_op=True),
            md.isend(x, peer),
            md.irecv(torch.ones(2), peer),
            *md.batch_isend_irecv(
                [md.P2POp(md.isend, x, peer), md.P2POp(md.irecv, torch.ones(2), peer)]
            ),
            md.group.WORLD.allreduce([torch.ones(2)]),
        ]
        for work in works:
            work.wait()
        return [repr(work) for work in works]

    operations = ["all_reduce", "all_gather", "isend", "irecv", "isend", "irecv", "all_reduce"]
    expected = [f"<Work: {operation} on the world, finished>" for operation in operations]
    found = pool.run(program, 2) if backend == "gloo" else md.simulate(program, 2)
    assert found == [expected] * 2


def test_a_late_work_is_told_by_its_own_call_whatever_was_called_since(pool) -> None:
    def program() -> str:
        group, x = md.new_group(timeout=timedelta(seconds=1)), torch.ones(2)
        work = md.irecv(x, 1 - md.get_rank(), group, tag=3)
        md.all_reduce(torch.ones(1), group=group)
        text = ""
        if md.get_rank() == 0:
            with pytest.raises(CollectiveTimeoutError) as caught:
                work.wait()
            text = str(caught.value)
        md.barrier()  # no rank leaves while it may be asked
        return text

    text = pool.run(program, 2)[0]
    assert text.startswith("irecv on group of ranks 0-1 timed out after 1 s\n")
    assert "where:    rank 0, irecv((2,) float32, from rank 1, tag 3) on group of ranks" in text
    assert "expected: rank 1 to send (2,) float32 to this rank with tag 3\n" in text


def test_a_given_timeout_goes_to_the_backend() -> None:
    hand = Hand()
    work_of(hand).wait(timedelta(seconds=2))
    assert hand.waited == [timedelta(seconds=2)]


def test_a_failure_is_explained_and_raised_at_every_wait() -> None:
    hand = Hand()
    hand.failure = BackendFailure("the line is cut")
    work = work_of(hand)
    for _ in range(2):
        with pytest.raises(BackendError, match="explained: the line is cut"):
            work.wait()
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), BackendError)


def test_a_result_that_cannot_be_copied_back_is_the_collectives_failure() -> None:
    def copy_back() -> None:
        raise RuntimeError("no room")

    work = work_of(Hand(), copy_back=copy_back)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            work.wait()
    assert not work.is_success()


def test_another_exception_in_a_wait_does_not_end_the_collective() -> None:
    hand = Hand()
    hand.failure = KeyboardInterrupt()
    work = work_of(hand)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    hand.failure = None
    assert not work.is_completed() and work.wait() is True


def test_result_waits() -> None:
    hand = Hand()
    (x,) = work_of(hand).result()
    assert hand.is_done and x.tolist() == [1.0, 1.0]


def test_source_rank_of_receives_alone() -> None:
    assert work_of(Hand(sender=3)).source_rank() == 3
    with pytest.raises(BackendError, match="only a receive has a source rank") as caught:
        work_of(Hand()).source_rank()
    assert isinstance(caught.value, RuntimeError)  # as in torch


def test_transfers_have_no_future() -> None:
    work = work_of(Hand(), is_transfer=True)
    for ask in (work.get_future, work.get_future_result):
        with pytest.raises(BackendError, match="a send or a receive has no future") as caught:
            ask()
        assert "call wait() or is_completed()" in caught.value.fix


def test_a_work_cannot_be_boxed() -> None:
    with pytest.raises(BackendError, match="cannot be boxed") as caught:
        work_of(Hand()).boxed()
    assert "get_future()" in caught.value.fix
    with pytest.raises(BackendError, match="cannot return a Work of meshdist") as caught:
        Work.unbox(3)
    assert caught.value.found == "int"


def test_no_stream_waits_for_the_cpu() -> None:
    hand = Hand()
    with pytest.raises(BackendError, match="cannot order a stream after a collective") as caught:
        work_of(hand).block_current_stream()
    assert "call wait()" in caught.value.fix and hand.waited == []


@pytest.mark.gpu
def test_streams_come_after_the_collective_wherever_it_was_waited_for_first() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def copy_back() -> None:
        torch.cuda._sleep(50_000_000)
        x.fill_(1.0)

    hand = Hand()
    work = Work(hand, timedelta(seconds=9), explain, [x], copy_back)
    with torch.cuda.stream(first):
        work.wait()
    with torch.cuda.stream(second):
        work.block_current_stream()
        total = x.sum()
        assert work.get_future().wait()[0] is x
    second.synchronize()  # the sum is read on the default stream
    assert total.item() == x.numel()


def test_the_future_chains_and_carries_errors() -> None:
    hand = Hand()
    future = work_of(hand).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    assert not hand.is_done
    assert doubled.wait().tolist() == [3.0, 3.0]
    assert hand.is_done and future.done()

    with pytest.raises(RuntimeError, match="explained: cut"):
        work_of(broken_hand()).get_future().then(lambda done: done.value()).wait()


def test_a_work_has_one_future() -> None:
    work = work_of(Hand())
    assert work.get_future() is work.get_future()


def test_a_future_asked_for_afterwards_is_done() -> None:
    work = work_of(Hand())
    work.wait()
    assert torch.futures.wait_all([work.get_future()])[0][0].tolist() == [1.0, 1.0]


def test_waiting_for_the_work_completes_its_future_in_this_thread() -> None:
    work, seen = work_of(Hand()), []
    future = work.get_future()
    future.add_done_callback(lambda done: seen.append(threading.current_thread()))
    chained = future.then(lambda done: 5)
    work.wait()
    assert seen == [threading.current_thread()]
    assert torch._C.Future.done(chained) and chained.value() == 5


def test_a_future_is_done_when_its_collective_is_though_nothing_has_waited() -> None:
    hand, seen = Hand(), []
    future = work_of(hand).get_future()
    chained = future.then(lambda done: seen.append(done.value()))
    assert not future.done() and not chained.done() and hand.waited == []
    hand.is_done = True
    torch._C.Future.wait(chained)  # as C++ waits, without a poll
    assert chained.done() and future.done() and len(seen) == 1


def test_the_outcome_as_a_future() -> None:
    late = Hand()
    late.failure, late.is_done = BackendTimeout("late"), True
    codes = [work_of(hand).get_future_result().wait() for hand in (Hand(), broken_hand(), late)]
    expected = [WorkResult.SUCCESS, WorkResult.COMM_ERROR, WorkResult.TIMEOUT]
    assert codes == [int(code) for code in expected] == [0, 2, 1]


def test_a_future_that_nobody_waits_for_fails_at_the_timeout() -> None:
    hand = Hand()
    hand.lasts_s = 1000.0
    work = work_of(hand, timeout_s=0.05)
    future = work.get_future()
    with pytest.raises(CollectiveTimeoutError, match=r"explained: not finished after 0\.05 s"):
        torch._C._collect_all([future]).wait()
    assert hand.waited == [timedelta(milliseconds=1)]
    assert isinstance(work.exception(), CollectiveTimeoutError)


def test_an_unforeseen_error_of_a_backend_arrives_in_the_future() -> None:
    hand = Hand()
    hand.failure, hand.is_done = ZeroDivisionError("a backend's mistake"), True
    future = work_of(hand).get_future()
    with pytest.raises(ZeroDivisionError, match="a backend's mistake"):
        torch._C._collect_all([future]).wait()

    waited = work_of(hand)
    with pytest.raises(ZeroDivisionError):
        waited.get_future().wait()
    assert isinstance(waited.exception(), ZeroDivisionError)


def test_many_threads_end_a_collective_once() -> None:
    hand, copied = Hand(), []
    work = work_of(hand, copy_back=lambda: copied.append(1))
    future = work.get_future()
    ready = threading.Barrier(8)

    def wait() -> None:
        ready.wait()
        future.wait()
        work.wait()

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert copied == [1] and len(hand.waited) == 1


def collected() -> tuple:
    """Futures of two collectives, taken every way that torch offers."""
    rank = md.get_rank()
    x, y, z = (torch.full((2,), rank + value) for value in (1.0, 10.0, 100.0))
    seen: list = []
    futures = [md.all_reduce(t, async_op=True).get_future() for t in (x, y, z)]
    futures[2].add_done_callback(lambda done: seen.append(done.value()[0].tolist()))
    both = torch.futures.collect_all(futures[:2]).wait()
    sums = [future.value()[0].tolist() for future in both]
    (halved,) = torch.futures.wait_all([futures[2].then(lambda done: done.value()[0] / 2)])
    later = torch.futures.collect_all(futures).then(lambda done: len(done.value()))
    code = md.barrier(async_op=True).get_future_result()
    return sums, halved.tolist(), seen, later.wait(), torch.futures.wait_all([code])


@pytest.mark.parametrize("backend", ["simulated", "gloo"])
def test_futures_are_collected_over_real_backends_and_simulated(backend: str, pool) -> None:
    run = pool.run if backend == "gloo" else md.simulate
    results = run(collected, 2)
    assert results == [([[3.0] * 2, [21.0] * 2], [100.5] * 2, [[201.0] * 2], 3, [0])] * 2


def unattended() -> list:
    """Callbacks of a collective that nobody waits for, and other collectives after it."""
    seen: list = []
    x = torch.ones(1)
    md.all_reduce(x, async_op=True).get_future().add_done_callback(lambda _: seen.append(x.item()))
    if md.get_rank() == 1:
        md.recv(torch.empty(1), src=0)
    else:
        md.send(torch.ones(1), dst=1)
    md.barrier()
    md.all_reduce(torch.ones(1))
    return seen


def test_callbacks_run_on_simulated_ranks_after_a_wait() -> None:
    assert md.simulate(unattended, 2) == [[2.0], [2.0]]


def test_callbacks_run_on_simulated_ranks_at_their_end() -> None:
    seen: list = []

    def program() -> None:
        rank = md.get_rank()
        future = md.all_reduce(torch.ones(1), async_op=True).get_future()
        future.add_done_callback(lambda _: seen.append((rank, md.get_rank())))

    md.simulate(program, 2)
    assert seen == [(1, 1)]  # rank 0 was over before rank 1 began


def test_futures_taken_in_different_orders_do_not_deadlock() -> None:
    def program() -> list:
        pairs = [md.new_group([0, 1]), md.new_group([0, 1])]
        order = (0, 1) if md.get_rank() == 0 else (1, 0)
        futures = {
            which: md.all_reduce(
                torch.full((1,), 1.0 + which), group=pairs[which], async_op=True
            ).get_future()
            for which in order
        }
        if md.get_rank() == 0:
            md.send(torch.ones(1), dst=1)
        else:
            md.recv(torch.empty(1), src=0)
        return [t[0].item() for t in torch.futures.wait_all([futures[0], futures[1]])]

    assert md.simulate(program, 2) == [[2.0, 4.0]] * 2


def test_a_deadlock_arrives_in_the_future() -> None:
    def program() -> None:
        if md.get_rank() == 0:
            future = md.all_reduce(torch.ones(1), async_op=True).get_future()
            torch.futures.wait_all([future])

    with pytest.raises(md.DeadlockError, match="no simulated rank can continue"):
        md.simulate(program, 2)


def disagreeing() -> str:
    x = torch.ones(2 + md.get_rank())
    try:
        torch.futures.wait_all([md.all_reduce(x, async_op=True).get_future()])
    except md.MismatchError as error:
        return error.summary
    return "nothing"


def test_a_disagreement_arrives_in_the_future() -> None:
    (first, second) = md.simulate(disagreeing, 2)
    assert first == second != "nothing"


def step_of_torchs_ddp() -> list:
    """A step under torch's own DDP, which waits in C++ for the future that the hook returns."""
    import torch.distributed as dist

    from tests.inner import get_world

    rank, size = md.get_rank(), md.get_world_size()
    store = dist.PrefixStore("torchs", get_world().store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:

        def hook(state, bucket):
            work = md.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / size)

        layer = torch.nn.Linear(3, 1, bias=False)
        model = torch.nn.parallel.DistributedDataParallel(layer)
        model.register_comm_hook(None, hook)
        model(torch.full((1, 3), rank + 1.0)).sum().backward()
        return layer.weight.grad.tolist()
    finally:
        dist.destroy_process_group()


def test_torchs_ddp_takes_the_future_of_a_comm_hook(pool) -> None:
    assert pool.run(step_of_torchs_ddp, 2) == [[[1.5] * 3]] * 2


def stress() -> list:
    """Many futures over three groups, collected, while other collectives go on."""
    groups = [md.new_group([0, 1]) for _ in range(3)]
    tensors = [torch.full((5,), float(n)) for n in range(150)]
    futures = [
        md.all_reduce(x, group=groups[n % 3], async_op=True).get_future().then(lambda f: f.value())
        for n, x in enumerate(tensors)
    ]
    everything = torch.futures.collect_all(futures)
    for _ in range(20):
        md.all_reduce(torch.ones(3))
    everything.wait()
    return [x[0].item() for x in tensors]


@pytest.mark.parametrize("backend", ["simulated", "gloo"])
def test_many_futures(backend: str, pool) -> None:
    run = pool.run if backend == "gloo" else md.simulate
    assert run(stress, 2) == [[2.0 * n for n in range(150)]] * 2


def test_the_watcher_calls_back_on_the_device_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device: list[torch.device] = []

    @contextmanager
    def current(device: torch.device):
        on_device.append(device)
        yield
        on_device.clear()

    device = torch.device("cuda", 3)
    seen, called = [], threading.Event()
    hand = Hand()
    work = work_of(hand)
    future = work.get_future()
    monkeypatch.setattr(work_module, "cuda_devices", lambda _: [device])
    monkeypatch.setattr(work_module.torch.cuda, "device", current)
    monkeypatch.setattr(work_module.torch.cuda, "current_stream", lambda _: SideStream())
    future.add_done_callback(lambda _: (seen.extend(on_device), called.set()))
    hand.is_done = True
    assert called.wait(10) and seen == [device]


class SideStream:
    def record_event(self) -> None:
        return None
