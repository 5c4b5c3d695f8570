"""No way of wrapping overwrites a shard in silence: each is rejected, or leaves it as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import meshdist as md
from meshdist.distributed import ProcessGroup
from meshdist.errors import AxisError, AxisTypeError, GradientError, JoinError, MeshError
from tests.ddp.pretended_gpu import pretended_gpu
from tests.pool import Pool
from tests.two_hosts import TwoHosts

WHOLE = torch.arange(8.0).view(4, 2)


def open_mesh(device: str = "cpu") -> md.DeviceMesh:
    return md.init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))


def shards(mesh: md.DeviceMesh, *, marks: bool) -> nn.Linear:
    """A layer whose rows are cut along 'tp', and a bias of replicas."""
    net = nn.Linear(2, 2, device=mesh.device_type)
    nn.init.zeros_(net.bias)
    with torch.no_grad():
        net.weight.copy_(WHOLE.chunk(2)[mesh.get_local_rank("tp")])
    if marks:
        md.annotate(net.weight, "f@tp d", mesh=mesh)
    return net


WAYS = {
    "bare": lambda mesh: {},
    "the world": lambda mesh: {"process_group": md.group.WORLD},
    "the whole mesh": lambda mesh: {"device_mesh": mesh},
    "both axes": lambda mesh: {"device_mesh": mesh["dp", "tp"]},
    "both axes, turned": lambda mesh: {"device_mesh": mesh["tp", "dp"]},
    "a flat axis": lambda mesh: {"device_mesh": mesh.flatten()},
    "a group of all": lambda mesh: {"process_group": mesh.open_group()},
    "the wrong axis": lambda mesh: {"device_mesh": mesh["tp"]},
    "the group of the wrong axis": lambda mesh: {"process_group": mesh.get_group("tp")},
}


def wrap(mesh: md.DeviceMesh, net: nn.Module, way: str) -> str:
    """The text with which a way of wrapping is rejected; "" where it goes through."""
    before = net.weight.detach().clone()
    try:
        md.DDP(net, **WAYS[way](mesh))
    except (AxisTypeError, MeshError) as error:
        assert torch.equal(net.weight, before), "rejected, and written to"
        return str(error)
    return ""


@pytest.mark.parametrize("way", WAYS)
def test_a_marked_shard_is_rejected_by_each_group_that_spans_its_axis(way: str) -> None:
    def program() -> str:
        mesh = open_mesh()
        return wrap(mesh, shards(mesh, marks=True), way)

    for rank, text in enumerate(md.simulate(program, 4)):
        if way == "bare":  # the bias alone is without a mark
            assert text.startswith(
                "DDP cannot replicate weight: it is annotated as varying over 'tp'\n"
            )
        assert "DDP cannot replicate weight: it is annotated as varying over 'tp'" in text
        assert f"rank {rank}" in text and "axes along which the model is replicated" in text


def copied(net: nn.Linear) -> nn.Linear:
    return copy.deepcopy(net)


def assigned(net: nn.Linear) -> nn.Linear:
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    return net


def emptied(net: nn.Linear) -> nn.Linear:
    state = {name: x.clone() for name, x in net.state_dict().items()}
    net.to_empty(device="cpu").load_state_dict(state)
    return net


@pytest.mark.parametrize("change", [copied, assigned, emptied], ids=lambda change: change.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_marks_of_a_module_outlive_its_tensors(way: str, change: Any) -> None:
    def program() -> str:
        mesh = open_mesh()
        net = shards(mesh, marks=False)
        md.annotate(net, {"weight": "f@tp d", "bias": "f"}, mesh=mesh)
        return wrap(mesh, change(net), way)

    for text in md.simulate(program, 4):
        assert text.startswith(
            "DDP cannot replicate weight: it is annotated as varying over 'tp'\n"
        )


def test_a_copied_wrapper_keeps_its_further_axes() -> None:
    def program() -> tuple[list[float], list[float]]:
        mesh = open_mesh()
        net = nn.Linear(1, 1)
        md.annotate(net, {"weight": "f d {R:tp}", "bias": "f"}, mesh=mesh)
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        other = copy.deepcopy(ddp)
        for model in (ddp, other):
            model(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        return tuple(
            [p.grad.item() for p in (model.module.weight, model.module.bias)]
            for model in (ddp, other)
        )

    assert md.simulate(program, 4) == [([5.0, 1.0], [5.0, 1.0])] * 4


def test_a_bare_wrapper_names_axes_while_a_mesh_of_several_is_open() -> None:
    def program() -> tuple[str, str, list[float]]:
        mesh = open_mesh()
        net = shards(mesh, marks=False)
        text = wrap(mesh, net, "bare")
        md.DDP(net, device_mesh=mesh["dp"])  # what the error proposes
        before = net.weight[0].tolist()
        md.DDP(nn.Linear(2, 2), process_group=md.distributed.group.WORLD)
        md.annotate(net.weight, "f@tp d", mesh=mesh)
        md.annotate(net.bias, "f", mesh=mesh)
        return text, wrap(mesh, net, "bare"), before

    for rank, (text, marked, row) in enumerate(md.simulate(program, 4)):
        assert text.startswith(
            "DDP without device_mesh= would make the model equal on all ranks along 'dp', "
            "'tp', but some parameters could be shards\n"
        )
        assert f"rank {rank}, while DeviceMesh(dp=2, tp=2) is open" in text
        assert "not annotated: weight, bias" in text
        assert "pass device_mesh=mesh['dp']; if all parameters are replicas, pass " in text
        assert "pass process_group=md.distributed.group.WORLD; or annotate shards" in text
        assert "md.annotate(module, {name: pattern}, mesh=mesh)" in text
        assert marked.startswith(
            "DDP cannot replicate weight: it is annotated as varying over 'tp'"
        )
        assert row == WHOLE.chunk(2)[rank % 2][0].tolist()


def test_a_bare_wrapper_is_as_before_where_one_axis_splits_the_world() -> None:
    def program(shape: tuple[int, ...], closes: bool, opens: bool) -> str:
        names = ("dp", "tp")[: len(shape)]
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=names, open_groups=opens)
        if closes:
            mesh.close()
        net = nn.Linear(2, 2)
        return wrap(mesh, net, "bare")

    for shape, closes, opens in [
        ((4,), False, True),
        ((4, 1), False, True),
        ((1, 4), False, True),
        ((2, 2), True, True),
        ((2, 2), False, False),  # planned alone
    ]:
        assert md.simulate(program, 4, (shape, closes, opens)) == [""] * 4


def test_all_ranks_are_asked_alike_whatever_has_been_collected() -> None:
    def program() -> str:
        mesh = open_mesh()
        if md.get_rank() == 0:
            del mesh  # some ranks may hold on to it
        with pytest.raises(MeshError) as raised:
            md.DDP(nn.Linear(1, 1))
        return str(raised.value)

    assert all("DeviceMesh(dp=2, tp=2) is open" in text for text in md.simulate(program, 4))


@pytest.mark.parametrize("way", ["the whole mesh", "both axes", "both axes, turned"])
def test_an_unmarked_tensor_that_differs_along_one_axis_alone_is_rejected(way: str) -> None:
    def program(of_buffer: bool) -> str:
        mesh = open_mesh()
        net = shards(mesh, marks=False)
        if of_buffer:
            net = nn.BatchNorm1d(2)
            net.running_mean.fill_(mesh.get_local_rank("dp"))
        return wrap(mesh, net, way)

    for rank, text in enumerate(md.simulate(program, 4, (False,))):
        assert text.startswith(
            "weight is probably a shard: equal along 'dp', different along 'tp'\n"
        )
        assert f"rank {rank}, DDP over " in text and "of DeviceMesh(dp=2, tp=2)" in text
        assert "device_mesh=mesh['dp']" in text and "md.distributed.group.WORLD" in text
    for text in md.simulate(program, 4, (True,)):
        assert text.startswith(
            "running_mean is probably a shard: equal along 'tp', different along 'dp'\n"
        )


def test_what_the_refusal_of_a_shard_proposes() -> None:
    def program() -> list[float]:
        mesh = open_mesh()
        net = shards(mesh, marks=True)
        text = wrap(mesh, net, "the wrong axis")
        assert "pass a device_mesh with 'tp', and experts_over='tp'; if they have the same" in text
        md.DDP(net, device_mesh=mesh["tp"], experts_over="tp")
        return net.weight[0].tolist()

    rows = [part[0].tolist() for part in WHOLE.chunk(2)]
    assert md.simulate(program, 4) == rows * 2


def test_parameters_of_torchs_tensor_parallelism_are_rejected() -> None:
    def program() -> str:
        mesh = open_mesh()
        net = nn.Linear(2, 2)
        parallelize_module(net, mesh.to_torch()["tp"], ColwiseParallel())
        with pytest.raises(md.errors.KindError) as raised:
            md.DDP(net, device_mesh=mesh["dp"])
        return str(raised.value)

    for text in md.simulate(program, 4):
        assert text.startswith("cannot wrap a module whose parameter weight is a DTensor\n")
        assert "fully_shard(module, mesh=mesh.to_torch()['dp'])" in text


def test_replicas_and_seeds_of_their_own_pass_over_several_axes() -> None:
    def program(seed: bool) -> list[float]:
        mesh = open_mesh()
        generator = torch.Generator().manual_seed(md.get_rank() if seed else 0)
        net = nn.Linear(2, 2)
        for parameter in net.parameters():
            parameter.data.normal_(generator=generator)
        md.DDP(net, device_mesh=mesh)
        return net.weight.flatten().tolist()

    assert len({*map(str, md.simulate(program, 4, (True,)))}) == 1
    assert len({*map(str, md.simulate(program, 4, (False,)))}) == 1


# -- parameters that are reduced over additional axes---------------------------------------------


def reduced(mesh: md.DeviceMesh, text: str = "f d {R:tp}") -> nn.Linear:
    net = nn.Linear(2, 2)
    md.annotate(net.weight, text)
    md.annotate(net.bias, "f")
    return net


def rejected(**given: Any) -> str:
    def program() -> str:
        mesh = open_mesh()
        over = {name: make(mesh) for name, make in given.items()}
        with pytest.raises((AxisError, AxisTypeError)) as raised:
            md.DDP(reduced(mesh), **over)
        return str(raised.value)

    return md.simulate(program, 4)[3]


def test_a_wrapper_of_a_group_knows_no_further_axis() -> None:
    text = rejected(process_group=lambda mesh: mesh.get_group("dp"))
    assert text.startswith(
        "weight is reduced over 'tp', but the group of this DDP has no axis of that name\n"
    )
    assert "weight: float32[2, 2]{R:tp}" in text and "device_mesh=mesh['dp']" in text


def test_a_mesh_without_the_further_axis_is_rejected() -> None:
    text = rejected(device_mesh=lambda mesh: md.make_mesh((4,), ("dp",)))
    assert text.startswith("no axis 'tp' in the mesh\n")
    assert "weight: float32[2, 2]{R:tp}" in text
    assert "DDP over 'dp' of DeviceMesh(dp=4); weight" in text
    assert "device_mesh= of the mesh that has axis 'tp'" in text


def test_a_group_that_holds_the_axis_is_no_further_one() -> None:
    def program(way: str) -> str:
        mesh = open_mesh()
        net = reduced(mesh)
        ddp = md.DDP(net, **WAYS[way](mesh))
        ddp(torch.full((1, 2), 1.0 + md.get_rank())).sum().backward()
        return net.weight.grad[0, 0].item()

    for way in ("the world", "the whole mesh", "both axes", "a flat axis", "a group of all"):
        assert md.simulate(program, 4, (way,)) == [2.5] * 4, way


def test_what_a_wrapper_with_further_axes_rejects() -> None:
    def program() -> list[str]:
        mesh = open_mesh()
        ddp = md.DDP(reduced(mesh), device_mesh=mesh["dp"])
        found = []
        with pytest.raises(JoinError) as joined, ddp.join():
            pass
        found.append(str(joined.value))
        with pytest.raises(GradientError) as changed:
            ddp._update_process_group(mesh["tp"])
        return [*found, str(changed.value)]

    for joined, changed in md.simulate(program, 4):
        assert joined.startswith(
            "cannot use a join context with parameters that are averaged over other axes than the "
            "wrapper's\n"
        )
        assert "loop over md.uneven(loader, mesh)" in joined
        assert changed.startswith(
            "cannot change the group of a wrapper whose parameters are annotated as reduced or as "
            "experts"
        )
        assert "wrap the model again with device_mesh=" in changed


@pytest.mark.parametrize("way", ["the whole mesh", "a flat axis"])
def test_marks_of_the_program_outlive_a_wrapper_over_all_their_axes(way: str) -> None:
    def program() -> tuple[str, tuple[str, ...], float]:
        mesh = open_mesh()
        net = reduced(mesh)
        ddp = md.DDP(net, **WAYS[way](mesh))
        with pytest.raises(GradientError) as raised:
            ddp._update_process_group(mesh["dp"])
        text = str(raised.value)
        del ddp, raised  # which holds the wrapper, too
        mark = md.typeof(net.weight).reduced
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        ddp(torch.full((1, 2), 1.0 + md.get_rank())).sum().backward()
        return text, mark, net.weight.grad[0, 0].item()

    for text, mark, grad in md.simulate(program, 4):
        assert text.startswith(
            "cannot change the group of a wrapper whose parameters are annotated"
        )
        assert (mark, grad) == (("tp",), 5.0)


def test_a_mark_that_comes_behind_the_wrapper_is_rejected() -> None:
    def program() -> list[str]:
        mesh = open_mesh()
        net = nn.Linear(2, 2)
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        md.annotate(net.weight, "f d {R:dp}", mesh=mesh)
        found = []
        for given in ({"spec": "f d {R:tp}"}, {"reduced": "tp"}):
            with pytest.raises(AxisTypeError) as raised:
                md.annotate(net.weight, mesh=mesh, **given)
            found.append(str(raised.value))
        del ddp
        return found

    for text in (text for texts in md.simulate(program, 4) for text in texts):
        assert text.startswith("annotate cannot make a wrapped parameter reduced over 'tp'\n")
        assert "annotate the parameter first, then wrap the model" in text


def test_ranks_with_other_marks_are_all_told() -> None:
    def program() -> str:
        mesh = open_mesh()
        net = reduced(mesh)
        if mesh.get_local_rank("tp") == 1:
            md.annotate(net.bias, "f {R:tp}")
        with pytest.raises(md.MismatchError) as raised:
            md.DDP(net, device_mesh=mesh["dp"])
        return str(raised.value)

    for text in md.simulate(program, 4):
        assert "the ranks wrap different Linear modules" in text
        assert "bias, also reduced over: ranks 0, 2: missing; ranks 1, 3: 'tp'" in text


def test_marks_that_a_wrapper_has_made_go_with_it() -> None:
    def program() -> str:
        mesh = open_mesh()
        net = nn.Linear(2, 2)
        del_me = md.DDP(net, device_mesh=mesh["dp"])
        del del_me
        return wrap(mesh, net, "bare")

    assert all(text.startswith("DDP without device_mesh=") for text in md.simulate(program, 4))


# -- a name that stands for several axes, or an axis of another mesh ------------------------------


def values_kept(net: nn.Linear, **over: Any) -> str:
    before = net.weight.detach().clone()
    with pytest.raises((AxisTypeError, MeshError)) as raised:
        md.DDP(net, **over)
    assert torch.equal(net.weight, before)
    return str(raised.value)


def test_a_shard_is_told_by_its_own_mesh_whatever_other_meshes_call_their_axes() -> None:
    def program() -> tuple[str, str, list[float]]:
        mesh = open_mesh()
        other = md.init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))  # of a library
        net = shards(mesh, marks=True)
        md.annotate(net.bias, "f")
        bare = values_kept(net)
        by_other = values_kept(net, process_group=other.get_group("dp"))
        md.DDP(net, device_mesh=mesh["dp"])
        return bare, by_other, net.weight[0].tolist()

    for rank, (bare, by_other, row) in enumerate(md.simulate(program, 4)):
        assert bare.startswith(
            "DDP cannot replicate weight: it is annotated as varying over 'tp'\n"
        )
        assert by_other.startswith(
            "DDP cannot replicate weight: it is annotated as varying over 'tp'\n"
        )
        assert row == WHOLE.chunk(2)[rank % 2][0].tolist()


def test_a_mesh_that_is_named_is_asked_before_others() -> None:
    def program() -> list[float]:
        mesh = open_mesh()
        turned = md.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))  # open, too
        net = shards(mesh, marks=True)
        assert "axes along which the model is replicated" in values_kept(
            net, process_group=mesh.get_group("dp")
        )
        md.DDP(net, device_mesh=mesh["dp"])  # which the error proposes
        turned.close()
        return net.weight[0].tolist()

    rows = [part[0].tolist() for part in WHOLE.chunk(2)]
    assert md.simulate(program, 4) == rows * 2


def test_a_shard_along_an_axis_that_was_made_of_two_is_rejected_along_each() -> None:
    def program() -> list[str]:
        mesh = open_mesh()
        flat = mesh.flatten(name="ep")
        net = nn.Linear(2, 2)
        nn.init.constant_(net.weight, float(md.get_rank()))
        md.annotate(net, {"weight": "f@ep d", "bias": "f"}, mesh=flat)
        ways = ({}, {"device_mesh": mesh}, {"device_mesh": mesh["dp"]}, {"device_mesh": flat})
        return [values_kept(net, **over) for over in ways]

    for texts in md.simulate(program, 4):
        for text in texts:
            assert text.startswith(
                "DDP cannot replicate weight: it is annotated as varying over 'ep'\n"
            )


def test_an_axis_that_was_made_of_two_is_compared_along_each() -> None:
    def program(num_pods: int) -> tuple[str, list[float]]:
        sizes, names = (num_pods, 2, 2), ("pod", "dp", "tp")
        mesh = md.init_device_mesh("cpu", sizes, mesh_dim_names=names)
        net = shards(mesh, marks=False)
        text = values_kept(net, device_mesh=mesh["dp", "tp"].flatten())
        assert text == values_kept(net, device_mesh=mesh["dp", "tp"])
        found = text.partition("process_group=")[2]
        way = eval(found, {"md": md, "mesh": mesh})
        md.DDP(net, process_group=way)
        assert way.ranks == tuple(
            range(4 * mesh.get_local_rank("pod"), 4 + 4 * mesh.get_local_rank("pod"))
        )
        return text, net.weight[0].tolist()

    for num_pods in (1, 2):
        for text, row in md.simulate(program, 4 * num_pods, (num_pods,)):
            assert text.startswith("weight is probably a shard: equal along 'dp', different along")
            assert row == WHOLE[0].tolist()


def test_a_rejected_wrapper_has_marked_nothing() -> None:
    def program() -> bool:
        mesh = open_mesh()
        net = shards(mesh, marks=False)
        with pytest.raises(MeshError) as raised:
            md.DDP(net, device_mesh=mesh)
        assert "weight: float32[2, 2]\n" in str(raised.value)
        md.DDP(net, device_mesh=mesh["dp"])  # while the error is held
        return True

    assert all(md.simulate(program, 4))


def test_an_axis_of_another_mesh_does_not_stand_for_the_further_one() -> None:
    def program(other: tuple[int, ...], names: tuple[str, ...]) -> str:
        mesh = open_mesh()
        library = md.init_device_mesh("cpu", other, mesh_dim_names=names)
        with pytest.raises(AxisTypeError) as raised:
            md.DDP(reduced(mesh), process_group=mesh.get_group("dp"))
        library.close()
        return str(raised.value)

    for other, names in (((4, 1), ("dp", "tp")), ((4,), ("tp",))):
        for text in md.simulate(program, 4, (other, names)):
            assert text.startswith(
                "weight is reduced over 'tp', but the group of this DDP has no axis"
            )


def test_a_group_of_a_part_of_the_axis_does_not_stand_for_it() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        part = md.distributed.new_group([0, 1])
        if md.get_rank() > 1:
            return ""
        with pytest.raises(AxisTypeError) as raised:
            md.DDP(reduced(mesh), process_group=part)
        return str(raised.value)

    for text in md.simulate(program, 4)[:2]:
        assert text.startswith("weight is reduced over 'tp', but the group of this DDP has no axis")


def test_a_mark_on_one_rank_alone_is_told_before_others_wait_for_a_group() -> None:
    def program() -> str:
        mesh = open_mesh()
        net = nn.Linear(2, 2)
        if md.get_rank() == 3:
            md.annotate(net.weight, "f d {R:tp}")
        try:
            md.DDP(net, device_mesh=mesh["dp"])
        except md.MismatchError as error:
            return str(error)
        return ""

    found = md.simulate(program, 4)
    assert found[0] == found[2] == ""
    for text in (found[1], found[3]):
        assert "the ranks wrap different Linear modules" in text
        assert "weight, also reduced over: rank 1: missing; rank 3: 'tp'" in text


def test_a_copied_wrapper_keeps_further_axes_of_tensors_that_lost_their_marks() -> None:
    def program() -> tuple[float, str]:
        mesh = open_mesh()
        ddp = md.DDP(reduced(mesh), device_mesh=mesh["dp"])
        other = copy.deepcopy(ddp)
        del ddp
        other(torch.full((1, 2), 1.0 + md.get_rank())).sum().backward()
        weight = other.module.weight
        return weight.grad[0, 0].item(), md.typeof(weight).reduced

    assert md.simulate(program, 4) == [(5.0, ("dp", "tp"))] * 4


def shard_of(way: str) -> str:
    mesh = open_mesh()
    return wrap(mesh, shards(mesh, marks=False), way)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    for text in pool.run(shard_of, 4, "the whole mesh", backend=backend):
        assert text.startswith("weight is probably a shard")
    for text in pool.run(shard_of, 4, "bare", backend=backend):
        assert text.startswith("DDP without device_mesh=")


def test_over_two_hosts(two_hosts: TwoHosts) -> None:
    for hosts in ("AABB", "ABAB"):  # the replicas, or the shards, lie on both
        for text in two_hosts.run(shard_of, 4, "the whole mesh", backend=None, hosts=hosts):
            assert text.startswith("weight is probably a shard")


def guarded(way: str) -> list[str]:
    """How a way of wrapping is rejected, for a shard without its mark and with it."""
    mesh = open_mesh("cuda")
    return [wrap(mesh, shards(mesh, marks=marks), way) for marks in (False, True)]


@pytest.mark.parametrize("way", WAYS)
def test_over_nccl_shards_are_guarded_alike(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without a GPU can show it, by a stand-in."""
    asked: set[str] = set()
    open_device_group = ProcessGroup.open_device_group

    def note(self: ProcessGroup, device_type: str, *more: Any) -> Any:
        asked.add(device_type)
        return open_device_group(self, device_type, *more)

    monkeypatch.setattr(ProcessGroup, "open_device_group", note)
    with pretended_gpu():
        found = md.simulate(guarded, 4, (way,))
    for unmarked, marked in found:
        assert marked.startswith(
            "DDP cannot replicate weight: it is annotated as varying over 'tp'\n"
        )
        if way == "bare":
            assert unmarked.startswith("DDP without device_mesh=")
        elif way in ("the whole mesh", "both axes", "both axes, turned"):
            assert unmarked.startswith("weight is probably a shard: equal along 'dp'")
    assert asked <= {"cuda"}
