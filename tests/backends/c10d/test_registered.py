"""Backends written for torch.distributed, as backends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from tests.backends.direct import Direct
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
        with pytest.warns(UserWarning, match="got no devices: assuming cpu and cuda"):
            md.Backend.register_backend("pigeon", print)
        return dict(md.BackendConfig("pigeon").device_backend_map)

    assert pool.call(program, 1) == [{"cpu": "pigeon", "cuda": "pigeon"}]


def test_one_device_type_as_text(pool: Pool) -> None:
    def program(rank: int) -> dict[str, str]:
        md.Backend.register_backend("pigeon", print, devices="cpu")
        return dict(md.BackendConfig("pigeon").device_backend_map)

    assert pool.call(program, 1) == [{"cpu": "pigeon"}]


@pytest.mark.parametrize(("text", "told"), [("no bird\nat home", "no bird"), ("", "RuntimeError")])
def test_a_failure_of_the_backend_is_told(pool: Pool, text: str, told: str) -> None:
    def program() -> None:
        def make(*_: Any) -> Any:
            raise RuntimeError(text)

        md.Backend.register_backend("pigeon", make, devices="cpu")
        group = md.new_group(backend="pigeon")
        md.all_reduce(torch.ones(1), group=group)

    with pytest.raises(md.BackendError, match=told) as caught:
        pool.run(program, 1)
    assert "at home" not in str(caught.value)


def test_what_a_registered_class_lacks_is_built(pool: Pool, tmp_path: Any) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        import torch
        from torch.distributed import ProcessGroup, ProcessGroupGloo

        from tests.inner import find_backend

        class Pigeon(ProcessGroup):
            """A backend in Python that has an all-reduce, a broadcast and a list all-gather."""

            def __init__(self, gloo: ProcessGroupGloo, rank: int, size: int) -> None:
                super().__init__(rank, size)
                self.allreduce, self.broadcast = gloo.allreduce, gloo.broadcast
                self.allgather, self.barrier = gloo.allgather, gloo.barrier

        def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
            return Pigeon(ProcessGroupGloo(store, rank, size, timeout), rank, size)

        md.Backend.register_backend("pigeon", make, devices=["cpu"])
        md.init_process_group("pigeon", f"file://{tmp_path}/meeting", rank=rank, world_size=2)
        backend = md.group.WORLD.open_device_group("cpu").communicator
        limit = timedelta(seconds=20)
        x = torch.full((2,), rank + 1.0)
        outputs = [torch.empty(2), torch.empty(2)] if rank == 1 else []
        Direct(backend, limit).gather(outputs, x, 1).finish(limit)
        Direct(backend, limit).scatter(x, outputs, 1).finish(limit)
        Direct(backend, limit).reduce(x, md.ReduceOp.SUM, 0).finish(limit)
        md.destroy_process_group()
        served = find_backend("pigeon").support("gather", "cpu", torch.float32)
        return [one.tolist() for one in outputs], x.tolist(), served

    assert pool.call(program, 2) == [
        ([], [3.0, 3.0], "native"),
        ([[1.0, 1.0], [2.0, 2.0]], [2.0, 2.0], "native"),
    ]


def test_a_registered_gloo_is_waited_for_as_gloo(pool: Pool) -> None:
    def program() -> tuple[str, str]:
        from torch.distributed import ProcessGroupGloo

        md.Backend.register_backend("pigeon", ProcessGroupGloo, devices="cpu")
        backend = md.new_group(backend="pigeon").open_device_group("cpu").communicator
        return type(backend).__name__, backend.backend

    assert pool.run(program, 1) == [("GlooCommunicator", "pigeon")]


def test_a_backend_registered_with_torch_works_by_its_name(pool: Pool, tmp_path: Any) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        import torch
        from torch.distributed import Backend, ProcessGroupGloo

        def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
            return ProcessGroupGloo(store, rank, size, timeout)

        Backend.register_backend("courier", make, devices=["cpu"])
        assert md.is_backend_available("courier")
        md.init_process_group("COURIER", f"file://{tmp_path}/meeting", rank=rank, world_size=2)
        x = torch.ones(2)
        md.all_reduce(x)
        answer = md.get_backend(), md.get_backend_config(), x.tolist()
        md.destroy_process_group()
        return answer

    assert pool.call(program, 2) == [("courier", "cpu:courier", [2.0, 2.0])] * 2


def test_a_backend_registered_with_torch_for_an_options_object(pool: Pool) -> None:
    def program() -> list[Any]:
        from torch.distributed import Backend, ProcessGroupGloo

        def make(options: Any, backend_options: Any) -> Any:
            given = options.store, options.group_rank, options.group_size
            return ProcessGroupGloo(*given, options.timeout)

        Backend.register_backend("courier", make, extended_api=True, devices=["cpu"])
        x = torch.full((2,), md.get_rank() + 1.0)
        md.all_reduce(x, group=md.new_group(backend="cpu:courier"))
        return x.tolist()

    assert pool.run(program, 2) == [[3.0, 3.0]] * 2
