"""Mistakes that would train on in silence end in an error, a warning, or as a page says."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import meshdist as md
from tests.inner import call_sites as program_room
from tests.mpi_job import job_of
from tests.pool import Pool


@pytest.fixture(params=["simulated", "shm", "gloo"])
def on_backend(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Runs ``fn(*args)`` on so many ranks over one backend."""
    if request.param == "simulated":
        return lambda fn, size, *args: md.simulate(fn, size, args=args)
    pool: Pool = request.getfixturevalue("pool")
    return lambda fn, size, *args: pool.run(fn, size, *args, backend=request.param)


def mesh_of_all(name: str = "a") -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=(name,))


def ending(call: Callable[[], Any]) -> str:
    try:
        call()
    except md.ArgumentError as error:
        return str(error)
    return ""


def shared_results() -> list[str]:
    size = md.get_world_size()
    x, rows, flat = torch.full((2,), 1.0), torch.zeros(size, 2), torch.zeros(size + 1)
    texts = [
        ending(lambda: md.all_gather([torch.zeros(2)] * size, x)),
        ending(lambda: md.all_gather([flat[i : i + 2] for i in range(size)], x)),
        ending(lambda: md.all_to_all([torch.zeros(2)] * size, [x] * size)),
        ending(
            lambda: md.all_gather_coalesced([[flat[:2], flat[:2]] for _ in range(size)], [x, x])
        ),
        ending(lambda: md.all_reduce_coalesced([x, x])),
        ending(lambda: md.all_reduce_coalesced([x, x[1:]])),
    ]
    columns = torch.zeros(2, size)  # these lie among each other, and share nothing
    md.all_gather(list(columns.unbind(1)), x)
    md.all_gather(list(rows), x)
    assert columns.eq(1).all() and rows.eq(1).all()
    if md.get_rank() == 0:
        texts.append(ending(lambda: md.gather(x, [torch.zeros(2)] * size, dst=0)))
    md.gather(x, [*rows] if md.get_rank() == 0 else None, dst=0)
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_results_in_one_memory_are_rejected_before_anything_is_sent(
    on_backend: Any, size: int
) -> None:
    for texts in on_backend(shared_results, size):
        operations = [text.partition(" ")[0] for text in texts]
        assert operations[:4] == ["all_gather", "all_gather", "all_to_all", "all_gather_coalesced"]
        assert operations[4:6] == ["all_reduce_coalesced"] * 2
        for text in texts:
            assert "cannot write two results into the same memory" in text
            assert "results 0 and 1, counted from 0, overlap" in text
            assert "fix:      pass separate arrays: [torch.empty_like(x) for _ in range(n)]" in text


@pytest.mark.parametrize("size", [2, 3, 5])
def test_replicas_are_drawn_from_one_state_or_rejected(size: int) -> None:
    def program() -> tuple[str, list[float]]:
        whole = md.NamedSharding(mesh_of_all(), md.P(None))
        with pytest.raises(md.UnequalError) as caught:
            md.randn(3, sharding=whole)
        md.seed(0)  # as the error says
        return str(caught.value), md.randn(3, sharding=whole).local.tolist()

    texts, drawn = zip(*md.simulate(program, size), strict=True)
    assert set(map(str, drawn)) == {str(torch.randn(3, generator=torch.manual_seed(0)).tolist())}
    assert len(set(texts)) == 1
    assert texts[0].startswith("randn: the ranks' generators draw different numbers\n")
    assert "found:    rank 0: " in texts[0] and f"rank {size - 1}: " in texts[0]
    assert "fix:      call md.seed(0) on every rank before the first draw" in texts[0]


def test_wholes_that_differ_are_found_on_simulated_ranks_and_by_assert_equal() -> None:
    def program() -> list[Any]:
        mesh = mesh_of_all()
        whole = torch.arange(3.0) + 10 * md.get_rank()
        rows = md.NamedSharding(mesh, md.P("a"))
        with pytest.raises(md.UnequalError, match="the array is not the same on every rank"):
            md.shard(whole, "f@a", mesh)
        with pytest.raises(md.UnequalError, match="the array is not the same on every rank"):
            md.device_put(whole, rows)
        parts = md.unshard(md.shard(whole, "f@a", mesh, check=False), "f@a", mesh).tolist()
        put = md.device_put(whole, rows, check=False).local.tolist()
        with pytest.raises(md.UnequalError):
            md.assert_equal(whole, "a", mesh=mesh)
        from_root = md.device_put(whole, rows, root=1).local.tolist()
        return [parts, put, from_root]

    assert md.simulate(program, 3) == [
        [[0.0, 11.0, 22.0], [own], [sent]]
        for own, sent in ((0.0, 10.0), (11.0, 11.0), (22.0, 12.0))
    ]


def test_a_copy_of_elements_is_reduced_and_lost() -> None:
    def program() -> list[float]:
        x = torch.ones(3)
        md.all_reduce(x[[0, 1]])  # a copy: x stays
        md.all_reduce(x[:1])  # a view
        return x.tolist()

    assert md.simulate(program, 3) == [[3.0, 1.0, 1.0]] * 3


def test_a_collective_without_its_group_goes_over_the_world() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x, y = torch.ones(1), torch.ones(1)
        with mesh:
            md.all_reduce(x)  # the mesh in force is for lax
            md.all_reduce(y, group=mesh["tp"])
        return [x.item(), y.item()]

    assert md.simulate(program, 4) == [[4.0, 2.0]] * 4


def test_collectives_in_place_carry_no_gradient() -> None:
    def program() -> tuple[list[bool], list[float]]:
        mesh = mesh_of_all()
        w = torch.ones(1, requires_grad=True)
        parts = [torch.zeros(1) for _ in range(2)]
        md.all_gather(parts, w * 2)
        md.lax.all_gather(w * 2, "a", mesh=mesh).sum().backward()  # which carries one
        assert w.grad is not None
        return [part.requires_grad for part in parts], w.grad.tolist()

    assert md.simulate(program, 2) == [([False, False], [4.0])] * 2


def test_dims_of_lax_are_the_ranks_own() -> None:
    def program() -> tuple[int, ...]:
        x = torch.ones(2, 2)
        axis = md.get_rank()
        return tuple(md.lax.all_gather(x, "a", axis=axis, tiled=True, mesh=mesh_of_all()).shape)

    assert md.simulate(program, 2) == [(4, 2), (2, 4)]


def own_mesh() -> md.DeviceMesh:
    """A mesh of all ranks that shares no communicator, since a failed call breaks it."""
    return md.DeviceMesh.from_group(md.new_group(), "cpu", mesh_dim_names=("a",))


LAX_CALLS: dict[str, Callable[[Any, md.DeviceMesh], Any]] = {
    "psum": lambda x, mesh: md.lax.psum(x, mesh),
    "pmean": lambda x, mesh: md.lax.pmean(x, mesh),
    "pmax": lambda x, mesh: md.lax.pmax(x, mesh),
    "pmin": lambda x, mesh: md.lax.pmin(x, mesh),
    "psum_scatter": lambda x, mesh: md.lax.psum_scatter(x, mesh),
    "all_gather": lambda x, mesh: md.lax.all_gather(x, mesh, to="invarying"),
    "all_to_all": lambda x, mesh: md.lax.all_to_all(x, mesh, 0, 1),
    "pswapaxes": lambda x, mesh: md.lax.pswapaxes(x, mesh, 0),
    "ppermute": lambda x, mesh: md.lax.ppermute(x, mesh, [(0, 1), (1, 0)]),
    "pshuffle": lambda x, mesh: md.lax.pshuffle(x, mesh, list(range(mesh.size()))[::-1]),
    "pbroadcast": lambda x, mesh: of_a_late_source(x, mesh),
}


def of_a_late_source(x: Any, mesh: md.DeviceMesh) -> Any:
    """A broadcast whose others are there: over Gloo a source does not wait for them."""
    if md.get_rank() == 1:
        time.sleep(0.2)
    return md.lax.pbroadcast(x, mesh, 1)


def disagreement(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(md.MismatchError) as caught:
        call(*args)
    return str(caught.value)


def shapes_that_differ() -> list[str]:
    size, is_first = md.get_world_size(), md.get_rank() == 0
    x = torch.ones((size, 2, 3) if is_first else (size, 3, 2))
    texts = [disagreement(call, x, own_mesh()) for call in LAX_CALLS.values()]
    mesh = own_mesh()
    marked = md.lax.pvary(x.requires_grad_(), mesh)  # which sends nothing
    texts.append(disagreement(marked.sum().backward))
    return texts


def check_shapes(outcomes: list[list[str]], size: int) -> None:
    assert len(outcomes) == size
    for texts in outcomes:
        for name, text in zip([*LAX_CALLS, "pvary"], texts, strict=True):
            for shape in ((size, 2, 3), (size, 3, 2)):
                assert f" of lax.{name}({shape} at x) at " in text, text
            expected = "the same collective of lax, on leaves of equal paths, shapes and dtypes"
            assert f"expected: {expected}, on every rank" in text


def test_shapes_of_lax_that_differ_are_told(on_backend: Any) -> None:
    check_shapes(on_backend(shapes_that_differ, 2), 2)


@pytest.mark.parametrize("size", [3, 5])
def test_shapes_of_lax_that_differ_are_told_at_any_size(size: int) -> None:
    check_shapes(md.simulate(shapes_that_differ, size), size)


@pytest.mark.soak
@pytest.mark.mpi
def test_shapes_of_lax_that_differ_are_told_over_mpi(pool: Pool) -> None:
    check_shapes(job_of(pool, 2).run_in_world(shapes_that_differ), 2)


def test_torchs_collectives_compare_the_number_of_elements_alone(on_backend: Any) -> None:
    def program() -> float:
        x = torch.ones((2, 3) if md.get_rank() else (3, 2))
        md.all_reduce(x)
        return x.sum().item()

    assert on_backend(program, 2) == [12.0] * 2


def trees_that_differ() -> list[str]:
    is_first, one = md.get_rank() == 0, torch.ones(())
    many = {f"layer {place}": one for place in range(100)}
    pairs: list[tuple[Any, Any]] = [
        ({"acc": one, "loss/image": one}, {"acc": one, "loss/text": 1.0}),
        (OrderedDict(a=one, b=one), OrderedDict(b=one, a=one)),
        ([one, one], (one, one, one)),
        (one, [one]),
        (many, {**many, "layer 99": [one]}),
    ]
    texts = [disagreement(md.lax.pmean, pair[not is_first], own_mesh()) for pair in pairs]
    mean_or_sum = md.lax.pmean if is_first else md.lax.psum
    texts.append(disagreement(mean_or_sum, one, own_mesh()))
    return texts


def test_trees_of_lax_that_differ_are_told(on_backend: Any) -> None:
    leaf = "all_reduce(() float32, SUM) of lax.pmean(() at"
    pairs = [
        ("x['acc'], leaf 1 of x['acc'], x['loss/image'])", "x['acc'], x['loss/text'])"),
        ("x['a'], leaf 1 of x['a'], x['b'])", "x['b'], leaf 1 of x['b'], x['a'])"),
        ("x[0], leaf 1 of x[0], x[1])", "x[0], leaf 1 of x[0], x[1], x[2])"),
        ("x)", "x[0], leaf 1 of x[0])"),
        ("... (100, ", "x['layer 0'], leaf 1 of x['layer 0'], x['layer 1'], "),
        ("x)", "lax.psum(() at x)"),
    ]
    for texts in on_backend(trees_that_differ, 2):
        for text, pair in zip(texts, pairs, strict=True):
            assert leaf in text and all(part in text for part in pair), text


def test_trees_of_lax_that_are_alike_though_written_otherwise() -> None:
    class Key:
        pass

    def program() -> list[Any]:
        rank, x = md.get_rank(), torch.tensor(float(md.get_rank()))
        tree = {"a": 1 + x, "b": 10 * x} if rank else {"b": 10 * x, "a": 1 + x}
        with mesh_of_all():
            total = md.lax.psum(tree, "a")
            by_object = md.lax.psum({Key(): x}, "a")  # whose text differs from rank to rank
            by_pair = md.lax.psum({(1, (Key(), "w")): x}, "a")
            sums = [*by_object.values(), *by_pair.values()]
            return [total["a"].item(), total["b"].item(), *map(float, sums)]

    assert md.simulate(program, 3) == [[6.0, 30.0, 3.0, 3.0]] * 3


def test_what_trees_hold_is_not_kept() -> None:
    class Key:
        pass

    def program() -> bool:
        key = Key()
        gone = weakref.ref(key)
        md.lax.psum({key: torch.ones(1)}, mesh_of_all())
        del key
        gc.collect()
        return gone() is None

    assert md.simulate(program, 2) == [True] * 2


def test_a_work_is_waited_for(on_backend: Any) -> None:
    def program() -> float:
        x = torch.ones(1 << 16)
        work = md.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()  # before it x may hold anything
        return float(x.sum() / x.numel())

    assert on_backend(program, 3) == [3.0] * 3


def drop(how: str) -> None:
    """Drop Works, on all ranks."""
    x, rank, size = torch.ones(3), md.get_rank(), md.get_world_size()
    start = partial(md.all_reduce, x, async_op=True)
    if how == "at once":
        for _ in range(2):
            md.all_reduce(x, async_op=True)
    elif how == "of several":
        md.all_reduce_multigpu([x, x.clone()], async_op=True)
    elif how == "a receive":
        md.isend(x, (rank + 1) % size)  # of which the receiver may tell that it has come
        md.irecv(torch.empty(3), (rank - 1) % size)
    elif how == "waited for":
        start().wait()
        start().synchronize()
        start().result()
        for work in [start() for _ in range(200)]:
            work.wait()
    elif how == "seen done":
        work = start()
        while not work.is_completed():
            time.sleep(0.001)
    elif how == "a future":
        found: list[Any] = []
        start().get_future().add_done_callback(found.append)
        start().get_future().then(lambda done: done.value()).wait()
        start().get_future_result().wait()
    elif how == "of what is only sent":  # those that receive tell
        calls: list[tuple[int, Callable[[], Any]]] = [
            (0, lambda: md.broadcast(x, 0, async_op=True)),
            (1, lambda: md.reduce(x, 0, async_op=True)),
            (1, lambda: md.gather(x, None if rank else [x.clone(), x.clone()], 0, async_op=True)),
        ]
        for sender, call in calls:
            work = call()
            if rank != sender:
                work.wait()
            del work
    elif how == "of a broken group":
        work = start()
        md.barrier()
        md.group.WORLD.abort("enough")
        return
    md.barrier()


def warnings_of(call: Callable[[], Any]) -> list[str]:
    program_room.warned_sites.clear()  # a place warns once in a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        gc.collect()
    return [f"{one.filename}:{one.lineno} {one.category.__name__} {one.message}" for one in caught]


def warnings_of_drops(backend: str, pool: Pool, how: str) -> list[list[str]]:
    """By process, what is warned of while two ranks drop Works."""
    if backend == "simulated":
        return [warnings_of(lambda: md.simulate(drop, 2, args=(how,)))]
    return pool.run(lambda: warnings_of(lambda: drop(how)), 2, backend=backend)


ON = ["simulated", "shm", "gloo"]


@pytest.mark.parametrize("how", ["at once", "of several", "a receive"])
@pytest.mark.parametrize("backend", ON)
def test_a_work_that_is_dropped_is_warned_of_once_a_place(
    backend: str, how: str, pool: Pool
) -> None:
    operation = {
        "at once": "all_reduce",
        "of several": "all_reduce_multigpu",
        "a receive": "irecv",
    }[how]
    for (text,) in warnings_of_drops(backend, pool, how):
        place, category, summary = text.split(" ", 2)
        assert place.rsplit(":", 1)[0].endswith("test_misuse.py") and category == "UserWarning"
        assert summary.startswith(f"the Work of {operation} was dropped before wait() was called")
        assert f" {operation}(" in summary and " on the world" in summary
        assert f"{place} in drop\n" in summary
        assert "expected: wait() or a future before its tensors are used, which may" in summary
        assert (
            "fix:      keep the Work and call wait(), or call the collective without async_op=True"
            in summary
        )


@pytest.mark.parametrize(
    "how", ["waited for", "seen done", "a future", "of what is only sent", "of a broken group"]
)
@pytest.mark.parametrize("backend", ON)
def test_a_work_that_was_awaited_in_some_way_may_be_dropped(
    backend: str, how: str, pool: Pool
) -> None:
    assert not any(warnings_of_drops(backend, pool, how))


def test_a_pattern_that_fits_by_chance_is_believed() -> None:
    def program() -> tuple[list[int], list[int]]:
        mesh = mesh_of_all()
        local = md.shard(torch.arange(4.0).view(2, 2), "f@a d", mesh)
        wrong = md.unshard(torch.tensor(local.tolist()), "f d@a", mesh)  # which carries no spec
        carried = md.device_put(torch.arange(4.0).view(2, 2), md.NamedSharding(mesh, md.P("a")))
        return list(wrong.shape), list(carried.full().shape)  # a ShardedArray knows how it lies

    assert md.simulate(program, 2) == [([1, 4], [2, 2])] * 2


def test_ranks_and_coordinates_on_a_permuted_mesh() -> None:
    def program() -> tuple[int, int, list[float]]:
        mesh = md.DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("a",))
        x = torch.tensor([float(md.get_rank())])
        with mesh:
            place, whole = md.lax.axis_index("a"), md.lax.all_gather(x, "a", tiled=True)
        return md.get_rank(), place, whole.tolist()

    assert md.simulate(program, 3) == [(r, p, [2.0, 0.0, 1.0]) for r, p in ((0, 1), (1, 2), (2, 0))]


def test_permutations_that_differ_are_told() -> None:
    def program() -> list[str]:
        mesh, x, rank = mesh_of_all(), torch.ones(1), md.get_rank()
        pairs = [(0, 1), (1, 2)] if rank else [(0, 2), (1, 0)]
        texts = []
        with pytest.raises(md.ArgumentError) as twice:
            md.lax.ppermute(x, "a", [(0, 1), (2, 1)], mesh=mesh)
        for call in (
            lambda: md.lax.ppermute(x, "a", pairs, mesh=mesh),
            lambda: md.lax.pshuffle(x, "a", [0, 1, 2] if rank else [1, 2, 0], mesh=mesh),
            lambda: md.lax.pbroadcast(x, "a", rank, mesh=mesh),
        ):
            with pytest.raises(md.MismatchError) as caught:
                call()
            texts.append(str(caught.value))
        return [str(twice.value), *texts]

    for twice, *texts in md.simulate(program, 3):
        assert "destination 1 appears twice" in twice
        summary = "collective mismatch: ranks made different calls as call"
        assert all(summary in text for text in texts)
