"""Verbs inside typed contexts: the functional ones, and torch's, which write in place.

Of functional verbs the kinds are checked by the verbs' table, and the results are marked. torch's
verbs run as if there were no context; what they write is marked. Such a verb overwrites a tensor as
a whole. Over the axes of its group the tensor is from then on what the verb makes it: invariant
where all members hold the same, else varying. Over all other axes it takes the join of what the
verb has read. Other views of its memory keep their types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import torch

from ..collectives.torch_private import HiddenFromModes
from ..functional.axis_types import (
    ATTRIBUTE,
    INVARIANT,
    KINDS,
    JoinedType,
    find_result_kind,
    join_types,
    kinds_in,
    with_kinds,
)
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..verb_table import VERBS, Form, Verb
from .context import ContextMode, collect, find_context, mark
from .refusals import foreign_mesh, refused_verb, type_of
from .torch_functions import TorchFunction

__all__ = ["TypedVerb", "find_typed_verb", "kinds_over", "made_equal", "watch"]


def watch(
    verb: Callable[..., Any],
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run ``call``, which runs ``verb``; where a context sees it, mark what was written."""
    mode = find_context()
    if mode is None:
        return call(*args, **kwargs)
    with HiddenFromModes():
        result = call(*args, **kwargs)
        row = VERBS[verb.__name__]
        if row.writes:
            given = _parameters(verb).bind(*args, **kwargs).arguments
            _mark(mode, row, given)
    return result


@cache
def _parameters(verb: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(verb)


def _mark(mode: ContextMode, row: Verb, given: Mapping[str, Any]) -> None:
    written: list[torch.Tensor] = []
    group = given.get("group")
    if row.writes == "p2p_op_list":
        operations = given["p2p_op_list"]
        written = [one.tensor for one in operations if VERBS[one.op.__name__].writes]
        group = operations[0].group if operations else None
    else:
        collect(given.get(row.writes), written)
    read: list[torch.Tensor] = []
    # Where the source alone has a list, the others' tensors must have the types of what comes.
    is_of_source = row.is_plain and row.carrier.takes is Form.AT_ROOT
    for name in (*row.reads, row.writes) if is_of_source else row.reads:
        collect(given.get(name), read)
    kinds = kinds_over(mode.mesh, resolve_group(group), row.kind)
    joined = _joined(read)
    for one in written:
        if isinstance(one, torch.Tensor):
            one.__dict__[ATTRIBUTE] = with_kinds(joined if row.reads else type_of(one), kinds)


def _joined(tensors: Sequence[torch.Tensor]) -> str:
    """The join of types; what is unreduced stays so, since verbs move or add summands."""
    found = join_types([type_of(one) for one in tensors])
    if isinstance(found, JoinedType):
        return found.text
    kinds: dict[str, str] = {}
    for one in tensors:
        kinds.update(kinds_in(type_of(one)))
    return with_kinds(INVARIANT, kinds)


def kinds_over(mesh: DeviceMesh, group: ProcessGroup, kind: str) -> dict[str, str]:
    """The kinds over the axes of ``mesh`` that a verb over ``group`` gives, by axis.

    Where the members are not just the ranks along some axes, what they hold varies over each axis
    along which they differ.
    """
    places = [mesh.layout.coordinate_of(rank) for rank in group.ranks]
    inside = [place for place in places if place is not None]
    axes = [
        name
        for axis, name in enumerate(mesh.axis_names)
        if len({place[axis] for place in inside}) > 1
    ]
    along = mesh.layout.ranks_of_axes(axes, mesh.world.rank) if axes else ()
    kinds = dict.fromkeys(axes, kind if set(group.ranks).issuperset(along) else "V")
    for name, size in mesh.axis_sizes.items():
        if size == 1 and mesh.get_group(name) is group:
            kinds[name] = kind
    return kinds


def made_equal(group: ProcessGroup, *tensors: torch.Tensor) -> None:
    """Say inside a context that a room of ours has made ``tensors`` equal on all of ``group``."""
    mode = find_context()
    if mode is not None:
        kinds = kinds_over(mode.mesh, group, "I")
        for one in tensors:
            one.__dict__[ATTRIBUTE] = with_kinds(type_of(one), kinds)


def find_typed_verb(verb: str, axes: DeviceMesh, to: str | None = None) -> TypedVerb | None:
    """The verb as the context has it that the call is in; None where there is no context."""
    mode = find_context()
    if mode is None:
        return None
    known = mode.own_axes.get(id(axes))
    if known is None:
        known = mode.own_axes[id(axes)] = axes, _context_axes(mode, axes, verb)
    return TypedVerb(mode, verb, known[1], to)


class TypedVerb:
    """One call of a functional verb inside a context, over ``axes`` in the order of the call."""

    def __init__(self, mode: ContextMode, verb: str, axes: tuple[str, ...], to: str | None) -> None:
        self._mode = mode
        self._verb = verb
        self._axes = axes
        self._to = to

    def result_type(self, x: torch.Tensor, argument: str = "x") -> str:
        """The type of what the verb makes of ``x``; raises for a kind that it does not take."""
        verb, to = self._verb, self._to
        text = self._mode.operand_type(x, verb)
        kinds, results = kinds_in(text), {}
        for axis in self._axes:
            kind = find_result_kind(verb, kinds.get(axis, "I"), to)
            if kind is None:
                taken = [one for one in KINDS if find_result_kind(verb, one, to) is not None]
                if not taken:  # there is no such ``to``, as the verb itself will say
                    return text
                raise refused_verb(verb, x, axis, self._mode.mesh, taken, argument)
            results[axis] = kind
        return with_kinds(text, results)

    def checked(
        self, on_tensor: Callable[..., torch.Tensor], x: torch.Tensor, argument: str = "x"
    ) -> Callable[..., torch.Tensor]:
        """``on_tensor`` for ``x``, which is fit for it or raises; the result has its type."""
        text = self.result_type(x, argument)

        def call(x: torch.Tensor, group: ProcessGroup, *, leaf: str) -> torch.Tensor:
            if self._verb == "pcast":
                result = self._cast(on_tensor, x, leaf)
            else:
                result = on_tensor(x, group, leaf=leaf)
            result.__dict__[ATTRIBUTE] = text
            self._mode.note(result, self._verb, [x])
            return result

        return call

    def joined(self, x: Any, *others: Any) -> tuple[list[Any], str]:
        """The operands of a verb that has several, cast to their join, and its text.

        ``x`` is the one whose kind the verb asks for. What is no tensor has no type.

        Raises:
            AxisTypeError: as ``result_type``; or the operands do not join.
        """
        given = [x, *others]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        if isinstance(x, torch.Tensor):
            self.result_type(x, "operand")
        found = self._mode.joined(TorchFunction(self._verb), tensors)
        missing = {id(one): kinds for one, kinds in zip(tensors, found.missing, strict=True)}
        return [
            self._mode.cast(one, kinds_in(missing[id(one)])) if id(one) in missing else one
            for one in given
        ], found.text

    @staticmethod
    def marked(result: Any, text: str) -> Any:
        """``result`` with its type; an array of another library has none."""
        mark(result, text)
        return result

    def _cast(self, on_tensor: Callable[..., Any], x: torch.Tensor, leaf: str) -> torch.Tensor:
        """A cast from each kind that ``x`` is of, over its axes: their transposes differ."""
        kinds = kinds_in(self._mode.operand_type(x, self._verb))
        result = x
        for kind, word in KINDS.items():
            axes = tuple(axis for axis in self._axes if kinds.get(axis, "I") == kind)
            if axes:
                group = resolve_group(self._mode.mesh[axes])
                result = on_tensor(result, group, source=word, leaf=leaf)
        return result


def _context_axes(mode: ContextMode, axes: DeviceMesh, verb: str) -> tuple[str, ...]:
    """The axes of the context's mesh along which the ranks of ``axes`` lie; raises for none."""
    own, names = mode.mesh, axes.axis_names
    if all(
        name in own.axis_names and axes.get_group(name).ranks == own.get_group(name).ranks
        for name in names
    ):
        return tuple(names)
    found = _axes_of_ranks(own, axes.layout.ranks().ravel().tolist())
    if found is None:
        raise foreign_mesh(verb, names, own, axes)
    return found


def _axes_of_ranks(mesh: DeviceMesh, ranks: Sequence[int]) -> tuple[str, ...] | None:
    """The axes of ``mesh`` along which exactly these ranks lie, through this one; None if none."""
    wanted = set(ranks)
    for count in range(mesh.ndim + 1):
        for names in combinations(mesh.axis_names, count):
            along = mesh[names].layout.ranks().ravel().tolist() if names else [mesh.world.rank]
            if set(along) == wanted:
                return names
    return None
