"""The kinds of values over a mesh axis, and which kind each functional verb makes of which.

Over each axis a value is of one kind:

    V  varying      each rank holds its own
    I  invariant    equal on every rank
    U  unreduced    each rank holds a summand; the value meant is their sum
    R  reduced      equal on every rank, with a gradient that is unreduced

The gradient of a value is of the value's kind, but for U and R, which are each other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["CASTS", "GATHERED", "GRADIENT_KINDS", "KINDS", "VERB_KINDS", "find_result_kind"]

KINDS: Mapping[str, str] = MappingProxyType(
    {"V": "varying", "I": "invariant", "U": "unreduced", "R": "reduced"}
)
"""The word for each kind."""

GRADIENT_KINDS: Mapping[str, str] = MappingProxyType({"V": "V", "I": "I", "U": "R", "R": "U"})
"""The kind of a value's gradient."""

CASTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "varying": MappingProxyType({"I": "V", "R": "V"}),
        "reduced": MappingProxyType({"I": "R"}),
        "unreduced": MappingProxyType({"V": "U"}),
    }
)
"""The kinds of ``pcast`` by its ``to``: from each that it takes to that which it gives."""

GATHERED: Mapping[str, str] = MappingProxyType({"varying": "V", "invarying": "I", "reduced": "R"})
"""The kind that ``all_gather`` gives for a varying value, by its ``to``."""

VERB_KINDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "psum": MappingProxyType({"V": "I", "U": "I"}),
        "pmean": MappingProxyType({"V": "I"}),
        "pmax": MappingProxyType({"V": "I"}),
        "pmin": MappingProxyType({"V": "I"}),
        "pvary": MappingProxyType({"I": "V"}),
        "psum_scatter": MappingProxyType({"V": "V", "U": "V"}),
        "all_to_all": MappingProxyType({"V": "V"}),
        "ragged_all_to_all": MappingProxyType({"V": "V"}),
        "ppermute": MappingProxyType({"V": "V"}),
        "pshuffle": MappingProxyType({"V": "V"}),
        "pswapaxes": MappingProxyType({"V": "V"}),
        "pbroadcast": MappingProxyType({"V": "I"}),
    }
)
"""The kinds of all other verbs: from each that a verb takes to that which it gives."""


def find_result_kind(verb: str, kind: str, to: str | None = None) -> str | None:
    """Return the kind of a verb's result over the verb's axis; None where it takes no such value.

    Args:
        verb: its public name.
        kind: the kind of what it is given, a key of ``KINDS``.
        to: the argument of that name of ``pcast`` and ``all_gather``.

    Example:
        >>> find_result_kind("psum", "V"), find_result_kind("pcast", "I", to="reduced")
        ('I', 'R')
        >>> find_result_kind("all_gather", "I", to="varying") is None
        True
    """
    if verb == "pcast":
        return CASTS.get(to or "", {}).get(kind)
    if verb == "all_gather":
        return GATHERED.get(to or "varying") if kind == "V" else None
    return VERB_KINDS[verb].get(kind)
