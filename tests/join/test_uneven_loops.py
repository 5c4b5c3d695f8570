"""Loops over loaders of unequal length: as many steps on every rank, and exact gradients."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import KindError
from tests.load import is_within
from tests.pool import Failure, Pool

Run = Callable[..., list[Any]]


def steps(lengths: list[int]) -> list[tuple[float, float, int]]:
    """Each step's batch, weight and number of active ranks; a batch names its rank and place."""
    rank = md.get_rank()
    batches = md.uneven([10.0 * rank + place for place in range(lengths[rank])])
    return [(batch, weight, batches.num_active) for batch, weight in batches]


@pytest.mark.parametrize(
    "lengths", [[2], [0], [1, 3], [0, 0], [0, 2, 4], [2, 2, 2], [0, 0, 3, 1, 0]]
)
def test_every_rank_runs_as_many_steps_as_the_longest_loader(run: Run, lengths: list[int]) -> None:
    source = next((rank for rank, length in enumerate(lengths) if length), 0)
    for rank, found in enumerate(run(steps, len(lengths), lengths)):
        expected = []
        for step in range(max(lengths)):
            batch = 10.0 * rank + min(step, lengths[rank] - 1) if lengths[rank] else 10.0 * source
            active = sum(length > step for length in lengths)
            expected.append((batch, float(step < lengths[rank]), active))
        assert found == expected


def test_any_collective_works_in_the_loop(run: Run) -> None:
    """On several groups, of tensors, objects and messages."""

    def program() -> list[Any]:
        rank, size = md.get_rank(), md.get_world_size()
        pair, found = md.new_group([0, 1]), []
        for x, weight in md.uneven([torch.ones(1)] * (2 * rank)):
            total = x * weight
            md.all_reduce(total)
            md.broadcast(x, src=size - 1)
            things: list[Any] = [None] * size
            md.all_gather_object(things, weight)
            if rank < 2:
                md.all_reduce(torch.ones(2), group=pair)
                message = torch.zeros(1)
                _ = md.send(message, dst=1) if rank == 0 else md.recv(message, src=0)
            md.barrier()
            found.append((total.item(), things))
        return found

    expected = [(2.0, [0.0, 1.0, 1.0])] * 2 + [(1.0, [0.0, 0.0, 1.0])] * 2
    assert run(program, 3) == [expected] * 3


# -- training -------------------------------------------------------------------------------------


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def trained(lengths: list[int]) -> list[list[float]]:
    """Each step's gradients, and the weights at the end."""
    rank, size = md.get_rank(), md.get_world_size()
    net = make_net()
    for module in net:
        if isinstance(module, nn.BatchNorm1d):
            module.eval()  # the statistics of a batch with weight 0 would count
    model = md.DDP(net, bucket_cap_mb=0.0001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    batches = md.uneven([batch_of(rank, step) for step in range(lengths[rank])])
    found = []
    for x, weight in batches:
        optimizer.zero_grad()
        (model(x).square().mean() * weight * size / batches.num_active).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        found.append([v for p in net.parameters() for v in p.grad.flatten().tolist()])
        optimizer.step()
    return [*found, [v for p in net.parameters() for v in p.flatten().tolist()]]


def of_one_process(lengths: list[int]) -> list[list[float]]:
    """The oracle: each step's gradient is that of the mean over the ranks with data."""
    net = make_net()
    for module in net:
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    found = []
    for step in range(max(lengths)):
        active = [rank for rank, length in enumerate(lengths) if length > step]
        optimizer.zero_grad()
        torch.stack(
            [net(batch_of(rank, step)).square().mean() for rank in active]
        ).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        found.append([v for p in net.parameters() for v in p.grad.flatten().tolist()])
        optimizer.step()
    return [*found, [v for p in net.parameters() for v in p.flatten().tolist()]]


@pytest.mark.parametrize("lengths", [[3], [1, 3], [0, 2, 4], [2, 0, 5, 1, 5]])
def test_gradients_equal_those_of_one_process(run: Run, lengths: list[int]) -> None:
    """Clipped by their norm, and applied by Adam: nothing remains that differs."""
    expected = of_one_process(lengths)
    for found in run(trained, len(lengths), lengths):
        assert len(found) == len(expected)
        for mine, wanted in zip(found, expected, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_batch_norm_over_all_ranks_works_in_the_loop(run: Run) -> None:
    def program() -> list[float]:
        net = md.SyncBatchNorm.convert_sync_batchnorm(make_net())
        model = md.DDP(net)
        rank, size = md.get_rank(), md.get_world_size()
        batches = md.uneven([batch_of(rank, step) for step in range(2 * rank)])
        for x, weight in batches:
            model.zero_grad()
            (model(x).square().mean() * weight * size / batches.num_active).backward()
        return [v for p in net.parameters() for v in p.grad.flatten().tolist()]

    found = run(program, 3)
    assert found[0] == found[1] == found[2]
    assert any(found[0])


def test_lax_and_typed_values_work_in_the_loop() -> None:
    def program(is_typed: bool) -> list[float]:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        weight, found = torch.ones(1, requires_grad=True), []
        batches = md.uneven(torch.arange(1.0, 5.0).split(1)[md.get_rank() :: 3], mesh["dp"])
        for x, share in batches:
            weight.grad = None
            with md.typed(mesh) if is_typed else mesh:
                used = md.lax.pvary(weight, "dp")
                local = md.lax.pvary(x * share, "dp") if is_typed else x * share
                md.lax.psum((used * local).sum(), "dp").backward()
            found.append(weight.grad.item())
        return found

    for is_typed in (False, True):
        assert md.simulate(program, 3, (is_typed,)) == [[6.0, 4.0]] * 3, is_typed


# -- loaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(3.0),
        np.arange(4),
        {"x": torch.ones(2), "names": ["a", "b"]},
        (torch.zeros(0), None),
        "text",
    ],
    ids=["torch", "numpy", "dict", "tuple", "text"],
)
def test_a_rank_without_any_data_gets_a_batch_of_another(run: Run, batch: Any) -> None:
    def program() -> list[Any]:
        return [repr((one, weight)) for one, weight in md.uneven([batch] * md.get_rank())]

    first, second, third = run(program, 3)
    assert first == [repr((batch, 0.0))] * 2
    assert second == [repr((batch, 1.0)), repr((batch, 0.0))]
    assert third == [repr((batch, 1.0))] * 2


def test_axes_of_a_mesh_have_loops_of_their_own(run: Run) -> None:
    def program() -> list[tuple[int, float, int]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        batches = md.uneven(range(md.get_rank()), mesh["dp"])
        return [(batch, weight, batches.num_active) for batch, weight in batches]

    assert run(program, 4) == [
        [(0, 0.0, 1), (0, 0.0, 1)],  # with rank 2
        [(0, 1.0, 2), (0, 0.0, 1), (0, 0.0, 1)],  # with rank 3
        [(0, 1.0, 1), (1, 1.0, 1)],
        [(0, 1.0, 2), (1, 1.0, 1), (2, 1.0, 1)],
    ]


def test_loops_can_be_nested_and_repeated(run: Run) -> None:
    def program() -> list[tuple[int, int, float, float]]:
        rank = md.get_rank()
        outer, found = md.uneven(range(1 + rank)), []
        for _ in range(2):
            for x, weight in outer:
                found += [(x, y, weight, inner) for y, inner in md.uneven(range(2 - rank))]
        return found

    assert run(program, 2) == [
        [(0, 0, 1.0, 1.0), (0, 1, 1.0, 1.0), (0, 0, 0.0, 1.0), (0, 1, 0.0, 1.0)] * 2,
        [(0, 0, 1.0, 1.0), (0, 0, 1.0, 0.0), (1, 0, 1.0, 1.0), (1, 0, 1.0, 0.0)] * 2,
    ]


def test_all_ranks_may_break_out_of_infinite_loaders(run: Run) -> None:
    def program() -> tuple[list[int], float]:
        found = []
        for x, _ in md.uneven(itertools.count(md.get_rank())):
            found.append(x)
            if len(found) == 3:
                break
        total = torch.ones(1)
        md.all_reduce(total)
        return found, total.item()

    assert run(program, 2) == [([0, 1, 2], 2.0), ([1, 2, 3], 2.0)]


@pytest.mark.parametrize("run", ["simulated", "shm", "gloo"], indirect=True)
def test_a_rank_that_breaks_out_alone_differs_in_its_next_call(run: Run) -> None:
    def program() -> str:
        try:
            for x, _ in md.uneven(range(5)):
                if x == 1 + 2 * md.get_rank():
                    break
            md.barrier()
        except md.errors.BackendError as error:
            return str(error)
        return "no error"

    for text in run(program, 2):
        assert "rank 0: barrier() at" in text or "waits in barrier()" in text
        assert "of md.uneven at" in text or "of md.uneven for" in text


@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_error_of_a_loader_raises_on_all_ranks(run: Run, place: int) -> None:
    def program() -> tuple[int, str, str, float]:
        def loader() -> Iterator[int]:
            for x in range(4):
                if x == place and md.get_rank() == 1:
                    raise OSError("a bad file")
                yield x

        num, error = 0, Exception()
        try:
            for _ in md.uneven(loader()):
                num += 1
        except Exception as caught:
            error = caught
        total = torch.ones(1)
        md.all_reduce(total)  # the group can still be used
        return num, type(error).__name__, str(error), total.item()

    for rank, (num, kind, text, total) in enumerate(run(program, 3)):
        assert (num, total) == (place, 3.0)
        if rank == 1:
            assert (kind, text) == ("OSError", "a bad file")
            continue
        assert kind == "JoinError"
        assert text == (
            "uneven() cannot go on, because the loader of rank 1 raised\n"
            f"  where:    rank {rank}, the world\n"
            "  expected: loaders that end or yield a batch on every rank\n"
            "  found:    rank 1: OSError: a bad file\n"
            "  fix:      resolve the error in the traceback of rank 1"
        )


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("place", ["iter", "next"])
def test_any_error_of_a_loader_raises_on_all_ranks(run: Run, place: str) -> None:
    """An error before the first batch, and one without a text."""

    def program() -> tuple[str, str, float]:
        class Loader:
            def __iter__(self) -> Iterator[int]:
                if md.get_rank() == 1 and place == "iter":
                    raise OSError("no such folder")
                return self.read()

            def read(self) -> Iterator[int]:
                yield 1
                if md.get_rank() == 1:
                    raise UnprintableError

        error = Exception()
        try:
            for _ in md.uneven(Loader()):
                pass
        except Exception as caught:
            error = caught
        total = torch.ones(1)
        md.all_reduce(total)
        name = type(error).__name__
        return name, "" if name == "UnprintableError" else str(error), total.item()

    found = {
        "iter": "OSError: no such folder",
        "next": "UnprintableError: <exception str() failed>",
    }
    for rank, (kind, text, total) in enumerate(run(program, 3)):
        assert total == 3.0
        assert kind == ("JoinError" if rank != 1 else found[place].partition(":")[0])
        assert rank == 1 or re.search(f"found: +rank 1: .*{re.escape(found[place])}\n", text)


def test_a_loader_is_read_one_batch_ahead() -> None:
    def program() -> list[tuple[int, int]]:
        num_read = 0

        def loader() -> Iterator[int]:
            nonlocal num_read
            for x in range(3):
                num_read += 1
                yield x

        return [(x, num_read) for x, _ in md.uneven(loader())]

    assert md.simulate(program, 2) == [[(0, 2), (1, 3), (2, 3)]] * 2


def test_data_by_index_will_do() -> None:
    class Letters:
        def __getitem__(self, place: int) -> str:
            return "ab"[place]

    program = lambda: list(md.uneven(Letters()))  # type: ignore[arg-type]  # noqa: E731
    assert md.simulate(program, 2) == [[("a", 1.0), ("b", 1.0)]] * 2


@pytest.mark.parametrize("data", [None, 5])
def test_other_objects_than_iterables_raise(data: Any) -> None:
    def program() -> str:
        with pytest.raises(KindError) as caught:
            md.uneven(data)
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert text == (
            f"uneven() cannot loop over an object of type {type(data).__name__}\n"
            "  expected: an iterable, for example a DataLoader\n"
            "  fix:      pass an empty list on ranks without data: uneven([], mesh)"
        )


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_killed_rank_frees_the_others(pool: Pool, backend: str) -> None:
    def program() -> tuple[str, float]:
        begin = time.monotonic()
        try:
            for x, _ in md.uneven(range(5 + md.get_rank())):
                if x == 2 and md.get_rank() == 1:
                    os._exit(3)
        except md.MeshdistError as error:
            return str(error), time.monotonic() - begin
        return "no error", 0.0

    first, died, third = pool.outcomes(program, 3, backend=backend)
    assert isinstance(died, Failure)
    for text, seconds in (first, third):
        assert "rank 1" in text
        assert is_within(seconds, 15.0)


def test_a_sum_without_the_weight_counts_the_last_batch_again() -> None:
    def program() -> list[float]:
        found = []
        for x, _ in md.uneven([torch.ones(1)] * (1 + md.get_rank())):
            total = x.clone()
            md.all_reduce(total)
            found.append(total.item())
        return found

    assert md.simulate(program, 2) == [[2.0, 2.0]] * 2
