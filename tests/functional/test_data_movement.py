"""Exchanges, permutations and broadcasts against an oracle over the members' places."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.errors import ArgumentError, KindError, MismatchError, ShapeError
from meshdist.functional.data_movement import (
    all_to_all,
    pbroadcast,
    ppermute,
    pshuffle,
    pswapaxes,
)
from meshdist.functional.reductions import psum
from tests.functional.operation_cases import (
    PLACES,
    REARRANGING,
    check,
    check_memory,
    check_odd_gradients,
    on_a_line,
    run_over_mpi,
)
from tests.pool import Pool


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("place", PLACES)
def test_values_adjoints_and_second_derivatives(place: str, dtype: Any) -> None:
    check(place, REARRANGING, dtype)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_same_on_processes(backend: str, pool: Pool) -> None:
    check("permuted", REARRANGING, np.float64, partial(pool.run, backend=backend))


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("place", PLACES)
def test_the_same_over_mpi(place: str, dtype: Any, pool: Pool) -> None:
    check(place, REARRANGING, dtype, partial(run_over_mpi, pool))


@pytest.mark.parametrize("case", REARRANGING, ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_no_form_returns_memory_of_its_argument(case: Any, size: int) -> None:
    check_memory(case, size)


@pytest.mark.parametrize("case", REARRANGING, ids=str)
def test_gradients_that_are_missing_or_lie_otherwise(case: Any) -> None:
    check_odd_gradients(case)


def test_any_shape_and_dtype_can_be_permuted() -> None:
    def body(group: Any) -> Any:
        rank = group.rank()
        found = [
            ppermute(torch.tensor(rank + 1), group, [(0, 1)]),
            ppermute(torch.ones(0, 3), group, [(0, 1)]),
            ppermute(torch.tensor([True, rank == 0]), group, [(0, 1)]),
            ppermute((torch.arange(6.0) + rank).view(2, 3).T, group, [(0, 1)]),
            pbroadcast((torch.arange(6.0) + rank).view(2, 3).T, group, 1),
            pbroadcast(torch.tensor([1j * rank]).conj(), group, 1),
        ]
        return [one.tolist() for one in found]

    first, second = on_a_line(body, 2)
    late = [[1, 4], [2, 5], [3, 6]]
    assert first == [0, [], [False, False], [[0, 0]] * 3, late, [-1j]]
    assert second == [1, [], [True, True], [[0, 3], [1, 4], [2, 5]], late, [-1j]]


def test_nothing_is_sent_in_the_backward_of_a_broadcast() -> None:
    def body(group: Any) -> Any:
        x = torch.tensor(float(group.rank() + 1), requires_grad=True)
        loss = pbroadcast(x, group, 2) ** 2
        recorder = group.open_device_group("cpu").recorder
        before = recorder.sequence
        loss.backward()
        return x.grad.item(), recorder.sequence - before

    # One loss, 3 * 3, equal on all ranks: its derivative is 6, where a psum there would say 24.
    assert on_a_line(body, 4) == [(0.0, 0), (0.0, 0), (6.0, 0), (0.0, 0)]


def test_the_gradient_of_a_pipeline_goes_back_along_it() -> None:
    """Each place multiplies what came by its own weight, and passes it on."""

    def body(group: Any) -> Any:
        w = torch.tensor(float(group.rank() + 2), requires_grad=True)
        h = torch.ones(())
        for _ in range(2):
            h = ppermute(h * w, group, [(0, 1), (1, 2)])
        psum(h, group).backward()
        return h.item(), w.grad.item()

    # At the end place 2 holds w0 w1, with the derivatives w1 and w0.
    assert on_a_line(body, 3) == [(0.0, 3.0), (0.0, 2.0), (6.0, 0.0)]


def test_lists_of_pairs_that_differ_are_told_to_every_rank() -> None:
    def program() -> str:
        group = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).get_group("tp")
        with pytest.raises(MismatchError) as caught:
            ppermute(torch.ones(2), group, [(0, 1)] if md.get_rank() else [(0, 1), (1, 0)])
        return str(caught.value).partition("\n")[0]

    (text,) = set(md.simulate(program, 2))
    assert text.startswith("collective mismatch: ranks made different calls as call")


WHERE = "over axis 'tp' of DeviceMesh(tp=2)"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x, group: all_to_all(x, group, 1, 0, tiled=True),
            ShapeError,
            "all_to_all cannot split dimension 1 of size 3 into 2 equal blocks\n"
            "  where:    rank 0, axis 'tp' of DeviceMesh(tp=2); argument x, shape (2, 3), float32\n"
            "  expected: x.shape[1] divisible by 2, the number of ranks\n"
            "  fix:      pad dimension 1 to 4, or pass split_axis=0",
        ),
        (
            lambda x, group: all_to_all(x, group, 0, 2),
            ShapeError,
            "all_to_all: concat_axis=2 is out of range for a tensor of 2 dimensions\n"
            "  expected: a number from -2 to 1\n"
            "  fix:      pass concat_axis in this range",
        ),
        (
            lambda x, group: pswapaxes(x, group, 1),
            ShapeError,
            "pswapaxes cannot split dimension 1 of size 3 into 2 blocks of one index each\n"
            "  where:    rank 0, axis 'tp' of DeviceMesh(tp=2); argument x, shape (2, 3), float32\n"
            "  expected: x.shape[1] equal to 2, the number of ranks\n"
            "  fix:      pass axis=0",
        ),
        (
            lambda x, group: ppermute(x, group, {0: 1}),
            KindError,
            "ppermute: perm must be a list of pairs (source, destination)\n"
            "  found:    {0: 1}, a dict\n"
            "  fix:      pass for example [(0, 1), (1, 0)]; for a permutation of all ranks, call "
            "pshuffle(x, axis, [1, 0])",
        ),
        (
            lambda x, group: ppermute(x, group, [(0, 1.5)]),
            KindError,
            "ppermute: each pair of perm must be a list or tuple of integers\n"
            "  found:    (0, 1.5), a tuple\n"
            "  fix:      pass a list or tuple of integers",
        ),
        (
            lambda x, group: ppermute(x, group, [(0, 2)]),
            ArgumentError,
            f"ppermute {WHERE}: destination 2 is not in the group\n"
            "  expected: indices along the axis from 0 to 1\n"
            "  found:    [(0, 2)]\n"
            "  fix:      pass indices along the axis, not global ranks",
        ),
        (
            lambda x, group: ppermute(x, group, [(0, 1), (0, 0)]),
            ArgumentError,
            f"ppermute {WHERE}: source 0 appears twice\n"
            "  expected: each index at most once as a source and at most once as a destination\n"
            "  found:    [(0, 1), (0, 0)]\n"
            "  fix:      remove the repeated pair, or call ppermute once for each pair",
        ),
        (
            lambda x, group: pshuffle(x, group, [0, 0]),
            ArgumentError,
            f"pshuffle {WHERE}: perm is not a permutation of its ranks\n"
            "  expected: each index from 0 to 1 once\n"
            "  found:    [0, 0]\n"
            "  fix:      pass each index once, or call ppermute with pairs for some ranks only",
        ),
        (
            lambda x, group: pshuffle(x, group, (True, False)),
            KindError,
            "pshuffle: perm must be a list or tuple of integers\n"
            "  found:    (True, False), a tuple\n"
            "  fix:      pass a list or tuple of integers",
        ),
        (
            lambda x, group: pbroadcast(x, group, 2),
            ArgumentError,
            "pbroadcast: source is 2\n"
            "  where:    axis 'tp' of DeviceMesh(tp=2)\n  expected: an integer from 0 to 1",
        ),
        (
            lambda x, group: pbroadcast(x, group, "tp"),
            KindError,
            "pbroadcast: source must be an integer\n"
            "  where:    axis 'tp' of DeviceMesh(tp=2)\n  found:    'tp', a str",
        ),
    ],
)
def test_refusals(call: Any, error: type[Exception], text: str) -> None:
    """On one rank alone: nothing was sent."""

    def body(group: Any) -> str:
        if group.rank():
            return ""
        with pytest.raises(error) as caught:
            call(torch.ones(2, 3), group)
        assert type(caught.value) is error
        return str(caught.value)

    assert on_a_line(body, 2)[0] == text
