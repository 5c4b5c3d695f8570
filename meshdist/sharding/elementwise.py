"""Run elementwise operators, NumPy ufuncs and torch functions on sharded arrays.

Each rank applies the operation to its shards; nothing moves. torch tags elementwise operators with
``pointwise``; all NumPy ufuncs are elementwise. ``torch_functions.LINEARITY`` lists the operations
that are linear in unreduced operands.

Operands are cut equally, dim by dim, and over every axis their kinds join without a cast
(``axis_types.join_types``). An operand that lacks an axis over which another varies would need a
cast. It is rejected, because the caller should request the cast's sum in the backward explicitly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..annotations.axis_types import Refusal, axes_of_kind, join_types, kinds_in, shown, type_text
from ..arrays import Array, shape_text
from ..errors import ArgumentError, AxisTypeError, KindError, MeshError, ShapeError
from ..mesh.placement import DimSplit
from ..mesh.spec import NamedSharding, sharding_of
from ..typed_mode.function_rules import (
    LINEARITY,
    OPERATIONS,
    Kind,
    TorchFunction,
    shape_depends_on_values,
)
from .descriptions import array_type, mesh_text
from .resharding import kinds_of

Operand = tuple[object, tuple[int, ...], NamedSharding]
"""The dtype, the shape and the sharding of an operand."""

# Untagged torch functions that call only tagged functions.
_UNTAGGED = """
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip conj detach divide fix
    floor_divide greater greater_equal isclose isfinite isreal less less_equal logsigmoid multiply
    negative not_equal rsub softsign square subtract tanhshrink true_divide
"""
# The operator for each ufunc, which works on every library's arrays.
_OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
        "divide": operator.truediv, "true_divide": operator.truediv,
        "floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow,
        "negative": operator.neg, "positive": operator.pos, "absolute": operator.abs,
        "invert": operator.invert, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
        "bitwise_xor": operator.xor, "left_shift": operator.lshift,
        "right_shift": operator.rshift, "less": operator.lt, "less_equal": operator.le,
        "greater": operator.gt, "greater_equal": operator.ge, "equal": operator.eq,
        "not_equal": operator.ne,
    }
)  # fmt: skip


_Operator = Callable[[Any, Any], Any]


def join_operands(
    operands: Sequence[Operand], linearity: str, call: str
) -> tuple[tuple[int, ...], NamedSharding]:
    """Return the shape and sharding of an elementwise result; raise if operands do not fit.

    Args:
        linearity: of the operation in unreduced operands, as "add" or "multiply"; "" for none.
    """
    _, shape, sharding = operands[0]
    if not sharding.spec.unreduced and all(
        operand[1:] == (shape, sharding) for operand in operands
    ):
        return shape, sharding
    for _, _, other in operands[1:]:
        if other.mesh != sharding.mesh:
            raise MeshError(
                f"{call}: the operands are on different meshes",
                where=mesh_text(sharding.mesh),
                expected="one mesh",
                found=_listed(operands, with_meshes=True),
                fix="reshard one onto the other's mesh: y.reshard(NamedSharding(x.sharding.mesh, "
                "spec))",
            )
    try:
        shape = np.broadcast_shapes(*(own_shape for _, own_shape, _ in operands))
    except ValueError:
        raise ShapeError(
            f"{call}: the operands' shapes do not broadcast",
            where=mesh_text(sharding.mesh),
            found=_listed(operands),
        ) from None
    dims = _joined_dims(operands, shape, call)
    kinds = _joined_kinds(operands, linearity, call)
    return shape, sharding_of(
        sharding.mesh,
        dims,
        unreduced=axes_of_kind(kinds, "U"),
        reduced=axes_of_kind(kinds, "R"),
    )


def _joined_dims(
    operands: Sequence[Operand], shape: tuple[int, ...], call: str
) -> tuple[DimSplit, ...]:
    """Return the dims of the result, each cut as in every operand that has it in full."""
    found: list[DimSplit | None] = [None] * len(shape)
    for _, own_shape, sharding in operands:
        shift = len(shape) - len(own_shape)
        for dim, split in enumerate(sharding.placement(own_shape).dims, start=shift):
            is_stretched = split.size != shape[dim]
            if is_stretched and split.axes:
                raise _cut_otherwise(operands, dim - len(shape), call)
            if not is_stretched:
                if found[dim] not in (None, split):
                    raise _cut_otherwise(operands, dim - len(shape), call)
                found[dim] = split
    dims = tuple(split if split is not None else DimSplit(1) for split in found)
    axes = [axis for split in dims for axis in split.axes]
    if len(set(axes)) < len(axes):
        twice = next(axis for axis in axes if axes.count(axis) > 1)
        dim = max(dim for dim, split in enumerate(dims) if twice in split.axes)
        raise _cut_otherwise(operands, dim - len(shape), call)
    return dims


def _joined_kinds(operands: Sequence[Operand], linearity: str, call: str) -> str:
    types = [type_text(kinds_of(sharding)) for _, _, sharding in operands]
    joined = join_types(types, linearity)
    where = mesh_text(operands[0][2].mesh)
    if isinstance(joined, Refusal):
        _, _, partial_sum = operands[joined.operand]
        spec = partial_sum.spec.update(unreduced=set())
        raise AxisTypeError(
            f"{call} is not linear in the operand that is unreduced over {joined.axis!r}: each "
            "rank holds a partial sum",
            where=where,
            expected=_FITTING_OPERANDS.get(linearity, "no unreduced operand"),
            found=_listed(operands),
            fix=f"reduce the operand first: {_letter(joined.operand)}.reshard({spec!r})",
        )
    for index, lacking in enumerate(joined.missing):
        if lacking:
            raise _lacking(operands, index, lacking, joined.text, call)
    return joined.text


_FITTING_OPERANDS = {
    "add": "operands that are all unreduced over the same axes",
    "multiply": "one unreduced operand, the others reduced over its axes",
    "first": "an unreduced operand only as the first, the others reduced over its axes",
}


def _lacking(
    operands: Sequence[Operand], index: int, lacking: str, result: str, call: str
) -> AxisTypeError:
    axes = tuple(kinds_in(lacking))
    spec = operands[index][2].spec
    reduced = spec.update(reduced={*spec.reduced, *axes})
    letter = _letter(index)
    return AxisTypeError(
        f"{call}: operand {letter} is equal on all ranks along {shown(axes)}, and another is not: "
        f"the gradient of {letter} would need an all-reduce over {shown(axes)}",
        where=mesh_text(operands[0][2].mesh),
        expected=f"operands of equal shardings, or {letter} reduced over {shown(axes)}",
        found=_listed(operands),
        fix=f"call {letter}.reshard({reduced!r}), which sends nothing and sums the gradient",
    )


def _cut_otherwise(operands: Sequence[Operand], dim: int, call: str) -> AxisTypeError:
    _, shape, sharding = operands[0]
    fix = None
    if all(own_shape == shape for _, own_shape, _ in operands):
        fix = f"y.reshard(x.sharding), or x.reshard({operands[-1][2].spec!r})"
    return AxisTypeError(
        f"{call}: the operands are cut differently along dim {dim}",
        where=mesh_text(sharding.mesh),
        expected="equal shardings, since operators never communicate",
        found=_listed(operands),
        fix=fix or "reshard one of them, so that both cut this dim equally or neither cuts it",
    )


def _letter(index: int) -> str:
    """Return the name of operand ``index`` in messages: x, y, z, then "operand 3"."""
    return "xyz"[index] if index < 3 else f"operand {index}"


def _listed(operands: Sequence[Operand], *, with_meshes: bool = False) -> str:
    lines = []
    for index, (dtype, shape, sharding) in enumerate(operands):
        sizes = f", shard_sizes={sharding.shard_sizes}" if sharding.shard_sizes else ""
        mesh = f" on mesh ({sharding.layout.axis_text()})" if with_meshes else ""
        lines.append(f"{_letter(index)}: {array_type(dtype, shape, sharding)}{sizes}{mesh}")
    return "\n".join(lines)


def _operator_pair(function: _Operator, name: str) -> tuple[_Operator, _Operator]:
    """Return an operator's methods with the array on its left, and on its right."""
    return (
        lambda self, other: _operate(function, name, self, other),
        lambda self, other: _operate(function, name, other, self),
    )


class ElementwiseArray:
    """The base of sharded arrays that implements elementwise operations."""

    local: Array
    sharding: NamedSharding
    shape: tuple[int, ...]

    def __init__(self, local: Array, sharding: Any, shape: Sequence[int] | None = None) -> None:
        raise NotImplementedError

    # -- Python's operators ----------------------------------------------------------------------

    __add__, __radd__ = _operator_pair(operator.add, "add")
    __sub__, __rsub__ = _operator_pair(operator.sub, "sub")
    __mul__, __rmul__ = _operator_pair(operator.mul, "mul")
    __truediv__, __rtruediv__ = _operator_pair(operator.truediv, "true_divide")
    __floordiv__, __rfloordiv__ = _operator_pair(operator.floordiv, "floor_divide")
    __mod__, __rmod__ = _operator_pair(operator.mod, "remainder")
    __pow__, __rpow__ = _operator_pair(operator.pow, "pow")
    __and__, __rand__ = _operator_pair(operator.and_, "bitwise_and")
    __or__, __ror__ = _operator_pair(operator.or_, "bitwise_or")
    __xor__, __rxor__ = _operator_pair(operator.xor, "bitwise_xor")
    __lshift__ = _operator_pair(operator.lshift, "bitwise_left_shift")[0]
    __rshift__ = _operator_pair(operator.rshift, "bitwise_right_shift")[0]
    # No reflected comparisons: Python calls the mirrored operator (< for >).
    __lt__ = _operator_pair(operator.lt, "lt")[0]
    __le__ = _operator_pair(operator.le, "le")[0]
    __gt__ = _operator_pair(operator.gt, "gt")[0]
    __ge__ = _operator_pair(operator.ge, "ge")[0]
    __eq__ = _operator_pair(operator.eq, "eq")[0]
    __ne__ = _operator_pair(operator.ne, "ne")[0]
    __hash__ = object.__hash__  # by identity, as torch tensors

    def __neg__(self) -> Any:
        return apply(operator.neg, "neg", (self,))

    def __pos__(self) -> Any:
        return apply(operator.pos, "positive", (self,))

    def __abs__(self) -> Any:
        return apply(operator.abs, "abs", (self,))

    def __invert__(self) -> Any:
        return apply(operator.invert, "bitwise_not", (self,))

    def __matmul__(self, other: Any) -> Any:
        raise matmul_rejected("@", self, other)

    def __rmatmul__(self, other: Any) -> Any:
        raise matmul_rejected("@", other, self)

    # -- NumPy and torch protocols ---------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = str(ufunc.__name__)
        if name == "matmul":
            raise matmul_rejected("numpy.matmul", *inputs)
        is_call = method == "__call__"
        if not is_call or ufunc.signature is not None:
            raise _not_elementwise(f"numpy.{name}" if is_call else f"numpy.{name}.{method}")
        if kwargs.get("out") is not None or kwargs.get("where", True) is not True:
            raise _not_functional(f"numpy.{name}", "a call with out= or where=")
        function, linear_as = ufunc, "conj" if name == "conjugate" else name
        if _library(self.local) == "torch":
            inputs = tuple(x.item() if isinstance(x, np.generic) else x for x in inputs)
            function = _OPERATORS.get(name) or _find_torch_function(linear_as)
            if function is None or kwargs:
                raise KindError(
                    f"numpy.{name} of a sharded array whose shards are torch tensors",
                    expected="a function of torch",
                    fix="call torch's, or apply numpy's to this rank's shard: x.local.numpy()",
                )
        if "dtype" in kwargs or "casting" in kwargs:
            linear_as = ""  # The conversion may round.
        return apply(function, linear_as, inputs, kwargs, call=f"numpy.{name}")

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = OPERATIONS[function]
        name = operation.name.strip("_")
        call = f"torch.{operation.name}"
        first = args[0] if args else kwargs.get("input")
        if name in ("sum", "mean") and isinstance(first, cls):
            given = {key: value for key, value in kwargs.items() if key != "input"}
            return getattr(first, name)(*args[1:], **given)
        if name in ("matmul", "mm", "bmm", "mv", "dot", "rmatmul"):
            raise matmul_rejected(call, *args, *kwargs.values())
        if operation.writes or kwargs.get("out") is not None:
            raise _not_functional(call, "writing in place or with out=")
        is_search = operation.kind is Kind.ROWS and shape_depends_on_values(operation, args, kwargs)
        # torch.max(x, y) is elementwise; torch.max(x) and torch.max(x, dim) reduce.
        other = args[1] if len(args) > 1 else kwargs.get("other")
        is_reduction = name in ("max", "min") and not hasattr(other, "shape")
        if is_search or is_reduction or not _is_elementwise(operation):
            raise _not_elementwise(call)
        linear_as = "" if kwargs.get("rounding_mode") is not None else name
        return apply(function, linear_as, args, kwargs, call=call)


def apply(
    function: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    call: str | None = None,
) -> Any:
    """Return the sharded result, or results, of an elementwise function on the operands' shards.

    Args:
        name: the function's key in ``LINEARITY``; "" if it is not linear.
        call: the function's name in messages; None takes ``name``.
    """
    call = name if call is None else call
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, ElementwiseArray)]
    first = operands[0]
    for operand in operands[1:]:
        if _library(operand.local) != _library(first.local):
            raise KindError(
                f"{call}: the shards are arrays of different libraries",
                expected="shards of one library",
                found=", ".join(sorted({_library(each.local) for each in operands})),
                fix="convert one, for example ShardedArray(torch.from_numpy(x.local), x.sharding, "
                "x.shape)",
            )
    linearity = LINEARITY.get(name, "")
    if linearity == "first" and not isinstance(args[0], ElementwiseArray):
        linearity = ""  # Division by an unreduced value is not linear.
    is_summed = any(operand.sharding.spec.unreduced for operand in operands)
    for key, x in (*enumerate(args), *kwargs.items()):
        if not isinstance(x, ElementwiseArray) and key not in ("alpha", "beta"):
            _check_number(x, call, first, is_added=is_summed and linearity == "add")
    described = [(operand.local.dtype, operand.shape, operand.sharding) for operand in operands]
    shape, sharding = join_operands(described, linearity, call)
    result = function(*map(_local, args), **{key: _local(x) for key, x in kwargs.items()})
    if isinstance(result, tuple):
        return tuple(type(first)(local, sharding, shape) for local in result)
    return type(first)(result, sharding, shape)


def _operate(function: Callable[..., Any], name: str, left: Any, right: Any) -> Any:
    """Return a Python operator's result; NotImplemented unless given arrays and numbers."""
    for x in (left, right):
        if not isinstance(x, (ElementwiseArray, int, float, complex)) and not hasattr(x, "shape"):
            return NotImplemented
    return apply(function, name, (left, right))


def _local(x: Any) -> Any:
    return x.local if isinstance(x, ElementwiseArray) else x


def _check_number(x: Any, call: str, array: ElementwiseArray, *, is_added: bool) -> None:
    """Raise if ``x`` is an array, needs a gradient, or is a number added to partial sums."""
    shape = getattr(x, "shape", None)
    shape = shape if isinstance(shape, tuple) else None
    where = f"{mesh_text(array.sharding.mesh)}; the other operand is " + array_type(
        array.local.dtype, array.shape, array.sharding
    )
    if isinstance(x, (list, tuple)) or shape:
        what = "list" if shape is None else f"plain array of shape {shape_text(shape)}"
        raise ArgumentError(
            f"{call}: a {what} has no sharding",
            where=where,
            expected="sharded arrays and numbers",
            fix="call md.device_put(y, sharding) if every rank has the global array, or "
            "md.ShardedArray(y, sharding) if y is this rank's shard",
        )
    if getattr(x, "requires_grad", False):
        raise AxisTypeError(
            f"{call}: cannot differentiate with respect to a number: its gradient would need an "
            "all-reduce over the mesh",
            where=where,
            expected="a number without a gradient, or a sharded array without dims",
            fix="pass md.ShardedArray(y, NamedSharding(mesh, P(reduced={...}))), with the axes "
            "over which its gradients are summed later",
        )
    is_number = shape is not None or isinstance(x, (int, float, complex))
    if is_added and is_number:
        raise AxisTypeError(
            f"{call}: a number would be added to the partial sum of every rank",
            where=where,
            expected="operands that are all unreduced over the same axes",
            fix="reduce x first, x.reshard(...), or add the number on one rank only: "
            "x + md.full(x.shape, number, sharding=x.sharding)",
        )


@lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _is_elementwise(operation: TorchFunction) -> bool:
    name = operation.name.strip("_")
    return operation.kind in (Kind.ORDINARY, Kind.ROWS) and (
        name in _UNTAGGED.split() or _is_pointwise(name)
    )


def _find_torch_function(name: str) -> Any:
    function = getattr(torch, name, None)
    return function if function is not None and _is_elementwise(OPERATIONS[function]) else None


def _library(local: Array) -> str:
    return "torch" if isinstance(local, torch.Tensor) else type(local).__module__.split(".")[0]


def _not_elementwise(call: str) -> KindError:
    return KindError(
        f"{call} of a sharded array is not supported: it would communicate or is not elementwise",
        expected="operators, ufuncs and elementwise functions of torch; sum and mean",
        fix="call it on this rank's shard, x.local, or on the global array, x.full()",
    )


def _not_functional(call: str, what: str) -> KindError:
    return KindError(
        f"{call} of a sharded array: {what} is not supported",
        expected="a call that returns a new sharded array",
        fix="assign the result: x = x + y; to change the shard itself, write to x.local",
    )


def matmul_rejected(call: str, *operands: Any) -> KindError:
    shown = [
        array_type(x.local.dtype, x.shape, x.sharding)
        for x in operands
        if isinstance(x, ElementwiseArray)
    ]
    return KindError(
        f"{call} of sharded arrays is not supported: its communication depends on the shardings",
        expected="md.einsum with the sharding of each operand and of the result",
        found="\n".join(shown),
        fix="multiply the shards: "
        "md.einsum('b d@tp, d@tp f -> b f', x.local, y.local, mesh=x.mesh);\n"
        "or call x.full() @ y.full()",
    )
