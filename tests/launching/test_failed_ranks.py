"""Which of several failed ranks is shown last."""

from __future__ import annotations

import pytest

import meshdist as md
from meshdist.launching.child_processes import ProcessExit
from meshdist.launching.failed_ranks import TRACEBACK, Failure, find_cause, is_consequence

CHAIN = b"\n\nThe above exception was the direct cause of the following exception:\n\n"


def failure(text: bytes, *, rank: int = 0, code: int = 1, at: float = 0.0) -> Failure:
    return Failure(ProcessExit(rank, 1000 + rank, code), at, text)


def report(line: str) -> bytes:
    return TRACEBACK + f'\n  File "train.py", line 3, in step\n{line}\n'.encode()


@pytest.mark.parametrize(
    "line",
    [
        f"{md.AbortedError.__module__}.AbortedError: all_reduce on the world was aborted",
        "meshdist.errors.CollectiveTimeoutError: x\n  found:    rank 1 failed first, in all_reduce",
        "meshdist.errors.BackendError: x\n  found:    rank 1: does not respond: it has exited",
        "meshdist.errors.BackendError: x\n            ranks 1-2: do not respond: they have exited",
        "meshdist.errors.BackendError: x\n  found:    rank 0 has ended\n  fix:      look at",
        "meshdist.errors.BackendError: x\n  found:    rank 0 ended by ValueError: no data (a.py:3)",
        "meshdist.errors.StoreError: the process that hosts the store has ended",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a",
    ],
)
def test_a_report_that_quotes_another_rank(line: str) -> None:
    assert is_consequence(failure(report(line)))
    assert not is_consequence(failure(report(line), code=-9))
    assert is_consequence(failure(report(line) + CHAIN + report("RuntimeError: step 3 failed")))
    # An older report was caught, as by logging.exception, and the program went on.
    assert not is_consequence(failure(report(line) + b"retrying\n" + report("KeyError: 'x'")))


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: rank one is unwell",
        "meshdist.errors.MismatchError: collective mismatch: ranks made different calls as call 3",
        "meshdist.errors.CollectiveTimeoutError: x\n  found:    rank 1: did not reach this call",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_report_of_its_own(line: str) -> None:
    assert not is_consequence(failure(report(line)))


def test_what_cpp_says_when_it_aborts() -> None:
    text = b"terminate called after throwing\n  what():  Connection closed by peer\n"
    assert is_consequence(failure(text, code=-6))
    assert not is_consequence(failure(text, code=-11))


def test_the_cause_is_the_first_that_quotes_nobody() -> None:
    aborted = report("meshdist.errors.AbortedError: all_reduce was aborted")
    early, late = failure(aborted, rank=1, at=1.0), failure(aborted, rank=2, at=2.0)
    own, second = failure(report("ValueError: x"), at=3.0), failure(b"", rank=3, code=3, at=4.0)
    assert find_cause([late, second, early, own]) is own
    assert find_cause([late, early, second]) is second
    assert find_cause([late, early]) is early
