"""Verbs that move values between members, each beside its transpose.

    verb          from -> to   backward
    all_to_all    V -> V       all_to_all, the dims exchanged
    pswapaxes     V -> V       itself
    ppermute      V -> V       ppermute, the pairs turned round
    pshuffle      V -> V       the inverse permutation
    pbroadcast    V -> I       the gradient at the source, zero elsewhere (free)

What ``functional`` says of its verbs holds here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError, KindError
from ..groups.process_group import ProcessGroup, resolve_group
from ..runtime.memory import new_like
from .checks import find_whole_numbers
from .functional import check_gradient
from .linear_function import LinearFunction, cut, get_dim, joined
from .titled import all_to_all_single, broadcast, lax_title
from .torch_private import call_function

__all__ = [
    "all_to_all",
    "blocks_to_exchange",
    "blocks_to_swap",
    "pbroadcast",
    "ppermute",
    "pshuffle",
    "pswapaxes",
]

Pairs = tuple[tuple[int, int], ...]


def all_to_all(
    x: torch.Tensor,
    group: object = None,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    tiled: bool = False,
    leaf: str = "x",
) -> torch.Tensor:
    """Member j holds block j of every member's ``x``, joined; V -> V.

    ``x`` is cut along dim ``split_axis`` and joined along ``concat_axis``: where it is ``tiled``
    both stay dims of the result; else the first goes, and the second is new.
    """
    group = resolve_group(group)
    blocks, concat = blocks_to_exchange(x, group, split_axis, concat_axis, tiled)
    title = lax_title("all_to_all", leaf, x.shape)
    return joined(call_function(_AllToAll, blocks, group, title), concat, tiled=tiled)


def pswapaxes(
    x: torch.Tensor, group: object = None, axis: int = 0, *, leaf: str = "x"
) -> torch.Tensor:
    """Dim ``axis`` of ``x`` and the group change places: ``all_to_all`` along one dim; V -> V."""
    group = resolve_group(group)
    blocks, dim = blocks_to_swap(x, group, axis)
    title = lax_title("pswapaxes", leaf, x.shape)
    return joined(call_function(_AllToAll, blocks, group, title), dim, tiled=False)


def blocks_to_exchange(
    x: torch.Tensor, group: ProcessGroup, split_axis: int, concat_axis: int, tiled: bool
) -> tuple[torch.Tensor, int]:
    """The blocks that ``all_to_all`` exchanges, in dim 0, and the dim along which it joins them.

    It raises what ``all_to_all`` raises, and sends nothing.
    """
    split = get_dim(split_axis, x.dim(), "split_axis", "all_to_all")
    concat = get_dim(concat_axis, x.dim(), "concat_axis", "all_to_all")
    return cut(x, split, group, "all_to_all", "split_axis", tiled=tiled), concat


def blocks_to_swap(x: torch.Tensor, group: ProcessGroup, axis: int) -> tuple[torch.Tensor, int]:
    """The same for ``pswapaxes``."""
    dim = get_dim(axis, x.dim(), "axis", "pswapaxes")
    return cut(x, dim, group, "pswapaxes", "axis", tiled=False), dim


def ppermute(
    x: torch.Tensor, group: object = None, perm: Sequence[Any] = (), *, leaf: str = "x"
) -> torch.Tensor:
    """For each (source, destination) the destination holds the source's ``x``; others zeros.

    V -> V, transpose: the pairs turned round. Places are those in the group.
    """
    group = resolve_group(group)
    title = lax_title("ppermute", leaf, x.shape)
    return call_function(_Ppermute, x, group, _checked_pairs(perm, group), title)


def pshuffle(
    x: torch.Tensor, group: object = None, perm: Sequence[int] = (), *, leaf: str = "x"
) -> torch.Tensor:
    """Member i holds the ``x`` of member ``perm[i]``; V -> V, transpose: the inverse."""
    group = resolve_group(group)
    sources = _whole_numbers(perm, "pshuffle", "perm")
    if sorted(sources) != list(range(group.size())):
        raise ArgumentError(
            f"pshuffle over {group.name}: perm is no permutation of its places",
            expected=f"each of 0 to {group.size() - 1} once",
            found=repr(perm),
            fix="ppermute takes pairs that leave places out",
        )
    pairs = tuple((source, place) for place, source in enumerate(sources))
    return call_function(_Ppermute, x, group, pairs, lax_title("pshuffle", leaf, x.shape))


def pbroadcast(
    x: torch.Tensor, group: object = None, source: int = 0, *, leaf: str = "x"
) -> torch.Tensor:
    """Every member holds the ``x`` of member ``source``; V -> I.

    The transpose leaves the gradient at the source, and has zeros elsewhere.
    """
    group = resolve_group(group)
    numbers = find_whole_numbers([source])
    if numbers is None:
        raise KindError(
            "pbroadcast: source must be a whole number",
            found=f"{source!r}, a {type(source).__name__}",
        )
    (place,) = numbers
    if not 0 <= place < group.size():
        raise ArgumentError(
            f"pbroadcast over {group.name}: source={place} is outside it",
            expected=f"a place from 0 to {group.size() - 1}",
        )
    return call_function(_Pbroadcast, x, group, place, lax_title("pbroadcast", leaf, x.shape))


def _whole_numbers(given: Any, verb: str, argument: str) -> list[int]:
    numbers = find_whole_numbers(given)
    if numbers is None:
        raise KindError(
            f"{verb}: {argument} must be a list or tuple of whole numbers",
            found=f"{given!r}, a {type(given).__name__}",
        )
    return numbers


def _checked_pairs(perm: Any, group: ProcessGroup) -> Pairs:
    """``perm`` as pairs of plain numbers, no place twice a source, or twice a destination."""
    is_list = isinstance(perm, (list, tuple))
    if not is_list or not all(isinstance(one, (list, tuple)) and len(one) == 2 for one in perm):
        raise KindError(
            "ppermute: perm must be a list of pairs (source, destination)",
            found=f"{perm!r}, a {type(perm).__name__}",
            fix="for example [(0, 1), (1, 0)]; pshuffle takes a permutation as a list of places",
        )
    numbers = [_whole_numbers(pair, "ppermute", "each pair of perm") for pair in perm]
    pairs = tuple((source, destination) for source, destination in numbers)
    size = group.size()
    for places, role in zip(zip(*pairs, strict=True), ("source", "destination"), strict=False):
        outside = [place for place in places if not 0 <= place < size]
        twice = [place for place in places if places.count(place) > 1]
        if outside or twice:
            wrong = (outside or twice)[0]
            raise ArgumentError(
                f"ppermute over {group.name}: {role} {wrong} "
                + ("is outside it" if outside else "stands twice"),
                expected=f"places from 0 to {size - 1}"
                if outside
                else "each place once as a source and once as a destination, at most",
                found=repr(perm),
            )
    return pairs


class _AllToAll(LinearFunction):
    """Block j of every member, in their order; it is its own transpose."""

    takes_blocks = gives_blocks = True

    @staticmethod
    def forward(blocks: torch.Tensor, group: ProcessGroup, title: str) -> torch.Tensor:
        arrived = new_like(blocks)
        all_to_all_single(arrived, blocks, None, None, group, title)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_AllToAll, grad, *ctx.rest), None, None


class _Ppermute(LinearFunction):
    """An exchange in which each member sends at most one tensor and receives at most one.

    It is a collective: so all members compare what they send and take, and none waits for one that
    has another list of pairs.
    """

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, pairs: Pairs, title: str) -> torch.Tensor:
        me, size, count = group.rank(), group.size(), x.numel()
        sent = [count if (me, place) in pairs else 0 for place in range(size)]
        taken = [count if (place, me) in pairs else 0 for place in range(size)]
        arrived = new_like(x)
        all_to_all_single(
            arrived.view(-1)[: sum(taken)],
            x.reshape(-1)[: sum(sent)],
            taken,
            sent,
            group,
            title,
        )
        return arrived if any(me == place for _, place in pairs) else arrived.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, pairs, title = ctx.rest
        inverse = tuple((destination, source) for source, destination in pairs)
        return call_function(_Ppermute, grad, group, inverse, title), None, None, None


class _Pbroadcast(LinearFunction):
    """The source's tensor on every member."""

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, source: int, title: str) -> torch.Tensor:
        result = new_like(x)
        if group.rank() == source:
            result.copy_(x)
        broadcast(result, source, group, title)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        check_gradient(ctx, grad, ctx.rest[0], "pbroadcast")
        return call_function(_KeptAt, grad, *ctx.rest), None, None, None


class _KeptAt(LinearFunction):
    """A value that is equal on every member, kept at one and zero elsewhere; I -> V, free."""

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, place: int, title: str) -> torch.Tensor:
        result = new_like(x)
        return result.copy_(x) if group.rank() == place else result.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return call_function(_Pbroadcast, grad, *ctx.rest), None, None, None
