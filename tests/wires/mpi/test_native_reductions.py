"""Reductions by the native core over MPI are those of the Python code, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.wires.fast_paths import opened
from tests.wires.samples import COMPLEX, DTYPES, FLOATS_OF_8_BITS, draw, legal_ops

pytestmark = pytest.mark.mpi

NATIVE = [dtype for dtype in DTYPES if dtype not in (*FLOATS_OF_8_BITS, *COMPLEX)]
SPECIAL = (float("nan"), 0.0, -0.0, float("inf"), float("-inf"), 1e-42, 6e-8, 60000.0)


def numbers_of(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Any values; among floats some that are seldom drawn."""
    x = draw(dtype, (count,), seed)
    if dtype.is_floating_point and dtype.itemsize > 1:
        some = torch.arange(seed % 5, count, 7)
        x[some] = torch.tensor(SPECIAL)[(some + seed) % len(SPECIAL)].to(dtype)
    return x


def bits_of(x: torch.Tensor) -> bytes:
    """The bytes of all elements; those of a 16-bit NaN are not the same in all of torch's loops."""
    if x.dtype.is_floating_point and x.itemsize == 2:
        x = x.view(torch.int16).masked_fill(x.isnan(), 1 << 14)
    return x.numpy().tobytes()


def result_of(
    verb: str, op: Any, dtype: torch.dtype, count: int, *, goes_on: bool
) -> tuple[bytes, bytes]:
    """The bits of a verb's result, and of its input."""
    rank, size = md.get_rank(), md.get_world_size()
    given = numbers_of(dtype, count * (size if verb == "reduce_scatter" else 1), 100 * rank + count)
    result = given
    if verb == "all_reduce":
        work = md.all_reduce(given, op, async_op=goes_on)
    elif verb == "reduce":
        work = md.reduce(given, size - 1, op, async_op=goes_on)
    else:
        result = torch.zeros(count, dtype=dtype)
        work = md.reduce_scatter_tensor(result, given, op, async_op=goes_on)
    if work is not None:
        work.wait()
    return bits_of(result), bits_of(given)


def differing_reductions(calls: list[tuple[int, bool]]) -> tuple[list[str], int]:
    """Where both ways differ, also with both in a call; and how many reductions are native."""
    group, spy = opened()
    differ, native = [], set()
    for dtype in NATIVE:
        for op in (getattr(md.ReduceOp, name) for name in legal_ops(dtype)):
            for verb in ("all_reduce", "reduce", "reduce_scatter"):
                for count, goes_on in calls:
                    found = []
                    for path in (None, spy, spy if group.rank() % 2 else None):
                        group.fast_path = path
                        spy.answers.clear()
                        found.append(result_of(verb, op, dtype, count, goes_on=goes_on))
                        if True in spy.answers:
                            native.add((dtype, op))
                    if found[1:] != found[:1] * 2:
                        differ.append(f"{verb} {op} {dtype} {count} {goes_on}")
    return differ, len(native)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_both_ways_give_the_same_bits(size: int, pool: Pool) -> None:
    calls = [(0, False), (1, True), (1500, True), (1500, False)][-1 if size == 5 else 0 :]
    for differ, num_native in job_of(pool, size).run_in_world(differing_reductions, calls):
        assert differ == []
        assert num_native == sum(len(legal_ops(dtype)) for dtype in NATIVE)
