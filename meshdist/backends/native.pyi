"""The native core of the shared-memory backend: pointers, counts and codes in, statuses out.

Absent where it was not built (not on Linux, or without a compiler): importing it raises
ImportError. Addresses are ``tensor.data_ptr()``, counts are elements, ``timeout`` is in seconds
(negative: none), codes are those of ``OPERATIONS``, ``DTYPES`` and ``OPS``. The caller keeps the
memory alive until the call returns or the ticket is done. Everything that may wait releases the
GIL, and Ctrl-C raises KeyboardInterrupt from it.

Collectives of one communicator come from one thread at a time. Those that are only started run in
order on the communicator's own thread, and a blocking one runs after them.
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
    """A recorder's notes of plain calls, with its own counters."""

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
        """The fields of the note of this number; None where it is not kept, or is Python's."""

class Headers:
    """A header table: its words, the other members', and the logs of messages with them.

    ``missing`` has the members whose words are not known yet; ``views`` of each other the place
    and the words. Both are the table's own lists.
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
    """The messages between this member and one other, as both note them.

    ``mine`` are this member's words for the other; ``find_theirs`` finds the other's for this
    member, or None. ``is_current`` says whether these are still the group's, ``is_alive`` whether
    the other may read or write more. ``publish_later`` lets a thread ``publish`` now and then until
    nothing waits. Neither member notes more than ``num_entries`` ahead of the other.
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
        """Note one transfer; returns its number where its counterpart is there and differs, else 0.

        ``kind`` is its tag, times two, and one more for a receive; ``header`` its fingerprint.
        """

    def note_any(self, tag: int, /) -> None:
        """Note a receive whose sender is never known."""

    def publish(self) -> bool:
        """Write what has waited, as far as there is room; returns whether all of it is written."""

class Entry:
    """The entry of a plain call of ``group``: its tensors are checked, it is noted and compared.

    ``device_type`` is that of the tensors, as DLPack numbers them. ``aborts`` has the labels of
    groups that are broken, and ``label`` is this group's; calls are left to Python if ``log`` logs
    ``log_level``. ``calls`` has each ``Call`` by its fields; ``disagree(number, message)`` makes
    the error of calls that differ. ``fingerprints`` gets the fingerprints of the last
    ``check_every`` calls, which Python compares between hosts; without other hosts it is None, and
    ``check_every`` 0. If ``get_level`` returns a level above ``most_level``, calls are left to
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
        """Note and compare an even call; False where Python is to do it, and nothing was done."""

class Runner:
    """A backend's part of the fast path."""

class ShmRunner(Runner):
    """Through shared memory.

    ``fail(status, note, message)`` makes the error of a call; ``give_up(error)`` raises what a
    signal's handler has raised in a collective.
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
    """Over methods of torch's classes, or over functions of Python.

    Methods are those of ``communicator.torch_group``. ``find(operation, op, dtype, root, is_list,
    is_empty)`` returns the shortcut of a kind of call, as in ``c10d/fast_path.py``, with a method's
    name, or a function that takes the arguments of the method; None leaves these calls to Python.
    ``end(work, note)`` waits for a work that is not None; of calls that are started,
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
    """The state that public collectives ask before each call.

    ``profiler`` and ``forward_ad`` are the names of torch's modules; ``contexts`` has the variable
    of worlds, once it is in use, and ``group_of_process`` the group of the process's world.
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
    """Note in this list which collective the main thread, of this number, is in, or None."""

def to_order(dtype: int, bits: object, floats: object, nan_is_greatest: bool, /) -> None:
    """Write plain ``floats`` of ``dtype`` as integers in the same order."""

def from_order(dtype: int, floats: object, bits: object, /) -> None:
    """Write the floats for integers that ``to_order`` wrote; ``bits`` is overwritten."""

def knows_torch() -> bool:
    """Whether the core reads what torch knows of a tensor where it lies; else it asks Python."""

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
    """A public collective's call, which takes an argument for each parameter, by place.

    ``places`` are those of the group, of ``async_op``, and of the root's two: by its rank, and by
    its place in the group; -1 stands for none. The method ``name`` of the group's fast path is
    given the arguments at the places ``taken``, with the root, or ``missing``, as a place in the
    group; all other parameters must have their defaults. What the fast path does not take goes to
    ``function``, as the collective that the main thread is in, or while there is a profiler, or
    another collective under way, to ``slow``; and to ``watched`` where ``watchers`` has any.
    """

class FastPath:
    """The fast path of the native core, for calls on plain tensors.

    A method has the name of its collective, does all that the collective does, and returns what it
    returns; or it does nothing, and returns False, where the call is not that plain. It raises what
    the collective raises. Roots and peers are places in the group. What ``op_name`` the call has,
    members compare.

    ``reductions`` are tuples: a ReduceOp, its number, and for each dtype that it takes the
    core's code of the reduction. A path with ``works`` starts its calls, and returns Works, made of
    the class, the group's timeout, what makes a failure's error, the group's name, what warns of a
    Work that is dropped, and what returns the group.
    """

    starting: FastPath | None
    """That of calls that are started; None where the backend starts none."""

    def __init__(
        self,
        entry: Entry,
        runner: Runner,
        reductions: list[tuple[Any, int, dict[Any, int]]],
        works: tuple[Any, ...] | None = None,
    ) -> None: ...
    def all_reduce(self, tensor: Any, op: Any, op_name: str | None = None, /) -> Any:
        """In place."""

    def reduce(self, tensor: Any, op: Any, root: int, /) -> Any:
        """To member ``root``."""

    def broadcast(self, tensor: Any, root: int, op_name: str | None = None, /) -> Any:
        """From member ``root``."""

    def all_gather_into_tensor(
        self, output: Any, tensor: Any, op_name: str | None = None, /
    ) -> Any:
        """In either form of the output."""

    def all_gather_single(self, output: Any, tensor: Any, /) -> Any:
        """The same."""

    def reduce_scatter_tensor(
        self, output: Any, tensor: Any, op: Any, op_name: str | None = None, /
    ) -> Any:
        """In either form of the input."""

    def reduce_scatter_single(self, output: Any, tensor: Any, op: Any, /) -> Any:
        """The same."""

    def all_gather(self, outputs: Any, tensor: Any, /) -> Any:
        """Into a list of tensors as large as this member's."""

    def gather(self, tensor: Any, outputs: Any, root: int, /) -> Any:
        """To member ``root``; ``outputs`` is None on the others."""

    def scatter(self, tensor: Any, inputs: Any, root: int, /) -> Any:
        """From member ``root``; ``inputs`` is None on the others."""

    def all_to_all(self, outputs: Any, inputs: Any, op_name: str | None = None, /) -> Any:
        """Of lists of tensors."""

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_sizes: Any = None,
        input_sizes: Any = None,
        op_name: str | None = None,
        /,
    ) -> Any:
        """In parts of as many rows as the sizes say; None means equal parts."""

    def barrier(self) -> Any:
        """Over all members."""

    def send(self, tensor: Any, peer: int, tag: Any, /) -> Any:
        """To member ``peer``."""

    def recv(self, tensor: Any, peer: int | None, tag: Any, /) -> Any:
        """From member ``peer``, or from any."""

def reduce_parts(output: object, data: object, num_parts: int, dtype: int, op: int, /) -> None:
    """Reduce equal parts of ``data``, first to last, into ``output``; both are plain."""

def stream(to: int, source: int, num_bytes: int, /) -> None:
    """Copy memory by stores that go past the caches: its lines are not read before."""

def stream_scaled(to: int, source: int, count: int, factor: float, /) -> None:
    """Copy float32 numbers times ``factor``, as ``stream`` does."""

def can_reduce(dtype: int, op: int, /) -> bool: ...
def create_segment(size: int, slot_bytes: int, ring_bytes: int, is_crowded: bool) -> int:
    """A sealed memfd for ``size`` members, its first parts reserved; OSError without memory.

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

class Failure:
    """A failure that the native core has found."""

    @property
    def status(self) -> int:
        """The call's; where it is ABORTED that of the member that ended the communicator."""

    @property
    def culprit(self) -> int:
        """The member that died, or the first that differs from member 0; -1 for none."""

    @property
    def text(self) -> str:
        """Which sizes differ."""

    @property
    def was_closed(self) -> list[bool]:
        """Of each member whether it has closed its part."""

    @property
    def has_exited(self) -> list[bool]:
        """Of each member whether its process has ended."""

    @property
    def source(self) -> int:
        """The sender of a message; -1 where it is not known."""

    @property
    def other_note(self) -> int:
        """The ``note`` of the other side of a message that did not fit."""

class Started:
    """A collective or message in flight, as an ``Request``; it keeps its tensors until done.

    A message, and what a thread of the core does, moves by itself. A collective of one round and
    few bytes is finished by the thread that waits for it, polls it, or runs the next.
    """

    is_plain: bool
    on_stream: bool
    adds_to_stream: bool

    def wait(self, timeout: float, /) -> int:
        """The status. On timeout a collective ends the communicator for all members; a message is
        given up, and its memory not touched again.
        """

    def wait_plainly(self) -> bool:
        """Wait for a fast path's collective within its group's timeout; False where it has not
        ended well, or this is a collective inside a collective: then ``Work`` waits."""

    def may_be_dropped(self) -> None:
        """Let nothing be said where its ``Work`` is dropped."""

    def leave_work(self, result: list[Any], user: object, /) -> tuple[tuple[Any, ...], bool]:
        """What a ``Work`` of these is made with; whether ``wait_plainly`` waited.

        Nothing is said here from then on where the ``Work`` is dropped.
        """

    def is_done(self) -> bool: ...
    def failure(self) -> Failure:
        """Of an operation that is done."""

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
    """A collective in flight in a class of torch's, which an operation of Python's waits for."""

def explain_failures_by(
    make: Callable[[int, Failure, int, tuple[bool, int, int] | None], Exception],
) -> None:
    """Let ``make`` make what ``finish`` raises: of a status, its failure, and the ``note``."""

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
        """Do the collective ``OPERATIONS[...]``; returns the status.

        ``count`` is one member's part, 0 where parts differ. What a collective gives and takes is
        one
        buffer, ``data`` and ``output``, or several, each an address and a count: ``native/codes.h``
        says which. What is reduced in place, or sent by ``broadcast``, is its output; where that is
        not row-major ``layouts`` has, of each output, sizes and strides without gaps, both empty
        for one that is. Members whose layouts differ do it in row-major order.
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
        """The same without waiting; ``kept`` are the tensors, ``number`` is that of the call."""

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
        """Send or receive; ``peer`` -1 takes from any member, and ``last_source`` is the sender.

        ``note`` is what the other side gets as ``other_note`` where the two do not fit.
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
        """The same without waiting; ``message`` is (is_send, peer, tag)."""

    @property
    def last_source(self) -> int: ...
    def last_failure(self) -> Failure:
        """Of the last blocking collective that failed."""

    def last_transfer_failure(self) -> Failure:
        """The same for send and recv."""

    def add_memory(self, memory: Memory, /) -> None:
        """Read buffers in ``memory`` where they lie. All members add it, in the same order, between
        collectives; collectives find out by themselves whose inputs lie there.
        """

    def abort(self) -> None:
        """Free every thread of every member that waits in this communicator."""

    def close(self) -> None:
        """End this member's part; what waits here ends as CLOSED."""

    def announce_end(self) -> None:
        """Announce to the others that this process exits normally."""

    @property
    def reads_others(self) -> bool:
        """Whether parts of some sizes are read where they lie in other members' memory.

        It is tried before the first collective, and given up for good when it fails.
        """
    def set_tuning(self, name: str, value: int, /) -> None: ...
