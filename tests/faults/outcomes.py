"""How a case went, and what in it breaks a promise.

What is promised (docs/how-to: initialize, debug, mpi; docs/reference/collectives.md):

* a rank that waits for the one that failed raises a MeshdistError within its timeout; it then has
  ``GRACE_S`` to ask the others, to write its report and to end;
* the report names the rank that failed, or one that failed because of it and names it in turn;
* a rank whose calls were all complete ends well, and so does every rank where nothing has failed;
* a number that a call has brought is right, and no call of which all members wait for each other
  ends before all have come; between hosts, where calls that differ are found beside them, both may
  be so for a moment, which then ends in an error on every rank that has seen it;
* a rank that ends well writes nothing, but that calls of hosts can be compared no more where the
  process that hosts the store was lost; and no rank shows the frames of torch's C++, but for a
  world that meets at an address of rank 0's, where torch's client writes them before it raises,
  since the process that serves it was killed in the middle of an answer. That is counted, and
  breaks nothing;
* no process, file or named memory outlives the ranks;
* where calls of two hosts differ in size torch's Gloo may end a rank that is sent more than it
  takes (docs/how-to/debug.md); that is counted, and breaks nothing; the others name it;
* under MPI a rank that fails ends the job: mpiexec may end the others before they raise, or as they
  do, and the job's own last words name the rank.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults.cases import ABRUPT, Case
from tests.faults.programs import ALL_WAIT
from tests.pool import NO_NAME

__all__ = [
    "GRACE_S",
    "TORCHS_CLIENT",
    "TORCHS_GLOO",
    "Finding",
    "Outcome",
    "judge",
    "named_ranks",
]

TORCHS_CLIENT = "noise of torch's client"
TORCHS_GLOO = "end by torch's Gloo"
"""The kinds of what is found and breaks no promise."""
GRACE_S = 6.0
"""How long after its timeout a rank may take to ask the others, to raise, to wait for those that
still ask, and to end; on a machine that is busy as many times longer as work takes longer there."""
_LAST_WORDS = re.compile(
    r"process rank (\d+) with PID|is ended by mpiexec: rank (\d+)|"
    r"rank (\d+) of MPI_COMM_WORLD failed|MPI_ABORT was invoked on rank (\d+)"
)
_RANKS = re.compile(r"\b[Rr]anks? (\d+(?:(?:-|, | and )\d+)*)")


@dataclass
class Outcome:
    """What was noted of a case.

    Args:
        size: how many ranks.
        pids: of each rank's process.
        notes: of each rank, in order.
        ends: of each rank, when its process ended and its exit code (minus a signal's number).
        fault_at: when the fault struck; 0.0 where it did not.
        released_at: when a stopped rank went on.
        hung: the stacks of ranks that had to be killed.
        frozen: the stacks of ranks that waited for a stopped one beyond every limit.
        by_mpiexec: ranks that mpiexec has ended.
        load: how many times longer work took than on a machine with nothing else to do.
        left: what was left behind.
        said: what each rank, and mpiexec, wrote to its standard streams.
    """

    size: int
    pids: dict[int, int] = field(default_factory=dict)
    notes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    ends: dict[int, tuple[float, int]] = field(default_factory=dict)
    fault_at: float = 0.0
    released_at: float = 0.0
    hung: dict[int, str] = field(default_factory=dict)
    frozen: dict[int, str] = field(default_factory=dict)
    by_mpiexec: set[int] = field(default_factory=set)
    load: float = 1.0
    left: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def take(self, note: dict[str, Any]) -> None:
        """Add one note."""
        self.notes.setdefault(note["rank"], []).append(note)
        if note["what"] == "struck" and not self.fault_at:
            self.fault_at = note["at"]

    def find(self, rank: int, what: str) -> dict[str, Any] | None:
        """The first note of this kind of a rank."""
        return next((note for note in self.notes.get(rank, []) if note["what"] == what), None)

    @property
    def through(self) -> set[int]:
        """The ranks that have come through all of their calls."""
        return {rank for rank in range(self.size) if self.find(rank, "through")}

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` reads them."""
        return {name: sorted(x) if isinstance(x, set) else x for name, x in asdict(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """The inverse of ``to_json``."""
        for name in ("pids", "notes", "ends", "hung", "frozen"):
            values[name] = {int(rank): value for rank, value in values[name].items()}
        return cls(**{**values, "by_mpiexec": set(values["by_mpiexec"])})


@dataclass(frozen=True)
class Finding:
    """A promise that a case has broken, as seen by one rank."""

    kind: str
    rank: int | None
    text: str


def named_ranks(text: str) -> set[int]:
    """The ranks that a text names.

    Example:
        >>> sorted(named_ranks("rank 3 has ended; ranks 0-1, 7: arrived"))
        [0, 1, 3, 7]
    """
    found: set[int] = set()
    for numbers in _RANKS.findall(text):
        for part in re.split(r", | and ", numbers):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def judge(case: Case, outcome: Outcome) -> list[Finding]:
    """The promises that this case has broken."""
    findings = [Finding("hang", rank, stacks) for rank, stacks in outcome.hung.items()]
    for rank, stacks in outcome.frozen.items():
        text = f"until rank {case.fault.rank} went on; then {error_text(outcome, rank)}\n{stacks}"
        findings.append(Finding("hang", rank, text))
    # The file in which ranks meet stays: another job may just begin in it.
    is_file = case.init_method == "file"
    left = [one for one in outcome.left if not (is_file and one.startswith("meeting"))]
    findings += [Finding("left behind", None, one) for one in left]
    findings += false_completions(case, outcome)
    for rank in range(case.size):
        findings += judge_rank(case, outcome, rank)
    return [*findings, *noises(case, outcome)]


def noises(case: Case, outcome: Outcome) -> Iterator[Finding]:
    """What was written and should not have been."""
    for name, text in outcome.said.items():
        said = NO_NAME.sub("", text)
        is_rank = name.isdigit()
        is_well = is_rank and outcome.ends.get(int(name), (0.0, 1))[1] == 0
        if is_rank and int(name) == case.fault.rank and outcome.fault_at:
            continue
        is_well = is_well and not (is_rank and is_told(case, outcome, int(name)))
        has_frames = "frame #0: c10" in said
        if has_frames or (is_well and said.strip()):
            is_torchs = has_frames and "TCPStore" in said and has_lost_server(case, outcome)
            kind = TORCHS_CLIENT if is_torchs else "noise"
            yield Finding(kind, int(name) if is_rank else None, said[:600])


def is_told(case: Case, outcome: Outcome, rank: int) -> bool:
    """Whether a rank has seen an error; one of calls that differ may come as its program ends."""
    if outcome.find(rank, "error"):
        return True
    is_late = case.is_compared_late(range(case.size))
    said = outcome.said.get(str(rank), "")
    return is_late and "MismatchError: " in said


def is_ended_by_gloo(case: Case, outcome: Outcome, rank: int) -> bool:
    """Whether torch's Gloo has ended a rank that was sent more than its call takes."""
    is_late = case.is_compared_late(range(case.size))
    is_ended = outcome.ends.get(rank, (0.0, 0))[1] == -signal.SIGABRT
    return is_late and is_ended and "gloo::EnforceNotMet" in outcome.said.get(str(rank), "")


def has_lost_server(case: Case, outcome: Outcome) -> bool:
    """Whether the process that serves a store of torch's was ended abruptly."""
    fault = case.fault
    is_abrupt = fault.kind in ABRUPT or "SIGKILL" in fault.kind or "os._exit" in fault.kind
    is_lost = (fault.rank == 0 and is_abrupt) or is_ended_by_gloo(case, outcome, 0)
    return bool(outcome.fault_at) and case.init_method in ("env", "tcp") and is_lost


def error_text(outcome: Outcome, rank: int) -> str:
    """The error that a rank has seen."""
    error = outcome.find(rank, "error")
    return f"{error['kind']}: {error['text']}" if error else "no error"


def has_failed(case: Case, outcome: Outcome) -> bool:
    """Whether a rank has failed, so that others may."""
    if case.is_exit:
        return has_lost_server(case, outcome) and makes_group_without_server(case)
    return bool(outcome.fault_at) and case.fault.kind != "pause"


def makes_group_without_server(case: Case) -> bool:
    """Whether the last call makes a group in which rank 0 takes no part, and needs its store."""
    last = case.program.steps[-1]
    return last.call == "new_group" and 0 not in last.ranks


def judge_rank(case: Case, outcome: Outcome, rank: int) -> Iterator[Finding]:
    """What one rank shows."""
    is_struck = bool(outcome.fault_at) and rank == case.fault.rank and case.fault.kind != "pause"
    error, end = outcome.find(rank, "error"), outcome.ends.get(rank)
    if error and error["is_wrong"]:
        yield Finding("wrong numbers", rank, error["text"])
        return
    wrong = outcome.find(rank, "wrong")
    if wrong and not is_told(case, outcome, rank):
        yield Finding("wrong numbers", rank, f"in silence: {wrong['text']}")
    if end is None or rank in outcome.hung:
        return  # it was killed, or mpiexec has never started it
    at, code = end
    begin = outcome.released_at if is_struck and outcome.released_at else outcome.fault_at
    is_late = outcome.fault_at and at - begin > (case.timeout_s + GRACE_S) * outcome.load
    if is_late and rank not in outcome.frozen:
        text = f"ended {at - begin:.1f} s after the fault: {error_text(outcome, rank)}"
        yield Finding("late", rank, text)
    if is_ended_by_gloo(case, outcome, rank):
        yield Finding(TORCHS_GLOO, rank, outcome.said[str(rank)][:600])
        return
    if is_struck:
        yield from judge_struck(case, outcome, rank, code)
        return
    if error is None and outcome.find(rank, "end") and code == 0:
        return
    may_end = case.backend == "mpi" and ends_mpi(case, outcome)
    if may_end and error is None and (rank in outcome.by_mpiexec or code != 0):
        return
    if not has_failed(case, outcome) and not may_end:
        text = error["text"] if error else f"exit code {code}: {outcome.said.get(str(rank), '')}"
        yield Finding("must end well", rank, text)
    elif error is None:
        said = outcome.said.get(str(rank), "")
        yield Finding("crash", rank, f"exit code {code}, and no error: {said}")
    elif not error["is_ours"]:
        yield Finding("raw error", rank, f"{error['kind']}: {error['text']}\n{error['place']}")
    elif not is_named(case, outcome, rank):
        yield Finding("unnamed culprit", rank, error_text(outcome, rank))


def judge_struck(case: Case, outcome: Outcome, rank: int, code: int) -> Iterator[Finding]:
    """What the rank shows that the fault has struck: an end of the kind that it was given."""
    error = outcome.find(rank, "error")
    if error and not error["is_ours"] and not error["is_fault"]:
        yield Finding("raw error", rank, f"{error['kind']}: {error['text']}\n{error['place']}")
    is_signal = case.fault.kind.startswith(("SIG", "raise in")) or rank in outcome.by_mpiexec
    if code < 0 and not is_signal and case.backend != "mpi":
        said = outcome.said.get(str(rank), "")
        yield Finding("crash", rank, f"exit code {code} after {case.fault.kind}: {said}")


def ends_mpi(case: Case, outcome: Outcome) -> bool:
    """Whether some rank has ended such that mpiexec ends the job."""
    return any(code != 0 for _, code in outcome.ends.values()) or "os._exit" in case.fault.kind


def is_named(case: Case, outcome: Outcome, rank: int) -> bool:
    """Whether a rank's error names the one that failed, or one whose own error leads to it."""
    if case.backend == "mpi":
        last_words = _LAST_WORDS.findall(outcome.said.get("mpiexec", ""))
        if str(case.fault.rank) in {number for numbers in last_words for number in numbers}:
            return True
    seen, names = set(), [rank]
    while names:
        one = names.pop()
        seen.add(one)
        error = outcome.find(one, "error")
        fields = error["fields"] if error else {}
        text = " ".join(fields.get(name, "") for name in ("summary", "found"))
        found = named_ranks(text)
        if case.fault.rank in found or f"process {outcome.pids.get(case.fault.rank)} " in text:
            return True
        if any(is_ended_by_gloo(case, outcome, other) for other in found):
            return True
        names += found - seen
    return False


def false_completions(case: Case, outcome: Outcome) -> Iterator[Finding]:
    """Calls of which all members wait for each other, and that ended before all had come."""
    for number, step in enumerate(case.program.steps):
        if step.call not in ALL_WAIT or (case.fault.step == number and not case.is_exit):
            continue
        for rank in range(case.size):
            done, members = at_step(outcome, rank, "done", number), case.program.members(step, rank)
            is_for_a_moment = case.is_compared_late(members) and is_told(case, outcome, rank)
            if done is None or is_for_a_moment:
                continue
            for other in members:
                begun = at_step(outcome, other, "begin", number)
                if begun is None or begun > done:
                    yield Finding("false completion", rank, f"step {number} without rank {other}")


def at_step(outcome: Outcome, rank: int, what: str, number: int) -> float | None:
    """When a rank noted this of a step."""
    notes: Iterable[dict[str, Any]] = outcome.notes.get(rank, [])
    return next((n["at"] for n in notes if n["what"] == what and n.get("step") == number), None)
