"""Values that are gathered, exchanged, permuted or broadcast along an axis."""

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
    """Every rank holds the ``x`` of all ranks along ``axis_name``, in their order.

    Varying -> varying; with ``to``: varying -> invariant, varying -> reduced.

    Args:
        x: this rank's array, or a pytree; equal shapes and dtypes along the axis.
        axis: the dim of the result that counts the ranks, or, ``tiled``, along which their arrays
            are concatenated; may be negative.
        to: "varying", where each rank uses the result in its own way; "invarying", where all use it
            alike; "reduced", where gradients shall stay partial sums.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the dtype of ``x``, equal along the axis; fresh memory.

    Gradient:
        psum_scatter along the same dim: the ranks' gradients are summed, and each takes its own
        part. With ``to="invarying"`` the own part alone, for free.

    Cost:
        One all-gather a leaf: each of p ranks sends n (p - 1) bytes for n bytes.

    Raises:
        What ``psum`` raises. ShapeError: there is no such dim. ArgumentError: another ``to``.

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
    """Rank j along ``axis_name`` holds block j of every rank's ``x``, joined in the ranks' order.

    Varying -> varying.

    Args:
        x: this rank's array, or a pytree; equal shapes and dtypes along the axis.
        split_axis: the dim that is cut into one block per rank; may be negative.
        concat_axis: the dim of the result along which blocks are joined; may be negative.
        tiled: ``split_axis`` stays, p times shorter on p ranks, and blocks are concatenated along
            ``concat_axis``. Else the size of ``split_axis`` is p, that dim goes, and a new one of
            size p stands at ``concat_axis``.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the dtype of ``x``; fresh memory.

    Gradient:
        all_to_all with both dims exchanged.

    Cost:
        One all-to-all a leaf: each of p ranks sends n (p - 1) / p bytes for n bytes.

    Raises:
        What ``psum`` raises. ShapeError: there is no such dim, or it cannot be cut so.

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
    """Every rank holds ``output``, with the slices of rows in it that the others have sent.

    Varying -> varying.

    Args:
        operand: what slices are cut from, rows along dim 0.
        output: what arrives is written into a copy of it; rows and dtype as in ``operand``.
        input_offsets, send_sizes: the first row and the number of rows of each slice that this rank
            sends: k integers, as a list or array, k a multiple of the size p of the axis. The first
            k / p slices go to the first rank, and so on.
        output_offsets: the row of the *receiver's* output where each slice goes.
        recv_sizes: the number of rows of each slice that arrives here, in the order of senders.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        An array like ``output``; fresh memory.

    Gradient:
        ``operand`` gets back the gradients of the rows that it sent, by the exchange turned round;
        ``output`` gets its own, with zeros where rows arrived.

    Cost:
        Two small collectives for sizes, offsets and their check, and one all-to-all of the rows.

    Raises:
        What ``psum`` raises. ShapeError, DtypeError, ArgumentError: operand, output, offsets and
        sizes do not fit; every rank raises where they do not fit those of another rank.

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
    starts, sent, places, taken = numbers
    group = resolve_group(axes)
    result = data_movement.ragged_all_to_all(rows, initial, starts, sent, places, taken, group)
    return like(result, output)


@one_frame
def ppermute(
    x: T, axis_name: AxisName, perm: Sequence[Any], *, mesh: DeviceMesh | None = None
) -> T:
    """For each pair of ``perm``, the destination along ``axis_name`` holds the source's ``x``.

    Varying -> varying.

    Args:
        x: this rank's array, or a pytree; equal shapes and dtypes along the axis.
        perm: a list of (source, destination), places along the axis, equal on every rank. A place
            is a source at most once, and a destination at most once.
        axis_name, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x``, fresh memory; zeros on a rank that is no
        destination.

    Gradient:
        ppermute with the pairs turned round.

    Cost:
        Each source sends n bytes for n bytes.

    Raises:
        What ``psum`` raises. KindError, ArgumentError: ``perm`` is no such list. MismatchError: it
        differs between ranks.

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
    """Rank i along ``axis_name`` holds the ``x`` of rank ``perm[i]``.

    Varying -> varying.

    Args:
        x: this rank's array, or a pytree; equal shapes and dtypes along the axis.
        perm: for each place along the axis its source, each once; equal on every rank.
        axis_name, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x``; fresh memory.

    Gradient:
        pshuffle by the inverse permutation.

    Cost:
        Each rank sends n bytes for n bytes.

    Raises:
        What ``ppermute`` raises.

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
    """Dim ``axis`` of ``x`` and the mesh axis change places.

    Varying -> varying. It is ``all_to_all(x, axis_name, axis, axis)``.

    Args:
        x: this rank's array, or a pytree; equal shapes and dtypes along the axis.
        axis: a dim as long as the axis has ranks; may be negative.
        axis_name, axis_index_groups, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x``; fresh memory.

    Gradient:
        pswapaxes.

    Cost:
        That of ``all_to_all``.

    Raises:
        What ``all_to_all`` raises.

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
    """Every rank holds the ``x`` of the rank at place ``source`` along ``axis_name``.

    Varying -> invariant.

    Args:
        x: this rank's array, or a pytree; equal shapes and dtypes along the axis.
        source: a place along the axis, equal on every rank.
        axis_name, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x``, equal along the axis; fresh memory. Python numbers
        come back as such.

    Gradient:
        The gradient at the source, zero elsewhere; nothing is sent.

    Cost:
        One broadcast a leaf: n bytes reach every rank but the source.

    Raises:
        What ``psum`` raises. KindError, ArgumentError: ``source`` is no place along the axis.

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
