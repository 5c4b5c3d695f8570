"""Hold the current world, which is the set of all ranks of a job.

A process has at most one world, shared by all its threads (including data loaders and autograd). A
simulated rank overrides it for its thread with a context variable.
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
from weakref import WeakValueDictionary

import torch.distributed as torch_distributed
from torch.distributed import Store, distributed_c10d

from ..errors import GroupClosedError, NotInitializedError, WorldError
from ..runtime.hosts import handled_here, num_forks
from .launch_environment import find_rank_and_size, find_stray, start_commands
from .schedulers import find_scheduler
from .timeout_store import TimeoutStore

__all__ = [
    "World",
]


T = TypeVar("T")
_MAX_ENTRIES = 4096


class Caches:
    """Cache of objects that other modules attach to a mesh or a world, by type and key."""

    def __init__(self) -> None:
        self.entries: defaultdict[type, dict[Hashable, Any]] = defaultdict(dict)

    def find(self, kind: type[T], key: Hashable) -> T | None:
        try:
            found: T | None = self.entries[kind].get(key)
        except TypeError:  # not hashable: the constructor raises a better error
            return None
        return found

    def keep(self, kind: type[T], key: Hashable, value: T) -> T:
        """Store ``value`` under ``kind`` and ``key``, clearing a full cache; return ``value``."""
        entries = self.entries[kind]
        if len(entries) >= _MAX_ENTRIES:
            entries.clear()
        entries[key] = value
        return value

    def of(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the only object of type ``kind``; create it with ``make`` if needed."""
        found = self.find(kind, None)
        return self.keep(kind, None, (make or kind)()) if found is None else found


class Closable(Protocol):
    """An object that higher modules attach to a world: its registry or group of all ranks."""

    def close(self) -> None:
        """Close the object on this rank."""


@dataclass(eq=False)
class World:
    """All ranks of one job, seen from one rank.

    Args:
        store: the store that all ranks share, with keys private to this world.
        given_torch_store: the implementation of ``make_torch_store``; None returns ``store``.
        handle: makes the requests to the store; None for simulated ranks.
        server: the rank that hosts the store; None if no rank does.
        backends: the backend of each device type, for example ``{"cpu": "gloo"}``.
        timeout: the timeout of collectives; None uses the backend's default.
        local_rank: this rank's number within its host.
        hosts: each rank's host number, in the order of first appearance; () for one host.
        origin: how the world was created, for messages ("env://", "simulated", ...).
        options: the caller's backend options (torch's classes), or None.
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
    """Whether the caller named no backend, so that meshdist may fall back to another one."""
    compared: dict[str, str] | None = None
    """The gradients to compare, shared by simulated ranks; None for processes."""
    num_compared: Counter[Any] = field(default_factory=Counter, init=False, repr=False)
    """The number of gradients that this process has compared, by call, shape and dtype."""
    process_id: int = field(default_factory=os.getpid, init=False)
    thread_id: int = field(default_factory=threading.get_ident, init=False)
    is_closed: bool = field(default=False, init=False)
    find_adopted: Callable[[], Store | None] | None = None
    """Returns the store of the reused torch.distributed world while that world exists."""
    handled_before: int = field(default_factory=handled_here, init=False, repr=False)
    """The exception being handled when this world was created; it does not end the world."""
    is_adopted: bool = field(default=False, init=False)
    """Whether init_process_group was called on simulated ranks of this world."""
    first_touch: str = field(default="", init=False)
    """The call site that initialized this world lazily; "" after init_process_group."""
    closers: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)
    """Functions to call in reverse order when the world closes."""
    kept: list[object] = field(default_factory=list, init=False, repr=False)
    """The stores below ``store``, which a PrefixStore does not keep alive."""
    axis_layouts: dict[str, set[Any]] = field(default_factory=dict, init=False, repr=False)
    """The layouts with each axis name, of all meshes that this rank has created."""
    meshes: WeakValueDictionary[int, Any] = field(
        default_factory=WeakValueDictionary, init=False, repr=False
    )
    """The meshes that this rank has created and not closed, by their ``id``, the oldest first."""
    open_layouts: Counter[Any] = field(default_factory=Counter, init=False, repr=False)
    """The number of open meshes of each layout on this rank."""
    averaged: set[frozenset[int]] = field(default_factory=set, init=False, repr=False)
    """The sets of ranks over which DDP wrappers of this rank average gradients."""
    complete: tuple[int, tuple[int, ...], str] = field(default=(-1, (), ""), init=False, repr=False)
    """The last backward from a complete loss, its ranks and its place (``linear_function``)."""
    latest_control_message: int = field(default=0, init=False, repr=False)
    """The number of the last control message seen or posted (``groups.control_messages``)."""
    registry: Closable | None = field(default=None, init=False, repr=False)
    """This rank's communicators (``groups.communicators``), created on first use."""
    group: Closable | None = field(default=None, init=False, repr=False)
    """The group of all ranks (``groups.process_group``), created on first use."""
    group_of_one: Closable | None = field(default=None, init=False, repr=False)
    """The group of this rank alone (``groups.process_group``), created on first use."""
    saves: Any = field(default=None, init=False, repr=False)
    """The checkpoints that threads of this rank are writing (``checkpoint.pending_saves``)."""
    _num_forks: int = field(default_factory=num_forks, init=False, repr=False)
    _counts: Counter[Hashable] = field(default_factory=Counter, init=False, repr=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.hosts = self.hosts or (0,) * self.size

    def note_mesh(self, mesh: Any, *, is_open: bool) -> None:
        """Record a mesh that this rank has created, or derived from another mesh."""
        for axis in mesh.layout.names or ():
            self.axis_layouts.setdefault(axis, set()).add(mesh.layout)
        self.open_layouts[mesh.layout] += is_open
        if mesh.root is mesh:
            self.meshes[id(mesh)] = mesh

    def layouts_with(self, axis: str) -> list[Any]:
        """Return the layouts of open meshes that have ``axis``, else of earlier meshes."""
        # Flattened meshes are not listed as open.
        listed = [layout for layout in +self.open_layouts if axis in (layout.names or ())]
        return listed or [*self.axis_layouts.get(axis, ())]

    @property
    def is_orphan(self) -> bool:
        """Return whether torch.distributed has destroyed the world that this world reuses."""
        if self.find_adopted is None:
            return False
        is_there = torch_distributed.is_initialized()
        return not is_there or self.find_adopted() is not distributed_c10d._get_default_store()

    @property
    def is_one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    @property
    def has_processes(self) -> bool:
        return self.size > 1 and not self.is_simulated

    @property
    def is_simulated(self) -> bool:
        return self.origin == "simulated"

    def make_torch_store(self) -> Store:
        """Return a separate connection to the store, for torch's threads."""
        return self.store if self.given_torch_store is None else self.given_torch_store()

    def num_here(self, ranks: tuple[int, ...]) -> int:
        return sum(self.hosts[rank] == self.hosts[self.rank] for rank in ranks)

    def spans_hosts(self, ranks: tuple[int, ...]) -> bool:
        return len({self.hosts[rank] for rank in ranks}) > 1

    def next_number(self, call: Hashable) -> int:
        """Return 1, 2, 3, ...: how often this rank has reached ``call``.

        Ranks that make equal calls in the same order get equal numbers.
        """
        with self._counting:
            self._counts[call] += 1
            return self._counts[call]

    def check_usable(self) -> None:
        """Raise unless this process owns the world and the world is open."""
        if self._num_forks != num_forks():
            raise WorldError(
                "a forked child cannot communicate in its parent's world",
                where=f"process {os.getpid()}, forked from rank {self.rank} "
                f"(process {self.process_id})",
                expected="collectives in the process that called init_process_group",
                fix="start the child with the start method 'spawn', or call only get_rank() and "
                "get_world_size() in it",
            )
        if self.is_closed and self.is_simulated and _of_context.get() is None:
            raise GroupClosedError(
                "the simulated ranks of this world have ended: simulate has returned",
                where=f"rank {self.rank} of {self.size}",
                expected="communication only inside the function that simulate runs",
                fix="communicate there, and return the global array, x.reshard(md.P()). You can "
                "still read x.local, x.shape, x.sharding and x.visualize()",
            )
        if self.is_closed:
            raise GroupClosedError(
                "the world was closed",
                where=f"rank {self.rank} of {self.size}",
                fix="call init_process_group again before the next collective",
            )

    def close(self) -> None:
        """Run the closers in reverse order; a second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        failures: list[BaseException] = []
        while self.closers:
            try:
                self.closers.pop()()
            except Exception as failure:  # run every closer, then raise the first failure
                failures.append(failure)
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # break the reference cycle between frame and failure

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        remove_world(self)


_of_process: list[World | None] = [None]
_group_of_process: list[Closable | None] = [None]
"""The group of all ranks of the process's world, once it is created."""
_forks_at_world: int | None = None
"""``num_forks()`` when this process got its last world; different or None before the first."""
_join: Callable[[], None] | None = None
"""Initializes this process's world on first use; set by ``join_by``."""
_of_context: ContextVar[World | None] = ContextVar("meshdist_world", default=None)
_used_contexts: list[ContextVar[World | None]] = []
"""Contains ``_of_context`` once any thread has its own world; until then calls can skip it."""


def live_lists_of_worlds() -> tuple[list[ContextVar[World | None]], list[Closable | None]]:
    """Return live lists of the worlds' ContextVar, if used, and the process's group."""
    return _used_contexts, _group_of_process


def give_group(world: World, group: Closable) -> None:
    world.group = group
    if _of_process[0] is world:
        _group_of_process[0] = group


def find_world() -> World | None:
    return _of_context.get() or _of_process[0]


def get_world() -> World:
    """Return the current world; raise NotInitializedError if there is none."""
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
        found = "a process group of torch.distributed, which collectives do not reuse by themselves"
        fix = "call meshdist.init_process_group() on every rank, which reuses that process group"
    elif find_rank_and_size(os.environ) is not None:
        found = "a process that a launcher started and that is not initialized yet"
        fix = "call init_process_group() or a collective, or create a mesh, before this call"
    elif (scheduler := find_scheduler(os.environ)) is not None:
        found = f"a worker of {scheduler.name}, which does not assign ranks"
        fix = scheduler.fix
    else:
        expected = (
            "a launcher, whose processes initialize at their first collective or mesh; or "
            + expected
        )
        command = start_commands()[0]
        fix = "call it under meshdist.simulate(fn, 4), on the thread of a rank"
        if command.startswith("meshdist run"):
            fix = f"start the program with `{command}`, or {fix}"
    return NotInitializedError(
        "the process group has not been initialized",
        expected=expected,
        found=found
        or find_stray(os.environ)
        or "neither a process group nor a launcher's variables",
        fix=fix,
    )


def _is_past_first_touch() -> bool:
    return _forks_at_world == num_forks()


def find_launched_rank() -> tuple[int, int] | None:
    """Return this process's future rank and size; None if initialized or unknown."""
    if find_world() is not None or _is_past_first_touch():
        return None
    if torch_distributed.is_initialized():
        return torch_distributed.get_rank(), torch_distributed.get_world_size()
    return find_rank_and_size(os.environ)


def join_by(join: Callable[[], None]) -> None:
    """Set ``join`` to initialize the world at the first collective of a launched process."""
    global _join
    _join = join


def get_usable_world() -> World:
    """Return the current world after checks; initialize it first in a launched process."""
    world = _of_context.get() or _of_process[0]
    if world is None or world.is_closed or world._num_forks != num_forks():
        if world is None and _join is not None:
            _join()
        world = get_world()
        world.check_usable()
    return world


def install_world(world: World) -> None:
    """Set the process's world; raise WorldError if it already has a world."""
    global _forks_at_world
    former = _of_process[0]
    if former is not None:
        raise WorldError(
            "the process group is already initialized",
            where=f"rank {former.rank} of {former.size}, from {former.origin}",
            fix="call destroy_process_group() first, or remove the second init_process_group",
        )
    _of_process[0], _forks_at_world = world, num_forks()
    _group_of_process[0] = world.group


def remove_world(world: World) -> None:
    if _of_process[0] is world:
        _of_process[0] = _group_of_process[0] = None


def enter_world(world: World) -> None:
    """Set this thread's world (a simulated rank), replacing a closed world."""
    _used_contexts[:] = [_of_context]
    _of_context.set(world)


@contextmanager
def world_here(world: World | None) -> Iterator[None]:
    """Set this thread's world (a simulated rank) inside the context."""
    _used_contexts[:] = [_of_context]
    token = _of_context.set(world)
    try:
        yield
    finally:
        _of_context.reset(token)
