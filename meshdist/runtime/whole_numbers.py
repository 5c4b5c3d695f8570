"""Whole numbers in text that others wrote: environment variables, URLs, files, keys of the store.

Imports the standard library only.
"""

from __future__ import annotations

import re

__all__ = ["find_whole_number"]

_DIGITS = re.compile(r"[0-9]{1,19}")  # int() takes other alphabets' digits, signs and underscores
_MOST = (1 << 63) - 1


def find_whole_number(text: str, most: int = _MOST) -> int | None:
    """Return the number that ``text`` writes in decimal digits, from 0 to ``most``; else None.

    Spaces around it are permitted.

    Example:
        >>> find_whole_number(" 12 "), find_whole_number("²"), find_whole_number("12", most=9)
        (12, None, None)
    """
    digits = text.strip()
    if _DIGITS.fullmatch(digits) is None:
        return None
    number = int(digits)
    return number if number <= most else None
