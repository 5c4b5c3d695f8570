"""Build the errors of ``md.typed``, and format types in them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..annotations.axis_types import KINDS, axes_of_kind, kinds_in, shown, type_of
from ..checking.call_sites import call_site, program_frame, show_site
from ..dtypes import dtype_name
from ..errors import AxisTypeError, KindError, MeshdistError
from ..functional.equality_checks import names_of
from ..mesh.device_mesh import DeviceMesh


def tensor_text(tensor: torch.Tensor, text: str | None = None) -> str:
    """Return a tensor as messages show it: ``float32[8, 4]{V:dp}``.

    Args:
        text: the type; "" omits the braces, and None uses the tensor's type.
    """
    text = type_of(tensor) if text is None else text
    return type_as_text(tensor.dtype, ", ".join(map(str, tensor.shape)), text)


def type_as_text(dtype: object, dims: str, kinds: str) -> str:
    """Return a dtype, dims and kinds as ``float32[8@dp, 4]{U:tp}``."""
    return f"{dtype_name(dtype)}[{dims}]" + (f"{{{kinds}}}" if kinds else "")


def mesh_text(mesh: DeviceMesh) -> str:
    """Return a mesh as ``DeviceMesh(dp=2, tp=2)``."""
    return f"DeviceMesh({mesh.layout.axis_text()})"


def where(mesh: DeviceMesh, axes: Sequence[str] = ()) -> str:
    """Return a text of this rank, of ``axes`` with sizes, and of the program's line."""
    rank, sizes = mesh.world.rank, mesh.axis_sizes
    rank_text = f"rank {rank} ({mesh.layout.coordinate_text(rank)}) of {mesh_text(mesh)}"
    each = ", ".join(f"{axis!r} (size {sizes.get(axis, '?')})" for axis in axes)
    about = f"; {'axis' if len(axes) == 1 else 'axes'} {each}" if axes else ""
    return f"{rank_text}{about}; {show_site(call_site())}"


def operands_text(operands: Sequence[torch.Tensor]) -> str:
    """Return the operands with their types, a line each."""
    return "\n".join(f"operand {index}: {tensor_text(x)}" for index, x in enumerate(operands))


def rejected_operation(
    operation: str,
    x: torch.Tensor,
    axis: str,
    mesh: DeviceMesh,
    accepted: Sequence[str],
    argument: str,
) -> AxisTypeError:
    """Return the error of an operand whose type over ``axis`` is not in ``accepted``."""
    kind = kinds_in(type_of(x)).get(axis, "I")
    words = " or ".join(map(KINDS.__getitem__, accepted)) or "no value at all"
    fixes = {
        "I": "if it is computed from weights that are sharded over the axis, annotate them as they "
        f"are sharded: md.annotate(weight, 'f@{axis} d'); if ranks hold different data, annotate "
        f"them after the last copy or slice outside the context: md.annotate(batch, "
        f"varying={axis!r}); if the value is equal on all ranks, "
        f"{_fix_of_equal_values(operation, axis, argument)}",
        "V": f"reduce it first: lax.psum({argument}, {axis!r}) or lax.pmean({argument}, {axis!r})",
        "U": f"reduce it first: lax.psum({argument}, {axis!r}), or lax.psum_scatter",
        "R": f"cast it first: lax.pcast({argument}, {axis!r}, to='varying')",
    }
    return AxisTypeError(
        f"{operation} over axis {axis!r} cannot take a value that is {KINDS[kind]} over it",
        where=where(mesh, [axis]),
        expected=f"a value that is {words} over {axis!r}",
        found=f"{argument}: {tensor_text(x)}",
        fix=fixes[kind],
    )


def rejected_sharding(
    operation: str,
    x: torch.Tensor,
    axis: str,
    expected_kind: str,
    mesh: DeviceMesh,
    spec: str,
    name: str = "x",
) -> AxisTypeError:
    """Return the error of a type over ``axis`` that is not ``expected_kind``, as in ``spec``."""
    kind = kinds_in(type_of(x)).get(axis, "I")
    fixes = {
        "V": f"write the axis at the dimension that it shards, as in 'n@{axis}'; or make the value "
        f"equal along it first: lax.psum(x, {axis!r}) or lax.pmean(x, {axis!r})",
        "U": f"write {{U:{axis}}} on the left, so that the partial sums are added as the right "
        "side requires; if they were already added in place, annotate the result: md.annotate(x)",
        "R": f"write {{R:{axis}}} on the left",
        "I": f"if each rank holds a partial sum, annotate it: md.annotate(x, unreduced={axis!r})",
    }
    return AxisTypeError(
        f"{operation} cannot take a value that is {KINDS[kind]} over {axis!r}: its pattern or spec "
        f"requires {KINDS[expected_kind]}",
        where=where(mesh, [axis]),
        expected=f"a value sharded as {spec}",
        found=f"{name}: {tensor_text(x)}",
        fix=fixes[kind]
        if (kind, expected_kind) != ("V", "U")
        else "write the axes of the spec that x carries on the left; if its parts are partial "
        f"sums, cast it first: lax.pcast(x, {axis!r}, to='unreduced')",
    )


def unmarked_shard(
    operation: str, x: torch.Tensor, axis: str, mesh: DeviceMesh, spec: str
) -> AxisTypeError:
    """Return the error of an invariant value that its spec shards over ``axis``."""
    if x.is_leaf:
        name = name_of(x, "w")
        found = f"{name}: {tensor_text(x)}, a leaf without an annotation"
        fix = (
            f"annotate how it is sharded: md.annotate({name}, md.{spec}); nn.Parameter(x) and "
            "model.to keep the annotation, copies do not; if it is equal on all ranks, call "
            f"md.annotate({name})"
        )
    else:
        found = f"x: {tensor_text(x)}, computed from values that are invariant over {axis!r}"
        fix = (
            f"annotate the tensor that it is computed from: md.annotate(w, varying={axis!r}); if x "
            f"is equal on all ranks, cast it: lax.pvary(x, {axis!r})"
        )
    return AxisTypeError(
        f"{operation} cannot take a value that is invariant over {axis!r}: its pattern or spec "
        "shards it over this axis",
        where=where(mesh, [axis]),
        expected=f"a value annotated as varying over {axis!r} (the gradient of an invariant value "
        f"is summed over {axis!r})",
        found=found,
        fix=fix,
    )


def name_of(tensor: torch.Tensor, default: str) -> str:
    """Return the program's variable name for ``tensor``, or ``default``."""
    return names_of([tensor], program_frame(sys._getframe())).get(id(tensor), default)


def foreign_mesh(
    operation: str, axes: Sequence[str], mesh: DeviceMesh, given: DeviceMesh
) -> AxisTypeError:
    """Return the error of ``operation`` over axes that the context's mesh lacks."""
    return AxisTypeError(
        f"{operation} cannot use {shown(axes)} of a mesh that is not part of the md.typed mesh",
        where=where(mesh),
        expected=f"axes of {mesh_text(mesh)}, of a slice of it, or flattened axes",
        found=mesh_text(given),
        fix="open md.typed with the mesh that has these axes",
    )


def _fix_of_equal_values(operation: str, axis: str, argument: str) -> str:
    """Return the fix for ``operation`` on a value equal on all ranks."""
    if operation == "psum":
        return (
            f"multiply it by lax.axis_size({axis!r}), or cast it first: "
            f"lax.pvary({argument}, {axis!r})"
        )
    if operation in ("pmean", "pmax", "pmin"):
        return f"remove the {operation}, because the value equals its {operation[1:]}"
    return f"cast it before each rank takes its own part: lax.pvary(x, {axis!r})"


def rejected_join(
    name: str, operands: Sequence[torch.Tensor], axis: str, operand: int, mesh: DeviceMesh
) -> AxisTypeError:
    """Return the error of ``name``, not linear in an operand unreduced over ``axis``."""
    target = operands[0]
    if operand and name.endswith("_") and target.is_leaf and "U" not in type_of(target):
        return AxisTypeError(
            f"{name} cannot apply an unreduced gradient to a parameter",
            where=where(mesh, [axis]),
            expected=f"a gradient that is complete over {axis!r}, not a partial sum on each rank",
            found=operands_text(operands),
            fix=f"sum it first: lax.psum(p.grad, {axis!r}); or call optimizer.step() after the "
            "md.accumulate_gradients block, which sums the gradients when it ends",
        )
    return AxisTypeError(
        f"{name} cannot take a value that is unreduced over {axis!r}",
        where=where(mesh, [axis]),
        expected="a linear operation: a sum of unreduced values, their product with or division by "
        "an invariant or reduced value, a change of shape or floating dtype",
        found=operands_text(operands),
        fix=f"reduce the operand first: lax.psum(x, {axis!r}) or lax.psum_scatter(x, {axis!r})",
    )


def rejected_loss(
    loss: torch.Tensor, axes: Sequence[str], mesh: DeviceMesh, operation: str
) -> AxisTypeError:
    """Return the error of a loss that is reduced over ``axes``."""
    return AxisTypeError(
        f"{operation} cannot start from a loss that is reduced over {shown(axes)}",
        where=where(mesh, axes),
        expected=f"a loss that is invariant over {shown(axes)} (each rank would count a reduced "
        "loss once)",
        found=f"loss: {tensor_text(loss)}",
        fix="if you add a term of parameters alone, such as a weight penalty, to a mean, move it "
        f"inside: loss = lax.pmean(loss + term, {axes_argument(axes)})",
    )


def owned_loss(
    loss: torch.Tensor, axis: str, owner: str, mesh: DeviceMesh, operation: str
) -> AxisTypeError:
    """Return the error of a loss that is equal over an axis that ``owner`` averages."""
    kind = kinds_in(type_of(loss)).get(axis, "I")
    return AxisTypeError(
        f"{operation} cannot start from a loss that is {KINDS[kind]} over {axis!r}: {owner} "
        "already averages gradients over this axis",
        where=where(mesh, [axis]),
        expected=f"each rank's own loss, which varies over {axis!r}",
        found=f"loss: {tensor_text(loss)}",
        fix=f"remove the {'lax.pmean' if kind == 'I' else 'cast'} over {axis!r}",
    )


def foreign_leaf(
    leaf: torch.Tensor, owners: Mapping[str, str], mesh: DeviceMesh, operation: str
) -> AxisTypeError:
    """Return the error of a leaf outside the wrapper of each axis."""
    axes, owner = list(owners), next(iter(owners.values()))
    return AxisTypeError(
        f"{operation} cannot reach a leaf outside {owner}, which averages gradients over "
        f"{shown(axes)}",
        where=where(mesh, axes),
        expected=f"trained tensors inside {owner} only: {owner} averages their gradients, while "
        "the gradient of another leaf is summed",
        found=f"leaf: {tensor_text(leaf)}, cast to varying",
        fix=f"wrap everything you train in one module; or train without {owner} and reduce the "
        f"loss: lax.pmean(loss, {axes_argument(axes)}); or detach the leaf",
    )


def axes_argument(axes: Sequence[str]) -> str:
    """Return axes as a code argument: ``'dp'``, or ``('dp', 'tp')``."""
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def rejected_write(
    name: str,
    target: torch.Tensor,
    text: str,
    operands: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    why: str,
) -> AxisTypeError:
    """Return the error of an in-place write that would change a type.

    Args:
        text: the type of the written value.
        why: why the target must keep its type.
    """
    before, after = kinds_in(type_of(target)), kinds_in(text)
    changes = {
        axis: (before.get(axis, "I"), kind)
        for axis, kind in after.items()
        if before.get(axis, "I") != kind
    }
    was, becomes = next(iter(changes.values()))
    axes = [axis for axis, change in changes.items() if change == (was, becomes)]
    cast = (
        f"buf = lax.pvary(buf, {axes_argument(axes)})"
        if becomes == "V"
        else f"buf = lax.pcast(buf, {axes_argument(axes)}, to={KINDS[becomes]!r})"
    )
    fix = f"cast it first: {cast}"
    if becomes == "V" and target.is_leaf and target.requires_grad:
        cure = "if the values are random, call md.seed(..., differ_over=) after you build the model"
        if name != "copy_" and any(axes[0] in kinds_in(type_of(x)) for x in operands):
            cure = (
                f"write values that are equal over {shown(axes)}, for example gradients clipped by "
                "md.clip_grad_norm_"
            )
        fix = (
            f"{cure}; or, if each rank has its own part of the target, annotate it: "
            f"md.annotate(target, varying={axes_argument(axes)})"
        )
    return AxisTypeError(
        f"{name} cannot change its target from {KINDS[was]} to {KINDS[becomes]} over {shown(axes)}",
        where=where(mesh, axes),
        expected=f"a target of type {{{text}}}" if text else "an invariant target",
        found=f"a target of {tensor_text(target)}, {why}\n{operands_text(operands)}",
        fix=fix,
    )


def own_norm(operands: Sequence[torch.Tensor], mesh: DeviceMesh) -> AxisTypeError:
    """Return the error of torch's ``clip_grad_norm_`` on varying gradients."""
    axes = sorted({axis for x in operands for axis in axes_of_kind(type_of(x), "V")})
    return AxisTypeError(
        f"clip_grad_norm_ cannot clip gradients that vary over {shown(axes)}: each rank would "
        "compute a different norm",
        where=where(mesh, axes),
        expected="one norm of all ranks' gradients, so that replicas stay equal",
        found=operands_text([x for x in operands if axes_of_kind(type_of(x), "V")][:4]),
        fix="call md.clip_grad_norm_(parameters, max_norm), which computes the norm over all ranks",
    )


def unseen_expectations(tensor: torch.Tensor, operation: str, mesh: DeviceMesh) -> AxisTypeError:
    """Return the error of a tensor with a gradient function but no type."""
    made = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "an unknown function"
    return AxisTypeError(
        f"{operation} cannot infer the type of an operand: md.typed did not see how it was "
        "computed",
        where=where(mesh),
        expected="a tensor computed inside the context, a leaf, or an annotated tensor",
        found=f"{tensor_text(tensor)} without a type, computed by {made} outside the context, in "
        "TorchScript or in an extension",
        fix="annotate it: md.annotate(x) if it is equal on all ranks, else for example "
        f"md.annotate(x, varying={mesh.axis_names[0]!r})",
    )


def unseeded_draw(
    operation: str,
    operands: Sequence[torch.Tensor],
    axes: Sequence[str],
    mesh: DeviceMesh,
    why: str,
    *,
    is_own: bool,
) -> AxisTypeError:
    """Return the error of a draw that ``md.seed`` did not seed.

    Args:
        axes: the axes over which no operand varies.
        is_own: whether the generator is torch's default.
    """
    source = "torch's default generator" if is_own else "the generator in generator="
    given = "" if is_own else ", generator=g"
    rest = [axis for axis in mesh.axis_names if axis not in axes]
    alike = f"seed, differ_over={axes_argument(rest)}{given}" if rest else f"seed{given}"
    return AxisTypeError(
        f"{operation} cannot draw from a generator that md.seed did not seed",
        where=where(mesh, axes),
        expected="a generator seeded by md.seed, so that meshdist knows whether ranks draw the "
        f"same numbers; or operands that vary over {shown(mesh.axis_names)}",
        found="\n".join([f"{source}, {why}", *([operands_text(operands)] if operands else [])]),
        fix=f"call md.seed({alike}) on every rank if the result should be equal along "
        f"{shown(axes)}, or md.seed(seed, differ_over={axes_argument(mesh.axis_names)}{given}) if "
        "each rank should draw its own numbers",
    )


def foreign_axis(
    axis: str, tensor: torch.Tensor, operation: str, mesh: DeviceMesh
) -> AxisTypeError:
    """Return the error of a type with an axis that the context's mesh lacks."""
    return AxisTypeError(
        f"axis {axis!r} of an operand of {operation} is not in mesh ({mesh.layout.axis_text()})",
        where=where(mesh),
        expected=f"axes of the md.typed mesh: {shown(mesh.axis_names)}",
        found=tensor_text(tensor),
        fix="open md.typed with the mesh that has the axis, or annotate the tensor again",
    )


def transformed(operation: str, tensor: torch.Tensor, mesh: DeviceMesh) -> AxisTypeError:
    """Return the error of a non-invariant operand in a torch.func transform."""
    return AxisTypeError(
        f"{operation} cannot take an operand that is not invariant inside a torch.func transform",
        where=where(mesh),
        expected="only invariant operands (the transform loses the types of its results)",
        found=tensor_text(tensor),
        fix="use torch.autograd inside the context, or the transform with explicit casts "
        "(lax.pvary, lax.psum) in `with md.untyped():`",
    )


def of_a_subclass(tensor: torch.Tensor, operation: str) -> KindError:
    """Return the error of a Tensor subclass, which a context cannot type."""
    return KindError(
        f"{operation} cannot take an operand of type {type(tensor).__name__}, a subclass of Tensor",
        expected="plain tensors and parameters",
        found=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
        fix="convert it to a plain tensor, for example with DTensor.to_local(), or use it inside "
        "`with md.untyped():`",
    )


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
"""The function names under which a mode sees operators."""


class _WithoutTypeError(type):
    """The metaclass of errors that hide their base TypeError."""

    def mro(cls) -> list[type]:
        return [base for base in super().mro() if base is not TypeError]


_variants: dict[type, type] = {}


def as_no_type_error(error: MeshdistError) -> MeshdistError:
    """Return ``error``, its class changed to a variant that is not a TypeError."""
    # An operator on tensors treats any TypeError as "unsupported operands": `+` then raises a
    # TypeError without our text, and `==` silently returns False.
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
    """A callable with which pickle restores an error's original class."""

    def __init__(self, kind: type[MeshdistError], fields: dict[str, Any]) -> None:
        self._kind = kind
        self._fields = fields

    def __call__(self, summary: str) -> MeshdistError:
        return self._kind(summary, **self._fields)
