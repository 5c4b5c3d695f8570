"""Plans of all ranks, carried out on NumPy arrays, against slices of the whole array."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from meshdist.mesh.layout import Layout
from meshdist.mesh.placement import Placement, split_dim
from meshdist.sharding import placement_diff, plans, routes
from meshdist.sharding.plans import make_plan
from meshdist.sharding.routes import Link
from meshdist.sharding.steps import CollectiveStep, Exchange, Pad
from tests.sharding.cases import (
    assert_lies,
    ends_on_one_rank,
    extends_or_shortens,
    fewest_received,
    lacking,
    pairs,
    placed,
    shards,
    summed_axes,
    whole_array,
)
from tests.sharding.interpreter import Array, Coordinate, coordinates, kinds_of, run

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def several(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=SLOW)


def plans_of(source: Placement, target: Placement) -> dict[Coordinate, plans.Plan]:
    return {rank: make_plan(source, target, rank) for rank in coordinates(source.mesh_sizes)}


def carried_out(all_plans: dict[Coordinate, plans.Plan], held: dict[Coordinate, Array]) -> Any:
    sizes = next(iter(all_plans.values())).source.mesh_sizes
    return run({rank: plan.steps for rank, plan in all_plans.items()}, held, sizes)


def check_agreement(all_plans: dict[Coordinate, plans.Plan]) -> None:
    """Compare what ranks' plans answer on all ranks: callers decide by it what they send."""
    assert len({(plan.is_identity, plan.grows) for plan in all_plans.values()}) == 1
    first = next(iter(all_plans.values()))
    if first.is_identity:
        assert not any(plan.steps for plan in all_plans.values())
    held = [
        sum(math.prod(end.local_shape(rank)) for rank in all_plans)
        for end in (first.source, first.target)
    ]
    assert first.grows == (held[0] < held[1])


def check_pair(pair: tuple[Placement, Placement]) -> None:
    source, target = pair
    whole = whole_array(source.shape)
    there = plans_of(source, target)
    assert_lies(target, whole, carried_out(there, shards(source, whole)))
    back = {rank: plan.T for rank, plan in there.items()}
    cotangent = whole_array(source.shape, 1)
    found = carried_out(back, shards(target.transposed(), cotangent))
    assert_lies(source.transposed(), cotangent, found)
    for every in (there, back):
        check_agreement(every)
    received = [plan.bytes_received(1) for plan in there.values()]
    assert sum(received) == sum(plan.bytes_sent(1) for plan in there.values())
    if not summed_axes(source, target):
        for rank, plan in there.items():
            assert plan.bytes_received(1) == lacking(source, target, rank).sum()
    else:
        bound = fewest_received(source, target)
        assert sum(received) >= bound
        if not source.shape:
            return  # a scalar cannot be cut, so that replicas cannot share its sum
        assert sum(received) <= 1.5 * bound
        if ends_on_one_rank(source, target) or extends_or_shortens(source, target):
            assert sum(received) == bound


@several(300)
@given(pairs())
def test_every_element_arrives_once_and_bytes_are_the_fewest(pair):
    check_pair(pair)


@pytest.mark.soak
@several(5000)
@given(pairs())
def test_every_element_arrives_once_and_bytes_are_the_fewest_at_length(pair):
    check_pair(pair)


@several(150)
@given(pairs(kinds=("U", "UR"), most_dims=2))
def test_sums_reach_the_bound_where_they_can(pair):
    check_pair(pair)


@several(100)
@given(pairs(most_dims=2))
def test_a_plan_and_its_transpose_are_adjoint(pair):
    """<Ax, y> = <x, A'y>, counted once along axes where both sides are equal on all ranks."""
    source, target = pair
    x = shards(source, whole_array(source.shape))
    y = shards(target.transposed(), whole_array(source.shape, 1))
    there = plans_of(source, target)
    back = {rank: plan.T for rank, plan in there.items()}

    def product(placement: Placement, one: Any, other: Any) -> int:
        kinds = {*placement.unreduced, *placement.reduced, *placement.cut_axes}
        alike = [axis for axis in range(len(placement.mesh_sizes)) if axis not in kinds]
        ranks = [rank for rank in one if not any(rank[axis] for axis in alike)]
        return sum(int((one[rank] * other[rank]).sum()) for rank in ranks)

    assert product(target, carried_out(there, x), y) == product(source, x, carried_out(back, y))
    assert all(plan.T.T.steps == plan.steps for plan in there.values())


# -- the load of senders ------------------------------------------------------------------------


@several(150)
@given(st.data())
def test_no_sender_sends_much_more_than_the_largest_receiver_takes(data):
    meshes = [(2, 2), (2, 4), (4, 2), (3, 2), (4, 4), (2, 2, 2), (2, 3, 2), (2, 2, 4)]
    mesh = data.draw(st.sampled_from(meshes))
    shape = (144, 288)[: data.draw(st.integers(1, 2))]  # so that boxes are cut into equal parts
    drawn = [data.draw(balanced(mesh, shape)) for _ in range(2)]
    there = plans_of(*drawn)
    most_in = max(plan.bytes_received() for plan in there.values())
    most_out = max(plan.bytes_sent() for plan in there.values())
    is_divided = bool(placement_diff.change_between(*drawn).dividing)
    assert most_out <= (4 / 3 if is_divided else 1) * most_in


@st.composite
def balanced(draw: Any, mesh: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
    order = draw(st.permutations(range(len(mesh))))
    homes = [draw(st.integers(-1, len(shape) - 1)) for _ in order]
    axes = [
        tuple(a for a, home in zip(order, homes, strict=True) if home == dim)
        for dim in range(len(shape))
    ]
    return placed(mesh, shape, *axes)


# -- transitions that have names ----------------------------------------------------------------

WHOLE = (16, 16)


def at(
    rows: tuple[int, ...], columns: tuple[int, ...], *unreduced: int
) -> Callable[..., Placement]:
    return lambda mesh: placed(mesh, WHOLE, rows, columns, unreduced=unreduced)


@pytest.mark.parametrize(
    ("source", "target", "steps", "fraction"),
    [
        # the received part of the whole array, as a mean over the ranks of a (2, 2) mesh
        pytest.param(at((0,), (1,)), at((1,), (0,)), "exchange", 1 / 8, id="[S0,S1]->[S1,S0]"),
        pytest.param(at((0,), ()), at((1,), ()), "exchange", 1 / 4, id="[S0,R]->[R,S0]"),
        pytest.param(at((0, 1), ()), at((), (0, 1)), "all-to-all", 3 / 16, id="[S0,S0]->[S1,S1]"),
        pytest.param(
            at((1,), (), 0),
            at((0, 1), ()),
            "summed exchange",
            3 / 8,
            id="[P,S0]->[S0,S0]",
        ),
        pytest.param(at((0,), ()), at((), (0,)), "all-to-all", 1 / 4, id="[S0,R]->[S1,R]"),
        pytest.param(at((0, 1), ()), at((1,), ()), "exchange", 3 / 8, id="[S0,S0]->[R,S0]"),
        pytest.param(at((), (), 0, 1), at((), ()), "all-reduce", 3 / 2, id="[P,P]->[R,R]"),
        pytest.param(at((0, 1), ()), at((), ()), "all-gather", 3 / 4, id="[S0,S0]->[R,R]"),
        pytest.param(
            at((), (), 0, 1),
            at((0, 1), ()),
            "reduce-scatter",
            3 / 4,
            id="[P,P]->[S0,S0]",
        ),
        pytest.param(at((), (), 0), at((), ()), "all-reduce", 1, id="[P,R]->[R,R]"),
        pytest.param(at((), (), 0), at((0,), ()), "reduce-scatter", 1 / 2, id="[P,R]->[S0,R]"),
        pytest.param(at((), (), 0), at((0, 1), ()), "reduce-scatter", 1 / 4, id="[P,R]->[S0,S0]"),
        pytest.param(
            at((), (), 0), at((1,), (0,)), ["take", "reduce-scatter"], 1 / 4, id="[P,R]->[S1,S0]"
        ),
        pytest.param(at((1,), (), 0), at((1,), ()), "all-reduce", 1 / 2, id="[P,S0]->[R,S0]"),
        pytest.param(
            at((1,), (), 0),
            at((), (0,)),
            ["reduce-scatter", "all-gather"],
            1 / 2,
            id="[P,S0]->[S1,R]",
        ),
        pytest.param(
            at((1,), (), 0),
            at((), ()),
            ["all-reduce", "all-gather"],
            1,
            id="[P,S0]->[R,R]",
        ),
        pytest.param(at((0,), (1,)), at((), ()), "all-gather", 3 / 4, id="[S0,S1]->[R,R]"),
        pytest.param(
            at((0, 1), ()), at((), (1,)), ["all-to-all", "all-gather"], 3 / 8, id="[S0,S0]->[R,S1]"
        ),
        pytest.param(at((0,), ()), at((0, 1), ()), "take", 0, id="[S0,R]->[S0,S0]"),
        pytest.param(at((), ()), at((0,), (1,)), "take", 0, id="[R,R]->[S0,S1]"),
        pytest.param(at((0,), ()), at((), (), 0), "pad", 0, id="[S0,R]->[P,R]"),
        pytest.param(at((0,), ()), at((1,), (), 0), "pad", 0, id="[S0,R]->[P,S0]"),
        pytest.param(at((0,), ()), at((), (1,), 0), ["take", "pad"], 0, id="[S0,R]->[P,S1]"),
        pytest.param(at((0,), ()), at((0,), ()), [], 0, id="[S0,R]->[S0,R]"),
        pytest.param(at((), (), 1), at((), (), 1), [], 0, id="[R,P]->[R,P]"),
        pytest.param(at((1, 0), ()), at((), (), 0), ["exchange"], 1 / 4, id="a padded minor axis"),
    ],
)
def test_transitions(source, target, steps, fraction):
    source, target = source((2, 2)), target((2, 2))
    there = plans_of(source, target)
    expected = steps if isinstance(steps, list) else [steps]
    received = sum(plan.bytes_received(1) for plan in there.values())
    kinds = {kinds_of(plan.steps) for plan in there.values()}
    assert received == 4 * 256 * fraction
    assert tuple(expected) in kinds
    whole = whole_array(WHOLE)
    assert_lies(target, whole, carried_out(there, shards(source, whole)))


def test_values_that_become_unreduced_or_reduced_send_nothing() -> None:
    mesh, shape = (2, 2), (6,)
    free = placed(mesh, shape, ())
    unreduced = placed(mesh, shape, (), unreduced=(1,))
    reduced = placed(mesh, shape, (), reduced=(1,))
    assert make_plan(free, reduced, (1, 1)).steps == ()
    assert make_plan(reduced, free, (1, 1)).steps == ()
    for start in (free, reduced):
        assert make_plan(start, unreduced, (1, 0)).steps == ()
        assert make_plan(start, unreduced, (1, 1)).steps == (Pad((6,), None),)
    assert make_plan(unreduced, reduced, (1, 1)).T.source == reduced.transposed()
    (summed,) = make_plan(unreduced, free, (1, 1)).steps
    assert summed == CollectiveStep((6,), (1,), 2, 1, "all_reduce", (6,))
    assert make_plan(reduced, free, (1, 1)).T.steps == (Pad((6,), None),)
    assert make_plan(free, reduced, (1, 1)).T.steps == (summed,)


def test_groups_are_the_least_axes_in_mesh_order() -> None:
    mesh = (2, 2, 2)
    source = placed(mesh, (16, 16), (2, 1, 0), ())
    assert make_plan(source, placed(mesh, (16, 16), (2, 1), ()), (0, 0, 0)).groups == ((0,),)
    assert make_plan(source, placed(mesh, (16, 16), (2,), ()), (0, 0, 0)).groups == ((0, 1),)
    assert make_plan(source, placed(mesh, (16, 16), (2,), (1,)), (0, 0, 0)).groups == ((1,), (0,))
    assert make_plan(source, placed(mesh, (16, 16), (2, 0, 1), ()), (0, 0, 0)).groups == ((0, 1),)
    assert make_plan(source, source, (0, 0, 0)).groups == ()


def test_replicas_that_would_idle_send_their_part() -> None:
    mesh = (2, 2)
    there = plans_of(placed(mesh, (8,), (0,)), placed(mesh, (8,), (1,)))
    assert there[0, 1].steps[0].receives == ((2, ((0, 2),)), (3, ((2, 4),)))
    assert {plan.bytes_sent(1) for plan in there.values()} == {2}
    assert {plan.bytes_received(1) for plan in there.values()} == {0, 4}


def test_sums_are_added_in_group_order() -> None:
    mesh = (2, 2)
    source = placed(mesh, (8,), (1,), unreduced=(0,))
    (step,) = make_plan(source, placed(mesh, (8,), (0, 1)), (1, 0)).steps
    assert isinstance(step, Exchange) and step.is_summed
    assert step.sums == ((((0, 2),), (1, 3)),)
    (step,) = make_plan(source, placed(mesh, (8,), (0, 1)), (1, 1)).steps
    assert step.sums == ((((0, 2),), (1, 3)),)
    assert step.own == (((2, 4),), ((0, 2),))


def test_bytes_peak_and_time_follow_from_the_steps() -> None:
    mesh = (2, 4)
    plan = make_plan(
        placed(mesh, (8, 32), (), (1,)),
        placed(mesh, (8, 32), (1,), ()),
        (0, 3),
        links=(Link(1e-3, 1e3), Link(1e-6, 1e9)),
    )
    assert plan.bytes_received() == plan.bytes_sent() == 4 * 3 * 16
    assert plan.bytes_received(itemsize=2) == 2 * 3 * 16
    assert plan.estimated_s() == pytest.approx(3e-6 + 192e-9)
    assert plan.estimated_s((Link(0, 1), Link(0, 192))) == pytest.approx(1)
    # 64 elements before and afterwards, and the parts packed and received
    assert plan.peak_bytes() in (4 * 64 * 3, 4 * 64 * 4)
    same = make_plan(plan.source, plan.source, (0, 3))
    assert same.peak_bytes(itemsize=1) == 128  # a copy
    assert (same.bytes_received(), same.bytes_sent(), same.estimated_s()) == (0, 0, 0)


def test_peak_is_at_most_source_target_sent_and_received() -> None:
    for source, target in [
        (placed((2, 2), (16, 16), (0, 1), ()), placed((2, 2), (16, 16), (), (1,))),
        (placed((2, 2), (16, 16), (0,), (1,)), placed((2, 2), (16, 16), (1,), (0,))),
        (placed((2, 2), (16, 16), (), (0, 1)), placed((2, 2), (16, 16), (), ())),
    ]:
        for rank, plan in plans_of(source, target).items():
            ends = sum(math.prod(p.local_shape(rank)) for p in (source, target))
            moved = plan.bytes_received(1) + plan.bytes_sent(1)
            assert plan.peak_bytes(1) <= ends + max(moved, ends)


def test_links_decide_between_routes_of_equal_bytes() -> None:
    mesh = (2, 2)
    source, target = placed(mesh, (16, 16), (), (), unreduced=(0,)), placed(mesh, (16, 16), (), ())
    slow, quick = Link(1e-6, 1e6), Link(1e-6, 1e9)
    near = make_plan(source, target, (0, 0), links=(slow, quick))
    far = make_plan(source, target, (0, 0), links=(quick, slow))
    assert near.bytes_received() == far.bytes_received()
    assert near.groups == ((0,), (1,))  # half the bytes over the slow axis, the rest over the quick
    assert far.groups == ((0,),)


def test_equal_arguments_give_one_plan() -> None:
    source, target = placed((2,), (4,), (0,)), placed((2,), (4,), ())
    assert make_plan(source, target, (0,)) is make_plan(source, target, (0,))
    plan = make_plan(source, target, (0,))
    assert plan.T is make_plan(source, target, (0,)).T
    assert plan.T.T.op_name == plan.op_name and plan.T.T.steps == plan.steps
    assert repr(make_plan(source, target, (0,), op_name="b@dp -> b")) == (
        "<Plan 'b@dp -> b' at (0,): all-gather>"
    )
    assert repr(make_plan(source, source, (0,))) == "<Plan 'a plan' at (0,): nothing to do>"


def test_a_plan_explains_itself() -> None:
    mesh = Layout.from_shape((2, 2), ("dp", "tp"))
    source, target = (
        placed((2, 2), (7, 6), (1,), (), unreduced=(0,)),
        placed((2, 2), (7, 6), (), ()),
    )
    plan = make_plan(
        source, target, (1, 0), layout=mesh, op_name="rows@tp columns {U:dp} -> rows columns"
    )
    assert plan.explain(itemsize=8) == (
        "rows@tp columns {U:dp} -> rows columns\n"
        "  rank 2 (dp=1, tp=0) of mesh (dp=2, tp=2) holds 4 x 6\n"
        "  1. all-reduce over dp, 2 ranks: 4 x 6; 192 bytes in, 192 bytes out, 10 us\n"
        "  2. exchange boxes (1 in, 1 out) over tp, 2 ranks: 7 x 6; "
        "144 bytes in, 192 bytes out, 5 us\n"
        "  total: 336 bytes in, 384 bytes out, 1.0 KiB at peak, 15 us, at 8 bytes an element"
    )
    same = make_plan(target, target, (0, 0), layout=mesh, op_name="as it is").explain()
    assert "  this rank's part does not change\n" in same


# -- planning takes little time -----------------------------------------------------------------


def forget() -> None:
    for kept in (
        plans.make_plan,
        placement_diff.change_between,
        routes.find_route,
        split_dim,
    ):
        kept.cache_clear()


def planning_s(
    mesh: tuple[int, ...], source: Any, target: Any, *unreduced: int
) -> tuple[float, Any]:
    """The best CPU time of some cold plannings, on whose clock other work of the machine is not."""
    best, steps = math.inf, ()
    for _ in range(7):
        forget()
        here = placed(mesh, (4100, 4098), *source, unreduced=unreduced)
        there = placed(mesh, (4100, 4098), *target)
        start = time.thread_time()
        steps = make_plan(here, there, tuple(n - 1 for n in mesh)).steps
        best = min(best, time.thread_time() - start)
    return best, steps


TRANSITIONS = [
    (((0,), (1,)), ((1,), (0,)), ()),
    (((0, 1), ()), ((), (0, 1)), ()),
    (((0, 1), ()), ((1, 0), ()), ()),
    (((0,), ()), ((1,), ()), ()),
    (((0, 1), ()), ((1,), ()), ()),
    (((1,), ()), ((0, 1), ()), (0,)),
    (((1,), ()), ((), (1,)), (0,)),
    (((1,), ()), ((), (0,)), (0,)),
    (((), ()), ((), ()), (0, 1)),
    (((), ()), ((), ()), (0,)),
]


@pytest.mark.parametrize(("source", "target", "unreduced"), TRANSITIONS)
@pytest.mark.parametrize("mesh", [(2, 2), (4, 4), (2, 2, 4), (64, 64), (16, 16, 16), (512, 8)])
def test_planning_is_quick(mesh, source, target, unreduced):
    seconds, steps = planning_s(mesh, source, target, *unreduced)
    boxes = [step for step in steps if isinstance(step, Exchange)]
    peers = sum(max(len(step.sends), len(step.receives)) for step in boxes)
    limit = 1e-3 if math.prod(mesh) <= 16 else 10e-3 + 10e-6 * max(0, peers - 64)
    assert seconds < 6 * limit  # CPU time, but of a core that does other work beside it


def test_equal_exchanges_between_thousands_stay_in_product_form() -> None:
    mesh = (64, 64)
    source, target = placed(mesh, (4096, 8192), (0, 1), ()), placed(mesh, (4096, 8192), (), (0, 1))
    (step,) = make_plan(source, target, (3, 5)).steps
    assert isinstance(step, CollectiveStep) and step.name == "all-to-all"
    assert step.pack.view == (1, 64, 64, 2)
    assert np.prod(step.shape) == 8192
