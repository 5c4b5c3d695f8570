"""The first collectives against NumPy, on simulated ranks and over Gloo, for torch and NumPy
arrays."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.collectives.argument_checks import first_cuda_device
from tests.pool import Pool

SIZES = (1, 2, 3, 4)
REAL = ("float64", "float32", "float16", "bfloat16")
WHOLE = ("uint8", "int8", "int32", "int64")
COMPLEX = ("complex64", "complex128")
NUMPY_OF = {"bfloat16": "float32"}


def values(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small integers, so that sums are exact in every dtype; different on every rank."""
    count = int(np.prod(shape))
    plain = (np.arange(count) * 3 + rank * 5) % 7 + 1
    if dtype == "bool":
        return (plain % 2 == 0).reshape(shape)
    if dtype in COMPLEX:
        plain = plain + 1j * (plain + rank)
    return plain.astype(NUMPY_OF.get(dtype, dtype)).reshape(shape)


def tensor_of(rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.from_numpy(values(rank, shape, dtype)).to(getattr(torch, dtype))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


ORACLES = {
    "SUM": lambda stack: stack.sum(0),
    "AVG": lambda stack: stack.mean(0),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.min(0),
    "MAX": lambda stack: stack.max(0),
    "BAND": np.bitwise_and.reduce,
    "BOR": np.bitwise_or.reduce,
    "BXOR": np.bitwise_xor.reduce,
}


def table() -> list[tuple[str, str]]:
    rows = [(op, d) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") for d in REAL]
    rows += [
        (op, d) for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR") for d in WHOLE
    ]
    rows += [(op, d) for op in ("SUM", "AVG") for d in COMPLEX]
    return rows


def expected_reduction(op: str, size: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    stack = np.stack([values(r, shape, dtype) for r in range(size)])
    with np.errstate(over="ignore"):
        return ORACLES[op](stack).astype(stack.dtype)


def reduce_everything(shapes: list[tuple[int, ...]]) -> list:
    """All ops and dtypes in one program, so that a pool of processes is asked once."""
    rank, size = md.get_rank(), md.get_world_size()
    results = []
    for op, dtype in table():
        for shape in shapes:
            x = tensor_of(rank, shape, dtype)
            md.all_reduce(x, op=getattr(md.ReduceOp, op))
            whole = tensor_of(rank, (size * 2, *shape), dtype)
            block = torch.empty(2, *shape, dtype=x.dtype)
            md.reduce_scatter_tensor(block, whole, op=getattr(md.ReduceOp, op))
            results.append((op, dtype, shape, as_numpy(x), as_numpy(block)))
    return results


@pytest.mark.parametrize("size", SIZES)
def test_reductions(on_ranks, size: int) -> None:
    for rank, results in enumerate(on_ranks(reduce_everything, size, [(), (0,), (3,), (2, 3)])):
        for op, dtype, shape, reduced, block in results:
            tolerance = 2e-2 if dtype in ("float16", "bfloat16") else 1e-6
            np.testing.assert_allclose(
                reduced,
                expected_reduction(op, size, shape, dtype),
                rtol=tolerance,
                err_msg=f"{op} {dtype}",
            )
            whole = expected_reduction(op, size, (size * 2, *shape), dtype)
            np.testing.assert_allclose(block, whole[2 * rank : 2 * rank + 2], rtol=tolerance)


def move_everything() -> list:
    rank, size = md.get_rank(), md.get_world_size()
    results = []
    for dtype in (*REAL, *WHOLE, "int16", "uint16", "bool", *COMPLEX):
        for shape in [(), (0,), (3,), (2, 3)]:
            x = tensor_of(rank, shape, dtype)
            md.broadcast(x, src=size - 1)
            mine = tensor_of(rank, shape, dtype)
            stacked = torch.empty(size, *shape, dtype=x.dtype)
            md.all_gather_into_tensor(stacked, mine)
            results.append((dtype, shape, as_numpy(x), as_numpy(stacked)))
    return results


@pytest.mark.parametrize("size", SIZES)
def test_moving_collectives_take_every_dtype_and_shape(on_ranks, size: int) -> None:
    for results in on_ranks(move_everything, size):
        for dtype, shape, sent, stacked in results:
            np.testing.assert_array_equal(sent, values(size - 1, shape, dtype))
            np.testing.assert_array_equal(
                stacked, np.stack([values(r, shape, dtype) for r in range(size)])
            )


def bools() -> list:
    rank = md.get_rank()
    results = []
    for op in ("SUM", "MAX", "PRODUCT", "MIN"):
        x = torch.tensor([rank == 0, True, False])
        md.all_reduce(x, op=getattr(md.ReduceOp, op))
        results.append(x.tolist())
    return results


def test_bool_sum_and_max_are_or_product_and_min_are_and(on_ranks) -> None:
    either, both = [True, True, False], [False, True, False]
    assert on_ranks(bools, 2) == [[either, either, both, both]] * 2


def numpy_in_place() -> tuple:
    rank = md.get_rank()
    x = np.full((2, 3), rank + 1.0)
    address = x.ctypes.data
    md.all_reduce(x)
    columns = np.asfortranarray(np.full((2, 3), float(rank)))
    md.broadcast(columns, src=1)
    out = np.empty((2, 2), dtype=np.int32)
    md.all_gather_into_tensor(out, np.array([rank, 7], dtype=np.int32))
    part = np.empty(1)
    md.reduce_scatter_tensor(part, np.array([1.0, 2.0]))
    return x, x.ctypes.data == address, columns, out, part


def test_numpy_arrays_are_written_in_place(on_ranks) -> None:
    for rank, (x, is_same, columns, out, part) in enumerate(on_ranks(numpy_in_place, 2)):
        np.testing.assert_array_equal(x, np.full((2, 3), 3.0))
        assert is_same
        np.testing.assert_array_equal(columns, np.ones((2, 3)))
        np.testing.assert_array_equal(out, [[0, 7], [1, 7]])
        np.testing.assert_array_equal(part, [2.0 * (rank + 1)])


@pytest.mark.gpu
def test_cupy_arrays_are_written_in_place() -> None:
    cupy = pytest.importorskip("cupy")

    def program():
        rank = md.get_rank()
        x = cupy.full((2, 3), rank + 1.0)
        address = x.data.ptr
        md.all_reduce(x)
        out = cupy.empty((2, 2), dtype=cupy.int32)
        md.all_gather_into_tensor(out, cupy.array([rank, 7], dtype=cupy.int32))
        y = cupy.full(3, float(rank))
        md.broadcast(y, src=1)
        return x.get().tolist(), x.data.ptr == address, out.get().tolist(), y.get().tolist()

    expected = ([[3.0] * 3] * 2, True, [[0, 7], [1, 7]], [1.0] * 3)
    assert md.simulate(program, 2) == [expected] * 2


def strided() -> tuple:
    rank = md.get_rank()
    turned = torch.full((3, 2), float(rank + 1)).t()
    md.all_reduce(turned)
    sparse_rows = torch.full((4, 2), float(rank + 1))
    md.all_reduce(sparse_rows[::2])
    return turned.tolist(), sparse_rows.tolist()


def test_non_contiguous_tensors_are_written_where_they_lie(on_ranks) -> None:
    for rank, (turned, rows) in enumerate(on_ranks(strided, 2)):
        assert turned == [[3.0] * 3] * 2
        mine = [float(rank + 1)] * 2
        assert rows == [[3.0, 3.0], mine, [3.0, 3.0], mine]


def conjugated() -> list[complex]:
    x = torch.tensor([1 + 2j, 3 - 1j])
    lazy = x.conj() if md.get_rank() else x  # one rank's tensor is conjugate by a bit alone
    md.all_reduce(lazy)
    return lazy.resolve_conj().tolist()


def test_lazily_conjugated_tensors(on_ranks) -> None:
    assert on_ranks(conjugated, 2) == [[2 + 0j, 6 + 0j]] * 2


def random_floats(length: int) -> bytes:
    torch.manual_seed(md.get_rank())
    x = torch.randn(length)
    md.all_reduce(x)
    return x.numpy().tobytes()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_gives_the_same_bits_on_every_rank(on_ranks, size: int) -> None:
    results = on_ranks(random_floats, size, 1003)
    assert len(set(results)) == 1


def asynchronous() -> tuple:
    rank = md.get_rank()
    x = torch.full((2,), rank + 1.0)
    y = torch.full((3, 2), rank + 1.0).t()
    first = md.all_reduce(x, async_op=True)
    second = md.all_reduce(y, async_op=True)
    assert second.wait() is True and first.wait() is True
    assert first.is_completed() and first.is_success() and first.exception() is None
    assert first.result()[0] is x
    doubled = second.get_future().then(lambda future: future.value()[0] * 2).wait()
    with pytest.raises(RuntimeError, match="only a receive has a source rank"):
        first.source_rank()
    return x.tolist(), y.tolist(), doubled.tolist()


def test_async_collectives_give_a_work(on_ranks) -> None:
    assert on_ranks(asynchronous, 2) == [([3.0] * 2, [[3.0] * 3] * 2, [[6.0] * 3] * 2)] * 2


def synchronous() -> list:
    x, out = torch.ones(2), torch.empty(2 * md.get_world_size())
    return [
        md.all_reduce(x),
        md.broadcast(x, src=0),
        md.all_gather_into_tensor(out, x),
        md.reduce_scatter_tensor(x, out),
        md.barrier(),
    ]


def test_synchronous_collectives_return_none(on_ranks) -> None:
    assert on_ranks(synchronous, 2) == [[None] * 5] * 2


def every_operation_async() -> tuple:
    rank, size = md.get_rank(), md.get_world_size()
    x, y = torch.full((2,), rank + 1.0), torch.full((2,), rank + 1.0)
    out, part = torch.empty(2 * size), torch.empty(1)
    works = [
        md.all_reduce(x, async_op=True),
        md.broadcast(y, src=1, async_op=True),
        md.all_gather_into_tensor(out, torch.full((2,), float(rank)), async_op=True),
        md.reduce_scatter_tensor(part, torch.arange(2.0), async_op=True),
        md.barrier(async_op=True),
    ]
    assert all(isinstance(work, md.Work) for work in works)
    assert works[-1].wait() is True
    done = [work.is_completed() for work in works]  # a barrier is behind what came before it
    for work in works:
        work.wait()
    return done, x.tolist(), y.tolist(), out.tolist(), part.tolist()


def test_earlier_collectives_are_complete_after_a_barrier(on_ranks) -> None:
    for rank, found in enumerate(on_ranks(every_operation_async, 2)):
        assert found == ([True] * 5, [3.0] * 2, [2.0] * 2, [0.0, 0.0, 1.0, 1.0], [2.0 * rank])


def waited_in_vain() -> list[str]:
    if md.get_rank() == 1:
        md.new_group([0, 1])
        md.barrier()  # of the world, which is another group
        return []
    group = md.new_group([0, 1])
    work = md.all_reduce(torch.ones(1), group=group, async_op=True)
    told = []
    for call in (
        lambda: work.wait(timedelta(seconds=0.7)),
        work.wait,
        lambda: md.all_reduce(torch.ones(1), group=group),
    ):
        with pytest.raises(md.BackendError) as caught:
            call()
        told.append(str(caught.value))
    assert work.is_completed() and not work.is_success()
    md.barrier()
    return told


def test_a_wait_that_expires_breaks_the_group_and_says_so(pool: Pool) -> None:
    first, again, later = pool.run(waited_in_vain, 2)[0]
    assert first == again
    assert first.startswith("all_reduce on group of ranks 0-1 timed out after ")
    assert "this group can no longer be used: create a new one with new_group()" in first
    assert "failed before" in later


def overlapping(rounds: int) -> list[float]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = md.get_rank()
    both = {"dp": torch.zeros(rounds), "tp": torch.zeros(rounds), "all": torch.zeros(rounds)}
    works = []
    for number in range(rounds):
        for name in sorted(both, reverse=(rank + number) % 2 == 0):
            both[name][number] = rank + 1.0
            group = None if name == "all" else mesh[name]
            works.append(md.all_reduce(both[name][number], group=group, async_op=True))
    for work in works:
        work.wait()
    return [both[name].tolist() for name in ("dp", "tp", "all")]


def test_async_collectives_on_overlapping_groups_in_different_orders(on_ranks) -> None:
    for rank, (dp, tp, everyone) in enumerate(on_ranks(overlapping, 4, 10)):
        column, row = rank % 2, rank // 2
        assert dp == [column + 1.0 + column + 3.0] * 10
        assert tp == [2 * row + 1.0 + 2 * row + 2.0] * 10
        assert everyone == [10.0] * 10


def group_ranks() -> list:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.tensor([float(md.get_rank())])
    md.broadcast(x, group=mesh["dp"], group_src=1)
    y = torch.tensor([float(md.get_rank())])
    md.broadcast(y, src=md.get_rank() // 2 * 2, group=mesh["tp"])
    return [x.item(), y.item()]


def test_roots_are_global_ranks_or_group_ranks(on_ranks) -> None:
    assert on_ranks(group_ranks, 4) == [[2.0, 0.0], [3.0, 0.0], [2.0, 2.0], [3.0, 2.0]]


def documented() -> list:
    rank = md.get_rank()
    reduced = torch.arange(2) + 1 + 2 * rank
    md.all_reduce(reduced)
    c = torch.tensor([1 + 1j, 2 + 2j]) + 2 * rank * (1 + 1j)
    md.all_reduce(c)
    flat, stacked = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    md.all_gather_into_tensor(flat, torch.arange(2) + 1 + 2 * rank)
    md.all_gather_into_tensor(stacked, torch.arange(2) + 1 + 2 * rank)
    one, two = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    md.reduce_scatter_tensor(one, torch.arange(4))
    md.reduce_scatter_tensor(two, torch.arange(4).reshape(2, 2))
    return [x.tolist() for x in (reduced, c, flat, stacked, one, two)]


def test_documented_results(on_ranks) -> None:
    for rank, got in enumerate(on_ranks(documented, 2)):
        block = [[0, 2], [4, 6]][rank]
        assert got == [
            [4, 6],
            [4 + 4j, 6 + 6j],
            [1, 2, 3, 4],
            [[1, 2], [3, 4]],
            block,
            block,
        ]


def history() -> str:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    md.all_reduce(y)
    with pytest.raises(md.GradientError) as caught:
        y.sum().backward()
    md.all_reduce(x)  # a leaf is written as in torch
    z = x.detach() * 2
    md.all_reduce(z)
    with torch.no_grad():
        w = x * 2
        md.all_reduce(w)
    assert x.tolist() == [2.0, 2.0]
    return str(caught.value)


def test_overwriting_gradient_history_raises_in_backward(on_ranks) -> None:
    for text in on_ranks(history, 2):
        assert text.startswith(
            "all_reduce cannot be differentiated: it overwrote a tensor with gradient history"
        )
        assert text.endswith(
            "fix:      use meshdist.lax.psum(x, axis, mesh=mesh), which returns a new tensor; or "
            "call all_reduce on x.detach(), so that gradients ignore the call"
        )


def mended() -> list[list[float]]:
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x, found = torch.ones(2, requires_grad=True), []
    for call in (
        lambda y: md.lax.psum(y, "dp", mesh=mesh),
        lambda y: md.all_reduce(y.detach(), group=mesh["dp"]),
    ):
        y = x * 2 * (1 + md.get_rank())
        result = call(y)
        (gradient,) = torch.autograd.grad((y if result is None else result).sum(), x)
        found.append(gradient.tolist())
    return found


def test_what_the_error_of_overwritten_history_proposes(on_ranks) -> None:
    for rank, (of_sum, ignoring) in enumerate(on_ranks(mended, 2)):
        assert of_sum == ignoring == [2.0 * (1 + rank)] * 2


X = torch.ones(4)
OUTSIDE = md.GroupMember.NON_GROUP_MEMBER
REFUSED = [
    (lambda: md.all_reduce([1.0]), TypeError, "all_reduce"),
    (lambda: md.all_reduce(X, op="sum"), TypeError, "is not a reduction"),
    (lambda: md.all_reduce(X, op=md.ReduceOp.BAND), ValueError, "cannot reduce float32 with BAND"),
    (
        lambda: md.all_reduce(torch.ones(2, dtype=torch.bool), op=md.ReduceOp.AVG),
        ValueError,
        "cannot reduce bool with AVG",
    ),
    (
        lambda: md.all_reduce(torch.ones(2, dtype=torch.complex64), op=md.ReduceOp.MAX),
        ValueError,
        "cannot reduce complex64 with MAX",
    ),
    (lambda: md.all_reduce(X, async_op="no"), TypeError, "async_op must be True or False"),
    (lambda: md.all_reduce(X, group="tp"), TypeError, "'tp' is not a group"),
    (
        lambda: md.all_reduce(X, group="tp"),
        TypeError,
        "pass the axis of its mesh: group=mesh['tp']",
    ),
    (
        lambda: md.all_reduce(X, group=("dp", "tp")),
        TypeError,
        "pass the axis of its mesh: group=mesh[('dp', 'tp')]",
    ),
    (
        lambda: md.all_reduce(torch._efficientzerotensor(2)),
        ValueError,
        "all_reduce cannot use tensor because it has no memory",
    ),
    (
        lambda: md.all_reduce(torch._efficientzerotensor(2)),
        ValueError,
        "pass a copy, tensor = tensor.clone(), or resize the storage to its former size first",
    ),
    (
        lambda: md.all_reduce(X, group=torch.distributed.HashStore()),
        TypeError,
        "found:    torch._C._distributed_c10d.HashStore",
    ),
    (
        lambda: md.all_reduce(X, group=torch.distributed.ProcessGroup(0, 1)),
        TypeError,
        "create a meshdist group of the same ranks: meshdist.distributed.new_group(ranks)",
    ),
    (lambda: md.broadcast(X), ValueError, "broadcast needs src or group_src"),
    (lambda: md.broadcast(X, src=0, group_src=0), ValueError, "both src and group_src"),
    (lambda: md.broadcast(X, src=5), ValueError, "src=5 is not a member"),
    (lambda: md.broadcast(X, group_src=2), ValueError, "group_src=2 is outside the group"),
    (
        lambda: md.all_gather_into_tensor(torch.empty(9), X),
        md.ShapeError,
        "does not hold one input_tensor per rank",
    ),
    (
        lambda: md.all_gather_into_tensor(torch.empty(8, dtype=torch.float64), X),
        md.DtypeError,
        "output_tensor float64, input_tensor float32",
    ),
    (
        lambda: md.reduce_scatter_tensor(torch.empty(3), X),
        md.ShapeError,
        "does not hold one output per rank",
    ),
    (lambda: md.all_reduce(X, op=md.ReduceOp.PREMUL_SUM), TypeError, "PREMUL_SUM needs a factor"),
    (lambda: md.send(X), ValueError, "send needs dst or group_dst"),
    (lambda: md.isend(X), ValueError, "isend needs dst or group_dst"),
    (lambda: md.send(X, 0, group_dst=0), ValueError, "send got both dst and group_dst"),
    (lambda: md.isend(X, 0, group_dst=0), ValueError, "isend got both dst and group_dst"),
    (lambda: md.recv(X, 0, group_src=0), ValueError, "recv got both src and group_src"),
    (lambda: md.irecv(X, 0, group_src=0), ValueError, "irecv got both src and group_src"),
    (lambda: md.irecv(X, 2), ValueError, "irecv: src=2 is not a member of the world"),
    (lambda: md.send(X, dst=md.get_rank()), ValueError, "use isend"),
    (lambda: md.recv(X, src=md.get_rank()), ValueError, "use irecv"),
    (lambda: md.barrier(timeout=3), TypeError, "datetime.timedelta"),
    (lambda: md.barrier(device_ids=0), TypeError, "device_ids must be a list of integers"),
    *[
        (call, md.NotInGroupError, "this rank is not a member of the group")
        for call in (
            lambda: md.all_reduce(X, group=OUTSIDE),
            lambda: md.broadcast(X, 0, group=OUTSIDE),
            lambda: md.all_gather_into_tensor(X, X, group=OUTSIDE),
            lambda: md.reduce_scatter_tensor(X, X, group=OUTSIDE),
            lambda: md.barrier(OUTSIDE),
            lambda: md.send(X, 0, group=OUTSIDE),
            lambda: md.recv(X, 0, group=OUTSIDE),
            lambda: md.isend(X, 0, group=OUTSIDE),
            lambda: md.irecv(X, 0, group=OUTSIDE),
        )
    ],
    (lambda: md.all_reduce(torch.ones(2, device="meta")), md.BackendError, "meta"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_rejected_before_anything_is_sent(case: int) -> None:
    call, kind, text = REFUSED[case]

    def program():
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, md.MeshdistError)
        return str(caught.value)

    for message in md.simulate(program, 2):
        assert text in message


def test_a_barrier_on_the_cpu_takes_device_ids_as_torchs_does() -> None:
    if torch.cuda.is_available():
        pytest.skip("for a host without CUDA devices")
    assert md.simulate(lambda: md.barrier(device_ids=[0]), 2) == [None, None]
    with pytest.raises(md.KindError, match="a list of integers, not"):
        md.simulate(lambda: md.barrier(device_ids=[True]), 2)


def test_a_cuda_device_that_is_not_there_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        md.ArgumentError, match=r"device_ids=\[2\] names a CUDA device that does not"
    ):
        first_cuda_device([2], "barrier")
    assert first_cuda_device([1], "barrier") == torch.device("cuda", 1)


WITHOUT_A_WORLD = """
import torch, meshdist as md
try:
    md.all_reduce(torch.ones(1))
except md.NotInitializedError as error:
    print(error)
"""


def test_without_a_world() -> None:
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_WORLD], capture_output=True, text=True, timeout=120
    ).stdout
    assert (
        "the process group has not been initialized" in told
        and "meshdist run -n 4 script.py" in told
    )


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_elements_that_are_one_in_memory_are_rejected_before_anything_is_sent(
    operation: str,
) -> None:
    def program() -> str:
        more = {"src": 0} if operation == "broadcast" else {}
        with pytest.raises(md.ArgumentError) as caught:
            getattr(md, operation)(torch.ones(1).expand(3), **more)
        tensor = (torch.ones(1) + md.get_rank()).expand(3)
        tensor = tensor.clone()  # as the fix says
        getattr(md, operation)(tensor, **more)
        assert tensor.tolist() == [3.0 if operation == "all_reduce" else 1.0] * 3
        return str(caught.value)

    assert (
        md.simulate(program, 2)
        == [
            f"{operation} cannot write into tensor because its elements share memory\n"
            f"  where:    argument tensor of {operation}, shape (3,), float32\n"
            "  found:    strides (0,): an expanded tensor\n"
            "  fix:      pass a copy, tensor = tensor.clone(), and read the result from it"
        ]
        * 2
    )


def test_a_view_of_a_leaf_is_rejected_before_anything_is_sent() -> None:
    def program() -> list[float]:
        leaf = torch.ones(4, requires_grad=True)
        with pytest.raises(md.GradientError) as caught:
            md.all_reduce(leaf[:2])
        assert str(caught.value) == (
            "all_reduce cannot write into tensor because it is a view of a leaf that "
            "requires a gradient\n"
            "  where:    argument tensor of all_reduce, shape (2,), float32\n"
            "  fix:      call it under torch.no_grad(), or pass tensor.detach()"
        )
        with torch.no_grad():
            md.all_reduce(leaf[:2])
        return leaf.tolist()

    assert md.simulate(program, 2) == [[2.0, 2.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(
    "operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "recv"]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_backward_that_counts_on_overwritten_values_raises(
    operation: str, is_async: bool
) -> None:
    def write(x: torch.Tensor) -> None:
        if operation == "recv":
            if md.get_rank() == 0:
                md.send(torch.zeros(2), 1)
            elif is_async:
                md.irecv(x, 0).wait()
            else:
                md.recv(x, 0)
            return
        work = {
            "all_reduce": lambda: md.all_reduce(x, async_op=is_async),
            "broadcast": lambda: md.broadcast(x, src=0, async_op=is_async),
            "all_gather": lambda: md.all_gather_into_tensor(x, torch.ones(1), async_op=is_async),
            "reduce_scatter": lambda: md.reduce_scatter_tensor(x, torch.ones(4), async_op=is_async),
        }[operation]()
        if work is not None:
            work.wait()

    def program() -> str:
        weight = torch.ones(2, requires_grad=True)
        x = torch.full((2,), 3.0)  # needs no gradient, and is needed for one
        loss = (weight * x).sum()
        write(x)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        assert weight.grad is not None
        return str(weight.grad.tolist())

    found = md.simulate(program, 2)
    is_source_spared = operation in ("broadcast", "recv")
    assert found[0] == "[3.0, 3.0]" if is_source_spared else "modified by an inplace" in found[0]
    assert "modified by an inplace operation" in found[1]


def test_a_dtype_that_nobody_can_reduce_is_rejected_and_breaks_nothing(pool: Pool) -> None:
    def program() -> tuple[str, float]:
        with pytest.raises(md.DtypeError) as caught:
            md.all_reduce(torch.zeros(2, dtype=torch.float4_e2m1fn_x2))
        x = torch.ones(1)
        md.all_reduce(x)
        return str(caught.value), x.item()

    for text, after in pool.run(program, 2):
        assert "cannot reduce float4_e2m1fn_x2 with SUM" in text
        assert after == 2.0
