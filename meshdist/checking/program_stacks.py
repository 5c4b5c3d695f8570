"""Where the program is now on one of its threads: in its own frames, not a library's."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import FrameType

from .program import is_between, place_text, program_frame

__all__ = ["find_place", "stack_text"]

_KINDS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = ("<frozen ", *{sysconfig.get_path(kind) + os.sep for kind in _KINDS})


def stack_text(thread_id: int) -> str:
    """The stack of a thread as a traceback shows it, the innermost frame last."""
    pairs = [(frame, frame.f_lineno) for frame in _own_frames(thread_id)]
    return "".join(traceback.StackSummary.extract(iter(pairs)).format())


def find_place(thread_id: int, call: str) -> str:
    """Where a thread is, as in ``train.py:8 in step``; "" if ``call``, its last, tells that."""
    own = _own_frames(thread_id)
    if not own:
        return ""
    nearest = (own[-1], program_frame(sys._current_frames().get(thread_id, own[-1])))
    places = [place_text(frame.f_code, frame.f_lasti) for frame in nearest]
    return "" if any(place in call for place in places) else places[0]


def _own_frames(thread_id: int) -> list[FrameType]:
    """A thread's frames that are the program's own, all but ours and torch's where it has none."""
    innermost = sys._current_frames().get(thread_id)
    if innermost is None:
        return []
    frames = [frame for frame, _ in traceback.walk_stack(innermost)][::-1]
    frames = [frame for frame in frames if not is_between[frame.f_code.co_filename]]
    return [one for one in frames if not one.f_code.co_filename.startswith(_LIBRARIES)] or frames
