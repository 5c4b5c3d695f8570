"""Implement torch's Join: ranks out of data shadow the other ranks' collectives.

Each step begins with an exchange of flags on the joinables' group: a rank with data sends 1
(``notify_join_context``), a joined rank sends 0. Then the joined rank's hooks make the same calls
as the other ranks' joinables. Two ranks; rank 0 joins first:

    rank 0:  flag 1 | forward, buckets | flag 0 | main_hook: buckets of zeros | flag 0 | post_hook
    rank 1:  flag 1 | forward, buckets | flag 1 | forward, buckets            | flag 0 | post_hook

If a rank makes a call that no hook makes, the group's comparison of calls detects it, between hosts
before data moves. If the call is on another group, a thread of the joined rank detects it and
aborts both groups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..backends.work import Work
from ..error_text import ranks_text
from ..errors import (
    AbortedError,
    ArgumentError,
    BackendError,
    DeadlockError,
    JoinError,
    KindError,
    LengthError,
    MismatchError,
    StoreError,
)
from ..groups.communicators import get_registry
from ..groups.control_messages import ask
from ..groups.process_group import ProcessGroup, resolve_group
from ..runtime.timeout_calls import begin_elsewhere
from .step_flags import Flags

__all__ = ["Join", "JoinHook", "Joinable"]

FLAGS = "md.Join (which ranks have data)"
"""The operation name of the exchange of flags, which errors of other calls show."""
_UNSERVED = "a rank that joined does not make this call"
_LOOK_S = 2.0
_SURE_S = 0.5


class JoinConfig(NamedTuple):
    """The state of a joinable; torch's joinables read the first three fields."""

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    context: Join | None = None


OUTSIDE = JoinConfig()


def config_of(joinable: object) -> Any:
    """Return the JoinConfig of ``joinable``; outside a context it may be torch's."""
    return getattr(joinable, "_join_config", OUTSIDE)


def _is_of_torch(joinable: object) -> bool:
    """Return whether ``joinable`` is torch's sharded optimizer, which uses torch's group."""
    return isinstance(joinable, Joinable) and isinstance(joinable, torch.optim.Optimizer)


class Join:
    """Let ranks run unequal numbers of steps; all leave the context together.

    A rank that leaves the loop *joins*: until every rank has joined, it runs each joinable's
    ``main_hook`` once per step of the other ranks, and shadows their collectives. Then all run each
    ``post_hook``. Once a rank has joined, collectives that no hook makes raise ``JoinError``: use
    ``md.uneven`` for such loops.

    Args:
        joinables: objects that share a group and device, for example ``DDP`` models. Hooks run in
            this order, but for torch's ``ZeroRedundancyOptimizer`` last.
        enable: False turns the context off.
        throw_on_early_termination: raise on all ranks when any rank runs out of data.
        kwargs: passed to each ``join_hook``.

    Cost: one all-reduce of 4 bytes per rank before each step. Across hosts, also a small all-gather
        before each collective of the group.

    Raises:
        KindError: ``joinables`` is not a list, or contains other objects.
        ArgumentError: no joinable, different groups or devices, or a joinable in another context.
        JoinError: a rank called a collective that no hook makes, or ran out of data, with
            ``throw_on_early_termination``.

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
        [0.5, 0.5]
    """

    def __init__(
        self,
        joinables: list[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(joinables, Iterable):
            raise KindError(
                f"Join cannot use an object of type {type(joinables).__name__}",
                expected="a list of joinables",
                fix="pass a list: Join([model]), or write model.join()",
            )
        self._joinables = sorted(joinables, key=_is_of_torch)
        strange = [x for x in self._joinables if not hasattr(x, "join_hook")]
        if strange:
            raise KindError(
                f"Join cannot use an object of type {type(strange[0]).__name__}",
                expected="joinables: models wrapped in DDP, or subclasses of Joinable",
                fix="wrap the model: Join([DDP(module)]); for other loops use md.uneven",
            )
        if all(map(_is_of_torch, self._joinables)):
            raise LengthError(
                "Join needs at least one joinable that uses a group of meshdist",
                found=", ".join(type(x).__name__ for x in self._joinables) or "an empty list",
                fix="pass the model, too: Join([model, optimizer]); for other loops use md.uneven",
            )
        self._enable = enable
        self._is_strict = throw_on_early_termination
        self._hooks = [x.join_hook(**kwargs) for x in self._joinables]
        self._group, self._device = self._find_group()

    def __enter__(self) -> None:
        if not self._enable:
            return
        if any(config_of(x).enable for x in self._joinables):
            raise ArgumentError(
                "a joinable cannot be in two join contexts",
                where=f"rank {self._group.world.rank}, {self._group.name}",
                expected="one join context at a time",
                fix="pass all joinables to one context: Join([first, second])",
            )
        self._active = [1] * self._group.size()  # the flags of the last exchange
        self._opened = self._group.open_device_group(self._device.type).opened
        self._opened.compares_first = self._opened.spans_hosts
        for index, joinable in enumerate(self._joinables):
            joinable._join_config = JoinConfig(True, self._is_strict, index == 0, self)
        self._watched = register_optimizer_step_pre_hook(self._reject_unknown_step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._enable:
            return
        self._watched.remove()
        for joinable in self._joinables:
            joinable._join_config = OUTSIDE
        failure = error
        if error is None:
            try:
                self._join()
                self._opened.compares_first = False
            except BackendError as raised:
                failure = raised
        if self._is_unserved(failure):
            raise JoinError(
                f"{_UNSERVED}, because no joinable of the context has a hook for it",
                where=f"rank {self._group.world.rank}, {self._group.name}",
                expected="calls of the joinables only, while some ranks are out of data",
                found=getattr(failure, "found", None),
                fix="loop over md.uneven(loader, mesh) without Join; or make the call in main_hook",
            ) from failure
        if failure is not error and failure is not None:
            raise failure

    @staticmethod
    def notify_join_context(joinable: Any) -> Work | None:
        """Announce a step; a joinable calls it before the step's first collective.

        Only the first joinable of a context announces.

        Returns:
            A finished Work, or None if it did not announce.

        Raises:
            JoinError: a rank ran out of data, with ``throw_on_early_termination``.
        """
        config = config_of(joinable)
        context: Join | None = getattr(config, "context", None)  # torch's own has none
        if context is None or not config.is_first_joinable:
            return None
        return context._exchange(1).work

    def _exchange(self, flag: int) -> Flags:
        """Exchange flags with all ranks; raise if some joined and the context is strict."""
        flags = Flags(flag, self._group, self._device, FLAGS)
        self._active = flags.wait()
        ranks = self._group.ranks
        joined = [rank for rank, is_on in zip(ranks, self._active, strict=True) if not is_on]
        if self._is_strict and 0 < len(joined) < len(ranks):
            self._opened.compares_first = False
            raise JoinError(
                f"{ranks_text(joined)} ran out of data before the other ranks",
                where=f"rank {self._group.world.rank}, {self._group.name}",
                expected="the same number of steps on every rank, because "
                "throw_on_early_termination=True",
                fix="give every rank the same number of batches, or drop the argument",
            )
        return flags

    def _join(self) -> None:
        """Shadow the others until all ranks have joined, then run the post-hooks."""
        is_over, is_last = threading.Event(), True
        if self._group.world.has_processes and self._group.size() > 1:
            begin_elsewhere(partial(self._watch, is_over))
        try:
            while self._exchange(0) and any(self._active):
                is_last = False
                for hook in self._hooks:
                    hook.main_hook()
        finally:
            is_over.set()
        for hook in self._hooks:
            hook.post_hook(is_last)

    # -- calls that no hook makes -----------------------------------------------------------------

    def _is_unserved(self, error: BaseException | None) -> bool:
        """Return whether a call that joined ranks do not make caused ``error``."""
        if isinstance(error, AbortedError):
            return _UNSERVED in str(error)
        if not isinstance(error, (MismatchError, DeadlockError)):
            return False
        has_exited = ": returned" in str(error)  # a rank that waits in no call
        return not has_exited and (0 in self._active or FLAGS in str(error))

    def _reject_unknown_step(self, optimizer: Any, *_: object) -> None:
        """Raise on all ranks if a sharded optimizer outside this context makes a step."""
        # It uses torch's group, whose calls are not compared with the calls of this context.
        if _is_of_torch(optimizer) and optimizer not in self._joinables:
            self._abort(f"{type(optimizer).__name__}.step() on rank {self._group.world.rank}")
            raise JoinError(
                f"{type(optimizer).__name__} is not in the join context in which it steps",
                where=f"rank {self._group.world.rank}, {self._group.name}",
                expected="an optimizer that takes part in the context",
                fix="pass the optimizer, too: Join([model, optimizer])",
            )

    def _abort(self, call: str, *labels: str) -> None:
        """Abort the group of the context, and communicators ``labels``, because of ``call``."""
        message = {"reason": f"{_UNSERVED}: {call}", "group": self._group.name}
        get_registry(self._group.world).abort([self._opened.label, *labels], message)

    def _watch(self, is_over: threading.Event) -> None:
        """Look for stuck ranks until ``is_over``, less often as a call lasts."""
        registry, known, pause_s = get_registry(self._group.world), None, _LOOK_S
        while not is_over.wait(pause_s):
            calls = registry.answer({})["calls"][-1:]
            if is_same := calls == known:
                with suppress(StoreError):
                    stuck = self._find_stuck()
                    # The rank may have continued since it answered.
                    is_sure = stuck and not is_over.wait(_SURE_S)
                    if is_sure and registry.answer({})["calls"][-1:] == calls:
                        self._abort(*stuck)
            known, pause_s = calls, 2 * pause_s if is_same else _LOOK_S

    def _find_stuck(self) -> tuple[str, ...]:
        """Return the call and group of a rank that waits for this rank on another group, or ()."""
        # Rank 0 waits in call 5 on 'tp', of which this rank has made 4. This rank waits on 'dp',
        # the context's group, for rank 0.
        registry, mine = get_registry(self._group.world), self._opened.label
        here = {each.label: each.recorder.sequence for each in registry.all_opened()}
        others = [rank for rank in self._group.ranks if rank != self._group.world.rank]
        for rank, answer in ask(self._group.world, tuple(others)).items():
            call = None if answer["now"] or not answer["calls"] else answer["calls"][-1]
            if call is None or call["label"] not in here or call["label"] == mine:
                continue
            if call["sequence"] > here[call["label"]]:
                return f"rank {rank} waits in {call['text']}", call["label"]
        return ()

    def _find_group(self) -> tuple[ProcessGroup, torch.device]:
        """Return the group and device that all joinables share, or raise."""
        first = self._joinables[0]
        group = resolve_group(first.join_process_group)
        found: dict[str, list[Any]] = {"groups": [group.name], "devices": []}
        for joinable in self._joinables:
            found["devices"].append(torch.device(joinable.join_device))
            if not _is_of_torch(joinable):
                found["groups"].append(resolve_group(joinable.join_process_group).name)
            elif (ranks := get_process_group_ranks(joinable.join_process_group)) != [*group.ranks]:
                found["groups"].append(f"torch's group of ranks {ranks}")
        for what, values in found.items():
            if len(different := list(dict.fromkeys(map(str, values)))) > 1:
                raise ArgumentError(
                    f"Join cannot use joinables of different {what}",
                    expected=f"one of the {what} for all joinables of a context",
                    found=" and ".join(different),
                    fix="use one context for each group",
                )
        return group, found["devices"][0]
