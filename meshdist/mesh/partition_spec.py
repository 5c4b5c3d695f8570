"""Provide ``PartitionSpec`` (``P``): the mesh axes that shard each dim, as in JAX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, overload

from ..error_text import explain, with_article
from ..errors import AxisError, KindError

__all__ = ["P", "PartitionSpec"]

Entry = str | tuple[str, ...] | None
"""A dim's axes, major to minor: None, a name, or several names."""


class PartitionSpec:
    """The mesh axes that cut each dim of an array; immutable and hashable, without a mesh.

    Args:
        *partitions: one entry per dim: None for an uncut dim, an axis name, or a tuple of names,
            major to minor. ``("a",)`` is ``"a"``, and ``()`` is None. Dims beyond the last entry
            are not cut.
        unreduced: the axes along which each rank holds a partial sum of the value.
        reduced: the axes along which ranks hold equal values, and the gradient is unreduced.

    Raises:
        KindError: another type of entry or set.
        AxisError: an axis named twice, by dims, ``unreduced`` or ``reduced``.

    Example:
        >>> P("dp", None, ("ep", "tp"))
        P('dp', None, ('ep', 'tp'))
        >>> P(("dp",), unreduced={"tp"})
        P('dp', unreduced={'tp'})
    """

    __slots__ = ("_hash", "partitions", "reduced", "unreduced")

    partitions: tuple[Entry, ...]
    unreduced: frozenset[str]
    reduced: frozenset[str]
    _hash: int

    def __init__(
        self,
        *partitions: Any,
        unreduced: frozenset[str] | set[str] = frozenset(),
        reduced: frozenset[str] | set[str] = frozenset(),
    ) -> None:
        entries = tuple(map(_entry, partitions))
        kinds = {
            "unreduced": _names(unreduced, "unreduced"),
            "reduced": _names(reduced, "reduced"),
        }
        cut = {axis for entry in entries for axis in axes_of(entry)}
        for first, second, both in (
            ("unreduced", "reduced", kinds["unreduced"] & kinds["reduced"]),
            ("partitions", "unreduced", cut & kinds["unreduced"]),
            ("partitions", "reduced", cut & kinds["reduced"]),
        ):
            if both:
                raise AxisError(
                    f"PartitionSpec: {first} and {second} cannot share an axis",
                    expected="each axis at most once",
                    found=f"partitions {entries}, "
                    + ", ".join(f"{kind}={_set_text(axes)}" for kind, axes in kinds.items()),
                    fix=f"leave {min(both)!r} in only one of them",
                )
        fields = (entries, kinds["unreduced"], kinds["reduced"])
        for name, value in zip(
            ("partitions", *kinds, "_hash"), (*fields, hash(fields)), strict=True
        ):
            object.__setattr__(self, name, value)

    def __init_subclass__(cls) -> NoReturn:
        raise KindError("PartitionSpec cannot be subclassed")

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(
            explain(
                f"a PartitionSpec is immutable: its attribute {name!r} cannot be set or deleted",
                fix="call spec.update(...), which returns a new spec",
            )
        )

    __delattr__ = __setattr__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, PartitionSpec):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.partitions == other.partitions
            and self.unreduced == other.unreduced
            and self.reduced == other.reduced
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self.partitions, self.unreduced, self.reduced)

    def __repr__(self) -> str:
        entries = repr(self.partitions)[1:-1]
        sets = [
            f"{kind}={_set_text(axes)}"
            for kind, axes in (("unreduced", self.unreduced), ("reduced", self.reduced))
            if axes
        ]
        if sets and entries:
            entries = entries.removesuffix(",") + ", "
        return f"P({entries}{', '.join(sets)})"

    # ---------------------------------------------------------------- as a sequence of entries

    def __len__(self) -> int:
        return len(self.partitions)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Entry, ...]: ...
    def __getitem__(self, index: int | slice) -> Entry | tuple[Entry, ...]:
        self._check_plain("spec[...]", "spec.partitions[...]")
        return self.partitions[index]

    def __iter__(self) -> Iterator[Entry]:
        self._check_plain("*spec", "*spec.partitions")
        return iter(self.partitions)

    def __add__(self, other: object) -> PartitionSpec:
        if isinstance(other, PartitionSpec):
            return PartitionSpec(
                *self.partitions,
                *other.partitions,
                unreduced=self.unreduced | other.unreduced,
                reduced=self.reduced | other.reduced,
            )
        if not isinstance(other, tuple):
            return NotImplemented
        self._check_takes_a_tuple(other)
        return PartitionSpec(*self.partitions, *other)

    def __radd__(self, other: object) -> PartitionSpec:
        if not isinstance(other, tuple):
            return NotImplemented
        self._check_takes_a_tuple(other)
        return PartitionSpec(*other, *self.partitions)

    def index(self, value: Any) -> int:
        """Return the first dim with this entry.

        Raises:
            ValueError: there is none.
        """
        return self.partitions.index(_entry(value))

    def count(self, value: Any) -> int:
        """Return the number of dims with this entry."""
        return self.partitions.count(_entry(value))

    def update(
        self,
        partitions: Iterable[Any] | None = None,
        unreduced: frozenset[str] | set[str] | None = None,
        reduced: frozenset[str] | set[str] | None = None,
    ) -> PartitionSpec:
        """Return a spec with some of the three replaced; None keeps a value.

        Example:
            >>> P("dp", unreduced={"tp"}).update(unreduced=set())
            P('dp',)
        """
        return PartitionSpec(
            *(self.partitions if partitions is None else partitions),
            unreduced=self.unreduced if unreduced is None else unreduced,
            reduced=self.reduced if reduced is None else reduced,
        )

    def _check_plain(self, use: str, instead: str) -> None:
        if self.unreduced or self.reduced:
            raise KindError(
                f"{use} would lose the spec's unreduced or reduced axes",
                found=repr(self),
                fix=f"write {instead}",
            )

    def _check_takes_a_tuple(self, other: tuple[Any, ...]) -> None:
        if self.unreduced or self.reduced:
            raise KindError(
                "a spec with unreduced or reduced axes and a tuple cannot be added",
                found=f"{self!r} and {other!r}",
                fix=f"write {PartitionSpec(*other)!r} for the tuple",
            )


P = PartitionSpec


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Return the axes of one dim's entry, major to minor.

    Example:
        >>> axes_of(None), axes_of("dp"), axes_of(("dp", "tp"))
        ((), ('dp',), ('dp', 'tp'))
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def sharding_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Return the axes that shard the dims of ``spec``, in the order of the dims.

    Example:
        >>> sharding_axes(PartitionSpec(None, ("dp", "tp"), "ep", unreduced={"cp"}))
        ('dp', 'tp', 'ep')
    """
    return tuple(axis for entry in spec.partitions for axis in axes_of(entry))


def fix_of_entries(ndim: int) -> str:
    """Return the fix for a spec with too many entries."""
    if not ndim:
        return "write P() for a scalar"
    return f"write at most {ndim} entr{'y' if ndim == 1 else 'ies'}; or add a dimension: x[None]"


def _entry(value: Any) -> Entry:
    """Return a dim's entry as None, a name, or a tuple of names; else raise."""
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value):
        return value[0] if len(value) == 1 else tuple(value) or None
    raise KindError(
        f"PartitionSpec cannot take {value!r} as a dim's entry",
        expected="None, the name of a mesh axis, or a tuple of names, major to minor",
        found=_what_it_is(value),
        fix="write one flat tuple of names per dim" if isinstance(value, (tuple, list)) else None,
    )


def _what_it_is(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        wrong = next(part for part in value if not isinstance(part, str))
        return f"{wrong!r} inside it, {with_article(type(wrong).__name__)}"
    return with_article(type(value).__name__)


def _names(value: Any, what: str) -> frozenset[str]:
    if not isinstance(value, (set, frozenset)) or not all(isinstance(name, str) for name in value):
        fix = None
        if isinstance(value, str):
            fix = f"write {what}={{{value!r}}}"
        elif isinstance(value, Sequence) and value and all(isinstance(name, str) for name in value):
            fix = f"write {what}={{{', '.join(map(repr, value))}}}"
        raise KindError(
            f"PartitionSpec takes a set of axis names as {what}",
            found=f"{value!r}, {with_article(type(value).__name__)}",
            fix=fix,
        )
    return frozenset(value)


def _set_text(axes: Iterable[str]) -> str:
    return "{" + ", ".join(map(repr, sorted(axes))) + "}"


def _made_again(
    partitions: tuple[Entry, ...], unreduced: frozenset[str], reduced: frozenset[str]
) -> PartitionSpec:
    return PartitionSpec(*partitions, unreduced=unreduced, reduced=reduced)
