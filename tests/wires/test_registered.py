"""Backends written for torch.distributed, as wires."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshdist as md
from tests.pool import Pool


@pytest.mark.parametrize("extended_api", [False, True])
def test_a_registered_backend_carries_a_world(
    pool: Pool, tmp_path: Any, extended_api: bool
) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        import torch
        from torch.distributed import ProcessGroupGloo

        calls = []

        def plain(store: Any, rank: int, size: int, timeout: Any) -> Any:
            calls.append((rank, size))
            return ProcessGroupGloo(store, rank, size, timeout)

        def extended(options: Any, backend_options: Any) -> Any:
            calls.append((options.group_rank, options.group_size))
            assert options.global_ranks_in_group == [0, 1]
            return ProcessGroupGloo(options.store, options.group_rank, options.group_size)

        make = extended if extended_api else plain
        md.Backend.register_backend("Pigeon", make, extended_api=extended_api, devices=["cpu"])
        assert md.is_backend_available("pigeon")
        md.init_process_group("pigeon", f"file://{tmp_path}/meeting", rank=rank, world_size=2)
        x = torch.ones(2)
        md.all_reduce(x)
        answer = (md.get_backend(), md.get_backend_config(), x.tolist(), calls)
        md.destroy_process_group()
        return (*answer, md.Backend.PIGEON)  # type: ignore[attr-defined]

    expected = [("pigeon", "cpu:pigeon", [2.0, 2.0], [(rank, 2)], "pigeon") for rank in range(2)]
    assert pool.call(program, 2) == expected


def test_no_devices_means_cpu_and_cuda_with_a_warning(pool: Pool) -> None:
    def program(rank: int) -> dict[str, str]:
        with pytest.warns(UserWarning, match="names no devices: cpu and cuda are assumed"):
            md.Backend.register_backend("pigeon", print)
        return dict(md.BackendConfig("pigeon").device_backend_map)

    assert pool.call(program, 1) == [{"cpu": "pigeon", "cuda": "pigeon"}]


def test_one_device_type_as_text(pool: Pool) -> None:
    def program(rank: int) -> dict[str, str]:
        md.Backend.register_backend("pigeon", print, devices="cpu")
        return dict(md.BackendConfig("pigeon").device_backend_map)

    assert pool.call(program, 1) == [{"cpu": "pigeon"}]


def test_a_failure_of_the_backend_is_told(pool: Pool) -> None:
    def program() -> None:
        def make(*_: Any) -> Any:
            raise RuntimeError("no bird at home")

        md.Backend.register_backend("pigeon", make, devices="cpu")
        group = md.new_group(backend="pigeon")
        md.all_reduce(torch.ones(1), group=group)

    with pytest.raises(md.BackendError, match="no bird at home"):
        pool.run(program, 1)
