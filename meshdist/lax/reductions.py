"""Sums, means and extremes along an axis; and casts to another kind, which send nothing."""

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
    """Every rank holds ``x`` as its own, from here on free to differ along ``axis_name``.

    Invariant -> varying. It stands where a value that is equal along the axis meets values that are
    not, for example where replicated activations meet a rank's shard of weights.

    Args:
        x: an array, or a pytree, equal along the axis.
        axis_name, mesh: as for ``psum``.

    Returns:
        A copy of ``x``.

    Gradient:
        psum: the ranks' gradients are summed over the axis.

    Cost:
        Forward sends nothing; backward is one all-reduce a leaf.

    Raises:
        What ``psum`` raises.

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
    """Every rank holds ``x`` as a value of another kind along ``axis_name``.

    Invariant -> varying, invariant -> reduced, varying -> unreduced, reduced -> varying; there are
    no other casts.

    Args:
        x: an array, or a pytree.
        axis_name, mesh: as for ``psum``.
        to: "varying" (from invariant, as ``pvary``), "reduced" (equal on every rank, while its
            gradient stays a partial sum on each) or "unreduced" (a partial sum on each rank, for a
            ``psum`` that comes later).

    Returns:
        A copy of ``x``.

    Gradient:
        From an invariant value: psum of the ranks' gradients. Between varying and unreduced or
        reduced values the gradient passes through.

    Cost:
        Forward sends nothing; backward is one all-reduce a leaf where the value was invariant.

    Raises:
        What ``psum`` raises. ArgumentError: there is no such cast.

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
    """Every rank holds the sum of ``x`` over the ranks along ``axis_name``.

    Varying -> invariant; unreduced -> invariant.

    Args:
        x: this rank's array of any shape and numeric dtype, or a pytree; equal leaves, shapes and
            dtypes along the axis, which is compared.
        axis_name: an axis of the mesh, a tuple of axes, or a 1-D mesh. Over no axes, ``()``, the
            result is a copy of ``x``, with its dtype; this needs no mesh.
        axis_index_groups: None. Parts of an axis are axes: see ``mesh.unflatten``.
        mesh: the mesh; None takes the mesh in force.

    Returns:
        Arrays of the shape and dtype of ``x`` (bool is counted in int32), equal along the axis;
        fresh memory. Python numbers travel, too, and come back as such: the sum of all ranks'; of
        bool and int an int. ``axis_size`` counts the ranks for free.

    Gradient:
        pvary: each rank's gradient passes through, unchanged and for free. It must be equal along
        the axis, which is checked at debug level DETAIL.

    Cost:
        One all-reduce a leaf: each of p ranks sends 2 n (p - 1) / p bytes for n bytes.

    Raises:
        AxisError: the mesh has no such axis, or the tuple names one twice.
        MeshError: there is no current mesh and none is given.
        KindError, DtypeError: a leaf is no array, or of a dtype that cannot be summed; or
            axis_index_groups is given. ArgumentError: an integer beyond 64 bits.
        MismatchError: on every rank along the axis: leaves, shapes or dtypes differ.

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
    """Every rank holds the mean of ``x`` over the ranks along ``axis_name``.

    Varying -> invariant.

    Args:
        x, axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x`` (integers and bool give the default float dtype),
        equal along the axis; fresh memory. Of Python numbers a float, or a complex number.

    Gradient:
        psum's, divided by the size of the axis.

    Cost:
        That of ``psum``; the division follows the sum.

    Raises:
        What ``psum`` raises.

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
    """Every rank holds the largest of ``x`` over the ranks along ``axis_name``, by element.

    Varying -> invariant.

    Args:
        x: this rank's array of any shape and any dtype that is not complex, or a pytree; equal
            shapes and dtypes along the axis. The larger of two bools is their "or".
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x``, equal along the axis; fresh memory. Python numbers
        come back as such.

    Gradient:
        Split evenly among the ranks that attain the maximum, zero on the others. JAX has none.

    Cost:
        One all-reduce a leaf; in the backward another, which counts those ranks.

    Raises:
        What ``psum`` raises. DtypeError: a complex dtype.

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
    """Every rank holds the smallest of ``x`` over the ranks along ``axis_name``, by element.

    Varying -> invariant.

    Args:
        x, axis_name, axis_index_groups, mesh: as for ``pmax``. The smaller of two bools is their
            "and".

    Returns:
        Arrays of the shape and dtype of ``x``, equal along the axis; fresh memory. Python numbers
        come back as such.

    Gradient:
        Split evenly among the ranks that attain the minimum, zero on the others. JAX has none.

    Cost:
        That of ``pmax``.

    Raises:
        What ``pmax`` raises.

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
    """Each rank holds its own block of the sum of ``x`` over the ranks along ``axis_name``.

    Varying -> varying; unreduced -> varying.

    Args:
        x: this rank's array of any numeric dtype, or a pytree; equal shapes and dtypes along the
            axis.
        scatter_dimension: the dim that is cut into one block per rank; may be negative.
        tiled: cut it into equal blocks, so that it stays, p times shorter on p ranks. Else its size
            is p, each rank takes one index, and the dim goes.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the dtype of ``x`` (bool is counted in int32); fresh memory.

    Gradient:
        all_gather along the same dim.

    Cost:
        One reduce-scatter a leaf: each of p ranks sends n (p - 1) / p bytes for n bytes of ``x``.

    Raises:
        What ``psum`` raises. ShapeError: there is no such dim, or it cannot be cut so.

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
