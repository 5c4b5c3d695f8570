"""Worlds that end while their processes live on: by an exception, or with torch's world."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed

import meshdist as md
from tests.load import is_within
from tests.pool import Pool, free_port

LIMIT = timedelta(seconds=60)
BACKENDS = ("shm", "gloo")


def train(rank: int, failing: int) -> None:
    x = torch.ones(3)
    md.all_reduce(x)
    if rank == failing:
        time.sleep(0.2)
        raise ValueError("no data")
    md.all_reduce(x)


def told_in(rank: int, backend: str, way: str, failing: int, port: int) -> tuple[str, float]:
    """What a rank is told, and after how many seconds; the process that fails lives on."""
    world = (backend, f"tcp://127.0.0.1:{port}", LIMIT, 3, rank)
    begin = time.monotonic()
    try:
        if way == "with":
            with md.world(*world):
                begin = time.monotonic()
                train(rank, failing)
        else:
            md.init_process_group(*world)
            begin = time.monotonic()
            try:
                train(rank, failing)
            finally:
                md.destroy_process_group()
    except (ValueError, md.MeshdistError) as error:
        assert not md.is_initialized()
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", 0.0


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("way", ["with", "finally"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_others_learn_of_an_exception_at_once(
    backend: str, way: str, failing: int, pool: Pool
) -> None:
    told = pool.call(told_in, 3, backend, way, failing, free_port())
    text, _ = told.pop(failing)
    assert text == "ValueError: no data"
    for text, seconds in told:
        assert re.search(rf"rank {failing} ended by ValueError: no data \(\S+\.py:\d+\)", text), (
            text
        )
        assert "destroyed its process group" not in text
        assert is_within(seconds, 3.0)


def leave(rank: int, way: str, folder: str) -> str:
    """Leave a world while rank 1 waits; return what this rank is told."""
    try:
        with md.world("gloo", f"file://{folder}/{way}", LIMIT, 2, rank):
            md.barrier()
            if rank == 0 and way == "exit":
                raise SystemExit
            if rank == 1:
                md.all_reduce(torch.ones(1))
    except md.MeshdistError as error:
        return str(error)
    except SystemExit:
        return "left"
    return "left"


def leave_in_good_order(rank: int, folder: str) -> list[str]:
    try:
        raise KeyError("before the world")
    except KeyError:
        found = leave(rank, "handler", folder)
    return [found, leave(rank, "exit", folder), leave(rank, "return", folder)]


def test_ends_in_good_order_are_told_as_such(pool: Pool, tmp_path: Path) -> None:
    """Also in the handler of an exception that was there before the world, and by sys.exit."""
    first, second = pool.call(leave_in_good_order, 2, str(tmp_path))
    assert first == ["left"] * 3
    assert all("rank 0 destroyed its process group" in text for text in second), second


def test_what_the_block_raises_wins_over_a_world_that_was_ended_inside(pool: Pool) -> None:
    def program(_: int) -> tuple[str, bool]:
        try:
            with md.world("gloo", store=md.HashStore(), rank=0, world_size=1):
                md.destroy_process_group()
                raise ValueError("inside")
        except ValueError as error:
            return str(error), md.is_initialized()

    assert pool.call(program, 1) == [("inside", False)]


# -- torch's world, adopted ---------------------------------------------------------------------


def adopted(rank: int, folder: str) -> list[Any]:
    """Worlds of torch's one after another, each adopted by a mesh, the first never ended."""
    found = []
    for number in range(3):
        method = f"file://{folder}/{number}"
        torch_distributed.init_process_group("gloo", method, LIMIT, 2, rank)
        begin = time.monotonic()
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.ones(2)
        md.all_reduce(x, group=mesh.get_group("dp"))
        found.append((x[0].item(), md.is_initialized(), is_within(time.monotonic() - begin, 10.0)))
        torch_distributed.barrier()
        torch_distributed.destroy_process_group()
        found.append((md.is_initialized(), is_within(time.monotonic() - begin, 10.0)))
    begin = time.monotonic()
    with pytest.raises(md.RendezvousError):
        md.init_device_mesh("cpu", (2,))
    found.append(is_within(time.monotonic() - begin, 10.0))
    return found


def test_a_world_adopted_of_torch_s_ends_with_it(pool: Pool, tmp_path: Path) -> None:
    expected = [(2.0, True, True), (False, True)] * 3 + [True]
    assert pool.call(adopted, 2, str(tmp_path)) == [expected] * 2
    assert list(tmp_path.iterdir()) == []


def backend_told(rank: int, backend: str | None, port: int) -> list[str]:
    """Return the lines of the log when torch's world over gloo is adopted."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshdist.worlds").addHandler(handler)
    url = f"tcp://127.0.0.1:{port}"
    torch_distributed.init_process_group("gloo", url, LIMIT, 2, rank)
    md.init_process_group(backend)
    name = md.distributed.get_backend_config()
    md.destroy_process_group()
    torch_distributed.destroy_process_group()
    logging.getLogger("meshdist.worlds").removeHandler(handler)
    return [name.partition(",")[0], *lines]


def test_a_line_says_which_backend_an_adopted_world_takes(pool: Pool) -> None:
    first, second = pool.call(backend_told, 2, None, free_port())
    name, line = first
    assert second == [name] == ["cpu:gloo"]
    assert line == (
        "meshdist: CPU tensors use backend 'gloo', as in the torch.distributed process group that "
        "meshdist reuses; shared memory is faster on this host: call "
        "md.init_process_group('cpu:shm') before the first mesh"
    )
    for named in ("cpu:shm", "cpu:gloo"):
        assert pool.call(backend_told, 2, named, free_port()) == [[named]] * 2
