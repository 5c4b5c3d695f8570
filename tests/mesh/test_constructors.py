"""Meshes in torch's form and in JAX's."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

import meshdist as md
from tests.pool import Pool


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is free: it stays bound, so that nobody else is given it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def test_make_mesh_in_jax_form_infers_one_size() -> None:
    def program():
        return md.make_mesh((2, -1), ("x", "y"), device_type="cpu").axis_sizes

    assert md.simulate(program, 6) == [{"x": 2, "y": 3}] * 6


def test_a_mesh_that_starts_the_world_names_who_is_missing(pool: Pool, port: int) -> None:
    def program(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        if rank != 2:
            md.init_device_mesh("cpu", (3,), timeout=timedelta(seconds=0.5))

    for outcome in pool.outcomes(program, 3, has_world=False)[:2]:
        assert isinstance(outcome.exception, md.RendezvousError)
        assert str(outcome.exception).startswith(
            "rank 2 has not joined the world of 3 within 0.5 s"
        )


def test_a_mesh_starts_the_world_and_waits_for_every_rank(pool: Pool, port: int) -> None:
    def program(rank: int) -> tuple[bool, int, float]:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        time.sleep(0.3 * rank)
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.ones(1)
        md.all_reduce(x, group=mesh["dp"])
        answer = md.is_initialized(), md.get_world_size(), x.item()
        md.destroy_process_group()
        return answer

    assert pool.call(program, 2) == [(True, 2, 2.0)] * 2


def test_axis_timeouts() -> None:
    def program():
        mesh = md.init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("dp", "tp"),
            axis_options={"tp": md.AxisOptions(timeout=timedelta(seconds=7))},
            timeout=timedelta(seconds=90),
        )
        return [group.timeout.total_seconds() for group in mesh.get_all_groups()]

    assert md.simulate(program, 4)[0] == [90.0, 7.0]
