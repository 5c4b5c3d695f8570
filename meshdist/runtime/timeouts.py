"""How long to wait: what a timeout may be, and how long it is by default."""

from __future__ import annotations

from datetime import timedelta

from ..errors import ArgumentError, KindError

__all__ = ["DEFAULT_TIMEOUT", "check_timeout"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's, for every wire but NCCL."""

_LONGEST = timedelta(days=36500)
"""Torch counts nanoseconds in 64 bits, which end after 292 years."""


def check_timeout(timeout: object) -> None:
    """Return if ``timeout`` is None or a time to wait that clocks can count; raise otherwise."""
    if timeout is None:
        return
    if not isinstance(timeout, timedelta):
        raise KindError(
            f"timeout must be a datetime.timedelta, not {timeout!r}",
            found=type(timeout).__name__,
            fix="pass for example timedelta(seconds=60)",
        )
    if timeout <= timedelta(0):
        raise ArgumentError("timeout must be positive", found=f"{timeout}")
    if timeout > _LONGEST:
        raise ArgumentError(
            "timeout is too long",
            expected=f"at most {_LONGEST.days} days",
            found=f"{timeout}",
        )
