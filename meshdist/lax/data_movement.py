"""Gather, exchange, permute and broadcast values along a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from ..arrays import as_tensor, like
from ..checking.call_sites import one_frame
from ..collectives.torch_private import HiddenFromModes
from ..functional import data_movement, reductions
from ..functional.linear_function import get_dim
from ..groups.process_group import resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..typed_mode.collective_calls import find_typed_operation
from ..typed_mode.context import mark
from .axes import AxisName, get_axes, itself, on_leaves, reject_groups

T = TypeVar("T")


@one_frame
def all_gather(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    mesh: DeviceMesh | None = None,
) -> T:
    """Gather ``x`` of all ranks along ``axis_name`` on every rank, in order.

    Varying -> varying; with ``to``: varying -> invariant, varying -> reduced.

    Args:
        x: an array or pytree; shapes and dtypes equal along the axis.
        axis: the new dimension that counts the ranks; with ``tiled`` the concatenated dimension.
            May be negative.
        tiled: concatenate the arrays instead of stacking them.
        to: "varying" if ranks use the result differently, "invarying" if all use it in the same
            way, "reduced" to keep gradients as partial sums.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the dtype of ``x``, equal along the axis, in new memory.

    Gradient:
        psum_scatter along the same dimension. With ``to="invarying"``, this rank's block of the
        gradient, without communication.

    Cost:
        One all-gather per leaf: each of p ranks sends n (p - 1) bytes for n bytes.

    Raises:
        As ``psum``. ShapeError: no such dimension. ArgumentError: another ``to``.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = torch.arange(2) + 10 * md.get_rank()
        ...     with mesh:
        ...         stacked = md.lax.all_gather(x, "tp", axis=1)
        ...         return stacked.tolist(), md.lax.all_gather(x, "tp", tiled=True).tolist()
        >>> md.simulate(program, 2)[0]
        ([[0, 10], [1, 11]], [0, 1, 10, 11])
    """
    return on_leaves(
        "all_gather",
        partial(reductions.all_gather, axis=axis, tiled=tiled, to=to),
        x,
        axis_name,
        mesh,
        axis_index_groups,
        check=lambda leaf, _: get_dim(axis, leaf.dim() + (not tiled), "axis", "all_gather"),
        to=to,
    )


@one_frame
def all_to_all(
    x: T,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: None = None,
    tiled: bool = False,
    mesh: DeviceMesh | None = None,
) -> T:
    """Send block j of ``x`` to rank j along ``axis_name``; join the received blocks in rank order.

    Varying -> varying.

    Args:
        x: as for ``all_gather``.
        split_axis: the dimension to split into one block per rank.
        concat_axis: the result's dimension that joins the blocks. Both may be negative.
        tiled: if True, on p ranks ``split_axis`` becomes p times shorter, ``concat_axis`` p times
            longer. If False, ``split_axis``, of size p, is removed, and ``concat_axis`` is a new
            dimension of size p.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the dtype of ``x``, in new memory.

    Gradient:
        all_to_all with both dimensions exchanged.

    Cost:
        One all-to-all per leaf: each of p ranks sends n (p - 1) / p bytes for n bytes.

    Raises:
        As ``psum``. ShapeError: no such dimension, or its size does not allow the split.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = torch.arange(4).view(2, 2) + 10 * md.get_rank()
        ...     return md.lax.all_to_all(x, "tp", 1, 0, tiled=True, mesh=mesh).tolist()
        >>> md.simulate(program, 2)
        [[[0], [2], [10], [12]], [[1], [3], [11], [13]]]
    """
    return on_leaves(
        "all_to_all",
        partial(
            data_movement.all_to_all, split_axis=split_axis, concat_axis=concat_axis, tiled=tiled
        ),
        x,
        axis_name,
        mesh,
        axis_index_groups,
        check=lambda leaf, group: data_movement.blocks_to_exchange(
            leaf, group, split_axis, concat_axis, tiled
        ),
    )


@one_frame
def ragged_all_to_all(
    operand: Any,
    output: T,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: None = None,
    mesh: DeviceMesh | None = None,
) -> T:
    """Send slices of rows of different sizes to every rank, and receive slices into ``output``.

    Varying -> varying.

    Args:
        operand: the array to slice along dimension 0.
        output: a copy of it receives the slices; row shape and dtype as ``operand``.
        input_offsets, send_sizes: first row and number of rows of each slice to send: k integers,
            as a list or array. k is a multiple of the axis size p; the first k / p slices go to the
            first rank, and so on.
        output_offsets: each slice's first row in the output of the *receiver*.
        recv_sizes: number of rows of each received slice, in sender order.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        An array like ``output``, in new memory.

    Gradient:
        For ``operand`` by the reverse exchange; for ``output`` zero in received rows, else passed
        through.

    Cost:
        Two small collectives for sizes, and one all-to-all of the rows.

    Raises:
        As ``psum``. ShapeError, DtypeError, ArgumentError: operand, output, offsets and sizes do
        not match; on every rank if they do not match another rank.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        ...     rank = md.get_rank()
        ...     tokens = torch.arange(3) + 10 * rank + 10
        ...     sent, kept = ([1, 2], [0, 0]) if rank == 0 else ([3, 0], [1, 2])
        ...     return md.lax.ragged_all_to_all(
        ...         tokens, torch.zeros(4, dtype=tokens.dtype), [0, sent[0]], sent, kept,
        ...         [[1, 3], [2, 0]][rank], axis_name="ep", mesh=mesh,
        ...     ).tolist()
        >>> md.simulate(program, 2)
        [[10, 20, 21, 22], [11, 12, 0, 0]]
    """
    axes = get_axes("ragged_all_to_all", axis_name, mesh)
    if axis_index_groups is not None:
        reject_groups("ragged_all_to_all", axis_index_groups, axes)
    numbers = (input_offsets, send_sizes, output_offsets, recv_sizes)
    typed = find_typed_operation("ragged_all_to_all", axes)
    result: T
    if typed is None:
        result = _ragged(operand, output, numbers, axes)
        return result
    given, text = typed.joined(operand, output, *numbers)
    with HiddenFromModes():
        result = _ragged(given[0], given[1], given[2:], axes)
        mark(result, text)  # an array of another library has no type
    return result


def _ragged(operand: Any, output: Any, numbers: Sequence[Any], axes: DeviceMesh) -> Any:
    rows, initial = (
        as_tensor(array, argument=argument, operation="ragged_all_to_all", writable=False)
        for array, argument in ((operand, "operand"), (output, "output"))
    )
    starts, sent, offsets, received = numbers
    group = resolve_group(axes)
    result = data_movement.ragged_all_to_all(rows, initial, starts, sent, offsets, received, group)
    return like(result, output)


@one_frame
def ppermute(
    x: T, axis_name: AxisName, perm: Sequence[Any], *, mesh: DeviceMesh | None = None
) -> T:
    """Send ``x`` along ``axis_name`` from source to destination of each pair in ``perm``.

    Varying -> varying.

    Args:
        x: as for ``all_gather``.
        perm: (source, destination) indices along the axis, equal on every rank; each index is at
            most once a source and once a destination.
        axis_name, mesh: as for ``psum``.

    Returns:
        Arrays like ``x``, in new memory; zeros on ranks without a source.

    Gradient:
        ppermute with reversed pairs.

    Cost:
        Each source sends n bytes for n bytes.

    Raises:
        As ``psum``. KindError, ArgumentError: invalid ``perm``. MismatchError: it differs between
        ranks.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
        ...     x = torch.tensor(md.get_rank() + 1)
        ...     return md.lax.ppermute(x, "pp", [(0, 1), (1, 2)], mesh=mesh).item()
        >>> md.simulate(program, 3)
        [0, 1, 2]
    """
    return on_leaves("ppermute", partial(data_movement.ppermute, perm=perm), x, axis_name, mesh)


@one_frame
def pshuffle(
    x: T, axis_name: AxisName, perm: Sequence[int], *, mesh: DeviceMesh | None = None
) -> T:
    """Permute ``x`` along ``axis_name``: rank i gets the ``x`` of rank ``perm[i]``.

    Varying -> varying.

    Args:
        x: as for ``all_gather``.
        perm: each index's source along the axis, each once; equal on every rank.
        axis_name, mesh: as for ``psum``.

    Returns:
        Arrays like ``x``, in new memory.

    Gradient:
        pshuffle with the inverse permutation.

    Cost:
        Each rank sends n bytes for n bytes.

    Raises:
        As ``ppermute``.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
        ...     x = torch.tensor(md.get_rank())
        ...     return md.lax.pshuffle(x, "pp", [2, 0, 1], mesh=mesh).item()
        >>> md.simulate(program, 3)
        [2, 0, 1]
    """
    return on_leaves("pshuffle", partial(data_movement.pshuffle, perm=perm), x, axis_name, mesh)


@one_frame
def pswapaxes(
    x: T,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: None = None,
    mesh: DeviceMesh | None = None,
) -> T:
    """Swap dimension ``axis`` of ``x`` with the mesh axis.

    Varying -> varying. Same as ``all_to_all(x, axis_name, axis, axis)``.

    Args:
        x: as for ``all_gather``.
        axis: a dimension as long as the mesh axis; may be negative.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays like ``x``, in new memory.

    Gradient:
        pswapaxes.

    Cost:
        As ``all_to_all``.

    Raises:
        As ``all_to_all``.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = torch.tensor([0, 1]) + 10 * md.get_rank()
        ...     return md.lax.pswapaxes(x, "tp", 0, mesh=mesh).tolist()
        >>> md.simulate(program, 2)
        [[0, 10], [1, 11]]
    """
    return on_leaves(
        "pswapaxes",
        partial(data_movement.pswapaxes, axis=axis),
        x,
        axis_name,
        mesh,
        axis_index_groups,
        check=lambda leaf, group: data_movement.blocks_to_swap(leaf, group, axis),
    )


@one_frame
def pbroadcast(x: T, axis_name: AxisName, source: int, *, mesh: DeviceMesh | None = None) -> T:
    """Broadcast ``x`` from index ``source`` along ``axis_name`` to every rank.

    Varying -> invariant.

    Args:
        x: as for ``all_gather``.
        source: an index along the axis, equal on every rank.
        axis_name, mesh: as for ``psum``.

    Returns:
        Arrays like ``x``, equal along the axis, in new memory. Python numbers return as Python
        numbers.

    Gradient:
        The gradient on the source, zero on other ranks, without communication.

    Cost:
        One broadcast per leaf: n bytes received by every rank except the source.

    Raises:
        As ``psum``. KindError, ArgumentError: ``source`` is not an index along the axis.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        ...     x = torch.tensor(float(md.get_rank()), requires_grad=True)
        ...     y = md.lax.pbroadcast(x, "tp", 2, mesh=mesh)
        ...     (y * y).backward()
        ...     return y.item(), x.grad.item()
        >>> md.simulate(program, 3)
        [(2.0, 0.0), (2.0, 0.0), (2.0, 4.0)]
    """
    return on_leaves(
        "pbroadcast",
        partial(data_movement.pbroadcast, source=source),
        x,
        axis_name,
        mesh,
        on_number=itself,
    )
