"""Flags beside the sum of a norm: whether ranks that hold the same elements have one gradient.

The sum takes a part of each holder's gradient. Where one holder lacks it, or where a backward under
``no_sync`` has left other gradients on each holder, the sum is the norm of nothing. Two numbers
tell all ranks so, in the message of the norm.

Drawn case: the flag of gradients that are lacking, of a weight that is cut over 'tp' on a mesh
(dp=2, tp=2). The two holders of a part weigh what they have with opposite numbers, which differ
from part to part; so the sum is 0 where holders agree, whatever each part has.

                      of part 0 (tp=0)     of part 1 (tp=1)
    weight    dp=0          +5                   +3
              dp=1          -5                   -3
    has it, 1 or 0; the sum of all weighed
              all           5 - 5          +     3 - 3              = 0
              dp=0          5 - 0          +     3 - 3              = 5, rejected
              part 1 alone  0              +     3 - 3              = 0

    >>> import meshdist as md
    >>> def program(lacking):
    ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     has = (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")) not in lacking
    ...     return lacking_flag({frozenset({"tp"}): [has]}, mesh)
    >>> sum(md.simulate(program, 4, (((0, 0), (1, 0)),))), sum(md.simulate(program, 4, ((),)))
    (0, 0)
    >>> sum(md.simulate(program, 4, (((1, 0),),))) != 0
    True
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from ..annotations.axis_types import shown
from ..collectives.objects import gather_from_all
from ..collectives.torch_private import version_of
from ..error_text import first_texts, ranks_text
from ..errors import GradientError
from ..mesh.device_mesh import DeviceMesh
from ..runtime.graph_breaks import untraced
from ..typed_mode.type_errors import axes_argument, tensor_text, where
from .extra_axis_groups import axes_spanned

_LOCAL = "_local_over"
"""On a gradient: the ranks over which it is not averaged, and its version then."""
_BITS = (1 << 18) - 1  # of a number: a product has 36, and sums of 100,000 stay exact in float64


@untraced
def mark_local(parameters: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
    """Mark gradients as this rank's own, which ``ranks`` should have averaged and did not."""
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            grad.__dict__[_LOCAL] = tuple(ranks), version_of(grad)


@untraced
def unmark_local(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the marks of ``mark_local`` from the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.__dict__.pop(_LOCAL, None)


def local_ranks(grad: torch.Tensor | None) -> tuple[int, ...]:
    """Return the ranks of a gradient's ``mark_local``; () if unmarked, None, or written since."""
    noted: tuple[tuple[int, ...], int] | None = None if grad is None else grad.__dict__.get(_LOCAL)
    # What has been written to since is the program's, as where it sums by itself.
    return noted[0] if noted and grad is not None and noted[1] == version_of(grad) else ()


class NormParameter(NamedTuple):
    """A parameter of a norm: its index among all parameters, and the axes that cut it."""

    parameter_index: int
    parameter: torch.Tensor
    axes: frozenset[str]


def name_of(index: int, parameter: torch.Tensor) -> str:
    """Return the text "parameter 3, ..." of a parameter at ``index`` of those given to a norm."""
    return f"parameter {index}, {tensor_text(parameter)}"


def flags_of(parameters: Sequence[NormParameter], mesh: DeviceMesh) -> tuple[float, float]:
    """Return whether a gradient was left local here, and ``lacking_flag``, both as floats."""
    has: dict[frozenset[str], list[bool]] = {}
    local: set[tuple[int, ...]] = set()
    for _, parameter, axes in parameters:
        grad = parameter.grad
        if axes:  # gradients that are equal on all ranks are counted in the message's title
            has.setdefault(axes, []).append(grad is not None)
        if ranks := local_ranks(grad):
            local.add(ranks)
    is_local = any(_are_several_on(ranks, mesh) for ranks in local)
    return float(is_local), float(lacking_flag(has, mesh))


def lacking_flag(has: Mapping[frozenset[str], Sequence[bool]], mesh: DeviceMesh) -> int:
    """Return a number whose sum over all ranks is 0 where holders have the same gradients.

    Args:
        has: of the parameters that some axes cut, in their order: whether there is a gradient.
    """
    flag = 0
    for axes, which in has.items():
        part, number, count = _part_and_index(axes, mesh, mesh.world.rank)
        here, next_one = (
            _weight(repr((part, each)).encode()) for each in (number, (number + 1) % count)
        )
        flag += _weight(bytes(which)) * (here - next_one)
    return flag


def _weight(text: bytes) -> int:
    # No CRC: differences of these cancel out where all of a replica lack a gradient.
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "big") & _BITS


def _part_and_index(axes: Collection[str], mesh: DeviceMesh, rank: int) -> tuple[object, int, int]:
    """Return (coordinates on ``axes``, ``rank``'s index among ranks with the same, their count)."""
    part, number, count = [], 0, 1
    coordinate = mesh.layout.coordinate_of(rank) or ()
    for (axis, size), index in zip(mesh.axis_sizes.items(), coordinate, strict=True):
        if axis in axes:
            part.append((axis, index))
        else:
            number, count = number * size + index, count * size
    return tuple(part), number, count


def _are_several_on(ranks: Sequence[int], mesh: DeviceMesh) -> bool:
    """Return whether more than one of ``ranks`` is on the mesh."""
    return len({*ranks} & {*mesh.layout.ranks().ravel().tolist()}) > 1


# -- what is rejected ------------------------------------------------------------------------------


def rejected_norm(parameters: Sequence[NormParameter], mesh: DeviceMesh) -> GradientError:
    """Return a norm's error, on local gradients or gradients that ranks lack; collective."""
    group = mesh.open_group()
    mine = [
        (name_of(index, x), axes, x.grad is not None, local_ranks(x.grad))
        for index, x, axes in parameters
    ]
    of_all = gather_from_all(mine, group)
    local: dict[str, list[int]] = {}
    axes_of_wrapper: set[str] = set()
    has_it: dict[Any, tuple[str, dict[int, bool]]] = {}  # by axes, part, and place in the order
    for rank, told in zip(group.ranks, of_all, strict=True):
        places: Counter[frozenset[str]] = Counter()
        for text, axes, has, ranks in told:
            if _are_several_on(ranks, mesh):
                local.setdefault(text, []).append(rank)
                axes_of_wrapper.update(axes_spanned(mesh.layout, ranks))
            if not axes:
                continue
            key = axes, _part_and_index(axes, mesh, rank)[0], places[axes]
            has_it.setdefault(key, (text, {}))[1][rank] = has
            places[axes] += 1
    if local:
        lines = [f"{text}, on {ranks_text(ranks)}" for text, ranks in local.items()]
        return _rejected_local(lines, axes_of_wrapper, mesh)
    lacking: dict[str, list[int]] = {}
    for (axes, part, _), (text, by_rank) in has_it.items():
        holders = [rank for rank in group.ranks if _part_and_index(axes, mesh, rank)[0] == part]
        without = [rank for rank in holders if not by_rank.get(rank)]
        if len(without) < len(holders):
            lacking.setdefault(text, []).extend(without)
    lines = [f"{text}: None on {ranks_text(sorted(on))}" for text, on in lacking.items() if on]
    return GradientError(
        "clip_grad_norm_: some of the ranks that hold the same elements lack their gradient",
        where=where(mesh),
        expected="a gradient on all ranks that hold the same part of a parameter, or on none",
        found=first_texts(lines),
        fix="let the loss of each of these ranks depend on it; or let zeros stand in: "
        "p.grad = torch.zeros_like(p)",
    )


def _rejected_local(lines: Sequence[str], over: Collection[str], mesh: DeviceMesh) -> GradientError:
    rest = [axis for axis in mesh.axis_names if axis not in over]
    own = f"; for the norm of each replica's own: mesh=mesh[{axes_argument(rest)}]"
    return GradientError(
        "clip_grad_norm_ of gradients that no backward has averaged",
        where=where(mesh),
        expected="gradients behind a backward outside of no_sync(), which averages them over "
        f"{shown(sorted(over))}",
        found=first_texts(lines),
        fix="clip behind that backward" + (own if rest else ""),
    )
