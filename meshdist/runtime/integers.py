"""Parse integers in untrusted text: environment variables, URLs, files and store keys.

Imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_DIGITS = re.compile(r"[0-9]{1,19}")  # int() also accepts other digits, signs and underscores
_MOST = (1 << 63) - 1


def find_integer(text: str, most: int = _MOST) -> int | None:
    """Return the decimal number in ``text`` if it is from 0 to ``most``, else None.

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
    """Encode ``numbers`` as runs of first number, repeats of each, count of consecutive numbers.

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
    """Decode the runs of ``to_runs``; raise ValueError for more than ``most`` numbers.

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
