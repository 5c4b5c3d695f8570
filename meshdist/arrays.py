"""Convert NumPy and CuPy arrays to torch tensors and back, without copies.

A NumPy or CuPy array becomes a torch tensor that shares its memory, so in-place collectives write
the caller's array. Libraries are looked up in ``sys.modules``, never imported.

``as_tensor`` imports CuPy arrays by DLPack, which makes torch's current stream wait for CuPy's
queued work; ``like`` exports the same way. The function from ``find_cupy_sync`` makes CuPy's
current stream wait for torch's work on arrays that a collective used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils.dlpack import from_dlpack

from .dtypes import DTYPES, QUANTIZED, dtype_name
from .error_text import with_article
from .errors import ArgumentError, DtypeError, KindError

Array: TypeAlias = Any
"""A torch tensor, a NumPy array or a CuPy array."""

_Tensor = torch.Tensor
_strided = torch.strided

_recorded_streams: dict[int, Any] = {}
"""CuPy streams recorded on torch memory, by id, kept alive: torch uses a stream when it frees the
memory, and the process crashes if the stream was destroyed."""

_SHARED_DTYPES = frozenset(facts.name for facts in DTYPES.values() if facts.is_in_numpy)
_ARRAY_KINDS = "a torch tensor, or an array of NumPy or CuPy"


def as_tensor(x: Array, *, argument: str, operation: str, writable: bool = True) -> torch.Tensor:
    """Return a torch tensor that shares the memory of ``x``, or ``x`` if it is a torch tensor.

    Args:
        writable: False also allows read-only arrays and NumPy scalars.

    Example:
        >>> import numpy as np
        >>> a = np.zeros(3, dtype=np.float32)
        >>> as_tensor(a, argument="tensor", operation="all_reduce").add_(2.0)
        tensor([2., 2., 2.])
        >>> a
        array([2., 2., 2.], dtype=float32)
    """
    kind = type(x)  # two identity tests decide the common case in a few dozen nanoseconds
    is_known = kind is _Tensor or kind is Parameter
    if is_known and x.layout is _strided and not (x.dtype in QUANTIZED or x.is_nested):
        return x  # type: ignore[no-any-return]
    if isinstance(x, torch.Tensor):
        return _checked_tensor(x, argument, operation)
    if is_of("numpy", x, "ndarray", "generic"):
        return _from_numpy(x, argument, operation, writable)
    if is_of("cupy", x, "ndarray"):
        _check_memory(x, argument, operation)
        with x.device:  # CuPy makes torch wait for its stream on the current device, not on x's
            return from_dlpack(x)
    raise _wrong_kind(x, argument, operation)


def like(tensor: torch.Tensor, original: Array) -> Array:
    """Return ``tensor`` in the library of ``original``, sharing its memory.

    Example:
        >>> import numpy as np
        >>> like(torch.ones(2), np.zeros(2, dtype=np.float32))
        array([1., 1.], dtype=float32)
    """
    if isinstance(original, torch.Tensor):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    if is_of("numpy", original, "ndarray", "generic"):
        array = plain.numpy()
        return array[()] if is_of("numpy", original, "generic") else array
    if is_of("cupy", original, "ndarray"):
        if plain.is_cuda:
            _record_cupys_stream(plain)
        return sys.modules["cupy"].from_dlpack(plain)
    raise _wrong_kind(original, "original", "like")


def find_cupy_sync(arrays: Sequence[Array]) -> Callable[[], None] | None:
    """Return a function that makes CuPy's streams wait for torch's; None without CuPy arrays."""
    # Each call makes CuPy's current stream on the arrays' devices wait, by an event, for torch's
    # current stream there; the host does not wait. Both streams belong to the calling thread, so
    # call it after the wait for the collective, when torch's stream follows it. Arrays that the
    # collective only reads need it, too: otherwise CuPy could overwrite or reuse their memory while
    # the backend still reads.
    if "cupy" not in sys.modules:  # by far the most frequent
        return None
    of_cupy = [x for x in arrays if is_of("cupy", x, "ndarray")]
    return partial(_sync_cupy, of_cupy) if of_cupy else None


def _sync_cupy(arrays: Sequence[Array]) -> None:
    for device in {x.device.id for x in arrays}:
        theirs, ours = _cupys_stream(device), torch.cuda.current_stream(device)
        if theirs != ours:
            theirs.wait_stream(ours)


def _record_cupys_stream(tensor: torch.Tensor) -> None:
    """Prevent reuse of a tensor's memory while CuPy's stream works on it."""
    device = tensor.device.index
    tensor.record_stream(_cupys_stream(device))
    stream = sys.modules["cupy"].cuda.get_current_stream(device)
    _recorded_streams[id(stream)] = stream


def _cupys_stream(device: int) -> torch.cuda.Stream:
    """Return CuPy's current stream on a device, as a stream of torch's."""
    pointer = sys.modules["cupy"].cuda.get_current_stream(device).ptr
    if pointer in (0, 1):  # both are the default stream, which ExternalStream does not support
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device)


StreamPoint: TypeAlias = tuple[torch.cuda.Stream, torch.cuda.Event]
"""A stream, and an event on it."""


def record_event(device: torch.device) -> StreamPoint:
    """Record an event on the current stream of ``device``; return that stream and the event."""
    stream = torch.cuda.current_stream(device)
    return stream, stream.record_event()


def follow(point: StreamPoint) -> None:
    """Make this thread's current stream wait for the event, unless it is the event's stream."""
    stream, event = point
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_event(event)


def cuda_devices(arrays: Iterable[Any]) -> list[torch.device]:
    """Return the CUDA devices of arrays, also in nested lists, each once."""
    found: dict[torch.device, None] = {}
    for x in arrays:
        if isinstance(x, torch.Tensor):
            if x.is_cuda:
                found[x.device] = None
        elif isinstance(x, (list, tuple)):
            found.update(dict.fromkeys(cuda_devices(x)))
        elif hasattr(x, "__cuda_array_interface__"):
            found[torch.device("cuda", x.device.id)] = None
    return list(found)


def apart(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, copied if it overlaps ``output`` in memory."""
    # Both are contiguous. A backend may write received data before it has read all data to send.
    start, begin = tensor.data_ptr(), output.data_ptr()
    if start < begin + output.nbytes and begin < start + tensor.nbytes:
        return tensor.clone()
    return tensor


def apart_from_all(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return ``tensors``, each copied if it overlaps any of ``outputs`` in memory."""
    begin = min(output.data_ptr() for output in outputs)
    end = max(output.data_ptr() + output.nbytes for output in outputs)
    found = list(tensors)
    for index, tensor in enumerate(found):
        if begin < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < end:
            for output in outputs:
                tensor = apart(tensor, output)
            found[index] = tensor
    return found


def shape_text(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def describe(x: Array) -> str:
    """Return shape and dtype of any library's array for messages: ``shape (4, 8), float32``."""
    return f"shape {shape_text(x.shape)}, {dtype_name(x.dtype)}"


def is_of(library: str, x: Any, *names: str) -> bool:
    """Return whether ``x`` is of a named class of a library, without importing it."""
    module = sys.modules.get(library)
    return isinstance(x, tuple(getattr(module, name) for name in names if hasattr(module, name)))


def _where(x: Any, argument: str, operation: str) -> str:
    owner = type(x).__module__.partition(".")[0]
    return f"argument {argument} of {operation}: {owner}.{type(x).__name__}, {describe(x)}"


def _checked_tensor(x: torch.Tensor, argument: str, operation: str) -> torch.Tensor:
    """Return ``x`` if it is a plain dense tensor; else raise."""
    if x.is_nested:
        raise KindError(
            f"{operation} cannot take a nested tensor as {argument}: its parts have different "
            "sizes",
            where=f"argument {argument} of {operation}: {type(x).__module__}.{type(x).__name__}",
            expected=_ARRAY_KINDS,
            fix=f"pass its dense parts one at a time: {argument}.unbind()",
        )
    if type(x).__torch_dispatch__ is not _Tensor.__torch_dispatch__:
        shard = f"{argument}.to_local(), the shard on this rank"
        raise KindError(
            f"{operation} cannot take {with_article(type(x).__name__)} as {argument}: it does not "
            "store its values itself",
            where=f"argument {argument} of {operation}: {type(x).__module__}.{type(x).__name__}",
            expected=_ARRAY_KINDS,
            fix=f"pass {shard if hasattr(x, 'to_local') else 'the plain tensor that it wraps'}",
        )
    if x.dtype in QUANTIZED:
        raise DtypeError(
            f"{operation} cannot take a quantized tensor as {argument}: its scale would not be "
            "sent",
            where=_where(x, argument, operation),
            fix=f"pass {argument}.dequantize(), or {argument}.int_repr() if scales are equal",
        )
    if is_lazy(x):
        raise KindError(
            f"{operation} cannot take {argument}: a lazy parameter that has no values yet",
            fix="run one forward of its module first",
        )
    if x.layout is not _strided:
        raise ArgumentError(
            f"{operation} cannot take a sparse tensor as {argument}",
            where=_where(x, argument, operation),
            expected="a dense tensor, layout torch.strided",
            found=f"layout {x.layout}",
            fix=f"pass {argument}.to_dense()",
        )
    return x


def _from_numpy(x: Any, argument: str, operation: str, writable: bool) -> torch.Tensor:
    numpy: Any = sys.modules["numpy"]
    if isinstance(x, numpy.generic):
        if writable:
            raise KindError(
                f"{operation} cannot write into {argument}: a NumPy scalar is immutable",
                expected=_ARRAY_KINDS,
                found=f"numpy.{type(x).__name__}",
                fix=f"pass an array: {argument} = numpy.array({argument})",
            )
        array = numpy.asarray(x)
    elif type(x) is numpy.ndarray or type(x) is numpy.memmap:
        array = x
    else:
        raise KindError(
            f"{operation} cannot take {with_article(type(x).__name__)} as {argument}: only its "
            "plain values would be sent",
            where=_where(x, argument, operation),
            expected=_ARRAY_KINDS,
            fix=f"pass numpy.asarray({argument}) to send only its values",
        )
    _check_memory(array, argument, operation)
    if not array.flags.aligned:
        raise _wrong_layout(array, "is not aligned to its element size", argument, operation)
    if not array.flags.writeable:
        if writable:
            raise ArgumentError(
                f"{operation} cannot write into {argument}: the array is read-only",
                where=_where(array, argument, operation),
                fix=f"pass a copy, {argument} = {argument}.copy(), and read the result there",
            )
        array = numpy.asarray(_AsIfWritable(array))
    tensor = torch.from_numpy(array)
    # Under a torch mode, such as FakeTensorMode, it may have another type.
    return tensor if type(tensor) is _Tensor else _checked_tensor(tensor, argument, operation)


class _AsIfWritable:
    """A view of a read-only array that claims to be writable, to avoid torch's warning."""

    def __init__(self, array: Any) -> None:
        self.array = array  # keeps the memory alive
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _check_memory(array: Any, argument: str, operation: str) -> None:
    dtype = array.dtype
    if dtype.name not in _SHARED_DTYPES:
        raise DtypeError(
            f"{operation} cannot take {argument}: torch has no dtype {dtype_name(dtype)}",
            where=_where(array, argument, operation),
            expected="bool, an integer, float16 to float64, complex64 or complex128",
            fix=f"convert it first, for example {argument}.astype('float64')",
        )
    if not dtype.isnative:
        raise DtypeError(
            f"{operation} cannot take {argument}: it has the wrong byte order ({dtype.str})",
            where=_where(array, argument, operation),
            expected="this machine's byte order",
            fix=f"pass {argument}.astype({argument}.dtype.newbyteorder('='))",
        )
    if any(stride < 0 for stride in array.strides):
        raise _wrong_layout(array, "has a negative stride", argument, operation)
    if any(stride % array.itemsize for stride in array.strides):
        raise _wrong_layout(
            array, "has strides that are not multiples of the element size", argument, operation
        )


def _wrong_layout(array: Any, problem: str, argument: str, operation: str) -> ArgumentError:
    return ArgumentError(
        f"{operation} cannot take {argument}: the array {problem}, which torch cannot share",
        where=_where(array, argument, operation),
        expected="positive strides, multiples of the element size",
        found=f"strides {shape_text(array.strides)} in bytes, elements of {array.itemsize}",
        fix=f"pass a copy, {argument} = {argument}.copy(), and read the result there",
    )


def _wrong_kind(x: Any, argument: str, operation: str) -> KindError:
    kind = type(x)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    fix = None
    if isinstance(x, (list, tuple, bool, int, float, complex)):
        fix = f"convert it to a tensor: {argument} = torch.tensor({argument})"
    elif hasattr(x, "addressable_shards") and hasattr(x, "local"):
        fix = f"pass {argument}.local, this rank's shard; or use md.reshard or {argument}.full()"
    elif hasattr(x, "__dlpack__"):
        fix = f"pass torch.from_dlpack({argument}), or a copy if its library forbids writing"
    return KindError(
        f"{operation} cannot take {with_article(name)} as {argument}",
        expected=_ARRAY_KINDS,
        fix=fix,
    )
