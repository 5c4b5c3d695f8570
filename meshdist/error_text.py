"""The one shape of every message: what happened, where, what was expected, how to mend it.

Imports nothing, so that the launcher and the command line can use it without loading torch.
"""

from __future__ import annotations

_LABELS = ("where", "expected", "found", "fix")
_WIDTH = len("expected:") + 1


def explain(
    summary: str,
    *,
    where: str | None = None,
    expected: str | None = None,
    found: str | None = None,
    fix: str | None = None,
) -> str:
    """Return ``summary`` followed by one aligned line per given field.

    A field of several lines keeps its lines, each aligned under the first.

    Example:
        >>> print(explain("mesh of 8 ranks in a world of 4", fix="start 8 ranks"))
        mesh of 8 ranks in a world of 4
          fix:      start 8 ranks
    """
    lines = [summary]
    for label, value in zip(_LABELS, (where, expected, found, fix), strict=True):
        if value is None:
            continue
        first, *rest = str(value).splitlines() or [""]
        lines.append(f"  {label + ':':<{_WIDTH}}{first}")
        lines.extend(" " * (2 + _WIDTH) + line for line in rest)
    return "\n".join(lines)
