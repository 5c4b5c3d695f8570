"""Derive the reduction axes of a gradient from its parameter's annotation.

A wrapper averages over its axes. If a parameter is annotated as reduced over additional axes (for
example, a norm of a sharded sequence), each rank along them has a different partial sum of its
gradient. Summing these after the backward would be wrong: the next backward onto the same ``.grad``
would sum a sum again. So each backward, averaged or local, multiplies its increment of ``.grad`` by
the size of the additional axes, and ``.grad`` is averaged over all ranks; averages can be repeated.
Results of ``torch.autograd.grad`` are unchanged.

Experts vary over some of the wrapper's axes. The ranks along them send their tokens to the experts,
so a backward computes the sum over these axes. Its increments are divided by their size, and
``.grad`` is averaged over the wrapper's other axes.

Worked example: a norm "d {R:tp}" on (dp=2, tp=2), wrapped over 'dp'. The backward computes these
partial sums; the wanted gradient is their sum over 'tp' and mean over 'dp'.

              (dp=0, tp=0)  (dp=0, tp=1)  (dp=1, tp=0)  (dp=1, tp=1)   wanted
    partial sum     1             2             3             4        ((1+2) + (3+4)) / 2 = 5
    times 2         2             4             6             8
    average         5             5             5             5
    a second backward adds the same
                    7             9            11            13
    average        10            10            10            10        5 + 5

    >>> find_further_axes("R:tp", ["dp"], {"dp": 2, "tp": 2})
    ('tp',)
    >>> sum(2 * partial_sum for partial_sum in (1, 2, 3, 4)) / 4, sum((7, 9, 11, 13)) / 4
    (5.0, 10.0)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..annotations.axis_types import axes_of_kind
from ..collectives.torch_private import hidden_from_modes
from ..mesh.layout_arguments import no_axis
from ..runtime.graph_breaks import untraced


def find_further_axes(
    text: str, axes: Collection[str], sizes: Mapping[str, int], where: str = ""
) -> tuple[str, ...]:
    """Return the additional axes, in the mesh's order, over which a type is reduced.

    Args:
        text: the type, without the wrapper's annotations.
        sizes: of all axes of the mesh; axes of size 1 are left out.
        where: for messages.

    Raises:
        AxisError: the type is reduced over an axis that the mesh lacks.

    Example:
        >>> find_further_axes("V:ep R:cp,dp,tp", ["dp"], {"dp": 2, "tp": 4, "cp": 3, "ep": 2})
        ('tp', 'cp')
    """
    further = {axis for axis in axes_of_kind(text, "R") if axis not in axes}
    for axis in sorted(further):
        if axis not in sizes:
            error = no_axis(axis, tuple(sizes), where)
            if error.fix is None:
                error.add_fix(
                    "annotate the parameter with axes of this mesh, or wrap the model with "
                    f"device_mesh= of the mesh that has axis {axis!r}"
                )
            raise error
    return tuple(axis for axis, size in sizes.items() if axis in further and size > 1)


def multiply_increments(
    parameter: torch.nn.Parameter, factor: float
) -> tuple[Any, RemovableHandle]:
    """Multiply increments of ``.grad``; return the hook's node (keep it) and handle."""

    @untraced
    @hidden_from_modes
    def multiply(grads: tuple[torch.Tensor | None, ...]) -> Any:
        return tuple(None if grad is None else grad * factor for grad in grads)

    node = get_gradient_edge(parameter).node  # autograd does not keep the node alive
    return node, node.register_prehook(multiply)
