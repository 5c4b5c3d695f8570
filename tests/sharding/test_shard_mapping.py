"""``md.shard_map``: its arguments and results, and all that it rejects, as the user reads it."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import DebugLevel

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    DtypeError,
    KindError,
    LengthError,
    MeshdistError,
    MeshError,
    MismatchError,
    PatternError,
    ShapeError,
    UnequalError,
)
from tests.pool import Pool
from tests.sharding.array_cases import on_mesh

P, shard_map = md.P, md.shard_map
WHERE = "  where:    rank 0 (dp=0, tp=0) of mesh (dp=2, tp=2)"


def rows(count: int = 4) -> torch.Tensor:
    return torch.arange(2.0 * count).view(count, 2)


def itself(x: Any) -> Any:
    return x


# -- arguments and results ------------------------------------------------------------------------


def test_as_a_decorator_it_keeps_name_and_doc() -> None:
    def body(mesh: Any) -> Any:
        @md.shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P())
        def total(x: torch.Tensor) -> torch.Tensor:
            """The sum of rows."""
            return md.lax.psum(x.sum(0), "dp")

        assert (total.__name__, total.__doc__) == ("total", "The sum of rows.")
        return total(rows()).full().tolist()

    assert on_mesh(body) == [[12.0, 16.0]] * 4


def test_the_mesh_in_force_is_taken_at_each_call() -> None:
    def body(mesh: Any) -> Any:
        mapped = shard_map(lambda x: x * len(x), in_specs=P("dp"), out_specs=P("dp"))
        found = []
        for each in (mesh, mesh["dp"]):
            with each:
                found.append(mapped(rows()).mesh == each)
        return found

    assert on_mesh(body) == [[True, True]] * 4


def test_dims_need_not_divide_and_results_have_their_sizes() -> None:
    def body(mesh: Any) -> Any:
        f = shard_map(lambda x: x.tile(2, 1), mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        y = f(rows(5))
        z = shard_map(lambda y: 2 * y, mesh=mesh, out_specs=P("dp"))(y)
        even = shard_map(itself, mesh=mesh, in_specs=P("tp"), out_specs="b@tp d")(rows(5))
        assert even.sharding == md.NamedSharding(mesh, P("tp", None))  # balanced: nothing to say
        assert even.shape == (5, 2)
        return y.shape, dict(y.sharding.shard_sizes), (z.sharding == y.sharding), z.full().tolist()

    x = 2 * rows(5)
    whole = torch.cat([x[:3], x[:3], x[3:], x[3:]]).tolist()
    assert on_mesh(body) == [((10, 2), {0: (6, 4)}, True, whole)] * 4


def test_sizes_can_be_said() -> None:
    def body(mesh: Any) -> Any:
        sharding = md.NamedSharding(mesh, P("dp"), shard_sizes={0: (1, 2)})

        def first_rows(x: torch.Tensor) -> torch.Tensor:
            return x[: 1 + md.lax.axis_index("dp")]

        y = shard_map(first_rows, mesh=mesh, in_specs=P("dp"), out_specs=sharding)(rows())
        back = shard_map(itself, mesh=mesh, in_specs=sharding, out_specs=sharding)(y)
        return y.sharding == sharding, back.full().tolist()

    assert on_mesh(body) == [(True, rows()[[0, 2, 3]].tolist())] * 4


def test_trees_prefixes_numbers_and_what_is_static() -> None:
    def body(mesh: Any) -> Any:
        def f(params: Any, batch: Any, mode: str, scale: float, nothing: None) -> Any:
            assert mode == "sum" and scale == 2.0 and nothing is None
            assert [tuple(x.shape) for x in batch] == [(2, 2), (2, 2)]
            assert tuple(params["w"].shape) == (4, 1)
            return {"x": batch[0] * scale, "rest": [None, (params["w"],)]}

        in_specs = ({"w": P(None, "tp"), "b": P()}, P("dp"), None, P(), None)
        f = shard_map(
            f, mesh=mesh, in_specs=in_specs, out_specs={"x": P("dp"), "rest": P(None, "tp")}
        )
        y = f({"b": rows(1), "w": rows()}, (rows(), rows()), "sum", 2.0, None)
        assert y["rest"][0] is None
        return y["x"].full().tolist(), y["rest"][1][0].full().tolist()

    assert on_mesh(body) == [((2 * rows()).tolist(), rows().tolist())] * 4


def test_infer_takes_the_sharding_and_stays_itself() -> None:
    def body(mesh: Any) -> Any:
        x = md.device_put(rows(), md.NamedSharding(mesh, P("tp")))
        infer = shard_map.Infer  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(infer)) is infer
        assert repr(infer) == "shard_map.Infer"

        def shapes(x: Any, w: Any, n: int) -> torch.Tensor:
            assert (tuple(x.shape), tuple(w.shape), n) == ((2, 2), (4, 2), 3)
            return x

        f = shard_map(shapes, mesh=mesh, in_specs=(infer, P(), infer), out_specs=P("tp"))
        return f(x, rows(), 3).sharding == x.sharding

    assert on_mesh(body) == [True] * 4


def test_unchecked_nothing_is_cast_or_summed() -> None:
    def body(mesh: Any) -> Any:
        w = torch.ones(2, requires_grad=True)
        f = partial(shard_map, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
        kinds: list[Any] = []

        def scaled(x: Any, w: Any) -> Any:
            kinds.append(md.typeof(x * w).varying)
            return x * w

        gradients = []
        for check_vma in (True, False):
            y = f(scaled, check_vma=check_vma)(rows(), w).full()
            gradients.append(torch.autograd.grad(y.sum(), w)[0].tolist())
        with md.typed(mesh):  # which is paused inside
            y = f(scaled, check_vma=False)(rows(), w)
            assert md.typeof(y.local).varying == ("dp",)
        return kinds, gradients

    for rank, (kinds, gradients) in enumerate(on_mesh(body)):
        assert kinds == [("dp",), (), ()]
        own = rows()[2 * (rank // 2) :][:2].sum(0).tolist()
        assert gradients == [[12.0, 16.0], own]


def test_results_carry_their_specs_and_leave_marks_alone() -> None:
    def body(mesh: Any) -> Any:
        w = torch.nn.Parameter(torch.ones(2))
        x = md.device_put(rows(), md.NamedSharding(mesh, P("dp")))
        y = shard_map(lambda x: (x, w), mesh=mesh, out_specs=(P("dp"), P()))(x)
        assert md.typeof(y[0].local).spec == P("dp", None)
        assert y[1].local.data_ptr() == w.data_ptr()
        assert md.typeof(w).spec is None
        moved = shard_map(itself, mesh=mesh, in_specs=P("dp"), out_specs=P("tp"), check_vma=False)
        return moved(rows()).full().shape  # the spec of x's shard is not in the way

    assert on_mesh(body) == [(4, 2)] * 4


def test_a_history_that_no_context_has_seen_is_taken() -> None:
    def body(mesh: Any) -> Any:
        x = rows().requires_grad_()
        f = shard_map(
            lambda x: md.lax.psum(x * x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
        )
        (f(2 * x).full().sum()).backward()
        with md.typed(mesh):  # where its types are followed
            again = torch.autograd.grad(f(2 * x).full().sum(), x)[0]
        assert x.grad is not None
        return torch.equal(x.grad, 8 * rows()) and torch.equal(again, x.grad)

    assert on_mesh(body) == [True] * 4


def test_partial_sums_can_be_returned() -> None:
    def body(mesh: Any) -> Any:
        spec = P(unreduced={"dp"})
        y = shard_map(lambda x: x.sum(0), mesh=mesh, in_specs=P("dp"), out_specs=spec)(rows())
        assert y.sharding.spec == spec
        return y.full().tolist()

    assert on_mesh(body) == [[12.0, 16.0]] * 4


def test_numpy_arrays_go_in_and_come_out() -> None:
    def body(mesh: Any) -> Any:
        def f(x: Any) -> Any:
            assert type(x) is np.ndarray
            return x + 1, md.lax.psum(x.sum(0), "dp")

        y, total = shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"), P()))(
            rows().numpy()
        )
        assert type(y.local) is np.ndarray
        return y.full().tolist(), total.full().tolist()

    assert on_mesh(body) == [((rows() + 1).tolist(), [12.0, 16.0])] * 4


# -- rejections ------------------------------------------------------------------------------------


def rejected(kind: type[MeshdistError], call: Any) -> list[str]:
    """The lines of the error that all four ranks raise, as the first rank says it."""

    def body(mesh: Any) -> Any:
        with mesh, pytest.raises(kind) as raised:
            call(mesh)
        assert type(raised.value) is kind
        return str(raised.value).splitlines()

    first, *others = on_mesh(body)
    assert all(len(other) == len(first) and other[0] == first[0] for other in others)
    return first


def mapped(f: Any = itself, **options: Any) -> Any:
    return shard_map(f, **{"in_specs": P("dp"), "out_specs": P("dp"), **options})


def test_all_leaves_that_do_not_fit_are_shown() -> None:
    def f(x: Any, *rest: Any) -> Any:
        return x

    args = rows(), {"a": rows(), "b": 3, "c": "text"}
    specs = (P("pp"), P(None, None, "dp"))
    assert rejected(AxisError, lambda mesh: mapped(f, in_specs=specs)(*args)) == [
        "shard_map of f: arguments do not match in_specs",
        WHERE,
        "  expected: one of 'dp', 'tp'",
        "  found:    argument 0, x: float32[4, 2], spec P('pp',): no axis 'pp' in the mesh",
        "            argument 1, rest[0]['a']: float32[4, 2], spec P(None, None, 'dp'): shard_map: "
        "P(None, None, 'dp') has entries for 3 dims, the tensor has 2",
        "            argument 1, rest[0]['b']: an int, spec P(None, None, 'dp'): a number has no "
        "dims and no shards",
        "            argument 1, rest[0]['c']: a str, spec P(None, None, 'dp'): shard_map cannot "
        "take a str as rest[0]['c']",
    ]


VARYING = md.annotate(torch.ones(4, 2), varying="dp")
# Arguments: the class, the call, and words of its line and of the fix.
ARGUMENTS: dict[str, tuple[type[MeshdistError], Any, str, str]] = {
    "a spec of more dims": (
        ShapeError,
        lambda mesh: mapped(in_specs=P(None, None, "dp"))(rows()),
        "x: float32[4, 2], spec P(None, None, 'dp')",
        "write at most 2 entries; or add a dimension: x[None]",
    ),
    "a pattern of other dims": (
        ShapeError,
        lambda mesh: mapped(in_specs="b@dp s d")(rows()),
        "argument 0, x: float32[4, 2], spec 'b@dp s d': the pattern names 3 dims, the array has 2",
        "name each dim",
    ),
    "no pattern": (
        PatternError,
        lambda mesh: mapped(in_specs="b@dp -> b")(rows()),
        "argument 0, x: float32[4, 2], spec 'b@dp -> b': ",
        "",
    ),
    "parts of unknown size": (
        ShapeError,
        lambda mesh: mapped(in_specs="(h k)@dp d")(rows(3)),
        "the sizes of 'h', 'k' are unknown",
        "pass the sizes: md.NamedSharding(mesh, spec, shard_sizes={dim: sizes})",
    ),
    "no spec": (
        KindError,
        lambda mesh: mapped(in_specs=3)(rows()),
        "argument 0, x: float32[4, 2], spec 3: shard_map takes a spec or a pattern",
        "",
    ),
    "partial sums that are bool": (
        DtypeError,
        lambda mesh: mapped(in_specs=P(unreduced={"dp"}))(torch.ones(2, dtype=torch.bool)),
        "a bool tensor cannot be unreduced",
        "",
    ),
    "sizes that do not add up": (
        ShapeError,
        lambda mesh: mapped(in_specs=md.NamedSharding(mesh, P("dp"), shard_sizes={0: (1, 2)}))(
            rows()
        ),
        "the shard sizes of dim 0 do not add up to its size",
        "",
    ),
    "a sharding on another mesh": (
        MeshError,
        lambda mesh: mapped(in_specs=md.NamedSharding(mesh["dp"], P("dp")))(rows()),
        "the sharding is on another mesh, (dp=2)",
        "pass its spec alone",
    ),
    "a whole that varies": (
        AxisTypeError,
        lambda mesh: mapped()(VARYING),
        "argument 0, x: float32[4, 2]{V:dp}, spec P('dp',): it is varying over 'dp', and a global "
        "array is equal on all ranks",
        "pass md.ShardedArray(x, sharding) if it is this rank's shard",
    ),
    "an array on another mesh": (
        MeshError,
        lambda mesh: mapped()(md.device_put(rows(), md.NamedSharding(mesh["dp"], P("dp")))),
        "argument 0, x: ShardedArray of shape (4, 2), spec P('dp',): it is on another mesh, (dp=2)",
        "pass x.reshard(md.NamedSharding(mesh, spec)), with the spec that it needs",
    ),
    "an array that lies otherwise": (
        ArgumentError,
        lambda mesh: mapped()(md.device_put(rows(), md.NamedSharding(mesh, P(None, "tp")))),
        "argument 0, x: ShardedArray of shape (4, 2), spec P('dp',): it is sharded as P(None, "
        "'tp')",
        "pass x.reshard(P('dp',)); or leave in_specs out",
    ),
    "an array with other sizes": (
        ArgumentError,
        lambda mesh: mapped(
            in_specs=md.NamedSharding(mesh, P("dp"), shard_sizes={0: (1, 3)}),
        )(md.device_put(rows(), md.NamedSharding(mesh, P("dp")))),
        "it is sharded as P('dp',)",
        "pass x.reshard(NamedSharding(",
    ),
    "a number that is cut": (
        KindError,
        lambda mesh: mapped()(2.0),
        "argument 0, x: a float, spec P('dp',): a number has no dims and no shards",
        "write P(), which passes a number unchanged",
    ),
    "what is no array": (
        KindError,
        lambda mesh: mapped(in_specs=P())(torch.nn.Linear(1, 1)),
        "argument 0, x: a Linear, spec P(): shard_map cannot take a torch.nn",
        "",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rejected_arguments(name: str) -> None:
    kind, call, found, fix = ARGUMENTS[name]
    lines = rejected(kind, call)
    assert lines[:2] == ["shard_map of itself: arguments do not match in_specs", WHERE]
    text = "\n".join(lines)
    assert found in text
    assert fix in text.partition("  fix:      ")[2]


def test_shards_whose_marks_contradict_their_sharding() -> None:
    def call(mesh: Any) -> None:
        local = md.annotate(torch.ones(2, 2), varying=("dp", "tp"))
        mapped()(md.ShardedArray(local, md.NamedSharding(mesh, P("dp"))))

    lines = rejected(AxisTypeError, call)
    assert lines[0] == (
        "shard_map of itself, argument x, cannot take a value that is varying over 'tp': its "
        "pattern or spec requires invariant"
    )
    assert "expected: a value sharded as P('dp',)" in lines[2]


def returning(value: Any, **options: Any) -> Any:
    def body(x: Any) -> Any:
        return value(x)

    return lambda mesh: mapped(body, **options)(rows())


RESULTS: dict[str, tuple[type[MeshdistError], Any, str, str]] = {
    "it varies": (
        AxisTypeError,
        returning(lambda x: {"y": [x]}, out_specs=P(None, "tp")),
        "result['y'][0]: float32[2, 2]{V:dp}, spec P(None, 'tp'): it is varying over 'dp' (size 2)"
        ", which its spec leaves out",
        "make one value with lax.psum, lax.pmean or lax.all_gather(..., to='invarying') over 'dp'; "
        "or, to concatenate the ranks' values, name 'dp' in the spec",
    ),
    "a number of each rank": (
        AxisTypeError,
        returning(torch.sum, out_specs=P()),
        "result: float32[]{V:dp}, spec P(): it is varying over 'dp' (size 2)",
        "name 'dp' in the spec, and give the value a dim: y[None]",
    ),
    "a number of each rank side by side": (
        ShapeError,
        returning(torch.sum, out_specs=P("dp")),
        "result: float32[]{V:dp}, spec P('dp',): shard_map: P('dp',) has entries for 1 dims",
        "return y[None] to concatenate the ranks' values; or write P() for one value that is "
        "equal on all ranks, such as lax.psum(y, axis)",
    ),
    "the same by a pattern": (
        ShapeError,
        returning(torch.sum, out_specs="b@dp"),
        "result: float32[]{V:dp}, spec 'b@dp': the pattern names 1 dims, the array has 0",
        "return y[None] to concatenate the ranks' values",
    ),
    "partial_sums": (
        AxisTypeError,
        returning(lambda x: md.lax.pcast(x, "dp", to="unreduced"), out_specs=P()),
        "it is unreduced over 'dp' (size 2), which its spec leaves out",
        "add the partial sums: lax.psum(y, 'dp'); or write P(unreduced={'dp'})",
    ),
    "partial sums side by side": (
        AxisTypeError,
        returning(lambda x: md.lax.pcast(x, "dp", to="unreduced")),
        "it is unreduced over 'dp' (size 2), which its spec mentions",
        "add the partial sums: lax.psum(y, 'dp')",
    ),
    "reduced": (
        AxisTypeError,
        returning(lambda x: md.lax.pcast(x, "tp", to="reduced")),
        "it is reduced over 'tp' (size 2), which its spec leaves out",
        "write P(reduced={'tp'})",
    ),
    "not reduced": (
        AxisTypeError,
        returning(itself, out_specs=P("dp", reduced={"tp"})),
        "it is invariant over 'tp' (size 2), which its spec calls reduced",
        "call lax.pcast(y, 'tp', to='reduced') first",
    ),
    "no spec": (
        KindError,
        returning(itself, out_specs=None),
        "result: float32[2, 2]{V:dp}, spec None: None is not a spec for a result",
        "write P() for a value that is equal on all ranks",
    ),
    "a number": (
        KindError,
        returning(lambda x: 2.0, out_specs=P()),
        "result: a float, spec P(): shard_map cannot take a float as result",
        "convert it to a tensor: result = torch.tensor(result)",
    ),
    "a ShardedArray": (
        KindError,
        returning(lambda x: md.zeros((2, 2), sharding=P())),
        "result: ShardedArray of shape (2, 2), spec P('dp',): shard_map cannot take a ",
        "pass result.local, this rank's shard",
    ),
    "a spec of too many dims": (
        ShapeError,
        returning(itself, out_specs=P("dp", None, None)),
        "result: float32[2, 2]{V:dp}, spec P('dp', None, None): shard_map: P('dp', None, None) has "
        "entries for 3 dims, the tensor has 2",
        "",
    ),
    "no axis": (
        AxisError,
        returning(itself, out_specs=P("pp")),
        "result: float32[2, 2]{V:dp}, spec P('pp',): no axis 'pp' in the mesh",
        "",
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_rejected_results(name: str) -> None:
    kind, call, found, fix = RESULTS[name]
    lines = rejected(kind, call)
    assert lines[:2] == ["shard_map of body: results do not match out_specs", WHERE]
    text = "\n".join(lines)
    assert found in text
    assert fix in text.partition("  fix:      ")[2]


def test_numbers_of_each_rank_are_laid_side_by_side_or_summed() -> None:
    def program() -> list[Any]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        options = {"mesh": mesh, "in_specs": P("dp")}
        beside = md.shard_map(lambda x: x.sum()[None], out_specs=P("dp"), **options)
        summed = md.shard_map(lambda x: md.lax.psum(x.sum(), "dp"), out_specs=P(), **options)
        x = torch.arange(4.0)
        return [beside(x).full().tolist(), summed(x).full().tolist()]

    assert md.simulate(program, 2) == [[[1.0, 5.0], 6.0]] * 2


def test_structures() -> None:
    lines = rejected(ArgumentError, lambda mesh: mapped(in_specs=[P("dp")])(rows()))
    assert lines[:3] == [
        "shard_map of itself: in_specs is not a tree prefix of the tuple of arguments",
        "  expected: in_specs with the structure of the tuple of arguments, or one spec for a "
        "subtree of it",
        "  found:    pytree structure error: different types at key path",
    ]
    assert lines[-1] == "  fix:      write a tuple of specs, one for each argument"
    lines = rejected(ArgumentError, lambda mesh: mapped(in_specs=({"a": P()},))({"b": rows()}))
    assert lines[3].strip() == "in_specs[0]"
    assert lines[-1].endswith(
        "pass one spec for a subtree of equally sharded arrays: in_specs=P(...)"
    )
    lines = rejected(ArgumentError, lambda mesh: mapped(out_specs=(P("dp"), P()))(rows()))
    assert lines[:2] == [
        "shard_map of itself: out_specs is not a tree prefix of the result",
        "  expected: out_specs with the structure of the result, or one spec for a subtree of it",
    ]
    assert lines[-1].endswith(
        "pass one spec for a subtree of equally sharded arrays: out_specs=P(...)"
    )
    assert rejected(LengthError, lambda mesh: mapped(in_specs=(P(), None))(rows())) == [
        "shard_map of itself: a call with 1 arguments, in_specs of 2",
        "  expected: in_specs=(P(), None)",
        "  found:    arguments x",
        "  fix:      pass a spec for each argument; None passes an argument unchanged",
    ]


def test_calls_that_cannot_be_mapped() -> None:
    def by_name(mesh: Any) -> None:
        mapped()(x=rows())

    assert rejected(KindError, by_name) == [
        "shard_map of itself: arguments must be passed by position",
        "  found:    x=...",
        "  fix:      bind the rest before: functools.partial(itself, x=...)",
    ]
    lines = rejected(MeshError, lambda mesh: mapped(lambda x: mapped()(x))(rows()))
    assert lines == [
        "shard_map of itself inside of a function that is mapped over the same mesh",
        WHERE,
        "  expected: a call outside of it, since f gets this rank's shards",
        "  fix:      call itself itself there",
    ]
    lines = rejected(MeshError, lambda mesh: mapped(axis_names={"dp"})(rows()))
    assert lines == [
        "shard_map of itself over only some axes of the mesh is not supported",
        WHERE,
        "  expected: all of 'dp', 'tp', or no axis_names",
        "  found:    axis_names={'dp'}",
        "  fix:      leave it out, and leave the other axes out of the specs",
    ]
    lines = rejected(KindError, lambda mesh: mapped(axis_names="dp")(rows()))
    assert lines[:2] == [
        "shard_map of itself: axis_names must be a set of names",
        "  found:    'dp', a str",
    ]
    lines = rejected(MeshError, lambda mesh: mapped(mesh=unnamed())(rows()))
    assert lines[0] == "shard_map of itself needs a mesh with axis names"
    assert lines[-1] == "  fix:      name its axes: mesh_dim_names=('dp', 'tp')"
    assert on_mesh(lambda mesh: len(mapped(mesh=mesh, axis_names={"tp", "dp"})(rows()).shape)) == (
        [2] * 4
    )


def unnamed() -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (2, 2))


def test_without_a_mesh_or_a_function() -> None:
    with pytest.raises(KindError) as raised:
        shard_map(3, out_specs=P())  # type: ignore[arg-type]
    assert str(raised.value).splitlines()[:2] == [
        "shard_map takes a function",
        "  found:    3, an int",
    ]
    with pytest.raises(KindError, match="shard_map of itself: in_specs is None") as raised:
        shard_map(itself, in_specs=None, out_specs=P())
    assert raised.value.fix == (
        "write in_specs=P() if every rank gets all arguments in full, or leave it out"
    )
    with pytest.raises(MeshError, match="shard_map: there is no current mesh"):
        mapped()(rows())


def test_what_f_raises_passes_and_nothing_stays_behind() -> None:
    def body(mesh: Any) -> Any:
        def f(x: Any) -> Any:
            raise ValueError("mine")

        with mesh:
            with pytest.raises(ValueError, match="mine"):
                mapped(f)(rows())
            with pytest.raises(AxisError, match="no axis 'pp' in the mesh"):
                mapped(lambda x: md.lax.psum(x, "pp"))(rows())
            return mapped()(rows()).shape

    assert on_mesh(body) == [(4, 2)] * 4


def test_shards_that_make_no_whole() -> None:
    def f(x: Any) -> Any:
        return x[: 1 + md.lax.axis_index("dp")]

    assert rejected(ShapeError, lambda mesh: mapped(f)(rows())) == [
        "shard_map of f: the shards of result do not form a global array",
        f"{WHERE}, spec P('dp',)",
        "  expected: shards of one size, since all arguments are cut evenly",
        "  found:    ranks 0-1: (1, 2); ranks 2-3: (2, 2)",
        "  fix:      pass the sizes: out_specs=md.NamedSharding(mesh, P('dp',), shard_sizes={dim: "
        "sizes})",
    ]
    lines = rejected(ShapeError, lambda mesh: mapped(out_specs=P("tp"), check_vma=False)(rows(3)))
    assert lines[2:] == [
        "  expected: sizes that differ only along the axes that cut the dim",
        "  found:    ranks 0-1: (2, 2); ranks 2-3: (1, 2)",
        "  fix:      return equal shapes from f along axes that do not cut the dim",
    ]


def test_a_transform_of_torchs_goes_through_where_nothing_is_checked() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("i",))

        def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return md.lax.psum((x * w).sum(), "i")

        specs = md.P(), md.P("i")
        loss = md.shard_map(f, mesh=mesh, in_specs=specs, out_specs=md.P(), check_vma=False)
        x = torch.arange(12.0).view(4, 3)
        return torch.func.grad(lambda w: loss(w, x).full())(torch.ones(3)).tolist()

    # Unchecked, each rank has the gradient of its own part of the whole.
    assert md.simulate(program, 2) == [[3.0, 5.0, 7.0], [15.0, 17.0, 19.0]]


def test_other_numbers_of_results_are_told_on_all_ranks() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("i",))

        def f(x: torch.Tensor) -> list[torch.Tensor]:
            return [x] * (1 + md.lax.axis_index("i"))

        mapped = md.shard_map(f, mesh=mesh, in_specs=md.P("i"), out_specs=md.P("i"))
        with pytest.raises(ShapeError) as caught:
            mapped(torch.arange(3.0))
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert text.startswith("shard_map of f: ranks returned different numbers of arrays\n")
        assert "rank 0: 1 arrays" in text
        assert "rank 1: 2 arrays" in text


def test_sizes_that_were_not_said_are_found_by_the_next_collective(pool: Pool) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        f = mapped(lambda x: x[: 1 + md.lax.axis_index("dp")], mesh=mesh)
        with pytest.raises(MismatchError) as raised:
            f(rows()).full()
        return str(raised.value)

    for text in pool.run(program, 2):
        assert "of shape (2, 2)" in text and "of shape (4, 2)" in text


def test_results_that_differ_unseen_are_found_at_detail_and_on_simulated_ranks(pool: Pool) -> None:
    def program(level: Any, library: Any) -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        f = shard_map(lambda x: x + md.lax.axis_index("dp"), mesh=mesh, in_specs=P(), out_specs=P())
        if level is not None:
            md.set_debug_level(level)
        try:
            f(library(rows()))
        except UnequalError as error:
            return str(error)
        finally:
            md.set_debug_level(DebugLevel.OFF)
        return ""

    for library in (itself, np.asarray):
        for texts in (
            md.simulate(program, 2, (None, library)),
            pool.run(program, 2, DebugLevel.DETAIL, library),
        ):
            lines = [text.splitlines() for text in texts]
            assert (
                lines[0][0]
                == lines[1][0]
                == ("shard_map of <lambda>: result is not the same on every rank")
            )
            assert lines[0][2:4] == [
                "  expected: equal values along each axis that the spec leaves out",
                "  found:    rank 1 differs from rank 0, by up to 0.14 of its largest value",
            ]
            assert "lax.pvary(x, axis) before x meets a number that differs by rank" in lines[0][4]
        assert pool.run(program, 2, DebugLevel.OFF, library) == [""] * 2


def test_unequal_wholes_are_found() -> None:
    def body(mesh: Any) -> Any:
        with pytest.raises(UnequalError, match="the array is not the same on every rank"):
            mapped(mesh=mesh)(rows() + md.get_rank())

    on_mesh(body)
