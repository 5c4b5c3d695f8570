"""Errors that tell what every member of a group did: timeouts, lost members, disagreements."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..error_text import grouped_text, ranks_text
from ..errors import (
    AbortedError,
    AgreementError,
    BackendError,
    CollectiveTimeoutError,
    MeshdistError,
    StoreError,
)
from ..runtime.handles import check_store_served, store_of_thread
from ..runtime.recorder import Recorder, call_text
from ..runtime.world import World
from ..wires.base import MemberLost, MembersDisagree, WireAborted, WireFailure, WireTimeout
from .registry import get_registry
from .signals import Answer, ask

if TYPE_CHECKING:
    from .channel import Channel
    from .groups import ProcessGroup

__all__ = [
    "call_disagreement",
    "explain",
    "last_call_text",
    "message_disagreement",
    "silent_members",
]

_LIFE_SIGN_S = 1.0
_SILENT = "gives no answer: it has ended or is stopped"
_STORE_LOST = "the store is lost: the rank that served it has ended"
_WITHOUT_STORE = "let the rank that serves the store end last, and start the program anew"


def explain(
    group: ProcessGroup, failure: WireFailure, channel: Channel, number: int | None = None
) -> MeshdistError:
    """Turn a wire's failure into the error that tells who, where and why.

    The first rank that fails leaves its reason in the store; later ones quote it.

    Args:
        group: whose call failed.
        failure: how.
        channel: on which.
        number: under which its recorder noted the call; None means the last one.
    """
    if isinstance(failure, MembersDisagree):
        return _as_the_wire_found(group, failure, channel)
    registry = get_registry(group.world)
    call = channel.recorder.describe(number)
    where = f"rank {group.world.rank}, {call_text(call)}"
    text = str(failure)
    if isinstance(failure, MemberLost):
        text = f"rank {group.ranks[failure.member]} {failure}"
    abort = None
    with suppress(RuntimeError):  # the store is lost, as is told below
        check_store_served(group.world)
        abort = registry.find_abort(channel.opened.label)
    if abort is not None and abort.get("disagreement"):
        return _disagreement_error(where, abort["disagreement"])
    if abort is not None or isinstance(failure, WireAborted):
        if abort is None:
            reason = _first_failure(group, channel, call, text) or text
        else:
            reason = f"rank {abort['rank']}: {abort['reason']}"
        return AbortedError(
            f"{call['verb']} on {group.name} was aborted",
            where=where,
            found=reason,
            fix=_WITHOUT_STORE
            if reason == _STORE_LOST
            else "make a new group or mesh on the ranks that are left",
        )
    # Others may end as soon as they see the group broken: ask them before it is.
    report = _report(group, channel, call) if isinstance(failure, WireTimeout) else ""
    registry.break_here(channel.opened, f"{call['verb']} failed before: {text}")
    # Asked before it says who was first: a time-out closes connections, and is to be told first.
    is_known = isinstance(failure, (WireTimeout, MemberLost))
    silent = "" if is_known else silent_members(group)
    first = _first_failure(group, channel, call, text)
    if isinstance(failure, WireTimeout):
        limit = failure.limit or channel.timeout
        return CollectiveTimeoutError(
            f"{call['verb']} on {group.name} was not finished within {limit.total_seconds():g} s",
            where=where,
            expected=call["waits_for"] or f"the same call on {ranks_text(group.ranks)}",
            found="\n".join(dict.fromkeys(filter(None, (report, first)))) or text,
            fix="a message meets a receive of its tag, dtype and number of elements alone; "
            "the group is broken now"
            if call["waits_for"]
            else "look at the ranks that did not come to this call; the group is broken now",
        )
    return BackendError(
        f"{call['verb']} on {group.name} failed on wire {channel.wire.name!r}",
        where=where,
        found="\n".join(filter(None, (text, silent, first))),
        fix="look at the rank that ended or failed first; the group is broken now",
    )


def closed_meanwhile(
    world: World,
    name: str,
    wire_name: str,
    recorder: Recorder,
    failure: WireFailure,
    number: int | None,
) -> BackendError:
    """The error of a call whose group another thread has closed while it ran."""
    call = recorder.describe(number)
    return BackendError(
        f"{call['verb']} on {name} failed on wire {wire_name!r}",
        where=f"rank {world.rank}, {call_text(call)}",
        found=str(failure),
        fix="let the calls of all threads end before the group is destroyed",
    )


def _as_the_wire_found(
    group: ProcessGroup, failure: MembersDisagree, channel: Channel
) -> MeshdistError:
    """The error of a wire that compares calls itself."""
    recorder = channel.recorder
    if failure.message is None:
        return call_disagreement(group, channel, failure.number or recorder.sequence)
    is_send, peer, tag = failure.message
    if failure.other_number is None:
        assert failure.number is not None
        return message_disagreement(group, channel, is_send, peer, tag, failure.number)
    mine = recorder.find_note(failure.number or recorder.num_notes)
    about = {"note": failure.other_number}
    return _message_error(group, channel, mine, peer, tag, about)


def call_disagreement(group: ProcessGroup, channel: Channel, sequence: int) -> MeshdistError:
    """The error of members whose calls number ``sequence`` differ; raised on all of them."""
    mine = channel.recorder.find_call(sequence)
    about = {"label": channel.opened.label, "sequence": sequence}
    summary = f"the members of a group disagree about their call {sequence}"
    me = f"rank {group.world.rank} saw it before it sent any data"
    where = f"{group.name}, {ranks_text(group.ranks)}; {me}"
    expected = "the same verb, dtype, number of elements, op and root on every member"
    if mine is not None and "sending" in mine["argument"]:
        expected = "the same verb and dtype, and what one member takes as the other sends it"
    fix = (
        "make every member call the same verbs in the same order, on fitting tensors; the group "
        "is broken now"
    )
    return _disagree(group, channel, about, mine, summary, where, expected, fix)


def message_disagreement(
    group: ProcessGroup, channel: Channel, is_send: bool, peer: int, tag: int, number: int
) -> MeshdistError:
    """The error of a sender and a receiver whose tensors differ; raised on both."""
    mine = channel.recorder.find_message(is_send, peer, tag, number)
    about = {"message": [not is_send, group.rank(), tag, number]}
    return _message_error(group, channel, mine, peer, tag, about)


def _message_error(
    group: ProcessGroup,
    channel: Channel,
    mine: dict[str, Any] | None,
    peer: int,
    tag: int,
    about: dict[str, Any],
) -> MeshdistError:
    about = {"label": channel.opened.label, "asked": group.ranks[peer], **about}
    summary = "a message does not fit the tensor that receives it"
    where = f"{group.name}, tag {tag}"
    expected = "equal dtype and number of elements on both sides, and objects met by objects"
    fix = (
        "receive into a tensor like the one that is sent, or give messages of different kinds "
        "different tags; the group is broken now"
    )
    return _disagree(group, channel, about, mine, summary, where, expected, fix)


def last_call_text(answer: Answer | None) -> str:
    """What a rank that was asked called last, or that it gave no answer (None)."""
    if answer is None:
        return _SILENT
    if not answer["calls"]:
        return "runs, and has called no verb"
    return f"last {call_text(answer['calls'][-1])}"


def silent_members(group: ProcessGroup) -> str:
    """Who gives no sign of life, as text; "" where all do."""
    if group.world.is_simulated:
        return ""
    others = tuple(rank for rank in group.ranks if rank != group.world.rank)
    try:
        answers = ask(group.world, others, patience_s=_LIFE_SIGN_S)
    except RuntimeError:  # the store is lost, as other lines tell
        return ""
    silent = [rank for rank in others if rank not in answers]
    if not silent:
        return ""
    if len(silent) == 1:
        return f"rank {silent[0]}: {_SILENT}"
    return f"{ranks_text(silent)}: give no answer: they have ended or are stopped"


def _disagree(
    group: ProcessGroup,
    channel: Channel,
    about: dict[str, Any],
    mine: dict[str, Any] | None,
    summary: str,
    where: str,
    expected: str,
    fix: str,
) -> MeshdistError:
    """Let every member raise one and the same error."""
    registry = get_registry(group.world)
    label = channel.opened.label
    rank = group.world.rank
    others = tuple(member for member in group.ranks if member != rank)
    asked = (about["asked"],) if "asked" in about else others
    try:
        known = registry.find_abort(label)
        if known is not None:  # another member has seen it first
            return explain(group, WireAborted("aborted"), channel)
        answers = ask(group.world, asked, about)
        told = [(rank, _one_call(mine))]
        told += [(other, _answered(answers.get(other))) for other in asked]
        disagreement = {
            "summary": summary,
            "where": where,
            "expected": expected,
            "found": grouped_text(sorted(told)),
            "fix": fix,
        }
        text = json.dumps(disagreement)
        store = store_of_thread(group.world)
        first = store.compare_set(f"{label}/disagreement", "", text).decode()
        disagreement = json.loads(first)
        reason = f"{summary}: {disagreement['found']}"
        if first == text:
            message = {"reason": reason, "group": group.name, "disagreement": disagreement}
            registry.abort([label], message)
        else:  # its signal is under way; no verb of this rank may run into the wire before it
            registry.break_here(channel.opened, reason, disagreement=disagreement)
    except StoreError as lost:  # it alone knows what the others called
        disagreement = {
            "summary": summary,
            "where": where,
            "expected": expected,
            "found": f"rank {rank}: {_one_call(mine)}\nthe others: unknown, since {_STORE_LOST}",
            "fix": fix,
        }
        registry.break_here(channel.opened, str(lost), disagreement=disagreement)
    call = channel.recorder.describe()
    return _disagreement_error(f"rank {rank}, {call_text(call)}", disagreement)


def _disagreement_error(where: str, disagreement: dict[str, str]) -> AgreementError:
    return AgreementError(
        disagreement["summary"],
        where=f"{disagreement['where']}\nraised on {where}",
        expected=disagreement["expected"],
        found=disagreement["found"],
        fix=disagreement["fix"],
    )


def _one_call(call: dict[str, Any] | None) -> str:
    if call is None:
        return "its call is no longer known"
    return f"{call['verb']}({call['argument']}) at {call['where']}"


def _answered(answer: Answer | None) -> str:
    if answer is None:
        return _SILENT
    if answer["is_forgotten"]:
        return _one_call(None)
    if answer["about"] is None:
        return "has not come there yet"
    return _one_call(answer["about"])


def _report(group: ProcessGroup, channel: Channel, mine: dict[str, Any]) -> str:
    if group.world.is_simulated:
        return ""
    others = tuple(rank for rank in group.ranks if rank != group.world.rank)
    try:
        answers = ask(group.world, others)
    except RuntimeError:
        return _STORE_LOST
    lines = []
    for rank in others:
        answer = answers.get(rank)
        if answer is None:
            lines.append(f"rank {rank}: {_SILENT}")
            continue
        calls = answer["calls"]
        here = [call for call in calls if call["label"] == channel.opened.label]
        arrived = bool(here) and here[-1]["sequence"] >= mine["sequence"]
        state = f"{'arrived' if arrived else 'did not arrive'}; "
        last = f"last {call_text(calls[-1])}" if calls else "has called no verb"
        lines.append(f"rank {rank}: {'' if mine['waits_for'] else state}{last}")
    return "\n".join(lines)


def _first_failure(group: ProcessGroup, channel: Channel, call: dict[str, Any], text: str) -> str:
    """What the first rank that failed on this communicator has told; "" where this one is it."""
    try:
        check_store_served(group.world)
        return _quote_first_failure(group, channel, call, text)
    except RuntimeError:
        return _STORE_LOST


def _quote_first_failure(
    group: ProcessGroup, channel: Channel, call: dict[str, Any], text: str
) -> str:
    if group.world.is_simulated:
        return ""
    mine = json.dumps({"rank": group.world.rank, "text": text, "call": call_text(call)})
    store = store_of_thread(group.world)
    first = store.compare_set(f"{channel.opened.label}/failure", "", mine).decode()
    if first == mine:
        return ""
    other = json.loads(first)
    return f"rank {other['rank']} failed first, in {other['call']}: {other['text']}"
