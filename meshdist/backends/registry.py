"""Define and register backends.

A ``BackendType`` opens a ``Communicator``, which starts a group's operations.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from ..arguments import DEFAULT_TIMEOUT
from ..bootstrap.world import find_world
from ..error_text import ranks_text
from ..errors import BackendError
from ..operation_table import REDUCING_OPERATIONS
from ..reduce_ops import ReduceKind, ReduceOp, find_refusal
from ..runtime.hosts import MORE_DESCRIPTORS, find_thread_lack, raise_descriptor_limit
from .communicator import Communicator
from .requests import BackendFailure

_MORE = 12  # descriptors that opening any group needs temporarily


@dataclass(frozen=True)
class Opening:
    """Arguments of a backend's ``open``; only ``rank`` differs between members.

    Args:
        store: its keys belong to this communicator alone.
        make_torch_store: returns the store on a new connection, for torch classes with threads.
        ranks: global ranks in group order.
        rank: this member's index in ``ranks``.
        timeout: of the opening, and of operations without a timeout.
        options: backend-specific options, or None.
        name: the group's name in messages.
        num_local: the world's ranks on this host.
        hosts: each member's host number; () if unknown.
        find_lost: polled while members connect; returns text about exited members, or "".
        has_died: returns whether this global rank, whose connection is lost, failed or was killed;
            False if it left normally.
        look: polled in waits by a backend that does not compare calls; raises BackendFailure to end
            the wait. None if calls are not compared.
    """

    store: Store
    make_torch_store: Callable[[], Store]
    ranks: tuple[int, ...]
    rank: int
    device_type: str
    timeout: timedelta
    is_one_host: bool = True
    options: Any = None
    name: str = ""
    num_local: int = 1
    hosts: tuple[int, ...] = ()
    find_lost: Callable[[], str] = str
    has_died: Callable[[int], bool] = lambda _: False
    look: Callable[[], None] | None = None

    def check_present(self) -> None:
        """Raise BackendFailure, with ``find_lost``'s text, if a member has exited."""
        if lost := self.find_lost():
            raise BackendFailure(lost)

    def below(self, prefix: str, **changes: Any) -> Opening:
        """Return a copy with ``changes``, whose store keys start with ``prefix``."""
        return replace(
            self,
            store=PrefixStore(prefix, self.store),
            make_torch_store=lambda: PrefixStore(prefix, self.make_torch_store()),
            **changes,
        )


class Needs(NamedTuple):
    """Descriptors and threads that a member needs to open a group."""

    descriptors: int
    threads: int


def reserve_resources(needs: Mapping[str, Needs], num_local: int) -> str:
    """Raise the limit of open files for ``needs``, by group; return the lack as text, or "".

    Args:
        num_local: this host's ranks, each of which needs as many threads.
    """
    # Example: with 20 of 1,024 files open and a hard limit, ``{"axis 'dp'": Needs(2047, 2)}`` gives
    # "1004 more files can be opened of about 2059 needed; the limit is 1024 (axis 'dp': 2047)".
    # The ``num_local`` ranks share a control group, so their threads are added up.
    descriptors, threads = (sum(of[i] for of in needs.values()) for i in (0, 1))
    if not descriptors and not threads:
        return ""
    lacks = raise_descriptor_limit(descriptors + _MORE), find_thread_lack(threads, num_local)
    for kind, lack in enumerate(lacks):
        if lack:
            return f"{lack} ({', '.join(f'{name}: {of[kind]}' for name, of in needs.items())})"
    return ""


def lack_error(rank: int, text: str, members: Sequence[int], found: str) -> BackendError:
    """Return the error of a group that cannot open because ranks lack descriptors or threads.

    Args:
        rank: this rank, which raises it.
        text: the group's name.
        members: the group's global ranks.
        found: the shortage of each such rank, as text.
    """
    return BackendError(
        f"{text} cannot be opened because a rank has too few file descriptors or threads",
        where=f"rank {rank}, among {ranks_text(members)}",
        found=found,
        fix=f"{MORE_DESCRIPTORS} (for threads: raise pids.max of the control group, with Docker "
        "--pids-limit); or close groups that you no longer need",
    )


class BackendType(ABC):
    """A way to transfer data between the members of a group."""

    name: str
    device_types: frozenset[str]
    default_timeout: timedelta = DEFAULT_TIMEOUT
    communicator_kind: type[Communicator] = Communicator  # type: ignore[type-abstract]
    """The class of the communicators that ``open`` returns."""
    replacement = ""
    """The fallback if this default backend rejects the group or the group spans hosts."""
    compares_calls = False
    """Whether the backend itself compares every call with the other members'."""
    descriptors_per_peer = 0
    """How many descriptors an opening needs for each other member."""
    num_threads = 0
    """How many threads a communicator has."""

    def support(
        self, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind | None = None
    ) -> str:
        """Return ``"native"``, ``"built"`` (composed, or in another dtype) or ``""``.

        Args:
            operation: a communicator's operation.
            op: of a reduction; None means SUM.
        """
        op = ReduceOp.SUM if op is None else op
        if device_type not in self.device_types:
            return ""
        if operation in REDUCING_OPERATIONS and find_refusal(op, dtype) is not None:
            return ""
        return self.communicator_kind.support(operation, device_type, dtype, op)

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine can use the backend now."""

    def why_unavailable(self) -> tuple[str, str]:
        """Return the reason why this machine cannot use the backend, and the fix."""
        return (
            f"is_available() of backend {self.name!r} returns False",
            "install what the package that registered it requires",
        )

    def connection_for(self, device_type: str) -> str:
        """Return a name, equal for device types that share a communicator."""
        return self.name

    def needs(self, opening: Opening) -> Needs:
        """Return the descriptors and threads of ``open``."""
        return Needs((len(opening.ranks) - 1) * self.descriptors_per_peer, self.num_threads)

    @abstractmethod
    def open(self, opening: Opening) -> Communicator:
        """Open a communicator with all other members; may raise BackendFailure."""


_backends: dict[str, BackendType] = {}


def register_backend(backend: BackendType) -> None:
    """Add ``backend`` under its name, or replace the backend of that name."""
    _backends[backend.name] = backend


def backend_names() -> tuple[str, ...]:
    """Return all registered names, sorted."""
    return tuple(sorted(_backends))


def find_backend(name: str) -> BackendType | None:
    return _backends.get(name.lower())


def get_backend(name: str) -> BackendType:
    """Return the available backend ``name``; raise BackendError if there is none."""
    name = name.lower()
    backend = find_backend(name)
    if backend is not None and backend.is_available():
        return backend
    world = find_world()
    known = [known for known in backend_names() if _backends[known].is_available()]
    if world is None or not world.is_simulated:
        known = [name for name in known if name != "simulated"]  # processes cannot use it
    expected = f"one of: {', '.join(known)}"
    if backend is not None:
        found, fix = backend.why_unavailable()
        raise BackendError(
            f"backend {name!r} is not available on this machine",
            expected=expected,
            found=found,
            fix=f"{fix}; or pass another backend, or None for the default of each device type",
        )
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise BackendError(
        f"backend {name!r} is not registered",
        expected=expected,
        fix=f"{meant}pass one of these, or None for the default of each device type",
    )
