"""``md.plan``: specs, patterns, meshes and what it rejects."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meshdist as md
from meshdist import NamedSharding, P
from meshdist.errors import (
    ArgumentError,
    AxisError,
    KindError,
    MeshError,
    NotInGroupError,
    PatternError,
    ShapeError,
)
from meshdist.mesh.layout import Layout
from meshdist.sharding.planner import mesh_links
from meshdist.sharding.routes import DEFAULT_LINK, Link, default_link
from meshdist.sharding.steps import Exchange
from tests.sharding.cases import assert_lies, shards, whole_array
from tests.sharding.interpreter import run

MESH = Layout.from_shape((2, 4), ("dp", "tp"))


def test_specs_and_patterns_give_the_same_steps() -> None:
    by_spec = md.plan(P("dp", "tp"), P("dp", None, reduced={"tp"}), MESH, (8, 12), rank=6)
    by_text = md.plan("b@dp d@tp -> b@dp d {R:tp}", mesh=MESH, shape=(8, 12), rank=6)
    by_size = md.plan("b@dp d@tp -> b@dp d {R:tp}", mesh=MESH, b=8, d=12, rank=6)
    shardings = (NamedSharding(MESH, P("dp", "tp")), NamedSharding(MESH, P("dp", reduced={"tp"})))
    by_sharding = md.plan(*shardings, shape=(8, 12), rank=6)
    assert by_spec.steps == by_text.steps == by_size.steps == by_sharding.steps
    assert by_text is by_size
    assert by_spec.steps[0].name == "all-gather"
    assert by_spec.steps[0].group_rank == 2
    assert by_spec.layout is MESH


def test_titles_tell_plans_apart() -> None:
    assert md.plan("b@dp -> b", mesh=MESH, b=8).op_name == "b@dp -> b of shape (8,)"
    plan = md.plan(P("dp"), P(None, unreduced={"tp"}), MESH, (8,))
    assert plan.op_name == f"{P('dp')!r} -> {P(None, unreduced={'tp'})!r} of shape (8,)"
    assert plan.T.op_name == f"transpose of {plan.op_name}"
    few = NamedSharding(MESH, P("dp"), shard_sizes={0: (7, 1)})
    title = md.plan(few, P(), MESH, (8,)).op_name
    assert title == f"{P('dp')!r} with shard sizes {{0: (7, 1)}} -> {P()!r} of shape (8,)"
    many = [
        NamedSharding(Layout.from_shape((16,), ("tp",)), P("tp"), shard_sizes={0: sizes})
        for sizes in ((3, *[1] * 14, 0), (0, *[1] * 14, 3))
    ]
    titles = {md.plan(one, P(), one.layout, (17,)).op_name for one in many}
    assert len(titles) == 2
    assert all(re.search(r"shard sizes #[0-9a-f]{8} -> ", title) for title in titles)


def test_the_dims_of_a_pattern_are_its_named_parts() -> None:
    plan = md.plan("(h k)@tp 1 d -> d h k@tp", mesh=MESH, shape=(24, 1, 6), k=4, rank=1)
    assert plan.source.shape == (6, 4, 6)
    assert plan.source.local_shape((0, 1)) == (2, 4, 6)
    assert plan.target.local_shape((0, 1)) == (6, 1, 6)
    assert isinstance(plan.steps[0], Exchange)  # six heads on four ranks are uneven


def test_a_layout_plans_for_any_rank_and_its_first_by_default() -> None:
    part = MESH.slice(("tp",), rank=5)
    assert md.plan("b@tp -> b", mesh=part, b=8).coordinate == (0,)
    assert md.plan("b@tp -> b", mesh=part, b=8, rank=6).coordinate == (2,)


def test_two_meshes_over_the_same_ranks() -> None:
    experts = Layout.from_shape((4, 2), ("ep", "etp"))
    source = NamedSharding(MESH, P("dp", "tp"))
    target = NamedSharding(experts, P("etp", "ep"))
    whole = whole_array((6, 8))
    plans = {}
    for rank in range(8):
        plan = md.plan(source, target, shape=(6, 8), rank=rank)
        plans[plan.coordinate] = plan
        assert plan.source.local_shape(plan.coordinate) == source.shard_shape((6, 8), rank)
        assert plan.target.local_shape(plan.coordinate) == target.shard_shape((6, 8), rank)
        assert plan.layout.rank_at(plan.coordinate) == rank
    first = plans[0, 0, 0]
    assert first.layout.axis_text() == "dp=2, tp_ep=2, etp=2"
    steps = {at: plan.steps for at, plan in plans.items()}
    moved = run(steps, shards(first.source, whole), first.layout.sizes)
    assert_lies(first.target, whole, moved)
    links = {"tp": Link(1e-3, 1e3)}
    slow = md.plan(source, target, shape=(6, 8), rank=0, links=links)
    assert slow.links == (DEFAULT_LINK, links["tp"], links["tp"])
    with pytest.raises(MeshError, match="two meshes have no common refinement"):
        md.plan(
            NamedSharding(Layout.from_shape((2, 3), ("dp", "tp")), P("dp")),
            NamedSharding(Layout.from_shape((3, 2), ("ep", "etp")), P("ep")),
            shape=(6,),
        )


def test_a_device_mesh_plans_for_this_rank_with_its_backends_links() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = md.plan("a@dp b@tp -> a@tp b@dp", mesh=mesh, a=4, b=4)
        with mesh:
            assert md.plan("a@dp b@tp -> a@tp b@dp", a=4, b=4) is plan
            by_spec = md.plan(P("dp", "tp"), P("tp", "dp"), shape=(4, 4))
        assert by_spec.steps == plan.steps
        assert plan.links == (default_link("simulated", spans_hosts=False),) * 2
        assert mesh_links(mesh, {"tp": Link(1, 1)})[1] == Link(1, 1)
        assert md.plan("a@dp -> a", mesh=mesh, a=4, rank=3).coordinate == (1, 1)
        return plan.coordinate, plan.bytes_received(1)

    assert md.simulate(program, 4) == [((0, 0), 0), ((0, 1), 4), ((1, 0), 4), ((1, 1), 0)]


def test_an_axis_that_leaves_the_host_has_another_link(monkeypatch) -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        monkeypatch.setattr(mesh.world, "hosts", (0, 0, 1, 1))
        monkeypatch.setattr(type(mesh), "backend_of", lambda self, axis: "gloo")
        return mesh_links(mesh)

    between, inside = (default_link("gloo", spans_hosts=spans) for spans in (True, False))
    assert md.simulate(program, 4) == [(between, inside)] * 4


def test_all_ranks_choose_one_route() -> None:
    shardings = NamedSharding(MESH, P("tp", unreduced={"dp"})), NamedSharding(MESH, P(None, "dp"))
    plans = [md.plan(*shardings, shape=(8, 8), rank=rank) for rank in range(8)]
    assert len({tuple(type(step) for step in plan.steps) for plan in plans}) == 1
    assert len({plan.op_name for plan in plans}) == 1


# -- rejections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: md.plan("b@dp -> b", P(), MESH, (8,)),
            ArgumentError,
            "a pattern has both the source and the destination\n"
            "  where:    md.plan\n"
            '  expected: one pattern with "->", or two specs\n'
            f"  found:    'b@dp -> b' and {P()!r}",
        ),
        (
            lambda: md.plan("b@dp -> b", MESH, b=8),  # type: ignore[arg-type]
            ArgumentError,
            "a pattern has both the source and the destination\n"
            "  where:    md.plan\n"
            '  expected: one pattern with "->", or two specs\n'
            f"  found:    'b@dp -> b' and {MESH!r}\n"
            "  fix:      pass the mesh by name: plan(pattern, mesh=mesh)",
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH, (8,), b=8),
            ArgumentError,
            "sizes by name need a pattern, whose dims have names\n"
            "  where:    md.plan\n"
            "  found:    b=8\n"
            "  fix:      pass the global shape: shape=(...)",
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH),
            ArgumentError,
            "a plan between specs needs the global shape\n"
            "  where:    md.plan\n"
            "  fix:      call plan(src, dst, mesh, shape)",
        ),
        (
            lambda: md.plan(P("dp"), P(), shape=(8,)),
            MeshError,
            "plan: there is no current mesh\n"
            "  expected: a mesh with named axes\n"
            "  fix:      call it inside `with mesh:`, or pass the mesh: plan(..., mesh=mesh)",
        ),
        (
            lambda: md.plan(P("dp"), P(), "dp", (8,)),
            KindError,
            "plan takes a mesh\n  expected: a DeviceMesh or a Layout\n  found:    a str",
        ),
        (
            lambda: md.plan("b@dp -> b", mesh=8, b=8),
            KindError,
            "plan takes a mesh\n  expected: a DeviceMesh or a Layout\n  found:    an int",
        ),
        (
            lambda: md.plan(P("dp"), None, MESH, (8,)),
            KindError,
            "a plan needs a destination\n"
            "  where:    md.plan, argument dst\n"
            "  expected: a NamedSharding or a PartitionSpec\n"
            "  found:    None, a NoneType\n"
            "  fix:      pass a pattern as the only positional argument: "
            'plan("b@dp s -> b s@dp", mesh=mesh)',
        ),
        (
            lambda: md.plan(("dp",), P(), MESH, (8,)),
            KindError,
            "src is not a spec\n"
            "  where:    md.plan, argument src\n"
            "  expected: a NamedSharding or a PartitionSpec\n"
            "  found:    ('dp',), a tuple\n"
            "  fix:      pass a pattern as the only positional argument: "
            'plan("b@dp s -> b s@dp", mesh=mesh)',
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH, (8.0,)),
            KindError,
            "plan: shape must be the global shape, one integer for each dim\n"
            "  expected: for example shape=(8, 16)\n"
            "  found:    (8.0,)",
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH, 8),
            KindError,
            "plan: shape must be the global shape, one integer for each dim\n"
            "  expected: for example shape=(8, 16)\n"
            "  found:    8",
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH, (-8,)),
            ShapeError,
            "plan: no dim has a size below 0\n  found:    shape=(-8,)",
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH, (8,), rank=8),
            NotInGroupError,
            "the mesh does not contain rank 8\n"
            "  where:    mesh (dp=2, tp=4)\n"
            "  expected: one of its ranks: 0, 1, 2, 3, 4, 5, 6, 7\n"
            "  fix:      skip the call on ranks outside the mesh",
        ),
        (
            lambda: md.plan(P("dp"), P(), MESH, (8,), rank="0"),
            KindError,
            "plan: rank must be an integer\n  found:    '0', a str",
        ),
    ],
)
def test_bad_arguments_are_rejected(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: md.plan("b@dp ->", mesh=MESH, b=8), PatternError),
        (lambda: md.plan("b@dp", mesh=MESH, b=8), PatternError),
        (lambda: md.plan("b@pp -> b", mesh=MESH, b=8), AxisError),
        (lambda: md.plan(P("pp"), P(), MESH, (8,)), AxisError),
        (lambda: md.plan("b@dp -> b", mesh=MESH), ShapeError),
        (lambda: md.plan(P("dp", "tp"), P(), MESH, (8,)), ShapeError),
        (lambda: md.plan("b@dp s -> b s", mesh=MESH, shape=(8,)), ShapeError),
    ],
)
def test_patterns_and_specs_that_do_not_fit_are_rejected(call, error):
    with pytest.raises(error):
        call()


def test_steps_hold_integers_of_python() -> None:
    """Executors hand them to torch, and plans are compared and printed."""
    plan = md.plan("a@(dp,tp) b -> a b@(dp,tp)", mesh=MESH, a=13, b=11, rank=np.int64(3))
    (step,) = plan.steps
    assert isinstance(step, Exchange)
    numbers = [n for _, box in (*step.sends, *step.receives) for pair in box for n in pair]
    assert {type(n) for n in (*numbers, *step.shape, step.group_rank)} == {int}
    (even,) = md.plan("a@tp b -> a b@tp", mesh=MESH, a=12, b=8).steps
    assert even.name == "all-to-all"
