"""Where an error of ours leaves the package: one frame of ours stays in its traceback.

What lies below it tells a program nothing that the error's text does not, and stands between the
error and the line that is to be mended: one ``up`` in a debugger goes there. pytest and IPython
hide that last frame, too, for its ``__tracebackhide__``. At debug level DETAIL all frames stay.

The handlers of exceptions cost a call nothing until there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from ..errors import MeshdistError
from ..runtime.untraced import leave_untraced
from .call_sites import is_between
from .debug_levels import DebugLevel, get_debug_level

__all__ = ["end_here", "enter_program", "one_frame"]

P = ParamSpec("P")
R = TypeVar("R")


def end_here(error: BaseException) -> None:
    """Let the traceback of ``error`` end in the frame that has caught it, and raises it again.

    It stays as it is where a frame of the program lies below: the error then comes from there.
    """
    caught = error.__traceback__
    if caught is not None and not _keeps_all() and _find_program(caught) is None:
        caught.tb_next = None


def enter_program(error: BaseException) -> None:
    """Let the program's own frames follow the frame that has caught ``error``, if there are any."""
    caught = error.__traceback__
    if caught is not None and not _keeps_all():
        caught.tb_next = _find_program(caught) or caught.tb_next


def one_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Let an error of ours that leaves ``function`` keep one frame of ours, in its name."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (MeshdistError, KeyboardInterrupt) as error:
            __tracebackhide__ = True
            end_here(error)
            raise

    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return leave_untraced(wraps(function)(call))


def _keeps_all() -> bool:
    return get_debug_level() == DebugLevel.DETAIL


def _find_program(caught: TracebackType) -> TracebackType | None:
    """The first frame of the program below the one that has caught an error."""
    below = caught.tb_next
    while below is not None and is_between[below.tb_frame.f_code.co_filename]:
        below = below.tb_next
    return below
