"""Every collective of the core against NumPy on whole arrays, over sizes that cross its
thresholds."""

from __future__ import annotations

import ctypes
import math
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from meshdist.backends import native
from tests.native.ranks import OK, run_ranks
from tests.native.reading import PAGE, reads_others, secret_memory

DTYPES, OPS = native.DTYPES, native.OPS
SIZES = [1, 2, 3, pytest.param(5, marks=pytest.mark.soak)]
# Inline in a cache line; one slot; just over; several rounds, so that slots are used again.
COUNTS = [0, 1, 4, 5, 1000, 32 * 1024 + 1, 5 * 32 * 1024 + 7]
TIMEOUT = 20.0


def values(seed: object, count: int, dtype: str) -> torch.Tensor:
    """Small integers, whose sums and products are exact in every dtype."""
    generator = np.random.default_rng(zlib.crc32(repr(seed).encode()))
    whole = torch.from_numpy(generator.integers(0, 3, count))
    return whole.to(getattr(torch, dtype))


def call(method: Any, *args: Any) -> None:
    status = method(*args, TIMEOUT)
    assert status == OK, status


def all_reduce_cases(c: Any) -> None:
    n, me = c.size, c.rank
    for dtype in DTYPES:
        torch_dtype = getattr(torch, dtype)
        for op in OPS:
            if not native.can_reduce(DTYPES[dtype], OPS[op]):
                continue
            for count in (1, 7, 5000):
                parts = [values((j, count, dtype, op), count, dtype) for j in range(n)]
                x = parts[me].clone()
                call(c.all_reduce, x.data_ptr(), count, DTYPES[dtype], OPS[op])
                expected = oracle(parts, op, torch_dtype)
                assert torch.equal(x.view(torch.uint8), expected.view(torch.uint8)), (dtype, op)


def laid(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A layout as the core takes it: nothing for row-major order."""
    return ((), ()) if x.is_contiguous() else (tuple(x.shape), x.stride())


def cases_of_layouts(c: Any) -> None:
    """Each member's tensors lie in one of three ways, in every combination of the ways."""
    kind, add = DTYPES["float32"], OPS["SUM"]
    for shape in ((2, 3, 1), (40, 50, 3), (100, 200, 5)):
        for number in range(3**c.size):
            orders = [((0, 1, 2), (1, 0, 2), (2, 1, 0))[number // 3**j % 3] for j in range(c.size)]
            parts = [values((j, number), math.prod(shape), "float32") for j in range(c.size)]
            order, mine = orders[c.rank], parts[c.rank].view(shape)
            x = mine.permute(order).contiguous().permute(sorted(range(3), key=order.__getitem__))
            for operation, root in (
                ("all_reduce", 0),
                ("reduce", number % c.size),
                ("broadcast", 0),
            ):
                given = x.clone()
                layouts = () if given.is_contiguous() else [laid(given)]
                op = 0 if operation == "broadcast" else add
                code, count = native.OPERATIONS[operation], given.numel()
                buffers = (given.data_ptr(), 0, [], [])
                arguments = (code, count, kind, op, root, *buffers, number % 2, layouts, TIMEOUT)
                if number % 2:
                    assert c.start(*arguments, (), 0).wait(TIMEOUT) == OK
                else:
                    assert c.run(*arguments) == OK
                expected = oracle(parts, "SUM", torch.float32).view(shape)
                if operation == "reduce" and c.rank != root:
                    expected = mine
                if operation == "broadcast":
                    expected = parts[root].view(shape)
                assert torch.equal(given, expected), (operation, shape, orders)
            tensors = [x.clone(), mine.clone()]
            places = [(one.data_ptr(), one.numel()) for one in tensors]
            layouts = [laid(one) for one in tensors]
            code = native.OPERATIONS["all_reduce_list"]
            assert c.run(code, 0, kind, add, 0, 0, 0, places, [], 0, layouts, TIMEOUT) == OK
            expected = oracle(parts, "SUM", torch.float32).view(shape)
            assert all(torch.equal(one, expected) for one in tensors)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_whose_layouts_differ_reduce_element_by_element(size: int) -> None:
    run_ranks(size, cases_of_layouts)


def other_calls_in_other_layouts(c: Any) -> list[int]:
    x = torch.ones(6, 4) if c.rank else torch.ones(4, 6).t()
    layouts = [] if c.rank else [laid(x)]
    arguments = (native.OPERATIONS["all_reduce"], 24, DTYPES["float32"])
    found = [
        c.run(*arguments, OPS[op], 0, x.data_ptr(), 0, [], [], fingerprint, layouts, TIMEOUT)
        for op, fingerprint in ((("SUM", "MAX")[c.rank], 0), ("SUM", c.rank), ("SUM", 5))
    ]
    assert (x == 2.0).all()
    return found


def test_calls_that_differ_in_more_than_their_layouts_are_rejected() -> None:
    mismatch = native.STATUSES["MISMATCH"]
    assert run_ranks(2, other_calls_in_other_layouts) == [[mismatch, mismatch, OK]] * 2


def wrong_layouts(c: Any) -> list[str]:
    texts = []
    x = torch.ones(6)
    for layouts in ([((2, 3), (3,))], [((2, 4), (4, 1))], [((2, 3), (6, 1))], [((), ())] * 2):
        arguments = (6, DTYPES["float32"], OPS["SUM"], 0, x.data_ptr(), 0, [], [], 0, layouts)
        with pytest.raises(ValueError, match="layout") as caught:
            c.run(native.OPERATIONS["all_reduce"], *arguments, TIMEOUT)
        texts.append(str(caught.value))
    return texts


def test_layouts_that_are_not_those_of_the_buffers_are_rejected() -> None:
    one = "a layout is not of its buffer"
    several = "as many layouts as buffers are needed"
    assert run_ranks(1, wrong_layouts) == [[one, one, one, several]]


def oracle(parts: list[torch.Tensor], op: str, dtype: torch.dtype) -> torch.Tensor:
    """Reduce in float64 / complex128 / int64 / bool; the values keep that exact."""

    def mean(a: list[np.ndarray]) -> np.ndarray:
        total = np.add.reduce(a)
        if total.dtype.kind == "i":
            narrow = torch.from_numpy(total).to(dtype).numpy()  # it wraps
            return (narrow - np.fmod(narrow, len(a))) // len(a)
        return (total.view(np.float64) / len(a)).view(total.dtype)

    if dtype is torch.bool:
        arrays = [part.numpy() for part in parts]
        name = {"SUM": "or", "MAX": "or", "BOR": "or", "BXOR": "xor"}.get(op, "and")
        return torch.from_numpy(getattr(np, f"logical_{name}").reduce(arrays))
    if dtype.is_complex:
        wide = torch.complex128
    else:
        wide = torch.float64 if dtype.is_floating_point else torch.int64
    arrays = [part.to(wide).numpy() for part in parts]
    total = {
        "SUM": np.add.reduce,
        "AVG": mean,
        "PRODUCT": np.multiply.reduce,
        "MIN": np.minimum.reduce,
        "MAX": np.maximum.reduce,
        "BAND": np.bitwise_and.reduce,
        "BOR": np.bitwise_or.reduce,
        "BXOR": np.bitwise_xor.reduce,
    }[op](arrays)
    return torch.from_numpy(np.ascontiguousarray(total)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_of_every_dtype_and_op(size: int) -> None:
    run_ranks(size, all_reduce_cases)


def operation_cases(c: Any) -> list[bytes]:
    n, me = c.size, c.rank
    f32, total, i64 = DTYPES["float32"], OPS["SUM"], DTYPES["int64"]
    digests = []
    for count in COUNTS:
        parts = [values((j, count), count, "float32") for j in range(n)]
        whole = sum(parts, torch.zeros(count))
        for root in {0, n - 1}:
            x = parts[me].clone()
            call(c.broadcast, x.data_ptr(), count, f32, root)
            assert torch.equal(x, parts[root])
            x = parts[me].clone()
            call(c.reduce, x.data_ptr(), count, f32, total, root)
            assert torch.equal(x, whole if me == root else parts[me])
            outs = [torch.zeros(count) for _ in range(n)] if me == root else []
            call(c.gather, [o.data_ptr() for o in outs], parts[me].data_ptr(), count, f32, root)
            assert all(torch.equal(o, p) for o, p in zip(outs, parts, strict=False))
            out = torch.zeros(count)
            ins = [p.data_ptr() for p in parts] if me == root else []
            call(c.scatter, out.data_ptr(), ins, count, f32, root)
            assert torch.equal(out, parts[me])
        x = parts[me].clone()
        call(c.all_reduce, x.data_ptr(), count, f32, total)
        assert torch.equal(x, whole)
        out = torch.zeros(n * count)
        call(c.all_gather, out.data_ptr(), parts[me].data_ptr(), count, f32)
        assert torch.equal(out, torch.cat(parts))
        blocks = [values((j, count, "blocks"), n * count, "int64") for j in range(n)]
        own = torch.zeros(count, dtype=torch.int64)
        call(c.reduce_scatter, own.data_ptr(), blocks[me].data_ptr(), count, i64, total)
        assert torch.equal(own, sum(b[me * count :][:count] for b in blocks))
        out = torch.zeros(n * count, dtype=torch.int64)
        places = [[x.data_ptr() + 8 * count * j for j in range(n)] for x in (out, blocks[me])]
        call(c.all_to_all, places[0], [count] * n, places[1], [count] * n, i64)
        assert torch.equal(out, torch.cat([b[me * count :][:count] for b in blocks]))
        call(c.barrier)
        noise = torch.from_numpy(np.random.default_rng([count, me]).normal(size=count))
        call(c.all_reduce, noise.data_ptr(), count, DTYPES["float64"], total)
        digests.append(noise.numpy().tobytes())
    return digests


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_equal_parts(size: int) -> None:
    first, *others = run_ranks(size, operation_cases)
    assert all(other == first for other in others)  # the same bits on every rank
    assert run_ranks(size, operation_cases)[0] == first  # and in every run


def size_matrix(n: int, seed: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([n, seed])
    return generator.choice([0, 1, 3, 777, 40_000, 100_001], size=(n, n))


def ragged_cases(c: Any) -> None:
    n, me = c.size, c.rank
    i32, total = DTYPES["int32"], OPS["SUM"]
    for seed in range(6):
        sizes = size_matrix(n, seed).tolist()
        sent = [[values((i, j, seed), sizes[i][j], "int32") for j in range(n)] for i in range(n)]
        outs = [torch.zeros(sizes[j][me], dtype=torch.int32) for j in range(n)]
        call(
            c.all_to_all,
            [o.data_ptr() for o in outs],
            [o.numel() for o in outs],
            [x.data_ptr() for x in sent[me]],
            sizes[me],
            i32,
        )
        assert all(torch.equal(outs[j], sent[j][me]) for j in range(n))
        lengths = sizes[0]
        mine = [values((i, seed), lengths[i], "int32") for i in range(n)]
        outs = [torch.zeros(length, dtype=torch.int32) for length in lengths]
        pointers = [o.data_ptr() for o in outs]
        call(c.all_gather_v, pointers, lengths, mine[me].data_ptr(), lengths[me], i32)
        assert all(torch.equal(o, x) for o, x in zip(outs, mine, strict=True))
        cut = [
            [values((i, j, seed, "rs"), lengths[j], "int32") for j in range(n)] for i in range(n)
        ]
        there = [x.data_ptr() for x in cut[me]]
        out = torch.zeros(lengths[me], dtype=torch.int32)
        call(c.reduce_scatter_v, out.data_ptr(), lengths[me], there, lengths, i32, total)
        assert torch.equal(out, sum(cut[i][me] for i in range(n)))
        tensors = [values((me, j, seed, "list"), lengths[j], "int32") for j in range(n)]
        expected = [
            sum(values((i, j, seed, "list"), lengths[j], "int32") for i in range(n))
            for j in range(n)
        ]
        there = [x.data_ptr() for x in tensors]
        call(c.all_reduce_list, there, lengths, i32, total)
        assert all(torch.equal(x, e) for x, e in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_collectives_of_unequal_parts(size: int) -> None:
    run_ranks(size, ragged_cases)


def tuned_cases(c: Any) -> None:
    for name, value in (
        ("streams_into_slots", 0),
        ("near_chunk_bytes", 4096),
        ("streams_into_slots", 1),
        ("stream_out_bytes", 0),
        ("whole_reduce_bytes", 0),
        ("chunk_bytes", 8192),
        ("spread_bytes", 64),
        ("spread_most_bytes", 4096),
        ("fetch_least_bytes", 0),
        ("fetch_most_bytes", 0),
    ):
        c.set_tuning(name, value)
        operation_cases(c)
        ragged_cases(c)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_results_do_not_depend_on_stores_and_thresholds(size: int) -> None:
    run_ranks(size, tuned_cases)


def fetch_all(c: Any, block_bytes: int) -> None:
    """Let small messages be read where they lie, too."""
    c.set_tuning("fetch_block_bytes", block_bytes)
    for name in ("fetch_least_bytes", "halves_least_bytes", "far_halves_least_bytes"):
        c.set_tuning(name, 1)
    call(c.barrier)


def fetching_cases(c: Any) -> bool:
    for block_bytes in (64, 256 * 1024):
        fetch_all(c, block_bytes)
        all_reduce_cases(c)
        operation_cases(c)
        ragged_cases(c)
        in_place_cases(c)
    return bool(c.reads_others)


def overlapping_cases(c: Any) -> None:
    """Reduce-scatter whose result lies anywhere in the input, on one rank or on all."""
    count = 50_000
    blocks = [values((j, "over"), c.size * count, "float32") for j in range(c.size)]
    expected = sum(b[c.rank * count :][:count] for b in blocks)
    for start in (0, 7, count // 2, count, c.size * count - count):
        for ranks in (range(c.size), [0]):
            x = blocks[c.rank].clone()
            out = x[start:][:count] if c.rank in ranks else torch.zeros(count)
            addresses = out.data_ptr(), x.data_ptr()
            call(c.reduce_scatter, *addresses, count, DTYPES["float32"], OPS["SUM"])
            assert torch.equal(out, expected), (start, ranks)
            x = blocks[c.rank].clone()
            out = x[start:][:count] if c.rank in ranks else torch.zeros(count)
            ins = [x.data_ptr() + 4 * count * j for j in range(c.size)]
            sizes = [count] * c.size
            place = out.data_ptr(), count, ins, sizes
            call(c.reduce_scatter_v, *place, DTYPES["float32"], OPS["SUM"])
            assert torch.equal(out, expected), (start, ranks)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_crowded", [True, False])
def test_a_result_may_lie_anywhere_in_the_input(size: int, is_crowded: bool) -> None:
    run_ranks(size, overlapping_cases, is_crowded=is_crowded)


def in_place_cases(c: Any) -> None:
    """Reduce-scatter into the rank's own part of the input, on all ranks or on one."""
    count = 1000
    blocks = [values((j, "blocks"), c.size * count, "float32") for j in range(c.size)]
    for ranks in (range(c.size), [0]):
        x = blocks[c.rank].clone()
        part = x[c.rank * count :][:count]
        out = part if c.rank in ranks else torch.zeros(count)
        addresses = out.data_ptr(), x.data_ptr()
        call(c.reduce_scatter, *addresses, count, DTYPES["float32"], OPS["SUM"])
        assert torch.equal(out, sum(b[c.rank * count :][:count] for b in blocks))


@reads_others
@pytest.mark.parametrize("size", SIZES[1:])
def test_parts_are_read_where_they_lie(size: int) -> None:
    assert run_ranks(size, fetching_cases, is_crowded=False) == [True] * size


def test_ranks_that_share_cores_use_slots_alone() -> None:
    assert run_ranks(2, fetching_cases, is_crowded=True) == [False] * 2


def secret_cases(c: Any, first: str) -> list[Any]:
    """One member gives what the other cannot read, in each collective from ``first`` on."""
    num_pages = 100
    mine = secret_memory(num_pages, range(num_pages if c.rank == 1 else 0))
    if mine is None:
        return [None]
    mine.fill_(float(c.rank))
    count = mine.numel()
    half = count // 2

    def gather() -> None:
        out = torch.full((2 * count,), -1.0)
        call(c.all_gather, out.data_ptr(), mine.data_ptr(), count, DTYPES["float32"])
        assert out.view(2, count).tolist() == [[0.0] * count, [1.0] * count]

    def exchange() -> None:
        out = torch.full((count,), -1.0)
        places = [[x.data_ptr(), x.data_ptr() + 4 * half] for x in (out, mine)]
        call(c.all_to_all, places[0], [half] * 2, places[1], [half] * 2, DTYPES["float32"])
        assert out.view(2, half).tolist() == [[0.0] * half, [1.0] * half]

    def broadcast() -> None:
        out = mine if c.rank == 1 else torch.full((count,), -1.0)
        call(c.broadcast, out.data_ptr(), count, DTYPES["float32"], 1)
        assert out.tolist() == [1.0] * count

    call(c.barrier)
    found = [c.reads_others]
    operations = {"gather": gather, "exchange": exchange, "broadcast": broadcast}
    for operation in (operations.pop(first), *operations.values()):
        operation()
        found.append(c.reads_others)
    return found


@reads_others
@pytest.mark.parametrize("first", ["gather", "exchange", "broadcast"])
def test_what_others_cannot_read_goes_through_slots(first: str) -> None:
    found = run_ranks(2, partial(secret_cases, first=first), is_crowded=False)
    if found[0] == [None]:
        pytest.skip("this kernel has no secret memory")
    assert found == [[True, False, False, False]] * 2


def secret_sums(c: Any, operation: str, secret: tuple[range, range]) -> list[bool] | None:
    """Reduce 64 pages of which those of each rank in ``secret`` cannot be read by the other."""
    mine = secret_memory(64, secret[c.rank])
    if mine is None:
        return None
    fetch_all(c, PAGE)
    count = mine.numel()
    given = [values((rank, "secret"), count, "float32") for rank in range(2)]
    mine.copy_(given[c.rank])
    expected = given[0] + given[1]
    could_read = c.reads_others
    sums = DTYPES["float32"], OPS["SUM"]
    if operation == "all_reduce":
        call(c.all_reduce, mine.data_ptr(), count, *sums)
        assert torch.equal(mine, expected)
    else:
        out = torch.zeros(count // 2)
        call(c.reduce_scatter, out.data_ptr(), mine.data_ptr(), count // 2, *sums)
        assert torch.equal(out, expected.chunk(2)[c.rank])
    return [could_read, c.reads_others]


SECRETS = {
    "all of one rank's": (range(0), range(64)),
    "all of both ranks'": (range(64), range(64)),
    "a few in the half that the other reduces": (range(40, 43), range(0)),
    "a few in the half that it reduces itself": (range(5, 9), range(0)),
    "a few in both halves, of both ranks": (range(30, 34), range(20, 50)),
    "the very last": (range(0), range(63, 64)),
}


@reads_others
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("which", SECRETS)
def test_what_others_cannot_read_is_reduced_by_slots(operation: str, which: str) -> None:
    body = partial(secret_sums, operation=operation, secret=SECRETS[which])
    found = run_ranks(2, body, is_crowded=False)
    if found[0] is None:
        pytest.skip("this kernel has no secret memory")
    # A rank's own part of a reduce-scatter is read by nobody else.
    is_unread = operation == "reduce_scatter" and which.endswith(("itself", "last"))
    assert found == [[True, is_unread]] * 2


def late_reducing_cases(c: Any) -> bool:
    """Both members reduce much, and one has no patience."""
    c.set_tuning("halves_most_bytes", 1 << 40)
    x = torch.ones(1 << 26)
    call(c.barrier)
    assert c.reads_others
    seconds = 0.02 if c.rank == 0 else TIMEOUT
    places = x.data_ptr(), x.numel(), DTYPES["float32"], OPS["SUM"]
    status = c.all_reduce(*places, seconds)
    assert status != OK or bool((x == 2.0).all())
    x.fill_(-1.0)
    time.sleep(1.0)  # it stays where it is
    return bool(status == OK)


def late_reading_cases(c: Any) -> bool:
    """One member has much to read, and the other one little, and no patience."""
    many = 1 << 26
    c.set_tuning("fetch_most_bytes", 1 << 40)
    give, take = ([1, many], [1, 1]) if c.rank == 0 else ([1, 1], [many, 1])
    x, out = torch.ones(sum(give)), torch.empty(sum(take))
    outs = [out.data_ptr(), out.data_ptr() + 4 * take[0]]
    ins = [x.data_ptr(), x.data_ptr() + 4 * give[0]]
    call(c.barrier)
    assert c.reads_others
    seconds = 0.02 if c.rank == 0 else TIMEOUT
    status = c.all_to_all(outs, take, ins, give, DTYPES["float32"], seconds)
    assert status != OK or bool((out == 1.0).all())
    x.fill_(-1.0)
    time.sleep(1.0)  # it stays where it is
    return bool(status == OK)


@reads_others
@pytest.mark.parametrize("body", [late_reading_cases, late_reducing_cases])
def test_who_still_reads_from_a_member_that_gave_up_fails_too(body: Callable[..., bool]) -> None:
    first, second = run_ranks(2, body, is_crowded=False)
    assert second or not first


def unaligned_cases(c: Any) -> None:
    count = 70_001
    raw = (ctypes.c_char * (4 * count + 64))()
    base = ctypes.addressof(raw)
    for shift in (4, 12, 20):
        x = np.frombuffer(raw, np.float32, count, shift)
        x[:] = np.arange(count) % 7 + c.rank
        call(c.all_reduce, base + shift, count, DTYPES["float32"], OPS["SUM"])
        assert (x == sum(np.arange(count) % 7 + j for j in range(c.size))).all()
        call(c.broadcast, base + shift, count, DTYPES["float32"], 1)


@pytest.mark.parametrize("size", [2, 3])
def test_addresses_need_no_alignment_beyond_the_dtypes(size: int) -> None:
    run_ranks(size, unaligned_cases)


def rounding_cases(c: Any) -> dict[str, bytes]:
    results = {}
    for dtype in ("float16", "bfloat16"):
        torch_dtype = getattr(torch, dtype)
        bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
        all_values = bits.view(torch_dtype)
        x = all_values.roll(c.rank * 12345).clone()
        parts = [all_values.roll(j * 12345) for j in range(c.size)]
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            y = x.clone()
            call(c.all_reduce, y.data_ptr(), y.numel(), DTYPES[dtype], OPS[op])
            wide = parts[0].float()
            for part in parts[1:]:
                other = part.float()
                wide = {
                    "SUM": torch.add,
                    "AVG": torch.add,
                    "PRODUCT": torch.mul,
                    "MIN": torch.minimum,
                    "MAX": torch.maximum,
                }[op](wide, other)
            expected = (wide / c.size if op == "AVG" else wide).to(torch_dtype)
            assert torch.equal(y.isnan(), expected.isnan()), (dtype, op)
            kept = ~expected.isnan()
            assert torch.equal(y[kept], expected[kept]), (dtype, op)
            results[dtype + op] = y.view(torch.uint8).numpy().tobytes()
    return results


@pytest.mark.parametrize("vectors", ["baseline", "avx2", None])
@pytest.mark.parametrize("size", [2, 3])
def test_16_bit_floats_of_every_value_round_once(
    size: int, vectors: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vectors is not None:
        monkeypatch.setenv("MESHDIST_SHM_VECTORS", vectors)
    first, *others = run_ranks(size, rounding_cases)
    assert all(other == first for other in others)


def nan_cases(c: Any) -> None:
    for op in ("MIN", "MAX"):
        for dtype in ("float32", "float64"):
            x = torch.tensor([1.0, float("nan"), 3.0, float("inf")], dtype=getattr(torch, dtype))
            if c.rank == 1:
                x = torch.tensor([float("nan"), 1.0, 2.0, -1.0], dtype=x.dtype)
            call(c.all_reduce, x.data_ptr(), 4, DTYPES[dtype], OPS[op])
            assert x.isnan().tolist() == [True, True, False, False]


def test_a_nan_on_either_side_wins() -> None:
    run_ranks(2, nan_cases)


def async_cases(c: Any) -> None:
    tensors = [torch.full((1 + 9999 * (i % 5),), float(i + c.rank)) for i in range(40)]
    tickets = [
        c.all_reduce_async(x.data_ptr(), x.numel(), DTYPES["float32"], OPS["SUM"], TIMEOUT)
        for x in tensors
    ]
    last = torch.ones(3)
    call(c.all_reduce, last.data_ptr(), 3, DTYPES["float32"], OPS["SUM"])  # behind them all
    for i, (x, ticket) in enumerate(zip(tensors, tickets, strict=True)):
        assert ticket.is_done()
        assert ticket.wait(TIMEOUT) == OK
        assert (x == sum(i + j for j in range(c.size))).all()
    assert (last == c.size).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_in_flight_run_in_order(size: int) -> None:
    run_ranks(size, async_cases)
