"""The world: all ranks of one job, and which world is in force here.

A process has at most one world, seen by all its threads (data loaders and autograd included).
A simulated rank overrides it for its own thread through a context variable. There is no other
state.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as torch_distributed
from torch.distributed import Store, distributed_c10d

from ..errors import GroupClosedError, NotInitializedError, WorldError
from ..runtime.hosts import handled_here, num_forks
from .launch_environment import find_place, find_stray, ways_to_start
from .schedulers import find_engine
from .timeout_store import TimeoutStore

__all__ = [
    "World",
]


T = TypeVar("T")
_MOST_KEPT = 4096


class Caches:
    """Objects that other modules keep for a mesh, or for a world, found by type and key."""

    def __init__(self) -> None:
        self.kept: defaultdict[type, dict[Hashable, Any]] = defaultdict(dict)

    def find(self, kind: type[T], key: Hashable) -> T | None:
        """Return the object stored under a type and a key, or None."""
        try:
            found: T | None = self.kept[kind].get(key)
        except TypeError:  # no hash: what is made with such a key rejects it in better words
            return None
        return found

    def keep(self, kind: type[T], key: Hashable, value: T) -> T:
        """Store ``value`` by ``kind`` and ``key``, emptying a full cache; return ``value``."""
        kept = self.kept[kind]
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        kept[key] = value
        return value

    def of(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the only object of type ``kind``, made by ``make`` or ``kind()`` at first use."""
        found = self.find(kind, None)
        return self.keep(kind, None, (make or kind)()) if found is None else found


class Closable(Protocol):
    """An object that modules above keep in a world: the registry, or the group of all ranks."""

    def close(self) -> None:
        """End this rank's part in the object."""


@dataclass(eq=False)
class World:
    """All ranks of one job, as one of them sees it.

    Args:
        rank: this rank, from 0.
        size: how many ranks there are.
        store: the store that all ranks share, its keys private to this world.
        given_torch_store: as ``make_torch_store``; None lets it return ``store``.
        handle: makes the requests to the store; None for simulated ranks.
        server: the rank whose process serves the store; None where no rank does.
        backends: the backend that serves each device type, for example ``{"cpu": "gloo"}``.
        timeout: how long a collective may wait; None takes the backend's default.
        local_rank: this rank among those of its host.
        local_size: how many ranks its host has.
        hosts: the number of each rank's host, counted by first appearance; () for one host.
        origin: how the world came to be, for messages ("env://", "simulated", ...).
        options: what the caller gave for the backend (torch's options classes), or None.
        device: the device bound to this rank, or None.
    """

    rank: int
    size: int
    store: Store
    backends: dict[str, str]
    timeout: timedelta | None = None
    local_rank: int = 0
    local_size: int = 1
    hosts: tuple[int, ...] = ()
    origin: str = "env://"
    options: Any = None
    device: Any = None
    given_torch_store: Callable[[], Store] | None = None
    handle: TimeoutStore | None = None
    server: int | None = None
    chooses_backends: bool = False
    """Whether no backend was named, so that another may serve where the best cannot."""
    compared: dict[str, str] | None = None
    """The gradients of simulated ranks to compare, which share them; else None."""
    num_compared: Counter[Any] = field(default_factory=Counter, init=False, repr=False)
    """How many gradients this rank, a process, has compared, by call, shape and dtype."""
    process_id: int = field(default_factory=os.getpid, init=False)
    thread_id: int = field(default_factory=threading.get_ident, init=False)
    is_closed: bool = field(default=False, init=False)
    find_adopted: Callable[[], Store | None] | None = None
    """Returns the store of torch.distributed's world as long as it lives, where it was adopted."""
    handled_before: int = field(default_factory=handled_here, init=False, repr=False)
    """The exception in whose handler this world was made, which does not end it."""
    is_adopted: bool = field(default=False, init=False)
    """Whether init_process_group was called in this world of simulated ranks."""
    first_touch: str = field(default="", init=False)
    """The site of the collective or mesh that made this world; "" where init_process_group did, or
    has taken it over."""
    closers: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)
    """Called in reverse order when the world closes."""
    kept: list[object] = field(default_factory=list, init=False, repr=False)
    """The stores under ``store``, which a PrefixStore does not keep alive by itself."""
    axis_layouts: dict[str, set[Any]] = field(default_factory=dict, init=False, repr=False)
    """Of all meshes that this rank has made in it, the layouts that have an axis of this name."""
    open_layouts: Counter[Any] = field(default_factory=Counter, init=False, repr=False)
    """How many meshes of each layout this rank has made with open groups, and not closed."""
    averaged: set[frozenset[int]] = field(default_factory=set, init=False, repr=False)
    """The sets of ranks over which wrappers of this rank average gradients."""
    complete: tuple[int, tuple[int, ...], str] = field(default=(-1, (), ""), init=False, repr=False)
    """The last backward that came to a complete loss, its ranks and place: ``linear_function``."""
    latest_control_message: int = field(default=0, init=False, repr=False)
    """The last signal's number that this rank has seen or posted (``groups.control_messages``)."""
    registry: Closable | None = field(default=None, init=False, repr=False)
    """This rank's communicators (``groups.communicators``), made at first use."""
    group: Closable | None = field(default=None, init=False, repr=False)
    """The group of all ranks (``groups.process_group``), made at first use."""
    saves: Any = field(default=None, init=False, repr=False)
    """The checkpoints that threads of this rank write (``checkpoint.pending_saves``)."""
    _num_forks: int = field(default_factory=num_forks, init=False, repr=False)
    _counts: Counter[Hashable] = field(default_factory=Counter, init=False, repr=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.hosts = self.hosts or (0,) * self.size

    def note_mesh(self, layout: Any, *, is_open: bool) -> None:
        """Note the layout of a mesh that this rank has made."""
        for axis in layout.names or ():
            self.axis_layouts.setdefault(axis, set()).add(layout)
        self.open_layouts[layout] += is_open

    @property
    def is_orphan(self) -> bool:
        """Return whether torch.distributed has ended the world of which this was adopted."""
        if self.find_adopted is None:
            return False
        is_there = torch_distributed.is_initialized()
        return not is_there or self.find_adopted() is not distributed_c10d._get_default_store()

    @property
    def is_one_host(self) -> bool:
        """Return whether all ranks run on one host."""
        return len(set(self.hosts)) == 1

    @property
    def has_processes(self) -> bool:
        """Return whether other ranks are other processes."""
        return self.size > 1 and not self.is_simulated

    @property
    def is_simulated(self) -> bool:
        """Return whether its ranks are simulated, all in this process."""
        return self.origin == "simulated"

    def make_torch_store(self) -> Store:
        """Return the store on a connection of its own, for torch's classes, which have threads."""
        return self.store if self.given_torch_store is None else self.given_torch_store()

    def num_here(self, ranks: tuple[int, ...]) -> int:
        """Return how many of ``ranks`` run on this rank's host."""
        return sum(self.hosts[rank] == self.hosts[self.rank] for rank in ranks)

    def spans_hosts(self, ranks: tuple[int, ...]) -> bool:
        """Return whether some of ``ranks`` run on different hosts."""
        return len({self.hosts[rank] for rank in ranks}) > 1

    def next_number(self, call: Hashable) -> int:
        """Return 1, 2, 3, ...: how often this rank has come to ``call``, now included.

        Ranks that come to equal calls in the same order get equal numbers.
        """
        with self._counting:
            self._counts[call] += 1
            return self._counts[call]

    def check_usable(self) -> None:
        """Raise unless this process owns the world and it is still open."""
        if self._num_forks != num_forks():
            raise WorldError(
                "a forked child cannot communicate in its parent's world",
                where=f"process {os.getpid()}, forked from rank {self.rank} "
                f"(process {self.process_id})",
                expected="collectives in the process that called init_process_group",
                fix="start the child with the start method 'spawn', or let it only read "
                "get_rank() and get_world_size()",
            )
        if self.is_closed and self.is_simulated and _of_context.get() is None:
            raise GroupClosedError(
                "the simulated ranks of this world have ended: simulate has returned",
                where=f"rank {self.rank} of {self.size}",
                expected="calls that communicate inside of the function that simulate calls",
                fix="communicate there, and return the whole, x.reshard(md.P()). What "
                "a rank held can still be read: x.local, x.shape, x.sharding, x.visualize()",
            )
        if self.is_closed:
            raise GroupClosedError(
                "the world was closed",
                where=f"rank {self.rank} of {self.size}",
                fix="call init_process_group again before the next collective",
            )

    def close(self) -> None:
        """Run the closers, last first; a second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        failures: list[BaseException] = []
        while self.closers:
            try:
                self.closers.pop()()
            except Exception as failure:  # every closer runs, the first failure is raised
                failures.append(failure)
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # else this frame would hold the failure, which holds this frame

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        remove_world(self)


_of_process: list[World | None] = [None]
_group_of_process: list[Closable | None] = [None]
"""The group of all ranks of that world, once it is made."""
_forks_at_world: int | None = None
"""``num_forks()`` as this process got its last world; None, or another number, before its first."""
_join: Callable[[], None] | None = None
"""Makes the world of this process at its first touch; given by the module that can."""
_of_context: ContextVar[World | None] = ContextVar("meshdist_world", default=None)
_used_contexts: list[ContextVar[World | None]] = []
"""``_of_context``, once any thread has a world of its own: till then no call need ask it."""


def live_lists_of_worlds() -> tuple[list[ContextVar[World | None]], list[Closable | None]]:
    """Return, as live lists, the worlds' ContextVar, if used, and the process's group."""
    return _used_contexts, _group_of_process


def give_group(world: World, group: Closable) -> None:
    """Set the group of all ranks of ``world``."""
    world.group = group
    if _of_process[0] is world:
        _group_of_process[0] = group


def find_world() -> World | None:
    """Return the world in force, or None."""
    return _of_context.get() or _of_process[0]


def get_world() -> World:
    """Return the world in force; raise NotInitializedError where there is none."""
    world = _of_context.get() or _of_process[0]
    if world is None or world.is_closed:
        raise _no_world()
    return world


def _no_world() -> NotInitializedError:
    expected, found = "init_process_group(...) before this call", ""
    if _is_past_first_touch():
        found = "the world of this process was closed"
        fix = "call init_process_group() again before the next collective"
    elif torch_distributed.is_initialized():
        found = "a world of torch.distributed, which no collective adopts by itself"
        fix = "call meshdist.init_process_group() on every rank of it, which adopts that world"
    elif find_place(os.environ) is not None:
        found = "a process that a launcher started, and that has not joined the others yet"
        fix = (
            "call init_process_group() before, or a collective, or make a mesh: each of them joins"
        )
    elif (engine := find_engine(os.environ)) is not None:
        found = f"a worker of {engine.name}, which tells it no rank"
        fix = engine.fix
    else:
        expected = (
            "a launcher, whose processes join at their first collective or mesh; or " + expected
        )
        command, fix = ways_to_start()[0], "call it under meshdist.simulate(fn, 4)"
        if command.startswith("meshdist run"):
            fix = f"start the program with `{command}`, or {fix}"
    return NotInitializedError(
        "there is no world: the process group has not been initialized",
        expected=expected,
        found=found or find_stray(os.environ) or "neither a world nor a launcher's variables",
        fix=fix,
    )


def _is_past_first_touch() -> bool:
    return _forks_at_world == num_forks()


def find_unjoined_place() -> tuple[int, int] | None:
    """Return the rank and size that this process will have; None once it joined, or if unknown."""
    if find_world() is not None or _is_past_first_touch():
        return None
    if torch_distributed.is_initialized():
        return torch_distributed.get_rank(), torch_distributed.get_world_size()
    return find_place(os.environ)


def join_by(join: Callable[[], None]) -> None:
    """Let ``join`` make the world at the first collective of a process that a launcher started."""
    global _join
    _join = join


def get_usable_world() -> World:
    """Return the world in force, open and owned by this process; a launched process joins here."""
    world = _of_context.get() or _of_process[0]
    if world is None or world.is_closed or world._num_forks != num_forks():
        if world is None and _join is not None:
            _join()
        world = get_world()
        world.check_usable()
    return world


def install_world(world: World) -> None:
    """Make ``world`` the process's world; raise WorldError where the process has a world."""
    global _forks_at_world
    former = _of_process[0]
    if former is not None:
        raise WorldError(
            "the process group is initialized already",
            where=f"rank {former.rank} of {former.size}, from {former.origin}",
            fix="call destroy_process_group() first, or remove the second init_process_group",
        )
    _of_process[0], _forks_at_world = world, num_forks()
    _group_of_process[0] = world.group


def remove_world(world: World) -> None:
    """Clear this process's world, if it is ``world``."""
    if _of_process[0] is world:
        _of_process[0] = _group_of_process[0] = None


def enter_world(world: World) -> None:
    """Put ``world`` in force for this thread (a simulated rank), in place of a closed world."""
    _used_contexts[:] = [_of_context]
    _of_context.set(world)


@contextmanager
def world_here(world: World | None) -> Iterator[None]:
    """Put ``world`` in force for this thread (a simulated rank) while the context lasts."""
    _used_contexts[:] = [_of_context]
    token = _of_context.set(world)
    try:
        yield
    finally:
        _of_context.reset(token)
