"""DTensors as sharded arrays, and back."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial

from ..arrays import as_tensor
from ..checking.call_sites import program_frame, warn_caller
from ..dtypes import dtype_name
from ..error_text import explain
from ..errors import DtypeError, GradientError, KindError, MeshError
from ..mesh.current_mesh import find_current_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import NamedSharding
from ..mesh.splits import DimSplit
from .sharded_array import ShardedArray
from .torch_placements import as_torch_holds_it, from_placements, to_placements

__all__ = ["from_dtensor", "to_dtensor"]

_TORCH_MESH = "torch's DeviceMesh"


def from_dtensor(x: DTensor, mesh: DeviceMesh | None = None) -> ShardedArray:
    """The sharded array of which ``x`` is the DTensor: nothing is sent, and memory is shared.

    torch's sizes are kept. Of ``Partial("avg")`` the local values are divided by the size of the
    axis, into memory of their own.

    Args:
        x: a DTensor whose placements are Shard, Replicate, and Partial of sum or avg.
        mesh: ours on the ranks of its mesh, in the same order, with named axes. None takes the mesh
            in force where it is such a one, else makes one from torch's, collectively over its
            ranks.

    Gradient: the DTensor's, by ``to_local``. The inverse of ``to_dtensor``.

    Raises:
        KindError: no DTensor, or a placement of which nothing is known.
        ArgumentError: Partial of another op.
        DtypeError: Partial("avg") of whole numbers.
        MeshError: a mesh of other ranks.
        AxisError: torch's mesh has no axis names, and no mesh was given.
        ShapeError: a local tensor that has not torch's size, or as ``from_placements``.
    """
    if not isinstance(x, DTensor):
        raise KindError("from_dtensor takes a DTensor", found=f"a {type(x).__name__}")
    if mesh is None:
        mesh = find_current_mesh()
        if mesh is None or not _is_same(mesh, x.device_mesh):
            mesh = DeviceMesh.from_torch(x.device_mesh)
    elif not _is_same(mesh, x.device_mesh):
        raise _of_other_ranks("from_dtensor", mesh, x.device_mesh)
    sharding = from_placements(x.placements, mesh, tuple(x.shape))
    local: Any = x.to_local()
    if hasattr(local, "wait"):  # of a verb of torch's that has not ended yet
        local = local.wait()
    averaged = [
        mesh.layout.sizes[axis]
        for axis, placement in enumerate(x.placements)
        if type(placement) is Partial and placement.reduce_op == "avg"
    ]
    if averaged and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise DtypeError(
            "from_dtensor cannot take an average of whole numbers apart into summands",
            expected="floating or complex numbers where a placement is Partial('avg')",
            found=f"{dtype_name(x.dtype)} with {list(x.placements)!r}",
            fix="redistribute the DTensor to Replicate or Shard first",
        )
    for size in averaged:
        local = local / size
    return ShardedArray(local, sharding, tuple(x.shape))


def to_dtensor(x: ShardedArray, device_mesh: TorchMesh | None = None) -> DTensor:
    """The DTensor of a sharded array; memory is shared where torch holds it so.

    torch cuts dims by ``torch.chunk``, and dims that do not divide in the order of the mesh's axes:
    where ``x`` lies otherwise it is resharded, collectively, with a warning, once a place, that
    shows both.
    ``x.reshard(...)`` before avoids the warning, by the sharding that it names.

    Args:
        x: a sharded array.
        device_mesh: torch's mesh on the ranks of the array's, in the same order. None makes one at
            the first call, collectively over the world, and keeps it with the array's mesh.

    Gradient: by ``DTensor.from_local``; along reduced axes it is unreduced. The inverse of
    ``from_dtensor``.

    Raises:
        KindError: no sharded array.
        MeshError: a torch mesh of other ranks.
        BackendError: torch has no mesh over these ranks (simulated ranks).
        GradientError: torch 2.11 would sum the gradient of reduced axes.
    """
    if not isinstance(x, ShardedArray):
        raise KindError("to_dtensor takes a ShardedArray", found=f"a {type(x).__name__}")
    mesh: DeviceMesh = x.mesh
    if device_mesh is None:
        device_mesh = mesh.notes.get(_TORCH_MESH) or mesh.to_torch()
        mesh.notes[_TORCH_MESH] = device_mesh
    elif not _is_same(mesh, device_mesh):
        raise _of_other_ranks("to_dtensor", mesh, device_mesh)
    held = as_torch_holds_it(x.sharding, x.shape)
    if held.placement(x.shape) != x.sharding.placement(x.shape):
        _warn_of_moves(x, held)
        x = x.reshard(held)
    placements = to_placements(held)
    local = as_tensor(x.local, argument="x", verb="to_dtensor")
    gradient: dict[str, Any] = {}
    if held.spec.reduced and local.requires_grad and torch.is_grad_enabled():
        if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
            raise GradientError(
                "to_dtensor: this torch would sum the gradient over the reduced axes",
                expected="torch 2.12 or newer, whose DTensor.from_local has grad_placements",
                found=f"torch {torch.__version__}, an array that requires grad, {x.sharding!r}",
                fix="update torch, or convert under torch.no_grad()",
            )
        gradient["grad_placements"] = [
            Partial("sum") if name in held.spec.reduced else placement
            for name, placement in zip(mesh.axis_names, placements, strict=True)
        ]
    return DTensor.from_local(
        local,
        device_mesh,
        placements,
        shape=torch.Size(x.shape),
        stride=tuple(math.prod(x.shape[dim + 1 :]) for dim in range(len(x.shape))),
        **gradient,
    )


def _is_same(mesh: DeviceMesh, theirs: TorchMesh) -> bool:
    """Whether both have the same ranks at the same coordinates, and no names that differ."""
    names = theirs.mesh_dim_names
    return mesh.layout.ranks().tolist() == theirs.mesh.tolist() and (
        names is None or tuple(names) == mesh.layout.names
    )


def _of_other_ranks(call: str, mesh: DeviceMesh, theirs: TorchMesh) -> MeshError:
    return MeshError(
        f"{call}: torch's mesh and ours are not the same",
        expected=f"{mesh!r}, ranks {mesh.layout.ranks().tolist()}",
        found=f"{theirs!r}, ranks {theirs.mesh.tolist()}",
        fix="make one from the other: mesh.to_torch() or md.DeviceMesh.from_torch(theirs)",
    )


def _warn_of_moves(x: ShardedArray, held: NamedSharding) -> None:
    """Warn once for each line of the program: what it converts in a loop lies alike."""
    frame = program_frame(sys._getframe(1))
    place = ("to_dtensor reshards", frame.f_code.co_filename, frame.f_lineno)
    if place in x.mesh.notes:
        return
    x.mesh.notes[place] = True
    here, there = (one.placement(x.shape).dims for one in (x.sharding, held))
    places = [dim for dim, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
    warn_caller(
        explain(
            "to_dtensor reshards: torch holds this array otherwise",
            expected=_cells_text(there, places, x.mesh.axis_names),
            found=_cells_text(here, places, x.mesh.axis_names),
            fix=f"reshard before, where it is meant: x.reshard({held!r})",
        )
    )


def _cells_text(
    dims: Sequence[DimSplit], places: Sequence[int], names: Sequence[str], shown: int = 8
) -> str:
    """How some dims are cut: ``dim 0 in 3, 3, 2, 2 along dp``."""
    lines = []
    for place in places:
        bounds = dims[place].boundaries[: shown + 1]
        sizes = [str(stop - start) for start, stop in pairwise(bounds)]
        more = ", ..." if dims[place].num_cells > shown else ""
        axes = ", ".join(names[axis] for axis in dims[place].axes)
        lines.append(f"dim {place} in {', '.join(sizes)}{more} along {axes}")
    return "\n".join(lines)
