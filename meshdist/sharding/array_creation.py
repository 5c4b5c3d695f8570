"""Create sharded arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Number
from typing import Any

import numpy as np
import torch

from ..arguments import get_integer, get_shape
from ..arrays import Array, as_tensor, like as as_array_of, shape_text
from ..collectives.value_comparison import agree
from ..dtypes import dtype_name
from ..error_text import with_article
from ..errors import (
    ArgumentError,
    DtypeError,
    KindError,
    LengthError,
    ShapeError,
    UnequalError,
)
from ..mesh.definition import select_device
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import PartitionSpec
from ..mesh.placement import Box, box_text, index_of, shape_of
from ..mesh.spec import NamedSharding
from .descriptions import mesh_text
from .sharded_array import ShardedArray, checked_sharding

__all__ = [
    "empty",
    "full",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "ones",
    "randn",
    "zeros",
]

_BLOCK = 16
_PIECE = 1 << 18
"""Numbers in one piece: some MiB, many blocks."""


def draw_box(
    draw: Callable[[int], torch.Tensor],
    shape: Sequence[int],
    box: Box,
    *,
    piece: int | None = _PIECE,
) -> torch.Tensor:
    """Return the part ``box`` of an array that ``draw`` fills in row-major order.

    Args:
        draw: returns that many new numbers, as a 1-D tensor.
        piece: the count of numbers in a draw, a multiple of 16; None draws all in one call, since
            CUDA's numbers depend on the total length.

    Example:
        >>> numbers = iter(range(100))
        >>> def draw(count):
        ...     return torch.tensor([next(numbers) for _ in range(count)])
        >>> draw_box(draw, (20, 4), ((3, 5), (1, 3)), piece=16)
        tensor([[13, 14],
                [17, 18]])
    """
    # Generators draw in sequence, so every rank draws all numbers. torch's CPU generator draws
    # normal numbers in blocks of 16 and redraws the last 16 if the length is not a multiple.
    # Pieces of at least 16 therefore yield the same numbers as one draw.
    count = math.prod(shape)
    if piece is None or count < piece + _BLOCK:
        return draw(count).view(tuple(shape))[index_of(box)].clone()
    sizes = shape_of(box)
    kept: list[torch.Tensor] = []
    begin = 0
    while begin < count:
        end = begin + piece if count - begin - piece >= _BLOCK else count
        drawn = draw(end - begin)
        first, stop = _num_before(begin, shape, box), _num_before(end, shape, box)
        if first < stop:
            kept.append(drawn[_positions_in(first, stop, shape, box) - begin])
        begin = end
    return torch.cat(kept).view(sizes) if kept else drawn[:0].clone().view(sizes)


def _num_before(position: int, shape: Sequence[int], box: Box) -> int:
    """Return the number of a box's elements before ``position`` in row-major order.

    Example:
        >>> _num_before(7, (3, 4), ((0, 3), (1, 3)))
        4
    """
    count = 0
    for dim, (start, stop) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        index, position = divmod(position, stride)
        inner = math.prod(end - begin for begin, end in box[dim + 1 :])
        count += (min(max(index, start), stop) - start) * inner
        if not start <= index < stop:
            break
    return count


def _positions_in(first: int, stop: int, shape: Sequence[int], box: Box) -> torch.Tensor:
    """Return the row-major indices of a box's elements ``first`` to ``stop``."""
    rest = torch.arange(first, stop, device="cpu")
    positions = torch.zeros_like(rest)
    stride = 1
    for (start, end), size in zip(reversed(box), reversed(shape), strict=True):
        positions += (rest % (end - start) + start) * stride
        rest //= end - start
        stride *= size
    return positions


_Sharding = NamedSharding | PartitionSpec


def zeros(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    sharding: _Sharding,
    device: Any = None,
    like: Array | None = None,
) -> ShardedArray:
    """Create a sharded array of zeros; every rank creates its own shard.

    Args:
        shape: the global shape.
        dtype: of torch or NumPy, or its name; a NumPy dtype creates NumPy arrays. None takes the
            dtype of ``like``, else the library's default.
        sharding: a ``NamedSharding``, or a ``PartitionSpec`` on the current mesh.
        device: the device of torch tensors; None takes the device of ``like``, else the mesh's.
        like: an array of the library to use (torch, NumPy or CuPy); None creates tensors.

    Cost: nothing is sent; each rank allocates its shard.

    Raises:
        KindError, MeshError, NotInGroupError: as ``ShardedArray``, for the sharding.
        ShapeError: the sharding does not fit the shape. DtypeError: the library has no such dtype.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     return md.zeros((5, 2), sharding=md.NamedSharding(mesh, md.P("dp"))).local.shape
        >>> md.simulate(program, 2)
        [torch.Size([3, 2]), torch.Size([2, 2])]
    """
    making, where, shape = _begin("zeros", shape, dtype, sharding, device, like)
    local = making.module.zeros(_local_shape(where, shape), **making.options())
    return ShardedArray(local, where, shape)


def ones(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    sharding: _Sharding,
    device: Any = None,
    like: Array | None = None,
) -> ShardedArray:
    """Create a sharded array filled with 1. See ``zeros``.

    Along unreduced axes, coordinate 0 has the values and the others have zeros.
    """
    making, where, shape = _begin("ones", shape, dtype, sharding, device, like)
    make = making.module.ones if _holds_values(where, shape) else making.module.zeros
    return ShardedArray(make(_local_shape(where, shape), **making.options()), where, shape)


def full(
    shape: int | Sequence[int],
    fill_value: complex,
    dtype: Any = None,
    *,
    sharding: _Sharding,
    device: Any = None,
    like: Array | None = None,
) -> ShardedArray:
    """Create a sharded array filled with a value. See ``zeros``.

    Along unreduced axes, coordinate 0 has the value and the others have zeros.

    Args:
        fill_value: a number; it sets the dtype if ``dtype`` and ``like`` are None.
    """
    if not isinstance(fill_value, Number):
        raise KindError("full: fill_value must be a number", found=repr(fill_value))
    making, where, shape = _begin("full", shape, dtype, sharding, device, like)
    value = fill_value if _holds_values(where, shape) else type(fill_value)(0)
    local = making.module.full(_local_shape(where, shape), value, **making.options())
    return ShardedArray(local, where, shape)


def empty(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    sharding: _Sharding,
    device: Any = None,
    like: Array | None = None,
) -> ShardedArray:
    """Create an uninitialized sharded array. See ``zeros``."""
    making, where, shape = _begin("empty", shape, dtype, sharding, device, like)
    local = making.module.empty(_local_shape(where, shape), **making.options())
    return ShardedArray(local, where, shape)


def randn(
    shape: int | Sequence[int],
    dtype: Any = None,
    *,
    sharding: _Sharding,
    device: Any = None,
    like: Array | None = None,
    generator: Any = None,
) -> ShardedArray:
    """Draw a sharded array of normal numbers, equal to one device's draw with the same seed.

    Every rank's generator must be in the same state, for example after ``md.seed(0)``. It advances
    as if it had drawn the global array. Along unreduced axes, coordinate 0 has the numbers and the
    others have zeros.

    Args:
        shape, dtype, sharding, device, like: as for ``zeros``.
        generator: a ``torch.Generator`` or a ``numpy.random.Generator``; None takes the library's.

    Cost: ranks compare the first numbers, and every rank draws all numbers. The CPU draws in
        pieces of some MiB, and needs memory for the shard only. Other devices and CuPy allocate
        the global array temporarily.

    Raises:
        As ``zeros``. DtypeError: the dtype is not floating or complex. UnequalError: on every
        rank, if generator states differ.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     md.seed(0)
        ...     return md.randn((4, 3), sharding=md.NamedSharding(mesh, md.P("dp"))).full()
        >>> alone = torch.randn(4, 3, generator=torch.manual_seed(0))
        >>> torch.equal(md.simulate(program, 2)[1], alone)
        True
    """
    making, where, shape = _begin("randn", shape, dtype, sharding, device, like)
    _check_can_be_drawn(making.dtype)
    draw, is_in_pieces = _drawing(making, generator)
    first: list[complex] = []

    def noted(count: int) -> torch.Tensor:
        numbers = draw(count)
        if not first:
            first.extend(numbers[:4].tolist())
        return numbers

    box = where.box(where.mesh.get_rank(), shape)
    drawn = draw_box(noted, shape, box) if is_in_pieces else draw_box(noted, shape, box, piece=None)
    _check_drawn_alike(where.mesh, first)
    if not _holds_values(where, shape):
        drawn.zero_()
    return ShardedArray(in_library(drawn, making.library), where, shape)


def make_array_from_callback(
    shape: int | Sequence[int],
    sharding: _Sharding,
    data_callback: Callable[[tuple[slice, ...]], Any],
    *,
    dtype: Any = None,
) -> ShardedArray:
    """Create a sharded array from a callback that returns each rank's shard.

    Args:
        shape: the global shape.
        sharding: a ``NamedSharding``, or a ``PartitionSpec`` on the current mesh.
        data_callback: called once with the slices of this rank's shard in the global array;
            returns the shard, an array of any library or input of ``numpy.asarray``.
        dtype: to convert the data to; None keeps theirs.

    Returns: an array that shares the data's memory unless they are converted. Along unreduced
        axes, coordinate 0 has the data and the others have zeros.

    Cost: nothing is sent.

    Raises:
        As ``zeros``. ShapeError: the data do not have the shard's shape.

    Example:
        >>> import numpy as np, meshdist as md
        >>> whole = np.arange(8.0)
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     rows = md.NamedSharding(mesh, md.P("dp"))
        ...     return md.make_array_from_callback((8,), rows, lambda index: whole[index]).local
        >>> md.simulate(program, 2)[1]
        array([4., 5., 6., 7.])
    """
    call = "make_array_from_callback"
    where, shape = _checked(call, shape, sharding)
    if not callable(data_callback):
        raise KindError(
            f"{call} takes a function", found=with_article(type(data_callback).__name__)
        )
    box = where.box(where.mesh.get_rank(), shape)
    data = data_callback(index_of(box))
    data = data if hasattr(data, "shape") else np.asarray(data)
    as_tensor(data, argument="what data_callback returned", operation=call, writable=False)
    wanted = _local_shape(where, shape)
    if tuple(data.shape) != wanted:
        raise ShapeError(
            f"{call}: data_callback returned an array of the wrong shape",
            where=f"{mesh_text(where.mesh)}, {box_text(box)} of shape {shape_text(shape)}",
            expected=f"shape {shape_text(wanted)}",
            found=f"shape {shape_text(data.shape)}",
            fix="return global_array[index], with the index that data_callback receives",
        )
    if dtype is not None:
        given_dtype = Making.of(call, where.mesh, dtype, None, data).dtype
        data = data.to(given_dtype) if isinstance(data, torch.Tensor) else data.astype(given_dtype)
    if not _holds_values(where, shape):
        data = data * 0
    return ShardedArray(data, where, shape)


def make_array_from_process_local_data(
    sharding: _Sharding,
    local_data: Array,
    global_shape: Sequence[int | None] | None = None,
) -> ShardedArray:
    """Create a sharded array from each rank's shard, which may be global along some dims.

    Args:
        sharding: a ``NamedSharding``, or a ``PartitionSpec`` on the current mesh.
        local_data: this rank's part, an array of any library.
        global_shape: None, or None for a dim, multiplies the shard's size by the shard count. If
            ``local_data`` has a dim in full, it is sliced.

    Returns: an array that shares the memory of ``local_data``.

    Cost: nothing is sent.

    Raises:
        As ``zeros``. ShapeError: ``local_data`` has neither the local nor the global size.
        LengthError: not one size per dim.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     rows = md.NamedSharding(mesh, md.P("dp"))
        ...     return md.make_array_from_process_local_data(rows, torch.zeros(4, 3)).shape
        >>> md.simulate(program, 2)
        [(8, 3), (8, 3)]
    """
    call = "make_array_from_process_local_data"
    where = checked_sharding(sharding, call)
    as_tensor(local_data, argument="local_data", operation=call, writable=False)
    if global_shape is None:
        return ShardedArray(local_data, where)
    if len(global_shape) != local_data.ndim:
        raise LengthError(
            f"{call}: global_shape has {len(global_shape)} sizes, the data {local_data.ndim} dims",
            found=f"global_shape={tuple(global_shape)}, shape {shape_text(local_data.shape)}",
        )
    plain = NamedSharding(where.mesh, where.spec).placement(tuple(local_data.shape))
    shape = tuple(
        (sum(where.shard_sizes.get(dim, ())) or size * plain.dims[dim].num_blocks)
        if given is None
        else get_integer(given, f"{call}: a size of global_shape", 0)
        for dim, (given, size) in enumerate(zip(global_shape, local_data.shape, strict=True))
    )
    index = [
        slice(start, stop) if size == whole and stop - start != size else slice(None)
        for (start, stop), size, whole in zip(
            where.box(where.mesh.get_rank(), shape), local_data.shape, shape, strict=True
        )
    ]
    return ShardedArray(local_data[tuple(index)], where, shape)


# -- shared by all calls --------------------------------------------------------------------------


def _begin(
    call: str, shape: Any, dtype: Any, sharding: Any, device: Any, like: Any
) -> tuple[Making, NamedSharding, tuple[int, ...]]:
    where, shape = _checked(call, shape, sharding)
    return Making.of(call, where.mesh, dtype, device, like), where, shape


def _checked(call: str, shape: Any, sharding: Any) -> tuple[NamedSharding, tuple[int, ...]]:
    where = checked_sharding(sharding, call)
    found = get_shape(shape if isinstance(shape, (tuple, list)) else (shape,), call)
    where.placement(found)
    return where, found


def _local_shape(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    return sharding.shard_shape(shape, sharding.mesh.get_rank())


def _holds_values(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Return whether this rank's shard has the array's values; False if it adds zeros."""
    coordinate = sharding.mesh.get_coordinate() or ()
    return sharding.placement(shape).has_values(coordinate)


def _check_can_be_drawn(dtype: Any) -> None:
    is_torchs = isinstance(dtype, torch.dtype)
    if dtype is not None and not (
        (dtype.is_floating_point or dtype.is_complex) if is_torchs else dtype.kind == "f"
    ):
        raise DtypeError(
            "randn cannot draw integers",
            expected="a floating dtype" + (", or a complex one" if is_torchs else ""),
            found=str(dtype),
        )


def _drawing(making: Making, generator: Any) -> tuple[Callable[[int], torch.Tensor], bool]:
    """Return a function to draw n normal numbers, and whether it may draw pieces."""
    kinds: dict[str, Any] = {"torch": torch.Generator, "numpy": np.random.Generator}
    expected = kinds.get(making.library)
    if generator is not None and not isinstance(generator, expected or ()):
        raise KindError(
            f"randn cannot draw shards of {making.library} from "
            f"{with_article(type(generator).__name__)}",
            expected="the library's own" if expected is None else f"a {expected.__qualname__}",
        )
    if making.library == "torch":
        options = {**making.options(), "generator": generator}
        return (lambda count: torch.randn(count, **options)), making.device.type == "cpu"
    if generator is None:
        source = making.module.random.standard_normal
        return (lambda count: _as_tensor(source(count), making.dtype)), making.library == "numpy"
    dtype = making.dtype or np.dtype(np.float64)
    drawn_as = dtype if dtype in (np.float32, np.float64) else np.float64
    source = generator.standard_normal
    return (lambda count: _as_tensor(source(count, dtype=drawn_as), dtype)), True


def _check_drawn_alike(mesh: DeviceMesh, first: list[complex]) -> None:
    """Raise on all ranks if the ranks' ``first`` drawn numbers differ; collective."""
    numbers = f"{', '.join(map(str, first))}, ..."
    difference = agree(mesh.open_group(), {"": numbers}, {}, op_name="randn")
    if difference:
        raise UnequalError(
            "randn: the ranks' generators draw different numbers",
            where=f"mesh ({mesh.layout.axis_text()})",
            expected="generators in the same state, since each rank draws the global array and "
            "keeps its part",
            found=difference.found,
            fix="call md.seed(0) on every rank before the first draw",
        )


def _as_tensor(array: Array, dtype: Any) -> torch.Tensor:
    converted = array if dtype is None else array.astype(dtype, copy=False)
    return as_tensor(converted, argument="drawn", operation="randn")


@dataclass(frozen=True)
class Making:
    """The library, dtype and device of new arrays."""

    library: str  # "torch", "numpy" or "cupy"
    dtype: Any  # None takes the library's default.
    device: torch.device  # of tensors only: CuPy arrays use CuPy's current device

    @classmethod
    def of(cls, call: str, mesh: DeviceMesh, dtype: Any, device: Any, like: Any) -> Making:
        """Return checked library, dtype and device, by default from ``like``."""
        if like is not None:
            as_tensor(like, argument="like", operation=call, writable=False)
            library = library_of(like)
            dtype = like.dtype if dtype is None else dtype
        else:
            is_numpys = isinstance(dtype, (np.dtype, type)) and dtype not in (bool, int, float)
            library = "numpy" if is_numpys and not isinstance(dtype, torch.dtype) else "torch"
        if library != "torch" and device is not None:
            raise ArgumentError(
                f"{call}: device= is for torch tensors",
                found=f"device={device!r}, and arrays of {library}",
            )
        if library == "torch" and device is None and isinstance(like, torch.Tensor):
            device = like.device
        chosen = mesh_device(mesh) if device is None else torch.device(device)
        return cls(library, _dtype_in(library, dtype, call), chosen)

    @property
    def module(self) -> Any:
        return import_module(self.library)

    def options(self) -> dict[str, Any]:
        """Return dtype and device as the library's keyword arguments."""
        made = {} if self.dtype is None else {"dtype": self.dtype}
        return {**made, "device": self.device} if self.library == "torch" else made


def library_of(array: Array) -> str:
    """Return the library of an array: "torch", "numpy" or "cupy"."""
    if isinstance(array, torch.Tensor):
        return "torch"
    return "numpy" if isinstance(array, (np.ndarray, np.generic)) else "cupy"


def in_library(tensor: torch.Tensor, library: str) -> Array:
    return tensor if library == "torch" else as_array_of(tensor, import_module(library).empty(0))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    return select_device(mesh.device_type, mesh.world) or torch.device(mesh.device_type)


def _dtype_in(library: str, dtype: Any, call: str) -> Any:
    if dtype is None or (library == "torch" and isinstance(dtype, torch.dtype)):
        return dtype
    if isinstance(dtype, torch.dtype):
        name = dtype_name(dtype)
    else:
        try:
            name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        except TypeError:
            raise KindError(f"{call} cannot use {dtype!r} as a dtype") from None
    if library == "torch":
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise DtypeError(f"{call}: torch has no dtype {name!r}")
        return found
    try:
        return np.dtype(name)
    except TypeError:
        raise DtypeError(
            f"{call}: {library} has no dtype {name!r}", fix="make torch tensors: leave like= out"
        ) from None
