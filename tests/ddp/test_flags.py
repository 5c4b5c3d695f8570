"""How numbers behind the last bucket are read: at once on the host, later on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshdist.ddp import device_streams
from meshdist.ddp.device_streams import DeferredReader, StatusReader, reader_for
from tests.ddp.no_synchronization import no_synchronization
from tests.ddp.stand_in_accelerator import CPU, Accelerator

DTYPES = [torch.float32, torch.float16, torch.complex64]
COPIED = ["copy, non_blocking=True", "record on stream of cpu"]


def taken(reader: StatusReader) -> list[float] | None:
    found = reader.take()
    return None if found is None else found[:].tolist()


def deferred(accelerator: Accelerator) -> DeferredReader:
    return DeferredReader(CPU, accelerator, accelerator.pinned(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_on_the_host_are_read_at_once_and_once(dtype: torch.dtype) -> None:
    reader = reader_for(CPU, 3)
    assert type(reader) is StatusReader and not reader.is_deferred
    assert taken(reader) is None
    assert reader.note(torch.tensor([2, 0, 1], dtype=dtype))
    assert [taken(reader), taken(reader)] == [[2.0, 0.0, 1.0], None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_elsewhere_are_copied_behind_the_work_and_awaited_where_they_are_read(
    dtype: torch.dtype,
) -> None:
    accelerator = Accelerator()
    reader = deferred(accelerator)
    assert reader.is_deferred and taken(reader) is None
    sums = torch.zeros(3, dtype=dtype)
    accelerator.enqueued.append(lambda: sums.add_(2))  # an all-reduce
    assert reader.note(sums)
    assert accelerator.told == COPIED and sums.real.tolist() == [0.0] * 3
    assert [taken(reader), taken(reader)] == [[2.0] * 3, None]
    assert accelerator.told == [*COPIED, "synchronize"]


def test_while_a_graph_is_captured_nothing_is_copied_or_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator()
    reader = deferred(accelerator)
    assert reader.note(torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(device_streams, "is_capturing", lambda _: True)
        assert taken(reader) is None
        assert not reader.note(torch.zeros(3))
    assert accelerator.told == COPIED
    assert taken(reader) == [1.0] * 3  # what came before the capture is read behind it


def test_the_reader_of_an_accelerator_has_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    asked: list[Any] = []

    def empty(count: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> Any:
        asked.append((count, dtype, device, pin_memory))
        return accelerator.pinned(count)

    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    monkeypatch.setattr(torch, "empty", empty)
    assert isinstance(reader_for(torch.device("cuda", 1), 3), DeferredReader)
    assert asked == [(3, torch.float32, "cpu", True)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float64])
def test_numbers_on_a_gpu_are_read_without_a_wait_before(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reader = reader_for(device, 3)
    sums = torch.zeros(3, dtype=dtype, device=device)
    with no_synchronization():
        sums.add_(2)
        assert reader.note(sums)
        sums.zero_()  # of the next backward, behind the copy
    assert [taken(reader), taken(reader)] == [[2.0] * 3, None]
