"""Work of an accelerator that is enqueued on several streams, or into a graph.

On the CPU the numbers behind the last bucket are there when the bucket's reduction has ended. On an
accelerator it has only been enqueued then: they are copied to the host behind it, and read where
the program comes next to a place at which every rank looks, by which time the copy has mostly been
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is captured into a CUDA graph."""
    # The CPU may not wait for the device then.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class GradientStreams:
    """The streams of one device on which gradients came since they were last awaited."""

    def __init__(self, device: torch.device, accelerator: Any) -> None:
        self._device = device
        self._accelerator = accelerator
        self._seen: set[Any] = set()

    def note(self) -> None:
        """Note the current stream, on which a gradient came."""
        self._seen.add(self._accelerator.current_stream(self._device))

    def await_others(self, gradients: Iterable[torch.Tensor]) -> None:
        """Make the current stream wait for the noted streams; keep ``gradients`` in memory."""
        current = self._accelerator.current_stream(self._device)
        others = self._seen - {current}
        self._seen.clear()
        for stream in others:
            current.wait_stream(stream)
        if others:
            for gradient in gradients:  # freed memory is used again once this stream has read it
                gradient.record_stream(current)


def streams_for(device: torch.device) -> Callable[[], GradientStreams] | None:
    """Return a constructor of ``GradientStreams``; None if the device has no streams."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(accelerator, "current_stream"):
        return None
    return partial(GradientStreams, device, accelerator)


class StatusReader:
    """Holder of the numbers averaged after a backward's gradients, until the host reads them."""

    is_deferred = False
    """Whether reading right after ``note`` would make the CPU wait for the device."""

    def __init__(self) -> None:
        self._reduced: torch.Tensor | None = None

    def note(self, reduced: torch.Tensor) -> bool:
        """Store ``reduced`` for ``take``; return True, as ``take`` will return it."""
        self._reduced = reduced
        return True

    def take(self) -> torch.Tensor | None:
        """Return the last noted numbers on the host, once; None if there are none."""
        reduced, self._reduced = self._reduced, None
        return None if reduced is None else _real(reduced)


class DeferredReader(StatusReader):
    """Copies averaged numbers to pinned memory by ``accelerator``, a module as ``torch.cuda``."""

    is_deferred = True

    def __init__(self, device: torch.device, accelerator: Any, copied: torch.Tensor) -> None:
        super().__init__()
        self._device = device
        self._accelerator = accelerator
        self._copied = copied
        self._event = accelerator.Event()
        self._is_noted = False

    def note(self, reduced: torch.Tensor) -> bool:
        """Enqueue a copy of ``reduced`` and return True; in a graph capture only return False."""
        if is_capturing(self._device):
            return False
        self._copied.copy_(_real(reduced), non_blocking=True)
        self._event.record(self._accelerator.current_stream(self._device))
        self._is_noted = True
        return True

    def take(self) -> torch.Tensor | None:
        """Wait for the noted copy and return it; None if none was noted, or in a capture."""
        if not self._is_noted or is_capturing(self._device):
            return None
        self._event.synchronize()
        self._is_noted = False
        return self._copied


def reader_for(
    device: torch.device, count: int, dtype: torch.dtype = torch.float32
) -> StatusReader:
    """Return a reader that brings ``count`` numbers from ``device`` to the host, as ``dtype``."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(
        accelerator, "current_stream"
    ):  # it has a single stream, which reading waits for
        return StatusReader()
    return DeferredReader(
        device, accelerator, torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
    )


def _real(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.real if numbers.is_complex() else numbers
