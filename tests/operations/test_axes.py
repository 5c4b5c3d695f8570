"""Every collective on mesh axes: of 2-D and 3-D meshes, flattened, permuted, overlapping, of a
part.

What a group's members are comes from NumPy alone: the ranks that share all other coordinates, in
the order of their coordinates along the group's own axes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import meshdist as md
from tests.operations.cases import BACKENDS, SEED, Outcome, cases_by_operation, complaint, perform
from tests.operations.plans import Case
from tests.pool import Pool


@dataclass(frozen=True)
class Place:
    """Some axes of one arrangement of ranks: where a collective is called.

    Args:
        ranks: the mesh's ranks, nested.
        names: of its axes.
        axes: the names that ``mesh[...]`` is asked for.
    """

    ranks: Any
    names: tuple[str, ...]
    axes: tuple[str, ...]

    def members_with(self, rank: int) -> list[int] | None:
        """The ranks that ``rank`` talks to, itself included, in group order; None outside."""
        array = np.array(self.ranks)
        found = np.argwhere(array == rank)
        if not len(found):
            return None
        numbers = [self.names.index(axis) for axis in self.axes]
        place: list[Any] = list(found[0])
        for number in numbers:
            place[number] = slice(None)
        kept = sorted(numbers)  # the order of the dims that are left after indexing
        block = array[tuple(place)].transpose([kept.index(number) for number in numbers])
        return [int(one) for one in block.reshape(-1)]


def arranged(shape: Sequence[int], order: Sequence[int] | None = None) -> Any:
    ranks = np.arange(int(np.prod(shape))) if order is None else np.array(order)
    return ranks.reshape(shape).tolist()


DP_TP = ("dp", "tp")
THREE = ("pp", "dp", "tp")
PLACES = {
    "rows of 2 x 2": Place(arranged((2, 2)), DP_TP, ("tp",)),
    "columns of 2 x 2": Place(arranged((2, 2)), DP_TP, ("dp",)),
    "all of 2 x 2": Place(arranged((2, 2)), DP_TP, ("dp", "tp")),
    "all of 2 x 2, columns first": Place(arranged((2, 2)), DP_TP, ("tp", "dp")),
    "a permuted 2 x 2": Place(arranged((2, 2), [3, 0, 2, 1]), DP_TP, ("tp",)),
    "columns of a permuted 2 x 2": Place(arranged((2, 2), [3, 0, 2, 1]), DP_TP, ("dp",)),
    "all of a permuted 2 x 2": Place(arranged((2, 2), [3, 0, 2, 1]), DP_TP, ("dp", "tp")),
    "an axis of one": Place(arranged((4, 1)), DP_TP, ("tp",)),
    "two of four ranks": Place([[3], [1]], DP_TP, ("dp",)),
    "three of four ranks": Place([2, 0, 3], ("dp",), ("dp",)),
}
PLACES_OF_EIGHT = {
    "the first axis of 2 x 2 x 2": Place(arranged((2, 2, 2)), THREE, ("pp",)),
    "the middle axis of 2 x 2 x 2": Place(arranged((2, 2, 2)), THREE, ("dp",)),
    "the last axis of 2 x 2 x 2": Place(arranged((2, 2, 2)), THREE, ("tp",)),
    "outer axes of 2 x 2 x 2": Place(arranged((2, 2, 2)), THREE, ("pp", "tp")),
    "inner axes of 2 x 2 x 2": Place(arranged((2, 2, 2)), THREE, ("dp", "tp")),
    "all axes of 2 x 2 x 2": Place(arranged((2, 2, 2)), THREE, ("pp", "dp", "tp")),
    "axes of 2 x 1 x 4": Place(arranged((2, 1, 4)), THREE, ("dp", "tp")),
    "a permuted 2 x 2 x 2": Place(
        arranged((2, 2, 2), [5, 2, 7, 0, 1, 6, 3, 4]), THREE, ("pp", "tp")
    ),
    "four of eight ranks": Place(arranged((2, 2), [6, 1, 4, 3]), DP_TP, ("dp",)),
}


def test_the_oracle_s_groups() -> None:
    """Written out once, so that the oracle itself can be read."""
    assert [PLACES["columns of 2 x 2"].members_with(r) for r in range(4)] == [
        [0, 2],
        [1, 3],
        [0, 2],
        [1, 3],
    ]
    assert PLACES["all of 2 x 2, columns first"].members_with(0) == [0, 2, 1, 3]
    assert PLACES["a permuted 2 x 2"].members_with(0) == [3, 0]
    assert PLACES["columns of a permuted 2 x 2"].members_with(0) == [0, 1]
    assert PLACES["three of four ranks"].members_with(1) is None
    assert PLACES_OF_EIGHT["outer axes of 2 x 2 x 2"].members_with(3) == [2, 3, 6, 7]


def cases_of(size: int, num_per_operation: int, name: str = "") -> list[Case]:
    """Some cases of every collective for groups of ``size`` members; others for each ``name``."""
    draw = random.Random(f"{SEED} {size} {name}")
    by_operation: dict[str, list[Case]] = {}
    for (operation, _), cases in cases_by_operation(size).items():
        by_operation.setdefault(operation, []).extend(cases)
    return [
        case for cases in by_operation.values() for case in draw.sample(cases, num_per_operation)
    ]


def on_axes(place: Place, cases: list[Case]) -> list[Outcome] | None:
    """Run ``cases`` on this rank's group of ``place``; None outside the mesh."""
    mesh = md.DeviceMesh("cpu", place.ranks, mesh_dim_names=place.names)
    members = place.members_with(md.get_rank())
    if members is None:
        return None
    group = mesh[place.axes if len(place.axes) > 1 else place.axes[0]]
    outcomes = []
    for case in cases:
        outcomes.append(perform(case, group, members))
        if outcomes[-1].kind == "failed":
            break
    return outcomes


def on_many_axes(calls: list[tuple[Place, list[Case]]]) -> list[list[Outcome] | None]:
    return [on_axes(*call) for call in calls]


def judge_groups(place: Place, cases: list[Case], found: list[list[Outcome] | None]) -> None:
    told = []
    for rank, outcomes in enumerate(found):
        members = place.members_with(rank)
        if members is None:
            assert outcomes is None
        elif rank == members[0]:
            of_members = [found[member] or [] for member in members]
            num_done = min(len(one) for one in of_members)
            for number, case in enumerate(cases[:num_done]):
                text = complaint(case, [one[number] for one in of_members], members)
                if text:
                    told.append(f"{case!r} on ranks {members} of {place!r}\n{text}")
            if num_done < len(cases):
                told.append(f"only {num_done} of {len(cases)} cases were run on ranks {members}")
    assert not told, f"{len(told)} cases went wrong\n" + "\n".join(told[:5])


def size_of(place: Place) -> int:
    shape = np.array(place.ranks).shape
    return int(np.prod([shape[place.names.index(axis)] for axis in place.axes]))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=[pytest.mark.soak] if backend == "mpi" else [])
        for backend in BACKENDS
    ],
)
def test_every_collective_on_axes(backend: str, pool: Pool) -> None:
    calls = [(place, cases_of(size_of(place), 1, name)) for name, place in PLACES.items()]
    found = BACKENDS[backend](pool, on_many_axes, 4, calls)
    for (place, cases), *outcomes in zip(calls, *found, strict=True):
        judge_groups(place, cases, outcomes)


@pytest.mark.parametrize("name", PLACES_OF_EIGHT)
def test_every_collective_on_axes_of_three(name: str) -> None:
    place = PLACES_OF_EIGHT[name]
    cases = cases_of(size_of(place), 1, name)
    judge_groups(place, cases, md.simulate(on_axes, 8, args=(place, cases)))


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*PLACES, *PLACES_OF_EIGHT])
def test_many_cases_on_axes(backend: str, name: str, pool: Pool) -> None:
    place = {**PLACES, **PLACES_OF_EIGHT}[name]
    cases = cases_of(size_of(place), 40, name)
    num_ranks = 4 if name in PLACES else 8
    judge_groups(place, cases, BACKENDS[backend](pool, on_axes, num_ranks, place, cases))


# -- other ways to come to a group ----------------------------------------------------------------


def on_derived(kind: str, cases: list[Case]) -> tuple[list[int], list[Outcome]]:
    """Run ``cases`` on a group that the mesh algebra made; return its members too."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=DP_TP)
    group: Any
    if kind == "flattened":
        group = mesh.flatten(("dp", "tp"), "all")["all"]
    elif kind == "transposed":
        group = mesh.transpose("tp", "dp")["dp"]
    elif kind == "unflattened":
        flat = md.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        group = flat.unflatten("world", (2, 2), ("ep", "etp"))["ep"]
    elif kind == "concatenated":
        group = md.DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])["tp", "dp"]
    elif kind == "a process group":
        group = mesh.get_group("tp")
    else:
        group = md.new_group([2, 0, 3, 1], sort_ranks=False)
    members = list(group.ranks if isinstance(group, md.ProcessGroup) else group.mesh.reshape(-1))
    members = [int(member) for member in members]
    return members, [perform(case, group, members) for case in cases]


DERIVED = {
    "flattened": [[0, 1, 2, 3]],
    "transposed": [[0, 2], [1, 3]],
    "unflattened": [[0, 2], [1, 3]],
    "concatenated": [[0, 2, 1, 3]],
    "a process group": [[0, 1], [2, 3]],
    "a new group": [[2, 0, 3, 1]],
}


def on_all_derived(by_kind: dict[str, list[Case]]) -> dict[str, tuple[list[int], list[Outcome]]]:
    return {kind: on_derived(kind, cases) for kind, cases in by_kind.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_on_derived_groups(backend: str, pool: Pool) -> None:
    by_kind = {kind: cases_of(len(lists[0]), 1, kind) for kind, lists in DERIVED.items()}
    found = BACKENDS[backend](pool, on_all_derived, 4, by_kind)
    for kind, cases in by_kind.items():
        for members in DERIVED[kind]:
            assert [found[member][kind][0] for member in members] == [members] * len(members)
            for number, case in enumerate(cases):
                outcomes = [found[member][kind][1][number] for member in members]
                assert not complaint(case, outcomes, members), (kind, case)


def on_two_factorisations(cases: list[Case], doubled: list[Case]) -> list[list[Outcome]]:
    """dp x tp and ep x etp over one world: collectives of both in turn."""
    first = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=DP_TP)
    second = md.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("ep", "etp"))
    rank = md.get_rank()
    found: list[list[Outcome]] = [[], [], []]
    for case, twin in zip(cases, doubled, strict=True):
        found[0].append(perform(case, first["dp"], [rank % 2, rank % 2 + 2]))
        pair = [0, 3] if rank in (0, 3) else [1, 2]
        found[1].append(perform(case, second["etp"], pair))
        found[2].append(perform(twin, second["ep", "etp"], [0, 3, 1, 2]))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapping_factorisations_of_one_world(backend: str, pool: Pool) -> None:
    cases = cases_of(2, 1)
    doubled = [replace(case, size=4) for case in cases]
    found = BACKENDS[backend](pool, on_two_factorisations, 4, cases, doubled)
    groups = [[[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 3, 1, 2]]]
    for which, lists in enumerate(groups):
        for members in lists:
            for number, case in enumerate(doubled if which == 2 else cases):
                outcomes = [found[member][which][number] for member in members]
                assert not complaint(case, outcomes, members), (case, members)
