"""What tests of backends share: dtypes, samples of them, reductions in NumPy, a simulated group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore

from meshdist.backends.registry import Opening, get_backend
from meshdist.backends.simulated.communicator import SimulatedCommunicator
from tests.inner import get_world

T = timedelta(seconds=1)

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS_OF_8_BITS = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *FLOATS_OF_8_BITS, *COMPLEX)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

_IN_NUMPY: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_OF_BOOL: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.logical_or,
    "MAX": np.logical_or,
    "BOR": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "BAND": np.logical_and,
    "BXOR": np.logical_xor,
}


def legal_ops(dtype: torch.dtype) -> list[str]:
    """The reductions that have a meaning for ``dtype``."""
    if dtype.is_complex:
        return ["SUM", "AVG"]
    if dtype.is_floating_point:
        return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
    return [op for op in OPS if op != "AVG" or dtype is not torch.bool]


def draw(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any values of ``dtype``, the extremes of integers included; equal seeds draw equal ones."""
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    if dtype.is_complex:
        parts = generator.standard_normal((2, *shape))
        return torch.from_numpy(np.asarray(parts[0] + 1j * parts[1])).to(dtype)
    if dtype.is_floating_point:
        values = generator.standard_normal(shape)
        positive = np.abs(values) if dtype is torch.float8_e8m0fnu else values
        return torch.from_numpy(np.asarray(positive)).to(dtype)
    info = torch.iinfo(dtype)
    kind = str(dtype).removeprefix("torch.")
    return torch.from_numpy(
        np.asarray(generator.integers(info.min, info.max, shape, dtype=kind, endpoint=True))
    )


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Narrow floats in 32 bits, complex numbers of them in 64, as they are accumulated."""
    if tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    elif tensor.is_floating_point() and tensor.itemsize < 4:
        tensor = tensor.float()
    return tensor.numpy().copy()


def reduced_in_numpy(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of all, first to last."""
    total = to_numpy(tensors[0])
    combine = (_OF_BOOL if total.dtype == bool else _IN_NUMPY)[op]
    with np.errstate(over="ignore", invalid="ignore"):
        for tensor in tensors[1:]:
            total = combine(total, to_numpy(tensor))
        if op == "AVG" and total.dtype.kind in "iu":  # toward zero, as np.fmod has it
            total = (total - np.fmod(total, len(tensors))) // len(tensors)
        elif op == "AVG":
            total = np.asarray(total / len(tensors)).astype(total.dtype)
    return torch.from_numpy(np.asarray(total)).to(tensors[0].dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, in row-major order."""
    if not tensor.numel():
        return b""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def open_group(
    ranks: tuple[int, ...] | None = None, name: str = "all", *, op_name: str = ""
) -> SimulatedCommunicator:
    """This simulated rank's side of a group of ``ranks`` (all); messages call it ``op_name``."""
    world = get_world()
    members = ranks or tuple(range(world.size))
    store = PrefixStore(name, world.store)
    opening = Opening(
        store, lambda: store, members, members.index(world.rank), "cpu", T, name=op_name
    )
    communicator = get_backend("simulated").open(opening)
    assert isinstance(communicator, SimulatedCommunicator)
    return communicator
