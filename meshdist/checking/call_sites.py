"""Find the program line of a call, shorten tracebacks, and reject nested collectives.

A meshdist error has a single frame of this package in its traceback, so one ``up`` in a debugger
reaches the program line. pytest and IPython hide that frame by its ``__tracebackhide__``. At debug
level DETAIL all frames are kept. The exception handlers cost nothing until an exception is raised.

Python runs signal handlers on the main thread, possibly inside a waiting collective, which the
other ranks cannot know. A collective in the handler could hang, or match another collective, even
on another group. Therefore it raises before it sends anything.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import queue
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from threading import get_ident, main_thread
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import ParamSpec, TypeAlias, TypeVar

import torch
from typing_extensions import deprecated

from ..bootstrap.world import find_world
from ..errors import MeshdistError, NestedCollectiveError
from ..runtime.graph_breaks import untraced
from .debug_levels import DebugLevel, get_debug_level

Site: TypeAlias = tuple[str, int] | None
"""A program line, as file and line number; None if no frame belongs to the program."""

warned_sites: set[tuple[type[Warning], tuple[str, int]]] = set()
_BETWEEN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    contextlib.__file__,
    queue.__file__,
    threading.__file__,
    inspect.getfile(deprecated),  # in which torch wraps collectives of older names
)


class _BetweenFiles(dict[str, bool]):
    """Cache, by file name, of whether a file is of this package or torch."""

    def __missing__(self, file: str) -> bool:
        self[file] = found = file.startswith(_BETWEEN)
        return found


is_between = _BetweenFiles()


def program_frame(frame: FrameType) -> FrameType:
    """Return the innermost program frame, from ``frame`` outwards; else the outermost."""
    while is_between[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


def call_site() -> Site:
    """Return the innermost program line that led here, or None."""
    frame = program_frame(sys._getframe(1))
    file = frame.f_code.co_filename
    return None if is_between[file] else (file, frame.f_lineno)


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost program line that led here."""
    frame = program_frame(sys._getframe(1))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    site = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *site, registry=registry)


def warn_once_at(
    site: tuple[str, int], text: Callable[[], str], category: type[Warning] = UserWarning
) -> None:
    """Warn of ``text()`` at ``site``, a file and line, once per category."""
    if (category, site) not in warned_sites:
        warned_sites.add((category, site))
        warnings.warn_explicit(text(), category, *site)


def show_site(site: Site) -> str:
    """Return ``file:line``, ``Cell In[3], line 4`` of a notebook, or "an unknown place"."""
    if site is None:
        return "an unknown place"
    file, line = site
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(file)
    return f"{file}:{line}" if cell is None else f"{' '.join(cell)}, line {line}"


def site_text(code: CodeType, instruction: int) -> str:
    """Return ``file:line in function`` of an instruction."""
    return f"{show_site((code.co_filename, line_of(code, instruction)))} in {code.co_name}"


def line_of(code: CodeType, instruction: int) -> int:
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            return number
    return code.co_firstlineno


def stack_above(frame: FrameType) -> list[str]:
    """Return the program locations that led to ``frame``, innermost first."""
    stack = []
    above = frame.f_back
    while above is not None:
        if not is_between[above.f_code.co_filename]:
            stack.append(site_text(above.f_code, above.f_lasti))
        above = above.f_back
    return stack


P = ParamSpec("P")
R = TypeVar("R")


def end_here(error: BaseException) -> None:
    """Cut the traceback of ``error`` at the frame that caught it, unless program frames follow."""
    # Keep the traceback if a program frame follows, because the program then raised the error.
    caught = error.__traceback__
    if caught is not None and not _keeps_all() and _find_program(caught) is None:
        caught.tb_next = None


def enter_program(error: BaseException) -> None:
    """Remove meshdist's frames between the catching frame and the program's frames."""
    caught = error.__traceback__
    if caught is not None and not _keeps_all():
        caught.tb_next = _find_program(caught) or caught.tb_next


def one_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that meshdist's errors show a single frame of this package."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (MeshdistError, KeyboardInterrupt) as error:
            __tracebackhide__ = True
            end_here(error)
            raise

    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return untraced(wraps(function)(call))


def _keeps_all() -> bool:
    return get_debug_level() == DebugLevel.DETAIL


def _find_program(caught: TracebackType) -> TracebackType | None:
    """Return the first program frame below the frame that caught an error, or None."""
    below = caught.tb_next
    while below is not None and is_between[below.tb_frame.f_code.co_filename]:
        below = below.tb_next
    return below


under_way: list[str | None] = [None]
"""The current collective of the main thread, or None; also written by the native core."""

_main_thread = main_thread().ident


def is_nested() -> bool:
    """Return whether this is the main thread and it is in a collective."""
    return under_way[0] is not None and get_ident() == _main_thread


def is_of_handler(error: BaseException) -> bool:
    """Return whether ``error`` is no Exception, or was raised in a program frame."""
    files = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    return not (isinstance(error, Exception) and all(is_between[file] for file in files))


def check_unnested(operation: str) -> None:
    """Raise NestedCollectiveError if the calling main thread is in a collective."""
    if not is_nested():
        return
    world = find_world()
    rank = "" if world is None else f"rank {world.rank}, "
    raise NestedCollectiveError(
        f"{operation} was called inside {under_way[0]}, which has not returned",
        where=f"{rank}called at {show_site(call_site())}",
        expected="one collective at a time per thread (a signal handler interrupts the main thread "
        "in the middle of a collective)",
        fix="set a flag in the handler and call the collective later; to end the wait, raise an "
        "exception in the handler or call the group's abort()",
    )


def run_unnested(operation: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``function`` as a collective of this thread.

    Raises:
        NestedCollectiveError: the thread is in a collective already.
    """
    if get_ident() != _main_thread:
        return function(*args, **kwargs)
    if under_way[0] is not None:
        check_unnested(operation)
    try:  # set it inside, because a handler may raise at any step
        under_way[0] = operation
        return function(*args, **kwargs)
    finally:
        under_way[0] = None


def never_nested(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` as a collective, which raises if called inside another."""
    operation = function.__name__

    @one_frame
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_unnested(operation, function, *args, **kwargs)

    return call


def _forget_in_child() -> None:
    """Reset the state in a forked child, whose only thread is the main thread."""
    global _main_thread
    _main_thread = get_ident()
    under_way[0] = None


os.register_at_fork(after_in_child=_forget_in_child)


_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = ("<frozen ", *{sysconfig.get_path(kind) + os.sep for kind in _KINDS})


def stack_text(thread_id: int) -> str:
    """Return a thread's stack as a traceback shows it, the innermost frame last."""
    pairs = [(frame, frame.f_lineno) for frame in _own_frames(thread_id)]
    return "".join(traceback.StackSummary.extract(iter(pairs)).format())


def find_call_site(thread_id: int, call: str) -> str:
    """Return a thread's location (``train.py:8 in step``); "" if ``call`` contains it."""
    own = _own_frames(thread_id)
    if not own:
        return ""
    nearest = (own[-1], program_frame(sys._current_frames().get(thread_id, own[-1])))
    sites = [site_text(frame.f_code, frame.f_lasti) for frame in nearest]
    return "" if any(site in call for site in sites) else sites[0]


def _own_frames(thread_id: int) -> list[FrameType]:
    """Return a thread's frames outside torch, this package and, if any are left, libraries."""
    innermost = sys._current_frames().get(thread_id)
    if innermost is None:
        return []
    frames = [frame for frame, _ in traceback.walk_stack(innermost)][::-1]
    frames = [frame for frame in frames if not is_between[frame.f_code.co_filename]]
    return [it for it in frames if not it.f_code.co_filename.startswith(_LIBRARIES)] or frames
