"""DeviceMesh on simulated ranks, against short loops over coordinates; and what it rejects."""

from __future__ import annotations

import itertools
import pickle
from datetime import timedelta
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import meshdist as md
from tests.inner import get_world
from tests.pool import Pool


def groups_by_loop(ranks: np.ndarray, axis: int) -> dict[int, tuple[int, ...]]:
    """The group along ``axis`` of every rank, found by looking at every coordinate."""
    found = {}
    for coordinate in itertools.product(*map(range, ranks.shape)):
        line = []
        for index in range(ranks.shape[axis]):
            place = (*coordinate[:axis], index, *coordinate[axis + 1 :])
            line.append(int(ranks[place]))
        found[int(ranks[coordinate])] = tuple(line)
    return found


@st.composite
def rank_arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= 8)
    )
    size = int(np.prod(shape))
    order = draw(st.permutations(range(size)))
    return np.array(order).reshape(shape)


@given(rank_arrays())
def test_coordinate_equals_group_rank_for_any_order_of_ranks(ranks: np.ndarray) -> None:
    def program():
        mesh = md.DeviceMesh("cpu", ranks)
        groups = mesh.get_all_groups()
        return mesh.get_coordinate(), [(g.rank(), g.ranks) for g in groups]

    for rank, (coordinate, groups) in enumerate(md.simulate(program, ranks.size)):
        assert ranks[coordinate] == rank
        for axis, (group_rank, members) in enumerate(groups):
            assert members == groups_by_loop(ranks, axis)[rank]
            assert group_rank == coordinate[axis]


@given(rank_arrays())
def test_all_gather_over_an_axis_comes_in_mesh_order(ranks: np.ndarray) -> None:
    def program():
        mesh = md.DeviceMesh("cpu", ranks)
        gathered = []
        for axis in range(mesh.ndim):
            out = torch.empty(mesh.size(axis), dtype=torch.int64)
            md.all_gather_into_tensor(
                out, torch.tensor([md.get_rank()]), group=mesh.get_group(axis)
            )
            gathered.append(tuple(out.tolist()))
        return gathered

    for rank, gathered in enumerate(md.simulate(program, ranks.size)):
        for axis, members in enumerate(gathered):
            assert members == groups_by_loop(ranks, axis)[rank]


def test_documented_eight_ranks() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return mesh.get_local_rank("dp"), mesh.get_local_rank(1), mesh.get_group(0).ranks

    results = md.simulate(program, 8)
    assert [r[0] for r in results] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [r[1] for r in results] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert results[1][2] == (1, 5) and results[7][2] == (3, 7)


def test_attributes() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert mesh.device_type == "cpu"
        assert mesh.mesh.equal(torch.arange(6, dtype=torch.int).reshape(2, 3))
        assert mesh.shape == (2, 3) and mesh.ndim == 2
        assert mesh.size() == 6 and mesh.size("tp") == 3 and mesh.size(0) == 2
        assert mesh.mesh_dim_names == mesh.axis_names == ("dp", "tp")
        assert mesh.axis_sizes == {"dp": 2, "tp": 3}
        assert mesh.get_rank() == md.get_rank()
        assert [g.size() for g in mesh.get_all_groups()] == [2, 3]
        assert repr(mesh) == (
            "DeviceMesh('cpu', [[0, 1, 2], [3, 4, 5]], mesh_dim_names=('dp', 'tp'))"
        )
        return str(mesh)

    drawn = md.simulate(program, 6)[0]
    assert "dp" in drawn and "tp" in drawn and "5" in drawn


def test_slices_are_cached_open_nothing_and_share_groups() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        part = mesh["tp"]
        assert part is mesh["tp"]
        assert part.get_group() is mesh.get_group("tp")
        both = mesh["tp", "pp"]
        assert both.axis_names == ("tp", "pp")
        assert both.get_group("pp") is mesh.get_group("pp")
        assert mesh["pp", "dp", "tp"] is mesh
        return both.get_coordinate(), both.mesh.tolist()

    assert md.simulate(program, 4)[2] == ((0, 1), [[0, 2], [1, 3]])


def test_a_mesh_as_group_is_its_axes_flattened_row_major() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        out = torch.empty(4, dtype=torch.int64)
        mine = torch.tensor([md.get_rank()])
        md.all_gather_into_tensor(out, mine, group=mesh["c", "a"])
        return out.tolist()

    results = md.simulate(program, 8)
    assert results[0] == [0, 4, 1, 5]
    assert results[7] == [2, 6, 3, 7]


def test_transpose_flatten_unflatten_concatenate() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        turned = mesh.transpose("tp", "dp")
        assert turned.mesh.equal(mesh.mesh.t())
        assert turned.get_group("tp") is mesh.get_group("tp")

        flat = mesh.flatten()
        assert flat.axis_sizes == {"dp_tp": 8}
        assert flat.get_group().ranks == tuple(range(8))
        assert flat is mesh.flatten()
        assert mesh.flatten(["tp"], "t").get_group("t") is mesh.get_group("tp")

        split = mesh.unflatten("tp", (2, -1), ("ep", "etp"))
        assert split.axis_sizes == {"dp": 2, "ep": 2, "etp": 2}
        assert split.get_group("dp") is mesh.get_group("dp")
        assert split.flatten(("ep", "etp"), "tp") == mesh

        joined = md.DeviceMesh.concatenate([split["etp"], split["dp"]])
        assert joined.axis_names == ("etp", "dp")
        assert joined.get_group("dp") is mesh.get_group("dp")
        return joined.get_coordinate()

    assert md.simulate(program, 8)[5] == (1, 1)


def test_overlapping_factorisations_share_equal_communicators() -> None:
    def program():
        one = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        two = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
        shared = (
            one.get_group("tp").open_device_group("cpu").communicator
            is two.get_group("etp").open_device_group("cpu").communicator
        )
        private = md.init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("dp", "tp"),
            axis_options={"tp": md.AxisOptions(private=True)},
        )
        own = private.get_group("tp").open_device_group("cpu").communicator
        assert own is not one.get_group("tp").open_device_group("cpu").communicator
        one.close()
        x = torch.ones(1)
        md.all_reduce(x, group=two["etp"])
        with pytest.raises(md.GroupClosedError, match=r"axis 'tp' of .* was closed"):
            md.all_reduce(x, group=one["tp"])
        return shared, x.item()

    assert md.simulate(program, 4) == [(True, 2.0)] * 4


def test_a_mesh_smaller_than_the_world() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if md.get_rank() < 2:
            x = torch.ones(1)
            md.all_reduce(x, group=mesh["dp"])
            return mesh.get_coordinate(), x.item()
        assert mesh.get_coordinate() is None
        for call in (
            lambda: mesh.get_group(),
            lambda: mesh.get_local_rank(),
            lambda: mesh.get_all_groups(),
            lambda: md.all_reduce(torch.ones(1), group=mesh),
            lambda: md.all_reduce(torch.ones(1), group=mesh["dp"]),
        ):
            with pytest.raises(md.NotInGroupError, match=r"rank 2, mesh \(dp=2\)"):
                call()
        return None

    assert md.simulate(program, 3) == [((0,), 2.0), ((1,), 2.0), None]


def test_from_group() -> None:
    def program():
        rows = md.new_subgroups(2)[0]
        line = md.DeviceMesh.from_group(rows, "cpu", mesh_dim_names=("tp",))
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        again = md.DeviceMesh.from_group(
            mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=("dp", "tp")
        )
        assert again == mesh and again.get_group("dp") is mesh.get_group("dp")
        with pytest.raises(md.MeshError, match="does not have the ranks of the mesh"):
            md.DeviceMesh.from_group(mesh.get_group("dp"), "cpu", mesh=[0, 1, 2])
        with pytest.raises(md.MeshError, match="from_group needs mesh"):
            md.DeviceMesh.from_group(mesh.get_all_groups(), "cpu")
        with pytest.raises(md.MeshError, match="2 groups for a mesh of 1 axes"):
            md.DeviceMesh.from_group(
                mesh.get_all_groups(), "cpu", mesh=[0, 1], mesh_dim_names=("a",)
            )
        return line.get_group().ranks

    assert md.simulate(program, 4) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_equality_hash_and_pickling() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        same = md.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        other = md.DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("dp", "tp"))
        assert mesh == same and hash(mesh) == hash(same)
        assert mesh != other and mesh != "mesh"
        copied = pickle.loads(pickle.dumps(mesh))
        assert copied == mesh
        x = torch.ones(1)
        md.all_reduce(x, group=copied["tp"])
        return x.item()

    assert md.simulate(program, 4) == [2.0] * 4


def test_a_mesh_never_changes() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        before = dict(vars(mesh))
        for name in ("mesh_dim_names", "device_type", "layout", "_groups", "note"):
            with pytest.raises(AttributeError) as caught:
                setattr(mesh, name, None)
            assert str(caught.value) == (
                f"a mesh is immutable: its attribute {name!r} cannot be set or deleted\n"
                "  where:    DeviceMesh(dp=2)\n"
                "  fix:      derive another mesh with flatten, unflatten, transpose or a "
                "slice"
            )
            with pytest.raises(AttributeError, match="a mesh is immutable"):
                delattr(mesh, name)
        assert vars(mesh) == before
        return mesh.mesh_dim_names

    assert md.simulate(program, 2) == [("dp",)] * 2


def test_meshes_are_equal_when_one_can_take_the_others_place() -> None:
    def program():
        def mesh_with(device_type="cpu", names=("dp", "tp"), timeout=None, **options):
            return md.init_device_mesh(
                device_type,
                (2, 2),
                mesh_dim_names=names,
                timeout=timeout,
                axis_options={1: md.AxisOptions(**options)},
                open_groups=False,
            )

        mesh, minute = mesh_with(), timedelta(minutes=1)
        same = [
            mesh_with(),
            md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
            md.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("tp", "dp")).transpose(1, 0),
            md.DeviceMesh.from_group(
                mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")
            ),
            mesh.unflatten("tp", (2, 1), ("tp", "one"))["dp", "tp"],
        ]
        others = [
            mesh_with("meta"),
            mesh_with(names=("dp", "cp")),
            mesh_with(backend="gloo"),
            mesh_with(timeout=minute),
            mesh_with(options="of the backend"),
            mesh_with(private=True),
            mesh.transpose("tp", "dp"),
        ]
        found = [[one == mesh for one in same], [one == mesh for one in others]]
        assert {hash(one) for one in same} == {hash(mesh)}
        assert mesh_with(timeout=minute) == mesh_with(timeout=minute)
        assert {mesh: "plan"}[same[0]] == "plan"

        md.destroy_process_group()
        md.init_process_group()
        assert mesh_with() != mesh  # whose world was closed
        return found

    assert md.simulate(program, 4) == [[[True] * 5, [False] * 7]] * 4


def test_a_mesh_of_groups_has_their_options_also_on_axes_derived_from_it(pool: Pool) -> None:
    def program() -> tuple[bool, bool, list[str], float]:
        whole = md.new_group(backend="gloo", timeout=timedelta(seconds=50))
        mesh = md.DeviceMesh.from_group(whole, "cpu", mesh_dim_names=("dp",))
        split = mesh.unflatten("dp", (2, 2), ("a", "b"))
        backends = [md.get_backend(one) for one in (mesh, split["a"], split["b"])]
        plain = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        again = md.DeviceMesh.from_group(whole, "cpu", mesh_dim_names=("dp",))
        return mesh == plain, mesh == again, backends, split.get_group("a").timeout.total_seconds()

    assert pool.run(program, 4, backend="shm") == [(False, True, ["gloo"] * 3, 50.0)] * 4


@pytest.mark.parametrize("given", ["backend_override", "axis_options"])
def test_simulated_ranks_have_one_backend_whatever_an_axis_names(given: str) -> None:
    def program():
        value = "nccl" if given == "backend_override" else md.AxisOptions(backend="nccl")
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), **{given: {"dp": value}})
        x = torch.ones(1)
        md.all_reduce(x, group=mesh["dp"])
        return x.item()

    assert md.simulate(program, 2) == [2.0, 2.0]


def test_a_pickled_mesh_works_in_another_process(pool: Pool) -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        store = get_world().store
        if md.get_rank() == 0:
            store.set("meshes", pickle.dumps((mesh, mesh["dp"])))
        copy, part = pickle.loads(store.get("meshes"))
        assert copy == mesh and hash(copy) == hash(mesh) and copy is not mesh
        assert copy.get_coordinate() == mesh.get_coordinate()  # this rank's, not the sender's
        assert copy["tp"].get_group().open_device_group("cpu").communicator is (
            mesh["tp"].get_group().open_device_group("cpu").communicator
        )
        # A slice is the sender's slice: the ranks beside it are not in it.
        assert part.mesh.tolist() == [0, 2]
        assert part.get_coordinate() == {0: (0,), 2: (1,)}.get(md.get_rank())
        assert (part == mesh["dp"]) == (md.get_rank() in (0, 2))
        x = torch.tensor([float(md.get_rank())])
        md.all_reduce(x, group=copy["tp"])
        y = torch.tensor([float(md.get_rank())])
        if part.get_coordinate() is not None:
            md.all_reduce(y, group=part)
        return [x.item(), y.item()]

    assert pool.run(program, 4) == [[1.0, 2.0], [1.0, 1.0], [5.0, 2.0], [5.0, 3.0]]


def test_timeouts_belong_to_the_caller_of_a_shared_communicator() -> None:
    def program() -> list[float]:
        meshes = [
            md.init_device_mesh("cpu", (2,), timeout=timedelta(seconds=seconds))
            for seconds in (5, 50)
        ]
        device_groups = [mesh.get_group().open_device_group("cpu") for mesh in meshes]
        assert device_groups[0].communicator is device_groups[1].communicator
        return [device_group.timeout.total_seconds() for device_group in device_groups]

    assert md.simulate(program, 2) == [[5.0, 50.0]] * 2


def test_lazy_mesh_opens_at_warmup() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), open_groups=False)
        before = mesh.get_group("dp").is_open
        mesh.warmup()
        return before, mesh.get_group("dp").is_open

    assert md.simulate(program, 4) == [(False, True)] * 4


def test_a_layout_is_a_mesh_that_brings_its_names() -> None:
    layout = md.Layout.from_shape((2, 3), ("dp", "tp")).transpose(("tp", "dp"))

    def program():
        mesh = md.DeviceMesh("cpu", layout)
        assert mesh.layout is layout
        return mesh.axis_names, mesh.get_coordinate(), mesh.get_group("dp").ranks

    for rank, found in enumerate(md.simulate(program, 6)):
        assert found == (("tp", "dp"), (rank % 3, rank // 3), (rank % 3, rank % 3 + 3))


REFUSED = [
    (lambda: md.init_device_mesh("cpu", (3, 2)), md.MeshError, "needs 6 ranks"),
    (lambda: md.init_device_mesh("cpu", (2, 0)), md.MeshError, "0"),
    (lambda: md.init_device_mesh("cpu", (-1, -1)), md.MeshError, "-1"),
    (lambda: md.init_device_mesh("cpu", (3, -1)), md.MeshError, "-1|divide"),
    (
        lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "dp")),
        md.AxisError,
        "'dp'",
    ),
    (lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)), md.AxisError, "name"),
    (lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "")), md.AxisError, "name"),
    (lambda: md.init_device_mesh("cpu:0", (2, 2)), md.MeshError, "'cpu:0' is not a plain"),
    (lambda: md.init_device_mesh("cuda:0", (2, 2)), md.MeshError, "torch.cuda.set_device"),
    (lambda: md.init_device_mesh("abacus", (2, 2)), md.ArgumentError, "unknown device type"),
    (lambda: md.init_device_mesh(7, (2, 2)), md.KindError, "device_type must be a string"),
    (lambda: md.init_device_mesh("cpu", (2, 2), timeout=3), md.KindError, "datetime.timedelta"),
    (lambda: md.DeviceMesh("cpu", [[0, 1], [1, 2]]), md.MeshError, "rank 1 is in"),
    (lambda: md.DeviceMesh("cpu", [0, 4]), md.MeshError, "4"),
    (
        lambda: md.DeviceMesh("cpu", md.Layout.from_ranks([4, 1, 0])),
        md.MeshError,
        "the mesh names rank 4, which does not exist in the world",
    ),
    (
        lambda: md.DeviceMesh("cpu", md.Layout.from_shape((2,)), mesh_dim_names=("dp",)),
        md.ArgumentError,
        "mesh_dim_names= cannot be passed with a Layout, which has its own axis names",
    ),
    (lambda: md.init_device_mesh("cpu", (2, 2))["tp"], md.MeshError, "unnamed mesh"),
    (
        lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["pp"],
        md.AxisError,
        "no axis 'pp'",
    ),
    (
        lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp", "dp"],
        md.AxisError,
        "twice",
    ),
    (
        lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group(),
        md.MeshError,
        r"get_group\('dp'\)",
    ),
    (
        lambda: md.init_device_mesh("cpu", (2, 2)).get_local_rank(),
        md.MeshError,
        r"get_local_rank\(0\)",
    ),
    (
        lambda: md.init_device_mesh("cpu", (4,), axis_options={0: "gloo"}),
        md.KindError,
        "AxisOptions",
    ),
    (
        lambda: md.init_device_mesh(
            "cpu", (4,), mesh_dim_names=("a",), backend_override={"a": "gloo", 0: "gloo"}
        ),
        md.ArgumentError,
        "options twice",
    ),
    (
        lambda: md.init_device_mesh("cpu", (4,), backend_override={0: "pigeon"}),
        md.BackendError,
        "'pigeon' is not registered",
    ),
    (
        lambda: md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"].close(),
        md.MeshError,
        "close the mesh that it was derived from",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_rejected_on_every_rank_before_anything_is_sent(case: int) -> None:
    call, kind, text = REFUSED[case]

    def program():
        with pytest.raises(kind, match=text):
            call()
        return "rejected"

    assert md.simulate(program, 4) == ["rejected"] * 4


def test_meshes_that_differ_between_ranks_raise_on_every_rank_and_show_both() -> None:
    def program():
        names = ("dp", "tp") if md.get_rank() else ("tp", "dp")
        with pytest.raises(md.MismatchError) as caught:
            md.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        return str(caught.value)

    for text in md.simulate(program, 4):
        assert text.startswith("the ranks do not define the same mesh")
        assert "rank 0: DeviceMesh(tp=2, dp=2)" in text
        assert "ranks 1-3: DeviceMesh(dp=2, tp=2)" in text


def test_abort_frees_simulated_ranks() -> None:
    def program():
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if md.get_rank() == 1:
            mesh.abort("enough")
            return "aborted"
        with pytest.raises(md.AbortedError, match=r"rank 1: enough"):
            md.all_reduce(torch.ones(1), group=mesh["dp"])
        return "freed"

    assert md.simulate(program, 2) == ["freed", "aborted"]


def test_a_notebook_shows_a_picture() -> None:
    def program() -> str:
        return md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))._repr_svg_()

    for picture in md.simulate(program, 4):
        root = ElementTree.fromstring(picture)
        assert root.tag.endswith("svg")
        shown = " ".join(root.itertext())
        assert "dp" in shown and "tp" in shown and "3" in shown


def test_a_list_of_names_slices_as_a_tuple_does() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        assert mesh[["dp", "cp"]] is mesh["dp", "cp"]
        assert mesh[["tp"]] == mesh["tp"]
        with pytest.raises(md.AxisError, match="no axis 'pp'"):
            mesh[["dp", "pp"]]
        with pytest.raises(md.AxisError, match=r"sliced by axis names, not by \{'dp'\}"):
            mesh[{"dp"}]  # type: ignore[index, arg-type]
        unnamed = md.init_device_mesh("cpu", (2, 4))
        with pytest.raises(md.MeshError, match="an unnamed mesh cannot be sliced"):
            unnamed[["dp", "cp"]]
        total = torch.ones(1)
        md.all_reduce(total, group=mesh[["cp", "dp"]])
        return mesh[["cp", "dp"]].shape, total.item()

    assert md.simulate(program, 8) == [((2, 2), 4.0)] * 8
