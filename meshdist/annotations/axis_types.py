"""Define the types of values over mesh axes, their joins and casts, and annotations of tensors.

Over each axis a value has one kind:

    V  varying      each rank holds its own value
    I  invariant    equal on every rank
    U  unreduced    each rank holds a partial sum of the value (torch: ``Partial("sum")``)
    R  reduced      equal on every rank, with an unreduced gradient

A gradient has the kind of its value, except that U and R are exchanged. A type's text is canonical,
so equal types are equal strings: ``"V:dp,tp U:ep"`` is varying over 'dp' and 'tp', unreduced over
'ep', and invariant over all other axes.

A tensor carries its type in its ``Annotation``. This module imports neither torch nor meshes.

Worked example: operands meet over axis 'tp' of 2 ranks. u is unreduced: 1 on rank 0, 2 on rank 1,
which means 3. i is invariant: 10. v varies. An operation supports u if the sum of its results on
all ranks equals its result on 3:

             rank 0    rank 1    sum    of 3    linearity     result over 'tp'
    u * i    10        20        30     30      "multiply"    U; i lacks R: its gradients 1 and 2
    u + i    11        12        23     13      "add"         rejected         are partial sums of 3
    u + u    2         4         6      6       "add"         U
    u * u    1         4         5      9       "multiply"    rejected
    v * i    each its own                       "multiply"    V; i lacks V: gradients get summed

    >>> join_types(["U:tp", ""], "multiply")
    JoinedType(text='U:tp', missing=('', 'R:tp'))
    >>> join_types(["U:tp", ""], "add"), join_types(["U:tp", "U:tp"], "multiply")
    (Refusal(axis='tp', operand=0), Refusal(axis='tp', operand=0))

Axes join independently. In ``x @ w + b`` on a mesh (dp, tp), an operand that is invariant over an
axis lacks the kind of a result that is not:

    over 'dp'    x: V   w: I   b: I    the result: V    w and b lack V
    over 'tp'    x: I   w: R   b: I    the result: R    x and b lack R

    >>> join_types(["V:dp", "R:tp", ""], "multiply add")
    JoinedType(text='V:dp R:tp', missing=('R:tp', 'V:dp', 'V:dp R:tp'))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

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
"""The kinds of ``pcast`` by its ``to``: result by operand."""

GATHERED: Mapping[str, str] = MappingProxyType({"varying": "V", "invarying": "I", "reduced": "R"})
"""The result kind of ``all_gather`` for a varying value, by its ``to``."""

OPERATION_KINDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
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
        "experts.dispatch": MappingProxyType({"V": "V"}),
        "experts.combine": MappingProxyType({"V": "V"}),
        "attention.context_parallel": MappingProxyType({"V": "V"}),
    }
)
"""The kinds of all other collectives: result by operand."""


def find_result_kind(operation: str, kind: str, to: str | None = None) -> str | None:
    """Return the kind of a collective's result over its axis; None for an unsupported operand.

    Args:
        operation: its public name.
        kind: the operand's kind, a key of ``KINDS``.
        to: the argument ``to`` of ``pcast`` and ``all_gather``.

    Example:
        >>> find_result_kind("psum", "V"), find_result_kind("pcast", "I", to="reduced")
        ('I', 'R')
        >>> find_result_kind("all_gather", "I", to="varying") is None
        True
    """
    if operation == "pcast":
        return CASTS.get(to or "", {}).get(kind)
    if operation == "all_gather":
        return GATHERED.get(to or "varying") if kind == "V" else None
    return OPERATION_KINDS[operation].get(kind)


INVARIANT = ""
"""The text of the type of a value that is invariant over every axis."""


GlobalSizes = tuple[int | tuple[int, ...], ...]
"""For each dim of a global array, its size, or the sizes of its parts if they are not balanced."""


class Annotation(NamedTuple):
    """The annotation of a tensor: axis type, spec, reducers of its gradient, and global sizes.

    Args:
        kinds: the text of its axis type, such as "V:dp"; None if it has none, which counts as
            invariant.
        dims: its sizes with the axes that shard them, such as "4@tp, 6"; None without a spec.
        owner_axes: the axes over which a wrapper reduces a leaf's ``.grad`` after the backward, so
            that the gradient is invariant although the leaf is reduced; or None.
        owner_ranks: the ranks over which a wrapper without mesh axes reduces ``.grad``.
        summed_axes: the axes over which each use of a leaf sums its gradient, unless a wrapper
            annotated it as reduced over them and sums all gradients together.
        global_sizes: of the array of which it is a shard; () as long as they are unknown.
    """

    kinds: str | None = None
    dims: str | None = None
    owner_axes: tuple[str, ...] | None = None
    owner_ranks: tuple[int, ...] = ()
    summed_axes: tuple[str, ...] = ()
    global_sizes: GlobalSizes = ()

    @property
    def has_owner(self) -> bool:
        """Return whether a wrapper reduces the gradient."""
        return self.owner_axes is not None or bool(self.owner_ranks)


# Tensors carry plain tuples of these fields, because annotations are pickled with tensors, also in
# states of optimizers, and ``torch.load`` must read them with ``weights_only`` without meshdist.
ANNOTATION = "_annotation"
"""The key of a tensor's annotation in its ``__dict__``: a plain tuple of its fields."""

EMPTY = tuple(Annotation())


@lru_cache(maxsize=4096)
def _read(fields: tuple[Any, ...]) -> Annotation:
    return Annotation(*fields)


@lru_cache(maxsize=4096)
def type_alone(kinds: str) -> tuple[Any, ...]:
    """Return an annotation that has only an axis type."""
    return tuple(Annotation(kinds))


def annotation_of(x: Any) -> Annotation:
    """Return a tensor's annotation, or an empty annotation."""
    return _read(x.__dict__.get(ANNOTATION, EMPTY))


def find_type(x: Any) -> str | None:
    """Return the text of a tensor's axis type, such as "V:dp"; None if it has no axis type."""
    found: str | None = x.__dict__.get(ANNOTATION, EMPTY)[0]
    return found


def type_of(x: Any) -> str:
    """Return the text of a tensor's axis type; "" (invariant) if it has none."""
    found: str | None = x.__dict__.get(ANNOTATION, EMPTY)[0]
    return found or INVARIANT


def find_owner_axes(x: Any) -> tuple[str, ...] | None:
    """Return the axes over which a wrapper reduces the gradient of ``x``, or None."""
    found: tuple[str, ...] | None = x.__dict__.get(ANNOTATION, EMPTY)[2]
    return found


def set_type(x: Any, kinds: str) -> None:
    """Set a tensor's axis type; keep the rest of its annotation."""
    attributes = x.__dict__
    before = attributes.get(ANNOTATION)
    if before is None:
        attributes[ANNOTATION] = type_alone(kinds)
    elif before[0] != kinds:
        attributes[ANNOTATION] = (kinds, *before[1:])


def set_spec(x: Any, kinds: str, dims: str | None, global_sizes: GlobalSizes = ()) -> None:
    """Set a tensor's axis type, dims and global sizes; keep the rest of its annotation."""
    attributes = x.__dict__
    kept = attributes.get(ANNOTATION, EMPTY)[2:5]
    attributes[ANNOTATION] = (kinds, dims, *kept, global_sizes)


def change_annotation(x: Any, **fields: Any) -> None:
    """Set some fields of a tensor's annotation."""
    x.__dict__[ANNOTATION] = tuple(annotation_of(x)._replace(**fields))


_ORDER = "VRU"  # The order of kinds in a text, which omits "I".


@lru_cache(maxsize=4096)
def kinds_in(text: str) -> Mapping[str, str]:
    """Parse the text of an axis type: return kinds V, R and U by axis; other axes are I.

    Example:
        >>> dict(kinds_in("V:dp,tp U:ep"))
        {'dp': 'V', 'tp': 'V', 'ep': 'U'}
    """
    kinds = {}
    for part in text.split():
        kind, _, axes = part.partition(":")
        kinds.update(dict.fromkeys(axes.split(","), kind))
    return MappingProxyType(kinds)


def type_text(kinds: Mapping[str, str]) -> str:
    """Return the text of an axis type from kinds by axis; the inverse of ``kinds_in``.

    Example:
        >>> type_text({"tp": "V", "ep": "U", "dp": "V", "pp": "I"})
        'V:dp,tp U:ep'
    """
    axes = {kind: sorted(axis for axis in kinds if kinds[axis] == kind) for kind in _ORDER}
    return " ".join(f"{kind}:{','.join(names)}" for kind, names in axes.items() if names)


@lru_cache(maxsize=4096)
def gradient_type(text: str) -> str:
    """Return the axis type of the gradient of a value of axis type ``text``.

    Example:
        >>> gradient_type("V:dp R:ep")
        'V:dp U:ep'
    """
    return type_text({axis: GRADIENT_KINDS[kind] for axis, kind in kinds_in(text).items()})


def with_kinds(text: str, kinds: Mapping[str, str]) -> str:
    """Return the axis type ``text`` with the kinds over some axes replaced.

    Example:
        >>> with_kinds("V:dp,tp", {"dp": "I"})
        'V:tp'
    """
    return _with_kinds(text, *kinds.items())


@lru_cache(maxsize=4096)
def _with_kinds(text: str, *kinds: tuple[str, str]) -> str:
    return type_text({**kinds_in(text), **dict(kinds)})


def axes_of_kind(text: str, kinds: str) -> tuple[str, ...]:
    """Return the axes over which the axis type ``text`` is of any of ``kinds``, sorted.

    Example:
        >>> axes_of_kind("V:tp R:ep U:dp", "RU")
        ('dp', 'ep')
    """
    return tuple(sorted(axis for axis, kind in kinds_in(text).items() if kind in kinds))


@dataclass(frozen=True)
class Refusal:
    """The axis over which operands have no common type, and the first unreduced operand's index."""

    axis: str
    operand: int


@dataclass(frozen=True)
class JoinedType:
    """The axis type of an operation's results, and the casts that its operands need.

    Args:
        missing: for each operand, the type that a cast must add: the axes over which the operand is
            invariant and the result is not; "" for none.
    """

    text: str
    missing: tuple[str, ...]

    @cached_property
    def annotation(self) -> tuple[Any, ...]:
        return type_alone(self.text)

    @cached_property
    def is_missing(self) -> bool:
        """Return whether any operand needs a cast."""
        return any(self.missing)


def join_types(types: Sequence[str], linearity: str = "") -> JoinedType | Refusal:
    """Return the axis type of an operation's results, and the operands' casts; or the rejection.

    Args:
        linearity: the operands in which it is linear, such as "add" or "first"; "" for none.

    Example:
        >>> join_types(["V:dp", "", "R:tp"])
        JoinedType(text='V:dp R:tp', missing=('R:tp', 'V:dp R:tp', 'V:dp'))
        >>> join_types(["U:tp", ""], "add")
        Refusal(axis='tp', operand=0)
    """
    kinds = [kinds_in(text) for text in types]
    result: dict[str, str] = {}
    missing: list[dict[str, str]] = [{} for _ in types]
    for axis in sorted({axis for each in kinds for axis in each}):
        here = [each.get(axis, "I") for each in kinds]
        if "U" in here:
            if not _is_linear(here, linearity):
                return Refusal(axis, here.index("U"))
            result[axis], added = "U", "R"
        else:
            result[axis] = added = "V" if "V" in here else "R"
        for operand, kind in enumerate(here):
            if kind == "I":
                missing[operand][axis] = added
    return JoinedType(type_text(result), tuple(map(type_text, missing)))


def _is_linear(kinds: Sequence[str], linearity: str) -> bool:
    """Return whether ``linearity`` admits operands of these kinds, some "U"."""
    # linearity       means                    operands that may be unreduced:
    # "add"           a + b, cat               all operands
    # "multiply"      a * b, a @ b             any single operand
    # "first"         a / b, a[b], a.sum()     the first operand
    # "multiply add"  a @ b + c                a or b, and c
    # "add multiply"  a + b @ c                a, and b or c
    # ""              all else                 no operand
    unreduced = [kind == "U" for kind in kinds]
    if "V" in kinds:
        return False
    if linearity == "add":
        return all(unreduced)
    if linearity == "multiply":
        return sum(unreduced) == 1
    if linearity == "first":
        return unreduced[0] and not any(unreduced[1:])
    if linearity == "multiply add":
        return sum(unreduced[:2]) == 1 and all(unreduced[2:])
    if linearity == "add multiply":
        return unreduced[0] and sum(unreduced[1:]) == 1
    return False


def shown(axes: Iterable[str]) -> str:
    """Return the names of axes as messages show them.

    Example:
        >>> shown(["dp", "tp"])
        "'dp', 'tp'"
    """
    return ", ".join(map(repr, axes))
