"""Infer axis types through torch's functions and insert casts: ``md.typed``.

A ``TorchFunctionMode`` sees every torch function that the program calls. It casts operands that
lack an axis, runs the function without the mode, and sets the operands' joined type on the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter

from ..annotations.axis_types import (
    ANNOTATION,
    EMPTY,
    INVARIANT,
    JoinedType,
    axes_of_kind,
    find_type,
    set_type,
    type_of,
)
from ..arguments import mesh_kind_error
from ..checking.call_sites import is_between
from ..collectives.torch_private import are_transforms_active
from ..errors import MeshdistError, MeshError
from ..mesh.current_mesh import require_current_mesh
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..runtime.graph_breaks import untraced
from .context import (
    ContextMode,
    TypedHook,
    find_context,
    mark,
    paused,
)
from .custom_functions import calls_seen, run_on_items, warn_of_number
from .detail_checks import is_checked
from .function_rules import (
    OPERATIONS,
    Kind,
    TorchFunction,
    argument,
    draws,
    shape_depends_on_values,
    tensors_in,
    written_tensors,
)
from .gradients import get_grad, run_backward, run_grad, set_data, set_grad
from .provenance import Notes
from .random_draws import type_of_draw
from .type_errors import OPERATORS, as_no_type_error, mesh_text, own_norm

__all__ = ["typed", "untyped"]

_Tensor = torch.Tensor
_ORDINARY, _FREE, _DRAW = Kind.ORDINARY, Kind.FREE, Kind.DRAW
_ROWS, _SIZE = Kind.ROWS, Kind.SIZE
_SHAPE_BY_VALUES = "_shape_by_values"  # Set on a tensor whose shape depends on varying values.
_UNCOMMON = "uncommon"  # Means that operands have different types.
_NO_TENSORS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, torch.layout}
)


@contextmanager
@untraced
def typed(mesh: DeviceMesh | None = None) -> Iterator[DeviceMesh]:
    """Infer axis types and insert the reductions that each backward pass needs.

    Inside the context, every tensor has a type over each mesh axis: *invariant* (equal on every
    rank, as parameters are), *varying*, *reduced* or *unreduced*. Annotate data that differ between
    ranks with ``md.annotate``; every torch function then propagates the types. If an invariant
    value meets a varying value, the context inserts a cast whose backward is a psum, so that
    gradients equal the gradients on one device with all the data.

    The mesh is the current mesh inside, as in ``with mesh:``. You can nest contexts of the same
    mesh. Contexts are thread-local.

    Args:
        mesh: the mesh of the types; None means the current mesh.

    Returns:
        A context manager that returns the mesh.

    Cost:
        A few microseconds for each torch call. A cast copies nothing. Its backward is one psum,
        which the parameters of a bucket share from the second context on.

    Raises:
        MeshError: if there is no mesh, it has no axis names, or an outer context has another mesh.
        NotInGroupError: if this rank is not in the mesh.
        AxisTypeError: inside the context, if an operation does not support its operands' types.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     layer = torch.nn.Linear(1, 1, bias=False)
        ...     batch = md.annotate(torch.full((1, 1), 1.0 + md.get_rank()), varying="dp")
        ...     with md.typed(mesh):
        ...         md.lax.pmean(layer(batch).sum(), "dp").backward()
        ...     return layer.weight.grad.item()          # the mean of 1, 2, 3 and 4
        >>> md.simulate(program, 4)
        [2.5, 2.5, 2.5, 2.5]
    """
    mesh = _checked(require_current_mesh("typed", naming="typed(mesh)") if mesh is None else mesh)
    outer = find_context(is_awake=False)
    if outer is None:
        is_noting = mesh.caches.of(Notes).are_recorded or is_checked()
        mode = (_NotingMode if is_noting else _TypedMode)(mesh)
        with mesh, calls_seen(), mode:
            try:
                yield mesh
            finally:
                mode.casts.close()
                mode.operations.clear()
        return
    if outer.mesh != mesh:
        raise MeshError(
            "md.typed cannot be nested inside md.typed of another mesh",
            expected=f"the mesh of the outer context, {mesh_text(outer.mesh)}",
            found=mesh_text(mesh),
            fix="open one context with the mesh that has all axes",
        )
    with mesh, paused(outer, is_asleep=False):
        yield mesh


def _checked(mesh: object) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error("typed takes a mesh", mesh)
    if mesh.mesh_dim_names is None:
        raise MeshError(
            "typed needs a mesh with axis names",
            found=repr(mesh),
            fix="create the mesh with names: mesh_dim_names=('dp', 'tp')",
        )
    coordinate_in(mesh, "typed")
    return mesh


@contextmanager
@untraced
def untyped() -> Iterator[None]:
    """Pause the typed context: inside, values have no types and are not cast.

    Annotate results with a gradient history before you use them in the typed context again. Outside
    ``md.typed`` it does nothing.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = md.annotate(torch.ones(2), varying="dp")
        ...     with md.typed(mesh), md.untyped():
        ...         return md.typeof(x + 1)
        >>> md.simulate(program, 2)[0]
        float32[2]
    """
    mode = find_context()
    if mode is None:
        yield
        return
    with paused(mode):
        yield


class _TypedMode(ContextMode):
    """The torch function mode of ``md.typed``."""

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = OPERATIONS[func]
        kind = operation.kind
        if (
            kind is _FREE
            or self.is_asleep
            or (kind is _SIZE and not (args and _SHAPE_BY_VALUES in args[0].__dict__))
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        if (
            kind is not _ORDINARY
            and (kind is not _DRAW or draws(operation, args, kwargs))
            and (kind is not _ROWS or shape_depends_on_values(operation, args, kwargs))
        ) or (operation.ignores and _ignores(operation, args, kwargs)):
            return self._checked(operation, func, args, kwargs or {})
        # The common case, that all operands have one type, is inlined for speed.
        text = None
        for value in args:
            value_type = type(value)
            if value_type is _Tensor or value_type is Parameter:
                its_text = value.__dict__.get(ANNOTATION, EMPTY)[0]
                if value._backward_hooks or value._post_accumulate_grad_hooks:
                    return self._checked(operation, func, args, kwargs or {})
                if its_text is None:
                    if not value.is_leaf:
                        return self._checked(operation, func, args, kwargs or {})
                    its_text = INVARIANT
                if text is None:
                    text = its_text
                elif its_text != text:
                    return self._run_mixed_types(operation, func, args, kwargs)
            elif value_type in _NO_TENSORS:
                continue
            elif value_type is list or value_type is tuple:
                text = _type_with_items(text, value)
                if text is _UNCOMMON:
                    return self._checked(operation, func, args, kwargs or {})
            elif isinstance(value, (_Tensor, list, tuple, dict)):
                return self._checked(operation, func, args, kwargs or {})
        if kwargs:
            for value in kwargs.values():
                if (
                    isinstance(value, (_Tensor, list, tuple, dict))
                    and type(value) not in _NO_TENSORS
                ):
                    return self._run_mixed_types(operation, func, args, kwargs)
        if text is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        known_types = self.known_types.get(text)
        if known_types is None or are_transforms_active():
            return self._checked(operation, func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) is _Tensor:  # A returned operand already has an equal annotation.
            result.__dict__.setdefault(ANNOTATION, known_types)
        else:
            for x in tensors_in(result):
                x.__dict__.setdefault(ANNOTATION, known_types)
        if operation.writes and args:
            _mark_base(args[0], text)
        return result

    def _run_mixed_types(
        self,
        operation: TorchFunction,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Return a call's typed result, without checks if its types are known to join."""
        keys: list[Any] = list(range(len(args)))
        values = [*args, *kwargs.values()] if kwargs else args
        if kwargs:
            keys += kwargs
        operands = []
        texts = []
        for key, value in zip(keys, values, strict=True):
            value_type = type(value)
            if value_type is _Tensor or value_type is Parameter:
                its_text = value.__dict__.get(ANNOTATION, EMPTY)[0]
                if value._backward_hooks or value._post_accumulate_grad_hooks:
                    break
                if its_text is None:
                    if not value.is_leaf:
                        break
                    its_text = INVARIANT
                operands.append((key, value))
                texts.append(its_text)
            elif value_type in _NO_TENSORS:
                continue
            elif value_type is not tuple or not all(type(entry) in _NO_TENSORS for entry in value):
                break
        else:
            found = self.joins.get(tuple(texts))
            is_plain = not (operation.writes or self.is_checked or are_transforms_active())
            if found is not None and is_plain and not (kwargs and "out" in kwargs):
                return self._cast_and_run(func, args, kwargs, operands, found)
        return self._checked(operation, func, args, kwargs or {})

    def _cast_and_run(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        operands: Sequence[tuple[Any, torch.Tensor]],
        found: JoinedType,
    ) -> Any:
        if found.is_missing and torch.is_grad_enabled():
            args = list(args)
            for (key, operand), missing in zip(operands, found.missing, strict=True):
                if missing and operand.requires_grad:
                    cast = self.casts.cast(operand, missing)
                    if type(key) is int:
                        args[key] = cast
                    else:
                        kwargs = {**(kwargs or {}), key: cast}
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) is _Tensor and not any(result is operand for _, operand in operands):
            result.__dict__[ANNOTATION] = found.annotation
            return result
        return self._marked(result, found.text, [operand for _, operand in operands])

    def _checked(
        self, operation: TorchFunction, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``func``'s typed result; if ``operation`` is an operator, raise no TypeError."""
        try:
            return self._special(operation, func, args, kwargs)
        except MeshdistError as error:
            if operation.name in OPERATORS and isinstance(error, TypeError):
                raise as_no_type_error(error) from None
            raise

    # -- one operation, any operands ----------------------------------------------------------

    def _run(
        self,
        operation: TorchFunction,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        added: str = INVARIANT,
    ) -> Any:
        """Return ``call``'s result with the joined type of operands and ``added``; or raise."""
        written = written_tensors(operation, args, kwargs)
        out = kwargs.get("out")
        operands = self._operands(operation, args, kwargs)
        if not operands and not written and not added:
            return call(*args, **kwargs)
        joined = self.joined(operation, operands, args, kwargs, added)
        for target in written:
            self.check_write(operation, target, joined.text, operands)
        if torch.is_grad_enabled():
            swaps: dict[int, torch.Tensor] = {}
            for operand, missing in zip(operands, joined.missing, strict=False):
                if missing and operand.requires_grad:
                    swaps[id(operand)] = self.casts.cast(operand, missing)
            if swaps:
                args, kwargs = _swapped(args, swaps), _swapped(kwargs, swaps)
        result = call(*args, **kwargs)
        if written:
            for target in written:
                is_out = out is not None and not any(target is operand for operand in operands)
                set_type(target, self.widened(target, joined.text, is_out=is_out))
                _mark_base(target, type_of(target))
            if any(result is target for target in written):
                return result
        return self._marked(result, joined.text, operands)

    def _operands(
        self, operation: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors whose values the operation reads, in argument order."""
        ignored = {index for index, _ in operation.ignores}
        names = {name for _, name in operation.ignores} | {"out"}
        read = [value for index, value in enumerate(args) if index not in ignored]
        return tensors_in(read + [value for name, value in kwargs.items() if name not in names])

    def _marked(self, result: Any, text: str, operands: Sequence[torch.Tensor]) -> Any:
        """Return ``result`` with type ``text``, as a view if it is itself an operand."""
        if isinstance(result, _Tensor):
            # If the function returns an operand, the operand must keep its type.
            if type_of(result) != text and any(result is x for x in operands):
                result = result.view_as(result)
            set_type(result, text)
            return result
        if type(result) in (tuple, list):
            return type(result)([self._marked(x, text, operands) for x in result])
        mark(result, text)
        return result

    # -- the others -------------------------------------------------------------------------------

    def _special(
        self, operation: TorchFunction, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        kind = operation.kind
        if kind is Kind.GET_GRAD:
            return get_grad(args[0], func(*args))
        if kind is Kind.HOOK:
            return func(args[0], TypedHook(self.mesh, *args, **kwargs))
        if kind is Kind.SIZE:
            warn_of_number("the number of rows", args[:1], self.mesh)
            return func(*args, **kwargs)
        if kind is Kind.ROWS and shape_depends_on_values(operation, args, kwargs):
            result = self._run(operation, func, args, kwargs)
            for x in tensors_in(result):
                if axes_of_kind(type_of(x), "V"):
                    x.__dict__[_SHAPE_BY_VALUES] = True
            return result
        if operation.name == "__format__" and args[0].dim():
            return func(*args)  # The call prints the whole tensor and reads no number.
        if kind is Kind.NUMBER:
            operands = self._operands(operation, args, kwargs)
            text = self.joined(operation, operands).text
            if text:
                warn_of_number(operation.name, operands, self.mesh)
            return func(*args, **kwargs)
        if kind is Kind.BACKWARD:
            return run_backward(self, func, args, kwargs)
        if kind is Kind.GRADIENT:
            return run_grad(self, func, args, kwargs)
        if kind in (Kind.SET_GRAD, Kind.SET_DATA):
            check = set_grad if kind is Kind.SET_GRAD else set_data
            check(self, *args)
            return func(*args)
        if kind is Kind.NORM:
            operands = self._operands(operation, args, kwargs)
            if any(axes_of_kind(type_of(x), "V") for x in operands) and _is_clipping():
                raise own_norm(operands, self.mesh)
        if kind is Kind.ITEMS or (kind is Kind.NORM and isinstance(args[0], (list, tuple))):
            return run_on_items(self, operation, func, args, kwargs)
        if kind is Kind.DRAW and draws(operation, args, kwargs):
            operands = self._operands(operation, args, kwargs)
            added = type_of_draw(self, operation, operands, args, kwargs)
            return self._run(operation, func, args, kwargs, added)
        return self._run(operation, func, args, kwargs)

    def apply(self, function: type, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the typed result of ``call``, which is ``function.apply``."""
        result = self._run(TorchFunction(function.__name__), call, args, kwargs)
        self.note(result, function.__name__, (args, kwargs))
        return result


class _NotingMode(_TypedMode):
    """The typed mode before the mesh's first backward: it notes operations for errors."""

    is_noting = True

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if not self.is_asleep and type(result) not in _NO_TENSORS:
            self.note(result, OPERATIONS[func].name, (args, kwargs))
        return result

    def note(self, result: Any, name: str, operands: Any) -> None:
        notes = self.mesh.caches.of(Notes)
        notes.add(result, name, operands)
        if notes.count > 100_000:  # The program likely never calls backward.
            self.stop_notes()

    def stop_notes(self) -> None:
        if not self.is_checked:
            self.mesh.caches.of(Notes).are_recorded = False
            self.__class__ = _TypedMode  # type: ignore[assignment]


def _type_with_items(text: str | None, items: Sequence[Any]) -> str | None:
    """Return the type that ``text`` (None: any) and all items have, else ``_UNCOMMON``."""
    for item in items:
        item_type = type(item)
        if item_type is _Tensor or item_type is Parameter:
            its_text = item.__dict__.get(ANNOTATION, EMPTY)[0]
            if its_text is None and item.is_leaf:
                its_text = INVARIANT
            if text is None:
                text = its_text
            has_hooks = item._backward_hooks or item._post_accumulate_grad_hooks
            if its_text != text or its_text is None or has_hooks:
                return _UNCOMMON
        elif item_type not in _NO_TENSORS:
            return _UNCOMMON
    return text


def _is_clipping() -> bool:
    """Return whether the program is inside ``torch.nn.utils.clip_grad_norm_``."""
    frame = sys._getframe(1)
    while is_between[frame.f_code.co_filename] and frame.f_back is not None:
        if frame.f_code.co_name == "clip_grad_norm_":
            return True
        frame = frame.f_back
    return False


def _ignores(
    operation: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bool:
    """Return whether the call ignores a tensor's values, as of ``x`` in ``y.to(x)``."""
    return any(
        isinstance(argument(parameter, args, kwargs), _Tensor) for parameter in operation.ignores
    )


def _mark_base(target: Any, text: str) -> None:
    """Set the type of ``target``'s base, if it has none."""
    base = target._base if isinstance(target, _Tensor) else None
    if base is not None and find_type(base) is None:
        set_type(base, text)


def _swapped(tree: Any, swaps: Mapping[int, torch.Tensor]) -> Any:
    """Return ``tree`` with tensors replaced as in ``swaps``, by ``id``."""
    if isinstance(tree, _Tensor):
        return swaps.get(id(tree), tree)
    if type(tree) in (tuple, list):
        return type(tree)([_swapped(entry, swaps) for entry in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_swapped(entry, swaps) for entry in tree))
    if isinstance(tree, dict):
        return {key: _swapped(entry, swaps) for key, entry in tree.items()}
    return tree
