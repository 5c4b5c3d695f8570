"""Every collective on CuPy arrays: CuPy's stream goes on with them behind torch's, read or written.

On a CPU a stand-in plays CuPy and the streams; the tests at the end have both, on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.operation_table import OBJECT_OPERATIONS, OPERATIONS
from tests.stand_in_cupy import StandInArray, StandInCupy

Make = Callable[[int], Any]


def each(make: Make) -> list[Any]:
    """An array of two elements for each member."""
    return [make(2) for _ in range(md.get_world_size())]


def whole(make: Make) -> Any:
    """The elements of all members' arrays in one."""
    return make(2 * md.get_world_size())


def on_root(make: Make) -> list[Any] | None:
    return each(make) if md.get_rank() == 0 else None


COLLECTIVES: dict[str, Callable[[Make], dict[str, Any]]] = {
    "all_reduce": lambda make: {"tensor": make(2)},
    "all_reduce_coalesced": lambda make: {"tensors": [make(2), make(1)]},
    "all_reduce_multigpu": lambda make: {"tensor_list": [make(2), make(2)]},
    "reduce": lambda make: {"tensor": make(2), "dst": 0},
    "reduce_multigpu": lambda make: {"tensor_list": [make(2), make(2)], "dst": 0},
    "reduce_scatter": lambda make: {"output": make(2), "input_list": each(make)},
    "reduce_scatter_tensor": lambda make: {"output": make(2), "input": whole(make)},
    "reduce_scatter_single": lambda make: {"output": make(2), "input": whole(make)},
    "broadcast": lambda make: {"tensor": make(2), "src": 0},
    "broadcast_multigpu": lambda make: {"tensor_list": [make(2), make(2)], "src": 0},
    "all_gather": lambda make: {"tensor_list": each(make), "tensor": make(2)},
    "all_gather_into_tensor": lambda make: {"output_tensor": whole(make), "input_tensor": make(2)},
    "all_gather_single": lambda make: {"output_tensor": whole(make), "input_tensor": make(2)},
    "all_gather_coalesced": lambda make: {
        "output_tensor_lists": [[one] for one in each(make)],
        "input_tensor_list": [make(2)],
    },
    "all_gather_multigpu": lambda make: {
        "output_tensor_lists": [each(make)],
        "input_tensor_list": [make(2)],
    },
    "gather": lambda make: {"tensor": make(2), "gather_list": on_root(make)},
    "scatter": lambda make: {"tensor": make(2), "scatter_list": on_root(make)},
    "all_to_all": lambda make: {
        "output_tensor_list": each(make),
        "input_tensor_list": each(make),
    },
    "all_to_all_single": lambda make: {"output": whole(make), "input": whole(make)},
}
"""What each rank gives a collective whose root is rank 0, made by ``make(num_elements)``."""


def neighbours() -> tuple[int, int]:
    rank, size = md.get_rank(), md.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def start_messages(make: Make) -> list[md.Work]:
    to, source = neighbours()
    return [md.isend(make(2), to), md.irecv(make(2), source)]


def start_batch(make: Make) -> list[md.Work]:
    to, source = neighbours()
    operations = [md.P2POp(md.isend, make(2), to), md.P2POp(md.irecv, make(2), source)]
    return md.batch_isend_irecv(operations)


MESSAGES = {"isend and irecv": start_messages, "batch_isend_irecv": start_batch}
"""What starts messages of each rank to the next."""

STARTED = [*COLLECTIVES, *MESSAGES]


def start(operation: str, make: Make) -> list[md.Work]:
    if operation in MESSAGES:
        return MESSAGES[operation](make)
    return [getattr(md, operation)(**COLLECTIVES[operation](make), async_op=True)]


def do(operation: str, make: Make) -> None:
    """Call a collective that blocks."""
    if operation == "send and recv":
        calls = [lambda: md.send(make(2), 1), lambda: md.recv(make(2), 1)]
        if md.get_rank() == 1:
            calls = [lambda: md.recv(make(2), 0), lambda: md.send(make(2), 0)]
        for call in calls:
            call()
    else:
        getattr(md, operation)(**COLLECTIVES[operation](make))


def test_no_collective_is_forgotten() -> None:
    here = {*COLLECTIVES, *MESSAGES, "send", "recv", "isend", "irecv"} - {"isend and irecv"}
    assert here == OPERATIONS.keys() - OBJECT_OPERATIONS - {"barrier", "monitored_barrier"}


# -- with a stand-in ------------------------------------------------------------------------------


@pytest.fixture
def stand_in() -> Iterator[StandInCupy]:
    with StandInCupy().installed() as cupy:
        yield cupy


class Maker:
    """Makes arrays of a rank, and keeps them.

    Args:
        is_strided: whether they have gaps, so that the collective works on copies.
    """

    def __init__(self, cupy: StandInCupy, is_strided: bool = False) -> None:
        self.cupy = cupy
        self.step = 2 if is_strided else 1
        self.arrays: list[StandInArray] = []

    def __call__(self, num_elements: int) -> StandInArray:
        values = np.arange(num_elements * self.step) + 10.0 * md.get_rank()
        self.arrays.append(self.cupy.array(values[:: self.step]))
        return self.arrays[-1]

    def check(self, waits: Sequence[tuple[int, int]]) -> None:
        """See that each array went out on its own device, and that CuPy's streams waited so."""
        for number, x in enumerate(self.arrays):
            device = x.device.id
            current = {current for one, current in self.cupy.handed_out if one == device}
            assert current == {device}
            assert self.cupy.waits_for(x) == list(waits), f"array {number}"


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("operation", [*COLLECTIVES, "send and recv"])
def test_cupys_stream_waits_at_the_end_of_a_collective(
    operation: str, is_strided: bool, stand_in: StandInCupy
) -> None:
    def program() -> None:
        make = Maker(stand_in, is_strided)
        with stand_in.streams(torchs=11, cupys=21):
            do(operation, make)
        make.check([(21, 11)])
        final = {x.device.id: x.host.tolist() for x in make.arrays}
        waits = [one for one in stand_in.waits if one.device in final]
        assert all(one.values == final[one.device] for one in waits)

    md.simulate(program, 2)


ENDS = {
    "wait": lambda work: work.wait(),
    "synchronize": lambda work: work.synchronize(),
    "result": lambda work: work.result(),
    "is_completed": lambda work: work.is_completed(),
    "get_future": lambda work: work.get_future().wait(),
}


@pytest.mark.parametrize("operation", STARTED)
def test_every_wait_orders_the_streams_that_are_current_there(
    operation: str, stand_in: StandInCupy
) -> None:
    def program() -> None:
        for end, is_strided in product(ENDS, (False, True)):
            if operation not in MESSAGES or end != "get_future":  # messages have no future
                start_and_end(end, is_strided)

    def start_and_end(end: str, is_strided: bool) -> None:
        make = Maker(stand_in, is_strided)
        with stand_in.streams(torchs=11, cupys=21):
            works = start(operation, make)
        make.check([])
        with stand_in.streams(torchs=12, cupys=22):
            for work in works:
                work.wait()
        make.check([(22, 12)])
        with stand_in.streams(torchs=13, cupys=23):
            for work in works:
                ENDS[end](work)
        make.check([(22, 12), (23, 13)])

    md.simulate(program, 2)


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_wait_orders_this_threads_streams_though_another_ended_the_collective(
    operation: str, stand_in: StandInCupy
) -> None:
    md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1)
    try:
        make = Maker(stand_in)
        with stand_in.streams(torchs=11, cupys=21):
            (work,) = start(operation, make)
            torch._C.Future.wait(work.get_future())  # the watcher's thread ends it
            make.check([])
            work.wait()
            make.check([(21, 11)])
    finally:
        md.destroy_process_group()


def test_a_collective_that_fails_hands_nothing_back(stand_in: StandInCupy) -> None:
    def program() -> None:
        make = Maker(stand_in)
        with pytest.raises(md.MismatchError), stand_in.streams(torchs=11, cupys=21):
            md.all_reduce(make(1 + md.get_rank()))
        make.check([])

    md.simulate(program, 2)


LAX = {
    "psum": {},
    "pmean": {},
    "pmax": {},
    "pmin": {},
    "pvary": {},
    "pcast": {"to": "unreduced"},
    "all_gather": {},
    "psum_scatter": {},
    "all_to_all": {"split_axis": 0, "concat_axis": 0},
    "ppermute": {"perm": [(0, 1)]},
    "pshuffle": {"perm": [1, 0]},
    "pswapaxes": {"axis": 0},
    "pbroadcast": {"source": 1},
}


@pytest.mark.parametrize("operation", LAX)
def test_results_of_lax_come_behind_torchs_stream(operation: str, stand_in: StandInCupy) -> None:
    def program() -> None:
        make = Maker(stand_in)
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with stand_in.streams(torchs=11 + 10 * md.get_rank(), cupys=12 + 10 * md.get_rank()):
            tree = {"x": make(2), "y": [make(2)]}
            results = getattr(md.lax, operation)(tree, "tp", **LAX[operation], mesh=mesh)
        make.check([])
        assert type(results["x"]) is type(results["y"][0]) is stand_in.ndarray

    md.simulate(program, 2)
    assert sorted(stand_in.taken_in) == [(12, 11), (12, 11), (22, 21), (22, 21)]


def test_a_ragged_result_comes_behind_torchs_stream(stand_in: StandInCupy) -> None:
    def program() -> None:
        make = Maker(stand_in)
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ones, mine = [1, 1], [md.get_rank()] * 2
        with stand_in.streams(torchs=11 + 10 * md.get_rank(), cupys=12 + 10 * md.get_rank()):
            result = md.lax.ragged_all_to_all(
                make(2), make(2), [0, 1], ones, mine, ones, axis_name="tp", mesh=mesh
            )
        make.check([])
        assert type(result) is stand_in.ndarray

    md.simulate(program, 2)
    assert sorted(stand_in.taken_in) == [(12, 11), (22, 21)]


def test_lax_has_no_other_collectives_on_arrays() -> None:
    assert set(md.lax.__all__) == {*LAX, "ragged_all_to_all", "axis_index", "axis_size"}


# -- on a GPU -------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone_over_nccl(folder: Path) -> Iterator[Any]:
    """A world of this process; CuPy, with a stream of its own that waits for no other."""
    cupy = pytest.importorskip("cupy")
    md.init_process_group("nccl", init_method=f"file://{folder}/world", rank=0, world_size=1)
    try:
        with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
            yield cupy
        torch.cuda.synchronize()
    finally:
        md.destroy_process_group()


INTO_TENSORS = {
    "all_gather_into_tensor": lambda out, x: {"output_tensor": out, "input_tensor": x},
    "all_gather": lambda out, x: {"tensor_list": [out], "tensor": x},
    "gather": lambda out, x: {"tensor": x, "gather_list": [out]},
    "scatter": lambda out, x: {"tensor": out, "scatter_list": [x]},
    "reduce_scatter_tensor": lambda out, x: {"output": out, "input": x},
    "all_to_all_single": lambda out, x: {"output": out, "input": x},
}
NUM_ELEMENTS = 1 << 22


def end_twice(work: md.Work, cupy: Any) -> None:
    """Wait on streams that are not used again, then on the current ones."""
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
        work.wait()
    work.wait()


def end_behind_the_watcher(work: md.Work, cupy: Any) -> None:
    """Wait for what the watcher's thread has ended."""
    torch._C.Future.wait(work.get_future().then(lambda _: None))
    work.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("end", [None, end_twice, end_behind_the_watcher])
@pytest.mark.parametrize("operation", INTO_TENSORS)
def test_cupys_stream_does_not_overtake_a_collective_that_reads(
    operation: str, end: Callable[[md.Work, Any], None] | None, tmp_path: Path
) -> None:
    with alone_over_nccl(tmp_path) as cupy:
        x = cupy.ones(NUM_ELEMENTS, cupy.float32)
        out = torch.zeros(NUM_ELEMENTS, device="cuda")
        torch.cuda._sleep(200_000_000)
        call = INTO_TENSORS[operation](out, x)
        if end is None:
            getattr(md, operation)(**call)
        else:
            end(getattr(md, operation)(**call, async_op=True), cupy)
        x.fill(0)
    assert bool((out == 1).all())


@pytest.mark.gpu
def test_cupys_stream_does_not_overtake_a_message_that_is_sent(tmp_path: Path) -> None:
    with alone_over_nccl(tmp_path) as cupy:
        x = cupy.ones(NUM_ELEMENTS, cupy.float32)
        out = torch.zeros(NUM_ELEMENTS, device="cuda")
        torch.cuda._sleep(200_000_000)
        operations = [md.P2POp(md.isend, x, 0), md.P2POp(md.irecv, out, 0)]
        for work in md.batch_isend_irecv(operations):
            work.wait()
        x.fill(0)
    assert bool((out == 1).all())


def broadcast_then_fill() -> bool:
    import cupy

    out = torch.zeros(NUM_ELEMENTS, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
        x = cupy.ones(NUM_ELEMENTS, cupy.float32)
        torch.cuda._sleep(200_000_000)
        is_source = md.get_rank() == 0
        md.broadcast(x if is_source else out, src=0)
        x.fill(0)
    torch.cuda.synchronize()
    return is_source or bool((out == 1).all())


@pytest.mark.gpu
def test_cupys_stream_does_not_overtake_a_broadcast(pool: Any) -> None:
    pytest.importorskip("cupy")
    assert pool.run(broadcast_then_fill, 2, backend="gloo") == [True, True]
