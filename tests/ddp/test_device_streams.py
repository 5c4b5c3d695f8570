"""Streams on which gradients came: awaited where there are several, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshdist.ddp.device_streams import GradientStreams, is_capturing, streams_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Stream:
    def __init__(self) -> None:
        self.awaited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other)


class Accelerator:
    def __init__(self) -> None:
        self.current = Stream()

    def current_stream(self, device: torch.device) -> Stream:
        assert device == CUDA
        return self.current


class Gradient:
    def __init__(self) -> None:
        self.read_on: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.read_on.append(stream)


def test_one_stream_awaits_nothing() -> None:
    accelerator, gradient = Accelerator(), Gradient()
    streams = GradientStreams(CUDA, accelerator)
    streams.note()
    streams.note()
    streams.await_others(_tensors(gradient))
    assert (accelerator.current.awaited, gradient.read_on) == ([], [])


def test_the_current_stream_awaits_each_other_one_once() -> None:
    accelerator, gradient = Accelerator(), Gradient()
    streams = GradientStreams(CUDA, accelerator)
    first, second, current = (Stream() for _ in range(3))
    for accelerator.current in (first, second, first, current):
        streams.note()
    streams.await_others(_tensors(gradient))
    assert set(current.awaited) == {first, second} and len(current.awaited) == 2
    assert first.awaited == second.awaited == []
    assert gradient.read_on == [current]
    streams.await_others(_tensors(gradient))
    assert len(current.awaited) == 2  # forgotten


def test_the_cpu_has_no_streams_and_captures_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams_for(CPU) is None
    make = streams_for(CUDA)
    assert make is not None and isinstance(make(), GradientStreams)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [is_capturing(CPU), is_capturing(CUDA)] == [False, True]


def _tensors(*gradients: Gradient) -> Any:
    return iter(gradients)
