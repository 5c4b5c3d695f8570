"""Reduce along a mesh axis (psum, pmean, pmax, ...), and cast types without communication."""

from __future__ import annotations

from functools import partial
from operator import pos
from typing import TypeVar, overload

from ..checking.call_sites import one_frame
from ..collectives.argument_checks import check_reducible
from ..functional import reductions
from ..mesh.device_mesh import DeviceMesh
from ..reduce_ops import ReduceOp
from .axes import AxisName, itself, on_leaves, unsent

T = TypeVar("T")


@one_frame
def pvary(x: T, axis_name: AxisName, *, mesh: DeviceMesh | None = None) -> T:
    """Cast ``x``, equal along ``axis_name``, to a value that may differ between ranks.

    Invariant -> varying. Use it before you combine an equal value with values that differ, for
    example replicated activations with a shard of weights.

    Args:
        x: an array or pytree, equal along the axis.
        axis_name, mesh: as for ``psum``.

    Returns:
        A copy of ``x``.

    Gradient:
        psum: the gradients are summed over the axis.

    Cost:
        Forward sends nothing; backward is one all-reduce per leaf.

    Raises:
        As ``psum``.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ...     weight = torch.tensor(1.0, requires_grad=True)      # equal on every rank
        ...     with mesh:
        ...         mine = md.lax.pvary(weight, "tp") * md.get_rank()
        ...     mine.backward()
        ...     return weight.grad.item()                           # 0 + 1 + 2 + 3
        >>> md.simulate(program, 4)
        [6.0, 6.0, 6.0, 6.0]
    """
    return on_leaves("pvary", reductions.pvary, x, axis_name, mesh, on_number=unsent)


@one_frame
def pcast(x: T, axis_name: AxisName, *, to: str, mesh: DeviceMesh | None = None) -> T:
    """Cast ``x`` to another type along ``axis_name``, without communication.

    Invariant -> varying, invariant -> reduced, varying -> unreduced, reduced -> varying. Other
    casts raise.

    Args:
        x: an array or pytree.
        axis_name, mesh: as for ``psum``.
        to: "varying" (from invariant, as ``pvary``), "reduced" (equal on every rank, with a partial
            sum as gradient on each) or "unreduced" (a partial sum on each rank, for a later
            ``psum``).

    Returns:
        A copy of ``x``.

    Gradient:
        psum if ``x`` is invariant; otherwise the gradient passes through.

    Cost:
        Forward sends nothing; backward is one all-reduce per leaf if ``x`` is invariant.

    Raises:
        As ``psum``. ArgumentError: the cast does not exist.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     w = torch.tensor(3.0, requires_grad=True)
        ...     with mesh:
        ...         r = md.lax.pcast(w, "dp", to="reduced")
        ...         loss = md.lax.psum(r * (1.0 + md.get_rank()), "dp")
        ...         partial_sum, = torch.autograd.grad(loss, r)             # unreduced: 1 and 2
        ...         return partial_sum.item(), md.lax.psum(partial_sum, "dp").item()
        >>> md.simulate(program, 2)
        [(1.0, 3.0), (2.0, 3.0)]
    """
    return on_leaves(
        "pcast", partial(reductions.pcast, to=to), x, axis_name, mesh, on_number=unsent, to=to
    )


@one_frame
def psum(
    x: T, axis_name: AxisName, *, axis_index_groups: None = None, mesh: DeviceMesh | None = None
) -> T:
    """Sum ``x`` over the ranks along ``axis_name``; every rank gets the sum.

    Varying -> invariant; unreduced -> invariant.

    Args:
        x: an array of any shape and numeric dtype, or a pytree; leaves, shapes and dtypes equal
            along the axis.
        axis_name: an axis of the mesh, a tuple of axes, or a 1-D mesh. Over no axes, ``()``, the
            result is a copy of ``x`` and needs no mesh.
        axis_index_groups: must be None; use ``mesh.unflatten`` for part of an axis.
        mesh: the mesh; None uses the current mesh.

    Returns:
        Arrays like ``x`` (int32 counts for bool), equal along the axis, in new memory; Python
        numbers for Python numbers, int for bool and int.

    Gradient:
        pvary: each rank's gradient passes through without communication; it must be equal along the
            axis, which debug level DETAIL checks.

    Cost:
        One all-reduce per leaf: each of p ranks sends 2 n (p - 1) / p bytes for n bytes.

    Raises:
        AxisError: the mesh has no such axis, or the tuple repeats an axis.
        MeshError: no current mesh, and no ``mesh``.
        KindError, DtypeError: a leaf is not an array, its dtype does not support the reduction, or
            axis_index_groups is not None. ArgumentError: an integer of more than 64 bits.
        MismatchError: leaves, shapes or dtypes differ; on every rank along the axis.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     x = torch.tensor([float(md.get_rank())])
        ...     with mesh:
        ...         return [md.lax.psum(x, axis).item() for axis in ("dp", "tp", ("dp", "tp"))]
        >>> for sums in md.simulate(program, 4):
        ...     print(sums)
        [2.0, 1.0, 6.0]
        [4.0, 1.0, 6.0]
        [2.0, 5.0, 6.0]
        [4.0, 5.0, 6.0]
    """
    return on_leaves("psum", reductions.psum, x, axis_name, mesh, axis_index_groups, on_number=pos)


@overload
def pmean(
    x: int, axis_name: AxisName, *, axis_index_groups: None = None, mesh: DeviceMesh | None = None
) -> float: ...
@overload
def pmean(
    x: T, axis_name: AxisName, *, axis_index_groups: None = None, mesh: DeviceMesh | None = None
) -> T: ...
@one_frame
def pmean(
    x: T, axis_name: AxisName, *, axis_index_groups: None = None, mesh: DeviceMesh | None = None
) -> T:
    """Average ``x`` over the ranks along ``axis_name``; every rank gets the mean.

    Varying -> invariant.

    Args:
        x, axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays like ``x`` (the default float dtype for integers and bool), equal along the axis, in
        new memory; float or complex for Python numbers.

    Gradient:
        As ``psum``, divided by the size of the axis.

    Cost:
        As ``psum``.

    Raises:
        As ``psum``.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     return md.lax.pmean({"loss": torch.tensor(float(md.get_rank()))}, "dp", mesh=mesh)
        >>> md.simulate(program, 4)[3]
        {'loss': tensor(1.5000)}
    """
    return on_leaves(
        "pmean", reductions.pmean, x, axis_name, mesh, axis_index_groups, on_number=lambda n: n / 1
    )


@one_frame
def pmax(
    x: T, axis_name: AxisName, *, axis_index_groups: None = None, mesh: DeviceMesh | None = None
) -> T:
    """Return the elementwise maximum of ``x`` over the ranks along ``axis_name``.

    Varying -> invariant.

    Args:
        x: as for ``psum``, but not complex. For bool, a logical or.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays like ``x``, equal along the axis, in new memory; Python numbers for Python numbers.

    Gradient:
        Split evenly among the ranks that hold the maximum, zero on other ranks. JAX has none.

    Cost:
        One all-reduce per leaf; another in the backward, to count these ranks.

    Raises:
        As ``psum``. DtypeError: a complex dtype.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        ...     x = torch.tensor(float(min(md.get_rank(), 1)), requires_grad=True)
        ...     y = md.lax.pmax(x, "tp", mesh=mesh)
        ...     y.backward()
        ...     return y.item(), x.grad.item()
        >>> md.simulate(program, 3)
        [(1.0, 0.0), (1.0, 0.5), (1.0, 0.5)]
    """
    return on_leaves(
        "pmax",
        reductions.pmax,
        x,
        axis_name,
        mesh,
        axis_index_groups,
        on_number=itself,
        check=lambda leaf, _: check_reducible(ReduceOp.MAX, leaf, "pmax"),
    )


@one_frame
def pmin(
    x: T, axis_name: AxisName, *, axis_index_groups: None = None, mesh: DeviceMesh | None = None
) -> T:
    """Return the elementwise minimum of ``x`` over the ranks along ``axis_name``.

    Varying -> invariant.

    Args:
        x, axis_name, axis_index_groups, mesh: as for ``pmax``. For bool, a logical and.

    Returns:
        As ``pmax``.

    Gradient:
        As ``pmax``, for the minimum.

    Cost:
        As ``pmax``.

    Raises:
        As ``pmax``.

    Example:
        >>> import numpy as np, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        ...     rank = md.get_rank()
        ...     return md.lax.pmin(np.array([rank, -rank]), "tp", mesh=mesh).tolist()
        >>> md.simulate(program, 3)[0]
        [0, -2]
    """
    return on_leaves(
        "pmin",
        reductions.pmin,
        x,
        axis_name,
        mesh,
        axis_index_groups,
        on_number=itself,
        check=lambda leaf, _: check_reducible(ReduceOp.MIN, leaf, "pmin"),
    )


@one_frame
def psum_scatter(
    x: T,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    mesh: DeviceMesh | None = None,
) -> T:
    """Sum ``x`` over the ranks along ``axis_name``; each rank gets one block of the sum.

    Varying -> varying; unreduced -> varying.

    Args:
        x: as for ``psum``.
        scatter_dimension: the dimension to split into one block per rank; may be negative.
        tiled: if True, the blocks are p times shorter on p ranks. If False, the dimension must have
            size p and is removed.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the dtype of ``x`` (bool is counted in int32), in new memory.

    Gradient:
        all_gather along the same dimension.

    Cost:
        One reduce-scatter per leaf: each of p ranks sends n (p - 1) / p bytes for n bytes.

    Raises:
        As ``psum``. ShapeError: no such dimension, or its size does not allow the split.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = torch.arange(4) + 10 * md.get_rank()
        ...     return md.lax.psum_scatter(x, "tp", tiled=True, mesh=mesh).tolist()
        >>> md.simulate(program, 2)
        [[10, 12], [14, 16]]
    """
    return on_leaves(
        "psum_scatter",
        partial(reductions.psum_scatter, scatter_dimension=scatter_dimension, tiled=tiled),
        x,
        axis_name,
        mesh,
        axis_index_groups,
        check=lambda leaf, group: reductions.blocks_to_scatter(
            leaf, group, scatter_dimension, tiled
        ),
    )
