"""Programs that keep one promise each: every rank returns what was not kept, or ""."""

from __future__ import annotations

import gc
import os
import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch

import meshdist as md
from tests.inner import call_sites as program_room

__all__ = [
    "abort_frees_all",
    "arguments_that_are_rejected_break_nothing",
    "closed_groups_reject",
    "dropped_works_are_told",
    "forked_children_are_rejected",
    "large",
    "layouts_may_differ",
    "left_ranks_are_named",
    "mismatches_move_nothing",
    "monitored_barriers_name",
    "new_groups_follow_broken_ones",
    "objects_that_cannot_be_pickled",
    "outsiders_are_rejected",
    "shared_memory_or_none",
    "sums_are_the_same_bits_in_each_call",
    "sums_are_the_same_bits_on_all_ranks",
    "timeouts_name",
    "worlds_come_again",
]

SHORT = timedelta(seconds=1)


def error_of(call: Callable[[], Any]) -> str:
    """The class and text of the error that ``call`` raises, or ""."""
    try:
        call()
    except md.MeshdistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unless(holds: bool, text: str) -> str:
    return "" if holds else text


def everyones(mine: Any) -> list[Any]:
    gathered = [None] * md.get_world_size()
    md.all_gather_object(gathered, mine)
    return gathered


def bits_of_sums(*, is_mixed: bool) -> list[list[int]]:
    """What sums of random numbers hold, which shows any other order, in calls of several kinds."""
    generator = torch.Generator().manual_seed(md.get_rank())
    found = []
    for count in (5, 3000, 40_000, 700_001):
        for dtype in (torch.float32, torch.float64):
            mine = torch.randn(count, generator=generator, dtype=dtype)
            bits = []
            for is_async in (False, True, False) if is_mixed else (False,):
                x = mine.clone()
                work = md.all_reduce(x, async_op=is_async)
                if work is not None:
                    work.wait()
                bits.append(crc32(x.numpy().tobytes()))
            found.append(bits)
    return found


def sums_are_the_same_bits_on_all_ranks() -> str:
    found = everyones(bits_of_sums(is_mixed=False))
    return unless(found[1:] == found[:-1], f"{found}")


def sums_are_the_same_bits_in_each_call() -> str:
    found = bits_of_sums(is_mixed=True)
    return unless(all(len(set(bits)) == 1 for bits in found), f"{found}")


def layouts_may_differ() -> str:
    """Elements correspond by their places in the shape, however they lie on each rank."""
    rank, size = md.get_rank(), md.get_world_size()
    wrong = []
    for shape in ((3, 4), (96, 100)):
        count = shape[0] * shape[1]
        rows = torch.arange(count, dtype=torch.float32).view(shape)
        x = (rows.t().contiguous().t() if rank % 2 else rows.clone()) * (rank + 1)
        y = x.clone()
        md.all_reduce(x)
        md.broadcast(y, 1)
        both = torch.equal(x, rows * (size * (size + 1) // 2)) and torch.equal(y, rows * 2)
        wrong.append(unless(both, f"{shape}"))
    return "".join(wrong)


def shared_memory_or_none() -> str:
    x = md.shared_empty((2, 3)).fill_(md.get_rank() + 1)
    md.all_reduce(x)
    size = md.get_world_size()
    return unless(bool((x == size * (size + 1) // 2).all()), f"{x}")


def timeouts_name() -> str:
    """A call that rank 1 does not make ends on the others, and says who and where."""
    group = md.new_group([0, 1], timeout=SHORT)
    told = ""
    if md.get_rank() < 2:
        md.all_reduce(torch.ones(1), group=group)
    if md.get_rank() == 0:
        told = error_of(lambda: md.all_reduce(torch.ones(3), group=group))
    md.barrier()  # no rank leaves while it may be asked
    return told


def is_told_of_a_timeout(found: list[str]) -> bool:
    is_late = found[0].startswith(
        "CollectiveTimeoutError: all_reduce on group of ranks 0-1 timed out"
    )
    return is_late and "rank 1: did not reach this call; last call " in found[0]


def left_ranks_are_named() -> str:
    """A rank that has left its world is not waited for, and is named with the number of calls."""
    for _ in range(2):
        md.all_reduce(torch.ones(2))
    if md.get_rank() == 1:
        md.destroy_process_group()
        return ""
    return error_of(lambda: md.all_reduce(torch.ones(2)))


def is_named_as_left(found: list[str]) -> bool:
    return all(re.search(r"rank 1\b.* (destroyed|ended|has closed)", found[k]) for k in (0, 2))


def mismatches_move_nothing() -> str:
    """Calls that differ raise one error on all ranks; the group is broken; tensors stay.

    Over Gloo and MPI on one host the tensor stays of the rank that sees it: others have begun.
    """
    group, rank = md.new_group(), md.get_rank()
    is_between_hosts = group.world.spans_hosts(group.ranks)
    if is_between_hosts:
        md.set_debug_level(md.DebugLevel.DETAIL)
    x = torch.full((3 + rank // 2,), float(rank))
    told = [error_of(lambda: md.all_reduce(x, group=group)) for _ in range(2)]
    md.set_debug_level(md.DebugLevel.OFF)
    md.barrier()
    is_one = told[0].startswith("MismatchError") and "rank 2: all_reduce((4,)" in told[0]
    is_broken = bool(told[1])
    stays = is_between_hosts or md.get_backend(group) in ("shm", "simulated")
    stays |= f"rank {rank} detected it before it sent any data" in told[0]
    is_kept = not stays or bool((x == rank).all())
    return unless(is_one and is_broken and is_kept, f"{told}, {x}")


def new_groups_follow_broken_ones() -> str:
    """A group that was aborted rejects every call; a new one of the same ranks is whole."""
    group = md.new_group()
    md.all_reduce(torch.ones(1), group=group)
    md.barrier()
    if md.get_rank() == 0:
        group.abort("enough")
    told = error_of(lambda: md.all_reduce(torch.ones(1), group=group))
    x = torch.ones(1)
    md.all_reduce(x, group=md.new_group())
    return unless(told.startswith("AbortedError") and x.item() == md.get_world_size(), told)


def abort_frees_all() -> str:
    """Ranks that wait are freed, with the reason and who gave it."""
    group = md.new_group()
    rank, x = md.get_rank(), torch.ones(2)
    md.all_reduce(x, group=group)
    md.barrier()
    if rank == 2:
        told = error_of(lambda: group.abort("the data has ended"))
        md.barrier()
        return told
    call = (lambda: md.all_reduce(x, group=group)) if rank else lambda: md.recv(x, 2, group=group)
    told = error_of(call)
    md.barrier()
    is_told = told.startswith("AbortedError") and "rank 2: the data has ended" in told
    return unless(is_told, told or "not freed")


def monitored_barriers_name() -> str:
    """Rank 0 names who is absent, and the group can be used afterwards."""
    rank, told = md.get_rank(), ""
    if rank != 1:
        told = error_of(lambda: md.monitored_barrier(timeout=SHORT))
    x = torch.ones(1)
    md.all_reduce(x)
    is_named = rank != 0 or "Rank 1 failed to pass monitoredBarrier" in told
    return unless(is_named and x.item() == md.get_world_size(), told)


def dropped_works_are_told() -> str:
    """A Work that is dropped before anything has waited for it is warned of; the collective goes
    on."""
    x = torch.ones(2)
    program_room.warned_sites.clear()  # this process may have warned for another backend
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        md.all_reduce(x, async_op=True)
        gc.collect()
    for _ in range(20):  # over MPI a later call may be done before an earlier one
        md.barrier()
    told = [str(one.message) for one in caught if "was dropped" in str(one.message)]
    is_done = x.tolist() == [md.get_world_size()] * 2
    everyone = everyones(len(told))  # simulated ranks are one program, which warns once a place
    return unless(is_done and sum(everyone) > 0, f"{told}, {x}")


def forked_children_are_rejected() -> str:
    """A forked child may ask for its rank; every collective raises, and the parent goes on."""
    x = torch.ones(1)
    md.all_reduce(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], Any]] = [
            lambda: md.all_reduce(x),
            lambda: md.send(x, 1 - min(md.get_rank(), 1)),
            lambda: md.new_group(),
        ]
        told = [error_of(call)[:200] for call in calls]
        rejected = sum("WorldError: a forked child cannot" in one for one in told)
        os.write(write, f"{md.get_rank()}: {rejected} of 3 {told if rejected < 3 else ''}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    told = os.read(read, 4000).decode().strip()
    os.close(read)
    md.all_reduce(x)
    return unless(told == f"{md.get_rank()}: 3 of 3", told)


def worlds_come_again() -> str:
    """A mesh and groups are made, closed and made again, in one world."""
    for turn in range(3):
        mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
        x = torch.full((2,), float(turn))
        md.all_reduce(x, group=mesh["dp"])
        mesh.close()
        if x.tolist() != [turn * md.get_world_size()] * 2:
            return f"{turn}: {x}"
    return ""


def outsiders_are_rejected() -> str:
    """A rank outside a group gets an error, and sends nothing; members go on."""
    group = md.new_group([0, 2])
    x = torch.ones(1)
    told = error_of(lambda: md.all_reduce(x, group=group))
    if md.get_rank() == 1:
        return unless(told.startswith("NotInGroupError"), told)
    return told or unless(x.item() == 2, f"{x}")


def arguments_that_are_rejected_break_nothing() -> str:
    x = torch.ones(2)
    told = [
        error_of(lambda: md.all_reduce(x, op="no op")),
        error_of(lambda: md.broadcast(x, 77)),
        error_of(lambda: md.all_reduce(torch.ones(2, dtype=torch.bool), md.ReduceOp.AVG)),
    ]
    md.all_reduce(x)
    return unless(all(told) and x.tolist() == [md.get_world_size()] * 2, f"{told}")


def closed_groups_reject() -> str:
    group = md.new_group()
    md.barrier(group)
    md.destroy_process_group(group)
    told = error_of(lambda: md.all_reduce(torch.ones(1), group=group))
    return unless(told.startswith("GroupClosedError"), told)


def objects_that_cannot_be_pickled() -> str:
    """One error on all ranks that names the rank; the group is good for the next call."""
    mine = (lambda: 0) if md.get_rank() == 1 else 1
    told = error_of(lambda: md.all_gather_object([None] * md.get_world_size(), mine))
    x = torch.ones(1)
    md.all_reduce(x)
    is_told = told.startswith("PicklingError") and "rank 1" in told
    return unless(is_told and x.item() == md.get_world_size(), told)


def large() -> str:
    """More than 2^31 elements: what 32 bits do not count."""
    rank, count = md.get_rank(), (1 << 31) + 8
    x = torch.full((count,), rank + 3, dtype=torch.uint8)
    begin = time.monotonic()
    md.broadcast(x, 1)
    ends = [int(x[place]) for place in (0, 1 << 31, -1)]
    x[-1] = rank
    md.all_reduce(x, md.ReduceOp.MAX)
    ends += [int(x[place]) for place in (0, 1 << 31, -1)]
    if rank == 1:
        md.send(x.fill_(9), 0)
    elif rank == 0:
        md.recv(x, 1)
        ends += [int(x[place]) for place in (0, 1 << 31, -1)]
    expected = [4, 4, 4, 4, 4, 1] + [9] * 3 * (rank == 0)
    return unless(ends == expected, f"{ends} after {time.monotonic() - begin:.0f} s")
