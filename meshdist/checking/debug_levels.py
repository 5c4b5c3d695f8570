"""Control checks and logging: torch's debug level, and the level of the ``meshdist.*`` loggers.

The debug level is torch's own. The level of the logger ``meshdist`` follows from it and from
TORCH_CPP_LOG_LEVEL, as torch documents for its own messages:

    TORCH_CPP_LOG_LEVEL   debug level   logged
    FATAL                 any           critical
    ERROR                 any           errors
    WARNING               any           warnings too
    INFO                  OFF           info too
    INFO                  INFO          debug too
    INFO                  DETAIL        everything: TRACE, below debug

Without TORCH_CPP_LOG_LEVEL the program's own logging configuration decides.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch.distributed
from torch.distributed import DebugLevel

from ..errors import ArgumentError, KindError
from ..launching.rank_environment import find_bad_debug_level

__all__ = [
    "TRACE",
    "DebugLevel",
    "get_debug_level",
    "set_debug_level",
    "set_debug_level_from_env",
    "shows_stacks",
    "operations_log",
]

TRACE = 5
"""The level of messages about every collective, below ``logging.DEBUG``."""

logging.addLevelName(TRACE, "TRACE")
operations_log = logging.getLogger("meshdist.collectives")
"""Logs every collective, its rank and its caller's line, at level TRACE."""

_CPP_LEVELS = {
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "0": logging.INFO,
    "1": logging.WARNING,
    "2": logging.ERROR,
    "3": logging.CRITICAL,
}
_INFO_LEVELS = {
    DebugLevel.OFF: logging.INFO,
    DebugLevel.INFO: logging.DEBUG,
    DebugLevel.DETAIL: TRACE,
}


def get_debug_level() -> DebugLevel:
    """Return the debug level of meshdist and torch.distributed: OFF, INFO or DETAIL."""
    return torch.distributed.get_debug_level()


def set_debug_level(arg0: DebugLevel) -> None:
    """Set the debug level of meshdist and of torch.distributed.

    OFF is the default. INFO logs more, and ranks of an NCCL group compare their calls before
    enqueuing them. With DETAIL, ranks of groups that span hosts also compare their calls before
    data moves, and ``psum`` checks gradients in its backward. Set the same level on every rank.

    Raises:
        KindError: ``arg0`` is not a DebugLevel.
    """
    if not isinstance(arg0, DebugLevel):
        raise KindError(
            f"{arg0!r} is not a debug level",
            expected="DebugLevel.OFF, DebugLevel.INFO or DebugLevel.DETAIL",
            found=type(arg0).__name__,
            fix="pass for example meshdist.distributed.DebugLevel.DETAIL",
        )
    torch.distributed.set_debug_level(arg0)
    _follow()


def set_debug_level_from_env() -> None:
    """Set the debug level to TORCH_DISTRIBUTED_DEBUG, or to OFF if it is not set.

    Raises:
        ArgumentError: it is not OFF, INFO or DETAIL; the level is unchanged.
    """
    if (fields := find_bad_debug_level(os.environ)) is not None:
        raise ArgumentError(**fields)
    torch.distributed.set_debug_level_from_env()
    _follow()


def shows_stacks() -> bool:
    """Return whether errors show each call's stack, by TORCH_SHOW_CPP_STACKTRACES=1."""
    return os.environ.get("TORCH_SHOW_CPP_STACKTRACES") == "1"


class _LastResort(logging.Handler):
    """Log handler that writes to stderr while the program has set up no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if len(_package_log.handlers) == 1 and not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")


_package_log = logging.getLogger("meshdist")
_last_resort = _LastResort()
_last_resort.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


def _follow() -> None:
    """Set the level of the logger "meshdist" by TORCH_CPP_LOG_LEVEL and the debug level."""
    level: Any = _CPP_LEVELS.get(os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper())
    if level is None:  # unset, or unknown, which torch reports
        return
    if level == logging.INFO:
        level = _INFO_LEVELS[get_debug_level()]
    _package_log.setLevel(level)
    if _last_resort not in _package_log.handlers:
        _package_log.addHandler(_last_resort)


_follow()
