"""In which array library, dtype and device new shards are made."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ..arrays import Array, as_tensor, like as as_array_of
from ..dtypes import dtype_name
from ..errors import ArgumentError, DtypeError, KindError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.devices import select_device

__all__ = ["Making", "in_library", "library_of", "mesh_device"]


@dataclass(frozen=True)
class Making:
    """The library, dtype and device of new arrays.

    Args:
        library: "torch", "numpy" or "cupy".
        dtype: of that library; None leaves it to the library.
        device: of torch's; where CuPy's arrays lie it is their current device.
    """

    library: str
    dtype: Any
    device: torch.device

    @classmethod
    def of(cls, call: str, mesh: DeviceMesh, dtype: Any, device: Any, like: Any) -> Making:
        """Choose and check what a call asks for; ``like`` has what is not said otherwise."""
        if like is not None:
            as_tensor(like, argument="like", verb=call, writable=False)
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
        place = mesh_device(mesh) if device is None else torch.device(device)
        return cls(library, _dtype_in(library, dtype, call), place)

    @property
    def module(self) -> Any:
        """The library's module."""
        return import_module(self.library)

    def options(self) -> dict[str, Any]:
        """The arguments of the library's makers."""
        made = {} if self.dtype is None else {"dtype": self.dtype}
        return {**made, "device": self.device} if self.library == "torch" else made


def library_of(array: Array) -> str:
    """The library of an array: "torch", "numpy" or "cupy"."""
    if isinstance(array, torch.Tensor):
        return "torch"
    return "numpy" if isinstance(array, (np.ndarray, np.generic)) else "cupy"


def in_library(tensor: torch.Tensor, library: str) -> Array:
    """A tensor as an array of a library, which shares its memory."""
    if library == "torch":
        return tensor
    if library == "numpy":
        return as_array_of(tensor, np.empty(0))
    import_module(library)
    return as_array_of(tensor, sys.modules[library].empty(0))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's tensors lie."""
    return select_device(mesh.device_type, mesh.world) or torch.device(mesh.device_type)


def _dtype_in(library: str, dtype: Any, call: str) -> Any:
    """A dtype of any library, or its name, as ``library`` has it."""
    if dtype is None or (library == "torch" and isinstance(dtype, torch.dtype)):
        return dtype
    if isinstance(dtype, torch.dtype):
        name = dtype_name(dtype)
    else:
        try:
            name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        except TypeError:
            raise KindError(f"{call} takes no {dtype!r} as a dtype") from None
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
