"""Loops over data of which ranks may have unequally many, without a model: ``uneven``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from ..collectives.neutral_answers import answer
from ..errors import ArgumentError, JoinError, KindError
from ..groups.process_group import GroupLike, resolve_group
from ..groups.shadowing import Shadowing, find_shadowing
from ..runtime.untraced import leave_untraced

__all__ = ["Uneven", "uneven"]

T = TypeVar("T")


class Uneven(Generic[T]):
    """A loop over data of which ranks may have unequally many; made by ``uneven``."""

    def __init__(self, data: Iterable[T], group: GroupLike = None) -> None:
        if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            raise KindError(
                f"uneven() was given an object of type {type(data).__name__}",
                expected="an iterable, for example a loader",
                fix="a rank that has no data passes an empty list: uneven([])",
            )
        self._data = data
        target = resolve_group(group)
        self._new_shadowing = partial(Shadowing, target, target.first_device_type(), answer)
        self._group = target
        self._is_entered = False

    def __iter__(self) -> Iterator[T]:
        if self._is_entered:
            yield from self._data
            return
        self._begin()
        try:
            yield from self._data
        except GeneratorExit:
            self._shadowing.end(
                JoinError(
                    "the loop over uneven(...) was left before its data had ended, by a break, a "
                    "return or an exception",
                    fix="where a loop may break off write: with uneven(...) as batches: "
                    "for batch in batches: ...",
                )
            )
            raise
        except BaseException as error:
            self._shadowing.end(error)
            raise
        self._shadowing.leave()

    def __enter__(self) -> Uneven[T]:
        self._begin()
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_entered = False
        self._shadowing.leave(error)

    @leave_untraced
    def _begin(self) -> None:
        world = self._group.world
        if find_shadowing(world) is not None:
            raise ArgumentError(
                "uneven() was called inside a join context",
                where=f"rank {world.rank}, {self._group.name}",
                expected="one join context at a time",
                fix="loop over the data themselves: the context around it answers the collectives",
            )
        self._shadowing = self._new_shadowing()
        self._shadowing.begin()


def uneven(data: Iterable[T], group: GroupLike = None) -> Uneven[T]:
    """Loop over data of which ranks may have unequally many; all leave the loop together.

    A rank whose data have ended answers the collectives of the others, as in ``Join``, until none
    has data. A loop that may break off is written with a context, where a break ends this rank's
    data alone: ``with md.uneven(batches, group) as mine: for batch in mine: ...``.

    Args:
        data: this rank's, for example a loader.
        group: whose members leave together: a ProcessGroup, a mesh, or None for the world.

    Returns:
        An iterable of ``data``, and a context.

    Cost: as that of ``Join``.

    Raises:
        KindError: the data cannot be looped over. ArgumentError: inside a join context.
        JoinError: as ``Join``.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     sums = []
        ...     for x in md.uneven(range(1 + md.get_rank())):
        ...         total = torch.tensor([x + 1])
        ...         md.all_reduce(total)
        ...         sums.append(total.item())
        ...     return sums
        >>> md.simulate(program, 2)
        [[2], [2, 2]]
    """
    return Uneven(data, group)
