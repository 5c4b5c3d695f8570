"""The world: all ranks of one job, and which world is in force here.

A process has at most one world, seen by all its threads (data loaders and autograd included).
A simulated rank overrides it for its own thread through a context variable. There is no other
state.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ..errors import GroupClosedError, NotInitializedError, WorldError
from .forks import num_forks

__all__ = [
    "World",
    "find_world",
    "get_usable_world",
    "get_world",
    "install_world",
    "remove_world",
    "world_here",
]


@dataclass(eq=False)
class World:
    """All ranks of one job, as one of them sees it.

    Args:
        rank: this rank, from 0.
        size: how many ranks there are.
        store: the store that all ranks share, its keys private to this world.
        backends: the wire that serves each device type, for example ``{"cpu": "gloo"}``.
        timeout: how long a verb may wait; None takes the wire's default.
        local_rank: this rank among those of its host.
        local_size: how many ranks its host has.
        is_one_host: whether all ranks run on one host.
        hosts: the number of each rank's host, counted by first appearance; () where nobody asked.
        origin: how the world came to be, for messages ("env://", "simulated", ...).
        options: what the caller gave for the wire (torch's options classes), or None.
        device: the device bound to this rank, or None.
    """

    rank: int
    size: int
    store: Store
    backends: dict[str, str]
    timeout: timedelta | None = None
    local_rank: int = 0
    local_size: int = 1
    is_one_host: bool = True
    hosts: tuple[int, ...] = ()
    origin: str = "env://"
    options: Any = None
    device: Any = None
    chooses_wires: bool = False
    """Whether no wire was named, so that another one may serve where the best cannot."""
    process_id: int = field(default_factory=os.getpid)
    _num_forks: int = field(default_factory=num_forks, repr=False)
    thread_id: int = field(default_factory=threading.get_ident)
    is_closed: bool = False
    rooms: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the floors above keep for as long as this world lives, one entry a room."""
    closers: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called in reverse order when the world closes."""

    @property
    def is_simulated(self) -> bool:
        """Whether its ranks are simulated, all in this process."""
        return self.origin == "simulated"

    def spans_hosts(self, ranks: tuple[int, ...]) -> bool:
        """Whether some of ``ranks`` run on different hosts, as far as is known."""
        hosts = self.hosts
        return len({hosts[rank] for rank in ranks}) > 1 if hosts else not self.is_one_host

    def check_usable(self) -> None:
        """Raise unless this process owns the world and it is still open."""
        if self._num_forks != num_forks():
            raise WorldError(
                "a forked child cannot communicate in its parent's world",
                where=f"process {os.getpid()}, forked from rank {self.rank} "
                f"(process {self.process_id})",
                expected="verbs in the process that called init_process_group",
                fix="start the child with the start method 'spawn', or let it only read "
                "get_rank() and get_world_size()",
            )
        if self.is_closed:
            raise GroupClosedError(
                "the world was closed",
                where=f"rank {self.rank} of {self.size}",
                fix="call init_process_group again before the next verb",
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
            except Exception as failure:  # every closer runs, the first failure is told
                failures.append(failure)
        if failures:
            raise failures[0]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        remove_world(self)


_of_process: World | None = None
_of_context: ContextVar[World | None] = ContextVar("meshdist_world", default=None)


def find_world() -> World | None:
    """Return the world in force, or None."""
    return _of_context.get() or _of_process


def get_world() -> World:
    """Return the world in force; raises NotInitializedError where there is none."""
    world = _of_context.get() or _of_process
    if world is None or world.is_closed:
        raise NotInitializedError(
            "there is no world: the process group has not been initialized",
            expected="init_process_group(...) or init_device_mesh(...) before this call",
            fix="start the program with `meshdist run -n 4 script.py`, or call it under "
            "meshdist.simulate(fn, 4)",
        )
    return world


def get_usable_world() -> World:
    """Return the world in force, open and owned by this process; raises otherwise."""
    world = _of_context.get() or _of_process
    if world is None or world.is_closed or world._num_forks != num_forks():
        world = get_world()
        world.check_usable()
    return world


def install_world(world: World) -> None:
    """Make ``world`` the process's world; raises WorldError where there is one."""
    global _of_process
    if _of_process is not None:
        raise WorldError(
            "the process group is initialized already",
            where=f"rank {_of_process.rank} of {_of_process.size}, from {_of_process.origin}",
            fix="call destroy_process_group() first, or drop the second init_process_group",
        )
    _of_process = world


def remove_world(world: World) -> None:
    """Take ``world`` out of the process's slot, if it is there."""
    global _of_process
    if _of_process is world:
        _of_process = None


@contextmanager
def world_here(world: World | None) -> Iterator[None]:
    """Put ``world`` in force for this thread (a simulated rank) while the context lasts."""
    token = _of_context.set(world)
    try:
        yield
    finally:
        _of_context.reset(token)
