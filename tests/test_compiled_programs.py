"""torch.compile of programs with our calls: values and gradients of the eager program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshdist as md

Function = Callable[[torch.Tensor], torch.Tensor]


def mapped(mesh: md.DeviceMesh) -> Function:
    total = md.shard_map(
        lambda x: md.lax.psum(x, "tp"), mesh=mesh, in_specs=md.P("tp"), out_specs=md.P()
    )
    return lambda x: x * total(x.detach().new_ones(8, 2) * 2).local


def sharded(mesh: md.DeviceMesh) -> Function:
    sharding = md.NamedSharding(mesh, md.P("tp"))
    return lambda x: (md.ShardedArray(x * 2, sharding) + 1).local.exp()


def annotated(mesh: md.DeviceMesh) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        md.annotate(y, "a@tp b", mesh=mesh)
        return y + len(md.typeof(y).varying)

    return run


def typed(mesh: md.DeviceMesh) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        with md.typed(mesh):
            y = md.lax.pvary(x, "tp") * (1 + md.get_rank())
            return md.lax.psum(y, "tp")

    return run


def resharded(mesh: md.DeviceMesh) -> Function:
    return lambda x: md.reshard(x.sin(), "a@tp b -> a b@tp", mesh).cos()


def summed(mesh: md.DeviceMesh) -> Function:
    return lambda x: md.einsum("a@tp b, a@tp b -> b", x * 2, x + 1, mesh=mesh) * 3


def in_place(mesh: md.DeviceMesh) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.detach() * 2
        work = md.all_reduce(y, group=mesh, async_op=True)
        work.wait()
        return x * y

    return run


def objects(mesh: md.DeviceMesh) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        found: list[int] = [0] * mesh.size()
        md.distributed.all_gather_object(found, md.get_rank(), group=mesh)
        return x * sum(found)

    return run


def messages(mesh: md.DeviceMesh) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.detach() * 2
        if md.get_rank() == 0:
            md.send(y, 1)
        else:
            md.recv(y, 0)
        return x * y

    return run


def vmapped(mesh: md.DeviceMesh) -> Function:
    return lambda x: torch.func.vmap(lambda row: md.lax.psum(row, "tp", mesh=mesh))(x) * 2


def derived(mesh: md.DeviceMesh) -> Function:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return md.lax.psum(x, "tp", mesh=mesh).square().sum()

    return lambda x: torch.func.grad(loss)(x) * 2


def asked(mesh: md.DeviceMesh) -> Function:
    return lambda x: x * (1 + mesh.get_local_rank("tp")) + md.get_world_size()


def planned(mesh: md.DeviceMesh) -> Function:
    """A model with the plan words that the tests of split transformers lack."""
    md.seed(0)
    model = nn.Sequential(
        nn.Tanh(), nn.Linear(2, 6), nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3), nn.Linear(3, 2)
    )
    plan = {
        "0": "cut_sequence",
        "1": "column_sequence",
        "2": "row_sequence",
        "3": "gather_sequence",
        "4": "column_whole",
        "5": "row_whole",
    }
    md.parallelize(model, mesh, plan)
    return lambda x: model(x) * 2


PROGRAMS = (
    planned,
    mapped,
    sharded,
    annotated,
    typed,
    resharded,
    summed,
    in_place,
    objects,
    messages,
    vmapped,
    derived,
    asked,
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("make", PROGRAMS)
def test_a_compiled_program(make: Callable[[md.DeviceMesh], Function]) -> None:
    def program() -> None:
        function = make(md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
        found = []
        for run in (function, torch.compile(function, backend="aot_eager")):
            x = torch.arange(8.0).view(4, 2).requires_grad_()
            y = run(x)
            y.sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0])

    torch._dynamo.reset()
    try:
        md.simulate(program, 2)
    finally:
        torch._dynamo.reset()
