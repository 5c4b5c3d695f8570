"""Every name that a model may call, inside of torch.compile: what it does as it is, it does there.

The oracle is the same function run as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist import lax
from tests.test_misuse_rows import public_names

MARK = "_torchdynamo_disable"

Call = Callable[[torch.Tensor, md.DeviceMesh], Any]


def draw(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    md.seed(3, differ_over="tp", mesh=mesh)
    return torch.rand(2) + x


def forked(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    md.seed(3)
    with md.fork_rng("tp", mesh=mesh):
        x = x + torch.rand(2)
    return x + torch.rand(2)


def typed(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    with md.typed(mesh):
        y = x + 1
        return y * 2


def untyped(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    with md.untyped():
        y = x + 1
        return y * 2


def breaking(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    total = x * 0
    for number, weight in md.uneven([1.0, 2.0, 3.0], mesh):
        total = total + weight * number * x
    return total


def accumulated(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    weight = torch.ones(2, requires_grad=True)
    with md.typed(mesh), md.accumulate_gradients([weight], "tp"):
        lax.pmean((weight * md.annotate(x, varying="tp")).sum(), "tp").backward()
    return weight.grad


def unsynchronised(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    torch.manual_seed(0)
    model = md.DDP(torch.nn.Linear(2, 1), device_mesh=mesh)
    with model.no_sync():
        model(x).sum().backward()
    return model.module.weight.grad


def in_force(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    with mesh:
        return lax.psum(x, "tp")


def gathered(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    both = [torch.empty(2), torch.empty(2)]
    md.all_gather(both, x, mesh)
    return torch.cat(both)


def with_objects(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    found: list[Any] = [None, None]
    md.all_gather_object(found, md.get_rank(), mesh)
    return x * sum(found)


def exchanged(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    out, other = torch.empty(2), 1 - md.get_rank()
    send = md.P2POp(md.isend, x, other)
    receive = md.P2POp(md.irecv, out, other)
    for work in md.batch_isend_irecv([send, receive]):
        work.wait()
    return out


def into(operation: str, count: int = 2, **how: Any) -> Call:
    """A collective that writes its result into the first argument."""

    def call(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
        out = torch.zeros(count)
        getattr(md, operation)(out, x, group=mesh, **how)
        return out

    return call


def operation(name: str, *args: Any, **how: Any) -> Call:
    """A collective in place."""

    def call(x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
        y = x.clone()
        getattr(md, name)(y, *args, group=mesh, **how)
        return y

    return call


def of_lax(name: str, *args: Any, **how: Any) -> Call:
    return lambda x, mesh: getattr(lax, name)(x, "tp", *args, mesh=mesh, **how)


CALLS: dict[str, Call] = {
    "annotate": lambda x, mesh: md.annotate(x * 2, varying="tp") + 1,
    "typeof": lambda x, mesh: x * len(md.typeof(x).shape),
    "seed": draw,
    "fork_rng": forked,
    "typed": typed,
    "untyped": untyped,
    "uneven": breaking,
    "accumulate_gradients": accumulated,
    "DDP": unsynchronised,
    "DeviceMesh": in_force,
    "assert_equal": lambda x, mesh: md.assert_equal(x * 0, "tp", mesh=mesh) or x,
    "shard": lambda x, mesh: md.shard(x * 0, "b@tp", mesh=mesh),
    "unshard": lambda x, mesh: md.unshard(x, "b@tp", mesh=mesh),
    "reshard": lambda x, mesh: md.reshard(x, "b@tp -> b", mesh=mesh),
    "device_put": lambda x, mesh: md.device_put(x * 0, md.NamedSharding(mesh, md.P("tp"))).local,
    "get_rank": lambda x, mesh: x * md.get_rank(),
    "get_world_size": lambda x, mesh: x * md.get_world_size(),
    "get_backend": lambda x, mesh: x * len(md.get_backend()),
    "is_initialized": lambda x, mesh: x * md.is_initialized(),
    "is_available": lambda x, mesh: x * md.is_available(),
    "get_current_mesh": lambda x, mesh: x * md.get_current_mesh().size(),
    "get_debug_level": lambda x, mesh: x * md.get_debug_level().value,
    "get_group_rank": lambda x, mesh: x * md.get_group_rank(mesh.get_group(), 1),
    "get_global_rank": lambda x, mesh: x * md.get_global_rank(mesh.get_group(), 1),
    "get_process_group_ranks": lambda x, mesh: x * md.get_process_group_ranks(mesh.get_group())[1],
    "group": lambda x, mesh: x * md.group.WORLD.size(),
    "zeros": lambda x, mesh: x + md.zeros((4,), sharding=md.NamedSharding(mesh, md.P("tp"))).local,
    "ones": lambda x, mesh: x + md.ones((4,), sharding=md.NamedSharding(mesh, md.P("tp"))).local,
    "full": lambda x, mesh: (
        x + md.full((4,), 3.0, sharding=md.NamedSharding(mesh, md.P("tp"))).local
    ),
    "P": lambda x, mesh: x * len(md.P("tp", None)),
    "plan": lambda x, mesh: x * len(md.plan("b@tp -> b", mesh=mesh, b=4).explain()),
    "all_reduce": operation("all_reduce"),
    "broadcast": operation("broadcast", 1),
    "reduce": operation("reduce", 1),
    "all_gather": gathered,
    "all_gather_object": with_objects,
    "all_gather_into_tensor": into("all_gather_into_tensor", 4),
    "reduce_scatter_tensor": into("reduce_scatter_tensor", 1),
    "all_to_all_single": into("all_to_all_single"),
    "batch_isend_irecv": exchanged,
    "barrier": lambda x, mesh: md.barrier(mesh) or x,
    "monitored_barrier": lambda x, mesh: md.monitored_barrier(mesh) or x,
    "DeviceMesh.get_local_rank": lambda x, mesh: x * mesh["tp"].get_local_rank(),
    "DeviceMesh.get_coordinate": lambda x, mesh: x * mesh.get_coordinate()[0],
    "DeviceMesh.get_rank": lambda x, mesh: x * mesh.get_rank(),
    "DeviceMesh.size": lambda x, mesh: x * mesh.size("tp"),
    "DeviceMesh.get_group": lambda x, mesh: x * mesh.get_group("tp").size(),
    "lax.psum": of_lax("psum"),
    "lax.pmean": of_lax("pmean"),
    "lax.pmax": of_lax("pmax"),
    "lax.pmin": of_lax("pmin"),
    "lax.psum_scatter": of_lax("psum_scatter", tiled=True),
    "lax.all_gather": of_lax("all_gather", tiled=True),
    "lax.all_to_all": of_lax("all_to_all", 0, 0, tiled=True),
    "lax.pswapaxes": of_lax("pswapaxes", 0),
    "lax.ppermute": of_lax("ppermute", [(0, 1), (1, 0)]),
    "lax.pshuffle": of_lax("pshuffle", [1, 0]),
    "lax.pbroadcast": of_lax("pbroadcast", 1),
    "lax.pvary": of_lax("pvary"),
    "lax.pcast": of_lax("pcast", to="reduced"),
    "lax.axis_index": lambda x, mesh: x * lax.axis_index("tp"),
    "lax.axis_size": lambda x, mesh: x * lax.axis_size("tp"),
}


def answers(call: Call, is_compiled: bool) -> list[Any]:
    """What a function around the call gives, twice, and whether it keeps its gradient."""

    def function(x: torch.Tensor) -> Any:
        y = x.sin() + 2
        return call(y, mesh) * 3

    run = torch.compile(function, backend="eager") if is_compiled else function
    x = torch.arange(2.0) + md.get_rank()
    with md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) as mesh:
        return [run(x.clone()), run(x.clone())]


FIRST = (
    *("annotate", "typeof", "seed", "fork_rng", "typed", "untyped"),
    *("uneven", "accumulate_gradients", "DDP"),
)
"""What marks tensors, keeps notes or makes contexts: the others are collectives, or ask what is
there."""


@pytest.mark.parametrize(
    "name",
    [*FIRST, *(pytest.param(one, marks=pytest.mark.soak) for one in CALLS if one not in FIRST)],
)
def test_a_compiled_function_calls_it(name: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    expected = md.simulate(answers, 2, (CALLS[name], False))
    found = md.simulate(answers, 2, (CALLS[name], True))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_every_public_function_ends_a_graph() -> None:
    functions = {
        name: attrgetter(name)(md)
        for name in public_names()
        if not name.startswith("DeviceMesh.") and name != "register_rendezvous_handler"  # torch's
    }
    functions = {name: one for name, one in functions.items() if isinstance(one, FunctionType)}
    assert len(functions) > 100
    assert [name for name, one in functions.items() if not hasattr(one, MARK)] == []
    shared = contextlib.contextmanager(lambda: None)  # type: ignore[arg-type, var-annotated]
    assert not hasattr(shared, MARK), "the code of all contexts of the process"


def test_a_full_graph_is_rejected_with_the_reason() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: md.annotate(x + 1, varying="dp"), backend="eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="annotations are not visible"):
        compiled(torch.ones(2))
