"""Turn a call's failure into an error that reports every member's call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..backends.registry import BackendType
from ..backends.requests import (
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    BackendUnsupported,
    Interrupted,
    MemberLost,
    MemberStopped,
    MessageMismatch,
    RanksMismatch,
)
from ..checking.calls import CallRecord, GroupFacts, get_call, likeness
from ..checking.recorder import Recorder
from ..error_text import UNUSABLE_GROUP, ranks_text
from ..errors import (
    AbortedError,
    BackendError,
    CollectiveTimeoutError,
    MeshdistError,
    MismatchError,
)
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import IN_GOOD_ORDER

STORE_LOST = "the store is lost"
_REASON_S = 1.0


@contextmanager
def explained_opening(
    group: str,
    ranks: Sequence[int],
    backend: BackendType,
    where: str,
    find_silent: Callable[[], str] = str,
    report: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Turn a BackendFailure while ``group`` opens into an error that names it.

    Args:
        find_silent: Returns text about unresponsive members, or "".
        report: Called with the failure's text before the error.
    """
    try:
        yield
    except BackendFailure as failure:
        kind = CollectiveTimeoutError if isinstance(failure, BackendTimeout) else BackendError
        is_rejected = isinstance(failure, BackendUnsupported)
        usual = "check that all of these ranks make this call and that none has exited"
        if is_rejected:
            usual = f"name another backend, for example {backend.replacement or 'gloo'!r}"
        error = kind(
            f"{group} could not be opened on backend {backend.name!r}",
            where=where,
            found="\n".join(
                filter(None, (_text_of(failure, ranks), "" if is_rejected else find_silent()))
            ),
            fix=failure.fix or usual,
        )
        if report is not None:
            report(str(failure))
        raise error from None


class PeerStatus(ABC):
    """Queries and messages to a communicator's other members."""

    # Methods that are not abstract do nothing by default.

    compare_mismatches = True
    """Whether the sender raises, too, if its message does not match the receive."""

    @property
    def is_closed(self) -> bool:
        """Return whether this member has closed the communicator."""
        return False

    def compare_again(  # noqa: B027 (most compare nothing while they wait)
        self, *, is_thorough: bool = True
    ) -> None:
        """Compare again the calls that not all members had reached.

        Args:
            is_thorough: Whether to continue after such a call.

        Raises:
            RanksMismatch: calls differ.
        """

    def find_abort(self) -> dict[str, Any] | None:
        """Return the abort's ``rank``, ``reason``, maybe ``disagreement``; None if not aborted."""
        return None

    @abstractmethod
    def break_here(self, reason: str) -> None:
        """Make this member's later calls on the communicator raise with ``reason``."""

    def give_up(self, reason: str) -> None:  # noqa: B027 (those in one process fail together)
        """Abort the communicator on all members with ``reason``."""

    def report(self, call: CallRecord, but: int | None = None) -> str:
        """Return text on which members, except ``but``, reached ``call``."""
        return ""

    def silent(self) -> str:
        """Return text about unresponsive members, or ""."""
        return ""

    def ending(self, member: int) -> str:
        """Return how a member left, for example "ended by ValueError: no data", or ""."""
        return ""

    def find_first_failure(self, call: CallRecord, text: str) -> str:
        """Return the first failed member's report; "" if this rank, storing ``text``, is first."""
        return ""

    @abstractmethod
    def agree_on_error(
        self, disagreement: dict[str, str], mine: CallRecord | None, about: dict[str, Any]
    ) -> dict[str, str]:
        """Make all members raise the same MismatchError; abort; return its fields.

        Args:
            disagreement: The error's fields, to be completed.
            mine: This member's call, if known.
            about: The others' call, as for ``Recorder.text_about``; ``asked``: the members to ask,
                if not all.

        Returns:
            The fields from the first member that detected the mismatch.
        """


class FailureDiagnosis:
    """Converter of one communicator's failures to errors with ranks, call sites and reasons."""

    def __init__(self, group: GroupFacts, recorder: Recorder, others: PeerStatus) -> None:
        self._group = group
        self._recorder = recorder
        self._others = others
        self._unknown = CallRecord(0, group, get_call("an earlier call", None))

    def explain(self, failure: BackendFailure, note: int | None = None) -> MeshdistError:
        """Return the error of ``failure`` in call ``note`` or the last call."""
        # The first rank that fails stores its reason, which later ranks quote. An exception of a
        # signal handler is reported to the others and raised here unchanged.
        if isinstance(failure, Interrupted):
            self._others.give_up(f"gave up in {self._find_call(note).heading}: {failure}")
            wait_until(failure.is_over, Deadline(_REASON_S))
            raise failure.error from None
        if not isinstance(failure, RanksMismatch):
            try:
                self._others.compare_again()
            except RanksMismatch as disagreement:
                failure = disagreement
        call = self._find_call(note)
        text = _text_of(failure, self._group.ranks)
        ending, lost = "", failure.member if isinstance(failure, MemberLost) else None
        if lost is not None and (ending := self._others.ending(lost)):
            text = f"rank {self._group.ranks[lost]} {ending}"
        if isinstance(failure, RanksMismatch):
            if failure.message is None:
                return self._different_calls(failure.number or call.sequence)
            return self._different_messages(failure.message, failure, call)
        is_mismatch = isinstance(failure, MessageMismatch) and self._others.compare_mismatches
        if is_mismatch and call.is_message:
            different = RanksMismatch("", call.number)
            return self._different_messages(call.call.kind, different, call, text)
        abort = self._others.find_abort()
        if abort is None and isinstance(failure, MemberStopped):  # its reason follows shortly
            abort = wait_until(self._others.find_abort, Deadline(_REASON_S))
        if abort is not None or isinstance(failure, BackendAborted):
            return self._aborted(call, text, abort)
        if self._others.is_closed:
            return self._failed(
                call, text, "wait for the calls of all threads before you destroy the group"
            )
        is_late = isinstance(failure, BackendTimeout)
        # A rank whose timeout closes its connections is the first to fail, and says so at once. One
        # that sees them closed asks before who is still there.
        silent = "" if is_late or lost is not None else self._others.silent()
        cause = "; ".join([text, *silent.splitlines()])
        first = self._others.find_first_failure(call, cause)
        if ending:  # others that noticed it before are no cause
            first = ""
        # Ask before the group is aborted: others may exit as soon as they notice that.
        is_cause_known = (
            silent or first or (lost is not None and not ending.startswith(IN_GOOD_ORDER))
        )
        report = "" if is_cause_known and not is_late else self._others.report(call, lost)
        self._others.break_here(f"{call.call.name} failed before: {text}")
        if is_late:
            found = "\n".join(dict.fromkeys(filter(None, (report, first)))) or text
            return self._late(call, failure, found)
        return self._failed(
            call,
            "\n".join(dict.fromkeys(filter(None, (text, silent, first, report)))),
            f"resolve the error of the rank that exited or failed first; {UNUSABLE_GROUP}",
        )

    def _different_calls(self, sequence: int) -> MeshdistError:
        """Return the error, equal on all members, of differing calls ``sequence``."""
        mine = self._recorder.find_call(sequence)
        expected = likeness(mine)
        if mine is not None and mine.call.layouts:
            expected += ", and the same memory layout (x.contiguous() gives the default one)"
        fields = {
            "summary": f"collective mismatch: ranks made different calls as call {sequence}",
            "where": self._group.name,
            "expected": expected,
            "found": "",
            "fix": "call the same collectives in the same order, with matching tensors, "
            "on every rank",
        }
        return self._agreed_error(fields, mine, {"sequence": sequence})

    def _different_messages(
        self,
        sides: tuple[bool, int | None, int | None],
        failure: RanksMismatch,
        call: CallRecord,
        found: str = "",
    ) -> MeshdistError:
        """Return the error, equal on both sides, of a message that differs from its receive.

        Args:
            sides: Whether this rank sends, its peer and its tag.
            call: This rank's message, if ``failure`` names none.
            found: How the message differs.
        """
        is_send, peer, tag = sides
        mine = self._recorder.find_note(failure.number) if failure.number else call
        about: dict[str, Any] = {"note": failure.other_number}
        if failure.other_number is None:
            mine = self._recorder.find_message(is_send, peer, tag, failure.number)
            about = {"message": [not is_send, self._group.rank, tag, failure.number]}
        fields = {
            "summary": "message mismatch: a send does not match its receive",
            "where": f"{self._group.name}, tag {tag}",
            "expected": "the same dtype and number of elements on both sides, and objects received "
            "as objects",
            "found": found,
            "fix": "receive into a tensor like the one that is sent, or pass a different tag for "
            "each kind of message",
        }
        return self._agreed_error(fields, mine, {**about, "asked": [] if peer is None else [peer]})

    def _agreed_error(
        self, disagreement: dict[str, str], mine: CallRecord | None, about: dict[str, Any]
    ) -> MeshdistError:
        call = self._find_call()
        abort = self._others.find_abort()
        if abort is not None:  # another member has seen it first
            return self._aborted(call, "aborted", abort)
        agreed = self._others.agree_on_error(disagreement, mine, about)
        return self._agreement_error(call, agreed)

    def _aborted(self, call: CallRecord, text: str, abort: dict[str, Any] | None) -> MeshdistError:
        if abort is None:
            first = self._others.find_first_failure(call, text)
            lines = (first or text, self._others.report(call))
            reason = "\n".join(dict.fromkeys(filter(None, lines)))
            if not call.is_message:  # the next call would wait for the member that gave up
                self._others.break_here(f"{call.call.name} was aborted before: {text}")
        elif abort.get("disagreement"):
            return self._agreement_error(call, abort["disagreement"])
        else:
            reason = f"rank {abort['rank']}: {abort['reason']}"
        return AbortedError(
            f"{call.call.name} on {self._group.name} was aborted",
            where=self._where(call),
            found=reason,
            fix="keep the rank that hosts the store running until the others finish, and restart "
            "the program"
            if reason.startswith(STORE_LOST)
            else "create a new group or mesh with the remaining ranks",
        )

    def _agreement_error(self, call: CallRecord, disagreement: dict[str, str]) -> MismatchError:
        where = f"{disagreement['where']}\nraised on {self._where(call)}"
        return MismatchError(**{**disagreement, "where": where})

    def _late(self, call: CallRecord, failure: BackendFailure, found: str) -> MeshdistError:
        seconds = (failure.limit or self._group.timeout).total_seconds()
        fix = "check why these ranks did not reach this call or passed different tensors"
        if call.is_message:
            fix = "pass the same tag, dtype and number of elements to send and recv"
        return CollectiveTimeoutError(
            f"{call.call.name} on {self._group.name} timed out after {seconds:g} s",
            where=self._where(call),
            expected=call.waits_for or f"the same call on {ranks_text(self._group.ranks)}",
            found=found,
            fix=f"{fix}; {UNUSABLE_GROUP}",
        )

    def _failed(self, call: CallRecord, found: str, fix: str) -> MeshdistError:
        return BackendError(
            f"{call.call.name} on {self._group.name} failed on backend {self._group.backend!r}",
            where=self._where(call),
            found=found,
            fix=fix,
        )

    def _where(self, call: CallRecord) -> str:
        return f"{self._group.here}, {call.heading}"

    def _find_call(self, note: int | None = None) -> CallRecord:
        return self._recorder.find_note(note) or self._unknown


def _text_of(failure: BackendFailure, ranks: Sequence[int]) -> str:
    """Return the failure's text, with a member's global rank from ``ranks``."""
    if isinstance(failure, (MemberLost, MemberStopped)):
        return f"rank {ranks[failure.member]} {failure}"
    return str(failure)
