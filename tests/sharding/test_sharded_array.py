"""``ShardedArray``: what it is, what it rejects, and that nothing is sent unasked."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch

import meshdist as md
from meshdist import DeviceMesh
from meshdist.errors import (
    ArgumentError,
    KindError,
    MeshError,
    NotInGroupError,
    ShapeError,
)
from tests.pool import Pool
from tests.sharding.array_cases import assemble, error_on_mesh, held, on_mesh

WHOLE = torch.arange(40.0).reshape(10, 4)


def rows(mesh: DeviceMesh) -> md.ShardedArray:
    return md.device_put(WHOLE, md.NamedSharding(mesh, md.P("dp")))


def test_what_it_says_of_itself() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = rows(mesh)
        assert x.local is x.addressable_shards[0].data and x.mesh is mesh
        return x.shape, x.ndim, x.dtype, len(x), x.sharding.spec, repr(x), held(x)

    shape, ndim, dtype, length, spec, text, shard = on_mesh(program)[3]
    assert (shape, ndim, dtype, length, spec) == ((10, 4), 2, torch.float32, 10, md.P("dp"))
    assert shard.index == (slice(5, 10), slice(0, 4)) and shard.replica == 1
    assert text.startswith(
        "ShardedArray(float32[10@dp, 4], rank 3 (dp=1, tp=1) of mesh (dp=2, tp=2) holds "
        "[5:10, 0:4]: tensor([[20., "
    )


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (md.P(None, ("dp", "tp")), "float32[10, 4@(dp,tp)]"),
        (md.P("dp", unreduced={"tp"}), "float32[10@dp, 4]{U:tp}"),
        (md.P(unreduced={"tp"}, reduced={"dp"}), "float32[10, 4]{R:dp U:tp}"),
    ],
)
def test_its_type(spec: md.P, text: str) -> None:
    def program(mesh: DeviceMesh) -> str:
        return held(md.device_put(WHOLE, md.NamedSharding(mesh, spec))).type

    assert on_mesh(program) == [text] * 4


def test_the_shape_of_the_whole_follows_from_equal_shards_or_their_sizes() -> None:
    def program(mesh: DeviceMesh) -> Any:
        part = torch.zeros(3, 2)
        own = torch.zeros((5, 2)[mesh.get_local_rank("dp")])
        even = md.ShardedArray(part, md.NamedSharding(mesh, md.P(("dp", "tp"), None)))
        given = md.ShardedArray(own, md.NamedSharding(mesh, md.P("dp"), shard_sizes={0: (5, 2)}))
        with mesh:
            return even.shape, given.shape, md.ShardedArray(part, md.P("dp")).shape

    assert on_mesh(program) == [((12, 2), (7,), (6, 2))] * 4


SPECS = [
    md.P(),
    md.P("dp", "tp"),
    md.P(None, ("tp", "dp")),
    md.P("tp", unreduced={"dp"}),
    md.P("tp", reduced={"dp"}),
]


@pytest.mark.parametrize("library", [torch.Tensor.clone, torch.Tensor.numpy])
def test_full_and_reshard(library: Callable[..., Any]) -> None:
    def program(mesh: DeviceMesh) -> Any:
        found = []
        for source in SPECS:
            x = md.device_put(library(WHOLE), md.NamedSharding(mesh, source))
            assert np.array_equal(x.full(), WHOLE) and type(x.full()) is type(library(WHOLE))
            for target in SPECS:
                y = x.reshard(md.NamedSharding(mesh, target))
                assert y.sharding.spec == target and type(y.local) is type(x.local)
                found.append(held(y))
        return found

    for shards in zip(*on_mesh(program), strict=True):
        assert np.array_equal(assemble(shards), WHOLE)


def test_reshard_is_itself_where_nothing_changes() -> None:
    def program(mesh: DeviceMesh) -> None:
        x = rows(mesh)
        assert x.reshard(x.sharding) is x and x.reshard(md.P("dp")) is x
        same = x.reshard(md.P("dp", None))
        assert same.local is x.local and same.sharding.spec == md.P("dp", None)
        whole = md.device_put(WHOLE, md.NamedSharding(mesh, md.P()))
        assert whole.full() is whole.local

    on_mesh(program)


def test_reshard_by_pattern() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = rows(mesh)
        y = md.reshard(x, "(b c)@dp d -> d@tp b c", c=5)
        assert md.reshard(x, md.P("dp")) is x and md.reshard(x, x.sharding, mesh) is x
        z = x.reshard("b@dp d -> b d@dp {R:tp}")
        return held(y), held(z), repr(y.sharding.spec), y.sharding.mesh is mesh

    results = on_mesh(program)
    assert np.array_equal(
        assemble([one[0] for one in results]), WHOLE.view(2, 5, 4).permute(2, 0, 1)
    )
    assert np.array_equal(assemble([one[1] for one in results]), WHOLE)
    assert results[0][1].type == "float32[10, 4@dp]{R:tp}"
    assert results[0][2:] == ("P('tp', None, None)", True)


def test_gradients_of_full_and_reshard() -> None:
    weights = torch.arange(40.0).reshape(10, 4).cos()

    def program(mesh: DeviceMesh) -> Any:
        x = WHOLE.clone().requires_grad_()
        y = md.device_put(x, md.NamedSharding(mesh, md.P("dp"))).reshard(md.P(None, "tp"))
        (y.full() * weights).sum().backward()
        return x.grad

    assert all(torch.equal(grad, weights) for grad in on_mesh(program))


# -- slices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [torch.Tensor.clone, torch.Tensor.numpy])
def test_slices_keep_what_each_rank_has(library: Callable[..., Any]) -> None:
    indices: list[Any] = [
        slice(2, 9), slice(None, None, 3), slice(0, 1), (slice(7, 3), 1), (..., 2), (None, ...),
        (slice(-4, None), slice(1, 3)),
    ]  # fmt: skip

    def program(mesh: DeviceMesh) -> Any:
        x = md.device_put(library(WHOLE), md.NamedSharding(mesh, md.P(("dp", "tp"))))
        return [held(x[index]) for index in indices] + [held(x[1:8][1:5][::2])]

    expected = [WHOLE.numpy()[index] for index in indices] + [WHOLE.numpy()[1:8][1:5][::2]]
    for shards, whole in zip(zip(*on_mesh(program), strict=True), expected, strict=True):
        assert np.array_equal(assemble(shards), whole)


def test_slices_are_views_and_have_gradients() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = rows(mesh)
        assert x[2:].local.untyped_storage().data_ptr() == x.local.untyped_storage().data_ptr()
        whole = WHOLE.clone().requires_grad_()
        md.device_put(whole, x.sharding)[3:7, 1].sum().full().backward()
        return whole.grad

    expected = torch.zeros(10, 4)
    expected[3:7, 1] = 1
    assert all(torch.equal(grad, expected) for grad in on_mesh(program))


def test_slices_of_partial_sums_are_partial_sums() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = md.device_put(WHOLE, md.NamedSharding(mesh, md.P("dp", unreduced={"tp"})))
        return held(x[3:6])

    shards = on_mesh(program)
    assert shards[0].type == "float32[3@dp, 4]{U:tp}"
    assert np.array_equal(assemble(shards), WHOLE[3:6])


def test_iteration_over_a_whole_dim() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = md.device_put(WHOLE, md.NamedSharding(mesh, md.P(None, "tp")))
        return [held(row) for row in x]

    for row, shards in enumerate(zip(*on_mesh(program), strict=True)):
        assert np.array_equal(assemble(shards), WHOLE[row])


# -- as other things ------------------------------------------------------------------------------


def test_numbers_and_numpy_where_every_rank_holds_the_whole() -> None:
    def program(mesh: DeviceMesh) -> Any:
        whole = md.NamedSharding(mesh, md.P(reduced={"tp"}))
        x, n = md.device_put(WHOLE, whole), md.device_put(torch.tensor(3), whole)
        assert np.array_equal(np.asarray(x), WHOLE) and np.asarray(x, dtype=np.int8).dtype == "int8"
        assert np.array(x, copy=True).ctypes.data != x.local.data_ptr()
        assert 5.0 in x and -1.0 not in x
        return int(n), float(n), complex(n), bool(n), n.item(), x.is_fully_replicated

    assert on_mesh(program) == [(3, 3.0, 3 + 0j, True, 3, True)] * 4


def test_along_axes_of_size_1_every_rank_holds_the_whole() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = md.device_put(WHOLE, md.NamedSharding(mesh, md.P("dp", unreduced={"tp"})))
        return np.array_equal(np.asarray(x), WHOLE)

    assert on_mesh(program, (1, 1)) == [True]


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], list[str]]] = [
    (
        np.asarray,
        KindError,
        ["numpy.asarray needs the global array, and no rank holds it in full", "call x.full()"],
    ),
    (lambda x: np.concatenate([x, x]), KindError, ["numpy.asarray needs the global array"]),
    (lambda x: x.item(), KindError, ["item needs the global array", "[0:5, 0:4] on this rank"]),
    (bool, KindError, ["bool needs the global array", "array float32[10@dp, 4]"]),
    (int, KindError, ["int needs the global array"]),
    (float, KindError, ["float needs the global array"]),
    (complex, KindError, ["complex needs the global array"]),
    (lambda x: 3 in x, KindError, ["in needs the global array"]),
    (iter, KindError, ["cannot be iterated", "x.local"]),
    (lambda x: x.sum().item(), KindError, ["item needs the global array", "a partial sum"]),
    (lambda x: x[3], ArgumentError, ["x[3:4]"]),
    (
        lambda x: x.__setitem__(0, 1),
        KindError,
        ["cannot be written in place", "x.local[...] = value"],
    ),
    (lambda x: x.max(), AttributeError, ["has no max", "x.local.max", "x.full().max"]),
    (lambda x: x.T, AttributeError, ["has no T"]),
    (lambda x: x.nothing, AttributeError, ["no attribute 'nothing'"]),
    (lambda x: x.reshard({"dp"}), KindError, ["reshard takes a sharding", "NamedSharding(mesh"]),
    (
        lambda x: x.reshard("b@tp d -> b d"),
        ArgumentError,
        [
            "sharding does not match the left side of 'b@tp d",
            "expected: P('dp',)",
            "found:    P('tp', None)",
            "write the right side alone",
        ],
    ),
    (lambda x: x.reshard("b@dp d, d -> b"), md.PatternError, ["operand"]),
    (
        lambda x: md.reshard(x, md.P(), shape=(10, 4)),
        ArgumentError,
        ["takes no mesh and no shape"],
    ),
    (
        lambda x: md.reshard(x, md.P(), md.NamedSharding(x.mesh, md.P())),
        ArgumentError,
        ["takes no mesh and no shape"],
    ),
    (lambda x: md.all_reduce(x), KindError, ["all_reduce cannot take", "tensor.local"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_nothing_is_sent_unasked(
    call: Callable[[Any], Any], kind: type[Exception], words: list[str]
) -> None:
    text = error_on_mesh(lambda mesh: call(rows(mesh)), kind)
    for word in words:
        assert word in text, text


def test_scalars_have_no_length() -> None:
    def program(mesh: DeviceMesh) -> None:
        x = rows(mesh).sum()
        for call in (len, iter):
            with pytest.raises(TypeError, match="0-d array"):
                call(x)

    on_mesh(program)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda mesh: md.ShardedArray(WHOLE, md.NamedSharding(mesh, md.P("dp")), (10, 4)),
            ShapeError,
            ["rank 1 (dp=0, tp=1) of mesh (dp=2, tp=2), P('dp',)", "expected: shape (5, 4)",
             "found:    shape (10, 4)", "md.device_put(x, sharding)"],
        ),
        (
            lambda mesh: md.ShardedArray(torch.zeros(3), md.NamedSharding(mesh, md.P("dp")), (9,)),
            ShapeError,
            ["is not a shard of an array of shape (9,)", "expected: shape (5,)", "found:    "
                                                                                 "shape (3,)",
             "shard_sizes={dim: sizes}"],
        ),
        (
            lambda mesh: md.ShardedArray(torch.zeros(4), md.NamedSharding(mesh, md.P(None, "dp"))),
            ShapeError,
            ["entries for 2 dims"],
        ),
        (
            lambda mesh: md.ShardedArray([1, 2], md.NamedSharding(mesh, md.P())),
            KindError,
            ["ShardedArray cannot take a list as local"],
        ),
        (
            lambda mesh: md.ShardedArray(torch.zeros(2), mesh),
            KindError,
            ["ShardedArray takes a sharding", "a DeviceMesh", "NamedSharding(mesh, P('dp'))"],
        ),
        (
            lambda mesh: md.ShardedArray(torch.zeros(2), md.P()),
            MeshError,
            ["ShardedArray: there is no current mesh", "pass the mesh: NamedSharding(mesh, spec)"],
        ),
        (
            lambda mesh: md.ShardedArray(torch.zeros(2), md.NamedSharding(mesh.layout, md.P())),
            MeshError,
            ["a Layout has no processes", "md.DeviceMesh('cpu', layout)"],
        ),
        (
            lambda mesh: md.ShardedArray(
                torch.zeros(2, dtype=torch.bool), md.NamedSharding(mesh, md.P(unreduced={"dp"}))
            ),
            ArgumentError,
            ["bool values cannot be partial sums", "bool[2]{U:dp}", "int32"],
        ),
    ],
)  # fmt: skip
def test_what_is_no_sharded_array(
    make: Callable[[DeviceMesh], Any], kind: type[Exception], words: list[str]
) -> None:
    text = error_on_mesh(make, kind)
    for word in words:
        assert word in text, text


def test_a_rank_outside_the_mesh_has_none() -> None:
    def program() -> str:
        mesh = md.DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))
        if mesh.get_coordinate() is None:
            with pytest.raises(NotInGroupError) as caught:
                md.ShardedArray(torch.zeros(2), md.NamedSharding(mesh, md.P("dp")))
            return str(caught.value)
        return ""

    text = md.simulate(program, 3)[1]
    for word in ("does not contain this rank", "rank 1, mesh (dp=2)", "get_coordinate() is None"):
        assert word in text


@pytest.mark.parametrize("call", ["lax", "shard", "seed", "typed", "get_local_rank"])
def test_more_ranks_than_the_mesh_has_are_counted(call: str) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        calls = {
            "lax": lambda: md.lax.psum(torch.ones(2), "dp", mesh=mesh),
            "shard": lambda: md.shard(torch.ones(4), "f@dp", mesh=mesh),
            "seed": lambda: md.seed(0, differ_over="dp", mesh=mesh),
            "typed": lambda: md.typed(mesh).__enter__(),
            "get_local_rank": lambda: mesh.get_local_rank("dp"),
        }
        if mesh.get_coordinate() is None:
            with pytest.raises(NotInGroupError) as caught:
                calls[call]()
            return str(caught.value)
        return ""

    for rank, text in enumerate(md.simulate(program, 6)[4:], 4):
        assert f"rank {rank}, mesh (dp=2" in text
        assert "expected: one of ranks 0-3\n" in text
        assert "found:    the mesh has 4 of 6 ranks\n" in text
        assert "fix:      start 4 ranks, or create a mesh of all 6; " in text


def test_a_mesh_of_one_rank_asks_for_one_rank() -> None:
    def program() -> str:
        mesh = md.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
        if md.get_rank() == 0:
            return ""
        with pytest.raises(NotInGroupError) as caught:
            mesh.get_local_rank("dp")
        return str(caught.value)

    assert "fix:      start 1 rank, or create a mesh of all 2; " in md.simulate(program, 2)[1]


# -- copies, pickles, trees -----------------------------------------------------------------------


def test_copies() -> None:
    def program(mesh: DeviceMesh) -> None:
        x = rows(mesh)
        shallow, deep = copy.copy(x), copy.deepcopy(x)
        assert shallow.local is x.local
        assert torch.equal(deep.local, x.local) and deep.local is not x.local
        assert deep.sharding.mesh is mesh and deep.shape == x.shape

    on_mesh(program)


def test_pickles_are_for_the_rank_that_made_them() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = rows(mesh)
        loaded = pickle.loads(pickle.dumps(x))
        assert torch.equal(loaded.local, x.local) and loaded.sharding == x.sharding
        assert torch.equal(loaded.full(), WHOLE)
        texts: list[Any] = [None] * 4
        md.all_gather_object(texts, pickle.dumps(x))
        assert torch.equal(pickle.loads(texts[mesh.get_rank() ^ 1]).local, x.local)  # a replica
        with pytest.raises(ArgumentError) as caught:
            pickle.loads(texts[mesh.get_rank() ^ 2])
        return str(caught.value)

    text = on_mesh(program)[3]
    for word in ("the shard of another rank", "expected: the part [5:10, 0:4]", "[0:5, 0:4]"):
        assert word in text


def test_trees_have_it_as_a_leaf() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = rows(mesh)
        leaves, _ = optree.tree_flatten({"a": [x, 1]})
        assert leaves[0] is x
        tree = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, {"a": x})
        return held(tree["a"])

    assert np.array_equal(assemble(on_mesh(program)), WHOLE * 2)


def test_pictures() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = rows(mesh)
        return x.visualize(), x.visualize(svg=True), x._repr_svg_()

    text, svg, shown = on_mesh(program)[1]
    assert text.splitlines()[0] == "float32[10@dp, 4]" and "[1]" in text
    assert svg == shown and "<title>float32[10@dp, 4]</title>" in svg


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes(pool: Pool, backend: str) -> None:
    def program(backend: str) -> Any:
        import torch

        import meshdist as md

        whole = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
        options = md.AxisOptions(backend=backend)
        mesh = md.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), axis_options={"dp": options, "tp": options}
        )
        x = md.device_put(whole, md.NamedSharding(mesh, md.P("dp", "tp")))
        root = whole.clone().requires_grad_() if md.get_rank() == 2 else None
        y = md.device_put(root, md.NamedSharding(mesh, md.P("tp")), root=2)
        z = (torch.sin(x) + y.reshard(x.sharding))[1:, ::2]
        z.sum().full().backward()
        return z.full().detach(), None if root is None else root.grad

    whole = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    expected = (torch.sin(whole) + whole)[1:, ::2]
    gradient = torch.zeros(5, 6, dtype=torch.float64)
    gradient[1:, ::2] = 1
    results = pool.run(program, 4, backend)
    assert all(torch.equal(found, expected) for found, _ in results)
    assert torch.equal(results[2][1], gradient)


def test_typed_contexts_see_how_it_lies() -> None:
    def program(mesh: DeviceMesh) -> Any:
        weight = torch.nn.Parameter(torch.ones(4))
        reduced = md.P(reduced={"dp"})
        x = md.make_array_from_callback(
            (10, 4), md.NamedSharding(mesh, md.P("dp")), WHOLE.__getitem__
        )
        source = WHOLE if md.get_rank() == 0 else None
        put = md.device_put(source, x.sharding, root=0)
        types = [str(md.typeof(one.local)) for one in (x, put, x.sum())]
        with md.typed(mesh):
            total = (x.local * weight).sum()
            types.append(str(md.typeof(total)))
            typed_put = md.device_put(source, x.sharding, root=0)
            types.append(str(md.typeof(typed_put.local)))
            scale = weight.sum()
            factor = md.device_put(scale, md.NamedSharding(mesh, md.P())).reshard(reduced)
            product = (typed_put * factor).sum() * 2
            types.append(str(md.typeof(product.local)))
            types.append(str(md.typeof(product.full())))
            (md.lax.psum(total, "dp") + product.full()).backward()
        return types, weight.grad

    for types, gradient in on_mesh(program):
        assert types[:3] == ["float32[5@dp, 4]", "float32[5@dp, 4]", "float32[]{U:dp}"]
        assert types[3:] == ["float32[]{V:dp}", "float32[5@dp, 4]", "float32[]{U:dp}", "float32[]"]
        assert torch.equal(gradient, WHOLE.sum(0) + 2 * WHOLE.sum())
