"""The debug level, and what the loggers tell at each."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import meshdist as md
from meshdist.checking.debug_levels import TRACE, operations_log

PACKAGE = logging.getLogger("meshdist")


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test leaves the levels as they were."""
    before = dist.get_debug_level(), PACKAGE.level, list(PACKAGE.handlers)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    yield
    dist.set_debug_level(before[0])
    PACKAGE.setLevel(before[1])
    PACKAGE.handlers[:] = before[2]


def test_both_libraries_agree() -> None:
    assert md.DebugLevel is dist.DebugLevel
    for level in (md.DebugLevel.INFO, md.DebugLevel.DETAIL, md.DebugLevel.OFF):
        md.set_debug_level(level)
        assert md.get_debug_level() == dist.get_debug_level() == level
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert md.get_debug_level() == md.DebugLevel.DETAIL


@pytest.mark.parametrize("wrong", ["DETAIL", 2, None])
def test_what_is_no_debug_level(wrong: object) -> None:
    with pytest.raises(md.KindError, match="is not a debug level") as caught:
        md.set_debug_level(wrong)
    assert caught.value.expected == "DebugLevel.OFF, DebugLevel.INFO or DebugLevel.DETAIL"
    assert caught.value.found == type(wrong).__name__


def test_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("DETAIL", "DETAIL"), ("info", "INFO"), ("Off", "OFF")):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", value)
        md.set_debug_level_from_env()
        assert md.get_debug_level() == md.DebugLevel.__members__[expected]
    md.set_debug_level(md.DebugLevel.DETAIL)
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    md.set_debug_level_from_env()
    assert md.get_debug_level() == md.DebugLevel.OFF


@pytest.mark.parametrize("value", ["LOUD", "", "1"])
def test_an_unknown_value_is_a_value_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", value)
    md.set_debug_level(md.DebugLevel.INFO)
    with pytest.raises(ValueError, match=f"{value!r} is not a debug level") as caught:
        md.set_debug_level_from_env()
    assert isinstance(caught.value, md.ArgumentError)
    assert caught.value.where == "the environment variable TORCH_DISTRIBUTED_DEBUG"
    assert caught.value.expected == "OFF, INFO or DETAIL" and "unset it" in caught.value.fix
    assert md.get_debug_level() == md.DebugLevel.INFO


MATRIX = {  # (TORCH_CPP_LOG_LEVEL, debug level): what is told
    **{("FATAL", level): "CRITICAL" for level in ("OFF", "INFO", "DETAIL")},
    **{("ERROR", level): "ERROR" for level in ("OFF", "INFO", "DETAIL")},
    **{("WARNING", level): "WARNING" for level in ("OFF", "INFO", "DETAIL")},
    ("INFO", "OFF"): "INFO",
    ("INFO", "INFO"): "DEBUG",
    ("INFO", "DETAIL"): "TRACE",
}
NUMBERS = {"INFO": "0", "WARNING": "1", "ERROR": "2", "FATAL": "3"}


@pytest.mark.parametrize(("cpp", "level"), MATRIX)
def test_the_level_of_the_loggers(cpp: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for spelling in (cpp, cpp.lower(), NUMBERS[cpp]):
        PACKAGE.setLevel(logging.NOTSET)
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", spelling)
        md.set_debug_level(md.DebugLevel.__members__[level])
        told = logging.getLevelName(logging.getLogger("meshdist.groups").getEffectiveLevel())
        assert told == MATRIX[cpp, level]
        assert operations_log.isEnabledFor(TRACE) == (told == "TRACE")


def test_it_follows_the_environment_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    for level, told in itertools.product(("DETAIL", "OFF"), range(2)):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
        md.set_debug_level_from_env()
        assert operations_log.isEnabledFor(TRACE) == (level == "DETAIL"), told


@pytest.mark.parametrize("cpp", [None, "", "CHATTY"])
def test_otherwise_the_programs_own_configuration_decides(
    cpp: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpp is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", cpp)
    PACKAGE.setLevel(33)
    md.set_debug_level(md.DebugLevel.DETAIL)
    assert PACKAGE.level == 33


PROGRAM = """
import logging, sys
import meshdist as md
from meshdist.checking.debug_levels import TRACE, operations_log
before = list(logging.getLogger().handlers)
operations_log.log(TRACE, "a collective")
logging.getLogger("meshdist.groups").info("a group")
md.set_debug_level(md.DebugLevel.OFF)
operations_log.log(TRACE, "another collective")
assert logging.getLogger().handlers == before == []
logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.getLogger("meshdist.groups").info("told once")
"""


def test_what_is_told_reaches_stderr_until_the_program_sets_up_handlers() -> None:
    variables = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "meshdist" in line]
    assert said == ["TRACE meshdist.collectives: a collective", "INFO meshdist.groups: a group"]
    assert done.stdout == "told once\n"


def test_what_is_known_of_levels_is_forgotten_when_one_changes() -> None:
    assert not operations_log.isEnabledFor(TRACE)
    known = vars(operations_log)["_cache"]  # the native core looks at it
    assert known[TRACE] is False
    logger = logging.getLogger("meshdist")
    before = logger.level
    logger.setLevel(TRACE)
    assert TRACE not in known
    logger.setLevel(before)
