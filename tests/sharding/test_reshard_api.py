"""``reshard``, ``shard`` and ``unshard`` as programs call them, against slices and einops."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    KindError,
    MeshError,
    NotInGroupError,
    PatternError,
    ShapeError,
)
from meshdist.sharding.resharding import Move
from tests.pool import Pool
from tests.sharding.reshard_cases import Lie, kept, mesh_of

SIZES = {"h": 5, "k": 2, "s": 3, "t": 4}


@st.composite
def sides(draw: Any, names: list[str]) -> tuple[str, str, Lie]:
    """One side of a pattern over all names: its text, einops' text, and how its groups lie."""
    order = draw(st.permutations(names))
    axes = iter(draw(st.permutations(["a", "b"])))
    words, plain, dims = [], [], []
    at = 0
    while at < len(order):
        count = draw(st.integers(1, 2))
        group = order[at : at + count]
        at += count
        cut = draw(st.sampled_from(["", "", "one"])) and next(axes, "")
        text = f"({' '.join(group)})" if len(group) > 1 else group[0]
        words.append(f"{text}@{cut}" if cut else text)
        plain.append(text)
        dims.append((group, "ab".find(cut) if cut else None))
        if draw(st.integers(0, 5)) == 0:
            words.append("1")
            plain.append("1")
            dims.append(([], None))
    return " ".join(words), " ".join(plain), dims


def local_of(whole: np.ndarray, dims: Any, mesh_sizes: Any, at: Any) -> np.ndarray:
    """The oracle: of each dim the parts whose first name's index lies in this rank's part."""
    found = []
    for group, axis in dims:
        shape = [SIZES[name] for name in group] or [1]
        indices = np.arange(math.prod(shape)).reshape(shape)
        if axis is not None:
            indices = np.array_split(indices, mesh_sizes[axis])[at[axis]]
        found.append(indices.ravel())
    return whole[np.ix_(*found)]


@given(st.data())
def test_dims_are_reordered_and_regrouped(data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=4, unique=True))
    left, plain_left, before = data.draw(sides(names))
    right, plain_right, after = data.draw(sides(names))
    sizes = {name: SIZES[name] for name in names}
    shape = [math.prod(SIZES[name] for name in group) for group, _ in before]
    whole = np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
    moved = rearrange(whole, f"{plain_left} -> {plain_right}", **sizes)

    def program() -> None:
        mesh = mesh_of((2, 3))
        at = mesh.get_coordinate()
        x = torch.from_numpy(local_of(whole, before, (2, 3), at)).requires_grad_()
        y = md.reshard(x, f"{left} -> {right}", mesh, **sizes)
        assert np.array_equal(y.detach().numpy(), local_of(moved, after, (2, 3), at))
        (grad,) = torch.autograd.grad(y, x, 3 * y)
        assert torch.equal(grad, 3 * x)

    md.simulate(program, 6)


def test_sizes_not_given_are_the_shards_times_their_number() -> None:
    def program() -> Any:
        with mesh_of((2, 2)):
            x = torch.ones(2, 3, 4)
            return (
                md.reshard(x, "b@a ... -> b ...").shape,
                md.reshard(x, "s@(a,b) h d -> s h@b d").shape,
                md.reshard(x, "(h k)@a s d -> h@b k s d", k=2).shape,
                md.reshard(x, "b@a s d -> b s d", shape=(3, 3, 4)).shape
                if md.get_rank() < 2
                else md.reshard(x[:1], "b@a s d -> b s d", shape=[3, 3, 4]).shape,
            )

    assert md.simulate(program, 4)[0] == ((4, 3, 4), (8, 2, 4), (1, 2, 3, 4), (3, 3, 4))


def test_a_call_is_planned_once() -> None:
    def program() -> int:
        mesh = mesh_of((2,))
        for _ in range(3):
            md.reshard(torch.ones(2, 4), "s@a d -> s d@a", mesh)
            md.shard(np.ones(4), "s@a", mesh)
            md.unshard(np.ones(4), "s@a", mesh)
        return len(mesh.caches.entries[Move])

    assert md.simulate(program, 2) == [3, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.complex128])
def test_numpy_arrays(dtype: Any) -> None:
    whole = np.arange(24).reshape(6, 4).astype(dtype)

    def program() -> None:
        mesh = mesh_of((2, 2))
        at = mesh.get_coordinate()
        x = whole[kept(Lie(((0,), ())), (6, 4), (2, 2), at)[0]]
        expected = whole[:, np.array_split(np.arange(4), 2)[at[1]]]
        for one in (x, np.asfortranarray(x), np.stack([x, x], -1)[..., 0]):
            y = md.reshard(one, "s@a d -> s d@b", mesh)
            assert type(y) is np.ndarray and y.dtype == dtype and np.array_equal(y, expected)
        x.flags.writeable = False
        assert np.array_equal(md.reshard(x, "s@a d -> s d@b", mesh), expected)
        assert np.array_equal(md.unshard(md.shard(whole, "s d@b", mesh), "s d@b", mesh), whole)

    md.simulate(program, 4)


def test_shard_keeps_the_own_part_and_its_gradient_gathers() -> None:
    whole = torch.arange(20.0).view(5, 4)

    def program() -> None:
        mesh = mesh_of((2, 2))
        at = mesh.get_coordinate()
        w = whole.clone().requires_grad_()
        x = md.shard(w, "s@a d@b", mesh)
        rows, columns = kept(Lie(((0,), (1,))), (5, 4), (2, 2), at)
        assert np.array_equal(x.detach().numpy(), whole.numpy()[np.ix_(rows, columns)])
        (x * x).sum().backward()
        assert torch.equal(w.grad, 2 * whole)

        y = md.shard(whole, "s d {U:b}", mesh)
        assert torch.equal(y, whole if at[1] == 0 else torch.zeros(5, 4))
        sharding = md.NamedSharding(mesh, md.P(None, "a"), shard_sizes={1: (1, 3)})
        assert md.shard(whole, sharding).shape == (5, 1 + 2 * at[0])
        assert torch.equal(md.unshard(md.shard(whole, sharding), sharding), whole)
        assert md.shard(whole, "(g h)@b d", mesh, g=5).shape == (3 - at[1], 4)

    md.simulate(program, 4)


def test_unshard_gives_the_whole_and_its_gradient_is_the_own_part() -> None:
    def program() -> None:
        mesh = mesh_of((3,))
        x = torch.full((2 - md.get_rank() // 2,), float(md.get_rank()), requires_grad=True)
        whole = md.unshard(x, "s@a", mesh, shape=(5,))
        assert whole.tolist() == [0, 0, 1, 1, 2]
        (whole * torch.arange(5.0)).sum().backward()
        assert x.grad.tolist() == [[0, 1], [2, 3], [4]][md.get_rank()]

    md.simulate(program, 3)


def test_scalars() -> None:
    def program() -> Any:
        mesh = mesh_of((2,))
        x = torch.tensor(1.0 + md.get_rank(), requires_grad=True)
        y = md.reshard(x, "{U:a} -> ", mesh)
        y.backward()
        return y.item(), x.grad.item(), md.reshard(np.float64(2), " -> 1", mesh).tolist()

    assert md.simulate(program, 2) == [(3.0, 1.0, [2.0])] * 2


# -- sharded arrays -------------------------------------------------------------------------------


def test_sharded_arrays() -> None:
    whole = torch.arange(60.0).view(5, 4, 3)

    def program() -> None:
        mesh = mesh_of((2, 2))
        x = md.ShardedArray(
            md.shard(whole, "b@a h d", mesh), md.NamedSharding(mesh, md.P("a")), whole.shape
        )
        for target in ("b h@b d", md.P(None, "b"), md.NamedSharding(mesh, md.P(None, "b"))):
            y = md.reshard(x, target)
            assert isinstance(y, md.ShardedArray) and y.shape == whole.shape
            assert torch.equal(y.local, md.shard(whole, "b h@b d", mesh))
        assert md.reshard(x, "b@a h d").local is x.local
        z = md.reshard(x, "b@a h d -> d (h b)@b", b=5)
        assert z.shape == (3, 20) and z.mesh is mesh
        expected = whole.permute(2, 1, 0).reshape(3, 20)
        assert torch.equal(z.full(), expected) and torch.equal(md.unshard(z), expected)
        found = md.unshard(z, root=2)
        assert (found is not None) == (md.get_rank() == 2)
        assert found is None or torch.equal(found, expected)

    md.simulate(program, 4)


def test_sharded_arrays_of_read_only_memory_are_resharded() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        local = np.arange(2.0) + 2 * mesh.get_rank()
        local.flags.writeable = False
        x = md.ShardedArray(local, md.NamedSharding(mesh, md.P("dp")))
        return md.reshard(x, "n").local.tolist()

    assert md.simulate(program, 2) == [[0.0, 1.0, 2.0, 3.0]] * 2


def test_sharded_arrays_know_how_they_lie() -> None:
    def array(mesh: Any) -> Any:
        return md.ShardedArray(torch.zeros(2, 4), md.NamedSharding(mesh, md.P("a")))

    text = refusal(ArgumentError, lambda mesh: md.reshard(array(mesh), "s d -> s d@a"))
    assert "the array's sharding does not match the left side of 's d -> s d@a'" in text
    assert "expected: P('a',)" in text
    text = refusal(ArgumentError, lambda mesh: md.reshard(array(mesh), "s d@a", shape=(4, 4)))
    assert "reshard of a ShardedArray takes no mesh and no shape" in text
    text = refusal(ArgumentError, lambda mesh: md.unshard(array(mesh), "s d@a"))
    assert "unshard of a ShardedArray takes no pattern" in text and "unshard(array)" in text
    text = refusal(KindError, lambda mesh: md.unshard(X, mesh=mesh))
    assert "unshard requires a sharding" in text


# -- uneven parts without the size of the whole ---------------------------------------------------


def uneven_text(first: int, sizes: dict[str, int], operation: str) -> str:
    """The error of ranks that hold ``first`` and 7 - ``first`` rows; "" for none."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows = 7 - first if md.get_rank() else first
    x = torch.full((rows, 4), float(md.get_rank()))
    rules: dict[str, tuple[Any, ...]] = {
        "reshard": ("b@dp d -> b d@dp", mesh),
        "unshard": ("b@dp d", mesh),
    }
    try:
        if operation == "sharding":
            lies = md.NamedSharding(mesh, md.P("dp", None), shard_sizes={0: (3, 4)})
            whole = md.reshard(x, lies, md.NamedSharding(mesh, md.P(None, "dp")))
            assert whole.tolist() == [[0.0] * 2] * 3 + [[1.0] * 2] * 4
        else:
            getattr(md, operation)(x, *rules[operation], **sizes)
    except (md.errors.MismatchError, ShapeError) as error:
        return str(error)
    return ""


def forgotten_size(operation: str) -> str:
    return uneven_text(3, {}, operation)


def given_size(first: int, b: int, operation: str) -> str:
    return uneven_text(first, {"b": b}, operation)


def by_sharding() -> str:
    return uneven_text(3, {}, "sharding")


def different_patterns() -> str:
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    pattern = "b@dp d -> b d@dp" if md.get_rank() else "b@dp d -> b d"
    with pytest.raises(md.errors.MismatchError) as raised:
        md.reshard(torch.zeros(3 + md.get_rank(), 4), pattern, mesh)
    return raised.value.fix or ""


@pytest.fixture(params=["simulated", "processes"])
def on_two_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    if request.param == "simulated":
        return lambda call, *args: md.simulate(call, 2, args=args)
    pool: Pool = request.getfixturevalue("pool")
    return lambda call, *args: pool.run(call, 2, *args)


@pytest.mark.parametrize("operation", ["reshard", "unshard"])
def test_uneven_parts_need_the_size_of_the_whole(
    operation: str, on_two_ranks: Callable[..., list[Any]]
) -> None:
    for text in on_two_ranks(forgotten_size, operation):
        assert "of shape (6, 4)" in text and "of shape (8, 4)" in text
        assert (
            "  fix:      if the parts are uneven, pass the global size, the sum of all parts, "
            "on every rank: b=...; else call the same collectives in the same order" in text
        )
    # That size, where the larger part comes first, is right; and 7 is told to be cut so.
    assert on_two_ranks(given_size, 4, 7, operation) == [""] * 2
    for rank, text in enumerate(on_two_ranks(given_size, 3, 7, operation)):
        assert f"rank {rank} holds no shard of the global array: dim 0 has size {3 + rank}" in text
        assert (
            "of a global array of shape (7, 4), whose dim 0 is cut into 4, 3, larger parts first"
            in text
        )
        assert "md.NamedSharding(mesh, P('dp', None), shard_sizes={0: sizes})" in text


def test_uneven_parts_in_any_order_lie_by_a_sharding(
    on_two_ranks: Callable[..., list[Any]],
) -> None:
    assert on_two_ranks(by_sharding) == [""] * 2
    for fix in on_two_ranks(different_patterns):
        assert fix.startswith("call the same collectives in the same order")


# -- what is rejected ------------------------------------------------------------------------------


def refusal(kind: type[Exception], call: Callable[..., Any], size: Any = (2, 2)) -> str:
    """The text that a call raises on rank 0; no rank sends anything."""

    def program() -> str:
        mesh = mesh_of(size)
        before = [group.device_groups[0].recorder.sequence for group in mesh.get_all_groups()]
        with pytest.raises(kind) as found:
            call(mesh)
        after = [group.device_groups[0].recorder.sequence for group in mesh.get_all_groups()]
        assert before == after
        return str(found.value)

    return md.simulate(program, math.prod(size))[0]


X = torch.zeros(4, 4)


def test_patterns_that_do_not_fit_the_mesh() -> None:
    text = refusal(AxisError, lambda mesh: md.reshard(X, "s@tp d -> s d", mesh))
    assert "no axis 'tp' in the mesh" in text and "column 3 of 's@tp d -> s d'" in text
    text = refusal(PatternError, lambda mesh: md.reshard(X, "s@a d@a -> s d", mesh))
    assert "'a' again" in text and "^" in text
    text = refusal(PatternError, lambda mesh: md.reshard(X, "s@a d -> s e", mesh))
    assert "the sides of this pattern name different dims" in text
    text = refusal(PatternError, lambda mesh: md.reshard(X, "s@a d", mesh))
    assert "this pattern has one side" in text
    text = refusal(PatternError, lambda mesh: md.shard(X, "s@a d -> s d", mesh))
    assert "this pattern has two sides" in text
    text = refusal(KindError, lambda mesh: md.reshard(X, ["s@a"], mesh))
    assert "a pattern must be a string" in text and "fix:" not in text
    text = refusal(KindError, lambda mesh: md.reshard(X, md.P("a", None), mesh))
    assert "a pattern must be a string" in text
    assert "found:    P('a', None), a PartitionSpec" in text
    assert text.endswith(
        "fix:      pass a sharding that has the spec: sharding = "
        "md.NamedSharding(mesh, P('a', None)); then call md.shard(x, sharding), "
        "md.unshard(x, sharding) or md.reshard(x, sharding, other_sharding)"
    )


def test_shardings_in_place_of_patterns() -> None:
    def program() -> bool:
        mesh, whole = mesh_of((2, 2)), torch.arange(16.0).view(4, 4)
        rows, columns = (md.NamedSharding(mesh, md.P(*axes)) for axes in (("a",), (None, "a")))
        x = md.reshard(md.shard(whole, rows), rows, columns)
        return torch.equal(md.unshard(x, columns), whole)

    assert md.simulate(program, 4) == [True] * 4


def test_arrays_that_do_not_fit_the_pattern() -> None:
    text = refusal(ShapeError, lambda mesh: md.reshard(X, "s@a -> s", mesh))
    assert "the pattern names 1 dims, the array has 2" in text
    text = refusal(ShapeError, lambda mesh: md.reshard(X, "s@a d -> s d", mesh, s=10))
    assert "rank 0" in text and "(4, 4)" in text and "5" in text
    text = refusal(PatternError, lambda mesh: md.reshard(X, "s@a d -> s d", mesh, e=4))
    assert "a size is given for 'e', which the pattern does not name" in text
    text = refusal(KindError, lambda mesh: md.reshard(X, "s@a d -> s d", mesh, s=[4]))
    assert "the size of dim 's'" in text and "[4], a list" in text
    text = refusal(KindError, lambda mesh: md.reshard([1.0], "s@a -> s", mesh))
    assert "reshard cannot take a list as x" in text


def test_shapes_that_are_none() -> None:
    text = refusal(KindError, lambda mesh: md.reshard(X, "s@a d -> s d", mesh, shape=8))
    assert "reshard: shape must be the global shape" in text and "found:    8" in text
    text = refusal(ShapeError, lambda mesh: md.unshard(X, "s@a d", mesh, shape=(8, -4)))
    assert "unshard: no dim has a size below 0" in text


def test_shards_that_are_none_of_the_whole() -> None:
    def call(mesh: Any) -> Any:
        here, there = (md.NamedSharding(mesh, md.P(*axes)) for axes in (("a",), (None, "a")))
        return md.reshard(X, here, there, shape=(10, 4))

    text = refusal(ShapeError, call)
    assert "reshard: the local array is not a shard of an array of shape (10, 4)" in text
    assert "where:    rank 0 (a=0, b=0) of mesh (a=2, b=2), P('a',)" in text
    assert "expected: shape (5, 4), this rank's shard" in text
    assert "found:    shape (4, 4)" in text
    assert "fix:      pass the global shape, the same on every rank, or" in text


def test_meshes() -> None:
    text = refusal(MeshError, lambda mesh: md.reshard(X, "s@a d -> s d"))
    assert "reshard: there is no current mesh" in text and "reshard(..., mesh=mesh)" in text
    text = refusal(KindError, lambda mesh: md.reshard(X, "s@a d -> s d", mesh.layout))
    assert "reshard needs the groups of a DeviceMesh" in text and "a Layout" in text

    def to_other_ranks(mesh: Any) -> Any:
        other = md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("c",))
        here = md.NamedSharding(mesh, md.P("a"))
        return md.reshard(X, here, md.NamedSharding(other, md.P("c")), shape=(8, 4))

    def program() -> str:
        mesh = mesh_of((2, 2))
        with pytest.raises((MeshError, NotInGroupError)) as found:
            to_other_ranks(mesh)
        return str(found.value)

    texts = md.simulate(program, 4)
    assert "other ranks" in texts[0] or "ranks" in texts[0]
    assert "reshard on a mesh that does not contain this rank" in texts[3]


def test_ranks_outside_the_mesh() -> None:
    def program() -> str:
        mesh = md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))
        if md.get_rank() < 2:
            return ""
        with pytest.raises(NotInGroupError) as found:
            md.unshard(X, "s@a d", mesh)
        return str(found.value)

    text = md.simulate(program, 3)[2]
    assert "unshard on a mesh that does not contain this rank" in text
    assert "skip the call if mesh.get_coordinate() is None" in text


def test_shardings() -> None:
    def sharding(mesh: Any) -> Any:
        return md.NamedSharding(mesh, md.P("a"))

    text = refusal(KindError, lambda mesh: md.reshard(X, sharding(mesh), mesh))
    assert "reshard from a NamedSharding needs a target NamedSharding" in text
    text = refusal(ArgumentError, lambda mesh: md.reshard(X, *[sharding(mesh)] * 2, s=4))
    assert "takes no sizes by name" in text and "found:    s=4" in text
    text = refusal(ArgumentError, lambda mesh: md.shard(X, sharding(mesh), mesh["a"]))
    assert "shard: mesh= is not the mesh of the NamedSharding" in text
    text = refusal(KindError, lambda mesh: md.shard(X, sharding(mesh.layout)))
    assert "shard needs the groups of a DeviceMesh" in text


@pytest.mark.parametrize("left", ["f d@a", "f d"])
def test_a_tensor_that_lies_otherwise_than_the_left_side_says_is_rejected(left: str) -> None:
    """Read otherwise it is another array, of another shape: nothing else would tell."""
    whole = torch.arange(32.0).view(4, 8)

    def program() -> list[str]:
        mesh, found = mesh_of((2, 1)), []
        with mesh:
            x = md.shard(whole, "f@a d")
            assert torch.equal(md.reshard(x, "f@a d@b -> f d"), whole)  # b has one rank
            assert torch.equal(md.reshard(x, "(f g)@a d -> (f g) d", g=2), whole)
            assert (
                md.reshard(x, "f d {U:a} -> f d").shape == x.shape
            )  # each rank's is its partial sum
            for context in (nullcontext(), md.typed(mesh)):
                with context, pytest.raises((ArgumentError, AxisTypeError)) as caught:
                    md.reshard(x, f"{left} -> d f")
                found.append(str(caught.value))
            md.reshard(md.annotate(x, left), f"{left} -> d f")
        return found

    for untyped, typed in md.simulate(program, 2):
        assert untyped.startswith("reshard: the tensor's annotation does not match the left side")
        assert "found:    x is annotated as P('a', None)" in untyped
        assert "if the annotation is outdated, call md.annotate(x, ...)" in untyped
        assert (typed == untyped) == (left == "f d@a")
