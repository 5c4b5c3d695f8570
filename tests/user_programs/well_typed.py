"""A program in which every call is right: type checkers have nothing to say about it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

import meshdist as md
import meshdist.distributed as dist
from meshdist import lax
from meshdist.distributed import DistributedSampler
from meshdist.errors import ShapeError


class Moments(NamedTuple):
    mean: torch.Tensor
    square: torch.Tensor


def functional(
    x: torch.Tensor, array: npt.NDArray[np.float32], tree: dict[str, torch.Tensor], both: Moments
) -> None:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with mesh:
        assert_type(lax.psum(x, "tp"), torch.Tensor)
        assert_type(lax.psum(array, ("dp", "tp")), npt.NDArray[np.float32])
        assert_type(lax.psum(x, ["dp", "tp"]), torch.Tensor)
        assert_type(lax.pmean(tree, mesh["dp"]), dict[str, torch.Tensor])
        assert_type(lax.pmax(both, "tp"), Moments)
        assert_type(lax.pmin((x, array), "tp"), tuple[torch.Tensor, npt.NDArray[np.float32]])
        assert_type(lax.psum(2, "tp"), int)
        assert_type(lax.pmean(2, "tp"), float)
        assert_type(lax.psum_scatter(x, "tp", tiled=True), torch.Tensor)
        assert_type(lax.all_gather([x], "tp", axis=-1), list[torch.Tensor])
        assert_type(lax.all_to_all(x, "tp", 0, 1), torch.Tensor)
        assert_type(lax.ppermute(x, "tp", [(0, 1)]), torch.Tensor)
        assert_type(lax.pshuffle(x, "tp", [1, 0]), torch.Tensor)
        assert_type(lax.pswapaxes(x, "tp", 0), torch.Tensor)
        assert_type(lax.pbroadcast(x, "tp", 0), torch.Tensor)
        assert_type(lax.pvary(x, "tp"), torch.Tensor)
        assert_type(lax.pcast(x, "tp", to="reduced"), torch.Tensor)
        sizes = [1, 1]
        moved = lax.ragged_all_to_all(x, x, sizes, sizes, sizes, sizes, axis_name="tp")
        assert_type(moved, torch.Tensor)
        assert_type(lax.axis_index("tp"), int)
        assert_type(lax.axis_size(("dp", "tp")), int)


def in_place(x: torch.Tensor, array: npt.NDArray[np.float32], parts: list[torch.Tensor]) -> None:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    md.all_reduce(x)
    md.all_reduce(array, md.ReduceOp.MAX, mesh)
    md.all_reduce(x, op=md.ReduceOp.premul_sum(0.5), group=mesh["tp"])
    md.reduce(x, 0, torch.distributed.ReduceOp.SUM, group=mesh.get_group("tp"))
    md.broadcast(x, src=0, group=md.group.WORLD)
    md.all_gather(parts, x, group=md.new_group([0, 1]))  # which outsiders get a number for
    md.barrier(mesh["dp", "tp"])
    axes: list[str] = ["dp", "tp"]
    md.barrier(mesh[axes])
    md.batch_isend_irecv([md.P2POp(md.isend, x, 1, mesh["tp"])])
    md.all_gather_object([None, None], {"loss": 1.0}, group=mesh["dp"])
    work = md.all_reduce(x, group=mesh["tp"], async_op=True)
    if work is not None:
        work.wait()
    assert_type(md.get_rank(mesh["tp"]) + md.get_world_size(mesh.get_group("dp")), int)
    md.DDP(torch.nn.Linear(2, 2), process_group=mesh["dp"])
    md.SyncBatchNorm(2, process_group=mesh["dp"])


def doors(x: torch.Tensor) -> None:
    assert_type(dist.get_rank(), int)
    assert_type(md.distributed.DeviceMesh("cpu", [0]), md.DeviceMesh)
    assert_type(dist.DistributedDataParallel(torch.nn.Linear(2, 2)), md.DDP)
    DistributedSampler(torch.utils.data.TensorDataset(x), dist.group.WORLD)
    dist.all_reduce(x, dist.ReduceOp.MAX, dist.group.WORLD)
    try:
        md.broadcast(x, 0)
    except (md.ArgumentError, md.errors.MismatchError, md.AbortedError, ShapeError) as error:
        print(error.fix)
