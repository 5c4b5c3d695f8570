"""Type functional and in-place collectives inside typed contexts.

Functional collectives follow the table in ``axis_types``. In-place collectives run without the
context, which then annotates the tensors that they write. Over the axes of the group, such a tensor
becomes invariant if all ranks hold the same value, else varying. Over other axes it gets the joined
type of the tensors that were read. Other views of its memory keep their types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import torch

from ..annotations.axis_types import (
    INVARIANT,
    KINDS,
    JoinedType,
    find_result_kind,
    join_types,
    kinds_in,
    set_type,
    type_of,
    with_kinds,
)
from ..collectives.torch_private import HiddenFromModes, are_transforms_active
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..operation_table import OPERATIONS, OperationSpec, TensorLayout
from .context import ContextMode, find_context
from .function_rules import TorchFunction, tensors_in
from .type_errors import foreign_mesh, rejected_operation


def watch(
    operation: Callable[..., Any],
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the result of ``call``, a torch collective; a context types the written tensors."""
    mode = find_context()
    if mode is None:
        return call(*args, **kwargs)
    with HiddenFromModes():
        result = call(*args, **kwargs)
        spec = OPERATIONS[operation.__name__]
        if spec.writes:
            given = _signature(operation).bind(*args, **kwargs).arguments
            _annotate_outputs(mode, spec, given)
    return result


_signature = cache(inspect.signature)


def _annotate_outputs(mode: ContextMode, spec: OperationSpec, given: Mapping[str, Any]) -> None:
    """Type the tensors that a torch collective with arguments ``given`` wrote."""
    group = given.get("group")
    if spec.writes == "p2p_op_list":
        operations = given["p2p_op_list"]
        written = [each.tensor for each in operations if OPERATIONS[each.op.__name__].writes]
        group = operations[0].group if operations else None
    else:
        written = tensors_in(given.get(spec.writes))
    # In a scatter, only the source has a list; other ranks use the types of their outputs.
    is_of_source = spec.is_plain and spec.executor.takes is TensorLayout.AT_ROOT
    names = (*spec.reads, spec.writes) if is_of_source else spec.reads
    read = tensors_in([given.get(name) for name in names])
    kinds = kinds_over(mode.mesh, resolve_group(group), spec.kind)
    joined = _joined(read)
    for tensor in written:
        if isinstance(tensor, torch.Tensor):
            before = joined if spec.reads else type_of(tensor)
            set_type(tensor, with_kinds(before, kinds))


def _joined(tensors: Sequence[torch.Tensor]) -> str:
    """Return the tensors' joined type; if they cannot join, a type with all kinds."""
    found = join_types([type_of(tensor) for tensor in tensors])
    if isinstance(found, JoinedType):
        return found.text
    kinds: dict[str, str] = {}
    for tensor in tensors:
        kinds.update(kinds_in(type_of(tensor)))
    return with_kinds(INVARIANT, kinds)


def kinds_over(mesh: DeviceMesh, group: ProcessGroup, kind: str) -> dict[str, str]:
    """Return a result's kinds by axis of ``group``: "V" if the group lacks ranks along the axes."""
    # If the members are not exactly all ranks along some axes, the tensor is not invariant: it
    # varies over each axis along which members differ.
    coordinates = [mesh.layout.coordinate_of(rank) for rank in group.ranks]
    inside = [coordinate for coordinate in coordinates if coordinate is not None]
    axes = [
        name
        for axis, name in enumerate(mesh.axis_names)
        if len({coordinate[axis] for coordinate in inside}) > 1
    ]
    along = mesh.layout.ranks_of_axes(axes, mesh.world.rank) if axes else ()
    kinds = dict.fromkeys(axes, kind if set(group.ranks).issuperset(along) else "V")
    for name, size in mesh.axis_sizes.items():
        if size == 1 and mesh.get_group(name) is group:
            kinds[name] = kind
    return kinds


def made_equal(group: ProcessGroup, *tensors: torch.Tensor) -> None:
    """Type tensors as invariant over ``group``, in a typed context."""
    mode = find_context(is_awake=False)
    if mode is not None and not mode.is_asleep:
        kinds = kinds_over(mode.mesh, group, "I")
        for tensor in tensors:
            set_type(tensor, with_kinds(type_of(tensor), kinds))


def find_typed_operation(
    operation: str, axes: DeviceMesh, to: str | None = None
) -> TypedOperation | None:
    """Return the TypedOperation of ``operation(to=to)``; None without a context."""
    mode = find_context()
    if mode is None:
        return None
    key = operation, to, id(axes)
    found: TypedOperation | None = mode.operations.get(key)
    if found is None:
        found = mode.operations[key] = TypedOperation(mode, operation, axes, to)
    return found


class TypedOperation:
    """A lax collective in a typed context."""

    def __init__(self, mode: ContextMode, operation: str, axes: DeviceMesh, to: str | None) -> None:
        self._mode = mode
        self._operation = operation
        self._to = to
        self._mesh = axes  # A freed mesh's id could be reused.
        self._axes = _context_axes(mode, axes, operation)
        self._results: dict[str, str] = {}  # Result types by operand types.

    def result_type(self, x: torch.Tensor, argument: str = "x") -> str:
        """Return the type of the result; raise if the collective does not support ``x``."""
        operation, to = self._operation, self._to
        text = self._mode.type_of(x, operation)
        if text in self._results and not are_transforms_active():
            return self._results[text]
        text = self._mode.operand_type(x, operation)
        kinds, results = kinds_in(text), {}
        for axis in self._axes:
            kind = find_result_kind(operation, kinds.get(axis, "I"), to)
            if kind is None:
                accepted = [
                    other for other in KINDS if find_result_kind(operation, other, to) is not None
                ]
                if not accepted:  # The ``to`` is invalid; the collective itself raises.
                    return text
                raise rejected_operation(operation, x, axis, self._mode.mesh, accepted, argument)
            results[axis] = kind
        self._results[text] = with_kinds(text, results)
        return self._results[text]

    def run(
        self,
        on_tensor: Callable[..., torch.Tensor],
        x: torch.Tensor,
        group: ProcessGroup,
        text: str,
        leaf_name: str = "x",
    ) -> Any:
        """Return ``on_tensor``'s result on ``x`` with type ``text``; errors show ``leaf_name``."""
        if self._operation == "pcast":
            result = self._cast(on_tensor, x, leaf_name)
        else:
            result = on_tensor(x, group, leaf_name=leaf_name)
        set_type(result, text)
        if result.grad_fn is not None:
            self._mode.note(result, self._operation, [x])
        return result

    def joined(self, x: Any, *others: Any) -> tuple[list[Any], str]:
        """Return the operands cast to their joined type, and the type."""
        given = [x, *others]
        tensors = [operand for operand in given if isinstance(operand, torch.Tensor)]
        if isinstance(x, torch.Tensor):
            self.result_type(x, "operand")
        found = self._mode.joined(TorchFunction(self._operation), tensors)
        missing = {id(x): kinds for x, kinds in zip(tensors, found.missing, strict=True)}
        return [
            self._mode.cast(x, kinds_in(missing[id(x)])) if id(x) in missing else x for x in given
        ], found.text

    def _cast(self, on_tensor: Callable[..., Any], x: torch.Tensor, leaf_name: str) -> torch.Tensor:
        """Return ``x`` cast by ``on_tensor``, for each of its types over the axes that have it."""
        kinds = kinds_in(self._mode.operand_type(x, self._operation))
        result = x
        for kind, word in KINDS.items():
            axes = tuple(axis for axis in self._axes if kinds.get(axis, "I") == kind)
            if axes:
                group = resolve_group(self._mode.mesh[axes])
                result = on_tensor(result, group, source=word, leaf_name=leaf_name)
        return result


def _context_axes(mode: ContextMode, axes: DeviceMesh, operation: str) -> tuple[str, ...]:
    """Return the context's axes that span the ranks of ``axes``; raise if none do."""
    own, names = mode.mesh, axes.axis_names
    if all(
        name in own.axis_names and axes.get_group(name).ranks == own.get_group(name).ranks
        for name in names
    ):
        return tuple(names)
    found = _axes_of_ranks(own, axes.layout.ranks().ravel().tolist())
    if found is None:
        raise foreign_mesh(operation, names, own, axes)
    return found


def _axes_of_ranks(mesh: DeviceMesh, ranks: Sequence[int]) -> tuple[str, ...] | None:
    """Return the axes along which this rank's group is ``ranks``, or None."""
    chosen = set(ranks)
    for count in range(mesh.ndim + 1):
        for names in combinations(mesh.axis_names, count):
            along = mesh[names].layout.ranks().ravel().tolist() if names else [mesh.world.rank]
            if set(along) == chosen:
                return names
    return None
