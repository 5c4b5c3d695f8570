"""Validate common arguments: numbers, shapes, meshes and timeouts."""

from __future__ import annotations

from datetime import timedelta
from numbers import Integral, Real
from operator import index
from typing import Any

from .error_text import with_article
from .errors import ArgumentError, KindError, ShapeError

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's default for every backend except NCCL."""

_LONGEST = timedelta(days=36500)
"""torch stores nanoseconds in 64 bits, which overflow after 292 years."""


def find_integers(given: Any) -> list[int] | None:
    """Return a list or tuple as ints; None for other types or entries."""
    if not isinstance(given, (list, tuple)):
        return None
    if {*map(type, given)} <= {int}:
        return list(given)
    try:
        return None if any(map(_is_bool, given)) else list(map(index, given))
    except TypeError:
        return None


def _is_bool(given: Any) -> bool:
    return isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")


def mesh_kind_error(
    summary: str, given: object, *, expected: str = "a DeviceMesh", fix: str | None = None
) -> KindError:
    """Return the error for an object that is not a DeviceMesh of meshdist."""
    kind = type(given)
    if kind.__module__ != "torch.distributed.device_mesh":
        return KindError(summary, expected=expected, found=with_article(kind.__name__), fix=fix)
    return KindError(
        summary,
        expected=f"{expected} of meshdist",
        found=f"a {kind.__module__}.{kind.__qualname__}",
        fix="convert it: DeviceMesh.from_torch(mesh)",
    )


def get_integer(
    given: Any, name: str, least: int | None = None, most: int | None = None, **parts: str | None
) -> int:
    """Return an integer of any library as an int; raise for other types, bool, or out of range.

    Args:
        parts: further fields of the error, such as ``fix``; ``expected`` replaces the range.
    """
    numbers = [given] if type(given) is int else find_integers([given])
    if numbers is None:
        found = f"{given!r}, {with_article(type(given).__name__)}"
        raise KindError(f"{name} must be an integer", **{"found": found, **parts})
    (number,) = numbers
    if (least is not None and number < least) or (most is not None and number > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ArgumentError(f"{name} is {number}", **{"expected": f"an integer {limits}", **parts})
    return number


def get_number(given: Any, name: str, **parts: str | None) -> float:
    """Return a Python or NumPy number as an int or float; raise for other types and bool.

    Args:
        parts: further fields of the error, such as ``expected``.
    """
    if isinstance(given, bool) or not isinstance(given, Real):
        found = f"{given!r}, {with_article(type(given).__name__)}"
        raise KindError(f"{name} must be a number", **{"found": found, **parts})
    return int(given) if isinstance(given, Integral) else float(given)


def get_shape(given: Any, call: str) -> tuple[int, ...]:
    """Return ``given`` as a tuple of sizes, 0 or more; raise for anything else."""
    sizes = find_integers(given.tolist() if hasattr(given, "tolist") else given)
    if sizes is None:
        raise KindError(
            f"{call}: shape must be the global shape, one integer for each dim",
            expected="for example shape=(8, 16)",
            found=repr(given),
        )
    if min(sizes, default=0) < 0:
        raise ShapeError(f"{call}: no dim has a size below 0", found=f"shape={tuple(sizes)}")
    return tuple(sizes)


def check_timeout(timeout: object) -> None:
    """Raise unless ``timeout`` is None or a positive timedelta that clocks can count."""
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
