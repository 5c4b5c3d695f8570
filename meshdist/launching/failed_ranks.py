"""Find the first rank that failed, and group equal tracebacks of failed ranks.

Equal tracebacks differ only in each rank's own number and coordinates, process ids and memory
addresses. If a group's members raise one error together, error texts may also differ in the line
about the rank's own call.

A rank that fails makes other ranks fail, and its process may end after theirs. Its last text on
stderr shows whether its error quotes another rank, and its traceback's start shows when it failed.
Only text is used, because ranks may run any program.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ..error_text import ranks_text
from .child_processes import ProcessExit

TRACEBACK = b"Traceback (most recent call last):"
"""The first line of Python's traceback."""

# The end of the text between two chained tracebacks.
_CHAINED = (b"direct cause of the following exception:", b"another exception occurred:")
_OF_ANOTHER = re.compile(
    rb"""
    AbortedError:                                   # usually caused by another rank
    | \bfailed\ first,\ in\                         # a timeout or failure that quotes the first
    | \bwas\ interrupted\ by\b
    | :\ does\ not\ respond:\ it\ has\ exited | do\ not\ respond:\ they\ have\ exited
    | \bfound:\ +rank\ \d+\ (has\ ended|ended\ by)\b
    | StoreError: | \bstore\ (is|was)\ lost\b | \bprocess\ that\ hosts\ the\ store\ has\ ended\b
    | Connection\ (closed|reset)\ by\ peer          # Gloo
    | remote\ process\ exited                       # NCCL
    | DistNetworkError: | failed\ to\ recv,\ got\ 0\ bytes | TCPStore.{0,80}Broken\ pipe
    """,
    re.VERBOSE,
)
_SIGABRT = 6
_KEPT_WITHOUT_TRACEBACK = 4096


@dataclass(frozen=True)
class Failure:
    """Failure of one rank.

    Args:
        at: the failure's time in seconds, on a clock shared by all failures.
        text: the end of the rank's stderr.
    """

    ending: ProcessExit
    at: float
    text: bytes


def is_consequence(failure: Failure) -> bool:
    """Return whether a report shows that another rank failed before.

    Example:
        >>> text = b"Traceback (most recent call last):\\nRuntimeError: Connection closed by peer"
        >>> is_consequence(Failure(ProcessExit(rank=2, pid=1, code=1), 0.0, text))
        True
    """
    code = failure.ending.code
    if code < 0 and code != -_SIGABRT:  # an uncaught C++ exception ends with SIGABRT
        return False
    return quotes_another(failure.text)


def quotes_another(text: bytes) -> bool:
    """Return whether the last report in ``text`` quotes another rank's failure."""
    return _OF_ANOTHER.search(_last_report(text)) is not None


def find_cause(failures: Iterable[Failure]) -> Failure:
    """Return the first failure that quotes no other rank, else the first."""
    return min(failures, key=lambda failure: (is_consequence(failure), failure.at))


def _last_report(text: bytes) -> bytes:
    """Return the last traceback in ``text``, including chained tracebacks."""
    *before, report = text.split(TRACEBACK)
    if not before:
        return report[-_KEPT_WITHOUT_TRACEBACK:]
    while before and before[-1].rstrip().endswith(_CHAINED):
        report = before.pop() + report
    return report


_LOCATION = re.compile(
    rb"(\brank \d+\b(?: \(\w+=\d+(?:, \w+=\d+)*\))?|\b(?:pid|process) \d+\b|\b0x[0-9a-f]+\b)"
)
# The error text below the last frame, before and after the line about the rank's own call.
_TOGETHER = re.compile(rb"\n(\w\S*: .*\n(?: +.*\n)*?)( +)raised on rank \d+(.*)\n((?: +.*\n?)*)")


@dataclass(frozen=True)
class Report:
    """A rank's stderr from its last traceback."""

    rank: int
    text: bytes

    def is_of_interrupt(self, stacks: Mapping[int, bytes]) -> bool:
        """Return whether the report is of Ctrl-C on a rank in ``stacks``, or quotes another.

        Example:
            >>> report = Report(0, b"Traceback (most recent call last):\\nKeyboardInterrupt")
            >>> report.is_of_interrupt({0: b"at home"}), report.is_of_interrupt({})
            (True, False)
        """
        is_own = self.text.rstrip().splitlines()[-1:] == [b"KeyboardInterrupt"]
        return (is_own and bool(stacks.get(self.rank))) or quotes_another(self.text)


def are_equal(report: Report, other: Report) -> bool:
    """Return whether two reports differ at most in each rank's number and process ids.

    Example:
        >>> are_equal(Report(0, b"rank 0: 2 ranks"), Report(1, b"rank 1: 2 ranks"))
        True
        >>> are_equal(Report(0, b"lost rank 2"), Report(1, b"lost rank 3"))
        False
    """
    mine, others = _LOCATION.split(report.text), _LOCATION.split(other.text)
    own = (b"rank %d" % report.rank, b"rank %d" % other.rank)
    return len(mine) == len(others) and all(
        x == y or (is_location % 2 and _are_locations(x, y, own))
        for is_location, (x, y) in enumerate(zip(mine, others, strict=True))
    )


def _are_locations(text: bytes, other: bytes, own: tuple[bytes, bytes]) -> bool:
    """Return whether the texts are the ranks ``own`` with equal axes, or neither is a rank."""
    if not text.startswith(b"rank "):
        return not other.startswith(b"rank ")
    (mine, at), (others, there) = (location.partition(b" (")[::2] for location in (text, other))
    return (mine, others) == own and re.sub(rb"\d", b"", at) == re.sub(rb"\d", b"", there)


def _find_own_call(report: Report) -> re.Match[bytes] | None:
    """Return the match of this rank's own call in its group's error, or None."""
    *_, found = [None, *_TOGETHER.finditer(with_end(report.text))]
    return found


def _are_of_one_error(report: Report, other: Report) -> bool:
    mine, others = _find_own_call(report), _find_own_call(other)
    if mine is None or others is None:
        return are_equal(report, other)
    return mine.group(1, 4) == others.group(1, 4)


def grouped(reports: Sequence[Report]) -> list[list[Report]]:
    """Return reports grouped by equal text or error, in the given order.

    Example:
        >>> [len(part) for part in grouped([Report(0, b"a"), Report(1, b"b"), Report(2, b"a")])]
        [2, 1]
    """
    groups: list[list[Report]] = []
    for report in reports:
        for group in groups:
            if _are_of_one_error(group[0], report):
                group.append(report)
                break
        else:
            groups.append([report])
    return groups


def text_of(group: Sequence[Report]) -> bytes:
    """Return a group's first report, plus a line for each other call.

    Example:
        >>> error = b"\\nValueError: 1\\n  where:  here\\n          raised on rank %d, call %d"
        >>> print(text_of([Report(rank, error % (rank, rank)) for rank in (0, 1)]).decode())
        <BLANKLINE>
        ValueError: 1
          where:  here
                  raised on rank 0, call 0
                  raised on rank 1, call 1
        <BLANKLINE>
    """
    text, calls = with_end(group[0].text), dict[bytes, list[int]]()
    for report in group:
        if found := _find_own_call(report):
            calls.setdefault(found[3], []).append(report.rank)
    own = _find_own_call(group[0])
    if own is None:
        return text
    lines = [
        b"%sraised on %s%s\n" % (own[2], ranks_text(ranks).encode(), call)
        for call, ranks in calls.items()
        if group[0].rank not in ranks
    ]
    return text[: own.start(4)] + b"".join(lines) + text[own.start(4) :]


def stacks_text(stacks: Mapping[int, bytes]) -> bytes:
    """Return the stacks of ranks, grouping equal stacks.

    Example:
        >>> print(stacks_text({0: b"  at home", 1: b"", 2: b"  at home"}).decode(), end="")
        meshdist: ranks 0, 2 were here:
          at home
        meshdist: rank 1 did not report a stack: stopped, or inside one long call
    """
    silent = sorted(rank for rank, text in stacks.items() if not text)
    answered = [Report(rank, text) for rank, text in sorted(stacks.items()) if text]
    parts = [
        f"meshdist: {ranks_text(report.rank for report in group)} "
        f"{'was' if len(group) == 1 else 'were'} here:\n".encode()
        + text_of(group)
        for group in grouped(answered)
    ]
    if silent:
        text = "did not report a stack: stopped, or inside one long call"
        parts.append(f"meshdist: {ranks_text(silent)} {text}\n".encode())
    return b"".join(parts)


def summary_of(
    cause: Failure,
    failures: Sequence[Failure],
    endings: Sequence[ProcessExit],
    equal: Collection[int],
    num_stopped: int,
) -> str:
    """Return a failed job's summary line; ``equal`` ranks reported the same error."""
    ending = cause.ending
    same = sorted(set(equal) - {ending.rank})
    others = {failure.ending.rank for failure in failures} - {ending.rank, *same}
    before = sorted(end.rank for end in takewhile(lambda end: end.code == 0, endings))
    text = f"meshdist: rank {ending.rank} (pid {ending.pid}) {ending}"
    if same:
        text += f"; {ranks_text(same)} reported the same"
    if others:
        text += f"; {ranks_text(sorted(others))} failed after it"
    if before:
        text += f"; {ranks_text(before)} had already exited with code 0"
    if num_stopped:
        text += f"; stopped {num_stopped} other rank(s) on this host"
    return text


def with_end(text: bytes) -> bytes:
    """Return ``text`` with a final line break, unless it is empty.

    Example:
        >>> with_end(b"one"), with_end(b"")
        (b'one\\n', b'')
    """
    return text + b"\n" if text and not text.endswith(b"\n") else text
