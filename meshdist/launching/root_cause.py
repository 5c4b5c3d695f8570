"""Which of several failed ranks is the cause: the others failed because it did.

A rank that fails takes others with it, and its own process may end after theirs. What a rank wrote
last to stderr shows whether it only quotes another; its traceback begins when it fails, not when
its process ends. Ranks run any program, torch.distributed's too, so only the text is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .child_processes import Ending

__all__ = ["TRACEBACK", "Failure", "find_cause", "is_consequence", "quotes_another"]

TRACEBACK = b"Traceback (most recent call last):"
"""How Python's report of an exception begins."""

# How the text between two tracebacks of one report ends.
_CHAINED = (b"direct cause of the following exception:", b"another exception occurred:")
_OF_ANOTHER = re.compile(
    rb"""
    AbortedError:                                   # by another rank, as a rule
    | \bfailed\ first,\ in\                         # a timeout or failure that quotes the first
    | \bcould\ not\ open\ a\ debugger\b
    | :\ gives\ no\ answer:\ it\ has\ ended | give\ no\ answer:\ they\ have\ ended
    | StoreError: | \bstore\ (is|was)\ lost\b | \bprocess\ that\ serves\ the\ store\ has\ ended\b
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
    """A rank that failed by itself.

    Args:
        ending: how its process ended.
        at: when it failed, in seconds on a clock that all failures share.
        text: the end of what it wrote to stderr.
    """

    ending: Ending
    at: float
    text: bytes


def is_consequence(failure: Failure) -> bool:
    """Whether its report says that another rank failed before it.

    Example:
        >>> text = b"Traceback (most recent call last):\\nRuntimeError: Connection closed by peer"
        >>> is_consequence(Failure(Ending(rank=2, pid=1, code=1), 0.0, text))
        True
    """
    code = failure.ending.code
    if code < 0 and code != -_SIGABRT:  # C++ ends with SIGABRT where an exception is not caught
        return False
    return quotes_another(failure.text)


def quotes_another(text: bytes) -> bool:
    """Whether the last report in ``text`` says that another rank failed before."""
    return _OF_ANOTHER.search(_last_report(text)) is not None


def find_cause(failures: Iterable[Failure]) -> Failure:
    """The first failure that quotes no other rank; the first of all where every one does."""
    return min(failures, key=lambda failure: (is_consequence(failure), failure.at))


def _last_report(text: bytes) -> bytes:
    """The last traceback in ``text``, with those that led to it."""
    *before, report = text.split(TRACEBACK)
    if not before:
        return report[-_KEPT_WITHOUT_TRACEBACK:]
    while before and before[-1].rstrip().endswith(_CHAINED):
        report = before.pop() + report
    return report
