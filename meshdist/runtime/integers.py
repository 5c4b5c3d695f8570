"""Integers in text that others wrote: environment variables, URLs, files, keys of the store.

Imports the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_DIGITS = re.compile(r"[0-9]{1,19}")  # int() takes other alphabets' digits, signs and underscores
_MOST = (1 << 63) - 1


def find_integer(text: str, most: int = _MOST) -> int | None:
    """Return the number that ``text`` writes in decimal digits, from 0 to ``most``; else None.

    Example:
        >>> find_integer(" 12 "), find_integer("²"), find_integer("12", most=9)
        (12, None, None)
    """
    digits = text.strip()
    if _DIGITS.fullmatch(digits) is None:
        return None
    number = int(digits)
    return number if number <= most else None


def to_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return ``numbers`` as runs: first number, repeats of each, how many numbers follow on.

    Example:
        >>> to_runs([0, 0, 1, 1, 2, 2]), to_runs([0, 1, 2, 0, 1, 2])
        ([[0, 2, 3]], [[0, 1, 3], [0, 1, 3]])
    """
    runs: list[list[int]] = []
    for number, equal in groupby(numbers):
        length = len(list(equal))
        if runs and runs[-1][1] == length and number == runs[-1][0] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([number, length, 1])
    return runs


def from_runs(runs: Iterable[Iterable[int]], most: int) -> list[int]:
    """Return the numbers that ``to_runs`` was given; raise ValueError if more than ``most``.

    Example:
        >>> from_runs([[0, 2, 3]], most=6)
        [0, 0, 1, 1, 2, 2]
    """
    numbers: list[int] = []
    for first, length, count in runs:
        if len(numbers) + length * count > most:
            raise ValueError(f"more than {most} numbers")
        numbers += [first + step for step in range(count) for _ in range(length)]
    return numbers
