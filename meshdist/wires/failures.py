"""How a wire fails; the verbs turn it into an error that explains."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

__all__ = [
    "Interrupted",
    "MemberGaveUp",
    "MemberLost",
    "MembersDisagree",
    "MessageMisfit",
    "WireAborted",
    "WireFailure",
    "WireRefused",
    "WireTimeout",
    "given_up_for",
]


class WireFailure(Exception):
    """A wire could not finish an operation; the verbs turn it into an error that explains."""

    limit: timedelta | None = None
    """How long the caller was ready to wait, where that is not the group's timeout."""

    fix: str = ""
    """The fix, where the wire knows it."""


class WireTimeout(WireFailure):
    """An operation was not finished in time."""

    @classmethod
    def after(cls, timeout: timedelta) -> WireTimeout:
        """Of an operation that may take ``timeout``."""
        return cls(f"not finished after {timeout.total_seconds():g} s")


class WireAborted(WireFailure):
    """The communicator was aborted while an operation waited."""


class MemberGaveUp(WireAborted):
    """A member has given up while others waited, as ``text`` says, and tells why elsewhere."""

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class Interrupted(WireFailure):
    """The error of a signal's handler for which this member has given up a collective.

    Args:
        error: as the program is to see it.
        is_over: whether the wire uses no memory of the caller's any more.
    """

    def __init__(self, error: BaseException, is_over: Callable[[], bool] = lambda: True) -> None:
        super().__init__(f"{type(error).__name__}: {error}".rstrip(": "))
        self.error = error
        self.is_over = is_over


def given_up_for(error: BaseException, is_over: Callable[[], bool] = lambda: True) -> WireFailure:
    """The failure of a collective that this member gives up: the wire's, or Interrupted."""
    return error if isinstance(error, WireFailure) else Interrupted(error, is_over)


class WireRefused(WireFailure):
    """The wire cannot serve this group; every member raises this."""


class MemberLost(WireFailure):
    """A member has ended or left the group, as ``text`` says, while others waited for it."""

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class MessageMisfit(WireFailure):
    """A message came that is longer or shorter than what was to receive it."""


class MembersDisagree(WireFailure):
    """A wire that compares calls found that members have started different ones.

    Args:
        text: what differs.
        number: of the call; None for the last. Of a message what the verbs gave as ``number``
            where the peer's is known as well; else how many of its kind there were.
        message: for a message whether it is a send, the peer and the tag.
        other_number: what the peer's verb gave as ``number``.
        late: where data were sent since, the first call that may differ, and the last one here.
    """

    def __init__(
        self,
        text: str,
        number: int | None,
        message: tuple[bool, int, int] | None = None,
        other_number: int | None = None,
        late: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(text)
        self.number = number
        self.late = late
        self.message = message
        self.other_number = other_number
