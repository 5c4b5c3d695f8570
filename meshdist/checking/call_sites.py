"""Call sites: the lines of the program, outside meshdist and torch, from which verbs are called."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import warnings
from types import CodeType, FrameType
from typing import TypeAlias

import torch

__all__ = [
    "Site",
    "call_site",
    "is_between",
    "line_of",
    "place_text",
    "program_frame",
    "show_site",
    "stack_above",
    "warn_caller",
]

Site: TypeAlias = tuple[str, int] | None
"""A line of the program, as file and line number; None where no frame is of the program."""

_BETWEEN = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    contextlib.__file__,
    queue.__file__,
    threading.__file__,
)


class _BetweenFiles(dict[str, bool]):
    """Whether a file lies between the program and the wire: this package's and torch's do."""

    def __missing__(self, file: str) -> bool:
        self[file] = found = file.startswith(_BETWEEN)
        return found


is_between = _BetweenFiles()


def program_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the program, from ``frame`` outwards; else the outermost of all."""
    while is_between[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


def call_site() -> Site:
    """The innermost line of the program that led here."""
    frame = program_frame(sys._getframe(1))
    file = frame.f_code.co_filename
    return None if is_between[file] else (file, frame.f_lineno)


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of the program that led here, however many frames lie between."""
    frame = program_frame(sys._getframe(1))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *place, registry=registry)


def show_site(site: Site) -> str:
    """``file:line``, as editors and terminals link it."""
    return "an unknown place" if site is None else f"{site[0]}:{site[1]}"


def place_text(code: CodeType, instruction: int) -> str:
    """``file:line in function`` of an instruction of ``code``."""
    return f"{code.co_filename}:{line_of(code, instruction)} in {code.co_name}"


def line_of(code: CodeType, instruction: int) -> int:
    """The number of an instruction's line."""
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            return number
    return code.co_firstlineno


def stack_above(frame: FrameType) -> list[str]:
    """The places of the program from which ``frame`` was called, the innermost first."""
    stack = []
    above = frame.f_back
    while above is not None:
        if not is_between[above.f_code.co_filename]:
            stack.append(place_text(above.f_code, above.f_lasti))
        above = above.f_back
    return stack
