"""Tensors in any order in memory, against plain loops, whatever the members' layouts are."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool

SHAPE = (4, 8, 16, 16)  # of 16 KiB at 2 bytes: such are compared
SMALL = (2, 3, 2, 2)


def gapped(x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    whole[..., ::2] = x
    return whole[..., ::2]


def conjugated(x: torch.Tensor) -> torch.Tensor:
    """Conjugated by a bit alone."""
    return x.conj().resolve_conj().transpose(0, 2).contiguous().transpose(0, 2).conj()


def negated(x: torch.Tensor) -> torch.Tensor:
    """Half of a complex tensor's memory, negated by a bit alone."""
    whole = torch.complex(torch.zeros(x.shape, dtype=x.dtype), -x)
    return whole.transpose(0, 1).contiguous().transpose(0, 1).conj().imag


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "row-major": lambda x: x.clone(),
    "device_groups-last": lambda x: x.clone(memory_format=torch.channels_last),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a parameter": lambda x: torch.nn.Parameter(
        x.clone(memory_format=torch.channels_last), requires_grad=x.is_floating_point()
    ),
    "with dims of 1": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3).unsqueeze(2),
    "of another shape": lambda x: x.reshape(-1, x.shape[-1]).t().contiguous().t(),
    "with gaps": gapped,
    "of one dim": lambda x: x.flatten().clone(),
    "NumPy, Fortran": lambda x: np.asfortranarray(x.numpy()),
    "NumPy, transposed": lambda x: x.numpy().transpose(1, 0, 3, 2).copy().transpose(1, 0, 3, 2),
}
SPECIAL = {"conjugated": conjugated, "negated": negated}
PLAIN = ("row-major", "device_groups-last", "reversed", "transposed")
LOOPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

Case = tuple[str, str, torch.dtype, tuple[str, ...], tuple[int, ...], bool]
"""Collective, op, dtype, the layout of each member, shape, and whether it is async."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, so that sums and products are exact in every dtype."""
    plain = (torch.arange(np.prod(shape)) * (rank + 3) // 2) % 4 + 1
    return (plain % 2 == 0 if dtype == torch.bool else plain).to(dtype).reshape(shape)


def reduced(op: str, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = functools.reduce(LOOPS[op], (values(rank, shape, dtype) for rank in range(size)))
    return total / size if op == "AVG" else total


def as_row_major(x: Any) -> torch.Tensor:
    tensor = x.detach() if isinstance(x, torch.Tensor) else torch.from_numpy(x)
    return tensor.resolve_conj().resolve_neg().reshape(-1)


def is_wrong(group: Any, case: Case) -> bool:
    operation, op, dtype, layouts, shape, is_async = case
    rank, size = md.get_rank(), md.get_world_size()
    mine = values(rank, shape, dtype)
    made = {**LAYOUTS, **SPECIAL}
    x = made[layouts[rank % len(layouts)]](mine)
    root = size - 1
    kind = getattr(md.ReduceOp, op)
    expected = [mine if operation == "broadcast" else reduced(op, size, shape, dtype)]
    written = [x]
    if operation == "all_reduce":
        work = md.all_reduce(x, kind, group, is_async)
    elif operation == "all_reduce_coalesced":
        y = made[layouts[(rank + 1) % len(layouts)]](mine)
        written, expected = [x, y], expected * 2
        work = md.all_reduce_coalesced(written, kind, group, is_async)
    elif operation == "reduce":
        work = md.reduce(x, root, kind, group, is_async)
        expected = expected if rank == root else [mine]
    else:
        work = md.broadcast(x, root, group, is_async)
        expected = [values(root, shape, dtype)]
    if work is not None:
        work.wait()
    is_equal = torch.allclose if op == "AVG" else torch.equal  # quotients are rounded
    return any(
        not is_equal(as_row_major(one), wanted.reshape(-1).to(dtype))
        for one, wanted in zip(written, expected, strict=True)
    )


def wrong_cases(cases: list[Case], backend: str | None) -> list[Case]:
    group = md.group.WORLD if backend is None else md.new_group(backend=backend)
    with torch.no_grad():
        return [case for case in cases if is_wrong(group, case)]


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return ("SUM", "AVG")
    if dtype.is_floating_point:
        return ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    return ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def all_cases() -> list[Case]:
    cases: list[Case] = []
    mixes = [*itertools.product(PLAIN, PLAIN), ("reversed", "device_groups-last", "row-major")]
    mixes += [
        (one, two) for one in LAYOUTS if one not in PLAIN for two in ("device_groups-last", one)
    ]
    operations = ("all_reduce", "reduce", "broadcast", "all_reduce_coalesced")
    for number, (mix, operation) in enumerate(itertools.product(mixes, operations)):
        dtype = (torch.float32, torch.int64)[number % 2]
        cases.append((operation, "SUM", dtype, mix, SHAPE, number % 3 == 0))
        cases.append((operation, "MAX", dtype, mix, SMALL, number % 3 == 1))
    others = (torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.complex64)
    pairs = (("device_groups-last", "device_groups-last"), ("reversed", "row-major"))
    for dtype, pair in itertools.product(others, pairs):
        for operation, op in itertools.product(operations, ops_of(dtype)):
            if dtype == torch.bool and op in ("SUM", "PRODUCT", "MIN", "MAX"):
                continue  # the loops above do not have them
            cases.append((operation, op, dtype, pair, SHAPE, op == "MIN"))
    lazy = ((torch.complex64, "conjugated"), (torch.float32, "negated"))
    for (dtype, one), operation in itertools.product(lazy, operations):
        cases += [(operation, "SUM", dtype, (one, two), SHAPE, False) for two in (one, "reversed")]
    for dtype, pair in itertools.product((torch.float8_e5m2, torch.uint16, torch.bool), pairs):
        cases.append(("broadcast", "SUM", dtype, pair, SHAPE, False))
    return cases


CASES = all_cases()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_layout_matches_a_loop(pool: Pool, backend: str, size: int) -> None:
    assert pool.run(wrong_cases, size, CASES, backend) == [[]] * size


@pytest.mark.parametrize("size", [1, 3])
def test_every_layout_matches_a_loop_on_simulated_ranks(size: int) -> None:
    assert md.simulate(wrong_cases, size, args=(CASES, None)) == [[]] * size


@pytest.mark.parametrize("backend", ["gloo"])
def test_layouts_may_differ_between_hosts(pool: Pool, backend: str) -> None:
    assert pool.run(wrong_cases, 3, CASES[::3], backend, hosts="ABA") == [[]] * 3


@pytest.mark.soak
@pytest.mark.mpi
def test_every_layout_matches_a_loop_over_mpi(pool: Pool) -> None:
    assert job_of(pool, 3).run_in_world(wrong_cases, CASES[::2], None) == [[]] * 3


def handed_over(
    operation: str, backend: str, layouts: tuple[str, ...], **options: Any
) -> list[bool]:
    """For each tensor that the communicator is given, whether it lies in the caller's memory."""
    group = md.new_group(backend=backend)
    x = LAYOUTS[layouts[md.get_rank()]](values(md.get_rank(), SHAPE, torch.float32))
    communicator, found = group.open_device_group("cpu").communicator, []
    carry_out = communicator.start

    def note(prepared: Any) -> Any:
        if prepared.operation:  # else it compares calls between hosts
            found.extend(one.data_ptr() == x.data_ptr() for one in prepared.outputs)
        return carry_out(prepared)

    communicator.start = note  # type: ignore[method-assign]
    if operation in ("broadcast", "reduce"):
        options["group_src" if operation == "broadcast" else "group_dst"] = 0
    given = [x] if operation == "all_reduce_coalesced" else x
    work = getattr(md, operation)(given, group=group, **options)
    if work is not None:
        work.wait()
    return found


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "broadcast", "all_reduce_coalesced"])
def test_tensors_of_one_layout_are_not_copied(pool: Pool, operation: str) -> None:
    alike = ("reversed", "reversed")
    assert pool.run(handed_over, 2, operation, "shm", alike) == [[True], [True]]
    assert pool.run(handed_over, 2, operation, "shm", ("with gaps", "reversed"))[0] == [False]


def test_what_is_copied_where_layouts_differ_or_are_not_compared(pool: Pool) -> None:
    # The core copies, and does all of what is plain.
    mixed = ("row-major", "device_groups-last")
    assert pool.run(handed_over, 2, "all_reduce", "shm", mixed) == [[], [True]]
    assert pool.run(handed_over, 2, "all_reduce", "gloo", mixed) == [[True], [False]]
    alike = ("reversed", "reversed")
    assert pool.run(handed_over, 2, "all_reduce", "gloo", alike) == [[False], [False]]
    found = pool.run(handed_over, 2, "all_reduce", "gloo", alike, hosts="AB")
    assert found == [[False], [False]]


def keeps_what_is_only_read(backend: str, layouts: tuple[str, ...]) -> bool:
    """The array of a member that gets no sum cannot be written."""
    mine = values(md.get_rank(), SHAPE, torch.float32).numpy()
    x = mine.copy(order="F" if layouts[md.get_rank()] == "reversed" else "C")
    x.flags.writeable = md.get_rank() == 0
    md.reduce(x, 0, group=md.new_group(backend=backend))
    return np.array_equal(x, mine) == (md.get_rank() == 1)


@pytest.mark.parametrize("layouts", list(itertools.product(("reversed", "row-major"), repeat=2)))
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_read_only_arrays_stay_as_they_are(
    pool: Pool, backend: str, layouts: tuple[str, ...]
) -> None:
    assert pool.run(keeps_what_is_only_read, 2, backend, layouts) == [True, True]


class Struck(Exception):
    pass


def raise_struck(*_: object) -> None:
    raise Struck("a handler has a fault")


def ends_while_layouts_are_compared(how: str) -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=1.5 if how == "late" else 20))
    x = LAYOUTS["device_groups-last"](values(0, SHAPE, torch.float32))
    md.all_reduce(x, group=group)
    try:
        if md.get_rank() == 0:
            if how == "interrupted":
                signal.signal(signal.SIGALRM, raise_struck)
                signal.setitimer(signal.ITIMER_REAL, 0.5)
            md.all_reduce(x, group=group)
        elif how == "dead":
            os._exit(0)
        elif how == "another call":
            md.all_reduce(x, md.ReduceOp.MAX, group=group)
        elif how == "another layout of another call":
            md.broadcast(LAYOUTS["reversed"](x), 1, group=group)
        elif how == "aborted":
            time.sleep(0.5)
            group.abort("the data has ended")
        else:
            time.sleep(2.5)
            if how == "interrupted":
                md.all_reduce(x, group=group)
    except (Struck, md.MeshdistError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_member_that_does_not_come_is_named_at_the_timeout(pool: Pool) -> None:
    text = pool.run(ends_while_layouts_are_compared, 2, "late")[0]
    assert text.startswith("CollectiveTimeoutError: all_reduce")
    assert "not finished after 1.5 s" in text or "rank 1" in text


@pytest.mark.parametrize("how", ["another call", "another layout of another call"])
def test_other_calls_are_still_told_apart(pool: Pool, how: str) -> None:
    texts = pool.run(ends_while_layouts_are_compared, 2, how)
    assert [text.partition(":")[0] for text in texts] == ["MismatchError"] * 2
    assert all("all_reduce((4, 8, 16, 16) float32, SUM)" in text for text in texts)


def test_an_abort_frees_the_member_that_compares(pool: Pool) -> None:
    text = pool.run(ends_while_layouts_are_compared, 2, "aborted")[0]
    assert text.startswith("AbortedError: all_reduce") and "the data has ended" in text


def test_a_handler_that_raises_while_layouts_are_compared_breaks_the_group(pool: Pool) -> None:
    texts = pool.run(ends_while_layouts_are_compared, 2, "interrupted")
    assert texts[0] == "Struck: a handler has a fault"
    assert (
        texts[1].startswith("AbortedError: all_reduce") and "rank 0: gave up in call 2" in texts[1]
    )


def test_a_member_that_has_ended_is_named(pool: Pool) -> None:
    text = pool.outcomes(ends_while_layouts_are_compared, 2, "dead")[0]
    assert text.startswith("BackendError: all_reduce") and "rank 1" in text


def sums_on_a_gpu(layouts: tuple[str, ...]) -> bool:
    torch.cuda.set_device(0)
    group, rank = md.new_group(backend="gloo"), md.get_rank()
    mine = values(rank, SHAPE, torch.float32).to("cuda")
    x = LAYOUTS[layouts[rank]](mine)
    md.all_reduce(x, group=group)
    return torch.equal(x.cpu(), reduced("SUM", 2, SHAPE, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", list(itertools.product(PLAIN, PLAIN)))
def test_cuda_tensors_of_any_layouts_over_gloo(pool: Pool, layouts: tuple[str, ...]) -> None:
    assert pool.run(sums_on_a_gpu, 2, layouts) == [True, True]


@pytest.mark.gpu
def test_cuda_tensors_of_any_layout_over_nccl(tmp_path: Any) -> None:
    md.init_process_group("nccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        for made in LAYOUTS.values():
            x = made(values(0, SHAPE, torch.float32))
            if isinstance(x, torch.Tensor):
                x = x.detach().to("cuda")  # keeps the layout of what has no gaps
                for call in (
                    md.all_reduce,
                    lambda x: md.broadcast(x, 0),
                    lambda x: md.reduce(x, 0),
                ):
                    call(x)
                assert torch.equal(as_row_major(x.cpu()), values(0, SHAPE, torch.float32).flatten())
    finally:
        md.destroy_process_group()
