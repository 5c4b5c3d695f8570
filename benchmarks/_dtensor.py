"""DTensor's ways from one placement to another, and the bytes that they receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._transitions import AXES, sides_of

# Each side: whether its planner is the one of least cost, and whether its mesh has been flattened,
# so that collectives over both axes are merged into one.
SIDES = {
    "DTensor": (False, False),
    "DTensor/flattened": (False, True),
    "DTensor/min-cost": (True, False),
    "DTensor/min-cost/flattened": (True, True),
}
PLACEMENTS: dict[str, Placement] = {
    "P": Partial(),
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
}


def make_meshes(sizes: tuple[int, ...]) -> dict[str, DeviceMesh]:
    """Return a mesh for each side; collective.

    Their axes have names of their own: torch keeps plans by them, whichever planner made them.
    """
    meshes = {}
    for number, (side, (_, is_flattened)) in enumerate(SIDES.items()):
        names = tuple(f"{axis}{number}" for axis in AXES)
        meshes[side] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        if is_flattened:
            meshes[side]._flatten(f"all{number}")
    return meshes


def redistribution(
    side: str, mesh: DeviceMesh, transition: str, x: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return what redistributes this rank's ``x``; it has been planned, by the side's planner."""
    before, after = ([PLACEMENTS[one] for one in half] for half in sides_of(transition))
    whole = DTensor.from_local(x, mesh, before, run_check=False)
    is_min_cost, _ = SIDES[side]
    with use_min_cost_redistribution_plan(is_min_cost):
        whole.redistribute(mesh, after)
    return lambda: whole.redistribute(mesh, after).to_local()


class ReceivedBytes(TorchDispatchMode):
    """Counts what this rank receives in functional collectives, each in its cheapest form.

    By a ring or in pairs, of n bytes given over p ranks an all_gather receives (p - 1) n, a
    reduce_scatter (p - 1) n / p, and an all_reduce twice that. ``operations`` has their names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.num_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "_dtensor"):
            self._count(func.overloadpacket.__name__, args, result)
        return result

    def _count(self, operation: str, args: tuple[Any, ...], result: Any) -> None:
        if operation in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        given = args[0].nbytes
        if operation == "all_gather_into_tensor":
            received = result.nbytes - given
        elif operation == "reduce_scatter_tensor":
            received = given - result.nbytes
        elif operation == "all_reduce":
            size = _resolve_process_group(args[2]).size()
            received = 2 * given * (size - 1) / size
        else:
            raise NotImplementedError(f"the bytes of {operation} are not known here")
        self.operations.append(operation)
        self.num_bytes += received
