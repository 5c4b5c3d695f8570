"""The rings sum exactly what NumPy sums, on any number of ranks, elements and axes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path("examples") / "ring_allreduce.py"
RINGS = ["naive_ring", "chunked_ring"]


@pytest.fixture
def ring(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("ring_allreduce")


def integers(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values whose sums are exact in float32, other ones on every rank."""
    return np.random.default_rng(rank).integers(-99, 99, shape).astype(np.float32)


def told(said: str) -> dict[str, tuple[float, float]]:
    """The difference and the milliseconds that were printed for each way."""
    lines = re.findall(r"^(\S+(?: ring)?) +difference (\S+) +(\S+) ms$", said, re.MULTILINE)
    return {name: (float(off), float(ms)) for name, off, ms in lines}


# -- the rings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_any_number_of_ranks_and_elements(ring: ModuleType, name: str, num_ranks: int) -> None:
    shapes = [(), (0,), (1,), (2,), (3,), (5,), (7,), (8,), (23,), (3, 4), (5, 0)]

    def program() -> list[np.ndarray]:
        sums = []
        for shape in shapes:
            x = torch.from_numpy(integers(md.get_rank(), shape))
            getattr(ring, name)(x)
            sums.append(x.numpy())
        return sums

    for sums in md.simulate(program, num_ranks):
        for shape, found in zip(shapes, sums, strict=True):
            expected = sum(integers(rank, shape) for rank in range(num_ranks))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", RINGS)
def test_tensors_that_are_not_contiguous(ring: ModuleType, name: str) -> None:
    def program() -> tuple[np.ndarray, np.ndarray]:
        rows = torch.from_numpy(integers(md.get_rank(), (5, 4)))
        getattr(ring, name)(rows.T)
        every_other = torch.from_numpy(integers(md.get_rank(), (9,)))
        getattr(ring, name)(every_other[::2])
        return rows.numpy(), every_other.numpy()

    for rank, (rows, every_other) in enumerate(md.simulate(program, 3)):
        np.testing.assert_array_equal(rows, sum(integers(r, (5, 4)) for r in range(3)))
        expected = integers(rank, (9,))
        expected[::2] = sum(integers(r, (9,))[::2] for r in range(3))
        np.testing.assert_array_equal(every_other, expected)


@pytest.mark.parametrize("name", RINGS)
def test_along_one_axis_of_a_mesh(ring: ModuleType, name: str) -> None:
    def program() -> tuple[list[int], list[int]]:
        mesh = md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        along_tp = torch.tensor([md.get_rank(), 10 * md.get_rank()])
        along_dp = along_tp.clone()
        getattr(ring, name)(along_tp, group=mesh["tp"])
        getattr(ring, name)(along_dp, group=mesh["dp"])
        return along_tp.tolist(), along_dp.tolist()

    ranks = np.arange(6).reshape(2, 3)
    for rank, (along_tp, along_dp) in enumerate(md.simulate(program, 6)):
        row, column = ranks[rank // 3].sum(), ranks[:, rank % 3].sum()
        assert along_tp == [row, 10 * row]
        assert along_dp == [column, 10 * column]


def test_the_chunked_ring_gives_all_ranks_the_same_bits(ring: ModuleType) -> None:
    def program(name: str) -> bytes:
        x = torch.rand(101, generator=torch.Generator().manual_seed(md.get_rank()))
        getattr(ring, name)(x)
        bits: bytes = x.numpy().tobytes()
        return bits

    assert len(set(md.simulate(program, 4, args=("chunked_ring",)))) == 1
    assert len(set(md.simulate(program, 4, args=("naive_ring",)))) > 1  # each adds in its own order


@pytest.mark.parametrize(("name", "elements"), [("naive_ring", 3 * 40), ("chunked_ring", 6 * 10)])
def test_what_each_rank_sends(
    ring: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, elements: int
) -> None:
    sent = [0, 0, 0, 0]

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[md.get_rank()] += tensor.numel()
        return isend(tensor, *args, **kwargs)

    isend = md.distributed.isend
    monkeypatch.setattr(md.distributed, "isend", counted)
    md.simulate(lambda: getattr(ring, name)(torch.ones(40)), 4)
    assert sent == [elements] * 4


# -- the whole program ----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "numel"), [(1, 5), (2, 1), (4, 3), (5, 1001)])
def test_main_under_simulate(
    ring: ModuleType, capsys: pytest.CaptureFixture[str], num_ranks: int, numel: int
) -> None:
    argv = ["--numel", str(numel), "--repeats", "2"]
    assert md.simulate(ring.main, num_ranks, args=(argv,)) == [0] * num_ranks
    said = capsys.readouterr().out
    assert said.startswith(f"ranks: {num_ranks}; {numel:,} float32 each; median of 2 rounds\n")
    assert list(told(said)) == ["naive ring", "chunked ring", "all_reduce"]
    assert all(off <= 1e-6 and ms > 0 for off, ms in told(said).values())
    assert said.endswith("limit 1e-05: equal\n")


def test_a_ring_that_is_wrong_on_one_rank_is_a_failure(
    ring: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def careless(tensor: torch.Tensor) -> None:
        ring.chunked_ring(tensor)
        if md.get_rank() == 2:
            tensor[-1] += 1

    monkeypatch.setitem(ring.WAYS, "chunked ring", careless)
    assert md.simulate(ring.main, 3, args=(["--numel", "9"],)) == [1, 1, 1]
    said = capsys.readouterr().out
    assert said.endswith("limit 1e-05: NOT EQUAL\n")
    assert told(said)["chunked ring"][0] > 0.1
    assert told(said)["naive ring"][0] <= 1e-6


@pytest.mark.parametrize("option", ["--numel=0", "--repeats=0"])
def test_options_that_mean_nothing(
    ring: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        ring.main([option])
    assert "--numel and --repeats are at least 1" in capsys.readouterr().err


def assert_equal(said: str, num_ranks: int, numel: int) -> None:
    assert f"ranks: {num_ranks}; {numel:,} float32 each; median of 3 rounds\n" in said
    assert list(told(said)) == ["naive ring", "chunked ring", "all_reduce"]
    assert all(off <= 1e-6 and ms > 0 for off, ms in told(said).values())
    assert "limit 1e-05: equal\n" in said


def test_launched(start: Callable[..., Any]) -> None:
    done = start("-m", "meshdist", "run", "-n", 2, SCRIPT, "--numel", 100_001, "--repeats", 3)
    assert done.returncode == 0, done.stderr
    assert_equal(done.stdout, 2, 100_001)


def test_as_processes_with_fewer_elements_than_ranks(pool: Pool) -> None:
    ended = pool.start(
        ROOT / SCRIPT, places(3), "--numel", "2", "--repeats", "3", has_teardown=False
    )
    assert [done.returncode for done in ended] == [0] * 3, ended
    assert_equal(ended[0].stdout, 3, 2)
