"""The typed context that a thread is inside of: what all rooms about types ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode, handle_torch_function

from ..mesh.device_mesh import DeviceMesh
from .axis_types import ATTRIBUTE, INVARIANT, Join, Refusal, join, kinds_in, type_text
from .casting import Casts
from .detail_checks import is_checked
from .marked_parameters import keep_marks_in_parameters
from .operation_rules import Operation
from .torch_private import (
    are_transforms_active,
    is_mode_enabled,
    is_wrapped,
    mode_at,
    num_modes,
    storage_uses,
    unwrapped,
)
from .type_errors import (
    foreign_axis,
    of_a_subclass,
    refused_join,
    refused_write,
    transformed,
    type_of,
    unseen_history,
)
from .typed_hooks import follow_hooks

__all__ = [
    "PASSED",
    "PLAIN_TENSORS",
    "ContextMode",
    "asleep",
    "collect",
    "find_mode",
    "innermost_mode",
    "mark",
]

PLAIN_TENSORS = frozenset({torch.Tensor, Parameter, UninitializedParameter, UninitializedBuffer})
"""The types of tensors that a context follows."""


keep_marks_in_parameters()


PASSED = "a backward has passed"
"""Under which a mesh notes that a context's backward was reached: later contexts note nothing."""


class ContextMode(TorchFunctionMode):
    """The state of one context of one thread.

    Args:
        mesh: the context's.

    Attributes:
        casts: what it has cast.
        is_asleep: whether ``md.untyped()`` has paused it.
        owners: by axis, the name of what reduces gradients over it behind the backward, and so
            needs a loss that varies there.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.axes = frozenset(mesh.axis_names)
        self.casts = Casts(mesh)
        self.is_asleep = False
        self.owners: dict[str, str] = {}
        # Types of which any number join to the same. At debug level DETAIL none is settled: there
        # the leaves that take part are noted, in the order of their first use, which ranks share.
        self.is_checked = is_checked()
        self.settled: set[str] = set() if self.is_checked else {INVARIANT}
        self.leaves: dict[int, torch.Tensor] = {}
        self.joins: dict[Any, Join] = {}  # by the operands' types, and by linearity where it counts

    def note(self, result: Any, name: str, operands: Sequence[Any]) -> None:
        """Note what made ``result``, in a context that notes it (``provenance``)."""

    def stop_notes(self) -> None:
        """Note no more: here, and in the mesh's later contexts."""

    def note_next_time(self) -> bool:
        """Whether this context has notes; if not, the mesh's next one has."""
        self.mesh.notes.pop(PASSED, None)
        return False

    def type_of(self, tensor: torch.Tensor, operation: str) -> str:
        """The text of an operand's type; raises for subclasses and for histories unseen here."""
        if type(tensor) not in PLAIN_TENSORS:
            raise of_a_subclass(tensor, operation)
        follow_hooks(self.mesh, tensor)
        text = tensor.__dict__.get(ATTRIBUTE)
        if text is None:
            if not tensor.is_leaf:
                raise unseen_history(tensor, operation, self.mesh)
            return ""
        return text  # type: ignore[no-any-return]

    def operand_type(self, x: torch.Tensor, verb: str) -> str:
        """The text of the type of a verb's operand, checked as an operation's."""
        text = self.type_of(x, verb)
        self.check_axes(x, kinds_in(text), verb)
        if are_transforms_active():
            self._check_transformed(verb, [x])
        return text

    def check_axes(self, tensor: torch.Tensor, kinds: Any, operation: str) -> None:
        """Raise AxisTypeError where a tensor's type names an axis that the mesh lacks."""
        for axis in kinds:
            if axis not in self.axes:
                raise foreign_axis(axis, tensor, operation, self.mesh)

    def joined(
        self,
        operation: Operation,
        operands: Sequence[torch.Tensor],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        added: str = INVARIANT,
    ) -> Join:
        """The join of the operands' types and ``added``; raises if any cannot be joined."""
        name = operation.name
        texts: tuple[str, ...] = tuple([self.type_of(one, name) for one in operands])
        if are_transforms_active():
            self._check_transformed(name, operands)
        if self.is_checked:
            self.leaves.update(
                (id(one), one) for one in operands if one.is_leaf and one.requires_grad
            )
        key: Any = (*texts, added) if added else texts
        found = self.joins.get(key)
        if found is None:
            for one, text in zip(operands, texts, strict=True):
                self.check_axes(one, kinds_in(text), name)
            linearity = ""
            if any("U" in kinds_in(text).values() for text in key):
                linearity = _linearity(operation, args, kwargs or {})
                found = self.joins.get((key, linearity))
            if found is None:
                made = join(key, linearity)
                if isinstance(made, Refusal):
                    raise refused_join(name, operands, made.axis, made.operand, self.mesh)
                found = made
                self.joins[(key, linearity) if linearity else key] = found
                if not linearity and not self.is_checked:
                    self.settled.update(
                        text for text in texts if "U" not in kinds_in(text).values()
                    )
        return found

    def _check_transformed(self, name: str, operands: Sequence[torch.Tensor]) -> None:
        """Raise where a value that is not invariant takes part in a transform of torch.func."""
        for one in operands:
            inner = one
            while is_wrapped(inner) and not type_of(inner):
                inner = unwrapped(inner)
            if type_of(inner):
                raise transformed(name, inner, self.mesh)

    def check_write(
        self,
        operation: Operation,
        target: torch.Tensor,
        text: str,
        operands: Sequence[torch.Tensor],
    ) -> None:
        """Raise where writing a value of type ``text`` would change what others rely on."""
        before = self.type_of(target, operation.name)
        if self.widened(target, text) == before:
            return
        if target.requires_grad:
            why = "which requires a gradient"
        elif target._base is not None:
            why = "a view of another tensor"
        elif storage_uses(target) > 1:
            why = "whose memory others share"
        else:
            return
        raise refused_write(operation.name, target, text, operands, self.mesh, why)

    def widened(self, target: torch.Tensor, text: str, *, is_out: bool = True) -> str:
        """The type of what is written: never less than it was."""
        before = type_of(target)
        if before == text or not is_out or not before:
            return text
        made = join((before, text))
        return made.text if isinstance(made, Join) else text

    def cast(self, x: torch.Tensor, missing: Mapping[str, str]) -> torch.Tensor:
        """``x`` of other kinds over axes where it is invariant; itself where no cast is needed."""
        if missing and x.requires_grad and torch.is_grad_enabled():
            return self.casts.cast(x, type_text(missing))
        return x


def _linearity(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """How an operation is linear in this call."""
    numbers = [one for one in args if isinstance(one, (int, float, complex))]
    if (operation.adds_numbers and any(numbers)) or kwargs.get("rounding_mode"):
        return ""
    dtypes = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)]
    is_rounded = any(not (one.is_floating_point or one.is_complex) for one in dtypes)
    return "" if is_rounded else operation.linearity


def innermost_mode() -> ContextMode | None:
    """The context that this thread is inside of, paused or not."""
    for place in range(num_modes() - 1, -1, -1):
        mode = mode_at(place)
        if isinstance(mode, ContextMode):
            return mode
    return None


def find_mode() -> ContextMode | None:
    """The context that sees what this thread does now; None inside of what it does itself.

    Backwards, verbs and custom Functions run inside a context as if there were none.
    """
    if not is_mode_enabled():
        return None
    mode = innermost_mode()
    return None if mode is None or mode.is_asleep else mode


def show_method(name: str) -> None:
    """Let contexts see a method of tensors that torch shows to no mode."""
    method = getattr(torch.Tensor, name)

    @wraps(method)
    def seen(*args: Any, **kwargs: Any) -> Any:
        is_seen = find_mode() is not None
        call = partial(handle_torch_function, seen, args[:1]) if is_seen else method
        return call(*args, **kwargs)

    seen.__module__ = "torch"
    setattr(torch.Tensor, name, seen)


show_method("as_subclass")
show_method("set_")


@contextmanager
def asleep(mode: ContextMode, *, is_asleep: bool = True) -> Iterator[None]:
    """Let a context see nothing inside, or, though it was paused, see again."""
    before = mode.is_asleep
    mode.is_asleep = is_asleep
    try:
        yield
    finally:
        mode.is_asleep = before


def collect(tree: Any, found: list[torch.Tensor]) -> None:
    """Add the tensors in nested lists, tuples and dicts to ``found``, in their order."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            collect(entry, found)
    elif isinstance(tree, dict):
        for entry in tree.values():
            collect(entry, found)


def mark(tree: Any, text: str) -> None:
    """Give the tensors in nested lists, tuples and dicts a type."""
    if isinstance(tree, torch.Tensor):
        tree.__dict__[ATTRIBUTE] = text
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            mark(entry, text)
    elif isinstance(tree, dict):
        for entry in tree.values():
            mark(entry, text)
