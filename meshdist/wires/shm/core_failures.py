"""The meaning of the native core's failures."""

from __future__ import annotations

from typing import Any

from ..core import core
from ..failures import (
    MemberGaveUp,
    MemberLost,
    MembersDisagree,
    WireAborted,
    WireFailure,
    WireTimeout,
)

__all__ = ["failure_of"]


def failure_of(
    status: int,
    failure: Any,
    number: int | None = None,
    message: tuple[bool, int, int] | None = None,
) -> WireFailure:
    """The failure that a status of the core's means; a ``message`` is (is_send, peer, tag)."""
    known = core.STATUSES
    cause = failure.status if status == known["ABORTED"] else status
    text = failure.text
    if cause == known["TIMEOUT"]:
        return WireTimeout(text or "its timeout has passed")
    if cause == known["MISMATCH"]:
        if message is None:
            return MembersDisagree(text or "the members' calls differ", number)
        is_send, peer, tag = message
        message = is_send, peer if peer >= 0 else failure.source, tag
        other = failure.other_note
        return MembersDisagree("a message does not fit", number, message, other)
    if cause == known["DIED"] or (cause == known["ABORTED"] and _gone(failure)):
        return _lost(failure, message)
    if cause == known["CLOSED"]:
        return WireFailure("the communicator was closed")
    if cause == known["INTERRUPTED"] and failure.culprit >= 0:
        return MemberGaveUp("has given up waiting for this call", failure.culprit)
    if cause == known["CANCELLED"] and message is not None:
        peer = message[1] if message[1] >= 0 else failure.source
        return MemberGaveUp("has given up this message", peer)
    return WireAborted(text or "the communicator was aborted")


def _gone(failure: Any) -> list[int]:
    """The members that have ended or closed their part."""
    pairs = zip(failure.has_exited, failure.was_closed, strict=True)
    return [member for member, seen in enumerate(pairs) if any(seen)]


def _lost(failure: Any, message: tuple[bool, int, int] | None) -> MemberLost:
    """The member that has gone, and how; of a message its other side, if that has."""
    member, gone = failure.culprit, _gone(failure)
    if message is not None and message[1] in gone:
        member = message[1]
    elif member < 0:
        member = gone[0]
    has_ended = failure.has_exited[member] or not failure.was_closed[member]
    return MemberLost("has ended" if has_ended else "has closed this group", member)
