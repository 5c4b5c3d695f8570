"""The errors of failed calls, from what the other members report; no process is needed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import meshdist as md
from meshdist.checking.calls import CallRecord, GroupFacts, get_call, get_message
from meshdist.groups.failure_diagnosis import (
    STORE_LOST,
    FailureDiagnosis,
    PeerStatus,
    explained_opening,
)
from tests.inner import (
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    BackendUnsupported,
    Interrupted,
    MemberLost,
    MemberStopped,
    MessageMismatch,
    RanksMismatch,
    Recorder,
)

FACTS = GroupFacts("a group", (4, 6), 0, "label", "gloo", timedelta(seconds=9))
FIELDS = ("summary", "where", "expected", "found", "fix")


class Others(PeerStatus):
    """Notes what the explainer asks and tells them, in order."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    @property
    def is_closed(self) -> bool:
        return bool(self.answers.get("is_closed"))

    def compare_again(self) -> None:
        if "compare_again" in self.answers:
            raise self.answers["compare_again"]

    def find_abort(self) -> dict[str, Any] | None:
        return self.answers.get("abort")

    def break_here(self, reason: str) -> None:
        self.asked.append(reason)

    def give_up(self, reason: str) -> None:
        self.asked.append(reason)

    def report(self, call: CallRecord, but: int | None = None) -> str:
        self.asked.append("report" if but is None else f"report without {but}")
        return self.answers.get("report", "")

    def silent(self) -> str:
        self.asked.append("silent")
        return self.answers.get("silent", "")

    def ending(self, member: int) -> str:
        return self.answers.get("ending", "")

    def find_first_failure(self, call: CallRecord, text: str) -> str:
        self.asked.append(f"first: {text}")
        return self.answers.get("first", "")

    def agree_on_error(
        self, disagreement: dict[str, str], mine: CallRecord | None, about: dict[str, Any]
    ) -> dict[str, str]:
        self.asked.append((mine, about))
        return {**disagreement, "found": disagreement["found"] or "both calls"}


def explained(
    failure: BackendFailure, operation: str = "all_reduce", **answers: Any
) -> tuple[Any, Others]:
    """The error of a call of ``operation`` that failed so, and the members after it."""
    recorder, others = Recorder(), Others(**answers)
    if operation in ("send", "recv"):
        recorder.note(FACTS, get_message(operation, torch.ones(2), 1, 5))
    else:
        recorder.note(FACTS, get_call(operation, torch.ones(2)))
    return FailureDiagnosis(FACTS, recorder, others).explain(failure), others


def test_a_timeout_tells_what_the_others_do_before_the_group_breaks() -> None:
    error, others = explained(
        BackendTimeout("late"), report="rank 6: did not reach this call", first="it was"
    )
    assert isinstance(error, md.CollectiveTimeoutError)
    assert error.summary == "all_reduce on a group timed out after 9 s"
    assert error.where.startswith("rank 4, call 1 on a group: all_reduce((2,) float32) at ")
    assert error.expected == "the same call on ranks 4, 6"
    assert error.found == "rank 6: did not reach this call\nit was"
    # That it is the first comes before the questions, which take time.
    assert others.asked == ["first: late", "report", "all_reduce failed before: late"]


def test_a_timeout_has_the_callers_limit_and_some_reason() -> None:
    failure = BackendTimeout("late")
    failure.limit = timedelta(seconds=2)
    error, _ = explained(failure, report=STORE_LOST, first=STORE_LOST)
    assert "timed out after 2 s" in error.summary and error.found == STORE_LOST
    error, _ = explained(BackendTimeout("late"), "recv")
    assert error.found == "late"
    assert error.expected == "rank 6 to send (2,) float32 to this rank with tag 5"
    assert "pass the same tag" in error.fix


def test_a_failure_tells_which_members_are_silent() -> None:
    error, others = explained(BackendFailure("reset"), silent="rank 6: does not respond")
    assert isinstance(error, md.BackendError)
    assert error.summary == "all_reduce on a group failed on backend 'gloo'"
    assert error.found == "reset\nrank 6: does not respond"
    assert others.asked == [
        "silent",
        "first: reset; rank 6: does not respond",
        "all_reduce failed before: reset",
    ]


def test_a_failure_that_names_nobody_tells_what_the_others_do() -> None:
    error, others = explained(BackendFailure("reset"), report="rank 6: did not reach this call")
    assert error.found == "reset\nrank 6: did not reach this call"
    assert others.asked == ["silent", "first: reset", "report", "all_reduce failed before: reset"]


def test_a_member_that_is_known_to_be_lost_is_not_searched_for() -> None:
    error, others = explained(MemberLost("has ended", 1), first="it failed first")
    assert error.found == "rank 6 has ended\nit failed first"
    assert "silent" not in others.asked


def test_a_member_that_left_in_good_order_may_not_be_the_one_that_lacks() -> None:
    error, others = explained(
        MemberLost("has ended", 1),
        ending="destroyed its process group",
        report="rank 8: does not respond",
    )
    assert error.found == "rank 6 destroyed its process group\nrank 8: does not respond"
    assert "report without 1" in others.asked
    error, others = explained(MemberLost("has ended", 1), ending="ended by ValueError: no data")
    assert error.found == "rank 6 ended by ValueError: no data"
    assert "report without 1" not in others.asked


def test_a_member_that_gave_up_is_named_where_it_does_not_say_why() -> None:
    error, _ = explained(MemberStopped("has given up this message", 1))
    assert isinstance(error, md.AbortedError)
    assert error.found == "rank 6 has given up this message"


def test_what_interrupts_a_call_is_raised_as_it_is_and_told_to_the_others() -> None:
    others = Others()
    diagnosis = FailureDiagnosis(FACTS, Recorder(), others)
    struck = KeyError("no data")
    with pytest.raises(KeyError) as caught:
        diagnosis.explain(Interrupted(struck))
    assert caught.value is struck
    (reason,) = others.asked
    assert reason.startswith("gave up in call 0 on a group: an earlier call")
    assert reason.endswith(": KeyError: 'no data'")


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({}, "freed"),
        ({"first": "rank 6 failed first"}, "rank 6 failed first"),
        (
            {"first": "rank 6 failed first", "report": "rank 6: late"},
            "rank 6 failed first\nrank 6: late",
        ),
        ({"abort": {"rank": 6, "reason": "no data"}}, "rank 6: no data"),
    ],
)
def test_an_abort_gives_its_reason(answers: dict[str, Any], found: str) -> None:
    error, _ = explained(BackendAborted("freed"), **answers)
    assert isinstance(error, md.AbortedError)
    assert (error.summary, error.found) == ("all_reduce on a group was aborted", found)
    assert error.fix == "create a new group or mesh with the remaining ranks"


def test_an_abort_without_a_store_says_how_to_end_in_order() -> None:
    error, _ = explained(BackendAborted("freed"), first=STORE_LOST, report=STORE_LOST)
    assert error.found == STORE_LOST and "keep the rank that hosts the store running" in error.fix


def test_any_failure_of_an_aborted_group_is_its_abort() -> None:
    error, _ = explained(BackendFailure("reset"), abort={"rank": 6, "reason": "no data"})
    assert isinstance(error, md.AbortedError)
    fields = dict.fromkeys(FIELDS, "theirs")
    error, _ = explained(BackendTimeout("late"), abort={"rank": 6, "disagreement": fields})
    assert isinstance(error, md.MismatchError)
    assert error.where.startswith("theirs\nraised on rank 4, call 1 on a group")


def test_a_group_closed_by_another_thread_is_not_broken() -> None:
    error, others = explained(BackendFailure("closed"), is_closed=True)
    assert "wait for the calls of all threads" in error.fix
    assert others.asked == []


def test_calls_that_differ_are_agreed_upon() -> None:
    error, others = explained(RanksMismatch("other collective", None))
    assert isinstance(error, md.MismatchError)
    assert error.summary == "collective mismatch: ranks made different calls as call 1"
    assert error.found == "both calls" and "\nraised on rank 4, call 1" in error.where
    ((mine, about),) = others.asked
    assert mine.call.operation == "all_reduce" and about == {"sequence": 1}
    _, others = explained(RanksMismatch("other collective", 7))
    assert others.asked == [(None, {"sequence": 7})]


def test_calls_whose_tensors_lie_differently_are_told_how_they_may_lie() -> None:
    recorder = Recorder()
    recorder.note(FACTS, get_call("all_reduce", torch.ones(2), layouts=(((2,), (3,)),)))
    failure = RanksMismatch("other layout", None)
    error: Any = FailureDiagnosis(FACTS, recorder, Others()).explain(failure)
    assert error.expected.endswith("the same memory layout (x.contiguous() gives the default one)")
    assert "layout" not in explained(failure)[0].expected


def test_what_the_comparison_finds_goes_before_the_failure() -> None:
    error, others = explained(BackendTimeout("late"), compare_again=RanksMismatch("", 1))
    assert isinstance(error, md.MismatchError)
    assert others.asked[0][1] == {"sequence": 1}


@pytest.mark.parametrize(
    ("failure", "about"),
    [
        (RanksMismatch("", 1, (False, 1, 5)), {"message": [True, 0, 5, 1], "asked": [1]}),
        (RanksMismatch("", 1, (False, 1, 5), 8), {"note": 8, "asked": [1]}),
        (RanksMismatch("", None, (False, 1, 5), 8), {"note": 8, "asked": [1]}),
        (MessageMismatch("too long"), {"message": [True, 0, 5, 1], "asked": [1]}),
    ],
)
def test_messages_that_differ_ask_their_peer(
    failure: BackendFailure, about: dict[str, Any]
) -> None:
    error, others = explained(failure, "recv")
    assert error.summary == "message mismatch: a send does not match its receive"
    assert error.where.startswith("a group, tag 5\nraised on rank 4, recv(")
    assert error.found == (str(failure) or "both calls")
    ((mine, asked),) = others.asked
    assert mine.call.operation == "recv" and asked == about


def test_a_misfit_that_members_do_not_compare_is_a_failure() -> None:
    with mock.patch.object(Others, "compare_mismatches", False):
        error, _ = explained(MessageMismatch("too long"), "recv")
    assert isinstance(error, md.BackendError)


def test_a_call_that_is_forgotten_has_no_name() -> None:
    diagnosis = FailureDiagnosis(FACTS, Recorder(), Others())
    assert diagnosis.explain(BackendFailure("reset"), 99).summary.startswith("an earlier call on ")


@pytest.mark.parametrize(
    ("failure", "kind", "found", "fix"),
    [
        (BackendUnsupported("no"), md.BackendError, "no", "another backend, for example 'gloo'"),
        (BackendTimeout("late"), md.CollectiveTimeoutError, "late\nrank 6 is silent", "none has"),
        (BackendFailure("reset"), md.BackendError, "reset\nrank 6 is silent", "make this call"),
        (MemberLost("has ended", 1), md.BackendError, "rank 6 has ended", "none has exited"),
    ],
)
def test_a_group_that_is_not_opened(
    failure: BackendFailure, kind: type, found: str, fix: str
) -> None:
    backend: Any = mock.Mock(replacement="")
    backend.name = "shm"
    silent = "" if isinstance(failure, MemberLost) else "rank 6 is silent"
    told: list[str] = []
    opening = explained_opening("a group", (4, 6), backend, "rank 4", lambda: silent, told.append)
    with pytest.raises(md.BackendError) as caught, opening:
        raise failure
    error = caught.value
    assert type(error) is kind
    assert told == [str(failure)]
    assert error.summary == "a group could not be opened on backend 'shm'"
    assert (error.where, error.found) == ("rank 4", found) and fix in error.fix
