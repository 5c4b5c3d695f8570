"""Over which axes a gradient is averaged, by the marks of its parameter.

A wrapper averages over its axes. A parameter that is marked reduced over further axes, as a norm
is whose sequence is cut there, has another partial sum of its gradient on each rank along these. To
add
them up behind the backward would be wrong: the next backward onto the same ``.grad`` (gradients
accumulate, a graph is retained) would add up a sum again. So what a backward adds to ``.grad`` is
multiplied by the size of the further axes, and ``.grad`` is averaged over all: an average may be
repeated. That is so in every backward, whether it is averaged or local; gradients that
``torch.autograd.grad`` returns do not go through ``.grad``, and are as without a wrapper.

Drawn case: a norm "d {R:tp}" on (dp=2, tp=2), wrapped over 'dp'; a backward brings these partial
sums, of which the sum over 'tp' and the mean over 'dp' is wanted.

              (dp=0, tp=0)   (dp=0, tp=1)   (dp=1, tp=0)   (dp=1, tp=1)    wanted
    partial sum        1              2              3              4          ((1+2) + (3+4)) / 2 = 5
    times 2        2              4              6              8
    average        5              5              5              5
    a second backward adds the same
                   7              9             11             13
    average       10             10             10             10          5 + 5

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
    """Return the axes, in the mesh's order, over which a type is reduced beside a wrapper's.

    Args:
        text: the type, without the wrapper's own marks.
        axes: the wrapper's.
        sizes: of all axes of the mesh. An axis of size 1 has no other partial sum, and is left out.
        where: the wrapper and the parameter, for messages.

    Raises:
        AxisError: the type is reduced over an axis that the mesh lacks.

    Example:
        >>> find_further_axes("V:ep R:cp,dp,tp", ["dp"], {"dp": 2, "tp": 4, "cp": 3, "ep": 2})
        ('tp', 'cp')
    """
    further = {axis for axis in axes_of_kind(text, "R") if axis not in axes}
    for axis in sorted(further):
        if axis not in sizes:
            raise no_axis(axis, tuple(sizes), where)
    return tuple(axis for axis, size in sizes.items() if axis in further and size > 1)


def multiply_increments(parameter: torch.nn.Parameter, factor: int) -> tuple[Any, RemovableHandle]:
    """Multiply what backwards add to ``.grad``; return the hook's node, to be kept, and handle."""

    @untraced
    @hidden_from_modes
    def gradient_comes(grads: tuple[torch.Tensor | None, ...]) -> Any:
        return tuple(None if grad is None else grad * factor for grad in grads)

    node = get_gradient_edge(parameter).node  # it lives only while something keeps it
    return node, node.register_prehook(gradient_comes)
