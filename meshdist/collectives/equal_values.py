"""Whether tensors are equal on all members of a group: the comparison of all checks of values.

Half of a floating dtype's digits must agree, measured by the tensor's largest value: equal
computations may still add in another order. Other dtypes must agree wholly. NaN equals NaN, and
infinity equals infinity of its sign.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from ..arrays import describe
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..checking.program import call_site, show_site
from ..dtypes import DTYPES
from ..error_text import grouped_text, ranks_text
from ..errors import GradientError, UnequalError
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from .objects import all_gather_object
from .torch_private import are_transforms_active, unseen
from .verbs import all_gather_into_tensor, broadcast

__all__ = ["check_invariant", "check_replicas", "difference_text", "find_differing"]
__all__ += ["host_checksum", "relative_distance", "tolerance"]


def check_invariant(
    x: torch.Tensor,
    group: ProcessGroup,
    what: str,
    *,
    where: str,
    expected: str,
    fix: str | Callable[[Collection[int]], str],
) -> None:
    """Raise the same GradientError on every member unless all hold the same ``x``.

    Inside a transform of torch.func there are no plain numbers, and nothing is compared.

    ``x`` is equal in shape and dtype on all members, without gradient. The error speaks of
    ``what``; ``fix`` may be made of the ranks that differ from the group's first member.
    """
    if are_transforms_active():
        return
    (far,) = find_differing([x], group)
    if far:
        raise GradientError(
            f"{what} over {group.name} is not the same on every rank",
            where=where,
            expected=expected,
            found=difference_text(far, group.ranks[0]),
            fix=fix if isinstance(fix, str) else fix(far),
        )


@unseen
def check_replicas(
    x: torch.Tensor, mesh: DeviceMesh, axes: Collection[str], call: str, check: bool | None
) -> None:
    """Raise the same UnequalError on every rank along ``axes`` unless all hold the same ``x``.

    Values travel where checksums differ. None compares on simulated ranks, and at DETAIL.
    """
    if check is None:
        check = mesh.world.is_simulated or get_debug_level() == DebugLevel.DETAIL
    sizes = mesh.axis_sizes if check else {}
    names = tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
    if not names or are_transforms_active():
        return
    x, group = x.detach(), mesh[names].open_group()
    of_all: list[Any] = [None] * group.size()
    all_gather_object(of_all, (f"{call}, {describe(x)}", host_checksum(x)), group)
    texts = [text for text, _ in of_all]
    is_same = len(set(texts)) == 1
    far = find_differing([x], group)[0] if is_same and len(set(of_all)) > 1 else {}
    if far or not is_same:
        by_rank = grouped_text(zip(group.ranks, texts, strict=True), separator="; ")
        raise UnequalError(
            f"the array is not the same on every rank over {group.name}",
            where=f"{texts[0]}, called at {show_site(call_site())}",
            expected="equal arrays along an axis that the source, or the left side, does not name",
            found=difference_text(far, group.ranks[0]) if far else by_rank,
            fix="md.seed(0) on every rank before it is drawn; or send one rank's: md.device_put(x, "
            "sharding, root=0); or check=False, where each rank's own is meant",
        )


def host_checksum(x: torch.Tensor) -> int:
    """A number made of a tensor's bits, on the host: ``ddp/checksums`` awaits no device."""
    bits = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
    return crc32(bits.view(torch.uint8).cpu().numpy().data)


@torch.no_grad()
def find_differing(tensors: Sequence[torch.Tensor], group: ProcessGroup) -> list[dict[int, float]]:
    """For each tensor, the ranks whose values are not those of the group's first member.

    Every member gets the same answer: by rank, the distance from the first member's. Tensors
    have no gradient; there are as many on all members, of equal shapes and dtypes.
    """
    if not tensors:
        return []
    distances = []
    for x in tensors:
        mine = x.clone(memory_format=torch.contiguous_format)
        first = mine.clone()
        broadcast(first, group=group, group_src=0)
        distances.append(relative_distance(mine, first))
    own = torch.tensor(distances, dtype=torch.float64).to(tensors[0].device)
    of_all = own.new_empty((group.size(), len(tensors)))
    all_gather_into_tensor(of_all, own.view(1, -1), group=group)
    return [
        {
            rank: distance
            for rank, distance in zip(group.ranks, column, strict=True)
            if distance > tolerance(x)
        }
        for x, column in zip(tensors, of_all.t().tolist(), strict=True)
    ]


def difference_text(far: Mapping[int, float], first: int) -> str:
    """Which ranks differ from rank ``first``, and by how much, for messages."""
    verb = "differs" if len(far) == 1 else "differ"
    return (
        f"{ranks_text(tuple(far))} {verb} from rank {first}, by up to {max(far.values()):.2g} of "
        "its largest value"
    )


def tolerance(x: torch.Tensor) -> float:
    """The distance up to which tensors of this dtype are equal."""
    return torch.finfo(x.dtype).eps ** 0.5 if _is_inexact(x) else 0.0


def relative_distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    """The largest |mine - first| over the largest |first|; NaN and infinity equal themselves."""
    mine, first = _computable(mine), _computable(first)
    differs = (mine != first) & ~(mine.isnan() & first.isnan())
    if not bool(differs.any()):
        return 0.0
    if not _is_inexact(mine):  # whose differences might not fit into the dtype
        mine, first = mine.double(), first.double()
    gap = float((mine - first)[differs].abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    finite = first[first.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return gap / scale if scale else torch.inf


def _computable(x: torch.Tensor) -> torch.Tensor:
    """``x`` in a dtype that can be subtracted; those that torch only moves, as bytes."""
    facts = DTYPES.get(x.dtype)
    if facts is None:
        return x.contiguous().view(torch.uint8)
    return x.to(facts.wide) if facts.wide is not None and _is_inexact(x) else x


def _is_inexact(x: torch.Tensor) -> bool:
    return x.dtype in DTYPES and (x.is_floating_point() or x.is_complex())
