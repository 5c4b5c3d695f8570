"""The native core of the shared-memory wire: pointers, counts and codes in, statuses out.

Absent where it was not built (not on Linux, or without a compiler): importing it raises
ImportError. Addresses are ``tensor.data_ptr()``, counts are elements, ``timeout`` is in seconds
(negative: none), codes are those of ``DTYPES`` and ``OPS``. The caller keeps the memory alive until
the call returns or the ticket is done. Everything that may wait releases the GIL, and Ctrl-C
raises KeyboardInterrupt from it.

Collectives of one communicator come from one thread at a time. Each has a second form
``<verb>_async`` with the same arguments, which returns a Ticket: those run in order on the
communicator's own thread, and a blocking call runs after them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES: dict[str, int]
OPS: dict[str, int]
STATUSES: dict[str, int]
"""OK = 0, TIMEOUT, ABORTED, DIED, MISMATCH, UNSUPPORTED, CLOSED, CANCELLED, INTERRUPTED."""
VECTORS: str
"""The vector width that was chosen for this processor."""

class Entry:
    """What ``Channel.enter`` does, for plain calls; ``facts`` is what that channel gives."""

    def __init__(self, facts: dict[str, Any]) -> None: ...
    def enter(
        self, verb: str, tensor: object, op: object, number: int | None, root: int | None, /
    ) -> bool:
        """Whether the call was noted and compared; if not, nothing has happened."""

class _PlainCalls:
    """As ``PlainCalls`` in ``meshdist.wires.base`` has them."""

    def all_reduce(self, tensor: object, /) -> bool: ...
    def reduce(self, tensor: object, op: object, root: int, /) -> bool: ...
    def broadcast(self, tensor: object, root: int, /) -> bool: ...
    def all_gather(self, verb: str, output: object, tensor: object, /) -> bool: ...
    def reduce_scatter(self, verb: str, output: object, tensor: object, op: object, /) -> bool: ...
    def gather(self, tensor: object, outputs: object, root: int, /) -> bool: ...
    def scatter(self, tensor: object, inputs: object, root: int, /) -> bool: ...
    def all_to_all(self, output: object, tensor: object, /) -> bool: ...
    def all_gather_list(self, outputs: object, tensor: object, /) -> bool: ...
    def all_to_all_list(self, outputs: object, inputs: object, /) -> bool: ...
    def barrier(self) -> bool: ...

class MpiCalls(_PlainCalls):
    """Over MPI; ``facts`` is what ``meshdist.wires.mpi`` gives."""

    def __init__(self, facts: dict[str, Any]) -> None: ...

class ShmCalls(_PlainCalls):
    """Through shared memory; ``facts`` is what ``meshdist.wires.shm`` gives."""

    def __init__(
        self, communicator: Communicator, facts: dict[str, Any], timeout: float
    ) -> None: ...

def add_to(dtype: int, data: object, result: object, datatype: object, /) -> None:
    """``result`` becomes the sum of both: buffers of numbers of a dtype. ``datatype`` is MPI's."""

def can_reduce(dtype: int, op: int, /) -> bool: ...
def let_timeouts_stand(stand: bool) -> None:
    """Whether the time that timeouts count stands still, in this process."""

def create_segment(size: int, slot_bytes: int, ring_bytes: int, is_crowded: bool) -> int:
    """A sealed memfd for ``size`` members, reserved; OSError where there is no memory.

    ``is_crowded`` says that ranks outnumber cores: then no member spins.
    """

def segment_bytes(size: int, slot_bytes: int, ring_bytes: int, /) -> int: ...
def create_memory(bytes: int) -> int:
    """A sealed memfd, reserved, for buffers that all members of a group map; for ``Memory``."""

class Memory:
    """A mapping of all of ``fd``, alive as long as this, its arrays, or, in the communicator it
    was added to, those of any member.
    """

    def __init__(self, fd: int) -> None: ...
    @property
    def address(self) -> int: ...
    def array(self) -> npt.NDArray[np.uint8]: ...

class Ticket:
    """A collective in flight."""

    def wait(self, timeout: float, /) -> int:
        """The status; on timeout the communicator ends for all members."""

    def is_done(self) -> bool: ...
    def failure(self) -> dict[str, Any]:
        """As ``Communicator.last_failure``; of a ticket that is done."""

class Transfer:
    """A message in flight. It moves while any thread of either member waits, or by itself."""

    def wait(self, timeout: float, /) -> int:
        """The status; on timeout the transfer is given up and its memory not touched again."""

    def is_done(self) -> bool: ...
    def failure(self) -> dict[str, Any]: ...
    @property
    def source(self) -> int: ...

class Communicator:
    """This member's part in a segment. ``pidfds`` become its own, also where it cannot be made.

    ``fd`` stays the caller's. ``pidfds`` has one descriptor per member, -1 for this one (or is
    empty: then deaths go unnoticed).
    """

    def __init__(self, fd: int, rank: int, pidfds: Sequence[int]) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(
        self, data: int, count: int, dtype: int, op: int, factor: float, timeout: float, /
    ) -> int: ...
    def all_reduce_list(
        self,
        data: Sequence[int],
        counts: Sequence[int],
        dtype: int,
        op: int,
        factor: float,
        timeout: float,
        /,
    ) -> int: ...
    def reduce(
        self,
        data: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        factor: float,
        timeout: float,
        /,
    ) -> int: ...
    def broadcast(self, data: int, count: int, dtype: int, root: int, timeout: float, /) -> int: ...
    def all_gather(
        self, output: int, data: int, count: int, dtype: int, timeout: float, /
    ) -> int: ...
    def all_gather_v(
        self,
        outputs: Sequence[int],
        output_counts: Sequence[int],
        data: int,
        count: int,
        dtype: int,
        timeout: float,
        /,
    ) -> int: ...
    def gather(
        self,
        outputs: Sequence[int],
        data: int,
        count: int,
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> int: ...
    def gather_v(
        self,
        outputs: Sequence[int],
        output_counts: Sequence[int],
        data: int,
        count: int,
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> int: ...
    def scatter(
        self,
        output: int,
        inputs: Sequence[int],
        count: int,
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> int: ...
    def scatter_v(
        self,
        output: int,
        count: int,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> int: ...
    def reduce_scatter(
        self,
        output: int,
        data: int,
        count: int,
        dtype: int,
        op: int,
        factor: float,
        timeout: float,
        /,
    ) -> int: ...
    def reduce_scatter_v(
        self,
        output: int,
        count: int,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        dtype: int,
        op: int,
        factor: float,
        timeout: float,
        /,
    ) -> int: ...
    def all_to_all(
        self, output: int, data: int, count: int, dtype: int, timeout: float, /
    ) -> int: ...
    def all_to_all_v(
        self,
        outputs: Sequence[int],
        output_counts: Sequence[int],
        inputs: Sequence[int],
        input_counts: Sequence[int],
        dtype: int,
        timeout: float,
        /,
    ) -> int: ...
    def barrier(self, timeout: float, /) -> int: ...
    def all_reduce_async(
        self, data: int, count: int, dtype: int, op: int, factor: float, timeout: float, /
    ) -> Ticket: ...
    def all_reduce_list_async(
        self,
        data: Sequence[int],
        counts: Sequence[int],
        dtype: int,
        op: int,
        factor: float,
        timeout: float,
        /,
    ) -> Ticket: ...
    def reduce_async(
        self,
        data: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        factor: float,
        timeout: float,
        /,
    ) -> Ticket: ...
    def broadcast_async(
        self, data: int, count: int, dtype: int, root: int, timeout: float, /
    ) -> Ticket: ...
    def all_gather_async(
        self, output: int, data: int, count: int, dtype: int, timeout: float, /
    ) -> Ticket: ...
    def all_gather_v_async(
        self,
        outputs: Sequence[int],
        output_counts: Sequence[int],
        data: int,
        count: int,
        dtype: int,
        timeout: float,
        /,
    ) -> Ticket: ...
    def gather_async(
        self,
        outputs: Sequence[int],
        data: int,
        count: int,
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> Ticket: ...
    def gather_v_async(
        self,
        outputs: Sequence[int],
        output_counts: Sequence[int],
        data: int,
        count: int,
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> Ticket: ...
    def scatter_async(
        self,
        output: int,
        inputs: Sequence[int],
        count: int,
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> Ticket: ...
    def scatter_v_async(
        self,
        output: int,
        count: int,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        dtype: int,
        root: int,
        timeout: float,
        /,
    ) -> Ticket: ...
    def reduce_scatter_async(
        self,
        output: int,
        data: int,
        count: int,
        dtype: int,
        op: int,
        factor: float,
        timeout: float,
        /,
    ) -> Ticket: ...
    def reduce_scatter_v_async(
        self,
        output: int,
        count: int,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        dtype: int,
        op: int,
        factor: float,
        timeout: float,
        /,
    ) -> Ticket: ...
    def all_to_all_async(
        self, output: int, data: int, count: int, dtype: int, timeout: float, /
    ) -> Ticket: ...
    def all_to_all_v_async(
        self,
        outputs: Sequence[int],
        output_counts: Sequence[int],
        inputs: Sequence[int],
        input_counts: Sequence[int],
        dtype: int,
        timeout: float,
        /,
    ) -> Ticket: ...
    def barrier_async(self, timeout: float, /) -> Ticket: ...
    def send(
        self,
        data: int,
        count: int,
        dtype: int,
        peer: int,
        tag: int,
        timeout: float,
        note: int = 0,
    ) -> int: ...
    def recv(
        self,
        data: int,
        count: int,
        dtype: int,
        peer: int,
        tag: int,
        timeout: float,
        note: int = 0,
    ) -> int:
        """``peer`` -1 takes from anyone; ``last_source`` tells from whom.

        ``note`` is what the other side gets as ``other_note`` where the two do not fit.
        """

    def send_async(
        self, data: int, count: int, dtype: int, peer: int, tag: int, note: int = 0
    ) -> Transfer: ...
    def recv_async(
        self, data: int, count: int, dtype: int, peer: int, tag: int, note: int = 0
    ) -> Transfer: ...
    @property
    def last_source(self) -> int: ...
    def last_failure(self) -> dict[str, Any]:
        """What the last blocking collective that failed saw.

        ``status``; ``cause`` (a status) with which the communicator ended and ``by`` whom;
        ``culprit``: who died, or differs from member 0; ``sequence``; ``text``: which sizes differ;
        ``members``: of each its ``verb``, ``dtype``, ``op``, ``root``, ``count``, ``sequence``,
        ``begun`` and ``ended`` (sequence numbers), ``is_open``, ``was_closed``, ``has_exited``,
        ``pid``.
        """

    def last_transfer_failure(self) -> dict[str, Any]:
        """The same for send and recv, with ``peer``, ``tag``, ``source``; and ``other_dtype``,
        ``other_count`` and ``other_note``: what the other side has.
        """

    def members(self) -> list[dict[str, Any]]:
        """What every member called last, now."""

    @property
    def streams_into_slots(self) -> bool:
        """Which stores the last probe chose."""

    def add_memory(self, memory: Memory, /) -> None:
        """Read buffers in ``memory`` where they lie. All members add it, in the same order, between
        collectives; verbs find out by themselves whose inputs lie there.
        """

    def abort(self) -> None:
        """Free every thread of every member that waits in this communicator."""

    def close(self) -> None:
        """End this member's part; what waits here ends as CLOSED."""

    def announce_end(self) -> None:
        """Let the others know that this process comes to its end in good order."""

    @property
    def reads_others(self) -> bool:
        """Whether parts of some sizes are read where they lie in other members' memory.

        It is tried before the first collective, and given up for good when it fails.
        """
    def set_tuning(self, name: str, value: int, /) -> None: ...
