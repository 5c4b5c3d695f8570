"""Format error messages: a summary, then where, expected, found and fix.

Import only the standard library: the launcher and command line must not load torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

__all__ = [
    "ExplainedError",
]

E = TypeVar("E", bound=BaseException)

_LABELS = ("where", "expected", "found", "fix")
_WIDTH = len("expected:") + 1
_MOST_TEXTS = 50

UNUSABLE_GROUP = (
    "this group can no longer be used: create a new one with new_group(), or re-initialize"
)
"""The end of the ``fix`` of an error after which every later call on its group fails."""


def explain(
    summary: str,
    *,
    where: str | None = None,
    expected: str | None = None,
    found: str | None = None,
    fix: str | None = None,
) -> str:
    """Return ``summary`` followed by one aligned line per given field.

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


def fields_among(values: Mapping[str, object]) -> dict[str, str]:
    """Return the fields of ``explain`` that ``values`` contains, as texts.

    Example:
        >>> fields_among({"fix": "start 8 ranks", "found": None, "more": 1})
        {'fix': 'start 8 ranks'}
    """
    return {label: str(values[label]) for label in _LABELS if values.get(label) is not None}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class name if empty.

    Example:
        >>> first_line(RuntimeError("no store\\n  at store.cpp:7")), first_line(RuntimeError())
        ('no store', 'RuntimeError')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class ExplainedError(Exception):
    """An error formatted by ``explain``, with the fields as attributes.

    Args:
        summary: what happened, in one line.
    """

    def __init__(
        self,
        summary: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(explain(summary, where=where, expected=expected, found=found, fix=fix))
        self.summary = summary
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix

    def add_fix(self, fix: str) -> None:
        """Insert a more specific fix before ``self.fix``, unless it is included."""
        if fix not in (self.fix or ""):
            self.fix = "; else ".join(filter(None, (fix, self.fix)))
            fields = {name: getattr(self, name) for name in _LABELS}
            self.args = (explain(self.summary, **fields), *self.args[1:])

    def __str__(self) -> str:  # KeyError, a base of AxisError, would print a repr
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: getattr(self, name) for name in _LABELS}
        return partial(type(self), **fields), (self.summary,), self.__dict__


def without_frames(error: E) -> E:
    """Return a copy of ``error`` without its traceback."""
    try:
        bare = copy.copy(error)
    except Exception:  # it cannot be copied
        return error
    bare.__cause__, bare.__suppress_context__ = error.__cause__, error.__suppress_context__
    return bare


def first_texts(texts: Sequence[str], separator: str = "\n", most: int = 8) -> str:
    """Return the first texts, and the number of omitted texts.

    Example:
        >>> first_texts(["a", "b", "c"], ", ", most=2)
        'a, b and 1 more'
    """
    more = f"{separator.strip(',; ') or ' '}and {len(texts) - most} more"
    return separator.join(texts[:most]) + (more if len(texts) > most else "")


def with_article(name: str) -> str:
    """Return the ``name`` of a type after "a" or "an".

    Example:
        >>> with_article("int"), with_article("str")
        ('an int', 'a str')
    """
    return f"an {name}" if name[0] in "AEIOaeio" or name == "ndarray" else f"a {name}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return a short text for ranks in order, with ranges.

    Example:
        >>> ranks_text([0, 1, 2, 5]), ranks_text([3])
        ('ranks 0-2, 5', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    alone = len(runs) == 1 and len(runs[0]) == 1
    return ("rank " if alone else "ranks ") + ", ".join(shown)


def grouped_text(texts: Iterable[tuple[int, str]], separator: str = "\n") -> str:
    """Return each rank's text, grouped by equal texts, at most 50 of them.

    Example:
        >>> print(grouped_text([(0, "float32"), (1, "float32"), (2, "int64"), (3, "float32")]))
        ranks 0-1, 3: float32
        rank 2: int64
    """
    ranks_of = ranks_by_text(texts)
    return separator.join(f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items())


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks of each text; the 51st and further texts share an entry."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        is_shown = text in ranks_of or len(ranks_of) < _MOST_TEXTS
        ranks_of.setdefault(text if is_shown else "... (other texts)", []).append(rank)
    return ranks_of
