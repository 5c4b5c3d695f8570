"""JAX's names: axes, pytrees, libraries, numbers; and a tensor-parallel model against the whole."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist import lax
from meshdist.errors import (
    ArgumentError,
    AxisError,
    DtypeError,
    KindError,
    MeshError,
    MismatchError,
    NotInGroupError,
    ShapeError,
)

Pair = namedtuple("Pair", ["first", "second"])


def in_mesh(body: Callable[..., Any], shape: tuple[int, ...] = (2, 2), *args: Any) -> list[Any]:
    """Call ``body(rank, *args)`` on simulated ranks with a mesh in force; the results by rank."""

    def program(*args: Any) -> Any:
        names = ("pp", "dp", "tp")[3 - len(shape) :]
        with md.init_device_mesh("cpu", shape, mesh_dim_names=names):
            return body(md.get_rank(), *args)

    return md.simulate(program, int(np.prod(shape)), args=args)


def refusal(kind: type[Exception], body: Callable[[int], Any]) -> str:
    """The text with which every rank rejects, nothing having been sent."""

    def rejected(rank: int) -> str:
        with pytest.raises(kind) as caught:
            body(rank)
        assert type(caught.value) is kind
        return str(caught.value)

    (text,) = set(in_mesh(rejected))
    return text


# -- axes ---------------------------------------------------------------------------------------


def test_axes_alone_and_together() -> None:
    def body(rank: int) -> Any:
        x = torch.tensor(float(10**rank))
        names = ["pp", "dp", "tp", ("dp", "tp"), ("tp", "pp"), ("pp", "dp", "tp"), ("tp",)]
        return [f"{lax.psum(x, name).item():.0f}".rjust(8, "0") for name in names]

    assert in_mesh(body, (2, 2, 2))[6] == [
        "01000100",
        "01010000",
        "11000000",
        "11110000",
        "11001100",
        "11111111",
        "11000000",
    ]


def test_index_and_size() -> None:
    def body(rank: int) -> Any:
        places = [lax.axis_index(name) for name in ("dp", "tp", ("dp", "tp"), ("tp", "dp"))]
        return [*places, lax.axis_size("tp"), lax.axis_size(("tp", "dp"))]

    for rank, found in enumerate(in_mesh(body, (2, 3))):
        dp, tp = divmod(rank, 3)
        assert found == [dp, tp, rank, tp * 2 + dp, 3, 6]


def test_index_agrees_with_the_rank_in_the_group_on_a_permuted_mesh() -> None:
    def program() -> Any:
        mesh = md.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
        names = ["dp", "tp", ("dp", "tp"), ("tp", "dp")]
        places = [lax.axis_index(name, mesh=mesh) for name in names]
        # A sum cannot tell order; the ranks of the very group that it uses can.
        ranks = [mesh[name].open_group().rank() for name in names]
        sums = [lax.psum(torch.tensor(10 ** md.get_rank()), name, mesh=mesh) for name in names]
        return places, ranks, [int(s) for s in sums]

    results = md.simulate(program, 4)
    assert [places for places, _, _ in results] == [
        [1, 0, 2, 1],
        [0, 1, 1, 2],
        [1, 1, 3, 3],
        [0, 0, 0, 0],
    ]
    assert all(places == ranks for places, ranks, _ in results)
    assert results[3][2] == [1001, 1010, 1111, 1111]


def test_a_given_mesh_wins_and_the_innermost_is_in_force() -> None:
    def program() -> Any:
        line = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        square = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with line:
            with square:
                inner = lax.axis_size("tp"), lax.axis_size("tp", mesh=line)
            return *inner, lax.axis_size("tp"), lax.psum(torch.ones(()), "dp", mesh=square).item()

    assert md.simulate(program, 4) == [(2, 4, 4, 2.0)] * 4


def test_an_axis_of_size_one_is_an_ordinary_axis() -> None:
    def body(rank: int) -> Any:
        x = torch.ones(2, requires_grad=True)
        y = lax.psum(lax.pvary(x, "dp") * 3, "dp")
        y.sum().backward()
        return y.tolist(), x.grad.tolist(), lax.axis_index("dp"), lax.axis_size("dp")

    assert in_mesh(body, (1, 2)) == [([3, 3], [3, 3], 0, 1)] * 2


# What each collective takes beside x and the axis; made for x of two rows on two ranks.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "psum": {},
    "pmean": {},
    "pmax": {},
    "pmin": {},
    "pvary": {},
    "pcast": {"to": "unreduced"},
    "all_gather": {},
    "psum_scatter": {"tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 0},
    "ppermute": {"perm": [(0, 1)]},
    "pshuffle": {"perm": [1, 0]},
    "pswapaxes": {"axis": 0},
    "pbroadcast": {"source": 1},
}
RAGGED = ([0, 1], [0, 0], [0, 0], [0, 0])  # slices without rows: equal on every rank


def called(operation: str, axis: Any, **options: Any) -> Any:
    """A call of any collective, on what is fit for it."""
    if operation in ("axis_index", "axis_size"):
        return getattr(lax, operation)(axis, **options)
    x = torch.ones(2, 3)
    if operation == "ragged_all_to_all":
        return lax.ragged_all_to_all(x, x, *RAGGED, axis_name=axis, **options)
    return getattr(lax, operation)(x, axis, **ARGUMENTS[operation], **options)


OPERATIONS = [*ARGUMENTS, "ragged_all_to_all", "axis_index", "axis_size"]
OVER_NO_AXES = ["psum", "pmean", "pmax", "pmin", "pvary", "pcast", "axis_index", "axis_size"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_mesh_both_ways_to_name_one_are_told(operation: str) -> None:
    with pytest.raises(MeshError) as caught:
        called(operation, "tp")
    assert str(caught.value) == (
        f"{operation} over axis 'tp': there is no current mesh\n"
        "  expected: a mesh with named axes\n"
        f"  fix:      call it inside `with mesh:`, or pass the mesh: {operation}(..., mesh=mesh)"
    )


@pytest.mark.parametrize(
    ("operation", "axis", "summary"),
    [
        (operation, axis, summary)
        for axis, summary in (
            ("mp", "no axis 'mp' in the mesh"),
            (("dp", "mp"), "no axis 'mp' in the mesh"),
            (("tp", "tp"), "an axis is given twice"),
            ((), "no axes given"),
        )
        for operation in OPERATIONS
        if axis or operation not in OVER_NO_AXES
    ],
)
def test_axes_that_the_mesh_has_not(operation: str, axis: Any, summary: str) -> None:
    text = refusal(AxisError, lambda rank: called(operation, axis))
    assert text.startswith(summary + "\n  where:    mesh (dp=2, tp=2)\n")
    if "no axis" in summary:
        assert "\n  expected: one of 'dp', 'tp'" in text


@pytest.mark.parametrize("axis", [0, None, {"dp"}, ("dp", 1), ["dp", 1]])
def test_an_axis_is_named(axis: Any) -> None:
    assert refusal(KindError, lambda rank: lax.psum(torch.ones(1), axis)) == (
        f"psum cannot use {axis!r} as axis_name\n"
        "  expected: the name of an axis, a tuple of names, or a 1-D mesh\n"
        f"  found:    {type(axis).__name__}\n"
        "  fix:      pass for example axis_name='tp', or mesh['tp']"
    )


def test_a_rank_outside_the_mesh_is_told_so() -> None:
    def program() -> Any:
        with md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
            if md.get_rank() < 2:
                return lax.psum(torch.ones(()), "tp").item()
            with pytest.raises(NotInGroupError, match="does not contain this rank"):
                lax.axis_index("tp")
            with pytest.raises(NotInGroupError, match="does not contain this rank"):
                lax.psum(torch.ones(()), "tp")
            return lax.axis_size("tp")

    assert md.simulate(program, 3) == [2.0, 2.0, 2]


GROUPED = [
    operation
    for operation in OPERATIONS
    if "axis_index_groups" in inspect.signature(getattr(lax, operation)).parameters
]


@pytest.mark.parametrize("operation", GROUPED)
@pytest.mark.parametrize(
    ("axis", "fix"),
    [
        ("tp", "mesh = mesh.unflatten('tp', (2, -1), "),
        (("dp", "tp"), "mesh = mesh.flatten(('dp', 'tp')).unflatten('dp_tp', (2, -1), "),
    ],
)
def test_parts_of_an_axis_are_axes(operation: str, axis: Any, fix: str) -> None:
    body = lambda rank: called(operation, axis, axis_index_groups=[[0], [1]])  # noqa: E731
    assert refusal(KindError, body) == (
        f"{operation} does not support axis_index_groups\n"
        "  expected: None\n"
        "  found:    [[0], [1]]\n"
        f"  fix:      split the axis: {fix}('outer', 'inner')), then pass 'inner' for groups of "
        "neighbors, or 'outer' for groups with strides"
    )


def test_that_fix_names_the_axis_of_a_mesh_that_is_given() -> None:
    def body(rank: int) -> str:
        line = md.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        with pytest.raises(KindError) as caught:
            lax.pmean(torch.ones(1), line, axis_index_groups=[[0, 2], [1, 3]])
        return str(caught.value)

    assert "mesh.unflatten('ep', (2, -1), " in in_mesh(body)[0]


def test_axes_in_a_list_are_those_of_a_tuple() -> None:
    def body(rank: int) -> Any:
        x = torch.tensor(10**rank)
        both = [lax.psum(x, axes).item() for axes in (["dp", "tp"], ("dp", "tp"))]
        return both, lax.axis_size(["tp"]), lax.axis_index(["tp", "dp"])

    assert in_mesh(body) == [([1111, 1111], 2, index) for index in (0, 2, 1, 3)]


@pytest.mark.parametrize("no_axes", [(), []])
@pytest.mark.parametrize("operation", OVER_NO_AXES[:6])
def test_over_no_axes_a_reduction_returns_a_copy_of_its_argument(
    operation: str, no_axes: Any
) -> None:
    def call(x: Any) -> Any:
        return getattr(lax, operation)(x, no_axes, **ARGUMENTS[operation])

    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = call(x)  # no mesh is needed
    y.square().sum().backward()
    assert y.tolist() == x.tolist()
    assert x.grad is not None and x.grad.tolist() == [2.0, -4.0]
    assert y.data_ptr() != x.data_ptr()
    tree = call({"a": np.array([1, 2]), "b": (torch.tensor([True]), 3)})
    dtypes = (np.float32, torch.float32, float) if operation == "pmean" else (int, torch.bool, int)
    assert tree["a"].tolist() == [1, 2] and tree["a"].dtype == dtypes[0]
    assert tree["b"][0].tolist() == [True] and tree["b"][0].dtype == dtypes[1]
    assert tree["b"][1] == 3 and type(tree["b"][1]) is dtypes[2]
    with pytest.raises(KindError, match="x\\['a'\\]"):
        call({"a": "text"})


def test_over_no_axes_types_stay_and_there_is_one_rank() -> None:
    def body(rank: int) -> Any:
        assert (lax.axis_size(()), lax.axis_index(())) == (1, 0)
        x = md.annotate(torch.ones(2), varying="dp")
        with md.typed():
            return md.typeof(lax.psum(x, ())).varying

    assert {tuple(found) for found in in_mesh(body)} == {("dp",)}
    with pytest.raises(DtypeError):
        lax.pmax(torch.ones(1, dtype=torch.complex64), ())


def test_the_advice_of_that_error_mends_it() -> None:
    def body(rank: int) -> Any:
        mesh = md.get_current_mesh().unflatten("tp", (2, 2), ("outer", "inner"))
        x = torch.tensor(10**rank)
        return [lax.psum(x, name, mesh=mesh).item() for name in ("inner", "outer")]

    assert in_mesh(body, (4,)) == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_axis_may_be_a_mesh_of_its_own(operation: str) -> None:
    def body(rank: int) -> Any:
        mesh = md.get_current_mesh()
        flat = mesh.flatten(("dp", "tp"), "all")["all"]
        assert lax.axis_size(flat) == 4 and lax.axis_index(flat) == rank
        named, given = called(operation, "dp"), called(operation, mesh["dp"])
        return torch.equal(torch.as_tensor(named), torch.as_tensor(given))

    assert in_mesh(body) == [True] * 4


def test_a_mesh_of_several_axes_is_no_axis() -> None:
    text = refusal(MeshError, lambda rank: lax.psum(torch.ones(1), md.get_current_mesh()))
    assert text.startswith(
        "psum cannot use a mesh of 2 axes as axis_name\n  expected: one axis, such as mesh['tp']\n"
    )
    assert "\n  found:    axis_name=DeviceMesh(" in text
    assert text.endswith(
        "\n  fix:      pass the names of its axes, axis_name=('dp', 'tp'), mesh=mesh; or "
        "flatten the mesh"
    )


def test_an_axis_that_is_a_mesh_needs_no_other() -> None:
    def body(rank: int) -> None:
        mesh = md.get_current_mesh()
        with pytest.raises(ArgumentError) as caught:
            lax.psum(torch.ones(1), mesh["tp"], mesh=mesh)
        assert str(caught.value) == (
            "psum got a mesh as axis_name, and another as mesh\n"
            f"  found:    axis_name={mesh['tp']!r}, mesh={mesh!r}\n"
            "  fix:      omit mesh, or pass the name of one of its axes"
        )

    in_mesh(body)


# -- leaves -------------------------------------------------------------------------------------


def test_pytrees_keep_their_form() -> None:
    def body(rank: int) -> Any:
        x = {
            "b": [torch.tensor(rank), (np.array([rank, 1]), None)],
            "a": OrderedDict(z=Pair(torch.ones(2), 5), y=[]),
        }
        return lax.psum(x, "tp"), x

    for rank, (total, x) in enumerate(in_mesh(body)):
        both = [1, 5][rank // 2]
        assert list(total) == ["b", "a"]
        assert int(total["b"][0]) == both
        assert isinstance(total["b"][1][0], np.ndarray)
        assert total["b"][1][0].tolist() == [both, 2]
        assert total["b"][1][1] is None
        assert type(total["a"]) is OrderedDict
        assert type(total["a"]["z"]) is Pair
        assert total["a"]["z"].first.tolist() == [2, 2]
        assert total["a"]["z"].second == 10
        assert total["a"]["y"] == []
        assert (int(x["b"][0]), x["b"][1][0].tolist()) == (rank, [rank, 1])


@pytest.mark.parametrize("operation", [lax.psum, lax.pmean, lax.pvary])
def test_trees_carry_gradients(operation: Any) -> None:
    def body(rank: int) -> Any:
        x = {name: torch.ones(2, requires_grad=True) for name in "ab"}
        y = operation(x, "tp")
        (y["a"] * 2 + y["b"] * 3).sum().backward()
        return x["a"].grad.tolist(), x["b"].grad.tolist()

    factor = {lax.psum: 1.0, lax.pmean: 0.5, lax.pvary: 2.0}[operation]
    assert in_mesh(body) == [([2 * factor] * 2, [3 * factor] * 2)] * 4


NUMBERS: dict[str, Callable[[int], Any]] = {
    "bool": lambda rank: rank != 1,
    "int": lambda rank: 3 + rank,
    "float": lambda rank: 0.1 + rank,
    "complex": lambda rank: 1 + rank * 1j,
    "large": lambda rank: (1 << 60) + rank,
}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", NUMBERS)
def test_python_numbers_travel_and_come_back_as_such(kind: str, size: int) -> None:
    def body(rank: int) -> Any:
        number = NUMBERS[kind](rank)
        found = [lax.psum(number, "tp"), lax.pmean(number, "tp")]
        found += [lax.pbroadcast(number, "tp", size - 1), lax.pvary(number, "tp")]
        if kind != "complex":
            found += [lax.pmax(number, "tp"), lax.pmin(number, "tp")]
        return found

    held = [NUMBERS[kind](rank) for rank in range(size)]
    for rank, found in enumerate(in_mesh(body, (size,))):
        expected = [sum(held), sum(held) / size, held[-1], held[rank]]
        expected += [] if kind == "complex" else [max(held), min(held)]
        assert found == pytest.approx(expected, rel=1e-15)
        assert [type(one) for one in found] == [type(one) for one in expected]


def test_a_number_that_is_cast_sends_nothing() -> None:
    def body(rank: int) -> Any:  # on one rank alone
        return [lax.pvary(2.5, "tp"), lax.pcast(2.5, "tp", to="reduced")] if rank else None

    assert in_mesh(body, (2,)) == [None, [2.5, 2.5]]


def test_numbers_travel_beside_the_arrays_of_a_tree() -> None:
    def body(rank: int) -> Any:
        loss = torch.tensor(2.0 + rank, requires_grad=True)
        tree = {"loss": loss * 3, "n": 3 + rank, "seen": (rank > 0, np.float64(rank))}
        total = lax.psum(tree, "tp")
        (total["loss"] / total["n"]).backward()
        return {**total, "loss": total["loss"].item()}, loss.grad.item()

    expected = {"loss": 15.0, "n": 7, "seen": (1, 1.0)}
    for total, grad in in_mesh(body, (2,)):
        assert (total, grad) == (expected, pytest.approx(3 / 7))
        assert [type(one) for one in (total["n"], *total["seen"])] == [int, int, np.float64]


def test_numbers_travel_in_typed_contexts_transforms_and_uneven_loops() -> None:
    def body(rank: int) -> Any:
        mesh = md.get_current_mesh()
        with md.typed(mesh):
            x = md.annotate(torch.ones(2), varying="tp")
            typed = lax.psum({"x": x, "n": rank + 1}, "tp")
            assert md.typeof(typed["x"]).varying == ()
        seen = []

        def inside(x: torch.Tensor) -> torch.Tensor:
            seen.append((lax.psum(rank + 1, "tp"), lax.pmean(rank > 0, "tp")))
            return (x * seen[-1][0]).sum()

        torch.func.grad(inside)(torch.ones(2))
        torch.func.vmap(inside)(torch.ones(2, 2))
        counts = []
        for _, weight in md.uneven(range(1 + rank), mesh["tp"]):
            counts.append(lax.psum({"n": int(weight) * (rank + 1), "x": torch.ones(())}, "tp")["n"])
            counts.append(lax.pmax(rank - 7, "tp"))
            counts.append(lax.pbroadcast(rank, "tp", 2))
        return typed["n"], seen, counts

    whole, last = (6, 2 / 3), [6, -5, 2]
    for found in in_mesh(body, (3,)):
        assert found == (6, [whole] * 2, [*last, 5, -5, 2, 3, -5, 2])


def test_numbers_that_do_not_travel_are_rejected_before_anything_is_sent() -> None:
    assert refusal(ArgumentError, lambda rank: lax.psum([1.0, 1 << 62], "tp")) == (
        "psum cannot send 4611686018427387904 as x[1] because integers have 64 bits\n"
        "  where:    axis 'tp' of DeviceMesh(dp=2, tp=2)\n"
        "  expected: an integer of 64 bits, also for the sum over all ranks in psum\n"
        "  fix:      pass a float: x[1] = float(x[1])"
    )
    assert "pmean cannot send" in refusal(ArgumentError, lambda rank: lax.pmean(1 << 63, "tp"))
    assert "complex" in refusal(DtypeError, lambda rank: lax.pmax([1.0, 1j], "tp"))

    def body(rank: int) -> Any:  # as the error says; one bit less fits
        least = lax.pmin(-(1 << 63), "tp"), lax.psum(-(1 << 62), "tp")
        return lax.psum(float(1 << 62), "tp"), lax.pmax((1 << 63) - 1, "tp"), *least

    assert in_mesh(body, (2,)) == [(float(1 << 63), (1 << 63) - 1, -(1 << 63), -(1 << 63))] * 2


def test_numbers_of_different_kinds_are_told() -> None:
    def body(rank: int) -> str:
        with pytest.raises(MismatchError) as caught:
            lax.psum(0.5 if rank else 0, "tp")
        return str(caught.value)

    for text in in_mesh(body, (2,)):
        assert "all_reduce(() int64, SUM) of lax.psum(() at x) at" in text
        assert "all_reduce(() float64, SUM) of lax.psum(() at x) at" in text


def test_numpy_arrays_come_back_as_numpy_and_stay_as_they_were() -> None:
    def body(rank: int) -> Any:
        x = np.arange(3, dtype=np.float32) + rank
        x.flags.writeable = False
        before = x.copy()
        results = [operation(x, "tp") for operation in (lax.psum, lax.pmean, lax.pvary)]
        assert (x == before).all()
        assert not any(np.shares_memory(result, x) for result in results)
        results[2][0] = 100  # writable, whatever x was
        return results

    total, mean, own = in_mesh(body, (2,))[1]
    assert (type(total), total.dtype, total.tolist()) == (np.ndarray, np.float32, [1, 3, 5])
    assert (mean.dtype, mean.tolist()) == (np.float32, [0.5, 1.5, 2.5])
    assert own.tolist() == [100, 2, 3]


def test_a_numpy_scalar_is_an_array() -> None:
    def body(rank: int) -> Any:
        return lax.psum(np.float64(rank), "tp"), lax.psum(np.array(rank), "tp")

    scalar, array = in_mesh(body, (3,))[0]
    assert (type(scalar), scalar) == (np.float64, 3.0)
    assert (type(array), array.shape, int(array)) == (np.ndarray, (), 3)


def test_bool_is_counted() -> None:
    def body(rank: int) -> Any:
        return lax.psum({"t": torch.tensor(rank > 0), "n": np.array([True])}, "tp")

    found = in_mesh(body, (3,))[0]
    assert (found["t"].dtype, int(found["t"])) == (torch.int32, 2)
    assert (found["n"].dtype, found["n"].tolist()) == (np.int32, [3])


def test_integers_have_a_mean() -> None:
    mean = in_mesh(lambda rank: lax.pmean(torch.tensor([rank, 3]), "tp"), (2,))[0]
    assert (mean.dtype, mean.tolist()) == (torch.float32, [0.5, 3.0])


@pytest.mark.parametrize("operation", ARGUMENTS)
def test_every_collective_takes_trees_of_every_library(operation: str) -> None:
    def body(rank: int) -> Any:
        x = torch.arange(6.0).view(2, 3) + rank
        x.requires_grad_()
        array = x.detach().numpy().copy()
        array.flags.writeable = False
        apply = partial(getattr(lax, operation), axis_name="tp", **ARGUMENTS[operation])
        alone = apply(x)
        tree = apply({"t": x, "n": [array]})
        (tree["t"] * alone.detach()).sum().backward()
        assert torch.equal(tree["t"], alone)
        assert type(tree["n"][0]) is np.ndarray
        assert np.array_equal(tree["n"][0], alone.detach().numpy())
        assert not np.shares_memory(tree["n"][0], array)
        assert tree["n"][0].flags.writeable
        return x.grad is not None

    assert in_mesh(body, (2,)) == [True] * 2


NO_NUMBERS = ["all_gather", "psum_scatter", "all_to_all", "ppermute", "pshuffle", "pswapaxes"]


@pytest.mark.parametrize("operation", NO_NUMBERS)
def test_a_number_is_rejected_where_the_result_is_no_number(operation: str) -> None:
    body = lambda rank: getattr(lax, operation)([1.5], "tp", **ARGUMENTS[operation])  # noqa: E731
    assert refusal(KindError, body) == (
        f"{operation} cannot take a float as x[0]\n"
        "  expected: a torch tensor, or an array of NumPy or CuPy\n"
        "  fix:      convert it to a tensor: x[0] = torch.tensor(x[0])"
    )


@pytest.mark.parametrize(
    ("operation", "wrong", "error"),
    [
        ("psum_scatter", torch.ones(3), ShapeError),
        ("all_gather", torch.tensor(1.0), ShapeError),
        ("all_to_all", torch.ones(3), ShapeError),
        ("pswapaxes", torch.ones(3), ShapeError),
        ("pmax", torch.ones(2) * 1j, DtypeError),
        ("pmin", torch.ones(2) * 1j, DtypeError),
    ],
)
def test_a_leaf_that_does_not_fit_is_rejected_before_any_is_sent(
    operation: str, wrong: torch.Tensor, error: type[Exception]
) -> None:
    options = {"axis": 0, "tiled": True} if operation == "all_gather" else ARGUMENTS[operation]

    def alone(rank: int) -> None:
        if rank == 1:
            with pytest.raises(error):
                getattr(lax, operation)([torch.ones(2, 2), wrong], "tp", **options)

    in_mesh(alone)


def test_pcast_knows_jaxs_casts_alone() -> None:
    def body(rank: int) -> Any:
        gradients = []
        for to in ("varying", "reduced", "unreduced"):
            x = torch.ones((), requires_grad=True)
            (lax.pcast(x, "tp", to=to) * (rank + 1)).backward()
            gradients.append(x.grad.item())
        for to in ("invarying", "V", None):
            with pytest.raises(ArgumentError, match=f"pcast has no cast to {to!r}"):
                lax.pcast(torch.ones(()), "tp", to=to)
        return gradients

    assert in_mesh(body, (2,)) == [[3.0, 3.0, 1.0], [3.0, 3.0, 2.0]]


def test_a_ragged_exchange_of_arrays() -> None:
    def body(rank: int) -> Any:
        operand, output = np.arange(3.0) + 10 * rank, np.full(4, -1.0)
        sent, places = ([1, 2], [1, 2]) if rank == 0 else ([1, 2], [2, 0])
        result = lax.ragged_all_to_all(
            operand,
            output,
            np.array([0, 1]),
            np.array(sent),
            torch.tensor(places),
            [1, 1] if rank == 0 else [2, 2],
            axis_name="tp",
        )
        assert output.tolist() == [-1.0] * 4
        return type(result) is np.ndarray, result.tolist()

    assert in_mesh(body, (2,)) == [
        (True, [-1.0, 0.0, 10.0, -1.0]),
        (True, [11.0, 12.0, 1.0, 2.0]),
    ]


def test_a_leaf_that_is_no_array_is_named_by_its_path_before_anything_is_sent() -> None:
    def body(rank: int) -> Any:
        return lax.psum({"a": torch.ones(1), "b": [1, {"c": "text"}]}, "tp")

    assert refusal(KindError, body) == (
        "psum cannot take a str as x['b'][1]['c']\n"
        "  expected: a torch tensor, or an array of NumPy or CuPy"
    )
    # On one rank alone, with a good leaf before the bad one: nobody is waited for.

    def alone(rank: int) -> None:
        if rank == 1:
            with pytest.raises(KindError):
                body(rank)

    in_mesh(alone)


NONE = "axis_index_groups=None"
SIGNATURES = {  # JAX 0.10.2's, and mesh
    "psum": f"x, axis_name, *, {NONE}",
    "pmean": f"x, axis_name, *, {NONE}",
    "pmax": f"x, axis_name, *, {NONE}",
    "pmin": f"x, axis_name, *, {NONE}",
    "all_gather": f"x, axis_name, *, {NONE}, axis=0, tiled=False, to='varying'",
    "psum_scatter": f"x, axis_name, *, scatter_dimension=0, {NONE}, tiled=False",
    "all_to_all": f"x, axis_name, split_axis, concat_axis, *, {NONE}, tiled=False",
    "ragged_all_to_all": "operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, "
    f"*, axis_name, {NONE}",
    "ppermute": "x, axis_name, perm, *",
    "pshuffle": "x, axis_name, perm, *",
    "pswapaxes": f"x, axis_name, axis, *, {NONE}",
    "pbroadcast": "x, axis_name, source, *",
    "pcast": "x, axis_name, *, to",
    "pvary": "x, axis_name, *",
    "axis_index": "axis_name, *",
    "axis_size": "axis_name, *",
}


@pytest.mark.parametrize("operation", lax.__all__)
def test_signatures(operation: str) -> None:
    shown = inspect.signature(getattr(lax, operation))
    parameters = [p.replace(annotation=p.empty) for p in shown.parameters.values()]
    assert f"({SIGNATURES[operation]}, mesh=None)" == str(inspect.Signature(parameters))


def test_the_module_offers_its_public_names_alone() -> None:
    assert dir(lax) == sorted(lax.__all__) == sorted(SIGNATURES)
    # pytest adds names of its own, which are no identifiers, where it has read the doctests.
    rooms = {name for name, value in vars(lax).items() if isinstance(value, ModuleType)}
    names = {name for name in vars(lax) if name.isidentifier() and not name.startswith("__")}
    assert names - rooms == set(lax.__all__)
    assert rooms - {"equality_checks"} == {
        "axes",
        "reductions",
        "data_movement",
    }  # loaded by md.assert_equal


# -- a model split over tp ----------------------------------------------------------------------


class Whole(nn.Module):
    """Two layers with biases and a norm before each, on one device."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.up = nn.Linear(width, hidden, dtype=torch.float64)
        self.down = nn.Linear(hidden, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Split(nn.Module):
    """The same block: ``up`` split by columns over tp, ``down`` by rows."""

    def __init__(self, whole: Whole, axis: Any) -> None:
        super().__init__()
        index, size = lax.axis_index(axis), lax.axis_size(axis)
        self.axis = axis
        self.norm = whole.norm
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size, dim=0)[index].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(size)[index].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, dim=1)[index].clone())
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = lax.pvary(self.norm(x), self.axis)  # enters the split part: I -> V
        h = torch.nn.functional.gelu(h @ self.up.T + self.up_bias)
        return x + lax.psum(h @ self.down.T, self.axis) + self.down_bias  # leaves it: V -> I


@pytest.mark.parametrize(
    ("ranks", "axis"),
    [
        ([[0, 1, 2, 3]], "tp"),
        ([[0]], "tp"),
        ([[2, 0], [3, 1]], "tp"),
        ([[2, 0], [3, 1]], ("tp", "dp")),
    ],
)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_column_then_row_parallel_equals_the_whole(
    ranks: Any, axis: Any, is_checkpointed: bool
) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Whole(4, 8) for _ in range(2))
    x, target = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def run(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if is_checkpointed else block(x)
        return x

    def program(blocks: Any) -> Any:
        with md.DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")):
            split = nn.ModuleList(Split(block, axis) for block in blocks)
            mine = x.clone().requires_grad_()
            output = run(split, mine)
            ((output - target) ** 2).sum().backward()
            grads = {name: parameter.grad for name, parameter in split.named_parameters()}
            return lax.axis_index(axis), lax.axis_size(axis), output.detach(), mine.grad, grads

    results = md.simulate(program, np.size(ranks), args=(blocks,))
    mine = x.clone().requires_grad_()
    output = run(blocks, mine)
    ((output - target) ** 2).sum().backward()
    for index, size, found, grad_x, grads in results:
        torch.testing.assert_close(found, output.detach())
        torch.testing.assert_close(grad_x, mine.grad)
        for i, block in enumerate(blocks):
            wanted = {
                "norm.weight": block.norm.weight.grad,
                "norm.bias": block.norm.bias.grad,
                "up": block.up.weight.grad.chunk(size, dim=0)[index],
                "up_bias": block.up.bias.grad.chunk(size)[index],
                "down": block.down.weight.grad.chunk(size, dim=1)[index],
                "down_bias": block.down.bias.grad,
            }
            assert {f"{i}.{name}" for name in wanted} == {n for n in grads if n[0] == str(i)}
            for name, grad in wanted.items():
                torch.testing.assert_close(grads[f"{i}.{name}"], grad, msg=name)


def test_without_pvary_a_rank_has_its_own_part_of_the_gradient_alone() -> None:
    def body(rank: int, operation: Any) -> Any:
        x = torch.ones(2, requires_grad=True)
        lax.psum(operation(x) * (rank + 1), "tp").sum().backward()
        return x.grad.tolist()

    # The derivative of (1 + 2) * sum(x) is 3.
    assert in_mesh(lambda rank: body(rank, lambda x: lax.pvary(x, "tp")), (2,)) == [[3, 3], [3, 3]]
    assert in_mesh(lambda rank: body(rank, lambda x: x), (2,)) == [[1, 1], [2, 2]]
