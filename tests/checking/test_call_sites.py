"""The line of the program that led to a call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import meshdist
from meshdist.checking.call_sites import (
    Site,
    call_site,
    program_frame,
    show_site,
    site_text,
    stack_above,
)


def called_from(file: str, function: Callable[[], Any]) -> Any:
    """What ``function`` returns to a caller whose code stands in ``file``."""
    names: dict[str, Any] = {}
    exec(compile("def between(f): return f()\n", file, "exec"), names)
    return names["between"](function)


INSIDE = [module.__file__.replace("__init__", "made_up") for module in (torch, meshdist)]


def test_a_call_site_is_the_innermost_line_of_the_program() -> None:
    line = test_a_call_site_is_the_innermost_line_of_the_program.__code__.co_firstlineno
    assert call_site() == (__file__, line + 2)
    calls = called_from.__code__.co_firstlineno + 4
    for file in INSIDE:
        assert called_from(file, call_site) == (__file__, calls)
    assert called_from("program.py", call_site) == ("program.py", 1)


def test_threads_that_run_nothing_of_the_program_have_no_site() -> None:
    found: list[Site] = []

    def between() -> None:
        found.append(call_site())

    code = between.__code__.replace(co_filename=INSIDE[0])
    between.__code__ = code
    thread = threading.Thread(target=between)
    thread.start()
    thread.join()
    assert found == [None]
    assert show_site(None) == "an unknown place"
    assert show_site(("train.py", 8)) == "train.py:8"


def test_the_outermost_frame_stands_for_the_program_where_there_is_none() -> None:
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back
    assert program_frame(outermost) is outermost


def test_an_instruction_is_told_by_its_line_and_function() -> None:
    def here() -> str:
        frame = sys._getframe()
        return site_text(frame.f_code, frame.f_lasti)

    line = here.__code__.co_firstlineno + 2
    assert here() == f"{__file__}:{line} in here"
    assert site_text(here.__code__, 10_000) == f"{__file__}:{line - 2} in here"


def test_the_stack_leaves_out_what_lies_between() -> None:
    def innermost() -> list[str]:
        return stack_above(sys._getframe())

    above = called_from(INSIDE[0], innermost)
    assert above[0].startswith(f"{__file__}:")
    assert above[0].endswith(" in called_from")
    assert above[1].endswith(" in test_the_stack_leaves_out_what_lies_between")
    assert called_from("program.py", innermost)[0] == "program.py:1 in between"
