"""Many collectives in flight at once, on groups that overlap; every result exact."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import meshdist as md
from tests.operations import oracle
from tests.operations.cases import (
    BACKENDS,
    SEED,
    Arguments,
    Outcome,
    cases_by_operation,
    complaint,
    finish_operation,
    start_operation,
)
from tests.operations.plans import OPERATIONS, Case, plan
from tests.pool import Pool

GROUPS = {
    "dp": [[0, 2], [1, 3]],
    "tp": [[0, 1], [2, 3]],
    "world": [[0, 1, 2, 3]],
}
ASYNC = [name for name, operation in OPERATIONS.items() if operation.takes_async]


def drawn(size: int, count: int, operation: str | None = None) -> list[Case]:
    """``count`` async cases of all collectives, or of one, for groups of ``size`` members."""
    draw = random.Random(f"{SEED} {size} {operation}")
    fit = [
        replace(case, is_async=True)
        for (name, op), cases in cases_by_operation(size).items()
        if name in ASYNC and operation in (None, name)
        for case in cases
        if op is None or oracle.has_meaning(op, case.dtype)
    ]
    return draw.choices(fit, k=count)


def in_flight(queues: dict[str, list[Case]], is_same_order: bool) -> dict[str, list[Outcome]]:
    """Start everything, then wait for everything, each rank in an order of its own.

    Collectives of one group are started in one order everywhere; the groups take turns differently
    on every rank, or alike where ``is_same_order``.
    """
    rank = md.get_rank()
    groups: dict[str, Any] = {"world": None}
    if len(queues) > 1:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        groups.update(dp=mesh["dp"], tp=mesh["tp"])
    members = {name: next(one for one in lists if rank in one) for name, lists in GROUPS.items()}
    turns = [name for name, cases in queues.items() for _ in cases]
    random.Random(SEED if is_same_order else rank).shuffle(turns)
    place = dict.fromkeys(queues, 0)
    started = []
    for name in turns:
        case = queues[name][place[name]]
        place[name] += 1
        arguments = Arguments(case, plan(case, members[name])[members[name].index(rank)])
        work = start_operation(case, arguments.values, groups[name], members[name])
        started.append((name, case, arguments, work))
    order = list(range(len(started)))
    random.Random(100 + rank).shuffle(order)
    for number in order:
        finish_operation(started[number][1], started[number][3])
    outcomes: dict[str, list[Outcome]] = {name: [] for name in queues}
    for name, _, arguments, _ in started:
        outcomes[name].append(Outcome("held", "", arguments.back(), arguments.are_gaps_untouched()))
    return outcomes


def judge(queues: dict[str, list[Case]], found: list[dict[str, list[Outcome]]]) -> None:
    told = []
    for name, lists in GROUPS.items():
        for members in lists:
            for number, case in enumerate(queues.get(name, [])):
                outcomes = [found[member][name][number] for member in members]
                text = complaint(case, outcomes, members)
                if text:
                    told.append(f"number {number} on {name}, ranks {members}: {case!r}\n{text}")
    assert not told, f"{len(told)} collectives went wrong\n" + "\n".join(told[:5])


def queues_of(count: int) -> dict[str, list[Case]]:
    third = count // 3
    pairs = drawn(2, 2 * third)
    return {"dp": pairs[:third], "tp": pairs[third:], "world": drawn(4, count - 2 * third)}


@pytest.mark.parametrize("is_same_order", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_in_flight_over_three_overlapping_groups(
    backend: str, is_same_order: bool, pool: Pool
) -> None:
    queues = queues_of(60)
    judge(queues, BACKENDS[backend](pool, in_flight, 4, queues, is_same_order))


@pytest.mark.soak
@pytest.mark.parametrize("is_same_order", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_collectives_in_flight_over_three_overlapping_groups(
    backend: str, is_same_order: bool, pool: Pool
) -> None:
    queues = queues_of(1000)
    judge(queues, BACKENDS[backend](pool, in_flight, 4, queues, is_same_order))


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_of_each_collective_in_flight(backend: str, pool: Pool) -> None:
    queues = {operation: drawn(4, 8, operation) for operation in ASYNC}
    judge_operations(queues, BACKENDS[backend](pool, one_operation_at_a_time, 4, queues))


@pytest.mark.soak
@pytest.mark.parametrize("operation", ASYNC)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_of_each_collective_in_flight(backend: str, operation: str, pool: Pool) -> None:
    queues = {operation: drawn(4, 1000, operation)}
    judge_operations(queues, BACKENDS[backend](pool, one_operation_at_a_time, 4, queues))


def one_operation_at_a_time(queues: dict[str, list[Case]]) -> dict[str, list[Outcome]]:
    return {
        operation: in_flight({"world": cases}, True)["world"] for operation, cases in queues.items()
    }


def judge_operations(queues: dict[str, list[Case]], found: list[dict[str, list[Outcome]]]) -> None:
    for operation, cases in queues.items():
        judge({"world": cases}, [{"world": one[operation]} for one in found])
