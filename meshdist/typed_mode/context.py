"""Keep the state of a thread's typed context.

A context wraps the program's hooks on leaves, because a hook can make an equal gradient differ
between ranks. Parameters keep the annotations of the tensors from which they are created.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode, handle_torch_function

from ..annotations.axis_types import (
    ANNOTATION,
    EMPTY,
    INVARIANT,
    JoinedType,
    Refusal,
    find_owner_axes,
    gradient_type,
    join_types,
    kinds_in,
    set_spec,
    set_type,
    type_alone,
    type_of,
    type_text,
    with_kinds,
)
from ..collectives.torch_private import (
    are_transforms_active,
    is_mode_enabled,
    is_wrapped,
    mode_at,
    num_modes,
    storage_uses,
    unwrapped,
)
from ..errors import AxisTypeError
from ..mesh.device_mesh import DeviceMesh
from ..runtime.graph_breaks import untraced
from .casts import Casts
from .detail_checks import is_checked
from .function_rules import TorchFunction, tensors_in
from .step_checks import watch_steps
from .type_errors import (
    foreign_axis,
    of_a_subclass,
    rejected_join,
    rejected_write,
    tensor_text,
    transformed,
    unseen_expectations,
    where,
)


def keep_marks_in_parameters() -> None:
    """Patch ``nn.Parameter`` to copy the annotation of its tensor."""
    # torch creates the tensor in C++, which calls no mode and no hook. A wrapper's annotation is
    # not copied, because the wrapper does not know the new parameter.
    new = Parameter.__new__

    @untraced
    @wraps(new)
    def marked(cls: type[Parameter], data: Any = None, *rest: Any, **named: Any) -> Parameter:
        made = new(cls, data, *rest, **named)
        given = getattr(data, "__dict__", {}).get(ANNOTATION)
        if given and given[0] is not None and given[2] is None:
            set_spec(made, *given[:2], *given[5:])
            watch_steps([made])
        elif (caller := sys._getframe(1)).f_code is ParametrizationList.__init__.__code__:
            _check_lost(caller.f_locals["original"])
        return made

    Parameter.__new__ = marked  # type: ignore[method-assign, assignment]


def _check_lost(original: torch.Tensor) -> None:
    """Raise if a parametrization, such as weight_norm, loses its leaf's annotation."""
    if type_of(original) and find_owner_axes(original) is None:
        raise AxisTypeError(
            "a parametrization cannot keep the annotation of a parameter that it replaces by "
            "several",
            expected="annotated leaves (a leaf without an annotation counts as equal on all ranks, "
            "and its gradient is summed)",
            found=f"original: {tensor_text(original)}",
            fix="register it inside `with md.typed(mesh):`, which infers the types; or register it "
            "first, and then annotate each of its leaves",
        )


@dataclass
class Backwards:
    """The state of backwards that all typed contexts of a mesh share."""

    running: ContextMode | None = None
    """The context whose backward runs."""


class TypedHook:
    """The program's hook on a gradient, run in the context whose backward runs."""

    def __init__(self, mesh: DeviceMesh, x: torch.Tensor, hook: Callable[..., Any]) -> None:
        self.mesh = mesh
        self._hook, self._of, self._type = hook, weakref.ref(x), type_of(x)

    def __call__(self, given: torch.Tensor) -> Any:
        """Run the hook on a typed gradient; raise if it changes the type."""
        mode, x = self.mesh.caches.of(Backwards).running, self._of()
        # torch passes the leaf itself to a post-accumulate hook; the gradient is its `.grad`.
        is_post_accumulate = x is not None and given is x
        grad: Any = given.grad if is_post_accumulate else given
        if mode is None or grad is None:
            return self._hook(given)
        expected = gradient_type(self._type if x is None else type_of(x))
        if x is not None and (owned := find_owner_axes(x)):
            expected = with_kinds(expected, dict.fromkeys(owned, "V"))
        before = grad.__dict__.get(ANNOTATION, EMPTY)
        set_type(grad, expected)
        with mode:
            result = self._hook(given)
        found: Any = given.grad if is_post_accumulate else grad if result is None else result
        kinds = {} if found is None else kinds_in(type_of(found))
        for axis, _ in sorted(kinds.items() - kinds_in(expected).items()):
            raise AxisTypeError(
                f"the hook {getattr(self._hook, '__qualname__', self._hook)} cannot change the "
                "type of a gradient",
                where=where(self.mesh, [axis]),
                expected=tensor_text(grad, expected),
                found=tensor_text(found),
                fix=f"make the factors that it uses equal first: lax.pmean(factor, {axis!r})",
            )
        if not is_post_accumulate:  # autograd may pass the same tensor to other nodes.
            grad.__dict__[ANNOTATION] = before
        return result


def follow_hooks(mesh: DeviceMesh, x: torch.Tensor) -> None:
    """Replace the program's gradient hooks on ``x`` by ``TypedHook``s."""
    both: Any = (x._backward_hooks or {}, x._post_accumulate_grad_hooks or {})
    for hooks in both:
        for key, hook in hooks.items():
            if isinstance(hook, TypedHook):
                hook.mesh = mesh
            elif not str(getattr(hook, "__module__", "")).startswith("meshdist."):
                hooks[key] = TypedHook(mesh, x, hook)


PLAIN_TENSORS = frozenset({torch.Tensor, Parameter, UninitializedParameter, UninitializedBuffer})
"""The types of tensors that a context follows."""


keep_marks_in_parameters()


class ContextMode(TorchFunctionMode):
    """The state of a typed context."""

    is_noting = False

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.axes = frozenset(mesh.axis_names)
        self.casts = Casts(mesh)
        self.is_asleep = False  # Paused by md.untyped().
        # The name of the wrapper that reduces gradients over an axis after the backward, by axis.
        # It needs a loss that varies over this axis.
        self.owners: dict[str, str] = {}
        # The results' annotation by type, for types that operands of only this type pass to their
        # results. At debug level DETAIL it is empty, because each operation must add its leaves to
        # ``leaves``, in the order of their first use, which is the same on all ranks.
        self.is_checked = is_checked()
        self.known_types: dict[str, Any] = (
            {} if self.is_checked else {INVARIANT: type_alone(INVARIANT)}
        )
        self.leaves: dict[int, torch.Tensor] = {}
        # The keys are the operands' types, and the linearity if an operand is unreduced.
        self.joins: dict[Any, JoinedType] = {}
        # The ``TypedOperation`` of each functional collective, by name, cast and mesh.
        self.operations: dict[Any, Any] = {}

    def note(self, result: Any, name: str, operands: Sequence[Any]) -> None:
        """Note the operation that made ``result``, in contexts with notes."""

    def stop_notes(self) -> None:
        """End the notes of the mesh's contexts."""

    def type_of(self, tensor: torch.Tensor, operation: str) -> str:
        """Return an operand's type; raise for a subclass, or a non-leaf without a type."""
        if type(tensor) not in PLAIN_TENSORS:
            raise of_a_subclass(tensor, operation)
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            follow_hooks(self.mesh, tensor)
        text: str | None = tensor.__dict__.get(ANNOTATION, EMPTY)[0]
        if text is None and not tensor.is_leaf:
            raise unseen_expectations(tensor, operation, self.mesh)
        return text or INVARIANT

    def operand_type(self, x: torch.Tensor, operation: str) -> str:
        """Return the type of a collective's operand; raise if the context cannot follow it."""
        text = self.type_of(x, operation)
        self.check_axes(x, kinds_in(text), operation)
        if are_transforms_active():
            self._check_transformed(operation, [x])
        return text

    def check_axes(self, tensor: torch.Tensor, kinds: Any, operation: str) -> None:
        """Raise AxisTypeError if ``kinds`` name an axis that the mesh lacks."""
        for axis in kinds:
            if axis not in self.axes:
                raise foreign_axis(axis, tensor, operation, self.mesh)

    def joined(
        self,
        operation: TorchFunction,
        operands: Sequence[torch.Tensor],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        added: str = INVARIANT,
    ) -> JoinedType:
        """Return the joined type of ``operands`` and the type ``added``; raise if there is none."""
        name = operation.name
        texts: tuple[str, ...] = tuple([self.type_of(operand, name) for operand in operands])
        if are_transforms_active():
            self._check_transformed(name, operands)
        if self.is_checked:
            self.leaves.update(
                (id(operand), operand)
                for operand in operands
                if operand.is_leaf and operand.requires_grad
            )
        key: Any = (*texts, added) if added else texts
        found = self.joins.get(key)
        if found is None:
            for operand, text in zip(operands, texts, strict=True):
                self.check_axes(operand, kinds_in(text), name)
            linearity = ""
            if any("U" in kinds_in(text).values() for text in key):
                linearity = _linearity(operation, args, kwargs or {})
                found = self.joins.get((key, linearity))
            if found is None:
                made = join_types(key, linearity)
                if isinstance(made, Refusal):
                    raise rejected_join(name, operands, made.axis, made.operand, self.mesh)
                found = made
                self.joins[(key, linearity) if linearity else key] = found
                if not linearity and not self.is_checked:
                    self.known_types.update(
                        (text, type_alone(text))
                        for text in texts
                        if "U" not in kinds_in(text).values()
                    )
        return found

    def _check_transformed(self, name: str, operands: Sequence[torch.Tensor]) -> None:
        """Raise if an operand in a torch.func transform is not invariant."""
        for operand in operands:
            inner = operand
            while is_wrapped(inner) and not type_of(inner):
                inner = unwrapped(inner)
            if type_of(inner):
                raise transformed(name, inner, self.mesh)

    def check_write(
        self,
        operation: TorchFunction,
        target: torch.Tensor,
        text: str,
        operands: Sequence[torch.Tensor],
    ) -> None:
        """Raise if a write would change the type of a target with a gradient or shared memory."""
        before = self.type_of(target, operation.name)
        if self.widened(target, text) == before:
            return
        if target.requires_grad:
            why = "which requires a gradient"
        elif target._base is not None:
            why = "a view of another tensor"
        elif storage_uses(target) > 1:
            why = "whose memory other tensors share"
        else:
            return
        raise rejected_write(operation.name, target, text, operands, self.mesh, why)

    def widened(self, target: torch.Tensor, text: str, *, is_out: bool = True) -> str:
        """Return a target's type after a write: its old type, joined with ``text``.

        Args:
            is_out: whether ``text`` lacks the target's type, as the target is no operand.
        """
        before = type_of(target)
        if before == text or not is_out or not before:
            return text
        made = join_types((before, text))
        return made.text if isinstance(made, JoinedType) else text

    def cast(self, x: torch.Tensor, missing: Mapping[str, str]) -> torch.Tensor:
        """Return ``x`` cast by ``missing``, or ``x`` if it needs no gradient."""
        if missing and x.requires_grad and torch.is_grad_enabled():
            return self.casts.cast(x, type_text(missing))
        return x


def _linearity(operation: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return in which unreduced operands this call is linear; "" for none."""
    numbers = [value for value in args if isinstance(value, (int, float, complex))]
    if (operation.adds_numbers and any(numbers)) or kwargs.get("rounding_mode"):
        return ""
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    is_rounded = any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)
    return "" if is_rounded else operation.linearity


def find_context(*, is_awake: bool = True) -> ContextMode | None:
    """Return the context that sees this thread's calls; None in collectives, backwards, Functions.

    Args:
        is_awake: False returns the thread's context even if it sees no calls.
    """
    if is_mode_enabled() or not is_awake:
        for index in range(num_modes() - 1, -1, -1):
            mode = mode_at(index)
            if isinstance(mode, ContextMode):
                return None if is_awake and mode.is_asleep else mode
    return None


def show_method(name: str) -> None:
    """Patch a method that torch hides from modes, so that typed contexts see its calls."""
    method = getattr(torch.Tensor, name)

    @wraps(method)
    def seen(*args: Any, **kwargs: Any) -> Any:
        is_seen = find_context() is not None
        call = partial(handle_torch_function, seen, args[:1]) if is_seen else method
        return call(*args, **kwargs)

    seen.__module__ = "torch"
    setattr(torch.Tensor, name, seen)


show_method("as_subclass")
show_method("set_")


@contextmanager
def paused(mode: ContextMode, *, is_asleep: bool = True) -> Iterator[None]:
    """Pause a context inside the block, or resume it (``is_asleep=False``)."""
    before = mode.is_asleep
    mode.is_asleep = is_asleep
    try:
        yield
    finally:
        mode.is_asleep = before


def mark(tree: Any, text: str) -> None:
    """Set the type of all tensors in nested lists, tuples and dicts."""
    for x in tensors_in(tree):
        set_type(x, text)
