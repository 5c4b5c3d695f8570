"""Check, in the message of a gradient norm, that holders of equal elements have equal gradients.

The sum takes a part of each holder's gradient. It is meaningless if a holder lacks it, or if a
backward under ``no_sync`` left different gradients. Two numbers in the norm's message report this
to all ranks.

Worked example: the flag of missing gradients, of a weight sharded over 'tp' on a mesh (dp=2, tp=2).
The two holders of a part weight their gradient with opposite numbers, which differ between parts.
So the sum is 0 if the holders agree, whatever each part has.

                      of part 0 (tp=0)     of part 1 (tp=1)
    weight    dp=0          +5                   +3
              dp=1          -5                   -3
    who has the gradient, and the weighted sum
              all           5 - 5          +     3 - 3              = 0
              dp=0          5 - 0          +     3 - 3              = 5, rejected
              part 1 only   0              +     3 - 3              = 0

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
"""A gradient's attribute: the ranks over which it is not averaged, and its version at that time."""
_BITS = (1 << 18) - 1  # products have 36 bits, so sums of 100,000 are exact in float64


@untraced
def mark_local(parameters: Iterable[torch.Tensor], ranks: Sequence[int]) -> None:
    """Mark gradients as local, which ``ranks`` should have averaged and did not."""
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            grad.__dict__[_LOCAL] = tuple(ranks), version_of(grad)


@untraced
def unmark_local(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.__dict__.pop(_LOCAL, None)


def local_ranks(grad: torch.Tensor | None) -> tuple[int, ...]:
    """Return the ranks of a gradient's ``mark_local``; () if unmarked, None, or written since."""
    noted: tuple[tuple[int, ...], int] | None = None if grad is None else grad.__dict__.get(_LOCAL)
    # A gradient that was written to since is the user's, who may have reduced it.
    return noted[0] if noted and grad is not None and noted[1] == version_of(grad) else ()


class NormParameter(NamedTuple):
    """A parameter of a norm, with the axes that shard it."""

    parameter_index: int
    parameter: torch.Tensor
    axes: frozenset[str]


def name_of(index: int, parameter: torch.Tensor) -> str:
    return f"parameter {index}, {tensor_text(parameter)}"


def flags_of(parameters: Sequence[NormParameter], mesh: DeviceMesh) -> tuple[float, float]:
    """Return whether a gradient was left local on this rank, and ``lacking_flag``, as floats."""
    has: dict[frozenset[str], list[bool]] = {}
    local: set[tuple[int, ...]] = set()
    for _, parameter, axes in parameters:
        grad = parameter.grad
        if axes:  # the operation name has the count of replicated gradients
            has.setdefault(axes, []).append(grad is not None)
        if ranks := local_ranks(grad):
            local.add(ranks)
    is_local = any(_are_several_on(ranks, mesh) for ranks in local)
    return float(is_local), float(lacking_flag(has, mesh))


def lacking_flag(has: Mapping[frozenset[str], Sequence[bool]], mesh: DeviceMesh) -> int:
    """Return a number whose sum over all ranks is 0 if holders have the same gradients.

    Args:
        has: by sharding axes, in parameter order, whether there is a gradient.
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
    # Not a CRC: its differences cancel out if an entire replica lacks a gradient.
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "big") & _BITS


def _part_and_index(axes: Collection[str], mesh: DeviceMesh, rank: int) -> tuple[object, int, int]:
    """Return (coordinates on ``axes``, index of ``rank`` among ranks with these, their count)."""
    part, number, count = [], 0, 1
    coordinate = mesh.layout.coordinate_of(rank) or ()
    for (axis, size), index in zip(mesh.axis_sizes.items(), coordinate, strict=True):
        if axis in axes:
            part.append((axis, index))
        else:
            number, count = number * size + index, count * size
    return tuple(part), number, count


def _are_several_on(ranks: Sequence[int], mesh: DeviceMesh) -> bool:
    return len({*ranks} & {*mesh.layout.ranks().ravel().tolist()}) > 1


# -- errors ----------------------------------------------------------------------------------------


def rejected_norm(parameters: Sequence[NormParameter], mesh: DeviceMesh) -> GradientError:
    """Return a norm's error about local or missing gradients; collective."""
    group = mesh.open_group()
    mine = [
        (name_of(index, x), axes, x.grad is not None, local_ranks(x.grad))
        for index, x, axes in parameters
    ]
    of_all = gather_from_all(mine, group)
    local: dict[str, list[int]] = {}
    axes_of_wrapper: set[str] = set()
    has_it: dict[Any, tuple[str, dict[int, bool]]] = {}  # by axes, part, and index in the order
    for rank, theirs in zip(group.ranks, of_all, strict=True):
        axes_counts: Counter[frozenset[str]] = Counter()
        for text, axes, has, ranks in theirs:
            if _are_several_on(ranks, mesh):
                local.setdefault(text, []).append(rank)
                axes_of_wrapper.update(axes_spanned(mesh.layout, ranks))
            if not axes:
                continue
            key = axes, _part_and_index(axes, mesh, rank)[0], axes_counts[axes]
            has_it.setdefault(key, (text, {}))[1][rank] = has
            axes_counts[axes] += 1
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
        "clip_grad_norm_: only some of the ranks that hold the same elements have a gradient",
        where=where(mesh),
        expected="a gradient on all ranks that hold the same part of a parameter, or on none of "
        "them",
        found=first_texts(lines),
        fix="use the parameter in the loss of each of these ranks; or set zeros: "
        "p.grad = torch.zeros_like(p)",
    )


def _rejected_local(lines: Sequence[str], over: Collection[str], mesh: DeviceMesh) -> GradientError:
    rest = [axis for axis in mesh.axis_names if axis not in over]
    own = f"; for a separate norm per replica, pass mesh=mesh[{axes_argument(rest)}]"
    return GradientError(
        "clip_grad_norm_ of gradients that are not averaged",
        where=where(mesh),
        expected="gradients after a backward outside no_sync(), which averages them over "
        f"{shown(sorted(over))}",
        found=first_texts(lines),
        fix="clip after that backward" + (own if rest else ""),
    )
