"""Prices of all candidates are exact, and the committed table of ratios is what plans do."""

from __future__ import annotations

from itertools import product

import pytest

import meshdist as md
from meshdist.sharding.placement_diff import bare, change_between
from meshdist.sharding.plans import make_plan
from meshdist.sharding.routes import (
    DEFAULT_LINK,
    Link,
    Sum,
    default_link,
    find_route,
    num_received_by_all,
    phase_steps,
)
from meshdist.sharding.steps import CollectiveStep
from tests.sharding.cases import placed
from tests.sharding.interpreter import coordinates
from tests.sharding.ratios import CASES, KINDS, TABLE, random_cases, ratios, written


def test_the_price_of_a_route_is_what_its_steps_receive() -> None:
    for source, target in random_cases(3, 150):
        links = (DEFAULT_LINK,) * len(source.mesh_sizes)
        if any(axis in source.free_axes for axis in target.unreduced):
            continue  # ranks beyond coordinate 0 of such an axis do nothing
        for stage in find_route(bare(source), bare(target), links):
            steps = [s for r in coordinates(source.mesh_sizes) for s in phase_steps(stage, r)]
            received = sum(step.price.received for step in steps)
            assert received == stage.num_received


def test_partial_sums_are_priced_by_their_cheapest_sum() -> None:
    partial_sums = placed((4,), (8,), (), unreduced=(0,))
    # A sum of which each of four ranks keeps two elements: 4 * 3 * 2. To keep all of it, once more.
    assert num_received_by_all(partial_sums, placed((4,), (8,), (0,))) == 24
    assert num_received_by_all(partial_sums, placed((4,), (8,), ())) == 48


def test_the_best_route_is_no_worse_than_the_simple_ones() -> None:
    for source, target in random_cases(4, 60):
        mesh = source.mesh_sizes
        here, there = bare(source), bare(target)
        if any(axis in here.free_axes for axis in there.unreduced):
            continue
        best = find_route(here, there, (DEFAULT_LINK,) * len(mesh))
        direct = change_between(here, there)
        summed = Sum(here, direct.summed)
        assert sum(stage.num_received for stage in best) <= direct.num_received
        middle = placed_without(here, direct.summed)
        simple = summed.num_received + change_between(middle, there).num_received
        assert sum(stage.num_received for stage in best) <= simple


def placed_without(placement, axes):
    kept = tuple(axis for axis in placement.unreduced if axis not in axes)
    return type(placement)(placement.mesh_sizes, placement.shape, placement.dims, kept)


def test_ratios_of_new_cases_are_those_of_the_table() -> None:
    found = ratios(2, 150)
    assert set(found[KINDS[0]]) == {1.0}
    assert set(found[KINDS[1]]) == {1.0}
    assert 1 <= max(found[KINDS[2]]) <= 1.5


def test_the_table_is_committed() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if line[:2] == "| "}
    assert sum(int(rows[kind][0]) for kind in KINDS) == CASES
    assert [rows[kind][1].strip() for kind in KINDS[:2]] == ["100.0%", "100.0%"]
    assert float(rows[KINDS[2]][-1]) <= 1.5
    exact = [cell for name, cells in rows.items() if name.startswith("[") for cell in cells]
    assert {cell.rpartition(", ")[2].strip() for cell in exact} == {"1.000"}


@pytest.mark.soak
def test_the_table_is_what_the_script_writes() -> None:
    assert TABLE.read_text(encoding="utf-8") == written()


def test_free_axes_share_a_sum() -> None:
    mesh = (4, 2)
    source, target = placed(mesh, (16,), (), unreduced=(0,)), placed(mesh, (16,), ())
    steps = make_plan(source, target, (0, 1)).steps
    assert [step.name for step in steps] == ["take", "all-reduce", "all-gather"]
    assert steps[1] == CollectiveStep((8,), (0,), 4, 0, "all_reduce", (8,))


def test_a_scalar_is_all_reduced() -> None:
    mesh = (2, 4)
    source, target = placed(mesh, (), unreduced=(1,)), placed(mesh, ())
    assert make_plan(source, target, (0, 1)).steps == (
        CollectiveStep((), (1,), 4, 1, "all_reduce", ()),
    )


def test_many_free_axes_are_sliced_all_at_once_or_by_kind() -> None:
    mesh = (2,) * 6
    source = placed(mesh, (64, 64), (), (), unreduced=(0,))
    plan = make_plan(source, placed(mesh, (64, 64), (1,), ()), (0,) * 6)
    assert plan.bytes_received(1) == 64 * 32


OTHER_LINKS = {default_link(w, spans_hosts=far) for w in ("gloo", "mpi", "nccl") for far in (0, 1)}


@pytest.mark.parametrize(
    "link",
    [
        DEFAULT_LINK,
        *(pytest.param(link, marks=pytest.mark.soak) for link in OTHER_LINKS),
        pytest.param(Link(0, float("inf")), marks=pytest.mark.soak),
        pytest.param(Link(1.3e-6, 7e10), marks=pytest.mark.soak),
    ],
)
def test_of_equal_bytes_and_times_one_all_reduce_is_taken(link: Link) -> None:
    for p, a, b in product(range(2, 9), range(1, 17), range(1, 17)):
        mesh = md.Layout.from_shape((p,), ("tp",))
        steps = md.plan("a b {U:tp} -> a b", mesh=mesh, a=a, b=b, links=link).steps
        assert [step.name for step in steps] == ["all-reduce"], (p, a, b)
