"""A few faults over every backend, and what the judge takes for a broken promise.

``make soak-faults`` draws a thousand of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases import (
    EXIT,
    FAULT,
    HOSTS,
    KINDS,
    LOOP,
    SKIPPING,
    Case,
    Fault,
    can_be_missed,
    case_of,
)
from tests.faults.outcomes import TORCHS_GLOO, Outcome, judge, named_ranks
from tests.faults.programs import Program, Step
from tests.faults.reports import Result, Tally
from tests.pool import Pool
from tests.two_hosts import two_hosts_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    f"{backend} {kind} 1 {n}"
    for backend in ("shm", "mpi")
    for kind in (FAULT, LOOP, EXIT)
    for n in range(99)
]


# -- on real backends ------------------------------------------------------------------------------


SAMPLE = {
    "shm": {FAULT: (1, 8, 37, 53), LOOP: (1, 4), EXIT: (1, 4)},
    "gloo": {FAULT: (0, 20, 21, 23, 38), LOOP: (1, 4), EXIT: (1, 3, 6)},
    "mpi": {FAULT: (1, 15, 27, 37), LOOP: (1, 4), EXIT: (1, 3)},
    HOSTS: {FAULT: (10, 176, 214), EXIT: (1, 3)},
}


@pytest.mark.parametrize(
    "backend",
    ["shm", *(pytest.param(one, marks=pytest.mark.soak) for one in SAMPLE if one != "shm")],
)
def test_every_promise_is_kept(backend: str, pool: Pool) -> None:
    if backend == HOSTS:
        two_hosts_of(pool)  # skips where there can be none
    names = [
        f"{backend} {kind} 1 {n}" for kind, numbers in SAMPLE[backend].items() for n in numbers
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.run", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^\d+ faults, .*\d+ exits, .*: every promise kept$", done.stdout, re.MULTILINE
    )


# -- cases ----------------------------------------------------------------------------------------


def test_a_name_gives_the_same_case_again() -> None:
    assert [case_of(name) for name in NAMES] == [case_of(name) for name in NAMES]
    assert len(set(map(str, map(case_of, NAMES)))) == len(NAMES)


def test_the_rank_that_is_struck_takes_part_in_its_step() -> None:
    for case in map(case_of, NAMES):
        program, fault = case.program, case.fault
        assert program.takes_part(program.steps[fault.step], fault.rank), case
        assert case.is_exit or fault.moment in KINDS[fault.kind], case
        assert case.late is None or case.late.rank < case.size, case


def test_rank_0_is_struck_as_often_as_the_others() -> None:
    struck = [case_of(f"shm fault 1 {number}").fault.rank for number in range(400)]
    assert 150 < struck.count(0) < 250


WORLD = [((0, 1),)]


@pytest.mark.parametrize(
    ("steps", "is_seen"),
    [
        ([Step("all_reduce"), Step("all_reduce")], False),
        ([Step("all_reduce"), Step("all_reduce", root=1, peer=0)], False),
        ([Step("barrier"), Step("barrier", count=9, dtype="int64", op="MAX", root=1)], False),
        ([Step("all_reduce"), Step("send"), Step("all_reduce")], False),
        ([Step("broadcast"), Step("broadcast", root=1)], True),
        ([Step("all_reduce"), Step("all_reduce", op="MAX")], True),
        ([Step("all_reduce"), Step("barrier"), Step("all_reduce")], True),
        ([Step("all_reduce")], True),
    ],
)
def test_a_missing_call_can_be_seen_where_the_next_one_differs(
    steps: list[Step], is_seen: bool
) -> None:
    program = Program(2, [Step("init"), *steps], WORLD)
    assert can_be_missed(program, 0, 1) is is_seen


def test_a_call_is_left_out_only_where_that_can_be_seen() -> None:
    for number in range(400):
        case = case_of(f"shm fault 2 {number}")
        if case.fault.kind in SKIPPING and case.fault.step:
            assert can_be_missed(case.program, case.fault.rank, case.fault.step), case


# -- the judge ------------------------------------------------------------------------------------

BARRIERS = Program(2, [Step("init"), Step("barrier"), Step("barrier")], [((0, 1),)])


def case_with(kind: str = "SIGKILL", **more: Any) -> Case:
    fault = Fault(kind, rank=1, step=2)
    return Case("a test", "shm", BARRIERS, "env", "return", "raise", fault, **more)


def outcome_with(*notes: dict[str, Any], kind_of_end: int = 1, took: float = 1.0) -> Outcome:
    """Rank 1 is killed before step 2, at 10 s; rank 0 notes more, and ends."""
    outcome = Outcome(2)
    for rank in (0, 1):
        for number in (0, 1):
            outcome.take({"rank": rank, "what": "begin", "step": number, "at": number + 0.1})
            outcome.take({"rank": rank, "what": "done", "step": number, "at": number + 0.2})
    outcome.take({"rank": 1, "what": "struck", "at": 10.0})
    outcome.ends[1] = (10.1, -9)
    outcome.ends[0] = (10.0 + took, kind_of_end)
    for note in notes:
        outcome.take({"rank": 0, "at": 10.0 + took, **note})
    return outcome


def error_with(found: str, **more: Any) -> dict[str, Any]:
    fields = {"summary": "barrier failed", "found": found}
    about = {"kind": "BackendError", "text": found, "place": "", "is_wrong": False, "is_ours": True}
    return {"what": "error", "fields": fields, **about, **more}


def kinds_of(outcome: Outcome, case: Case | None = None) -> list[str]:
    return sorted({finding.kind for finding in judge(case or case_with(), outcome)})


def test_an_error_that_names_the_rank_in_time_is_what_is_promised() -> None:
    assert kinds_of(outcome_with(error_with("rank 1 has ended"))) == []


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        ("the store is lost", ["unnamed culprit"]),
        ("rank 0 has ended", ["unnamed culprit"]),
        ("ranks 0-3: not here", []),
        ("ranks 0, 1: not here", []),
    ],
)
def test_the_rank_that_failed_is_to_be_named(found: str, kinds: list[str]) -> None:
    assert kinds_of(outcome_with(error_with(found))) == kinds


def test_a_rank_may_be_named_by_way_of_another() -> None:
    outcome = outcome_with(error_with("rank 2 failed first"))
    outcome.size = 3
    outcome.take({"rank": 2, "at": 10.5, **error_with("rank 1 has ended")})
    assert kinds_of(outcome) == []


def test_what_is_no_error_of_ours_is_found() -> None:
    assert kinds_of(outcome_with(error_with("rank 1", is_ours=False))) == ["raw error"]
    assert kinds_of(outcome_with(error_with("7 is not 8", is_wrong=True))) == ["wrong numbers"]
    assert kinds_of(outcome_with(kind_of_end=-11)) == ["crash"]


def test_time_is_limited() -> None:
    assert kinds_of(outcome_with(error_with("rank 1 has ended"), took=8.5)) == ["late"]
    outcome = outcome_with()
    outcome.hung[0] = "its stacks"
    del outcome.ends[0]
    assert kinds_of(outcome) == ["hang"]


def test_a_call_that_ends_without_all_of_its_members_is_found() -> None:
    through = {"what": "done", "step": 2}
    begin = {"what": "begin", "step": 2}
    skipped = case_with("SIGKILL")
    program = Program(2, [*BARRIERS.steps, Step("barrier")], BARRIERS.groups)
    later = Case("a test", "shm", program, "env", "return", "raise", Fault("SIGKILL", 1, 3))
    outcome = outcome_with(begin, through, {"what": "end"}, kind_of_end=0)
    assert kinds_of(outcome, later) == ["false completion"]
    assert kinds_of(outcome, skipped) == []
    told = outcome_with(begin, through, error_with("rank 1 has ended"))
    told.ends[1] = (10.1, 1)
    parted = Case("a test", HOSTS, program, "env", "return", "raise", Fault("thread dies", 1, 3))
    for hosts, expected in (("AB", []), ("AA", ["false completion"])):
        assert kinds_of(told, replace(parted, hosts=hosts)) == expected


def test_whoever_had_done_all_calls_must_end_well() -> None:
    outcome = outcome_with(error_with("rank 1 has ended"))
    assert kinds_of(outcome, case_with("SIGKILL", is_exit=True)) == ["must end well"]
    assert kinds_of(outcome, case_with("pause")) == ["must end well"]
    assert kinds_of(outcome_with({"what": "end"}, kind_of_end=0)) == []


def test_what_is_left_behind_is_found() -> None:
    outcome = outcome_with(error_with("rank 1 has ended"))
    outcome.left = ["process sleep 100"]
    assert kinds_of(outcome) == ["left behind"]


def test_noise_is_found() -> None:
    outcome = outcome_with({"what": "end"}, kind_of_end=0)
    outcome.said["0"] = "Exception ignored in: <function f>"
    assert kinds_of(outcome) == ["noise"]
    outcome = outcome_with(error_with("rank 1 has ended"))
    outcome.said["0"] = "Traceback (most recent call last):"
    assert kinds_of(outcome) == []
    outcome.said["0"] = "frame #0: c10::Error::Error"
    assert kinds_of(outcome) == ["noise"]


@pytest.mark.parametrize(
    ("method", "rank", "kind"),
    [
        ("env", 0, "noise of torch's client"),
        ("tcp", 0, "noise of torch's client"),
        ("file", 0, "noise"),
        ("env", 1, "noise"),
    ],
)
def test_what_torchs_client_writes_of_a_killed_server_is_counted_apart(
    method: str, rank: int, kind: str
) -> None:
    outcome = outcome_with()
    outcome.notes[1], outcome.notes[0] = [], [error_with(f"rank {rank} has ended")]
    outcome.notes[0][0] |= {"rank": 0, "at": 11.0}
    outcome.said["1" if rank == 0 else "0"] = "[TCPStore.cpp:122] recvValue\nframe #0: c10::Error"
    fault = Fault("SIGKILL", rank, step=2)
    case = Case("a test", "shm", BARRIERS, method, "return", "raise", fault)
    found = [finding for finding in judge(case, outcome) if "noise" in finding.kind]
    assert [finding.kind for finding in found] == [kind]
    tally = Tally()
    tally.add(Result(case, outcome, found, 1.0))
    assert bool(tally.broken) == (kind == "noise")
    assert kind in tally.summary()


def test_under_mpi_the_job_may_name_the_rank() -> None:
    case = case_with()
    over_mpi = Case("a test", "mpi", BARRIERS, "mpiexec", "return", "raise", case.fault)
    outcome = outcome_with(error_with("the store is lost"))
    outcome.said["mpiexec"] = "prterun noticed that process rank 1 with PID 7 on node vm exited"
    assert kinds_of(outcome, over_mpi) == []
    outcome.said["mpiexec"] = "prterun noticed that process rank 0 with PID 7 on node vm exited"
    assert kinds_of(outcome, over_mpi) == ["unnamed culprit"]
    outcome = outcome_with(kind_of_end=-15)
    assert kinds_of(outcome, over_mpi) == []


WRONG = {"what": "wrong", "step": 2, "text": "3 is not 4"}


def over_hosts(kind: str, hosts: str) -> Case:
    fault = Fault(kind, rank=1, step=2)
    return Case("a test", HOSTS, BARRIERS, "env", "return", "raise", fault, hosts=hosts)


def test_numbers_are_wrong_between_hosts_only_until_that_is_told() -> None:
    told = outcome_with(WRONG, error_with("ranks 0-1: all_reduce; rank 1: barrier"))
    told.ends[1] = (10.1, 1)
    assert kinds_of(told, over_hosts("other collective", "AB")) == []
    silent = outcome_with(WRONG, {"what": "end"}, kind_of_end=0)
    silent.ends[1] = told.ends[1]
    assert kinds_of(silent, over_hosts("other collective", "AB")) == ["wrong numbers"]
    silent.said["0"] = "MismatchError: collective mismatch: ranks made different calls as call 2"
    assert kinds_of(silent, over_hosts("other collective", "AB")) == []
    assert over_hosts("other collective", "AB").is_compared_late((0, 1))
    assert not over_hosts("other collective", "AA").is_compared_late((0, 1))
    assert not over_hosts("SIGKILL", "AB").is_compared_late((0, 1))


def test_a_rank_that_torchs_gloo_ends_is_counted_apart() -> None:
    outcome = outcome_with(kind_of_end=-6)
    outcome.said["0"] = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    assert kinds_of(outcome, over_hosts("SIGKILL", "AB")) == ["crash"]
    outcome.ends[1] = (10.1, 1)
    assert kinds_of(outcome, over_hosts("other count", "AB")) == [TORCHS_GLOO]
    assert kinds_of(outcome, over_hosts("other count", "AA")) == ["crash"]


def test_ranks_are_read_from_lists_and_ranges() -> None:
    assert named_ranks("Rank 3: gone; ranks 0-1, 7 and 9: here; 5 elements") == {0, 1, 3, 7, 9}
