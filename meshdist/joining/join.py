"""Loops whose ranks have unequally many steps: ``Join`` around models, ``uneven`` without a model.

The interface is torch's (``torch.distributed.algorithms.join``). In place of hooks that repeat each
joinable's calls by hand, a rank without data answers every collective of the others by itself
(``joining/shadow``); hooks that do repeat them run as in torch.

torch's sharded optimizer has on each rank the state of a share of the parameters, and steps it;
then all ranks give each other their shares by torch's own group, whose calls no context sees. So a
notice goes before each step, and joined ranks take the step, too. Its gradients and numbers come
from a rank with data, as they are behind the backward: averaged, unscaled, clipped. Two ranks, of
which rank 1 has joined:

    rank 0: backward(), clip; step(): notice        | sends grad, lr | steps share 0 | gives it
    rank 1: answers the backward ... gets notice    | takes grad, lr | steps share 1 | gives it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.algorithms.join import Joinable as TorchJoinable

from ..checking.calls import Call
from ..collectives.flat_sums import broadcast_from
from ..collectives.objects import broadcast_object_list
from ..errors import ArgumentError, JoinError, KindError, LengthError
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group, world_group
from ..runtime.untraced import untraced
from ..wires.operations import DONE
from ..wires.prepared import PreparedCall
from ..wires.work import Work
from .shadow import Joinables, Shadow, find_shadow
from .statements import NOTICE

__all__ = ["Join", "JoinHook", "Joinable", "uneven"]


class JoinHook:
    """A joinable's part on a rank that has no data left. Both methods do nothing here."""

    def main_hook(self) -> None:
        """Call what the joinable calls in one step on ranks with data; once for each of theirs.

        Calls that it leaves out are answered without it.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Bring all ranks to one state, after the last has joined; runs on all of them.

        Args:
            is_last_joiner: whether this rank was among the last to join.
        """


class ReplicaHook(JoinHook, ABC):
    """A hook that follows, on a rank without data, its joinable's steps on other ranks."""

    @abstractmethod
    def begin(self, context: Any, joinable: Any) -> None:
        """Prepare this rank's joinable for a join context that begins, until ``end``.

        Args:
            context: the ``Join`` that begins.
            joinable: the object that made this hook.
        """

    @abstractmethod
    def end(self) -> None:
        """Undo ``begin`` as the context ends; post-hooks follow."""

    def take_part(self, action: str, have_data: Sequence[bool]) -> None:
        """Take part, on a rank without data, in the joinable's ``action``.

        Args:
            have_data: which ranks of the context have data.
        """


def is_sharded_optimizer(joinable: object) -> bool:
    """Return whether ``joinable`` is an optimizer that is a joinable of torch's."""
    return isinstance(joinable, TorchJoinable) and isinstance(joinable, torch.optim.Optimizer)


class JoinedOptimizer(ReplicaHook):
    """The hook of torch's ``ZeroRedundancyOptimizer`` that steps on joined ranks, too."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._has_joined = False
        self.ranks = get_process_group_ranks(optimizer.join_process_group)

    def begin(self, context: Any, joinable: Any) -> None:
        """Announce each of the optimizer's steps from now on to joined ranks."""
        self._context = context
        self._handle = joinable.register_step_pre_hook(self._begin_step)

    def end(self) -> None:
        """Remove the hook that announces the optimizer's steps to joined ranks."""
        self._handle.remove()

    def take_part(self, action: str, have_data: Sequence[bool]) -> None:
        """Send gradients to ranks without data, then step the optimizer here; collective."""
        self._share(have_data)
        self._has_joined = True
        self._optimizer.step()

    def _begin_step(self, optimizer: Any, args: Sequence[Any], given: dict[str, Any]) -> None:
        if self._has_joined:
            return
        if any(value is not None for value in [*args[1:], *given.values()]):
            raise JoinError(
                f"{type(optimizer).__name__}.step() was given arguments in a join context",
                where=f"rank {self._context.group.world.rank}",
                expected="a step that ranks without data can take, too",
                fix="run forward and backward before it, and call step() without a closure",
            )
        self._share(self._context.announce(optimizer, "step"))

    def _share(self, have_data: Sequence[bool]) -> None:
        """Broadcast gradients and parameter groups' options to ranks without data, if any."""
        if all(have_data):
            return
        group, source = self._context.group, have_data.index(True)
        groups = self._optimizer.param_groups
        parameters = [parameter for each in groups for parameter in each["params"]]
        said: list[Any] = [
            [parameter.grad is not None for parameter in parameters],
            [{name: of for name, of in each.items() if name != "params"} for each in groups],
        ]
        broadcast_object_list(said, group=group, group_src=source)
        if not have_data[group.rank()]:
            for each, numbers in zip(groups, said[1], strict=True):
                each.update(numbers)
            for parameter, has_gradient in zip(parameters, said[0], strict=True):
                if not has_gradient:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        broadcast_from(source, gradients, group)


T = TypeVar("T")


class Uneven(Generic[T]):
    """A context for a loop in which ranks may have unequally many steps."""

    def __init__(self, data: Iterable[T], group: GroupLike = None) -> None:
        if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            raise KindError(
                f"uneven() was given an object of type {type(data).__name__}",
                expected="an iterable, for example a loader",
                fix="a rank that has no data passes an empty list: uneven([])",
            )
        self._data = data
        target = resolve_group(group)
        self._new_shadow = partial(Shadow, target, target.first_device_type())
        self._group = target
        self._is_entered = False

    def __iter__(self) -> Iterator[T]:
        if self._is_entered:
            yield from self._data
            return
        self._begin()
        try:
            yield from self._data
        except BaseException as error:
            self._shadow.end(_broken_off() if isinstance(error, GeneratorExit) else error)
            raise
        self._shadow.leave()

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
        self._shadow.leave(error)

    @untraced
    def _begin(self) -> None:
        world = self._group.world
        if find_shadow(world) is not None:
            raise ArgumentError(
                "uneven() was called inside a join context",
                where=f"rank {world.rank}, {self._group.name}",
                expected="one join context at a time",
                fix="loop over the data themselves: the context around it answers the collectives",
            )
        self._shadow = self._new_shadow()
        self._shadow.begin()


def _broken_off() -> JoinError:
    return JoinError(
        "the loop over uneven(...) was left before its data had ended, by a break, a return or an "
        "exception",
        fix="where a loop may break off write: with uneven(...) as batches: for batch in "
        "batches: ...",
    )


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


_ITERATION = "iteration"


@dataclass(frozen=True)
class _JoinConfig:
    """A joinable's context (None outside), its place among the joinables, and its hook."""

    context: Join | None = None
    index: int = 0
    hook: JoinHook | None = None

    @property
    def enable(self) -> bool:
        """Return whether the joinable is in a context."""
        return self.context is not None

    @property
    def throw_on_early_termination(self) -> bool:
        """Return whether all ranks raise as soon as any rank has no data left."""
        return self.context is not None and self.context.is_strict

    @property
    def is_first_joinable(self) -> bool:
        """Return whether this is the context's first joinable, and its hook no ``ReplicaHook``."""
        is_first = self.context is not None and self.index == 0
        return is_first and not isinstance(self.hook, ReplicaHook)


_OUTSIDE = _JoinConfig()


class Joinable(ABC):
    """The base class of objects that can be given to ``Join``."""

    _join_config = _OUTSIDE

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for a context; ``kwargs`` are those given to ``Join``."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Return the device of tensors that the context itself sends."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """Return the group whose members leave the context together."""


class Join:
    """A context in which ranks may have unequally many steps; all of them leave it together.

    A rank that reaches the end of the context has *joined*. From then on it answers each collective
    of the others, on any group that it is in, with what changes nothing: the neutral element of a
    reduction (0, 1, the extremes, all bits), zeros where tensors are gathered or exchanged, None
    where objects are. After the last rank has joined each joinable's ``post_hook`` runs. All
    members of the groups that are used inside must be in a context, and the groups open before it.

    Args:
        joinables: of one group and device, for example models wrapped in ``DDP``, and torch's
            ``ZeroRedundancyOptimizer`` of their parameters. On ranks that have joined their hooks
            run in this order.
        enable: False makes the context do nothing.
        throw_on_early_termination: let all ranks raise as soon as any rank has no data left.
        kwargs: given to each joinable's ``join_hook``.

    Cost: in the context each collective is announced, in shared memory on one host, else by a small
        all-gather before it; the fast path is off. Nothing outside.

    Raises:
        KindError: what was given is no list of joinables.
        ArgumentError: no joinable, or several groups or devices; a context inside another.
        JoinError: a rank has no data left, and ``throw_on_early_termination``; a broadcast or
            scatter from such a rank, a message to or from it, or a group or mesh made with it; a
            member has left by an exception.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     model = md.DDP(torch.nn.Linear(1, 1, bias=False), device_mesh=mesh["dp"])
        ...     with dist.Join([model]):
        ...         for _ in range(1 + md.get_rank()):  # rank 1 has one step more
        ...             model.zero_grad()
        ...             model(torch.ones(1, 1)).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> md.simulate(program, 2)
        [1.0, 0.5]
    """

    def __init__(
        self,
        joinables: list[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(joinables, Iterable):
            raise KindError(
                f"Join was given an object of type {type(joinables).__name__}",
                expected="a list of joinables",
                fix="pass a list: Join([model]); or write model.join()",
            )
        self._joinables = list(joinables)
        if not self._joinables:
            raise LengthError(
                "Join needs at least one joinable",
                found="an empty list",
                fix="pass the models: Join([model]); for a loop without one use uneven()",
            )
        strange = [x for x in self._joinables if not hasattr(x, "join_hook")]
        if strange:
            raise KindError(
                f"Join was given an object of type {type(strange[0]).__name__}",
                expected="joinables: models wrapped in DDP, or what derives from Joinable",
                fix="wrap the model: Join([DDP(module)]); for a loop without one use uneven()",
            )
        self._enable = enable
        self.is_strict = throw_on_early_termination
        self._hooks: list[JoinHook] = [
            JoinedOptimizer(x) if is_sharded_optimizer(x) else x.join_hook(**kwargs)
            for x in self._joinables
        ]
        self.group, device = self._find_group()
        part = Joinables(
            self.handle,
            self.is_strict,
            not all(isinstance(hook, ReplicaHook) for hook in self._hooks),
            [x for x in self._joinables if is_sharded_optimizer(x)],
        )
        self._new_shadow = partial(Shadow, self.group, device.type, part)

    def __enter__(self) -> None:
        if not self._enable:
            return
        shadow = self._new_shadow()
        shadow.begin()
        self._shadow = shadow
        for index, (joinable, hook) in enumerate(zip(self._joinables, self._hooks, strict=True)):
            joinable._join_config = _JoinConfig(self, index, hook)
            if isinstance(hook, ReplicaHook):
                hook.begin(self, joinable)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        is_last = self._leave(error)
        if error is None:
            for hook in self._hooks:
                hook.post_hook(is_last)

    def _leave(self, error: BaseException | None) -> bool:
        """Join, unless there is an error; return whether this rank was among the last."""
        try:
            return self._shadow.leave(error)
        finally:
            for joinable, hook in zip(self._joinables, self._hooks, strict=True):
                joinable._join_config = _OUTSIDE
                if isinstance(hook, ReplicaHook):
                    hook.end()

    def handle(self, call: Call, have_data: Sequence[bool]) -> None:
        """Take part in a notice of a joinable, or in a call that it owns, on a joined rank."""
        index, action = call.owner.split(":", 1)
        own = self._hooks[int(index)]
        hooks = self._hooks
        if isinstance(own, ReplicaHook) and action != _ITERATION:
            own.take_part(action, have_data)
            hooks = hooks[1:]
        if call.verb == NOTICE and int(index) == 0:
            for hook in hooks:
                hook.main_hook()

    def announce(self, joinable: Joinable, action: str) -> list[bool]:
        """Give notice that ``joinable`` begins ``action``; return which members have data.

        Its hook takes part on joined ranks.
        """
        return self._shadow.announce(f"{joinable._join_config.index}:{action}")

    def owned_by(self, joinable: Joinable, action: str) -> Any:
        """Return a context for calls of ``joinable``, in which its hook takes part elsewhere."""
        return self._shadow.owned_by(f"{joinable._join_config.index}:{action}")

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Say that this rank begins a step; a joinable calls it before its first collective.

        Only the first of the joinables says so. Elsewhere, and outside of a context, nothing is
        done.

        Returns:
            A Work that is done, whose result is the number of ranks that have not joined; None
            where nothing was done.

        Raises:
            JoinError: a rank has joined, and ``throw_on_early_termination``.
        """
        config = joinable._join_config
        context = config.context
        if context is None or not config.is_first_joinable:
            return None
        have_data = context.announce(joinable, _ITERATION)
        count = torch.tensor([float(sum(have_data))], device=joinable.join_device)
        channel = context.group.open_channel(count.device.type)
        done = PreparedCall("notify_join_context", "barrier", (), ())
        done.operation, done.result = DONE, [count]
        return channel.work(done)

    def _find_group(self) -> tuple[ProcessGroup, torch.device]:
        """Return the group and device that all joinables share, or raise."""
        groups: list[Any] = [
            resolve_group(joinable.join_process_group)
            for joinable in self._joinables
            if not is_sharded_optimizer(joinable)
        ] or [world_group()]
        for hook in self._hooks:
            if isinstance(hook, JoinedOptimizer) and hook.ranks != list(groups[0].ranks):
                groups.append(f"torch's group of ranks {hook.ranks}")
        devices = [torch.device(joinable.join_device) for joinable in self._joinables]
        for what, found in (("groups", groups), ("devices", devices)):
            different = [other for other in found if other != found[0]]
            if different:
                shown = [str(getattr(each, "name", each)) for each in (found[0], different[0])]
                raise ArgumentError(
                    f"Join was given joinables of different {what}",
                    expected=f"one of the {what} for all joinables of a context",
                    found=" and ".join(shown),
                    fix="let each group's joinables have a loop of their own",
                )
        return groups[0], devices[0]
