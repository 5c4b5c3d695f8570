"""Calls that ranks without data cannot answer; they are refused on every member alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..error_text import ranks_text
from ..errors import JoinError
from ..verb_table import VERBS, WIRE_VERBS
from .announcements import Announcement
from .channel import Channel

__all__ = ["find_call", "has_source", "message_refusal"]

_SOURCED_VERBS = frozenset(
    verb.name
    for verb in VERBS.values()
    if any(WIRE_VERBS[one].root == "from" for one in verb.wire_verbs)
)
"""The public verbs whose root gives what the others take."""


def has_source(call: Announcement) -> bool:
    """Whether one member gives what the others take, so that it must have data."""
    return call.verb in _SOURCED_VERBS and call.root is not None


def find_call(
    channel: Channel, said: Sequence[Announcement], *, is_strict: bool
) -> Announcement | None:
    """Return what the members that go on call; None where all have joined; else raise JoinError.

    With ``is_strict`` all members must have data.
    """
    call = next((one for one in said if not one.has_joined), None)
    ranks = channel.group.ranks
    if call is None:
        hooks = next((one for one in said if not one.is_waiting), None)
        if hooks is not None:
            raise JoinError(
                f"{hooks.text} is called on ranks that have joined alone",
                where=_where(channel),
                expected="in a hook only calls that ranks with data make, too",
                fix="call in main_hook what the joinable calls in one step, in this order",
            )
        return None
    joined = [rank for rank, one in zip(ranks, said, strict=True) if one.has_joined]
    if is_strict and joined:
        me = ranks[channel.group.rank]
        raise JoinError(
            f"rank {me} has no data left, and others have"
            if me in joined
            else "a rank has no data left, and this one has",
            where=_where(channel),
            expected="equally many steps on every rank: throw_on_early_termination is true",
            found=f"{ranks_text(joined)} joined first",
        )
    if has_source(call):
        assert call.root is not None
        source = said[call.root]
        if source.has_joined and not source.is_same_call(call):
            raise JoinError(
                f"{call.text} cannot come from rank {ranks[call.root]}, which has no data left",
                where=_where(channel),
                expected="a source that goes on as long as any rank does",
                found=f"{ranks_text(joined)} joined",
                fix="let another rank be the source, or call it outside of the join context",
            )
    return call


def message_refusal(channel: Channel, verb: str, tensor: Any, rank: int) -> JoinError:
    """The error of a message that is for, or from, a rank without data."""
    return JoinError(
        f"{Announcement.of_call(verb, tensor).text}: rank {rank} has no data left",
        where=_where(channel),
        expected="messages between ranks that go on",
        fix="exchange by a collective, such as all_to_all, or outside of the join context",
    )


def _where(channel: Channel) -> str:
    return f"{channel.group.here}, {channel.group.name}"
