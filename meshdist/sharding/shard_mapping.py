"""Map a function of shards to a function of global arrays: ``md.shard_map``, as in JAX.

Worked example: two ranks along axis 'i' map ``f(x, w) = x * w``; x has three elements.

                 rank 0            rank 1
    the call     x, w              x, w            wholes, equal on both ranks: nothing is sent
    f gets x     0, 1              2               float32[2@i] and float32[1@i]: P('i')
    f gets w     3                 3               float32[]: P()
    f returns    0, 3              6               it varies over 'i', which out_specs mentions
    sizes        2, 1              2, 1            exchanged, since x is cut unevenly
    the result   a ShardedArray of three elements, of which each rank holds its own

The gradients of x and w are global: x's is gathered, and w's is summed by the cast that
``md.typed`` inserts. With ``out_specs=P()`` the call would raise, because ranks hold different
values.

    >>> import torch, meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("i",))
    ...     specs = {"in_specs": (md.P("i"), md.P()), "out_specs": md.P("i")}
    ...     f = md.shard_map(torch.mul, mesh=mesh, **specs)
    ...     x, w = torch.arange(3.0).requires_grad_(), torch.tensor(3.0, requires_grad=True)
    ...     y = f(x, w)
    ...     y.full().sum().backward()
    ...     return y.local.tolist(), x.grad.tolist(), w.grad.item()
    >>> md.simulate(program, 2)
    [([0.0, 3.0], [3.0, 3.0, 3.0], 3.0), ([6.0], [3.0, 3.0, 3.0], 3.0)]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import optree
import torch

from ..annotations.tensor_specs import mark_spec
from ..arrays import as_tensor
from ..checking.call_sites import one_frame
from ..collectives.torch_private import HiddenFromModes
from ..error_text import with_article
from ..errors import KindError, LengthError, MeshdistError, MeshError, UnequalError
from ..functional.equality_checks import check_replicas, is_compared
from ..mesh.current_mesh import get_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.spec import NamedSharding
from ..typed_mode.context import find_context
from ..typed_mode.mode import typed, untyped
from .api import shard
from .descriptions import mesh_text
from .resharding import kinds_of, typed_operand
from .shard_map_specs import (
    Infer,
    MappedArray,
    find_argument,
    get_result,
    reject,
    specs_of_leaves,
    value_text,
    with_common_shapes,
)
from .sharded_array import ShardedArray

__all__ = ["shard_map"]

_mapped_over: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("meshdist_shard_map", default=())
"""The meshes of the enclosing mapped functions."""


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any = Infer,
    mesh: DeviceMesh | None = None,
    axis_names: frozenset[str] | set[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Map ``f``, which works on each rank's shards, to a function of global arrays, as in JAX.

    All ranks of the mesh call the mapped function with equal arguments, by position. ``f`` may call
    the collectives of ``md.lax`` on the mesh, which is current inside. Without ``f`` it is a
    decorator.

    Args:
        f: takes this rank's shards and returns shards: torch tensors, or arrays of NumPy or CuPy,
            in any optree nesting.
        out_specs: the sharding of each result: a tree prefix of specs. A spec is a
            ``PartitionSpec``, a pattern such as ``"b@dp d"``, or a ``NamedSharding`` on the mesh,
            which may have shard sizes. Values must be equal along axes that the spec leaves out.
        in_specs: the sharding of each argument: a tree prefix of the argument tuple, of specs,
            None (passes the argument unchanged) or ``shard_map.Infer`` (uses the sharding of a
            ``ShardedArray``).
        mesh: the mesh whose axes the specs name; None takes the current mesh at each call.
        axis_names: must be empty, or name all axes.
        check_vma: run ``f`` in ``md.typed(mesh)``, and reject results that contradict their spec.
            If False nothing is cast, summed or checked.

    Returns:
        The mapped function. It accepts a ``ShardedArray``, sharded as its spec states; a global
        array of any size, equal on all ranks, which ``md.shard`` cuts; or a Python number, passed
        unchanged. It returns the result of ``f`` with a ``ShardedArray`` for each array, in the
        same memory.

    Gradient:
        As on one device: global for global arrays, on every rank, and sharded like the argument
        for a ``ShardedArray``.

    Cost:
        Only ``f`` communicates, and ``md.typed`` for its sums in the backward. If an argument is
        cut unevenly, ranks exchange the result shapes: one all-gather of objects.

    Raises:
        KindError: not a function, spec or array; arguments by name. PatternError, AxisError,
            ShapeError, DtypeError, MeshError: a spec does not fit.
        LengthError: ``in_specs`` for another number of arguments.
        ArgumentError: specs of another structure; a ``ShardedArray`` with another sharding.
        AxisTypeError: a global array varies; a result varies over an axis that its spec leaves
            out, or is unreduced without ``P(unreduced=)``.
        MeshError: ``axis_names`` other than all; a nested map over the same mesh.
        UnequalError: on simulated ranks, and at debug level DETAIL: global arrays, or results,
            differ along an axis over which their spec requires equal values.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("i",))
        ...     @md.shard_map(mesh=mesh, in_specs=(md.P(None, "i"), md.P("i")), out_specs=md.P())
        ...     def product(x, w):
        ...         return md.lax.psum(x @ w, "i")
        ...     return product(torch.ones(2, 4), torch.ones(4, 3)).full().tolist()
        >>> md.simulate(program, 2)[0]
        [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]

    Source: ``jax.shard_map``, https://docs.jax.dev/en/latest/notebooks/shard_map.html.
    """
    if f is None:
        return partial(
            shard_map,
            out_specs=out_specs,
            in_specs=in_specs,
            mesh=mesh,
            axis_names=axis_names,
            check_vma=check_vma,
        )
    if not callable(f):
        raise KindError(
            "shard_map takes a function",
            found=f"{f!r}, {with_article(type(f).__name__)}",
            fix="name the rest: shard_map(f, mesh=mesh, in_specs=..., out_specs=...)",
        )
    name = getattr(f, "__name__", type(f).__name__)
    if in_specs is None:
        raise KindError(
            f"shard_map of {name}: in_specs is None",
            expected="a spec, None or shard_map.Infer for each argument",
            fix="write in_specs=P() if every rank gets all arguments in full, or leave it out",
        )
    options = (in_specs, out_specs, axis_names, bool(check_vma))
    mapping = _Mapping(f, name, mesh, *options, *_parameters_of(f))

    @wraps(f)
    def mapped(*args: Any, **by_name: Any) -> Any:
        if by_name:
            raise KindError(
                f"shard_map of {name}: arguments must be passed by position",
                found=", ".join(f"{each}=..." for each in by_name),
                fix=f"bind the rest before: functools.partial({name}, {next(iter(by_name))}=...)",
            )
        return mapping(args)

    return one_frame(mapped)


shard_map.Infer = Infer  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Mapping:
    """A function mapped by shard_map, with its specs and options."""

    f: Callable[..., Any]
    name: str
    mesh: DeviceMesh | None
    in_specs: Any
    out_specs: Any
    axis_names: Any
    check_vma: bool
    parameters: tuple[str, ...]
    """The names of f's parameters by position."""
    rest: str
    """The name of the parameter that takes all further arguments."""

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Call the function on this rank's parts; return ShardedArrays."""
        mesh = get_mesh("shard_map", self.mesh)
        self._check_mesh(mesh)
        leaves, tree = self._arguments(mesh, args)
        is_even = all(leaf.is_even for leaf in leaves if isinstance(leaf, MappedArray))
        # Cut global arrays outside of the context: it did not observe how they were computed, and
        # needs no types for them, since they are equal on all ranks.
        cut = [
            shard(leaf.value, leaf.sharding)
            if isinstance(leaf, MappedArray) and not isinstance(leaf.value, ShardedArray)
            else leaf
            for leaf in leaves
        ]
        with self._inside(mesh):
            local = [self._own(leaf) if isinstance(leaf, MappedArray) else leaf for leaf in cut]
            result = self.f(*tree.unflatten(local))
            return self._wrapped(mesh, result, is_even=is_even)

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        """Raise if ``mesh`` lacks names, f runs mapped over it, or ``axis_names`` omits some."""
        if mesh.mesh_dim_names is None:
            raise MeshError(
                f"shard_map of {self.name} needs a mesh with axis names",
                found=repr(mesh),
                fix="name its axes: mesh_dim_names=('dp', 'tp')",
            )
        if mesh in _mapped_over.get():
            raise MeshError(
                f"shard_map of {self.name} inside of a function that is mapped over the same mesh",
                where=mesh_text(mesh),
                expected="a call outside of it, since f gets this rank's shards",
                fix=f"call {self.name} itself there",
            )
        names = self.axis_names
        if not isinstance(names, (set, frozenset)):
            raise KindError(
                f"shard_map of {self.name}: axis_names must be a set of names",
                found=f"{names!r}, {with_article(type(names).__name__)}",
                fix="leave it out: f works on shards over all axes",
            )
        if names and names != set(mesh.axis_names):
            raise MeshError(
                f"shard_map of {self.name} over only some axes of the mesh is not supported",
                where=mesh_text(mesh),
                expected=f"all of {', '.join(map(repr, mesh.axis_names))}, or no axis_names",
                found=f"axis_names={{{', '.join(map(repr, sorted(names, key=repr)))}}}",
                fix="leave it out, and leave the other axes out of the specs",
            )

    @contextmanager
    def _inside(self, mesh: DeviceMesh) -> Iterator[None]:
        """Make ``mesh`` current, typed if ``check_vma``; record that f is mapped over it."""
        token = _mapped_over.set((*_mapped_over.get(), mesh))
        try:
            if self.check_vma:
                with typed(mesh):
                    yield
            else:
                with mesh, untyped():
                    yield
        finally:
            _mapped_over.reset(token)

    def _arguments(self, mesh: DeviceMesh, args: Any) -> tuple[list[Any], Any]:
        """Return the leaves of ``args``, arrays as ``MappedArray``, and the tree; or raise."""
        names = list(self.parameters[: len(args)])
        names += [f"{self.rest}[{index}]" for index in range(len(args) - len(names))]
        if isinstance(self.in_specs, tuple) and len(self.in_specs) != len(args):
            raise LengthError(
                f"shard_map of {self.name}: a call with {len(args)} arguments, in_specs of "
                f"{len(self.in_specs)}",
                expected=f"in_specs={self.in_specs!r}",
                found=f"arguments {', '.join(names) or 'none'}",
                fix="pass a spec for each argument; None passes an argument unchanged",
            )
        specs = specs_of_leaves(self.name, "in_specs", self.in_specs, args)
        accessors, values, tree = optree.tree_flatten_with_accessor(args, none_is_leaf=True)
        leaves: list[Any] = []
        problems: list[tuple[str, MeshdistError]] = []
        for accessor, value, spec in zip(accessors, values, specs, strict=True):
            index = accessor[0].entry
            path = accessor[1:].codify(names[index])
            try:
                found = find_argument(mesh, self.mesh, value, spec, path)
                leaves.append(value if found is None else found)
            except MeshdistError as error:
                shown = f"argument {index}, {path}: {value_text(value)}, spec {spec!r}"
                problems.append((shown, error))
        if problems:
            reject(f"shard_map of {self.name}: arguments do not match in_specs", mesh, problems)
        return leaves, tree

    def _own(self, argument: MappedArray) -> Any:
        """Return this rank's shard of an argument, typed by its sharding in a typed context."""
        local, mode = argument.value.local, find_context()
        if mode is None or not isinstance(local, torch.Tensor):
            return local
        operation = f"shard_map of {self.name}, argument {argument.path},"
        sharding = argument.sharding
        cast = typed_operand(mode, operation, local, sharding, kinds_of(sharding), sharding.mesh)
        return _marked(cast, sharding)

    def _wrapped(self, mesh: DeviceMesh, result: Any, *, is_even: bool) -> Any:
        """Return f's result with ShardedArrays; raise if a spec does not fit.

        Args:
            is_even: whether all arguments have equal shard sizes, as results then must.
        """
        specs = specs_of_leaves(self.name, "out_specs", self.out_specs, result)
        accessors, values, tree = optree.tree_flatten_with_accessor(result, none_is_leaf=True)
        arrays: list[MappedArray] = []
        problems: list[tuple[str, MeshdistError]] = []
        for accessor, value, spec in zip(accessors, values, specs, strict=True):
            if value is None:
                continue
            path = accessor.codify("result")
            try:
                arrays.append(
                    get_result(mesh, self.mesh, value, spec, path, is_typed=self.check_vma)
                )
            except MeshdistError as error:
                problems.append((f"{path}: {value_text(value)}, spec {spec!r}", error))
        if problems:
            reject(f"shard_map of {self.name}: results do not match out_specs", mesh, problems)
        if not is_even or is_compared(mesh.world):
            arrays = with_common_shapes(self.name, mesh, arrays, is_even=is_even)
        wrapped = iter([self._sharded(array) for array in arrays])
        return tree.unflatten(None if value is None else next(wrapped) for value in values)

    def _sharded(self, result: MappedArray) -> ShardedArray:
        """Return a result's ShardedArray; if ``check_vma``, raise if replicas differ."""
        local, sharding = result.value, result.sharding
        if self.check_vma:
            with HiddenFromModes():
                tensor = as_tensor(
                    local, argument=result.path, operation="shard_map", writable=False
                )
            what = f"{result.path} of shard_map of {self.name}, spec {sharding.spec!r}"
            try:
                check_replicas(tensor, sharding.mesh, sharding.replicated_axes, what, None)
            except UnequalError as error:
                raise UnequalError(
                    f"shard_map of {self.name}: {result.path} is not the same on every rank",
                    where=error.where,
                    expected="equal values along each axis that the spec leaves out",
                    found=error.found,
                    fix="name the axis in out_specs; or call lax.pvary(x, axis) before x meets a "
                    "number that differs by rank, such as lax.axis_index(axis)",
                ) from None
        if isinstance(local, torch.Tensor):
            local = _marked(local, sharding)
        with HiddenFromModes():
            return ShardedArray(local, sharding, result.shape)


def _parameters_of(f: Callable[..., Any]) -> tuple[tuple[str, ...], str]:
    """Return f's positional parameters and its ``*args``, by name."""
    try:
        found = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # A C function has no signature.
        return (), "args"
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = next((each.name for each in found if each.kind == each.VAR_POSITIONAL), "args")
    return tuple([each.name for each in found if each.kind in plain]), rest


def _marked(x: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    """Return an alias of ``x`` annotated with the sharding's spec; ``x`` is unchanged."""
    with HiddenFromModes():
        return mark_spec(x.view_as(x), sharding.spec)
