"""Texts and tensors compared between ranks: what counts as equal, and what an error can show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.collectives.value_comparison import (
    agree,
    checksum,
    is_any,
    relative_distance,
    tolerance,
)
from meshdist.dtypes import DTYPES
from tests.ddp.no_synchronization import no_synchronization
from tests.mpi_job import job_of
from tests.pool import Pool

CPU = torch.device("cpu")
QUIET = [dtype for dtype in DTYPES if dtype is not torch.complex32]
"""Every dtype but the one of whose every use torch warns."""
INEXACT = [dtype for dtype in QUIET if dtype.is_floating_point or dtype.is_complex]


def found(texts: dict[str, str], tensors: dict[str, torch.Tensor] | None = None) -> str | None:
    difference = agree(md.group.WORLD, texts, tensors or {}, op_name="test")
    return difference and difference.found


def operations_under(body: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        body()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("meshdist::")]


# -- texts ----------------------------------------------------------------------------------------


def test_texts_are_shown_by_rank_and_those_beyond_eight_are_counted() -> None:
    def program(count: int, odd: int) -> str | None:
        text = "other" if md.get_rank() == odd else "text"
        return found({f"entry {number}": f"{text} {number}" for number in range(count)})

    assert md.simulate(program, 3, (20, -1)) == [None] * 3
    assert md.simulate(program, 1, (20, 0)) == [None]
    assert (
        md.simulate(program, 3, (2, 1))
        == [
            "entry 0: ranks 0, 2: text 0; rank 1: other 0\n"
            "entry 1: ranks 0, 2: text 1; rank 1: other 1"
        ]
        * 3
    )
    for odd in range(3):
        (text,) = set(md.simulate(program, 3, (20, odd)))
        assert text is not None
        assert text.splitlines()[7].startswith("entry 7: ") and text.endswith("\nand 12 more")


def test_labels_that_some_ranks_lack_and_other_orders_differ() -> None:
    def program() -> list[str | None]:
        rank = md.get_rank()
        texts = {"a": "1", "b": "2"}
        return [
            found({**texts, **({"c": "3"} if rank == 1 else {})}),
            found({"": f"on {rank % 2}"}),
            found(dict(reversed(texts.items())) if rank == 2 else texts),
            found(texts, {"y": torch.ones(1), **({"x": torch.ones(2)} if rank == 2 else {})}),
        ]

    assert (
        md.simulate(program, 3)
        == [
            [
                "c: ranks 0, 2: missing; rank 1: 3",
                "ranks 0, 2: on 0; rank 1: on 1",
                "the same entries, in another order",
                "x: ranks 0-1: missing; rank 2: shape (2,), float32",
            ]
        ]
        * 3
    )


def test_tensors_in_another_order_are_compared_by_label() -> None:
    def program() -> list[str | None]:
        tensors = {"long": torch.ones(3), "short": torch.zeros(1)}
        if md.get_rank():
            tensors = dict(reversed(tensors.items()))
        same = found({}, tensors)
        tensors["short"] += md.get_rank()
        return [same, found({}, tensors)]

    same, other = md.simulate(program, 2)[1]
    assert same == "the same entries, in another order"
    assert other is not None and other.startswith("short, shape (1,), float32: rank 1 differs")


def test_what_an_error_shows_does_not_grow_with_ranks_and_texts() -> None:
    def program() -> str | None:
        rank = md.get_rank()
        return found({f"{number}": f"{rank} of many" * 10_000 for number in range(20)})

    (text,) = set(md.simulate(program, 52))
    assert text is not None and len(text) < 8 * 50 * 400
    assert "... (100000 characters, " in text and "ranks 50-51: ... (other texts)" in text
    assert text.endswith("\nand 12 more")


def test_equal_ranks_send_sixteen_bytes_in_one_all_reduce(pool: Pool) -> None:
    def program() -> list[str]:
        tensors = {f"x{number}": torch.ones(1000) for number in range(20)}
        return operations_under(lambda: found({"a": "b" * 1000}, tensors))

    sent = ["meshdist::all_reduce of test the world 16 bytes"]
    assert pool.run(program, 2, backend="shm") == [sent] * 2


# -- tensors --------------------------------------------------------------------------------------


def test_each_tensor_has_its_own_answer() -> None:
    def program() -> Any:
        rank = md.get_rank()
        tensors = {
            "equal": torch.ones(2),
            "far": torch.tensor([4.0, 4.0 - rank]),
            "one": torch.tensor(rank // 2),
            "last": torch.tensor([rank > 0]),
        }
        difference = agree(md.group.WORLD, {}, tensors, op_name="test")
        assert difference is not None and not difference.is_rounding
        assert list(difference.differing) == [1, 2]  # of the first line
        return difference.found.splitlines()

    assert (
        md.simulate(program, 3)
        == [
            [
                "far, shape (2,), float32: ranks 1-2 differ from rank 0, by up to 0.5 of its "
                "largest value",
                "one, shape (), int64: rank 2 differs from ranks 0-1, by up to inf of its largest "
                "value",
                "last, shape (1,), bool: rank 0 differs from ranks 1-2, by up to inf of its "
                "largest value",
            ]
        ]
        * 3
    )


def test_roundings_are_told_from_other_values() -> None:
    def program() -> Any:
        rank = md.get_rank()
        near = {
            "near": torch.tensor([1.0, 1.0 + 1e-7 * (rank == 1)]),
            "zero": torch.tensor([-0.0 if rank == 2 else 0.0]),
        }
        rounded = agree(md.group.WORLD, {}, near, op_name="test")
        far = agree(md.group.WORLD, {}, {**near, "far": torch.tensor(rank)}, op_name="test")
        assert rounded is not None and far is not None
        return rounded.is_rounding, rounded.found, far.is_rounding, far.found.partition(":")[0]

    (answer,) = set(md.simulate(program, 3))
    is_rounding, text, is_far, label = answer
    assert is_rounding and not is_far and label == "far, shape (), int64"
    near, zero = text.splitlines()
    assert near.startswith("near, shape (2,), float32: rank 1 differs from ranks 0, 2, by up to 1.")
    assert zero.startswith("zero, shape (1,), float32: rank 2 differs from ranks 0-1, by up to ")


@pytest.mark.parametrize(
    ("backend", "hosts"),
    [
        ("shm", "A"),
        ("shm", "AAA"),
        ("gloo", "AB"),
        ("gloo", "AABBC"),
        pytest.param("mpi", "AA", marks=[pytest.mark.mpi, pytest.mark.soak]),
    ],
)
def test_every_backend_compares(pool: Pool, backend: str, hosts: str) -> None:
    def program() -> Any:
        last = md.get_rank() == md.get_world_size() - 1
        equal = {"x": torch.arange(100_000), "y": torch.ones(3, 2).T}
        return [
            found({"a": "b"}, equal),
            found({"a": "c" if last else "b"}, equal),
            found({}, {**equal, "z": torch.tensor([1.0, 2.0 if last else 1.0])}),
            str(is_any(last, md.group.WORLD, "test")),
            str(is_any(False, md.group.WORLD, "test")),
        ]

    size = len(hosts)
    if backend == "mpi":
        texts_of_all = job_of(pool, size).run_in_world(program)
    else:
        texts_of_all = pool.run(program, size, backend=backend, hosts=hosts)
    others = "rank 0" if size == 2 else f"ranks 0-{size - 2}"
    expected = [
        None,
        f"a: {others}: b; rank {size - 1}: c",
        f"z, shape (2,), float32: rank {size - 1} differs from {others}, by up to 1 of its "
        "largest value",
    ]
    for texts in texts_of_all:
        assert texts == [*(expected if size > 1 else [None] * 3), "True", "False"]


@pytest.mark.parametrize("dtype", [*QUIET, torch.float4_e2m1fn_x2], ids=str)
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    def program() -> tuple[str | None, str | None]:
        bits = torch.tensor([1, 0, 1, 0, 1, 0, 1, 1] * 2, dtype=torch.uint8)
        equal = found({}, {"x": bits.view(dtype)})
        bits[3] = 1 if md.get_rank() else 0
        return equal, found({}, {"x": bits.view(dtype)})

    for equal, other in md.simulate(program, 2):
        assert equal is None
        assert other is not None and ": rank 1 differs from rank 0, by up to " in other


@pytest.mark.parametrize("dtype", QUIET)
def test_every_dtype_has_a_distance(dtype: torch.dtype) -> None:
    two = torch.tensor([1.0, 2.0]).to(dtype)
    one = torch.tensor([1.0, 1.0]).to(dtype)
    assert relative_distance(two, two) == 0.0
    assert relative_distance(one, two) == (0.0 if dtype is torch.bool else 0.5)


@pytest.mark.parametrize("dtype", INEXACT)
def test_half_of_the_digits_count(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    assert tolerance(torch.empty((), dtype=dtype)) == math.sqrt(eps) >= eps


def test_what_counts_as_equal() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 3.0])
    assert relative_distance(odd, odd.clone()) == 0.0
    assert relative_distance(odd, -odd) == math.inf
    assert relative_distance(torch.ones(1), torch.zeros(1)) == math.inf
    assert relative_distance(torch.empty(0), torch.empty(0)) == 0.0
    large = torch.tensor([2**62 + 1, 5])
    assert relative_distance(large, torch.tensor([2**62, -5])) > 0.0
    # What torch only moves is compared by its bytes.
    bits = torch.tensor([1, 2], dtype=torch.uint8)
    assert (
        relative_distance(bits.view(torch.float4_e2m1fn_x2), bits.view(torch.float4_e2m1fn_x2))
        == 0.0
    )
    assert (
        relative_distance(
            bits.view(torch.float4_e2m1fn_x2), bits.flip(0).view(torch.float4_e2m1fn_x2)
        )
        == 0.5
    )


# -- checksums ------------------------------------------------------------------------------------

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.bool,
]


def sum_of(*tensors: torch.Tensor) -> int:
    return int(checksum(tensors, CPU))


def drawn(count: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(count)
    bits = torch.randint(-128, 128, (count * dtype.itemsize,), dtype=torch.int8)
    return (bits & 1 if dtype is torch.bool else bits).view(dtype)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [*((5, dtype) for dtype in DTYPES), (140_001, torch.float32), (140_001, torch.bool)],
    ids=str,
)
def test_every_bit_that_flips_changes_the_checksum(count: int, dtype: torch.dtype) -> None:
    x = drawn(count, dtype)
    before = sum_of(x)
    raw = x.view(torch.uint8)
    for at in {0, raw.numel() // 3, raw.numel() - 1}:
        for bit in [0] if dtype is torch.bool else (0, 3, 7):
            raw[at] ^= 1 << bit
            assert sum_of(x) != before
            raw[at] ^= 1 << bit
    assert sum_of(x) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_signs_places_and_tensors_that_change_change_the_checksum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(100_000).to(dtype)
    seen = {sum_of(one) for one in (x, -x, x.flip(0), x.roll(1), x.roll(65_536), x.abs())}
    assert len(seen) == 6
    swapped = x.clone()
    swapped[[0, 65_536]] = x[[65_536, 0]]
    negated = x.clone()
    negated[[7, 99_999]] *= -1  # two bits, the highest of their words
    assert len(seen | {sum_of(swapped), sum_of(negated)}) == 8
    one, other = x[:10], x[10:30]
    assert len({sum_of(one, other), sum_of(other, one), sum_of(one), sum_of(other)}) == 4


def test_the_checksum_sees_values_and_neither_strides_nor_devices_threads() -> None:
    x = torch.randn(40, 30, 20, 10)
    last = x.to(memory_format=torch.channels_last)
    assert last.stride() != x.stride()
    assert sum_of(x) == sum_of(last)
    z = torch.randn(3, dtype=torch.complex64)
    assert sum_of(z.conj(), z.conj().imag) == sum_of(z.conj_physical(), -z.imag)
    assert sum_of() == 0
    assert sum_of(torch.ones(0), torch.ones(())) == sum_of(torch.ones(()))


@pytest.mark.gpu
def test_a_checksum_on_a_gpu_awaits_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.ones(5_000_000, device=device), torch.ones(3, device=device).bfloat16()]
    with no_synchronization():
        sums = [checksum(tensors, device)]
        tensors[1][2:].fill_(-1.0)
        sums.append(checksum(tensors, device))
    assert int(sums[0]) == int(checksum([one.abs() for one in tensors], device)) != int(sums[1])
