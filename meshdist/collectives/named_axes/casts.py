"""Values that become of another kind along an axis; nothing is sent."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from ...checking.program import one_frame
from ...mesh.device_mesh import DeviceMesh
from .. import functional
from .axes import AxisName
from .leaves import on_leaves, unsent

__all__ = ["pcast", "pvary"]

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
    return on_leaves("pvary", functional.pvary, x, axis_name, mesh, on_number=unsent)


@one_frame
def pcast(x: T, axis_name: AxisName, *, to: str, mesh: DeviceMesh | None = None) -> T:
    """Every rank holds ``x`` as a value of another kind along ``axis_name``.

    Invariant -> varying, invariant -> reduced, varying -> unreduced, reduced -> varying; there are
    no other casts.

    Args:
        x: an array, or a pytree.
        axis_name, mesh: as for ``psum``.
        to: "varying" (from invariant, as ``pvary``), "reduced" (equal on every rank, while its
            gradient stays a summand on each) or "unreduced" (a summand on each rank, for a ``psum``
            that comes later).

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
        ...         summand, = torch.autograd.grad(loss, r)             # unreduced: 1 and 2
        ...         return summand.item(), md.lax.psum(summand, "dp").item()
        >>> md.simulate(program, 2)
        [(1.0, 3.0), (2.0, 3.0)]
    """
    return on_leaves(
        "pcast",
        partial(functional.pcast, to=to),
        x,
        axis_name,
        mesh,
        on_number=unsent,
        to=to,
    )
