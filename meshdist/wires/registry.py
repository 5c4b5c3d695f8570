"""The protocol of all wires, and their registry.

A ``Wire`` opens a ``Communicator`` among the members of one group, which starts operations.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from datetime import timedelta

import torch

from ..errors import BackendError
from ..reduce_ops import ReduceKind, ReduceOp, find_refusal
from ..runtime.timeouts import DEFAULT_TIMEOUT
from ..verb_table import REDUCING_VERBS
from .communicator import Communicator
from .opening import Needs, Opening

__all__ = ["Wire", "find_wire", "get_wire", "register_wire", "wire_names"]


class Wire(ABC):
    """One way to move bytes."""

    name: str
    device_types: frozenset[str]
    default_timeout: timedelta = DEFAULT_TIMEOUT
    communicator_kind: type[Communicator] = Communicator  # type: ignore[type-abstract]
    """The class of what ``open`` returns, which knows what it does itself."""
    replacement = ""
    """The wire to take in its place for a group that it refuses, where the program named none."""
    across_hosts = ""
    """The wire to take in its place for a group that spans hosts, where the program named none."""
    compares_calls = False
    """Whether it compares every call with the other members' by itself."""
    descriptors_per_peer = 0
    """How many files and sockets an opening takes for each other member."""
    num_threads = 0
    """How many threads a communicator has."""

    def support(
        self, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind | None = None
    ) -> str:
        """How the wire serves one of a communicator's verbs.

        Args:
            verb: the name of a method of ``Communicator``.
            device_type: of the tensors.
            dtype: of the tensors.
            op: for a verb that reduces; None is SUM.

        Returns:
            ``"native"``: by the wire's own means; ``"built"``: from others of its verbs, or in
            another dtype; ``""``: not at all.
        """
        op = ReduceOp.SUM if op is None else op
        if device_type not in self.device_types:
            return ""
        if verb in REDUCING_VERBS and find_refusal(op, dtype) is not None:
            return ""
        return self.communicator_kind.support(verb, device_type, dtype, op)

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine can use the wire now."""

    def why_unavailable(self) -> tuple[str, str]:
        """Why this machine cannot use the wire, and the fix."""
        return f"the wire {self.name!r} says so", "ask whoever registered it"

    def needs(self, opening: Opening) -> Needs:
        """How many descriptors and threads ``open`` takes."""
        return Needs((len(opening.ranks) - 1) * self.descriptors_per_peer, self.num_threads)

    @abstractmethod
    def open(self, opening: Opening) -> Communicator:
        """Open a communicator, together with all other members; raises WireFailure."""


_wires: dict[str, Wire] = {}


def register_wire(wire: Wire) -> None:
    """Add ``wire`` under its name, replacing an older one of that name."""
    _wires[wire.name] = wire


def wire_names() -> tuple[str, ...]:
    """The names of all registered wires, sorted."""
    return tuple(sorted(_wires))


def find_wire(name: str) -> Wire | None:
    """Return the wire called ``name``, or None."""
    return _wires.get(name.lower())


def get_wire(name: str) -> Wire:
    """Return the wire called ``name``; raises BackendError, listing what there is."""
    name = name.lower()
    wire = find_wire(name)
    if wire is not None and wire.is_available():
        return wire
    known = [known for known in wire_names() if _wires[known].is_available()]
    expected = f"one of: {', '.join(known)}"
    if wire is not None:
        found, fix = wire.why_unavailable()
        raise BackendError(
            f"backend {name!r} is not available on this machine",
            expected=expected,
            found=found,
            fix=f"{fix}; or name another, or None for the default of each device type",
        )
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise BackendError(
        f"backend {name!r} is not registered",
        expected=expected,
        fix=f"{meant}name one of these, or None for the default of each device type",
    )
