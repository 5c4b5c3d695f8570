"""Loop over loaders of unequal length until every rank is out of data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from traceback import format_exception_only
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from ..collectives.object_protocol import find_device
from ..collectives.objects import broadcast_object_list, gather_from_all
from ..error_text import grouped_text, ranks_text
from ..errors import JoinError, KindError
from ..groups.process_group import GroupLike, resolve_group
from .step_flags import Flags

__all__ = ["uneven"]

T = TypeVar("T")

_OUT, _HAS_DATA, _FAILED = range(3)


class Uneven(Generic[T]):
    """An iterable of (batch, weight), equally long on every rank.

    Attributes:
        num_active: the number of ranks with data at this step.
    """

    def __init__(self, loader: Iterable[T], group: GroupLike = None) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise KindError(
                f"uneven() cannot loop over an object of type {type(loader).__name__}",
                expected="an iterable, for example a DataLoader",
                fix="pass an empty list on ranks without data: uneven([], mesh)",
            )
        self._loader = loader
        self._group = resolve_group(group)
        self.num_active = 0

    def __iter__(self) -> Iterator[tuple[T, float]]:
        batches, me = chain.from_iterable([self._loader]), self._group.rank()
        batch: Any = None
        ahead, is_first = _Ahead(batches, self), True
        while True:
            flags = ahead.wait()
            self.num_active = flags.count(_HAS_DATA)
            if not self.num_active:
                return
            weight = float(flags[me])
            if weight:
                batch = ahead.batch
            if is_first and _OUT in flags:
                shared = self._share(batch, flags.index(_HAS_DATA))
                batch = batch if weight else shared
            ahead, is_first = _Ahead(batches, self), False
            yield batch, weight

    def _share(self, batch: Any, source: int) -> Any:
        """Return the batch of group rank ``source``, on the device of this rank; collective."""
        objects = [batch]
        broadcast_object_list(objects, group=self._group, group_src=source)
        return tree_map_only(torch.Tensor, lambda x: x.cuda() if x.is_cuda else x, objects[0])


class _Ahead:
    """The next batch of this rank, and the exchange of flags about it."""

    def __init__(self, batches: Iterator[Any], loop: Uneven[Any]) -> None:
        self._group = group = loop._group
        self.batch, self._error, flag = None, None, _OUT
        try:
            self.batch, flag = next(batches), _HAS_DATA
        except StopIteration:
            pass
        except Exception as error:
            self._error, flag = error, _FAILED
        self._flags = Flags(flag, group, find_device(group, None, "uneven"), "md.uneven")

    def wait(self) -> list[int]:
        """Return the flags of all ranks; raise on every rank if a loader raised; collective."""
        flags, group = self._flags.wait(), self._group
        failed = [rank for rank, flag in zip(group.ranks, flags, strict=True) if flag == _FAILED]
        if not failed:
            return flags
        error = self._error
        texts = gather_from_all(error and format_exception_only(error)[-1].strip(), group)
        if error is not None:
            raise error
        raise JoinError(
            f"uneven() cannot go on, because the loader of {ranks_text(failed)} raised",
            where=f"rank {group.world.rank}, {group.name}",
            expected="loaders that end or yield a batch on every rank",
            found=grouped_text(pair for pair in zip(group.ranks, texts, strict=True) if pair[1]),
            fix=f"resolve the error in the traceback of {ranks_text(failed)}",
        )


def uneven(loader: Iterable[T], group: GroupLike = None) -> Uneven[T]:
    """Loop over loaders of unequal length until every rank of ``group`` is out of data.

    All ranks run the same number of steps, so any collective, SyncBatchNorm and gradient clipping
    work inside. A rank out of data gets its last batch again with weight 0.0, or another rank's
    first batch if it never had any. To average over ranks with data, scale the loss:
    ``loss = loss_fn(model(x), y) * weight * size / batches.num_active``.

    Args:
        loader: this rank's batches, for example a DataLoader; read one batch ahead.
        group: a ProcessGroup, a mesh, or None for the world.

    Returns:
        An iterable of ``(batch, weight)``; weight is 0.0 if the rank is out of data, else 1.0. Its
        ``num_active`` counts the ranks with data.

    Cost: one all-reduce of 4 bytes per rank and step, started one step ahead.

    Raises:
        KindError: ``loader`` is not iterable.
        JoinError: another rank's loader raised; that rank raises the loader's error.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     sums, batches = [], md.uneven([1.0] * (1 + md.get_rank()))
        ...     for x, weight in batches:
        ...         total = torch.tensor([x * weight])
        ...         md.all_reduce(total)
        ...         sums.append((total.item(), weight, batches.num_active))
        ...     return sums
        >>> md.simulate(program, 2)
        [[(2.0, 1.0, 2), (1.0, 0.0, 1)], [(2.0, 1.0, 2), (1.0, 1.0, 1)]]
    """
    return Uneven(loader, group)
