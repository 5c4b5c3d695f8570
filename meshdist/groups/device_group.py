"""Record, compare, start and finish a group's operations for one device type."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from ..arrays import find_cupy_sync
from ..backends.communicator import Communicator, explained
from ..backends.native_core import core
from ..backends.operation_args import ROW_MAJOR, Layout, OperationArgs, Sizes, find_layout, flat
from ..backends.registry import BackendType
from ..backends.requests import (
    DONE,
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    RanksMismatch,
    followed,
)
from ..backends.started_work import StartedWork
from ..backends.work import WatchedWork, Work
from ..checking.call_sites import line_of, warn_once_at
from ..checking.calls import Call, CallRecord, GroupFacts, calls, get_call, get_message
from ..checking.debug_levels import TRACE, DebugLevel, get_debug_level, operations_log
from ..checking.fingerprint_table import CHECK_EVERY, FingerprintTable
from ..checking.recorder import Recorder
from ..error_text import explain
from ..errors import MeshdistError, StoreError
from .communicators import OpenCommunicator
from .failure_diagnosis import FailureDiagnosis, PeerStatus
from .host_comparison import is_due

if TYPE_CHECKING:
    from ..backends.native import FastPath

_EVEN: tuple[Sizes, Sizes] = ((), ())
DEVICE_TYPES = {"cpu": 1, "cuda": 2}
"""The devices on which calls take the fast path, as DLPack numbers them."""


class DeviceGroup:
    """Operations of one group for one device type.

    Args:
        opened: A communicator, which other groups may share.
        others: The other members' status, for error reports.
        user: Returns the group, which each Work keeps alive.
    """

    def __init__(
        self,
        group: GroupFacts,
        backend: BackendType,
        opened: OpenCommunicator,
        device_type: str,
        others: PeerStatus,
        user: Callable[[], Any] = lambda: None,
    ) -> None:
        self.group = group
        self.backend = backend
        self.opened = opened
        self.user = user
        self.aborts = opened.aborts
        self.device_type = device_type
        self._uses_streams = opened.communicator.on_stream or device_type != "cpu"
        self.timeout = group.timeout
        self.communicator: Communicator = opened.communicator
        self.fingerprint_table = opened.fingerprint_table
        self.recorder = opened.recorder
        self.spans_hosts = opened.spans_hosts
        self._others = others
        self.explain = FailureDiagnosis(group, self.recorder, others).explain
        self.communicator.watch(self.explain)
        # This must not reference the device group, which keeps the native core's part that gets it.
        self.disagree = partial(_disagreement, self.explain)
        self._warn_dropped: Callable[[int], None] | None = partial(
            _warn_dropped, self.recorder, self.aborts, opened.label
        )
        self._comparison = opened.comparison
        self._leaves_early = opened.communicator.leaves_early
        entry = self._native_entry()
        self._enter = (lambda *_: False) if entry is None else entry.enter
        self.fast_path: FastPath | None = None
        if entry is not None:
            works = (
                WatchedWork,
                StartedWork,
                self.timeout,
                self.explain,
                group.name,
                self._warn_dropped,
                user,
                self._uses_streams,
            )
            self.fast_path = self.communicator.fast_path(entry, self.explain, self.timeout, works)

    @property
    def demands_layouts(self) -> bool:
        """Return whether the members' memory layouts must be equal."""
        return self.opened.sees_all_calls

    def explained(self, error: BaseException) -> BaseException:
        """Return ``error``, explained if a backend or signal handler raised it."""
        return explained(self.explain, self.timeout, error)

    def enter(self, prepared: OperationArgs, layouts: Sequence[Layout] = ()) -> None:
        """Record the collective ``prepared`` and compare it with the other members' calls.

        Args:
            prepared: collective, op, root and operation name must be equal on all members, and the
                dtype and number of elements of ``noted`` (with ``sizes`` only the dtype).
            layouts: of the tensors, if ``demands_layouts``.

        Raises:
            MismatchError: another member has started another call; every member that waits raises
                it.
            CollectiveTimeoutError: a member lags by more than a thousand calls for too long.
        """
        operation, tensor, sizes = prepared.operation, prepared.noted, prepared.sizes
        op, root, op_name = prepared.noted_op, prepared.root, prepared.op_name
        call = get_call(operation, tensor, op, root, op_name, sizes is not None, tuple(layouts))
        prepared.call = call
        recorder = self.recorder
        if sizes is None and not layouts and self._enter(call, call.fingerprint):
            prepared.sequence, _, prepared.number = recorder.counts
            if self._leaves_early and prepared.root is not None:
                self._await_rooted(prepared)
            return
        sent, received = sizes or _EVEN
        self._note(call, sizes or ())
        prepared.sequence, _, prepared.number = recorder.counts
        fingerprint_table, sequence = self.fingerprint_table, prepared.sequence
        if fingerprint_table is not None:
            if sent or not sequence % CHECK_EVERY:
                self._wait_for_the_slowest(fingerprint_table, sequence, bool(sent))
            if fingerprint_table.enter(sequence, call.fingerprint, sent, received):
                raise self.disagree(sequence)
        if self.spans_hosts or self.communicator.on_stream:
            self._compare_before_data_move(call, tensor, sent, received)
        if self._comparison is not None:
            self._comparison.fingerprints[sequence % CHECK_EVERY] = call.fingerprint
            if is_due(sequence):
                self._compare_with_hosts(prepared, tensor)
        if self._leaves_early and prepared.root is not None:
            self._await_rooted(prepared)

    def _await_rooted(self, prepared: OperationArgs) -> None:
        """Wait for all if a rank could finish this rooted call before others start it."""
        if (
            prepared.waits
            and self.fingerprint_table is not None
            and self.fingerprint_table.sees_all()
        ):
            self._wait_for_all()

    def run(self, prepared: OperationArgs, *, is_async: bool = False) -> Work | None:
        """Start ``prepared`` and wait; with ``is_async``, return its Work immediately.

        Raises:
            MismatchError, CollectiveTimeoutError: as ``enter``; a message's counterpart has another
                dtype or number of elements.
            CollectiveTimeoutError, AbortedError, BackendError: as the group explains.
        """
        prepared.timeout, prepared.waits = prepared.limit or self.timeout, not is_async
        if prepared.is_message:
            self._start_message(prepared)
        else:
            if prepared.lies_otherwise:
                self._enter_with_layout(prepared)
            else:
                self.enter(prepared)
            self.start_entered(prepared)
        if is_async:
            return self.work(prepared)
        if prepared.request is not DONE or prepared.is_elsewhere or prepared.foreign:
            self.finish(prepared)
        return None

    def start_entered(self, prepared: OperationArgs) -> None:
        """Start a collective after ``enter``; set ``prepared.request``, or raise."""
        if prepared.written:
            prepared.begin_here()
        prepared.recorder = self.recorder
        try:
            request, then = self.communicator.start(prepared), prepared.then
            prepared.request = request if then is None else followed(request, then)
        except BaseException as error:
            raise self._error_of_call(prepared, error) from None

    def start_together(self, messages: Sequence[OperationArgs]) -> None:
        """Start sends and receives in a batch without order; ``finish`` or a Work awaits each."""
        with self.communicator.batch(self.explain):
            for message in messages:
                message.timeout = self.timeout
                self._start_message(message)

    def finish(self, prepared: OperationArgs, remaining: timedelta | None = None) -> None:
        """Wait for a call, at most ``remaining`` or its timeout; copy results to the arrays."""
        request = prepared.request
        try:
            if request is not DONE:
                request.finish(prepared.timeout if remaining is None else remaining)
        except BaseException as error:
            if remaining is not None and isinstance(error, BackendTimeout):
                error = BackendTimeout.after(prepared.timeout)
            raise self._error_of_call(prepared, error) from None
        if prepared.is_elsewhere or prepared.foreign:
            prepared.finish_here()

    def work(self, prepared: OperationArgs) -> Work:
        """Return a started call's Work."""
        written, result = prepared.written, prepared.result
        results = list(map(itemgetter(0), written) if result is None else result)
        number = self.recorder.num_notes if prepared.number is None else prepared.number
        # If this rank only sends, the receiving members warn about dropped Works.
        warn_dropped = self._warn_dropped if written or not results else None
        return WatchedWork(
            prepared.request,
            self.timeout,
            self.explain,
            results,
            prepared.find_copy_back() if prepared.is_elsewhere else None,
            prepared.operation,
            self.group.name,
            prepared.is_message,
            find_cupy_sync(prepared.foreign) if prepared.foreign else None,
            number,
            warn_dropped,
            self.user(),
            self._uses_streams,
        )

    def _enter_with_layout(self, prepared: OperationArgs) -> None:
        """Enter a collective whose tensors are not row-major; send them flat or copied."""
        tensors, op = prepared.inputs, prepared.op
        if self.communicator.takes_layouts(prepared.backend_operation, tensors, op):
            self.enter(prepared)
        elif op is not None and self.demands_layouts:
            self.enter(prepared, [find_layout(tensor) or ROW_MAJOR for tensor in tensors])
            prepared.travel_as([flat(tensor) for tensor in tensors], are_copies=False)
        else:
            self.enter(prepared)
            prepared.travel_as([tensor.contiguous() for tensor in tensors], are_copies=True)

    def _start_message(self, prepared: OperationArgs) -> None:
        """Record and start a send or receive; raise if its recorded counterpart does not match."""
        communicator, recorder, table = self.communicator, self.recorder, self.fingerprint_table
        peer, tag, is_send = prepared.root, prepared.tag, not prepared.outputs
        call = get_message(prepared.operation, prepared.noted, peer, tag)
        prepared.recorder = recorder
        # The earlier a receive is posted, the less its sender waits, so record the call while the
        # message is in transit.
        is_noted_late = not is_send and communicator.posts_at_once and not self.is_broken()
        if not is_noted_late:
            self._note(call)
        if table is None or peer is None:
            if table is not None:
                table.recv_any(tag)
        elif (different := table.note(peer, tag, call.fingerprint, is_send=is_send)) is not None:
            if is_noted_late:
                self._note(call)
            raise self.disagree(different, (is_send, peer, tag))
        _, _, prepared.sequence = recorder.counts
        if prepared.written:
            prepared.begin_here()
        failed: BaseException | None = None
        try:
            prepared.request = communicator.start(prepared)
        except BaseException as error:
            failed = error
        if is_noted_late:
            self._note(call)
        _, _, prepared.number = recorder.counts
        if failed is not None:
            raise self._error_of_call(prepared, failed) from None

    def _error_of_call(self, prepared: OperationArgs, error: BaseException) -> BaseException:
        """Return a failed call's error, explained if it is a BackendFailure."""
        if isinstance(error, BackendFailure):
            error.limit = prepared.timeout
            return self.explain(error, prepared.number)
        # A message that a handler interrupts may still arrive. A receive from any member, which
        # only a backend that compares calls cancels, would then accept another message, so it
        # breaks the group.
        stays = prepared.root is not None or self.backend.compares_calls
        return error if prepared.is_message and stays else self.explained(error)

    def is_broken(self) -> bool:
        """Return whether the group is unusable, so that every call on it raises."""
        return self.opened.label in self.aborts

    def reject_broken(self) -> None:
        """Raise an earlier call's pending error, or the reason, if the group is unusable."""
        if self.aborts and self.is_broken():
            error = self.communicator.take_error()
            if error is None:
                error = self.explain(BackendAborted("an earlier call on this group failed"))
            raise error

    def _note(self, call: Call, sizes: Sequence[Sequence[int]] = ()) -> None:
        """Record a call; raise if the group is unusable."""
        note = self.recorder.note(self.group, call, sizes)
        if operations_log.isEnabledFor(TRACE):
            operations_log.log(TRACE, "%s: %s", self.group.here, CallRecord(*note).heading)
        if self.aborts:
            self.reject_broken()

    def _native_entry(self) -> Any:
        """Return the native Entry for fast-path calls; None without native code."""
        notes = None
        if core is not None:
            notes = self.recorder.for_core(core.Notes)
        if notes is None:
            return None
        table, comparison = self.fingerprint_table, self._comparison
        on_stream = self.communicator.on_stream
        device_type = self.device_type if on_stream else "cpu"  # others copy to the host
        get_level = torch.distributed.get_debug_level if on_stream else None
        if self.spans_hosts:
            get_level = partial(_level, self.opened)
        return core.Entry(
            notes,
            self.group,
            headers=None if table is None else table.for_core(core.Words, core.Headers),
            aborts=self.aborts,
            label=self.opened.label,
            log=operations_log,
            log_level=TRACE,
            ranks=self.group.ranks,
            member=self.group.rank,
            calls=calls,
            disagree=self.disagree,
            fingerprints=None if comparison is None else core.Words(comparison.fingerprints),
            check_every=0 if comparison is None else CHECK_EVERY,
            get_level=get_level,
            most_level=self._most_level.value,
            device_type=DEVICE_TYPES.get(device_type, 0),
        )

    @property
    def _most_level(self) -> DebugLevel:
        """Return the highest debug level that lets data move before all members have called."""
        return DebugLevel.OFF if self.communicator.on_stream else DebugLevel.INFO

    def _compare_before_data_move(
        self,
        call: Call,
        tensor: torch.Tensor | list[torch.Tensor] | None,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> None:
        """Raise, before data moves, if calls differ and the debug level demands it.

        Args:
            sent, received: numbers of elements per member; () if equal.
        """
        # On a backend whose collectives are enqueued, the other members no longer wait when a late
        # member's call differs.
        compares_first = _level(self.opened).value > self._most_level.value
        try:
            if self.opened.sees_all_calls:
                if compares_first:
                    self._wait_for_all()
            elif compares_first:
                self._compare_by_a_round(
                    call.fingerprint_inputs, sent, received, self._device_of(tensor)
                )
        except BaseException as error:
            raise self.explained(error) from None

    def _compare_with_hosts(
        self, prepared: OperationArgs, tensor: torch.Tensor | list[torch.Tensor] | None
    ) -> None:
        """Compare the calls since the last round with other hosts; raise if any differ."""
        assert self._comparison is not None
        device, timeout = self._device_of(tensor), prepared.timeout
        try:
            differing = self._comparison.compare(
                prepared.sequence, device, timeout, waits=prepared.waits
            )
        except BaseException as error:
            raise self._error_of_call(prepared, error) from None
        if differing is not None:
            raise self.disagree(differing)

    def compare_last(self, meet: Callable[[str], bool], timeout: timedelta) -> None:
        """Compare the calls after the last round, at the communicator's close.

        Args:
            meet: waits for all members under a key; returns whether they came.
            timeout: how long a round may take.

        Raises:
            MismatchError: calls differ, on every member.
        """
        comparison, sequence, differing = self._comparison, self.recorder.sequence, None
        if comparison is None or self.is_broken():
            return
        with suppress(BackendFailure, StoreError):  # a member has ended, and makes no more calls
            if sequence == comparison.last:
                differing = comparison.finish(timeout)
            elif meet(f"{self.opened.label}/last/{sequence}"):
                differing = comparison.compare(sequence, self.device_type, timeout, waits=True)
        if differing is not None:
            raise self.disagree(differing)

    def _device_of(self, tensor: torch.Tensor | list[torch.Tensor] | None) -> torch.device | str:
        """Return the device of the numbers by which members compare a call on ``tensor``."""
        first = tensor[0] if isinstance(tensor, list) else tensor
        if first is None or first.device.type != self.device_type:  # a barrier; a "meta" tensor
            return self.device_type
        return first.device

    def _wait_for_all(self) -> None:
        """Wait until all members make this rank's last call; raise on a timeout or a mismatch."""
        fingerprint_table, sequence = self.fingerprint_table, self.recorder.sequence
        if fingerprint_table is None:  # there are no others
            return
        differing = fingerprint_table.wait_for_all(sequence, self.timeout, self.reject_broken)
        if differing is None:
            raise self.explain(BackendTimeout("not all ranks reached the call"))
        if differing:
            raise self.disagree(sequence)

    def _wait_for_the_slowest(
        self, fingerprint_table: FingerprintTable, sequence: int, is_uneven: bool
    ) -> None:
        """Wait until all members have read the entry that call ``sequence`` overwrites."""
        check = self.reject_broken
        member = fingerprint_table.wait_for_the_slowest(sequence, is_uneven, self.timeout, check)
        if member is not None:
            slow = f"rank {self.group.ranks[member]} is too many calls behind"
            raise self.explain(BackendTimeout(slow))

    def _compare_by_a_round(
        self,
        common: tuple[int, ...],
        sent: Sequence[int],
        received: Sequence[int],
        device: torch.device | str,
    ) -> None:
        """Compare a call on all members by an all-gather that waits for them; raise if it differs.

        Args:
            common: numbers that must be equal on all members.
            sent, taken: elements sent to and received from each member, which must match pairwise;
                () if the collective is not uneven.
            device: of the gathered numbers.
        """
        size = len(self.group.ranks)
        nothing = [0] * size
        values = [*common, *(sent or nothing), *(received or nothing)]
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        all_of_them = mine.new_empty(size * len(values))
        gather = OperationArgs("", "all_gather", [mine], [all_of_them]).as_own(self.timeout)
        self.communicator.start(gather).finish(self.timeout)
        inputs = all_of_them.view(size, -1).tolist()
        commons = {tuple(each[: len(common)]) for each in inputs}
        sends = [each[len(common) :][:size] for each in inputs]
        takes = [each[len(common) + size :] for each in inputs]
        fits = all(sends[i][j] == takes[j][i] for i in range(size) for j in range(size))
        if len(commons) > 1 or not fits:
            raise self.disagree(self.recorder.sequence)


def _level(opened: OpenCommunicator) -> DebugLevel:
    """Return the debug level of a communicator's next call."""
    return DebugLevel.DETAIL if opened.compares_first else get_debug_level()


def _disagreement(
    explain: Callable[[BackendFailure], MeshdistError],
    number: int,
    message: tuple[bool, int, int] | None = None,
) -> MeshdistError:
    """Return the error of a differing call ``number``, or message (is_send, peer, tag)."""
    return explain(RanksMismatch("the members' calls differ", number, message))


def _warn_dropped(recorder: Recorder, aborts: Container[str], label: str, note: int) -> None:
    """Warn, once per call site, that the Work of call ``note`` was dropped; not after an abort."""
    noted = recorder.find_note(note)
    if label in aborts or noted is None or noted.code is None or sys.is_finalizing():
        return
    site = noted.code.co_filename, line_of(noted.code, noted.instruction)
    warn_once_at(
        site,
        lambda: explain(
            f"the Work of {noted.call.name} was dropped before wait() was called",
            where=noted.heading,
            expected="wait() or a future before its tensors are used, which may hold any values",
            fix="keep the Work and call wait(), or call the collective without async_op=True",
        ),
    )
