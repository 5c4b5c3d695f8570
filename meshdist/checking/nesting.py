"""No verb inside a verb: what the main thread is in, until it returns.

Python runs the handlers of signals on the main thread, between two steps of whatever that does. A
verb that waits there goes on only when the handler returns, and the other ranks know nothing of the
handler: so a verb that a handler calls could wait for ever, or meet another verb than its own, also
on another group. It is refused before anything is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident, main_thread
from traceback import walk_tb
from typing import ParamSpec, TypeVar

from ..bootstrap.world import find_world
from ..errors import NestedVerbError
from .call_sites import call_site, is_between, show_site
from .tracebacks import one_frame

__all__ = [
    "check_unnested",
    "is_nested",
    "is_of_handler",
    "never_nested",
    "run_unnested",
    "set_aside",
    "under_way",
]

P = ParamSpec("P")
R = TypeVar("R")

under_way: list[str | None] = [None]
"""The verb that the main thread is in, or None. The native core writes it, too."""

_main_thread = main_thread().ident


def is_nested() -> bool:
    """Whether this thread is in a verb."""
    return under_way[0] is not None and get_ident() == _main_thread


def is_of_handler(error: BaseException) -> bool:
    """Whether an error that leaves our code is Ctrl-C's, or raised in a frame of the program."""
    files = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    return not (isinstance(error, Exception) and all(is_between[file] for file in files))


def check_unnested(verb: str) -> None:
    """Raise NestedVerbError where this thread is in a verb already."""
    if not is_nested():
        return
    world = find_world()
    rank = "" if world is None else f"rank {world.rank}, "
    raise NestedVerbError(
        f"{verb} was called inside {under_way[0]}, which has not returned",
        where=f"{rank}called at {show_site(call_site())}",
        expected="one verb at a time on a thread; a signal's handler runs on the main thread, in "
        "the middle of what that does",
        fix="let the handler set a flag and call the verb later; to end the wait, let it raise an "
        "exception or call abort() of the group",
    )


def run_unnested(verb: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function``, which carries out a verb, as the one verb of its thread.

    Raises:
        NestedVerbError: the thread is in a verb already.
    """
    if get_ident() != _main_thread:
        return function(*args, **kwargs)
    if under_way[0] is not None:
        check_unnested(verb)
    try:  # a handler may raise at any step: so it is noted inside, and forgotten in one
        under_way[0] = verb
        return function(*args, **kwargs)
    finally:
        under_way[0] = None


def never_nested(function: Callable[P, R]) -> Callable[P, R]:
    """Let every call of ``function`` go by ``run_unnested``, as the verb of its name."""
    verb = function.__name__

    @one_frame
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_unnested(verb, function, *args, **kwargs)

    return call


@contextmanager
def set_aside() -> Iterator[None]:
    """Let the verb that this thread is in call others before it goes on, as steps of its own."""
    if get_ident() != _main_thread:
        yield
        return
    verb, under_way[0] = under_way[0], None
    try:
        yield
    finally:
        under_way[0] = verb


def _forget_in_child() -> None:
    """A forked child is in no verb of its parent's, and its one thread is the main one."""
    global _main_thread
    _main_thread = get_ident()
    under_way[0] = None


os.register_at_fork(after_in_child=_forget_in_child)
