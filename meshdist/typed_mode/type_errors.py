"""The errors of typed contexts, one function for each kind, and the texts of types in them."""

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
    """Return a tensor as messages and ``md.typeof`` show it: ``float32[8, 4]{V:dp}``.

    Args:
        text: the type in braces; "" shows no braces, and None the type that the tensor has.
    """
    text = type_of(tensor) if text is None else text
    return type_as_text(tensor.dtype, ", ".join(map(str, tensor.shape)), text)


def type_as_text(dtype: object, dims: str, kinds: str) -> str:
    """Return a dtype, dims and kinds as types are shown: ``float32[8@dp, 4]{U:tp}``."""
    return f"{dtype_name(dtype)}[{dims}]" + (f"{{{kinds}}}" if kinds else "")


def mesh_text(mesh: DeviceMesh) -> str:
    """Return a mesh with its axes and sizes: ``DeviceMesh(dp=2, tp=2)``."""
    return f"DeviceMesh({mesh.layout.axis_text()})"


def where(mesh: DeviceMesh, axes: Sequence[str] = ()) -> str:
    """Return a text of this rank, of ``axes`` with their sizes, and of the program's line."""
    rank, sizes = mesh.world.rank, mesh.axis_sizes
    place = f"rank {rank} ({mesh.layout.coordinate_text(rank)}) of {mesh_text(mesh)}"
    each = ", ".join(f"{axis!r} (size {sizes.get(axis, '?')})" for axis in axes)
    about = f"; {'axis' if len(axes) == 1 else 'axes'} {each}" if axes else ""
    return f"{place}{about}; {show_site(call_site())}"


def operands_text(operands: Sequence[torch.Tensor]) -> str:
    """Return text of an operation's operands with their types, each on a line."""
    return "\n".join(f"operand {place}: {tensor_text(x)}" for place, x in enumerate(operands))


def rejected_operation(
    operation: str,
    x: torch.Tensor,
    axis: str,
    mesh: DeviceMesh,
    taken: Sequence[str],
    argument: str,
) -> AxisTypeError:
    """Return the error of ``operation`` on ``x`` over an axis whose type letter is not in
    ``taken``."""
    kind = kinds_in(type_of(x)).get(axis, "I")
    words = " or ".join(map(KINDS.__getitem__, taken)) or "no value at all"
    fixes = {
        "I": f"where data enter, say that they differ: md.annotate(batch, varying={axis!r}), after "
        f"the last copy or slice outside the context; {_fix_of_equal_values(operation, axis, argument)}",
        "V": f"reduce it first: lax.psum({argument}, {axis!r}) or lax.pmean({argument}, {axis!r})",
        "U": f"reduce it first: lax.psum({argument}, {axis!r}), or lax.psum_scatter",
        "R": f"cast it first: lax.pcast({argument}, {axis!r}, to='varying')",
    }
    return AxisTypeError(
        f"{operation} over axis {axis!r} of a value that is {KINDS[kind]} there",
        where=where(mesh, [axis]),
        expected=f"a value that is {words} over {axis!r}",
        found=f"{argument}: {tensor_text(x)}",
        fix=fixes[kind],
    )


def rejected_sharding(
    operation: str, x: torch.Tensor, axis: str, wanted: str, mesh: DeviceMesh, spec: str
) -> AxisTypeError:
    """Return the error of ``x`` whose type over ``axis`` is not ``wanted``, as ``spec`` says."""
    kind = kinds_in(type_of(x)).get(axis, "I")
    fixes = {
        "V": f"write the axis where it cuts a dim, as in 'n@{axis}'; or make the value equal along "
        f"it first, by lax.psum(x, {axis!r}) or lax.pmean",
        "U": f"write {{U:{axis}}} on the left: the partial sums are then added where the right side "
        "asks for it; if they were added in place since, say how it lies: md.annotate(x)",
        "R": f"write {{R:{axis}}} on the left",
        "I": f"where each rank holds a partial sum, say so: md.annotate(x, unreduced={axis!r})",
    }
    return AxisTypeError(
        f"{operation} of a value that is {KINDS[kind]} over {axis!r}, and {KINDS[wanted]} there by its "
        "pattern or spec",
        where=where(mesh, [axis]),
        expected=f"a value that lies as {spec}",
        found=f"x: {tensor_text(x)}",
        fix=fixes[kind]
        if (kind, wanted) != ("V", "U")
        else "x carries a spec, whose axes cut its dims: write them on the left; where its parts "
        f"are partial sums all the same, say so first: lax.pcast(x, {axis!r}, to='unreduced')",
    )


def unmarked_shard(
    operation: str, x: torch.Tensor, axis: str, mesh: DeviceMesh, spec: str
) -> AxisTypeError:
    """Return the error of an invariant value that its pattern or spec cuts over ``axis``."""
    if x.is_leaf:
        name = name_of(x, "w")
        found = f"{name}: {tensor_text(x)}, a leaf without a mark"
        fix = (
            f"say where it lies: md.annotate({name}, md.{spec}); nn.Parameter(x) and model.to "
            f"keep the mark, copies do not. Where it is equal on all ranks: md.annotate({name})"
        )
    else:
        found = f"x: {tensor_text(x)}, made from values that are invariant over {axis!r}"
        fix = (
            f"annotate what it is made from: md.annotate(w, varying={axis!r}). Where it is equal "
            f"on all ranks, cast it: lax.pvary(x, {axis!r})"
        )
    return AxisTypeError(
        f"{operation} of a value that is invariant over {axis!r}, and cut there by its pattern or spec",
        where=where(mesh, [axis]),
        expected="a mark that says that ranks hold parts of their own: the gradient of an equal "
        f"value is summed over {axis!r}",
        found=found,
        fix=fix,
    )


def name_of(tensor: torch.Tensor, default: str) -> str:
    """Return the variable's name for ``tensor`` in the calling program, or ``default``."""
    return names_of([tensor], program_frame(sys._getframe())).get(id(tensor), default)


def foreign_mesh(
    operation: str, axes: Sequence[str], mesh: DeviceMesh, given: DeviceMesh
) -> AxisTypeError:
    """Return the error of ``operation`` over axes of ``given``, which the context's mesh lacks."""
    return AxisTypeError(
        f"{operation} over {shown(axes)} of a mesh that is no part of the context's",
        where=where(mesh),
        expected=f"axes of {mesh_text(mesh)}, a slice of it, or axes flattened",
        found=mesh_text(given),
        fix="open the context with the mesh that has these axes",
    )


def _fix_of_equal_values(operation: str, axis: str, argument: str) -> str:
    """Return the fix for ``operation`` on a value that is equal on all ranks."""
    if operation == "psum":
        return (
            "to count a value that is equal on all ranks, multiply by "
            f"lax.axis_size({axis!r}), or cast it first: lax.pvary({argument}, {axis!r})"
        )
    if operation in ("pmean", "pmax", "pmin"):
        return f"a value that is equal on all ranks is its own {operation[1:]}: leave the collective out"
    return (
        f"a value that is equal on all ranks is cast first: lax.pvary(x, {axis!r}), before each "
        "rank takes its own part of it"
    )


def rejected_join(
    name: str, operands: Sequence[torch.Tensor], axis: str, operand: int, mesh: DeviceMesh
) -> AxisTypeError:
    """Return the error of ``name``, not linear in ``operand``, which is unreduced over ``axis``."""
    target = operands[0]
    if operand and name.endswith("_") and target.is_leaf and "U" not in type_of(target):
        return AxisTypeError(
            f"{name} of an unreduced gradient to a parameter",
            where=where(mesh, [axis]),
            expected=f"a gradient that is complete over {axis!r}; this one is a partial sum on each "
            "rank",
            found=operands_text(operands),
            fix=f"sum it first: lax.psum(p.grad, {axis!r}); or step behind accumulate_gradients, "
            "which sums at its end",
        )
    return AxisTypeError(
        f"{name} of a value unreduced over {axis!r}",
        where=where(mesh, [axis]),
        expected="a linear operation: a sum of unreduced values, a product with an invariant or "
        "reduced one, a division of it, a change of shape or floating dtype",
        found=operands_text(operands),
        fix=f"add the partial sums up first: lax.psum(x, {axis!r}) or lax.psum_scatter(x, {axis!r})",
    )


def rejected_loss(
    loss: torch.Tensor, axes: Sequence[str], mesh: DeviceMesh, operation: str
) -> AxisTypeError:
    """Return the error of a backward from a loss whose type is reduced over ``axes``."""
    return AxisTypeError(
        f"{operation} of a loss that is reduced over {shown(axes)}",
        where=where(mesh, axes),
        expected="a loss that is invariant there: the gradient of a reduced one is a partial sum on "
        "each rank, and would be counted once a rank",
        found=f"loss: {tensor_text(loss)}",
        fix="where a term of parameters alone, as a weight penalty, stands beside a mean, move it "
        f"inside: loss = lax.pmean(loss + term, {axes_argument(axes)})",
    )


def owned_loss(
    loss: torch.Tensor, axis: str, owner: str, mesh: DeviceMesh, operation: str
) -> AxisTypeError:
    """Return the error of a loss that is equal over an axis whose owner will average gradients."""
    kind = kinds_in(type_of(loss)).get(axis, "I")
    return AxisTypeError(
        f"{operation} of a loss {KINDS[kind]} over {axis!r}, which {owner} owns and divides",
        where=where(mesh, [axis]),
        expected=f"each rank's own loss: {owner} takes the mean of the gradients over {axis!r}",
        found=f"loss: {tensor_text(loss)}",
        fix=f"drop the {'lax.pmean' if kind == 'I' else 'cast'} over {axis!r}",
    )


def foreign_leaf(
    leaf: torch.Tensor, owners: Mapping[str, str], mesh: DeviceMesh, operation: str
) -> AxisTypeError:
    """Return the error of a leaf outside of the wrapper named by ``owners``, by the loss's axes."""
    axes, owner = list(owners), next(iter(owners.values()))
    return AxisTypeError(
        f"{operation} of a loss over {shown(axes)}, which {owner} owns, meets a leaf that is not "
        f"{owner}'s",
        where=where(mesh, axes),
        expected=f"one owner of the gradients: {owner} takes the mean of the ranks' gradients, and "
        "a cast their sum",
        found=f"leaf: {tensor_text(leaf)}, cast where it met varying values",
        fix=f"wrap all that is trained in one module; or take it without {owner}, with "
        f"lax.pmean(loss, {axes_argument(axes)}); or detach the leaf",
    )


def axes_argument(axes: Sequence[str]) -> str:
    """Return axes as the argument of a collective is typed: ``'dp'``, or ``('dp', 'tp')``."""
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def rejected_write(
    name: str,
    target: torch.Tensor,
    text: str,
    operands: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    why: str,
) -> AxisTypeError:
    """Return the error of a write in place that would change a type that must stay.

    Args:
        text: the type of the value that is written.
        why: the reason why the target must keep its type.
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
    fix = f"cast it before: {cast}"
    if becomes == "V" and target.is_leaf and target.requires_grad:
        cure = "where it is drawn, build the model first, and md.seed(..., differ_over=) behind it"
        if name != "copy_" and any(axes[0] in kinds_in(type_of(x)) for x in operands):
            cure = (
                f"write what is equal over {shown(axes)}: gradients that are clipped by one norm, "
                "as md.clip_grad_norm_ does it"
            )
        fix = (
            f"{cure}; or, where each rank has its own part of the target, "
            f"md.annotate(target, varying={axes_argument(axes)})"
        )
    return AxisTypeError(
        f"{name} would turn what it writes, {KINDS[was]} over {shown(axes)}, into {KINDS[becomes]}",
        where=where(mesh, axes),
        expected=f"a target of type {{{text}}}",
        found=f"a target of {tensor_text(target)}, {why}\n{operands_text(operands)}",
        fix=fix,
    )


def own_norm(operands: Sequence[torch.Tensor], mesh: DeviceMesh) -> AxisTypeError:
    """Return the error of torch's ``clip_grad_norm_`` on gradients that vary."""
    axes = sorted({axis for x in operands for axis in axes_of_kind(type_of(x), "V")})
    return AxisTypeError(
        f"clip_grad_norm_ of gradients that vary over {shown(axes)} finds another on each rank",
        where=where(mesh, axes),
        expected="one norm, that of the gradients of all ranks: else replicas part",
        found=operands_text([x for x in operands if axes_of_kind(type_of(x), "V")][:4]),
        fix="md.clip_grad_norm_(parameters, max_norm), which has the norm of all ranks' gradients",
    )


def unseen_expectations(tensor: torch.Tensor, operation: str, mesh: DeviceMesh) -> AxisTypeError:
    """Return the error of a tensor with a gradient function and no type."""
    made = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else "an unknown function"
    return AxisTypeError(
        f"an operand of {operation} has a history that the context did not see",
        where=where(mesh),
        expected="a tensor that was made inside the context, a leaf, or one with a type",
        found=f"{tensor_text(tensor)} without a type, made by {made}: outside the context, by "
        "TorchScript or by an extension",
        fix=f"say what it is: md.annotate(x, varying={mesh.axis_names[0]!r}), for example, or "
        "md.annotate(x) where it is equal on all ranks",
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
    """Return the error of a draw from a generator whose state md.seed did not set.

    Args:
        axes: those over which no operand varies.
        is_own: whether the generator is torch's own.
    """
    source = "torch's own generator" if is_own else "a generator of the program's"
    given = "" if is_own else ", generator=g"
    rest = [axis for axis in mesh.axis_names if axis not in axes]
    alike = f"seed, differ_over={axes_argument(rest)}{given}" if rest else f"seed{given}"
    return AxisTypeError(
        f"{operation} draws from a state that md.seed did not set",
        where=where(mesh, axes),
        expected=f"a seed of md.seed, or operands that vary over {shown(mesh.axis_names)}: else "
        "it is not known whether ranks draw the same",
        found="\n".join([f"{source}, {why}", *([operands_text(operands)] if operands else [])]),
        fix=f"on every rank: md.seed({alike}) where the result is to be equal along "
        f"{shown(axes)}; md.seed(seed, differ_over={axes_argument(mesh.axis_names)}{given}) where "
        "each rank draws its own",
    )


def foreign_axis(
    axis: str, tensor: torch.Tensor, operation: str, mesh: DeviceMesh
) -> AxisTypeError:
    """Return the error of a tensor whose type names an axis that the context's mesh lacks."""
    return AxisTypeError(
        f"axis {axis!r} of an operand of {operation} is not in mesh ({mesh.layout.axis_text()})",
        where=where(mesh),
        expected=f"axes of the context's mesh: {shown(mesh.axis_names)}",
        found=tensor_text(tensor),
        fix="open the context with the mesh that has the axis, or annotate the tensor anew",
    )


def transformed(operation: str, tensor: torch.Tensor, mesh: DeviceMesh) -> AxisTypeError:
    """Return the error of a value that is not invariant, inside a transform of torch.func."""
    return AxisTypeError(
        f"{operation} inside a transform of torch.func has an operand that is not invariant",
        where=where(mesh),
        expected="invariant values alone: a type is lost when the transform unwraps its results",
        found=tensor_text(tensor),
        fix="use torch.autograd inside the context, or the transform with hand-written casts "
        "(lax.pvary, lax.psum) in `with md.untyped():`",
    )


def of_a_subclass(tensor: torch.Tensor, operation: str) -> KindError:
    """Return the error of an operand of a subclass of Tensor, which a context cannot follow."""
    return KindError(
        f"{operation} in a typed context has an operand of type {type(tensor).__name__}",
        expected="plain tensors and parameters",
        found=f"{type(tensor).__module__}.{type(tensor).__qualname__}, a subclass with operations "
        "of its own",
        fix="convert it to a plain tensor, as DTensor.to_local() does, or run what needs it in "
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
"""The names under which a mode sees the calls of operators."""


class _WithoutTypeError(type):
    """The metaclass of errors that are no TypeErrors although their base is."""

    def mro(cls) -> list[type]:
        return [base for base in super().mro() if base is not TypeError]


_variants: dict[type, type] = {}


def as_no_type_error(error: MeshdistError) -> MeshdistError:
    """Change the class of ``error`` to a variant that is no TypeError; return ``error``."""
    # `x + y` on tensors takes any TypeError for "these two cannot be added" and drops it: `+` then
    # raises a TypeError without our text, and `==` quietly gives False. A copy by pickle is of the
    # first class again.
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
    """A callable for pickle that makes an error of its original class."""

    def __init__(self, kind: type[MeshdistError], fields: dict[str, Any]) -> None:
        self._kind = kind
        self._fields = fields

    def __call__(self, summary: str) -> MeshdistError:
        return self._kind(summary, **self._fields)
