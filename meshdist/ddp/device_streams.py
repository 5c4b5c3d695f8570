"""Synchronize with accelerator work on several streams, or in a captured graph.

On an accelerator the end of a backward only enqueues the last bucket's reduction. The status flags
are copied to the host after it, and read at the next point that all ranks reach, usually after the
copy has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is captured."""
    # During a capture the CPU must not wait for the device.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class GradientStreams:
    """The streams of a device on which gradients were computed since the last wait."""

    def __init__(self, device: torch.device, accelerator: Any) -> None:
        self._device = device
        self._accelerator = accelerator
        self._seen: set[Any] = set()

    def note(self) -> None:
        self._seen.add(self._accelerator.current_stream(self._device))

    def await_others(self, gradients: Iterable[torch.Tensor]) -> None:
        """Make the current stream wait for the recorded streams; keep ``gradients`` in memory."""
        current = self._accelerator.current_stream(self._device)
        others = self._seen - {current}
        self._seen.clear()
        for stream in others:
            current.wait_stream(stream)
        if others:
            for gradient in gradients:  # reuse freed memory only after this stream has read it
                gradient.record_stream(current)


def streams_for(device: torch.device) -> Callable[[], GradientStreams] | None:
    """Return a constructor of ``GradientStreams``; None if the device has no streams."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(accelerator, "current_stream"):
        return None
    return partial(GradientStreams, device, accelerator)


class StatusReader:
    """Stores the numbers averaged with a backward's gradients until the host reads them."""

    is_deferred = False
    """Whether reading immediately after ``note`` would make the CPU wait for the device."""

    def __init__(self) -> None:
        self._reduced: torch.Tensor | None = None

    def note(self, reduced: torch.Tensor) -> bool:
        """Store ``reduced`` for ``take``; return True."""
        self._reduced = reduced
        return True

    def take(self) -> torch.Tensor | None:
        """Return the last stored numbers on the host, once; None if there are none."""
        reduced, self._reduced = self._reduced, None
        return None if reduced is None else _real(reduced)


class DeferredReader(StatusReader):
    """Copies averaged numbers to pinned memory via ``accelerator``, such as ``torch.cuda``."""

    is_deferred = True

    def __init__(self, device: torch.device, accelerator: Any, copied: torch.Tensor) -> None:
        super().__init__()
        self._device = device
        self._accelerator = accelerator
        self._copied = copied
        self._event = accelerator.Event()
        self._is_noted = False

    def note(self, reduced: torch.Tensor) -> bool:
        """Enqueue a copy of ``reduced`` and return True; in a graph capture return False."""
        if is_capturing(self._device):
            return False
        self._copied.copy_(_real(reduced), non_blocking=True)
        self._event.record(self._accelerator.current_stream(self._device))
        self._is_noted = True
        return True

    def take(self) -> torch.Tensor | None:
        """Wait for the copy and return it; None if there is none, or in a capture."""
        if not self._is_noted or is_capturing(self._device):
            return None
        self._event.synchronize()
        self._is_noted = False
        return self._copied


def reader_for(
    device: torch.device, count: int, dtype: torch.dtype = torch.float32
) -> StatusReader:
    """Return a reader that copies ``count`` numbers from ``device``, as ``dtype``."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(
        accelerator, "current_stream"
    ):  # the device has one stream; reading waits for it
        return StatusReader()
    return DeferredReader(
        device, accelerator, torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
    )


def _real(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.real if numbers.is_complex() else numbers
