"""A stand-in for CuPy and for torch's CUDA streams: arrays in host memory, and what waits for what.

    with StandInCupy().installed() as cupy:
        x = cupy.array([1.0, 2.0])
        with cupy.streams(torchs=11, cupys=21):
            md.all_reduce(x)
        assert cupy.waits_for(x) == [(21, 11)]

Every array lies on a device of its own, so that what is done for one is told from what is done for
another. Streams are the numbers that CUDA's pointers are; 0 is the default stream.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch


class Wait(NamedTuple):
    """CuPy's stream waits for torch's on a device; ``values`` are the array's at that time."""

    device: int
    cupys: int
    torchs: int
    values: list[Any]


class StandInCupy(types.ModuleType):
    """What is used of CuPy; ``waits`` has what ``Wait`` describes, in order.

    Attributes:
        handed_out: the device of each array that went out by DLPack, and the current device then.
        taken_in: CuPy's and torch's current streams at each tensor that came in by DLPack.
    """

    def __init__(self) -> None:
        super().__init__("cupy")
        self.waits: list[Wait] = []
        self.handed_out: list[tuple[int, int]] = []
        self.taken_in: list[tuple[int, int]] = []
        self.ndarray = StandInArray
        self.cuda = types.SimpleNamespace(get_current_stream=self._current_stream)
        self.arrays: dict[int, StandInArray] = {}
        self._numbers = itertools.count(1)
        self._here = threading.local()

    @contextlib.contextmanager
    def installed(self) -> Iterator[StandInCupy]:
        """In this context a program finds it imported."""
        cuda = {
            "current_stream": lambda device: Stream(self, device, self._get("torchs")),
            "default_stream": lambda device: Stream(self, device, 0),
            "ExternalStream": lambda pointer, device: ExternalStream(self, device, pointer),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", self)
            for name, function in cuda.items():
                patch.setattr(torch.cuda, name, function)
            yield self

    @contextlib.contextmanager
    def streams(self, torchs: int, cupys: int) -> Iterator[None]:
        """In this context, and this thread, these are the current streams of every device."""
        before = self._get("torchs"), self._current_stream()
        self._here.torchs, self._here.cupys = torchs, CupyStream(cupys)
        try:
            yield
        finally:
            self._here.torchs, self._here.cupys = before

    def array(self, values: Any) -> StandInArray:
        """An array on the memory of ``values``, on a device of its own."""
        device = next(self._numbers)
        made = self.arrays[device] = StandInArray(self, np.asarray(values), device)
        return made

    def empty(self, shape: Any, dtype: Any = float) -> StandInArray:
        return self.array(np.empty(shape, dtype))

    def zeros(self, shape: Any, dtype: Any = float) -> StandInArray:
        return self.array(np.zeros(shape, dtype))

    def from_dlpack(self, tensor: torch.Tensor) -> StandInArray:
        self.taken_in.append((self._current_stream().ptr, self._get("torchs")))
        return self.array(np.from_dlpack(tensor))

    def waits_for(self, x: StandInArray) -> list[tuple[int, int]]:
        """CuPy's stream and the one of torch's for which it waited, on the device of ``x``."""
        return [(one.cupys, one.torchs) for one in self.waits if one.device == x.device.id]

    def _get(self, name: str) -> int:
        return int(getattr(self._here, name, 0))

    def _current_stream(self, device: int = -1) -> CupyStream:
        return getattr(self._here, "cupys", None) or CupyStream(0)


class StandInArray:
    """A CuPy array, in host memory."""

    def __init__(self, cupy: StandInCupy, host: np.ndarray, device: int) -> None:
        self._cupy = cupy
        self.host = host
        self.device = Device(cupy, device)
        self.shape, self.dtype, self.strides = host.shape, host.dtype, host.strides
        self.itemsize = host.itemsize

    def __dlpack__(self, **options: Any) -> Any:
        self._cupy.handed_out.append((self.device.id, self._cupy._get("device")))
        return self.host.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.host.__dlpack_device__()


class CupyStream:
    """A stream as CuPy shows it."""

    def __init__(self, pointer: int) -> None:
        self.ptr = pointer


class Device:
    """A device, current while its context lasts."""

    def __init__(self, cupy: StandInCupy, number: int) -> None:
        self.id = number
        self._cupy = cupy
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(self._cupy._get("device"))
        self._cupy._here.device = self.id
        return self

    def __exit__(self, *_: Any) -> None:
        self._cupy._here.device = self._before.pop()


class Stream:
    """A stream as torch shows it."""

    def __init__(self, cupy: StandInCupy, device: int, pointer: int) -> None:
        self._cupy = cupy
        self.device = device
        self.cuda_stream = pointer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.cuda_stream) == (
            other.device,
            other.cuda_stream,
        )

    def wait_stream(self, other: Stream) -> None:
        assert self.device == other.device
        values = self._cupy.arrays[self.device].host.tolist()
        self._cupy.waits.append(Wait(self.device, self.cuda_stream, other.cuda_stream, values))


class ExternalStream(Stream):
    """A stream of another library's."""

    def __init__(self, cupy: StandInCupy, device: int, pointer: int) -> None:
        # torch makes a new stream for 0, and takes odd numbers for streams of its own.
        assert pointer and pointer != 1
        super().__init__(cupy, device, pointer)
