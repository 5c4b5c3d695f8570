"""Memory for buckets: shared on all members, or ordinary on all of them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import meshdist as md
from meshdist.errors import BackendError
from tests.inner import flat_memory, shared_buffers as module, shm_communicator as shm
from tests.pool import Pool

CPU = torch.device("cpu")


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that other processes map."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:meshdist-shared" in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return True
    return False


@pytest.mark.parametrize(("backend", "expected"), [("shm", True), ("gloo", False)])
def test_memory_is_shared_where_the_backend_shares_any(
    pool: Pool, backend: str, expected: bool
) -> None:
    def program() -> tuple[bool, torch.dtype, list[float]]:
        group = md.new_group(backend=backend)
        memory = flat_memory(1000, torch.float64, CPU, group)
        found = is_shared(memory)
        memory.fill_(1.0 + md.get_rank())
        md.all_reduce(memory, group=group)
        values = memory.unique().tolist()
        group.close()
        return found, memory.dtype, values

    assert pool.run(program, 2) == [(expected, torch.float64, [3.0])] * 2


def test_where_there_is_no_memory_to_share_all_members_keep_ordinary_memory(pool: Pool) -> None:
    def program() -> tuple[bool, bool, list[float]]:
        group = md.new_group(backend="shm")
        with patch.object(shm, "free_bytes", lambda: 1e6):
            memory = flat_memory(1_000_000, torch.float32, CPU, group)
        rejected = is_shared(memory)
        md.all_reduce(memory.fill_(1.0 + md.get_rank()), group=group)
        later = is_shared(flat_memory(10, torch.float32, CPU, group))
        values = memory.unique().tolist()
        group.close()
        return rejected, later, values

    assert pool.run(program, 2) == [(False, True, [3.0])] * 2


def test_where_one_member_alone_is_rejected_all_keep_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = torch.zeros(4)

    def refusing(count: int, dtype: torch.dtype, group: md.ProcessGroup) -> torch.Tensor:
        if group.rank() == 1:
            raise BackendError("shared_empty on the world: the store is lost")
        return shared

    monkeypatch.setattr(module, "shared_empty", refusing)

    def program() -> tuple[bool, int]:
        memory = flat_memory(4, torch.float32, CPU, md.group.WORLD)
        return memory.data_ptr() == shared.data_ptr(), memory.numel()

    assert md.simulate(program, 3) == [(False, 4)] * 3


def test_memory_of_a_device_asks_no_other_member() -> None:
    def program() -> torch.device:
        if md.get_rank() == 1:
            return torch.device("meta")
        return flat_memory(4, torch.float32, torch.device("meta"), md.group.WORLD).device

    assert md.simulate(program, 2) == [torch.device("meta")] * 2


def test_a_gradient_that_is_a_view_takes_detach() -> None:
    def program() -> bool:
        model = md.DDP(torch.nn.Linear(2, 2, bias=False))
        weight = model.module.weight
        for _ in range(3):
            model(torch.full((1, 2), float(md.get_rank()))).sum().backward()
            weight.grad.detach_()
        return weight.grad.tolist() == [[1.5, 1.5]] * 2

    assert md.simulate(program, 2) == [True] * 2
