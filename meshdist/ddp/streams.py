"""Work of an accelerator that is enqueued on several streams, or into a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["GradientStreams", "is_capturing", "streams_for"]


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is captured into a CUDA graph, so that the CPU may not wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class GradientStreams:
    """The streams of one device on which gradients came since they were last awaited."""

    def __init__(self, device: torch.device, accelerator: Any) -> None:
        self._device = device
        self._accelerator = accelerator
        self._seen: set[Any] = set()

    def note(self) -> None:
        """A gradient came on the current stream."""
        self._seen.add(self._accelerator.current_stream(self._device))

    def await_others(self, gradients: Iterable[torch.Tensor]) -> None:
        """Let the current stream wait for all others that were noted, and forget them.

        Where there are others, the memory of ``gradients`` may be freed before the current stream
        has read them, and is not used again until it has.
        """
        current = self._accelerator.current_stream(self._device)
        others = self._seen - {current}
        self._seen.clear()
        for stream in others:
            current.wait_stream(stream)
        if others:
            for gradient in gradients:
                gradient.record_stream(current)


def streams_for(device: torch.device) -> GradientStreams | None:
    """Return what notes the streams of ``device``; None where there is one, as on the CPU."""
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(accelerator, "current_stream"):
        return None
    return GradientStreams(device, accelerator)
