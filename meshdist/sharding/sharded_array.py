"""Provide ``ShardedArray``: a global array of which each rank holds its shard."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ..annotations.axis_types import find_type
from ..annotations.tensor_specs import mark_spec
from ..arrays import Array, as_tensor, shape_text
from ..checking.call_sites import one_frame
from ..dtypes import dtype_name
from ..error_text import explain, with_article
from ..errors import ArgumentError, AxisError, KindError, MeshError, ShapeError
from ..mesh.current_mesh import require_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.partition_spec import PartitionSpec
from ..mesh.placement import Box, box_text, index_of, shape_of
from ..mesh.spec import NamedSharding, sharding_of, shardings_of_sides
from ..runtime.graph_breaks import untraced
from .array_methods import (
    Shard,
    checked_dims,
    mean_of_shard,
    slice_shard,
    sum_of_shard,
    summed_sharding,
)
from .descriptions import (
    Drawing,
    SvgDrawing,
    array_type,
    draw_sharding,
    draw_sharding_svg,
    mesh_text,
)
from .elementwise import ElementwiseArray
from .resharding import Move, cached_move

__all__ = ["ShardedArray"]


def checked_sharding(sharding: object, call: str) -> NamedSharding:
    """Return a NamedSharding that contains this rank, or raise."""
    if isinstance(sharding, PartitionSpec):
        naming = "NamedSharding(mesh, spec)"
        try:
            sharding = NamedSharding(require_current_mesh(call, naming=naming), sharding)
        except AxisError as error:
            raise with_outer_mesh_hint(error, None, f"pass the mesh: {naming}") from None
    if not isinstance(sharding, NamedSharding):
        raise KindError(
            f"{call} takes a sharding",
            expected="a NamedSharding, or a PartitionSpec inside `with mesh:`",
            found=f"{sharding!r}, {with_article(type(sharding).__name__)}",
            fix="pass NamedSharding(mesh, P('dp'))",
        )
    if not isinstance(sharding.mesh, DeviceMesh):
        raise MeshError(
            f"{call} needs a DeviceMesh: a Layout has no processes",
            where=repr(sharding),
            expected="a DeviceMesh",
            found=with_article(type(sharding.mesh).__name__),
            fix="create one: md.DeviceMesh('cpu', layout)",
        )
    coordinate_in(sharding.mesh, call)
    return sharding


def check_shard(
    call: str, sharding: NamedSharding, shape: tuple[int, ...], local_shape: tuple[int, ...]
) -> Box:
    """Return the box of this rank's shard; raise if it has another shape."""
    box = sharding.placement(shape).box(coordinate_in(sharding.mesh, call))
    expected_shape = shape_of(box)
    if expected_shape == local_shape:
        return box
    raise ShapeError(
        f"{call}: the local array is not a shard of an array of shape {shape_text(shape)}",
        where=f"{mesh_text(sharding.mesh)}, {sharding.spec!r}",
        expected=f"shape {shape_text(expected_shape)}, this rank's shard",
        found=f"shape {shape_text(local_shape)}",
        fix="call md.device_put(x, sharding) if every rank has the global array"
        if shape == local_shape
        else "pass the global shape, the same on every rank, or the sizes of the shards: "
        "md.NamedSharding(mesh, spec, shard_sizes={dim: sizes})",
    )


class ShardedArray(ElementwiseArray):
    """A global array on a mesh, of which this rank holds ``local``; nothing is copied or sent.

    Elementwise operators, ufuncs and torch functions, slices, ``sum`` and ``mean`` use only local
    shards. Only ``full()``, ``reshard()`` and meshdist functions that take sharded arrays
    communicate.

    Args:
        local: this rank's shard: a torch tensor, or an array of NumPy or CuPy.
        sharding: a ``NamedSharding``, or a ``PartitionSpec`` on the current mesh.
        shape: the global shape, the same on every rank; None if all shards of a dim have one size,
            or ``sharding`` has their sizes.

    Gradient: ``x.local.grad`` is this rank's shard of the gradient.

    Raises:
        KindError: not an array, or not a sharding.
        MeshError: the sharding is on a bare ``Layout``.
        NotInGroupError: this rank is not in the mesh.
        ShapeError: ``local`` is not this rank's shard of an array of that shape.
        ArgumentError: bool partial sums.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = md.ShardedArray(torch.ones(4, 3), md.NamedSharding(mesh, md.P("dp")))
        ...     return repr(2 * x[:5]), (2 * x).sum().full()
        >>> md.simulate(program, 2)[1][1]
        tensor(48.)
    """

    local: Array
    """This rank's shard: the array itself, no copy."""
    sharding: NamedSharding
    """The sharding of the global array."""
    shape: tuple[int, ...]
    """The global shape."""
    __slots__: ClassVar[tuple[str, ...]] = ("_box", "local", "shape", "sharding")
    _box: Box

    @untraced
    def __init__(
        self,
        local: Array,
        sharding: NamedSharding | PartitionSpec,
        shape: Sequence[int] | None = None,
    ) -> None:
        sharding = checked_sharding(sharding, "ShardedArray")
        if isinstance(local, np.generic):
            local = np.asarray(local)
        as_tensor(local, argument="local", operation="ShardedArray", writable=False)
        local_shape = tuple(local.shape)
        if shape is None:
            shape = sharding.whole_shape(local_shape)
        shape = sharding.placement(shape).shape
        box = check_shard("ShardedArray", sharding, shape, local_shape)
        if sharding.spec.unreduced and dtype_name(local.dtype) == "bool":
            raise ArgumentError(
                "bool values cannot be partial sums",
                where=mesh_text(sharding.mesh),
                expected="numbers for an unreduced sharding",
                found=array_type(local.dtype, shape, sharding),
                fix="convert them first, for example to int32",
            )
        if isinstance(local, torch.Tensor) and find_type(local) is None:
            mark_spec(local, sharding.spec)  # As md.annotate does: typed contexts read the spec.
        self.local, self.sharding, self.shape, self._box = local, sharding, shape, box

    # ------------------------------------------------------------------ properties

    @property
    def dtype(self) -> Any:
        """The dtype, of the local array's library."""
        return self.local.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self.sharding.mesh

    @property
    def addressable_shards(self) -> list[Shard]:
        """The shards that this rank holds: a list of one shard."""
        return [Shard(index_of(self._box), self.sharding.replica(self.mesh.get_rank()), self.local)]

    @property
    def is_fully_replicated(self) -> bool:
        """Return whether every rank holds the global array."""
        return self.sharding.is_fully_replicated

    def __repr__(self) -> str:
        kind = array_type(self.dtype, self.shape, self.sharding)
        here = f"{mesh_text(self.mesh)} holds {box_text(self._box)}"
        return f"ShardedArray({kind}, {here}: {self.local!r})"

    def visualize(self, *, svg: bool = False, width: int | None = None) -> str:
        """Return a picture of the mesh and each rank's part; nothing is sent.

        Consoles and notebooks show the returned str as a picture.

        Args:
            svg: an SVG document instead of text.
            width: maximal text columns, or pixels; 80 or 900 by default.

        Example:
            >>> import torch, meshdist as md
            >>> def program():
            ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            ...     return md.zeros((5, 3), sharding=md.NamedSharding(mesh, md.P("dp"))).visualize()
            >>> print(md.simulate(program, 2)[0].splitlines()[-1])
            shards: a = [0:3, 0:3], b = [3:5, 0:3]
        """
        what = (self.shape, self.dtype, self.sharding)
        rank = self.mesh.get_rank()
        if svg:
            return SvgDrawing(draw_sharding_svg(*what, rank=rank, width=width or 900))
        return Drawing(draw_sharding(*what, rank=rank, width=width))

    def _repr_svg_(self) -> str:
        """The picture that a notebook shows."""
        return self.visualize(svg=True)

    # ------------------------------------------------------------------ communication

    def full(self) -> Array:
        """Gather the global array on every rank; collective over the mesh.

        Returns: an array of the local array's library; the local array itself if every rank holds
            the global array already.

        Gradient: this rank's part of the gradient, which is equal on all ranks.
        """
        return self.reshard(PartitionSpec()).local

    @one_frame
    def reshard(self, dst: NamedSharding | PartitionSpec | str, **sizes: int) -> ShardedArray:
        """Return the array with another sharding, or itself if nothing changes; collective.

        Args:
            dst: the new sharding, a ``PartitionSpec`` on this array's mesh, or a pattern. A pattern
                with "->" has the current sharding on its left, and may regroup dims.
            sizes: sizes inside of a pattern's groups.

        Gradient: resharded back, with unreduced and reduced exchanged.

        Raises:
            KindError: not a sharding.
            ShapeError: the spec does not fit the shape.
            MeshError: a mesh with other ranks.
            PatternError: not a pattern. ArgumentError: the left side contradicts the array.
        """
        if isinstance(dst, NamedSharding) and dst == self.sharding:
            return self
        key = self.sharding, dst, self.shape, *sizes.items()
        move = cached_move(self.mesh, key, lambda: self._new_move(dst, sizes))
        if not move.keeps_shards:
            return ShardedArray(move.of(self.local), move.target, move.target_shape)
        is_same = move.target == self.sharding
        return self if is_same else ShardedArray(self.local, move.target, self.shape)

    def _new_move(self, dst: Any, sizes: Mapping[str, int]) -> Move:
        source, shape, pattern = self.sharding, self.shape, None
        if isinstance(dst, str) and "->" in dst:
            pattern = dst
            source, dst = shardings_of_sides(pattern, self.mesh, shape, sizes)
            if source.placement(shape) != self.sharding.placement(shape):
                raise ArgumentError(
                    f"reshard: the array's sharding does not match the left side of {pattern!r}",
                    where=mesh_text(self.mesh),
                    expected=repr(self.sharding.spec),
                    found=repr(source.spec),
                    fix="write the right side alone, since the array has a sharding",
                )
        elif isinstance(dst, str):
            dst = NamedSharding.from_pattern(dst, self.mesh, shape, sizes)
        elif isinstance(dst, PartitionSpec):
            dst = NamedSharding(self.mesh, dst)
        return Move(source, checked_sharding(dst, "reshard"), shape, pattern)

    # ------------------------------------------------------------------ parts and sums

    def __getitem__(self, index: Any) -> ShardedArray:
        """Return a slice of the global array, of which each rank keeps its part.

        A sharded dim takes slices with positive steps, other dims also numbers. The result shares
        this array's memory.
        """
        placement = self.sharding.placement(self.shape)
        found = slice_shard(index, placement.dims, self._box)
        spec = self.sharding.spec
        sharding = sharding_of(
            self.mesh, found.dims, unreduced=spec.unreduced, reduced=spec.reduced
        )
        return ShardedArray(
            self.local[found.local], sharding, tuple(split.size for split in found.dims)
        )

    def sum(
        self,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
        axis: Any = None,
        keepdims: bool = False,
        out: None = None,
    ) -> ShardedArray:
        """Sum over dims without communication.

        If a dim is sharded, the result is unreduced over its axes: each rank holds a partial sum.
        ``reshard`` or ``full`` adds the partial sums.

        Args:
            dim: a dim or several, or None for all; ``axis`` is NumPy's name for it.
            keepdim: keep them with size 1; ``keepdims`` is NumPy's name for it.
            dtype: of the result, in the local array's library.
            out: must be None.

        Gradient: each element gets the result's gradient.
        """
        dims, keepdim = self._summed_dims("sum", dim, axis, keepdim or keepdims, out)
        shape, sharding = summed_sharding(self.shape, self.sharding, dims, keepdim=keepdim)
        total = sum_of_shard(self.local, dims, keepdim=keepdim, dtype=dtype)
        return _of_partial_sums(total, sharding, shape)

    def mean(
        self,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
        axis: Any = None,
        keepdims: bool = False,
        out: None = None,
    ) -> ShardedArray:
        """Average over dims without communication. See ``sum``.

        Each rank divides its sum by the global number of elements, so that the partial sums add up
        to the mean, also with uneven shards.
        """
        dims, keepdim = self._summed_dims("mean", dim, axis, keepdim or keepdims, out)
        shape, sharding = summed_sharding(self.shape, self.sharding, dims, keepdim=keepdim)
        count = math.prod(self.shape[dim] for dim in dims)
        mean = mean_of_shard(self.local, dims, count, keepdim=keepdim, dtype=dtype)
        return _of_partial_sums(mean, sharding, shape)

    def _summed_dims(
        self, call: str, dim: Any, axis: Any, keepdim: bool, out: object
    ) -> tuple[tuple[int, ...], bool]:
        if dim is not None and axis is not None:
            raise ArgumentError(f"{call}: dim and axis are the same argument: pass one of them")
        if out is not None:
            raise ArgumentError(f"{call} of a sharded array does not support out=: it must be None")
        return checked_dims(axis if dim is None else dim, self.ndim, call), bool(keepdim)

    # ------------------------------------------------------------------ conversions

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._check_holds_whole("numpy.asarray")
        array = np.asarray(self.local)
        if copy is None:
            return np.asarray(array, dtype=dtype)
        return np.array(array, dtype=dtype, copy=copy)

    def item(self) -> Any:
        """The only element, as a Python number, if every rank holds it."""
        self._check_holds_whole("item")
        return self.local.item()

    def __bool__(self) -> bool:
        self._check_holds_whole("bool")
        return bool(self.local)

    def __int__(self) -> int:
        self._check_holds_whole("int")
        return int(self.local)

    def __float__(self) -> float:
        self._check_holds_whole("float")
        return float(self.local)

    def __complex__(self) -> complex:
        self._check_holds_whole("complex")
        return complex(self.local)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self) -> Iterator[ShardedArray]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        if self.sharding.placement(self.shape).dims[0].axes:
            raise KindError(
                "a sharded array whose dim 0 is sharded cannot be iterated: its elements are on "
                "some ranks only",
                where=self._where(),
                fix="iterate over this rank's shard, x.local, or over the global array, x.full()",
            )
        return (self[index] for index in range(self.shape[0]))

    def __contains__(self, element: object) -> bool:
        self._check_holds_whole("in")
        return element in self.local

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(type(self.local)):
            raise AttributeError(f"'ShardedArray' object has no attribute {name!r}")
        raise AttributeError(
            explain(
                f"a ShardedArray has no {name}",
                where=self._where(),
                expected="an operation on shards alone: operators, ufuncs, slices, sum, mean",
                fix=f"use x.local.{name} of this rank's shard, or x.full().{name} of the global "
                "array, which communicates",
            )
        )

    def __setitem__(self, index: object, value: object) -> None:
        raise KindError(
            "a ShardedArray cannot be written in place",
            where=self._where(),
            fix="change this rank's shard, x.local[...] = value, on every rank that holds the "
            "same part",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.local, self.sharding, self.shape, self._box)

    def __copy__(self) -> ShardedArray:
        return ShardedArray(self.local, self.sharding, self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedArray:
        return ShardedArray(copy.deepcopy(self.local, memo), self.sharding, self.shape)

    def _where(self) -> str:
        kind = array_type(self.dtype, self.shape, self.sharding)
        return f"{mesh_text(self.mesh)}, array {kind}"

    def _check_holds_whole(self, call: str) -> None:
        if not self.is_fully_replicated:
            raise KindError(
                f"{call} needs the global array, and no rank holds it in full",
                where=self._where(),
                found=f"{box_text(self._box)} on this rank"
                + (", a partial sum" if self.sharding.spec.unreduced else ""),
                fix="call x.full(), which gathers it on every rank, or use x.local, this rank's "
                "shard",
            )


def _of_partial_sums(local: Array, sharding: NamedSharding, shape: tuple[int, ...]) -> ShardedArray:
    """Return ``local`` as an annotated ShardedArray of partial sums."""
    if isinstance(local, torch.Tensor):
        mark_spec(local, sharding.spec)  # Without the annotation a typed context reads "varying".
    return ShardedArray(local, sharding, shape)


def _unpickled(
    local: Array, sharding: NamedSharding, shape: tuple[int, ...], box: Box
) -> ShardedArray:
    """Return a pickled ShardedArray; raise if this rank's part is not ``box``."""
    checked_sharding(sharding, "unpickling a ShardedArray")
    own = sharding.box(sharding.mesh.get_rank(), shape)
    if own != box:
        raise ArgumentError(
            "this pickle holds the shard of another rank",
            where=mesh_text(sharding.mesh),
            expected=f"the part {box_text(own)}",
            found=f"{box_text(box)} of shape {shape_text(shape)}",
            fix="load each pickle on the rank that saved it; to send a shard to another rank, "
            "send x.local",
        )
    return ShardedArray(local, sharding, shape)
