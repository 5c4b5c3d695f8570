"""torch's collectives inside contexts: they run as ever, and what they write has the right
kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist import lax
from meshdist.operation_table import OPERATIONS
from tests.inner import watchers
from tests.typed_mode.typed_cases import in_mesh, kinds, varying

X = "V:dp,tp"  # the kinds of what is read


def x(*shape: int) -> torch.Tensor:
    return md.annotate(torch.full(shape or (2,), 1.0 + md.get_rank()), varying=("dp", "tp"))


def pair() -> list[torch.Tensor]:
    return [torch.zeros(2), torch.zeros(2)]


def received(mesh: md.DeviceMesh, receive: Callable[..., Any]) -> torch.Tensor:
    group, place = mesh["tp"], mesh.get_local_rank("tp")
    out = torch.zeros(2)
    if place == 0:
        md.send(x(), group=group, group_dst=1)
        receive(out, group=group, group_src=1)
    else:
        receive(out, group=group, group_src=0)
        md.send(x(), group=group, group_dst=0)
    return out


def batched(mesh: md.DeviceMesh) -> torch.Tensor:
    group, place = mesh["tp"], mesh.get_local_rank("tp")
    out, sent = torch.zeros(2), x()
    operations = [
        md.P2POp(md.isend, sent, group=group, group_peer=1 - place),
        md.P2POp(md.irecv, out, group=group, group_peer=1 - place),
    ]
    for work in md.batch_isend_irecv(operations):
        work.wait()
    assert kinds(sent) == X
    return out


def on_out(call: Callable[[Any, Any], Any], out: Callable[[], Any]) -> Callable[[Any], Any]:
    """The output of a collective that is called with the group and an output."""

    def body(mesh: md.DeviceMesh) -> Any:
        given = out()
        call(mesh["tp"], given)
        return given[0] if isinstance(given, list) else given

    return body


# By collective: what it writes over 'tp', and the kinds of that. Inputs vary over both axes;
# receives and objects know no more of the other axes than the tensor that they are given.
CASES: dict[str, tuple[Callable[[md.DeviceMesh], Any], str]] = {
    "all_reduce": (on_out(lambda g, t: md.all_reduce(t, group=g), x), "V:dp"),
    "all_reduce_coalesced": (
        on_out(lambda g, t: md.all_reduce_coalesced(t, group=g), lambda: [x(), x()]),
        "V:dp",
    ),
    "reduce": (on_out(lambda g, t: md.reduce(t, group_dst=0, group=g), lambda: x()), X),
    "reduce_scatter_tensor": (
        on_out(lambda g, t: md.reduce_scatter_tensor(t, x(4), group=g), lambda: torch.zeros(2)),
        X,
    ),
    "reduce_scatter_single": (
        on_out(lambda g, t: md.reduce_scatter_single(t, x(4), group=g), lambda: torch.zeros(2)),
        X,
    ),
    "reduce_scatter": (
        on_out(lambda g, t: md.reduce_scatter(t, [x(), x()], group=g), lambda: torch.zeros(2)),
        X,
    ),
    "broadcast": (on_out(lambda g, t: md.broadcast(t, group_src=1, group=g), x), "V:dp"),
    "all_gather_into_tensor": (
        on_out(lambda g, t: md.all_gather_into_tensor(t, x(), group=g), lambda: torch.zeros(4)),
        "V:dp",
    ),
    "all_gather_single": (
        on_out(lambda g, t: md.all_gather_single(t, x(), group=g), lambda: torch.zeros(4)),
        "V:dp",
    ),
    "all_gather": (on_out(lambda g, t: md.all_gather(t, x(), group=g), pair), "V:dp"),
    "all_gather_coalesced": (
        on_out(
            lambda g, t: md.all_gather_coalesced([t, pair()[:1]], [x()], group=g),
            lambda: pair()[:1],
        ),
        "V:dp",
    ),
    "gather": (
        on_out(
            lambda g, t: md.gather(
                x(), t if not g.get_local_rank() else None, group=g, group_dst=0
            ),
            pair,
        ),
        X,
    ),
    "scatter": (
        on_out(
            lambda g, t: md.scatter(
                t, [x(), x()] if not g.get_local_rank() else None, group=g, group_src=0
            ),
            lambda: md.annotate(torch.zeros(2), varying="dp"),
        ),
        X,
    ),
    "all_to_all": (on_out(lambda g, t: md.all_to_all(t, [x(), x()], group=g), pair), X),
    "all_to_all_single": (
        on_out(lambda g, t: md.all_to_all_single(t, x(), group=g), lambda: torch.zeros(2)),
        X,
    ),
    "recv": (lambda mesh: received(mesh, md.recv), "V:tp"),
    "irecv": (
        lambda mesh: received(mesh, lambda *a, **k: md.irecv(*a, **k).wait()),
        "V:tp",
    ),
    "batch_isend_irecv": (batched, "V:tp"),
    "all_reduce_multigpu": (
        on_out(lambda g, t: md.all_reduce_multigpu(t, group=g), lambda: [x()]),
        "V:dp",
    ),
    "reduce_multigpu": (
        on_out(lambda g, t: md.reduce_multigpu(t, g.get_group().ranks[0], group=g), lambda: [x()]),
        X,
    ),
    "broadcast_multigpu": (
        on_out(
            lambda g, t: md.broadcast_multigpu(t, g.get_group().ranks[0], group=g), lambda: [x()]
        ),
        "V:dp",
    ),
    "all_gather_multigpu": (
        on_out(lambda g, t: md.all_gather_multigpu([t], [x()], group=g), pair),
        "V:dp",
    ),
    "all_gather_object": (
        on_out(lambda g, t: md.all_gather_object(t, x(), group=g), lambda: [None, None]),
        "V:dp",
    ),
    "gather_object": (
        on_out(
            lambda g, t: md.gather_object(
                x(), t if not g.get_local_rank() else None, group=g, group_dst=0
            ),
            lambda: [x(), x()],
        ),
        X,
    ),
    "broadcast_object_list": (
        on_out(lambda g, t: md.broadcast_object_list(t, group=g, group_src=0), lambda: [x()]),
        "V:dp",
    ),
    "scatter_object_list": (
        on_out(
            lambda g, t: md.scatter_object_list(
                t, [x(), x()] if not g.get_local_rank() else None, group=g, group_src=0
            ),
            lambda: [None],
        ),
        X,
    ),
}


def test_every_collective_is_in_the_table() -> None:
    silent = {"barrier", "monitored_barrier", "send", "isend", "send_object_list"}
    assert {row.name for row in OPERATIONS.values() if not row.writes} == silent
    assert set(OPERATIONS) - silent - {"recv_object_list"} == set(CASES)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("operation", CASES)
def test_what_is_written_has_the_kinds_that_the_collective_makes(operation: str) -> None:
    call, expected = CASES[operation]

    def body(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh):
            return kinds(call(mesh))

    found = in_mesh(body)
    assert found == [expected, "" if operation == "gather" else expected] * 2  # one rank gathers


def test_objects_that_are_received() -> None:
    def body(mesh: md.DeviceMesh) -> str:
        group, place = mesh["tp"], mesh.get_local_rank("tp")
        found = [None]
        with md.typed(mesh):
            if place:
                md.send_object_list([x()], group=group, group_dst=0)
                return X
            md.recv_object_list(found, group=group, group_src=1)
            return kinds(found[0])

    assert in_mesh(body) == [X] * 4


def test_groups_and_what_they_make_equal() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        every = md.new_group(list(range(4)))
        crosswise = [md.new_group([0, 3]), md.new_group([1, 2])]
        own = next(one for one in crosswise if isinstance(one, md.ProcessGroup))
        with md.typed(mesh):
            found = []
            for group in (None, every, mesh, mesh["tp", "dp"], mesh["dp"], own):
                t = x()
                md.all_reduce(t, group=group)
                found.append(kinds(t))
            return found

    assert in_mesh(body)[0] == ["", "", "", "", "V:tp", X]


def test_an_axis_of_size_one_is_an_ordinary_axis() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            t, u = x(), x()
            md.all_reduce(t, group=mesh["tp"])
            md.all_reduce(u, group=mesh["dp"])
            return kinds(t), kinds(u)

    assert in_mesh(body, shape=(1, 2)) == [("V:dp", "V:tp")] * 2


def test_other_views_keep_their_types_and_unreduced_values_are_added_up() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            t = x()
            view = t[:1]
            md.all_reduce(t, group=mesh["tp"])
            u = md.annotate(torch.ones(2), unreduced="tp")
            md.all_reduce(u, group=mesh["tp"])
            return kinds(view), kinds(u)

    assert in_mesh(body)[0] == (X, "")


def test_works_and_methods_of_groups() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            t, u = x(), x()
            md.all_reduce(t, group=mesh["tp"], async_op=True).wait()
            mesh["tp"].get_group().allreduce([u]).wait()
            return kinds(t), kinds(u)

    assert in_mesh(body)[0] == ("V:dp", "V:dp")


def test_nothing_is_watched_outside() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        before = len(watchers)
        with md.typed(mesh):
            inside = len(watchers)
            with md.typed(mesh):
                nested = len(watchers)
        t = x()
        md.all_reduce(t, group=mesh["tp"])
        return before, inside, nested, kinds(t)

    (found,) = in_mesh(body, shape=(1, 1))
    assert found == (0, 1, 1, X)
    assert watchers == []


def test_own_rooms_run_as_if_there_were_no_context() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        md.seed(0)
        with md.typed(mesh):
            net = torch.nn.Sequential(
                torch.nn.Linear(3, 4), md.SyncBatchNorm(4, process_group=mesh["dp"])
            )
            model = md.DDP(net, device_mesh=mesh["dp"])
            averager = md.PeriodicModelAverager(2, process_group=mesh["dp"].get_group())
            batch = md.annotate(torch.randn(2, 3) + md.get_rank(), varying="dp")
            with torch.no_grad():
                out = model(batch)
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            averager.average_parameters(net.parameters())
            sampler = md.DistributedSampler(range(8), num_replicas=2, rank=0, shuffle=True)
            assert len(list(sampler)) == 4
            return kinds(out), [kinds(one) for one in net.buffers()]

    assert in_mesh(body)[0] == ("V:dp", ["", "", ""])


def test_a_tensor_that_is_written_through_a_view_has_a_type() -> None:
    entering, data = torch.zeros(2, 3), torch.zeros(2, 3)

    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(3, requires_grad=True)
        ours, shard = entering.clone(), data.clone()
        part = varying(shard[0])
        with md.typed(mesh):
            made = torch.zeros(2, 3)
            for base in (made, ours):
                base[0].add_(w)  # operands of one type
                base[1, :2].copy_(w[:2])
                base[1][2] = w[2]
            part.mul_(w)
            lax.psum((made * varying(torch.ones(2, 3))).sum(), "dp").backward()
            return w.grad.tolist(), [kinds(one) for one in (made * 1, ours * 1, shard * 1)]

    assert in_mesh(body)[0] == ([4.0, 4.0, 4.0], ["", "", "V:dp"])
