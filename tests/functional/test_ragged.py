"""The ragged exchange against an oracle over its slices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.errors import ArgumentError, DtypeError, KindError, ShapeError
from meshdist.functional.data_movement import ragged_all_to_all
from tests.functional.operation_cases import (
    NAMES,
    PLACES,
    Run,
    equal,
    groups_of,
    inner,
    on_a_line,
    run_over_mpi,
    simulated,
)
from tests.pool import Pool


@dataclass(frozen=True)
class Plan:
    """What all members of one group give, by their places.

    The numbers are lists of k for each member: k // p slices for each of the p members.
    """

    operands: list[np.ndarray]
    outputs: list[np.ndarray]
    input_offsets: np.ndarray
    send_sizes: np.ndarray
    output_offsets: np.ndarray
    recv_sizes: np.ndarray


def draw_plan(size: int, count: int, dtype: Any, seed: int) -> Plan:
    """Slices of 0 to 2 rows that may overlap where they are read, and lie apart where they go."""
    random = np.random.default_rng(seed)
    num_slices = size * count
    sent = random.integers(0, 3, (size, num_slices))
    num_rows = random.integers(2, 6, size)  # of each operand
    starts = random.integers(0, 100, (size, num_slices)) % (num_rows[:, None] - sent + 1)
    # By receiver: what comes, in the order of senders, is laid out in an order of its own.
    taken = np.stack([sent[:, j * count : (j + 1) * count].reshape(-1) for j in range(size)])
    places = np.zeros_like(sent)
    lengths = []
    for j in range(size):
        end = 1
        for k in random.permutation(num_slices):
            sender, number = divmod(k, count)
            places[sender, j * count + number] = end
            end += taken[j, k] + random.integers(0, 2)
        lengths.append(end + 1)

    def rows(count: int) -> np.ndarray:
        real, imaginary = random.integers(-4, 5, (2, count, 3))
        return (real + 1j * imaginary if np.dtype(dtype).kind == "c" else real).astype(dtype)

    return Plan(
        [rows(n) for n in num_rows], [rows(n) for n in lengths], starts, sent, places, taken
    )


def wanted(plan: Plan) -> list[np.ndarray]:
    """The oracle: one slice after the other."""
    results = [output.copy() for output in plan.outputs]
    size, num_slices = plan.send_sizes.shape
    for sender in range(size):
        for k in range(num_slices):
            start, length = plan.input_offsets[sender, k], plan.send_sizes[sender, k]
            place = plan.output_offsets[sender, k]
            slice_ = plan.operands[sender][start : start + length]
            results[k // (num_slices // size)][place : place + length] = slice_
    return results


def run_plan(plan: Plan, ys: list[np.ndarray], group: Any) -> tuple[Any, ...]:
    """The value, both gradients, and the derivative of the gradients."""
    place = group.rank()
    operand = torch.tensor(plan.operands[place], requires_grad=True)
    output = torch.tensor(plan.outputs[place], requires_grad=True)
    numbers = [
        getattr(plan, name)[place]
        for name in ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    ]
    numbers[0], numbers[1] = torch.tensor(numbers[0]), numbers[1].tolist()
    value = ragged_all_to_all(operand, output, *numbers, group)
    y = torch.tensor(ys[place], requires_grad=True)
    gradients = torch.autograd.grad(value, (operand, output), y, create_graph=True)
    (again,) = torch.autograd.grad(gradients, y, (operand.detach(), output.detach()))
    assert again.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
    return tuple(one.detach().numpy() for one in (value, *gradients, again))


def on_members(ranks: Any, axes: tuple[str, ...], count: int, dtype: Any) -> list[Any]:
    mesh = md.DeviceMesh("cpu", ranks, mesh_dim_names=NAMES[3 - ranks.ndim :])
    group = mesh[axes].open_group()
    found = []
    for seed in range(4):
        plan = draw_plan(group.size(), count, dtype, seed)
        found.append(run_plan(plan, gradients_of(plan, seed), group))
    return found


def gradients_of(plan: Plan, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(1000 + seed)
    return [random.integers(-4, 5, one.shape).astype(one.dtype) for one in plan.outputs]


def check(place: str, count: int, dtype: Any, run: Run = simulated) -> None:
    ranks, axes = np.asarray(PLACES[place][0]), PLACES[place][1]
    results = run(on_members, ranks.size, ranks, axes, count, dtype)
    for members in groups_of(ranks, axes):
        for seed in range(4):
            plan = draw_plan(len(members), count, dtype, seed)
            ys = gradients_of(plan, seed)
            found = [results[rank][seed] for rank in members]
            values, of_operand, of_output, again = zip(*found, strict=True)
            assert all(map(equal, values, wanted(plan)))
            assert inner("V", values, ys) == inner("V", plan.operands, of_operand) + inner(
                "V", plan.outputs, of_output
            )
            assert all(map(equal, again, wanted(plan)))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("place", PLACES)
def test_values_adjoints_and_second_derivatives(place: str, dtype: Any, count: int) -> None:
    check(place, count, dtype)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_same_on_processes(backend: str, pool: Pool) -> None:
    check("a line", 2, np.float64, partial(pool.run, backend=backend))


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("place", PLACES)
def test_the_same_over_mpi(place: str, pool: Pool) -> None:
    check(place, 2, np.float64, partial(run_over_mpi, pool))


def test_tokens_go_to_experts_and_come_back() -> None:
    """The use that it is made for: the way back has the sizes of the way there, exchanged."""

    def body(group: Any) -> Any:
        rank, size = group.rank(), group.size()
        counts = torch.tensor([[1, 2, 0], [0, 1, 3], [2, 0, 1]])  # of tokens, from rank to expert
        sent, taken = counts[rank], counts[:, rank]
        tokens = (torch.arange(float(sent.sum())) + 10 * rank).requires_grad_()
        starts = sent.cumsum(0) - sent
        # Where my tokens go at each expert: behind those of the ranks before me.
        there = (counts.cumsum(0) - counts)[rank]
        buffer = torch.zeros(int(taken.sum()))
        at_experts = ragged_all_to_all(tokens, buffer, starts, sent, there, taken, group)
        done = at_experts * (rank + 1)
        here = taken.cumsum(0) - taken  # in the experts' rows, by the tokens' rank
        back = (counts.cumsum(1) - counts)[:, rank]
        result = ragged_all_to_all(done, torch.zeros_like(tokens), here, taken, back, sent, group)
        result.sum().backward()
        scale = torch.repeat_interleave(torch.arange(size) + 1.0, sent)
        return torch.equal(result, tokens * scale), torch.equal(tokens.grad, scale)

    assert on_a_line(body, 3) == [(True, True)] * 3


def rows(count: int = 4) -> torch.Tensor:
    return torch.ones(count, 2)


HERE = "rank 0, axis 'tp' of DeviceMesh(tp=2)"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            (rows(), torch.ones(4, 3), [0, 0], [1, 1], [0, 0], [1, 1]),
            ShapeError,
            "ragged_all_to_all: operand and output must have rows of the same shape\n"
            f"  where:    {HERE}\n"
            "  expected: equal shapes except in dimension 0\n"
            "  found:    operand shape (4, 2), float32; output shape (4, 3), float32\n"
            "  fix:      create output with the row shape of operand",
        ),
        (
            (rows(), rows().double(), [0, 0], [1, 1], [0, 0], [1, 1]),
            DtypeError,
            "ragged_all_to_all: operand and output must have the same dtype and device\n"
            f"  where:    {HERE}\n"
            "  found:    operand shape (4, 2), float32; output shape (4, 2), float64; on cpu and "
            "cpu\n"
            "  fix:      create output with the dtype and device of operand",
        ),
        (
            (rows(), rows(), [0, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1]),
            ShapeError,
            "ragged_all_to_all: offsets and sizes must have the same length, a multiple of "
            "the group's size\n"
            f"  where:    {HERE}\n"
            "  expected: four lists of k numbers, k a multiple of 2\n"
            "  found:    3 input_offsets, 3 send_sizes, 3 output_offsets, 2 recv_sizes\n"
            "  fix:      pass the same number of slices for each rank, in all four lists",
        ),
        (
            (rows(), rows(), [0, 3], [1, 2], [0, 0], [1, 1]),
            ArgumentError,
            "ragged_all_to_all: slices must be within operand\n"
            f"  where:    {HERE}\n"
            "  expected: no negative number, and no slice that ends after row 4\n"
            "  found:    input_offsets [0, 3], send_sizes [1, 2], output_offsets [0, 0], "
            "recv_sizes [1, 1]\n"
            "  fix:      pass the first row of each slice in input_offsets, and its rows in "
            "send_sizes",
        ),
        (
            (rows(), rows(), [0, 0], [1.0, 1], [0, 0], [1, 1]),
            KindError,
            "ragged_all_to_all: send_sizes must be a one-dim array or a list of integers\n"
            "  found:    [1.0, 1], a list\n"
            "  fix:      pass a one-dim array or a list of integers",
        ),
    ],
)
def test_refusals(given: Any, error: type[Exception], text: str) -> None:
    """On one rank alone: nothing was sent."""

    def body(group: Any) -> str:
        if group.rank():
            return ""
        with pytest.raises(error) as caught:
            ragged_all_to_all(*given, group)
        assert type(caught.value) is error
        return str(caught.value)

    assert on_a_line(body, 2)[0] == text


def test_what_does_not_fit_between_ranks_is_told_to_all() -> None:
    """Each rank is wrong in another way, and only a receiver can see it."""

    def body(group: Any) -> str:
        rank = group.rank()
        output = rows(1 if rank == 1 else 4)
        places = [0, 1 if rank == 2 else 0, 0, 0 if rank < 2 else 2]
        taken = [1, 1, 1, 1] if rank else [1, 1, 1, 2]
        with pytest.raises(ArgumentError) as caught:
            ragged_all_to_all(rows(), output, [0] * 4, [1] * 4, places, taken, group)
        return str(caught.value)

    (text,) = set(on_a_line(body, 4))
    assert text == (
        "ragged_all_to_all over axis 'tp' of DeviceMesh(tp=4): offsets and sizes do not match "
        "between ranks\n"
        "  expected: recv_sizes equal to the senders' send_sizes, and separate slices in output\n"
        "  found:    rank 0: recv_sizes differ from the sizes that are sent to it\n"
        "            rank 1: rows sent to it go beyond the end of its output\n"
        "            ranks 2-3: rows sent to it overlap in its output\n"
        "  fix:      compute recv_sizes = lax.all_to_all(send_sizes, axis, 0, 0, tiled=True)"
    )
