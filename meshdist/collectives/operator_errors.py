"""Errors that pass through torch's operators.

``x + y`` on tensors takes any TypeError for "these two cannot be added" and drops it: ``+`` then
raises one without a word of ours, and ``==`` quietly gives False. So an error of ours which is a
TypeError is raised there as one that is all else that it was.
"""

from __future__ import annotations

from typing import Any

from ..errors import MeshdistError

__all__ = ["OPERATORS", "passing"]

_NAMES = """
    add sub rsub mul div true_divide floor_divide remainder pow matmul eq ne lt le gt ge
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift and or xor lshift
    rshift mod truediv floordiv radd rmul rdiv rfloordiv rpow rmatmul rand ror rxor iadd isub
    imul idiv itruediv ifloordiv imod iand ior ixor ilshift irshift ipow
"""

OPERATORS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in _NAMES.split()
    for prefix, suffix in (("", ""), ("", "_"), ("__", "__"))
)
"""The names under which a mode sees what operators do."""


class _WithoutTypeError(type):
    """The class of classes that have all bases but TypeError."""

    def mro(cls) -> list[type]:
        return [one for one in super().mro() if one is not TypeError]


_variants: dict[type, type] = {}


def passing(error: MeshdistError) -> MeshdistError:
    """``error``, as one that is no TypeError any more; a copy by pickle is what it was before."""
    kind = type(error)
    if kind not in _variants:

        def reduce(self: MeshdistError) -> Any:
            made, args, state = kind.__reduce__(self)
            return _Remade(kind, made.keywords), args, state  # type: ignore[attr-defined]

        _variants[kind] = _WithoutTypeError(
            kind.__name__,
            (kind,),
            {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce__": reduce},
        )
    error.__class__ = _variants[kind]
    return error


class _Remade:
    """Makes an error of the class that it had before it passed through an operator."""

    def __init__(self, kind: type[MeshdistError], fields: dict[str, Any]) -> None:
        self._kind = kind
        self._fields = fields

    def __call__(self, summary: str) -> MeshdistError:
        return self._kind(summary, **self._fields)
