"""Results on huge pages: whose memory is used again, and when."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshdist.runtime import memory
from meshdist.runtime.memory import new_like

MIB = 1 << 20
HUGE_PAGE = 2 * MIB
needs_huge_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux"
)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the blocks, in MiB, that the system gives from now on; none is kept before."""
    sizes: list[int] = []

    class Block(mmap.mmap):
        def __init__(self, _: int, length: int, **more: object) -> None:
            sizes.append((length - HUGE_PAGE) // MIB)

    memory.forget()
    monkeypatch.setattr(mmap, "mmap", Block)
    yield sizes
    memory.forget()


def of_mib(size: float, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return new_like(torch.empty(int(size * MIB) // dtype.itemsize, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_shape_dtype_and_values(dtype: torch.dtype) -> None:
    x = torch.arange(3 * MIB).reshape(3, 512, 2048).to(dtype).transpose(0, 1)
    y = new_like(x)
    assert y.shape == x.shape and y.dtype is dtype and y.is_contiguous()
    y.copy_(x)
    assert torch.equal(x, y)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (3, MIB)])
def test_another_shape(shape: tuple[int, ...]) -> None:
    y = new_like(torch.empty(5, 2, dtype=torch.int16).T, shape)
    assert (y.shape, y.dtype, y.is_contiguous()) == (shape, torch.int16, True)


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(0),
        torch.empty(()),
        torch.empty(1000),
        torch.empty(4 * MIB, device="meta"),
        torch.nn.Parameter(torch.empty(MIB)),
        torch.eye(3).to_sparse(),
    ],
)
def test_what_is_small_or_elsewhere_is_torchs_own(x: torch.Tensor, made: list[int]) -> None:
    y = new_like(x)
    assert (y.shape, y.dtype, y.device, y.layout) == (x.shape, x.dtype, x.device, x.layout)
    assert not made


@needs_huge_pages
def test_a_system_without_huge_pages_or_memory(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poor(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Poor)
    place = of_mib(4).data_ptr()
    assert of_mib(4).data_ptr() == place

    def reject(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", reject)
    assert of_mib(16).fill_(3).eq(3).all()
    monkeypatch.setattr(mmap, "mmap", Poor)
    of_mib(4)
    assert made == [4, 4]  # what was kept is the system's again


@needs_huge_pages
def test_a_result_too_large_to_keep_leaves_the_others_alone(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_FREE_BYTES", 10 * MIB)
    for size in (4, 64, 4, 64):
        of_mib(size)
    assert made == [4, 64, 64]


@needs_huge_pages
def test_memory_is_used_again_once_nobody_has_it() -> None:
    x = of_mib(4)
    place = x.data_ptr()
    assert place % HUGE_PAGE == 0
    view = x.view(2, -1)[1]
    del x
    other = of_mib(4)
    assert abs(other.data_ptr() - place) >= 4 * MIB  # the view lives
    view.fill_(7)
    other.zero_()
    assert view.eq(7).all()
    del view
    gc.collect()
    assert of_mib(3.5).data_ptr() == place


@needs_huge_pages
def test_a_block_far_too_large_is_left_for_others(made: list[int]) -> None:
    of_mib(64)
    of_mib(4)
    assert of_mib(40).numel() == 40 * MIB
    assert made == [64, 4]


@needs_huge_pages
def test_only_so_much_is_kept(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_FREE_BYTES", 10 * MIB)
    for _ in range(2):
        some = [of_mib(4) for _ in range(4)]
        some.clear()
    assert made == [4] * 6


@needs_huge_pages
def test_tensors_may_die_while_another_is_made(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, usual = [of_mib(2)], mmap.mmap

    def drop_before(*arguments: Any, **more: Any) -> mmap.mmap:
        dying.clear()
        return usual(*arguments, **more)

    monkeypatch.setattr(mmap, "mmap", drop_before)
    of_mib(8)
    assert not dying
    of_mib(2), of_mib(8)
    assert made == [2, 8]


@needs_huge_pages
def test_threads_never_get_the_same_memory() -> None:
    wrong = []

    def use(number: int) -> None:
        for turn in range(50):
            x = of_mib(1, torch.int32)
            x.fill_(number * 1000 + turn)
            if not x.eq(number * 1000 + turn).all():
                wrong.append((number, turn))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_huge_pages
def test_a_forked_child_has_memory_of_its_own(made: list[int]) -> None:
    x = of_mib(2).fill_(1)
    of_mib(4)
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            of_mib(4)
            assert made == [2, 4, 4]
            values = x.numpy()  # torch's threads have stayed with the parent
            values[:] = 2
            code = int((values == 2).all())
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert x.eq(1).all()
