"""Convert meshes to and from torch's DeviceMesh.

torch's DeviceMesh sorts the ranks of its groups, which loses the order of a permuted mesh. So
torch's mesh is built from groups made in mesh order.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as torch_distributed
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from ..arguments import DEFAULT_TIMEOUT
from ..bootstrap.world import World
from ..errors import KindError, MeshAttributeError, MeshError
from ..groups.communicators import get_registry
from ..runtime.torch_worlds import end_torch_world
from .definition import MeshDefinition
from .layout import Layout


def make_torch_mesh(mesh: MeshDefinition) -> TorchMesh:
    """Return torch's mesh on the same ranks in the same order; collective over the world."""
    world, layout, device_type = mesh.world, mesh.layout, mesh.device_type
    _check_torch_can(world)
    everyone = tuple(range(world.size))
    definition = {**mesh.entries(), "text": f"to_torch() of {mesh.text}"}
    timeout = world.timeout or DEFAULT_TIMEOUT
    with get_registry(world).opening() as agree:
        agree(everyone, "mesh for torch", definition, timeout)
        _check_torch_keeps_order(mesh)
        _start_torch_world(world)
        groups: list[Any] = []
        for axis in range(layout.ndim):
            for ranks in layout.groups_of_axis(axis):
                # torch 2.11 always sorts, and lacks this argument.
                order: dict[str, Any] = (
                    {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
                )
                group = torch_distributed.new_group(list(ranks), **order)
                if world.rank in ranks:
                    groups.append(group)
        # A rank that exited now would close its connections while other ranks open theirs.
        agree(everyone, "mesh for torch", definition, timeout)
    ranks_tensor = torch.from_numpy(layout.ranks()).to(torch.int)
    if world.rank not in layout.ranks():
        return TorchMesh(
            device_type, ranks_tensor, mesh_dim_names=layout.names, _init_backend=False
        )
    if layout.ndim == 1:
        return TorchMesh.from_group(groups[0], device_type, mesh_dim_names=layout.names)
    names = layout.names or tuple(f"axis_{index}" for index in range(layout.ndim))
    return TorchMesh.from_group(groups, device_type, mesh=ranks_tensor, mesh_dim_names=names)


def parts_of_torch_mesh(mesh: object) -> tuple[str, list[Any], tuple[str, ...] | None]:
    """Return (device type, nested list of ranks, names or None) of torch's mesh; or raise."""
    if not isinstance(mesh, TorchMesh):
        raise KindError(
            f"{mesh!r} is not torch's DeviceMesh",
            expected="torch.distributed.device_mesh.DeviceMesh",
            found=type(mesh).__name__,
        )
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    return mesh.device_type, mesh.mesh.tolist(), names


M = TypeVar("M", bound=MeshError)

_TAKES_A_MESH = ("torch.distributed.", "torch.nn.parallel.")


def reject_torch(mesh: MeshDefinition, whole: Layout) -> None:
    """Raise MeshError if torch's code called the mesh's property or method that calls this."""
    # torch rarely checks the class of a mesh: fully_shard(mesh=ours) returns, and the first
    # optimizer.step() fails. So the names of our mesh that torch reads first call this function.
    # torch.compile traces these names but cannot trace code that reads frames.
    if not torch.compiler.is_dynamo_compiling() and (reader := _reader_in_torch(sys._getframe(2))):
        raise _given_to_torch(mesh, whole, reader, MeshError)


NAMES_OF_TORCHS = {
    name
    for name in (*dir(TorchMesh), *TorchMesh.__annotations__, "_dim_group_names")
    if not name.startswith("__")
}
"""The names that torch's mesh has; ``_dim_group_names`` its methods alone mention."""


def torch_name_error(
    mesh: MeshDefinition, whole: Layout, name: str, *, has_ours: bool
) -> MeshAttributeError:
    """Return the error for a name that torch's mesh has and ours lacks.

    Args:
        has_ours: whether our mesh has this name without its underscore.
    """
    if reader := _reader_in_torch(sys._getframe(2)):
        return _given_to_torch(mesh, whole, reader, MeshAttributeError)
    ours = f"use mesh.{name[1:]}, or" if has_ours else "use"
    return MeshAttributeError(
        f"a mesh of meshdist has no {name}, unlike torch's DeviceMesh",
        where=f"rank {mesh.world.rank} of {mesh.world.size}, {mesh.text}",
        fix=f"{ours} {_torchs_part(mesh, whole)}.{name}; call to_torch() on every rank of the "
        "world",
    )


def _reader_in_torch(frame: FrameType) -> str:
    """Return the frame's torch function, or ""."""
    module = frame.f_globals.get("__name__", "")
    return f"{frame.f_code.co_name} of {module}" if module.startswith(_TAKES_A_MESH) else ""


def _given_to_torch(mesh: MeshDefinition, whole: Layout, reader: str, kind: type[M]) -> M:
    return kind(
        "torch received a mesh of meshdist",
        where=f"rank {mesh.world.rank} of {mesh.world.size}, {mesh.text}; read by {reader}",
        expected="torch's own DeviceMesh, on the same ranks",
        fix=f"pass {_torchs_part(mesh, whole)} instead; call to_torch() on every rank of the world",
    )


def _torchs_part(mesh: MeshDefinition, whole: Layout) -> str:
    """Return the expression of torch's mesh for a mesh, or for a part of ``whole``."""
    names = mesh.layout.names
    if names is None or names == whole.names:
        return "mesh.to_torch()"
    return f"mesh.to_torch()[{(names[0] if len(names) == 1 else names)!r}]"


def _check_torch_can(world: World) -> None:
    if torch_distributed.is_initialized():
        found = (torch_distributed.get_rank(), torch_distributed.get_world_size())
        if found != (world.rank, world.size):
            raise MeshError(
                "torch.distributed is initialized with different ranks",
                where=f"rank {world.rank} of {world.size}",
                found=f"torch: rank {found[0]} of {found[1]}",
                fix="initialize meshdist after torch.distributed, so that it reuses torch's "
                "process group",
            )


def _check_torch_keeps_order(mesh: MeshDefinition) -> None:
    layout = mesh.layout
    groups = [ranks for axis in range(layout.ndim) for ranks in layout.groups_of_axis(axis)]
    permuted = [ranks for ranks in groups if list(ranks) != sorted(ranks)]
    if permuted and "sort_ranks" not in inspect.signature(torch_distributed.new_group).parameters:
        raise MeshError(
            f"torch {torch.__version__} cannot keep the order of this mesh's ranks",
            where=f"rank {mesh.world.rank} of {mesh.world.size}, to_torch() of {mesh.text}",
            expected="ranks that ascend along each axis: torch before 2.12 sorts those of a group",
            found=f"ranks {list(permuted[0])} along an axis",
            fix="use torch 2.12 or newer, or a mesh whose ranks ascend",
        )


def _start_torch_world(world: World) -> None:
    if torch_distributed.is_initialized():
        return
    has_cuda = torch.cuda.is_available()
    usable = {
        device: backend
        for device, name in world.backends.items()
        if (device == "cpu" or has_cuda) and (backend := _torch_backend(name, device))
    }
    backends = ",".join(f"{device}:{backend}" for device, backend in usable.items())
    # With "cpu:gloo", torch sets no default backend after other backends are registered, as ours
    # are, and warns when its world ends. "gloo" avoids this and is the same without a GPU.
    if len({*usable.values()}) == 1 and ("cuda" in usable or not has_cuda):
        backends = next(iter(usable.values()))
    torch_distributed.init_process_group(
        "simulated" if world.is_simulated else backends,
        store=PrefixStore("torch", world.make_torch_store()),
        rank=world.rank,
        world_size=world.size,
        timeout=world.timeout,
    )
    world.closers.append(end_torch_world)


def _torch_backend(name: str, device: str) -> str:
    """Return torch's backend for ``name``: the same name, or "gloo" on the CPU, or ""."""
    # meshdist.torch_backends registers our backends when it is imported.
    known = name in torch_distributed.Backend.backend_list
    if known and (name != "mpi" or torch_distributed.is_mpi_available()):
        return name
    return "gloo" if device == "cpu" else ""
