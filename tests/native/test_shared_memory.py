"""Buffers that lie in memory of the whole group: read where they are, with the same results."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from meshdist.backends import native
from tests.native.ranks import OK, run_ranks
from tests.native.reading import PAGE, reads_others, secret_memory

F32, SUM, AVG = native.DTYPES["float32"], native.OPS["SUM"], native.OPS["AVG"]
TIMEOUT = 20.0
COUNT = 300_000


def shared(c: Any, fd: int) -> torch.Tensor:
    """My part of the group's memory, as float32."""
    memory = native.Memory(fd)
    c.add_memory(memory)
    whole = torch.from_numpy(memory.array()).view(torch.float32)
    assert whole.data_ptr() == memory.address
    return whole.view(c.size, -1)[c.rank]


def made(j: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 100 + j


def fetch_all(c: Any) -> None:
    """Let small messages be read where they lie, too."""
    for name in ("fetch_least_bytes", "halves_least_bytes", "far_halves_least_bytes"):
        c.set_tuning(name, 1)


def run_shared(size: int, body: Callable[..., Any]) -> list[Any]:
    fd = native.create_memory(size * COUNT * 4)
    try:
        return run_ranks(size, lambda c: body(c, shared(c, fd)))
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("who", ["all", "some", "none"])
@pytest.mark.parametrize("fetches", [False, True])
def test_collectives_give_the_same_wherever_the_input_lies(
    size: int, who: str, fetches: bool
) -> None:
    def body(c: Any, mine: torch.Tensor) -> None:
        n, me = c.size, c.rank
        if fetches:
            fetch_all(c)
        is_shared = who == "all" or (who == "some" and me == 0)
        for count in (10, 60_000, 99_999):
            parts = [made(j, n * count if count < 99_999 else count) for j in range(n)]

            m = parts[me].numel()
            own = mine[:m] if is_shared else torch.empty(m)
            fresh = partial(own.copy_, parts[me])
            x = fresh()
            assert c.all_reduce(x.data_ptr(), m, F32, SUM, TIMEOUT) == OK
            assert torch.equal(x, sum(parts))
            x = fresh()
            assert c.all_reduce(x.data_ptr(), m, F32, AVG, TIMEOUT) == OK
            assert torch.equal(x, sum(parts) / n)
            x = fresh()
            assert c.broadcast(x.data_ptr(), m, F32, 0, TIMEOUT) == OK
            assert torch.equal(x, parts[0])
            x = fresh()
            assert c.reduce(x.data_ptr(), m, F32, SUM, 1, TIMEOUT) == OK
            assert torch.equal(x, sum(parts) if me == 1 else parts[me])
            x, out = fresh(), torch.empty(n * m)
            assert c.all_gather(out.data_ptr(), x.data_ptr(), m, F32, TIMEOUT) == OK
            assert torch.equal(out, torch.cat(parts))
            outs = [torch.empty(m) for _ in range(n)] if me == 1 else []
            there = [o.data_ptr() for o in outs]
            assert c.gather(there, x.data_ptr(), m, F32, 1, TIMEOUT) == OK
            assert all(torch.equal(o, q) for o, q in zip(outs, parts, strict=False))
            if count < 99_999:
                block = slice(me * count, (me + 1) * count)
                out = torch.empty(count)
                assert (
                    c.reduce_scatter(out.data_ptr(), x.data_ptr(), count, F32, SUM, TIMEOUT) == OK
                )
                assert torch.equal(out, sum(q[block] for q in parts))
                out = torch.empty(m)
                places = [[y.data_ptr() + 4 * count * j for j in range(size)] for y in (out, x)]
                counts = [count] * size
                assert c.all_to_all(places[0], counts, places[1], counts, F32, TIMEOUT) == OK
                assert torch.equal(out, torch.cat([q[block] for q in parts]))

    run_shared(size, body)


@reads_others
def test_a_part_in_place_outlives_another_that_cannot_be_read() -> None:
    def body(c: Any, mine: torch.Tensor) -> bool:
        fetch_all(c)
        c.set_tuning("fetch_block_bytes", PAGE)
        secret = secret_memory(64, range(20, 24))
        if secret is None:
            return False
        count = secret.numel() // 2
        parts = [made(j, 2 * count) for j in range(2)]
        x = mine[: 2 * count] if c.rank == 0 else secret
        x.copy_(parts[c.rank])
        out = x[:count] if c.rank == 0 else torch.empty(count)
        assert c.barrier(TIMEOUT) == OK  # finds out whether anything can be read
        places = out.data_ptr(), x.data_ptr()
        assert c.reads_others
        assert c.reduce_scatter(*places, count, F32, SUM, TIMEOUT) == OK
        assert not c.reads_others
        assert torch.equal(out, sum(parts)[c.rank * count :][:count])
        return True

    if run_shared(2, body) != [True, True]:
        pytest.skip("this kernel has no secret memory")


def test_memory_outlives_the_communicator() -> None:
    def body(c: Any, mine: torch.Tensor) -> None:
        mine.fill_(c.rank)
        c.close()
        del c
        assert mine.eq(mine[0]).all()

    run_shared(2, body)
