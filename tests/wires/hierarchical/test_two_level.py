"""Collectives of groups that span hosts, on tensors small and in parts, against NumPy."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import pytest
import torch

import meshdist as md
from meshdist.reduce_ops import ReduceOp
from meshdist.wires.hierarchical import two_level
from tests.pool import Pool
from tests.wires.direct import Direct
from tests.wires.samples import DTYPES, bits, reduced_in_numpy
from tests.wires.verb_table import check_every_verb, expect

SECONDS = timedelta(seconds=30)
SOME = (torch.float32, torch.bfloat16, torch.float16, torch.uint16, torch.bool, torch.complex64)
LAYOUTS = ("AB", "AABB", "ABBB", "ABA", "ABCAC")


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_verb_matches_numpy(pool: Pool, hosts: str) -> None:
    def program() -> str:
        return check_every_verb(md.group.WORLD.open_channel("cpu").communicator, SOME)

    assert len(set(pool.run(program, len(hosts), backend=None, hosts=hosts))) == 1


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_verb_in_parts_matches_numpy(pool: Pool, hosts: str) -> None:
    def program() -> str:
        before = two_level._WHOLE_BYTES
        two_level._WHOLE_BYTES = 0
        try:
            return check_every_verb(md.group.WORLD.open_channel("cpu").communicator, SOME)
        finally:
            two_level._WHOLE_BYTES = before

    assert len(set(pool.run(program, len(hosts), backend=None, hosts=hosts))) == 1


@pytest.mark.soak
@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_verb_on_every_dtype_matches_numpy(pool: Pool, hosts: str) -> None:
    def program() -> str:
        return check_every_verb(md.group.WORLD.open_channel("cpu").communicator, DTYPES)

    outcomes = pool.run(program, len(hosts), backend=None, hosts=hosts, timeout_s=200.0)
    assert len(set(outcomes)) == 1


@pytest.mark.parametrize("hosts", ["AABB", "ABCAC"])
def test_large_tensors_go_in_parts(pool: Pool, hosts: str) -> None:
    def program() -> list[bytes]:
        wire = md.group.WORLD.open_channel("cpu").communicator
        call = Direct(wire, SECONDS, waits=True)
        rank, size, count = wire.rank, wire.size, 600_017
        seeds = [torch.Generator().manual_seed(member) for member in range(size)]
        # Whole numbers, whose sums are exact.
        data = [torch.randint(-999, 999, (count,), generator=seed).float() for seed in seeds]
        found = []
        for op in ("SUM", "MAX", "AVG"):
            kind = getattr(ReduceOp, op)
            x = data[rank].clone()
            call.all_reduce(x, kind).finish(SECONDS)
            expected = reduced_in_numpy(data, op)
            expect(x, expected, op, f"all_reduce of {count} with {op}")
            found.append(bits(x))
            for root in (0, size - 1):
                x = data[rank].clone()
                call.reduce(x, kind, root).finish(SECONDS)
                expect(x, expected if rank == root else data[rank], op, f"reduce to {root}")
        for root in (0, size - 1):
            x = data[rank].clone()
            call.broadcast(x, root).finish(SECONDS)
            assert torch.equal(x, data[root])
        whole = torch.empty(size * count)
        call.all_gather(whole, data[rank]).finish(SECONDS)
        assert torch.equal(whole, torch.cat(data))
        x = torch.empty(count // size)
        call.reduce_scatter(x, data[rank][: len(x) * size], ReduceOp.SUM).finish(SECONDS)
        begin = rank * len(x)
        expect(
            x, reduced_in_numpy([one[begin:][: len(x)] for one in data], "SUM"), "SUM", "scatter"
        )
        return found

    outcomes = pool.run(program, len(hosts), backend=None, hosts=hosts)
    assert all(one == outcomes[0] for one in outcomes)


def test_sums_are_the_same_bits_on_all_members_and_from_run_to_run(pool: Pool) -> None:
    def program() -> set[str]:
        wire = md.group.WORLD.open_channel("cpu").communicator
        data = torch.randn(700_001, generator=torch.Generator().manual_seed(wire.rank))
        seen = set()
        for _ in range(4):
            x = data.clone()
            Direct(wire, SECONDS, waits=True).all_reduce(x, ReduceOp.SUM).finish(SECONDS)
            seen.add(hashlib.sha256(bits(x)).hexdigest())
        return seen

    for hosts in ("ABBA", "AAAB"):
        outcomes = pool.run(program, 4, backend=None, hosts=hosts)
        outcomes += pool.run(program, 4, backend=None, hosts=hosts)
        assert len(set.union(*outcomes)) == 1


def test_an_average_of_large_halves_is_no_infinity(pool: Pool) -> None:
    def program() -> list[list[float]]:
        wire = md.group.WORLD.open_channel("cpu").communicator
        call = Direct(wire, SECONDS, waits=True)
        full = torch.full((3,), 40000.0 + 32 * wire.rank, dtype=torch.float16)
        one, two, three = full.clone(), full.clone(), torch.empty(1, dtype=torch.float16)
        call.all_reduce(one, ReduceOp.AVG).finish(SECONDS)
        call.reduce(two, ReduceOp.AVG, 1).finish(SECONDS)
        call.reduce_scatter(three, full, ReduceOp.AVG).finish(SECONDS)
        return [one.tolist(), two.tolist() if wire.rank == 1 else [], three.tolist()]

    outcomes = pool.run(program, 3, backend=None, hosts="ABA")
    mean = [40032.0] * 3
    assert outcomes == [[mean, mean if rank == 1 else [], mean[:1]] for rank in range(3)]


def test_parts_of_an_exchange_may_have_any_shapes(pool: Pool) -> None:
    def program() -> list[list[float]]:
        outputs = [torch.zeros(2, 3) for _ in range(3)]
        md.all_to_all(outputs, [torch.full((3, 2), float(md.get_rank()))] * 3)
        return [one.flatten().tolist() for one in outputs]

    expected = [[float(rank)] * 6 for rank in range(3)]
    assert pool.run(program, 3, hosts="ABA", backend=None) == [expected] * 3
