"""Hooks on parameters, which autograd calls when a gradient is in ``.grad``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import optree
import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..bootstrap.world import World, get_world
from ..runtime.untraced import untraced
from .bucket_list import AnyBucket
from .graph_tasks import current_task
from .history import History

__all__ = [
    "GradientHooks",
    "GradientTaker",
    "Hook",
    "RunningBackward",
    "find_reducing_world",
    "moved",
    "tensors_in",
]


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts, dataclasses and RRefs of this process."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for entry in tree:
            yield from tensors_in(entry)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))
    elif type(tree).__name__ == "PyRRef" and tree.is_owner():  # type: ignore[attr-defined]
        yield from tensors_in(tree.local_value())  # type: ignore[attr-defined]


def moved(tree: Any, device: torch.device) -> Any:
    """``tree`` with its tensors on ``device``."""
    return optree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        tree,
        none_is_leaf=True,
    )


Hook: TypeAlias = Callable[[torch.Tensor], None]

_reduced_parameters = WeakIdKeyDictionary()  # a mark on the parameter would be pickled with it


def find_reducing_world(parameter: torch.Tensor) -> World | None:
    """The world in which a Reducer averages the gradient of ``parameter``, if one does."""
    return _reduced_parameters.get(parameter)  # type: ignore[no-any-return]


class RunningBackward(Protocol):
    """The part of a backward that hooks read and write."""

    task: int
    """The number that autograd has given it."""
    is_open: bool
    """Whether a gradient has come."""
    late: list[int]
    """The parameters whose gradient came after its bucket had gone."""


class GradientTaker(Protocol):
    """The reducer, as hooks see it: told of gradients."""

    @property
    def backward(self) -> RunningBackward | None:
        """The backward that has reached the model's outputs and has not ended."""

    def takes(self, index: int, hook: Hook, parameter: torch.Tensor) -> RunningBackward | None:
        """The backward for which a gradient counts that did not come in its task itself.

        If it may count later, ``hook`` is called with it again.
        """

    def open(self, backward: RunningBackward) -> None:
        """The first gradient has come."""

    def start_full_buckets(self) -> None:
        """A bucket has all that is expected."""


class GradientHooks:
    """The hooks of one reducer, which count ``arrivals`` and tell ``taker``."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], arrivals: History, taker: GradientTaker
    ) -> None:
        self._parameters = parameters
        self._arrivals = arrivals
        self._taker = taker
        self._handles: list[tuple[torch.nn.Parameter, RemovableHandle]] = []

    def put(self, buckets: Sequence[AnyBucket]) -> None:
        """Put hooks on the parameters of buckets that expect them, in place of all others."""
        self.close()
        for parameter in self._parameters:
            _reduced_parameters[parameter] = get_world()
        for bucket in buckets:
            for slot, is_hooked in enumerate(bucket.is_hooked):
                if is_hooked:
                    self._put_one(bucket, slot)

    def put_all(self, buckets: Sequence[AnyBucket]) -> None:
        """Put hooks on the other parameters, too."""
        for bucket in buckets:
            bare = [slot for slot, is_hooked in enumerate(bucket.is_hooked) if not is_hooked]
            if bare:
                bucket.hook_all()
            for slot in bare:
                self._put_one(bucket, slot)

    def come_last(self, buckets: Sequence[AnyBucket]) -> None:
        """Run behind hooks that the program has put on parameters since: they may change gradients.

        Call it between backwards.
        """
        for parameter, handle in self._handles:
            if next(reversed(parameter._post_accumulate_grad_hooks or {}), None) != handle.id:
                self.put(buckets)
                return

    def close(self) -> None:
        """Take the hooks off."""
        for _, handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters:
            _reduced_parameters.pop(parameter, None)

    def _put_one(self, bucket: AnyBucket, slot: int) -> None:
        index, member = bucket.indices[slot], bucket.members[slot]
        if self._arrivals.is_learned:
            hook = self._counting(index, bucket, slot)
        else:
            hook = self._watching(index, bucket)
        is_trained = member.requires_grad  # else it may be again, and keeps its hook meanwhile
        member.requires_grad_(True)
        self._handles.append((member, member.register_post_accumulate_grad_hook(hook)))
        member.requires_grad_(is_trained)

    def _watching(self, index: int, bucket: AnyBucket) -> Hook:
        """A hook that learns what comes."""
        taker, arrivals, streams = self._taker, self._arrivals, bucket.streams

        @untraced
        def gradient_is_watched(parameter: torch.Tensor) -> None:
            backward = taker.backward
            if backward is None or current_task() != backward.task:
                backward = taker.takes(index, gradient_is_watched, parameter)
                if backward is None:
                    return
            if parameter.grad is None:
                arrivals.by_count.add(index)
            if not backward.is_open:
                taker.open(backward)
            if streams is not None:
                streams.note()
            arrivals.note_first(index)

        return gradient_is_watched

    def _counting(self, index: int, bucket: AnyBucket, slot: int) -> Hook:
        """A hook that knows what is expected; it does as little as it can."""
        taker, arrivals, streams = self._taker, self._arrivals, bucket.streams
        counts = arrivals.counts
        goes_at_once = bucket.at_once[slot]

        @untraced
        def gradient_came(parameter: torch.Tensor) -> None:
            backward = taker.backward
            if backward is None or current_task() != backward.task:
                backward = taker.takes(index, gradient_came, parameter)
                if backward is None:
                    return
            if not backward.is_open:
                taker.open(backward)
            if parameter.grad is None:  # a backward of its own has left it undefined
                arrivals.by_count.add(index)
            counts[index] += 1
            if streams is not None:
                streams.note()
            more = counts[index] - arrivals.expected[index]
            if more < 0:
                return
            if bucket.work is not None or slot in bucket.taken:
                backward.late.append(index)
                return
            if goes_at_once:
                bucket.move_in(slot)
            if more == 0:
                bucket.num_pending -= 1
                if not bucket.num_pending:
                    taker.start_full_buckets()

        return gradient_came
