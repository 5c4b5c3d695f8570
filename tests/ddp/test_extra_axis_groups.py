"""Gradients by spec: each equals one device's, over whatever axes its parameter is averaged."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import meshdist as md
from meshdist import lax
from meshdist.errors import GradientError
from tests.ddp.stand_in_accelerator import in_place_of_the_cpu
from tests.mpi_job import job_of
from tests.pool import Failure, Pool
from tests.two_hosts import TwoHosts

F64 = torch.float64
CPU = [ProfilerActivity.CPU]
BATCH, PLACES, WIDTH, HIDDEN = 12, 12, 6, 24
AXES = ("pod", "dp", "tp")


def whole_weights() -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(2)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=F64, generator=draws) / 3

    return {
        "norm": 1 + draw(WIDTH),
        "up": draw(HIDDEN, WIDTH),
        "down": draw(WIDTH, HIDDEN),
        "bias": draw(WIDTH),
        "scale": 1 + draw(1),
    }


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(10 + step)
    x, y = (torch.randn(BATCH, PLACES, WIDTH, dtype=F64, generator=draws) for _ in range(2))
    return x, y


class Block(nn.Module):
    """A layer whose sequence is cut over 'tp' between its products, its width inside of them."""

    def __init__(self, mesh: md.DeviceMesh | None, *, marks: bool = True) -> None:
        super().__init__()
        self.mesh = mesh
        for name, weight in whole_weights().items():
            self.register_parameter(name, nn.Parameter(weight.clone()))
        if mesh is not None:
            self.up = nn.Parameter(md.shard(self.up.detach(), "f@tp d", mesh))
            self.down = nn.Parameter(md.shard(self.down.detach(), "d f@tp", mesh))
            if marks:
                for name in ("norm", "bias", "scale"):
                    md.annotate(getattr(self, name), "d {R:tp}", mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (WIDTH,), self.norm) * self.scale
        if self.mesh is not None:
            h = lax.all_gather(h, self.mesh["tp"], axis=1, tiled=True)
        y = torch.tanh(h @ self.up.T) @ self.down.T
        if self.mesh is not None:
            y = lax.psum_scatter(y, self.mesh["tp"], scatter_dimension=1, tiled=True)
        return x + y + self.bias


def part(whole: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    axes = ",".join(axis for axis in mesh.axis_names if axis != "tp")
    return md.shard(whole, f"b@({axes}) s@tp d", mesh)


def num_rows(mesh: md.DeviceMesh) -> int:
    return BATCH * mesh.size("tp") // mesh.size()


def loss_of(net: nn.Module, mesh: md.DeviceMesh, step: int = 0) -> torch.Tensor:
    """A partial sum, over 'tp', of the mean over this replica's samples."""
    x, y = (part(whole, mesh) for whole in data(step))
    return (net(x) - y).square().sum() / (num_rows(mesh) * PLACES * WIDTH)


def expected(steps: int = 1) -> dict[str, torch.Tensor]:
    """One device's gradients, added up over steps."""
    net = Block(None)
    for step in range(steps):
        x, y = data(step)
        (net(x) - y).square().mean().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def differences(
    net: nn.Module, mesh: md.DeviceMesh, wanted: dict[str, torch.Tensor]
) -> dict[str, float]:
    cut = {"up": "f@tp d", "down": "d f@tp"}
    found = {}
    for name, parameter in net.named_parameters():
        mine = wanted[name]
        if name in cut:
            mine = md.shard(mine, cut[name], mesh)
        found[name] = float((parameter.grad - mine).abs().max())
    return found


def one_step(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    loss_of(ddp, mesh).backward()
    return expected()


def three_steps(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    for _ in range(3):
        net.zero_grad()
        loss_of(ddp, mesh).backward()
    return expected()


def kept_gradients(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    for _ in range(3):
        net.zero_grad(set_to_none=False)
        loss_of(ddp, mesh).backward()
    return expected()


def accumulated(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    for step in range(3):
        loss_of(ddp, mesh, step).backward()
    return expected(3)


def without_sync(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    loss_of(ddp, mesh, 0).backward()
    with ddp.no_sync():
        loss_of(ddp, mesh, 1).backward()
        loss_of(ddp, mesh, 2).backward()
    loss_of(ddp, mesh, 3).backward()
    return expected(4)


def local_backwards(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    for step in range(4):
        loss_of(ddp if step % 2 else net, mesh, step).backward()
    return expected(4)


def a_retained_graph(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    loss = loss_of(ddp, mesh)
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: 2 * grad for name, grad in expected().items()}


def a_checkpoint(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    run = Block.forward
    net.forward = lambda x: torch.utils.checkpoint.checkpoint(run, net, x, use_reentrant=False)
    for _ in range(2):
        net.zero_grad()
        loss_of(ddp, mesh).backward()
    return expected()


def beside_a_plain_gradient(
    ddp: Any, net: nn.Module, mesh: md.DeviceMesh
) -> dict[str, torch.Tensor]:
    loss = loss_of(ddp, mesh)
    plain = torch.autograd.grad(loss, net.norm, retain_graph=True)[0]
    whole = lax.pmean(lax.psum(plain, mesh["tp"]), ("pod", "dp"), mesh=mesh)
    assert torch.allclose(whole, expected()["norm"], rtol=0, atol=1e-14)
    loss.backward()
    return expected()


def a_term_beside_the_wrapper(
    ddp: Any, net: nn.Module, mesh: md.DeviceMesh
) -> dict[str, torch.Tensor]:
    for _ in range(2):
        net.zero_grad()
        # A partial sum on each rank along 'tp', of a term that the wrapper's forward knows nothing
        # of.
        (loss_of(ddp, mesh) + net.norm.square().sum() / mesh.size("tp")).backward()
    return {**expected(), "norm": expected()["norm"] + 2 * whole_weights()["norm"]}


WAYS = [
    one_step,
    three_steps,
    kept_gradients,
    accumulated,
    without_sync,
    local_backwards,
    a_retained_graph,
    a_checkpoint,
    beside_a_plain_gradient,
    a_term_beside_the_wrapper,
]
SHAPES = [
    (1, 1, 2),
    (1, 2, 1),
    (1, 1, 3),
    (1, 2, 2),
    (2, 1, 2),
    (1, 4, 2),
    (1, 1, 6),
    (2, 2, 2),
    (1, 3, 2),
]


def wrapped(shape: tuple[int, ...], way: Callable[..., Any], **options: Any) -> dict[str, float]:
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    net = Block(mesh)
    ddp = md.DDP(net, device_mesh=mesh["pod", "dp"], **options)
    return differences(net, mesh, way(ddp, net, mesh))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_one_device(shape: tuple[int, ...], way: Callable[..., Any]) -> None:
    for found in md.simulate(wrapped, math.prod(shape), args=(shape, way)):
        assert max(found.values()) < 1e-14, found


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-5},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"skip_all_reduce_unused_params": True},
        {"init_sync": False},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    def program() -> dict[str, float]:
        return wrapped((1, 2, 2), three_steps, **options)

    for found in md.simulate(program, 4):
        assert max(found.values()) < 1e-14, found


# -- what goes where ------------------------------------------------------------------------------


def test_messages_of_a_step() -> None:
    """What is reduced further goes by itself, last, with what all ranks say of their end."""

    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = Block(mesh)
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        for _ in range(3):
            out = ddp(part(data(0)[0], mesh))
            with (
                profile(activities=CPU, acc_events=True)
                if md.get_rank() == 0
                else nullcontext() as seen
            ):
                out.sum().backward()
        events = seen.events() if md.get_rank() == 0 else ()
        return sorted(event.name for event in events if "all_reduce" in event.name)

    found = md.simulate(program, 4)
    assert found[0] and len(found[0]) == 2, found[0]


def test_the_last_message_goes_over_the_union_where_a_parameter_does() -> None:
    def program() -> tuple[list[str], list[float]]:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        net = nn.ParameterDict({name: torch.ones(3) for name in ("both", "cp", "tp", "own")})
        specs = {"both": "d {R:cp,tp}", "cp": "d {R:cp}", "tp": "d {R:tp}"}
        md.annotate(net, specs, mesh=mesh)
        run = nn.Module()
        run.net = net
        run.forward = lambda x: sum((net[name] * x).sum() for name in net)
        ddp = md.DDP(run, device_mesh=mesh["dp"])
        for _ in range(3):
            ddp.zero_grad()
            out = ddp(torch.full((3,), 1.0 + md.get_rank()))
            with (
                profile(activities=CPU, acc_events=True)
                if md.get_rank() == 0
                else nullcontext() as seen
            ):
                out.backward()
        events = seen.events() if md.get_rank() == 0 else ()
        sent = [event.name for event in events if "all_reduce" in event.name]
        return sent, [net["both"].grad[0].item(), net["own"].grad[0].item()]

    found = md.simulate(program, 8)
    assert len(found[0][0]) == 4 and "'dp', 'cp', 'tp'" in found[0][0][-1], found[0][0]
    assert [grads for _, grads in found] == [[18.0, 3.0 + rank] for rank in range(4)] * 2


def test_a_group_of_parameters_may_be_reduced_over_other_axes_than_another() -> None:
    """A weight whose uses differ along 'cp', another along 'tp', a third along both."""

    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        net = nn.ParameterDict(
            {name: torch.ones(3, dtype=F64) for name in ("cp", "tp", "both", "own")}
        )
        md.annotate(net["cp"], "d {R:cp}", mesh=mesh)
        md.annotate(net["tp"], "d {R:tp}", mesh=mesh)
        md.annotate(net["both"], "d {R:cp,tp}", mesh=mesh)
        run = nn.Module()
        run.net = net
        run.forward = lambda x: sum((net[name] * x).sum() for name in net)
        ddp = md.DDP(run, device_mesh=mesh["dp"])
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((3,), 1.0 + md.get_rank(), dtype=F64)).backward()
        return [net[name].grad[0].item() for name in ("own", "cp", "tp", "both")]

    # Ranks are 4 dp + 2 cp + tp, and give 1 + rank.
    for rank, found in enumerate(md.simulate(program, 8)):
        cp, tp = rank // 2 % 2, rank % 2
        own = [1 + 4 * dp + 2 * cp + tp for dp in range(2)]
        assert found[0] == sum(own) / 2
        assert found[1] == sum(1 + 4 * dp + 2 * c + tp for dp in range(2) for c in range(2)) / 2
        assert found[2] == sum(1 + 4 * dp + 2 * cp + t for dp in range(2) for t in range(2)) / 2
        assert found[3] == sum(range(1, 9)) / 2


def test_values_come_from_the_first_rank_of_the_wider_group() -> None:
    def program() -> tuple[float, float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.ParameterDict(
            {name: torch.full((2,), float(md.get_rank())) for name in ("a", "b")}
        )
        md.annotate(net["a"], "d {R:tp}", mesh=mesh)
        md.annotate(net["b"], "d@tp", mesh=mesh)
        md.DDP(net, device_mesh=mesh["dp"])
        return net["a"][0].item(), net["b"][0].item()

    assert md.simulate(program, 4) == [(0.0, 0.0), (0.0, 1.0)] * 2


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, uses_a: bool = True) -> torch.Tensor:
        return (self.b * x).sum() + ((self.a * x).sum() if uses_a else 0)


def halves(mesh: md.DeviceMesh, **options: Any) -> tuple[Halves, Any]:
    net = Halves()
    md.annotate(net.a, "d {R:tp}", mesh=mesh)
    return net, md.DDP(net, device_mesh=mesh["dp"], **options)


def test_a_rank_that_lacks_the_gradient_is_named_on_all_ranks() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        _, ddp = halves(mesh)
        ddp(torch.ones(2), md.get_rank() != 3).backward()
        with pytest.raises(GradientError) as raised:
            ddp.check_gradients()
        return str(raised.value)

    for text in md.simulate(program, 4):
        assert text.startswith("parameters got no gradient in the backward since the last forward")
        assert "found:    rank 3: a (index 0)\n" in text


def test_a_backward_that_is_interrupted_is_told_along_the_further_axis_too() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net, ddp = halves(mesh)
        for step in range(3):
            out = ddp(torch.ones(2))
            if step == 2 and md.get_rank() == 1:
                net.b.register_hook(lambda _: 1 / 0)
            try:
                out.backward()
                ddp.check_gradients()
            except ZeroDivisionError:
                with pytest.raises(GradientError) as raised:
                    ddp.check_gradients()
                return str(raised.value)
            except GradientError as error:
                return str(error)
        return "not raised"

    for text in md.simulate(program, 4):
        assert "a backward was interrupted" in text
        assert "rank 1: an exception was raised inside backward()" in text


def test_some_ranks_may_lack_the_gradient_where_that_is_allowed() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net, ddp = halves(mesh, find_unused_parameters=True)
        found = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(2), md.get_rank() != 3).backward()
            found.append(net.a.grad[0].item())
        return found

    assert md.simulate(program, 4) == [[1.5] * 3] * 4


def test_communication_hooks_pass_them_by_with_one_warning() -> None:
    def program() -> tuple[list[float], int, list[bool]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net, ddp = halves(mesh)
        seen: list[bool] = []

        def hook(state: object, bucket: Any) -> Any:
            seen.append(bucket.is_last())
            assert [*map(id, bucket.parameters())] == [id(net.b)]
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer() * 10)
            return done

        with pytest.warns(UserWarning, match="averaged over other axes: a") as warned:
            ddp.register_comm_hook(None, hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((2,), 1.0 + md.get_rank())).backward()
        return [net.a.grad[0].item(), net.b.grad[0].item()], len(warned), seen

    for rank, (grads, num, seen) in enumerate(md.simulate(program, 4)):
        assert grads == [5.0, 10.0 * (1 + rank)]
        assert num == 1 and seen == [True] * 3


def test_types_own_the_further_axes_too() -> None:
    def program() -> tuple[list[float], bool]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = Block(mesh)
        for name, how in {"up": "f@tp d", "down": "d f@tp"}.items():
            md.annotate(getattr(net, name), how, mesh=mesh)
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        wanted = expected()
        x, y = (md.annotate(part(whole, mesh), varying=("dp", "tp")) for whole in data(0))
        with md.typed(mesh):
            for _ in range(2):
                optimizer.zero_grad()
                loss = (ddp(x) - y).square().sum() / (num_rows(mesh) * PLACES * WIDTH)
                lax.psum(loss, "tp").backward()
            optimizer.step()
        found = differences(net, mesh, wanted)
        return [*found.values()], bool((net.norm == lax.pmean(net.norm, "tp", mesh=mesh)).all())

    for found, is_equal in md.simulate(program, 4):
        assert max(found) < 1e-14 and is_equal


def test_half_precision_and_a_scaler_find_what_overflows() -> None:
    def program() -> bool:
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        net = Halves().half()
        md.annotate(net.a, "d {R:tp}", mesh=mesh)
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        (ddp(torch.ones(2).half()) * 40000).backward()
        return bool(net.a.grad.isinf().all()) and bool(net.b.grad.isfinite().all())

    assert md.simulate(program, 2) == [True] * 2


# -- over processes -------------------------------------------------------------------------------


def over_processes(shape: tuple[int, ...]) -> float:
    return max(max(wrapped(shape, way).values()) for way in WAYS)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    for shape in ((1, 2, 2), (1, 1, 3)):
        found = pool.run(over_processes, math.prod(shape), shape, backend=backend)
        assert max(found) < 1e-14


@pytest.mark.mpi
@pytest.mark.soak
def test_over_mpi(pool: Pool) -> None:
    assert max(job_of(pool, 4).run_in_world(over_processes, (1, 2, 2))) < 1e-14


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_over_two_hosts(two_hosts: TwoHosts, backend: str | None) -> None:
    for shape in ((1, 2, 2), (1, 1, 4)):
        assert max(two_hosts.run(over_processes, 4, shape, backend=backend)) < 1e-14


def checked_steps(ddp: Any, net: nn.Module, mesh: md.DeviceMesh) -> dict[str, torch.Tensor]:
    for _ in range(3):
        net.zero_grad()
        loss_of(ddp, mesh).backward()
        ddp.check_gradients()
    return expected()


def lacking_or_interrupted(interrupts: bool) -> list[str]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, ddp = halves(mesh)
    raised = []
    for step in range(3):
        out = ddp(torch.ones(2), interrupts or step < 2 or md.get_rank() != 3)
        if interrupts and step == 2 and md.get_rank() == 1:
            net.b.register_hook(lambda _: 1 / 0)
        with suppress(ZeroDivisionError):
            out.backward()
        try:
            ddp.check_gradients()
        except GradientError as error:
            raised.append(str(error))
    return raised


def test_where_a_backward_returns_before_its_sums_have_ended() -> None:
    """As on an accelerator, for which a stand-in is."""
    with in_place_of_the_cpu():
        for found in md.simulate(wrapped, 4, ((1, 2, 2), checked_steps)):
            assert max(found.values()) < 1e-14
    for interrupts, told in (
        (True, "rank 1: an exception was raised inside"),
        (False, "rank 3: a (index 0)"),
    ):
        with in_place_of_the_cpu():
            for raised in md.simulate(lacking_or_interrupted, 4, (interrupts,)):
                assert len(raised) == 1 and told in raised[0]


class Large(nn.Module):
    """Gradients that are sent by themselves, over a backend without memory that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1 << 21)) for _ in range(2))
        self.rows = nn.Embedding(4, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).sum() + (self.b * x).sum() + x * self.rows(torch.arange(3)).sum()


def large() -> list[list[float]]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Large()
    md.annotate(net, {"a": "d {R:tp}", "rows.weight": "v d {R:tp}"}, mesh=mesh)
    torch.sparse.check_sparse_tensor_invariants.disable()  # older torch warns where nothing is said
    ddp = md.DDP(net, device_mesh=mesh["dp"])
    found = []
    for step in range(4):
        if step < 3:
            ddp.zero_grad()
        ddp(torch.tensor(1.0 + md.get_rank())).backward()
        rows = net.rows.weight.grad.to_dense()
        found.append([net.a.grad[0].item(), net.b.grad[0].item(), *rows[:, 0].tolist()])
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_large_and_sparse_gradients(pool: Pool, backend: str) -> None:
    for rank, found in enumerate(pool.run(large, 4, backend=backend)):
        once = [5.0, 2.0 + rank % 2, 5.0, 5.0, 5.0, 0.0]
        assert found == [once] * 3 + [[2 * value for value in once]]


def until_a_rank_dies() -> str:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _, ddp = halves(mesh)
    for _ in range(2):
        ddp(torch.ones(2)).backward()
    out = ddp(torch.ones(2))
    if md.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(md.errors.BackendError) as raised:
        out.backward()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_is_killed_is_named_along_the_further_axis_too(
    pool: Pool, backend: str
) -> None:
    *others, lost = pool.outcomes(until_a_rank_dies, 4, backend=backend)
    assert isinstance(lost, Failure)
    for text in others:
        assert "rank 3 has ended" in text


@pytest.mark.parametrize("is_typed", [False, True])
def test_partial_sums_of_a_parameter_have_its_gradient(is_typed: bool) -> None:
    """A parameter "{U:tp}" is the sum of what the ranks hold, each with the gradient of the sum."""

    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = nn.Parameter(torch.arange(6.0, dtype=F64).view(2, 3))
        x = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
        (x @ whole.T).square().mean().backward()
        net = nn.Module()
        net.w = nn.Parameter(whole.detach() * (0.75, 0.25)[mesh.get_local_rank("tp")])
        md.annotate(net, {"w": "f d {U:tp}"}, mesh=mesh)
        net.forward = lambda rows: lax.psum(rows @ net.w.T, "tp", mesh=mesh)
        ddp = md.DDP(net, device_mesh=mesh["dp"])
        rows = md.shard(x, "b@dp d", mesh)
        with md.typed(mesh) if is_typed else nullcontext():
            ddp(rows).square().mean().backward()
        return float((net.w.grad - whole.grad).abs().max())

    assert max(md.simulate(program, 4)) < 1e-12
