"""A collective that a signal's handler calls while its rank is in a collective is rejected, on
every backend."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed

import meshdist as md
from tests.inner import Deadline, call_sites as nesting, wait_until
from tests.load import is_within
from tests.operations.cases import BACKENDS
from tests.pool import Pool
from tests.torch_process_groups.worlds import on_torch

AT_ONCE_S = 1.0
HANDLER_S = 0.01
COMES_S = 0.7  # after which the other member comes, though no handler has run yet
ON = [
    "shm",
    "gloo",
    "gloo across hosts",
    pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.soak]),
]


def run_inside(
    outer: Callable[[], Any],
    handle: Callable[[], Any],
    folder: str,
    rank: int | None = None,
    comes_s: float = COMES_S,
) -> Any:
    """What ``handle()`` gave in a signal's handler on rank 0, whose ``outer()`` waits for rank 1.

    What it raises leaves the handler, too. Rank 1 waits at most ``comes_s`` for the handler.
    """
    told, found = Path(folder, "told"), []

    def handler(number: int, frame: Any) -> None:
        if nesting.under_way[0] is None:  # on a busy machine the call has not begun, or is over
            signal.setitimer(signal.ITIMER_REAL, 0.0 if found else HANDLER_S)
            return
        found.append(handle())
        told.touch()

    if (md.get_rank() if rank is None else rank) == 1:
        wait_until(told.exists, Deadline(comes_s))
        outer()
        return None
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, HANDLER_S)
        outer()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return found[0]


def refusal(call: Callable[[], Any]) -> tuple[str, float]:
    """The first line of the error with which ``call`` is rejected, and how long that took."""
    begin = time.monotonic()
    with pytest.raises(md.NestedCollectiveError) as caught:
        call()
    return caught.value.summary, time.monotonic() - begin


def outer_calls(x: torch.Tensor, other: Any) -> dict[str, Callable[[], Any]]:
    """Calls that wait for the other member, by what the rejection calls them."""
    rank = md.get_rank()
    message = partial(md.recv if rank == 0 else md.send, x, 1 - rank)
    return {
        "all_reduce": lambda: md.all_reduce(x),
        "all_reduce_coalesced": lambda: md.all_reduce_coalesced([x]),
        "barrier": lambda: md.barrier(other),
        "recv" if rank == 0 else "send": message,
        "wait() of all_reduce": lambda: md.all_reduce(x, async_op=True).wait(),
        "all_gather_object": lambda: md.all_gather_object([None, None], rank),
        "monitored_barrier": lambda: md.monitored_barrier(),
        "new_group": lambda: md.new_group([0, 1]),
        "DeviceMesh": lambda: md.init_device_mesh("cpu", (2,)),
        "shared_empty": lambda: md.shared_empty(3),
    }


def inner_calls(other: Any, flying: Any) -> dict[str, Callable[[], Any]]:
    """Calls that a handler may not make meanwhile, by what the rejection calls them."""
    y, o = torch.ones(3), [None, None]
    return {
        "all_reduce": lambda: md.all_reduce(y),
        "broadcast": lambda: md.broadcast(y, 0, group=other),
        "barrier": lambda: md.barrier(),
        "all_gather": lambda: md.all_gather([y.clone(), y.clone()], y, async_op=True),
        "send": lambda: md.send(y, 1),
        "recv": lambda: md.recv(y, 1),
        "isend": lambda: md.isend(y, 1),
        "irecv": lambda: md.irecv(y, 1),
        "batch_isend_irecv": lambda: md.batch_isend_irecv([md.P2POp(md.isend, y, 1)]),
        "all_gather_object": lambda: md.all_gather_object(o, 1),
        "send_object_list": lambda: md.send_object_list([1], 1),
        "monitored_barrier": lambda: md.monitored_barrier(),
        "new_group": lambda: md.new_group([0, 1]),
        "DeviceMesh": lambda: md.init_device_mesh("cpu", (2,)),
        "shared_empty": lambda: md.shared_empty(3),
        "wait() of isend": flying.wait,
        "allreduce": lambda: other.allreduce(y),
    }


def refusals(folder: str) -> dict[str, dict[str, tuple[str, float]]]:
    """By outer call what each inner call gave, after which both members go on as if it had not."""
    rank, other = md.get_rank(), md.new_group([0, 1])
    message = torch.ones(1)
    flying = (md.isend if rank == 0 else md.irecv)(message, 1 - rank, tag=5)
    inner = inner_calls(other, flying)

    def handle() -> dict[str, tuple[str, float]]:
        assert not flying.is_completed()  # may be asked, and waits for nothing
        return {name: refusal(call) for name, call in inner.items()}

    told = {}
    x = torch.ones(3)
    for place, (name, call) in enumerate(outer_calls(x, other).items()):
        inside = os.path.join(folder, str(place))
        if rank == 0:
            os.mkdir(inside)
        md.barrier()
        told[name] = run_inside(call, handle, inside)
        total = torch.full((3,), rank + 1.0)
        md.all_reduce(total)
        assert total.tolist() == [3.0] * 3
    flying.wait()
    assert x.tolist() == [8.0] * 3  # doubled by three calls, and sent once
    return told


@pytest.mark.parametrize("backend", ON)
def test_a_handler_is_rejected_every_collective(pool: Pool, tmp_path: Path, backend: str) -> None:
    told = BACKENDS[backend](pool, refusals, 2, str(tmp_path))[0]
    for outer, by_inner in told.items():
        for inner, (text, took) in by_inner.items():
            name = {"allreduce": "all_reduce"}.get(inner, inner)
            # On a busy machine the handler may come while the collective is still being started.
            places = {outer, outer.removeprefix("wait() of ")}
            texts = [f"{name} was called inside {one}, which has not returned" for one in places]
            assert text in texts
            assert is_within(took, AT_ONCE_S)


class Enough(Exception):
    """What a handler raises."""


class EnoughAtRuntime(RuntimeError):
    """The same, of the class that torch's own errors have."""


def ends(outer_name: str, error: str, comes_s: float, folder: str) -> tuple[str, list[float]]:
    """How an exception of a handler leaves a call, and what another group gives afterwards."""
    rank, other = md.get_rank(), md.new_group([0, 1])
    x, y = torch.ones(3), torch.ones(3)
    md.all_reduce(torch.ones(1))
    is_flying = rank == 0 and outer_name == "wait() of all_reduce"
    flying = md.all_reduce(x, async_op=True) if is_flying else None
    outer = (lambda: md.all_reduce(x)) if flying is None else flying.wait

    def handle() -> None:
        if error == "NestedCollectiveError":
            md.barrier(other)
        raise Enough if error == "Enough" else EnoughAtRuntime

    left = "nothing"
    try:
        run_inside(outer, handle, folder, comes_s=comes_s)
    except (Enough, EnoughAtRuntime, md.MeshdistError) as caught:
        left = type(caught).__name__
    if flying is not None:
        with suppress(md.BackendError):
            flying.wait()
    md.all_reduce(y, group=other)
    return left, y.tolist()


@pytest.mark.parametrize("comes_s", [0.2, COMES_S])  # the first within one slice of Gloo's wait
@pytest.mark.parametrize("error", ["Enough", "EnoughAtRuntime", "NestedCollectiveError"])
@pytest.mark.parametrize("outer", ["all_reduce", "wait() of all_reduce"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_a_handler_raises_leaves_the_call(
    pool: Pool, tmp_path: Path, backend: str, outer: str, error: str, comes_s: float
) -> None:
    found = BACKENDS[backend](pool, ends, 2, outer, error, comes_s, str(tmp_path))
    assert found[0] == (error, [2.0] * 3)
    assert found[1][1] == [2.0] * 3


def waited_again(folder: str) -> tuple[str, list[float]]:
    x = torch.ones(3)
    work = md.all_reduce(x, async_op=True) if md.get_rank() == 0 else None
    outer = (lambda: md.all_reduce(x)) if work is None else work.wait
    left = ""
    try:
        run_inside(outer, md.barrier, folder)
    except md.NestedCollectiveError as error:
        left = error.summary
    if work is not None:
        work.wait()
    return left, x.tolist()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_wait_that_a_refusal_left_can_be_waited_for_again(
    pool: Pool, tmp_path: Path, backend: str
) -> None:
    rejected = "barrier was called inside wait() of all_reduce, which has not returned"
    found = BACKENDS[backend](pool, waited_again, 2, str(tmp_path))
    assert found == [(rejected, [2.0] * 3), ("", [2.0] * 3)]


def left_receive(peer: int | None, folder: str) -> str:
    """A receive of rank 0 that a handler's exception leaves, and those that come behind it."""
    x, y, told = torch.zeros(3), torch.zeros(3), Path(folder, "told")
    md.barrier()
    if md.get_rank() == 1:  # a wait of Gloo's ends, and runs the handler, when the message comes
        wait_until(told.exists, Deadline(COMES_S))
        with suppress(md.AbortedError):
            md.send(torch.full((3,), 1.0), 0)
            md.send(torch.full((3,), 2.0), 0)
        return ""

    def handle() -> None:
        raise Enough

    with pytest.raises(Enough):
        run_inside(lambda: md.recv(x, peer), handle, folder)
    before = x.tolist()
    told.touch()
    received = []
    with suppress(md.AbortedError):
        for _ in range(1 if before[0] else 2):
            md.recv(y, 1)
            received.append(y[0].item())
    if not received:
        return "broken"
    is_whole = x.tolist() == before and [*([1.0] if before[0] else []), *received] == [1.0, 2.0]
    return "" if is_whole else f"{before}, then {x.tolist()}, and {received}"


@pytest.mark.parametrize("peer", [1, None])
@pytest.mark.parametrize("backend", ["shm", "gloo", "gloo across hosts"])
def test_a_receive_that_a_handler_leaves(
    backend: str, peer: int | None, pool: Pool, tmp_path: Path
) -> None:
    is_broken = backend != "shm" and peer is None  # what nothing can take back
    found = BACKENDS[backend](pool, left_receive, 2, peer, str(tmp_path))
    assert found == ["broken" if is_broken else "", ""]


def allowed(_: str) -> list[float]:
    """A handler that runs in no collective calls them; so does the main thread beside another's
    collective."""
    other, x, y = md.new_group([0, 1]), torch.ones(1), torch.ones(1)
    done = threading.Event()

    def handler(number: int, frame: Any) -> None:
        md.all_reduce(x)
        done.set()

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, HANDLER_S)
    deadline = Deadline(30)
    while not done.is_set() and not deadline.is_over:
        time.sleep(HANDLER_S)
    signal.signal(signal.SIGALRM, before)
    meeting = threading.Thread(target=lambda: md.all_reduce(y, group=other))
    if md.get_rank() == 0:
        meeting.start()
        md.all_reduce(x)
        meeting.join()
    else:  # while the other thread of rank 0 waits
        md.all_reduce(x)
        md.all_reduce(y, group=other)
    return [x.item(), y.item()]


@pytest.mark.parametrize("backend", ON)
def test_what_is_allowed(pool: Pool, backend: str) -> None:
    assert BACKENDS[backend](pool, allowed, 2, "") == [[4.0, 2.0]] * 2


def on_torchs_groups(folder: str) -> dict[str, tuple[str, float]] | None:
    x, other = torch.ones(3), torch_distributed.new_group([0, 1], backend="shm")
    rank = torch_distributed.get_rank()
    inner = {
        "all_reduce": lambda: torch_distributed.all_reduce(x, group=other),
        "all_gather": lambda: torch_distributed.all_gather([x, x], x, async_op=True),
        "send": lambda: torch_distributed.isend(x, 1),
        "monitored_barrier": lambda: other.monitored_barrier(),
    }
    calls = {
        "all_reduce": lambda: torch_distributed.all_reduce(x),
        "wait() of all_reduce": lambda: torch_distributed.all_reduce(x, async_op=True).wait(),
        "recv" if rank == 0 else "send": lambda: (
            torch_distributed.recv(x, 1) if rank == 0 else torch_distributed.send(x, 0)
        ),
    }
    told = {}
    for place, (name, call) in enumerate(calls.items()):
        inside = os.path.join(folder, str(place))
        if rank == 0:
            os.mkdir(inside)
        torch_distributed.barrier()
        told[name] = run_inside(
            call, lambda: {name: refusal(one) for name, one in inner.items()}, inside, rank
        )
    torch_distributed.all_reduce(x)
    assert x.tolist() == [8.0] * 3
    return told


def test_torchs_groups_over_our_backends(pool: Pool, tmp_path: Path) -> None:
    told = on_torch(pool, partial(on_torchs_groups, str(tmp_path)), 2)[0]
    assert list(told) == ["all_reduce", "wait() of all_reduce", "recv"]
    for outer, by_inner in told.items():
        for inner, (text, took) in by_inner.items():
            assert text.startswith(f"{inner} was called inside ")
            assert is_within(took, AT_ONCE_S), (outer, inner)


def test_on_simulated_ranks_a_handler_runs_outside_all_of_them() -> None:
    told: list[Exception] = []

    def handler(number: int, frame: Any) -> None:
        try:
            md.barrier()
        except md.NotInitializedError as error:
            told.append(error)

    def program() -> float:
        x = torch.ones(1)
        if md.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGALRM)
        deadline = Deadline(30)
        while not told and not deadline.is_over:  # the main thread's turn comes by itself
            time.sleep(0.01)
        md.all_reduce(x)
        return x.item()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert md.simulate(program, 2) == [2.0, 2.0]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(told) == 1


def test_the_whole_text() -> None:
    with pytest.raises(md.NestedCollectiveError) as caught:
        nesting.run_unnested("all_gather", lambda: md.monitored_barrier())
    text = str(caught.value)
    assert text.startswith(
        "monitored_barrier was called inside all_gather, which has not returned\n  where:    "
    )
    assert f"called at {__file__}:" in text
    assert "\n  expected: one collective at a time per thread (a signal handler interrupts " in text
    assert (
        "\n  fix:      set a flag in the handler and call the collective later; to end the wait, "
        in text
    )
