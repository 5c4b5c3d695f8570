"""Run the shared-memory backend: take pointers, counts and codes, return statuses.

Importing it raises ImportError if it was not built (not on Linux, or without a compiler).
Addresses are ``tensor.data_ptr()``, counts are elements, ``timeout`` is in seconds (negative:
none), codes are from ``OPERATIONS``, ``DTYPES`` and ``OPS``. The caller keeps the memory alive
until the call returns or the ticket is done. Everything that may wait releases the GIL, and Ctrl-C
raises KeyboardInterrupt from it.

One thread at a time calls the collectives of a communicator. Collectives that are only started run
in order on the communicator's own thread, and a blocking collective runs after them.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from logging import Logger
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES: dict[str, int]
OPERATIONS: dict[str, int]
OPS: dict[str, int]
STATUSES: dict[str, int]
"""OK = 0, TIMEOUT, ABORTED, DIED, MISMATCH, UNSUPPORTED, CLOSED, CANCELLED, INTERRUPTED."""

class Words:
    """Words of 64 bits in memory that other processes read or write: a memoryview."""

    def __init__(self, memory: memoryview) -> None: ...

class Notes:
    """Records of plain calls, with their counters."""

    def __init__(
        self,
        counts: memoryview,
        num_kept: int,
        num_messages: dict[tuple[Any, ...], int],
        moments: memoryview,
        is_between: Mapping[str, bool],
        no_stack: Sequence[str],
    ) -> None: ...
    def find(self, number: int, /) -> tuple[Any, ...] | None:
        """Return the fields of note ``number``; None if it is not kept or belongs to Python."""

class Headers:
    """A header table: its words, the other members' words, and their message logs.

    ``missing`` lists the members whose words are not known yet, ``views`` each other member's place
    and words. Both are the table's own lists.
    """

    def __init__(
        self,
        table: object,
        words: Words,
        missing: list[int],
        views: list[tuple[int, memoryview]],
        logs: dict[int, MessageLog],
        window: int,
        check_every: int,
        uneven_window: int,
    ) -> None: ...

class MessageLog:
    """The messages between this member and another, as both record them.

    ``mine`` are this member's words for the other; ``find_theirs`` returns the other's words for
    this member, or None. ``is_current`` returns whether these are still the group's words,
    ``is_alive`` whether the other may still read or write. ``publish_later`` makes a thread call
    ``publish`` repeatedly until nothing waits. Neither member records more than ``num_entries``
    ahead of the other.
    """

    def __init__(
        self,
        mine: memoryview,
        find_theirs: Callable[[], memoryview | None],
        is_current: Callable[[], bool],
        is_alive: Callable[[], bool],
        publish_later: Callable[[], None],
        num_entries: int,
        /,
    ) -> None: ...
    def note(self, kind: int, header: int, /) -> int:
        """Record a transfer; return its number if its counterpart exists and differs, else 0.

        ``kind`` is twice its tag, plus 1 for a receive; ``header`` is its fingerprint.
        """

    def note_any(self, tag: int, /) -> None:
        """Record a receive whose sender is never known."""

    def publish(self) -> bool:
        """Write waiting entries, as far as they fit; return whether all of them are written."""

class Entry:
    """Check the tensors of a plain call of ``group``, record it and compare it.

    ``device_type`` is the tensors' device type, as DLPack numbers it. ``aborts`` has the labels of
    unusable groups, and ``label`` is this group's; calls are left to Python if ``log`` logs
    ``log_level``. ``calls`` maps the fields of a ``Call`` to it; ``disagree(number, message)``
    makes the error of calls that differ. ``fingerprints`` gets the fingerprints of the last
    ``check_every`` calls, which Python compares between hosts; without other hosts it is None, and
    ``check_every`` is 0. If ``get_level`` returns a level above ``most_level``, calls are left to
    Python.
    """

    def __init__(
        self,
        notes: Notes,
        group: object,
        headers: Headers | None,
        aborts: dict[str, Any],
        label: str,
        log: Logger,
        log_level: int,
        ranks: tuple[int, ...],
        member: int,
        calls: Mapping[tuple[Any, ...], Any],
        disagree: Callable[[int, tuple[bool, int, int] | None], BaseException],
        fingerprints: Words | None,
        check_every: int,
        get_level: Callable[[], Any] | None,
        most_level: int,
        device_type: int,
    ) -> None: ...
    def enter(self, call: Any, fingerprint: int, /) -> bool:
        """Record and compare an even call; return False, without effect, if Python has to do it."""

class Runner:
    """A backend's part of the fast path."""

class ShmRunner(Runner):
    """A backend's part of the fast path through shared memory.

    ``fail(status, note, message)`` makes the error of a call; ``give_up(error)`` raises the
    exception of a signal handler in a collective.
    """

    def __init__(
        self,
        communicator: Communicator,
        fail: Callable[[int, int | None, tuple[bool, int, int] | None], BaseException],
        give_up: Callable[[BaseException], None],
        largest_tag: int,
        timeout: float,
    ) -> None: ...

class PythonRunner(Runner):
    """A backend's part of the fast path through methods of torch's classes or Python functions.

    Methods are methods of ``communicator.torch_group``. ``find(operation, op, dtype, root, is_list,
    is_empty)`` returns the shortcut of a kind of call, as in ``c10d/fast_path.py``, with a method's
    name, or a function with the method's arguments; None leaves these calls to Python.
    ``end(work, note)`` waits for a work that is not None; for calls that are started,
    ``end(work, then, note)`` returns the operation. ``explain(error)`` returns the error to raise.
    """

    def __init__(
        self,
        communicator: object,
        find: Callable[[str, int, int, int, bool, bool], tuple[str, Any, Any, int] | None],
        end: Callable[..., object],
        explain: Callable[[BaseException], BaseException],
    ) -> None: ...

class LaunchEnvironment:
    """The state that public collectives check before each call.

    ``profiler`` and ``forward_ad`` are the namespaces of torch's modules; ``contexts`` has the
    variable of worlds, once it is in use, and ``group_of_process`` the group of the process's
    world.
    """

    def __init__(
        self,
        *,
        profiler: dict[str, Any],
        forward_ad: dict[str, Any],
        contexts: list[Any],
        group_of_process: list[Any],
        group_type: type,
    ) -> None: ...

def note_operations_in(under_way: list[str | None], number: int | None) -> None:
    """Store the main thread's collective, or None, in this list; ``number`` is the thread's."""

def to_order(dtype: int, bits: object, floats: object, nan_is_greatest: bool, /) -> None:
    """Write plain ``floats`` of ``dtype`` as integers in the same order."""

def from_order(dtype: int, floats: object, bits: object, /) -> None:
    """Invert ``to_order``; overwrite ``bits``."""

def knows_torch() -> bool:
    """Return whether the core reads torch's facts about tensors directly, without Python."""

def operation_call(
    around: LaunchEnvironment,
    name: str,
    *,
    defaults: list[Any],
    taken: list[int],
    places: tuple[int, int, int, int],
    missing: tuple[int | None, ...],
    stays_off_streams: bool,
    watchers: list[Any],
    watched: Callable[..., Any],
    function: Callable[..., Any],
    slow: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a public collective's call, which takes an argument for each parameter, by place.

    ``places`` are the indices of the group, of ``async_op``, and of the root as a global rank and
    as a group rank; -1 means none. The method ``name`` of the group's fast path gets the arguments
    at the indices ``taken``, with the root, or ``missing``, as a group rank; all other parameters
    must have their defaults. If the fast path declines, ``function`` runs the call as the main
    thread's collective; with a profiler or inside another collective, ``slow`` does; and if
    ``watchers`` is not empty, ``watched`` does.
    """

class FastPath:
    """The fast path of the native core, for calls on plain tensors.

    A method has the name of its collective, does the same, returns the same and raises the same; or
    it does nothing and returns False, if the call is not plain. Roots and peers are group ranks.
    Members compare ``op_name``.

    ``reductions`` are tuples: a ReduceOp, its number, and the core's code of the reduction for each
    dtype. A path with ``works`` starts its calls, and returns Works, made of the class, the group's
    timeout, functions that make a failure's error, the group's name, a function that warns of a
    dropped Work, and a function that returns the group.
    """

    starting: FastPath | None
    """The fast path of calls that are started; None if the backend starts none."""

    def __init__(
        self,
        entry: Entry,
        runner: Runner,
        reductions: list[tuple[Any, int, dict[Any, int]]],
        works: tuple[Any, ...] | None = None,
    ) -> None: ...
    def all_reduce(self, tensor: Any, op: Any, op_name: str | None = None, /) -> Any:
        """Reduce in place."""

    def reduce(self, tensor: Any, op: Any, root: int, /) -> Any:
        """Reduce to member ``root``."""

    def broadcast(self, tensor: Any, root: int, op_name: str | None = None, /) -> Any:
        """Copy from member ``root``."""

    def all_gather_into_tensor(
        self, output: Any, tensor: Any, op_name: str | None = None, /
    ) -> Any:
        """Gather into either form of the output."""

    def all_gather_single(self, output: Any, tensor: Any, /) -> Any:
        """Gather into either form of the output."""

    def reduce_scatter_tensor(
        self, output: Any, tensor: Any, op: Any, op_name: str | None = None, /
    ) -> Any:
        """Reduce either form of the input."""

    def reduce_scatter_single(self, output: Any, tensor: Any, op: Any, /) -> Any:
        """Reduce either form of the input."""

    def all_gather(self, outputs: Any, tensor: Any, /) -> Any:
        """Gather into a list of tensors as large as this member's."""

    def gather(self, tensor: Any, outputs: Any, root: int, /) -> Any:
        """Gather to member ``root``; ``outputs`` is None on the other members."""

    def scatter(self, tensor: Any, inputs: Any, root: int, /) -> Any:
        """Scatter from member ``root``; ``inputs`` is None on the other members."""

    def all_to_all(self, outputs: Any, inputs: Any, op_name: str | None = None, /) -> Any:
        """Exchange lists of tensors."""

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_sizes: Any = None,
        input_sizes: Any = None,
        op_name: str | None = None,
        /,
    ) -> Any:
        """Exchange parts of as many rows as the sizes; None means equal parts."""

    def barrier(self) -> Any:
        """Wait for all members."""

    def send(self, tensor: Any, peer: int, tag: Any, /) -> Any:
        """Send to member ``peer``."""

    def recv(self, tensor: Any, peer: int | None, tag: Any, /) -> Any:
        """Receive from member ``peer``, or from any."""

def reduce_parts(output: object, data: object, num_parts: int, dtype: int, op: int, /) -> None:
    """Reduce equal parts of ``data``, first to last, into ``output``; both are plain."""

def stream(to: int, source: int, num_bytes: int, /) -> None:
    """Copy memory by stores that bypass the caches: its lines are not read first."""

def stream_scaled(to: int, source: int, count: int, factor: float, /) -> None:
    """Copy float32 numbers times ``factor``, like ``stream``."""

def can_reduce(dtype: int, op: int, /) -> bool: ...
def create_segment(size: int, slot_bytes: int, ring_bytes: int, is_crowded: bool) -> int:
    """Create a sealed memfd for ``size`` members, its first parts reserved; OSError without memory.

    ``is_crowded``: ranks outnumber cores, so no member spins.
    """

def segment_bytes(size: int, slot_bytes: int, ring_bytes: int, /) -> int: ...
def create_memory(bytes: int) -> int:
    """Create a sealed, reserved memfd for buffers that all members map, for ``Memory``."""

class Memory:
    """A mapping of all of ``fd``, kept alive by this, by its arrays, and by the arrays of any
    member of the communicator to which it was added.
    """

    def __init__(self, fd: int) -> None: ...
    @property
    def address(self) -> int: ...
    def array(self) -> npt.NDArray[np.uint8]: ...

class Failure:
    """A failure in the native core."""

    @property
    def status(self) -> int:
        """The call's status; for ABORTED, the status of the member that ended the communicator."""

    @property
    def culprit(self) -> int:
        """The member that died, or the first that differs from member 0; -1 for none."""

    @property
    def text(self) -> str:
        """The sizes that differ."""

    @property
    def was_closed(self) -> list[bool]:
        """Whether each member has closed its part."""

    @property
    def has_exited(self) -> list[bool]:
        """Whether each member's process has ended."""

    @property
    def source(self) -> int:
        """The sender of a message; -1 if unknown."""

    @property
    def other_note(self) -> int:
        """The ``note`` of the other side of a mismatched message."""

class Started:
    """A collective or message in flight, as a ``Request``; keeps its tensors until done.

    A message, and work of the core's threads, progresses by itself. A collective of one round and
    few bytes is finished by the thread that waits for it, polls it, or runs the next.
    """

    is_plain: bool
    on_stream: bool
    adds_to_stream: bool

    def wait(self, timeout: float, /) -> int:
        """Return the status. On timeout a collective ends the communicator for all members; a
        message is given up, and its memory not touched again.
        """

    def wait_plainly(self) -> bool:
        """Wait for a fast path's collective within its group's timeout.

        Return False if it failed, or inside another collective: then ``Work`` waits.
        """

    def may_be_dropped(self) -> None:
        """Disable the warning of a dropped ``Work``."""

    def leave_work(self, result: list[Any], user: object, /) -> tuple[tuple[Any, ...], bool]:
        """Return the arguments of a ``Work`` for this, and whether ``wait_plainly`` waited.

        From now on this does not warn if the ``Work`` is dropped.
        """

    def is_done(self) -> bool: ...
    def failure(self) -> Failure:
        """Return the failure of an operation that is done."""

    def finish(self, timeout: timedelta, /) -> None: ...
    def poll(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def has_ended(self) -> bool: ...
    def bound(self, timeout: timedelta, /) -> None: ...
    def source(self) -> int: ...

class StartedCollective(Started):
    """A collective in flight in shared memory."""

class StartedTransfer(Started):
    """A message in flight in shared memory."""

class PythonStarted(Started):
    """A collective in flight in a torch class; a Python operation waits for it."""

def explain_failures_by(
    make: Callable[[int, Failure, int, tuple[bool, int, int] | None], Exception],
) -> None:
    """Let ``make`` make the error of ``finish`` from a status, its failure and the ``note``."""

class Communicator:
    """This member's part in a segment; owns ``pidfds``, even if it cannot be made.

    The caller keeps ``fd``. ``pidfds`` has one descriptor per member, -1 for this member (or is
    empty: then deaths are not detected).
    """

    def __init__(self, fd: int, rank: int, pidfds: Sequence[int]) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def run(
        self,
        operation: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        output: int,
        data: int,
        outputs: Sequence[tuple[int, int]],
        inputs: Sequence[tuple[int, int]],
        fingerprint: int,
        layouts: Sequence[tuple[Sequence[int], Sequence[int]]],
        timeout: float,
        /,
    ) -> int:
        """Run the collective ``OPERATIONS[...]``; return the status.

        ``count`` is one member's part, 0 if parts differ. The tensors of a collective are one
        buffer, ``data`` and ``output``, or several, each an address and a count, as
        ``native/codes.h`` lists. The tensor of an in-place reduction or of ``broadcast`` is the
        output; if it is not row-major, ``layouts`` has sizes and strides without gaps for each
        output, both empty for a row-major output. Members whose layouts differ use row-major order.
        """

    def start(
        self,
        operation: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        output: int,
        data: int,
        outputs: Sequence[tuple[int, int]],
        inputs: Sequence[tuple[int, int]],
        fingerprint: int,
        layouts: Sequence[tuple[Sequence[int], Sequence[int]]],
        timeout: float,
        kept: object,
        number: int,
        /,
    ) -> Started:
        """Start ``run`` without waiting; ``kept`` are the tensors, ``number`` is the call's."""

    def run_transfer(
        self,
        is_send: bool,
        data: int,
        count: int,
        dtype: int,
        peer: int,
        tag: int,
        note: int,
        timeout: float,
        /,
    ) -> int:
        """Send or receive; ``peer`` -1 means any member, and ``last_source`` is the sender.

        The other side gets ``note`` as ``other_note`` if the two do not match.
        """

    def start_transfer(
        self,
        is_send: bool,
        data: int,
        count: int,
        dtype: int,
        peer: int,
        tag: int,
        note: int,
        kept: object,
        message: tuple[bool, int, int] | None,
        /,
    ) -> Started:
        """Start ``run_transfer`` without waiting; ``message`` is (is_send, peer, tag)."""

    @property
    def last_source(self) -> int: ...
    def last_failure(self) -> Failure:
        """Return the failure of the last blocking collective that failed."""

    def last_transfer_failure(self) -> Failure:
        """Return the failure of the last send or receive that failed."""

    def add_memory(self, memory: Memory, /) -> None:
        """Read buffers in ``memory`` directly. All members add it, in the same order, between
        collectives, which detect by themselves the inputs in this memory.
        """

    def abort(self) -> None:
        """Release every thread of every member that waits in this communicator."""

    def close(self) -> None:
        """End this member's part; waits here end as CLOSED."""

    def announce_end(self) -> None:
        """Announce this process's normal exit to the other members."""

    @property
    def reads_others(self) -> bool:
        """Whether parts of some sizes are read directly from other members' memory.

        It is tried before the first collective, and disabled permanently if it fails.
        """
    def set_tuning(self, name: str, value: int, /) -> None: ...
