"""Norms of gradients that holders of equal elements do not all have, or have each their own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch import nn

import meshdist as md
from meshdist.ddp.norm_flags import lacking_flag
from meshdist.errors import GradientError
from tests.ddp.pretended_gpu import pretended_gpu
from tests.pool import Pool
from tests.two_hosts import TwoHosts

AXES = ("pod", "dp", "tp")


def open_mesh(device: str = "cpu") -> md.DeviceMesh:
    return md.init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))


def parameters(mesh: md.DeviceMesh) -> list[nn.Parameter]:
    """Two parameters that are cut over 'tp' and one that is equal on all ranks, with gradients."""
    made = [nn.Parameter(torch.zeros(4, device=mesh.device_type)) for _ in range(3)]
    for parameter in made:
        parameter.grad = torch.full((4,), 2.0, device=mesh.device_type)
    for parameter in made[:2]:
        md.annotate(parameter, "f@tp", mesh=mesh)
    return made


def refusal(mesh: md.DeviceMesh, given: Any, order: float = 2.0, **more: Any) -> str:
    """The text with which a clip is rejected, which has scaled nothing."""
    given = [*given]
    before = [None if p.grad is None else p.grad.clone() for p in given]
    with pytest.raises(GradientError) as raised:
        md.clip_grad_norm_(given, 1.0, order, mesh=mesh, **more)
    for parameter, grad in zip(given, before, strict=True):
        assert grad is None or torch.equal(parameter.grad, grad)
    return str(raised.value)


# -- gradients that some holders lack -------------------------------------------------------------

LACKING = {
    "one replica": {(1, 0): [0], (1, 1): [0]},
    "one rank": {(0, 1): [1]},
    "another on each replica": {(0, 0): [0], (1, 0): [1]},
    "crosswise": {(0, 0): [0], (1, 1): [0]},
}
"""By (dp, tp), which parameters have no gradient there."""
FOUND = {
    "one replica": "parameter 0, float32[4]{V:tp}: None on ranks 2-3",
    "one rank": "parameter 1, float32[4]{V:tp}: None on rank 1",
    "another on each replica": "parameter 0, float32[4]{V:tp}: None on rank 0\n"
    "            parameter 1, float32[4]{V:tp}: None on rank 2",
    "crosswise": "parameter 0, float32[4]{V:tp}: None on ranks 0, 3",
}


def lacking(case: str) -> str:
    mesh = open_mesh()
    given = parameters(mesh)
    for index in LACKING[case].get(mesh.get_coordinate(), []):
        given[index].grad = None
    return refusal(mesh, given)


def check_lacking(case: str, texts: list[str]) -> None:
    for rank, text in enumerate(texts):
        first, where, rest = text.split("\n", 2)
        assert first == (
            "clip_grad_norm_: only some of the ranks that hold the same elements have a gradient"
        )
        assert f"rank {rank} (" in where and "DeviceMesh(dp=2, tp=2)" in where
        assert rest == (
            "  expected: a gradient on all ranks that hold the same part of a parameter, or "
            "on none of them\n"
            f"  found:    {FOUND[case]}\n"
            "  fix:      use the parameter in the loss of each of these ranks; or set zeros: "
            "p.grad = torch.zeros_like(p)"
        )


@pytest.mark.parametrize("case", LACKING)
def test_a_gradient_that_some_holders_lack_is_rejected_on_all_ranks(case: str) -> None:
    check_lacking(case, md.simulate(lacking, 4, (case,)))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_on_processes(pool: Pool, backend: str) -> None:
    for case in LACKING:
        check_lacking(case, pool.run(lacking, 4, case, backend=backend))


def test_over_two_hosts(two_hosts: TwoHosts) -> None:
    check_lacking("crosswise", two_hosts.run(lacking, 4, "crosswise", backend=None))


def test_what_the_refusal_proposes() -> None:
    def program() -> float:
        mesh = open_mesh()
        given = parameters(mesh)
        if mesh.get_local_rank("dp") == 1:
            given[0].grad = None
        fix = refusal(mesh, given).rpartition("set zeros: ")[2]
        for p in given:
            if p.grad is None:
                exec(fix, {"p": p, "torch": torch})
        return md.clip_grad_norm_(given, 9.0, mesh=mesh).item()

    # Of the first parameter the mean over holders of its squares: half of 32.
    assert md.simulate(program, 4) == pytest.approx([math.sqrt(32 / 2 + 32 + 16)] * 4)


def test_the_largest_value_is_that_of_the_holders_that_have_it() -> None:
    def program() -> float:
        mesh = open_mesh()
        given = parameters(mesh)
        if mesh.world.rank == 0:
            given[0].grad = None
        else:
            given[0].grad *= 4
        return md.clip_grad_norm_(given, 100.0, math.inf, mesh=mesh).item()

    assert md.simulate(program, 4) == [8.0] * 4


def test_holders_of_another_number_of_parameters_are_rejected() -> None:
    def program() -> str:
        mesh = open_mesh()
        given = parameters(mesh)
        return refusal(mesh, given[1:] if mesh.world.rank == 3 else given)

    for text in md.simulate(program, 4):
        assert "found:    parameter 1, float32[4]{V:tp}: None on rank 3\n" in text


@st.composite
def livenesses(draw: st.DrawFn) -> Any:
    shape = draw(
        st.sampled_from([(1, 1, 2), (1, 2, 2), (2, 2, 2), (1, 3, 2), (2, 1, 3), (2, 2, 4)])
    )
    cuts = draw(st.lists(st.sets(st.sampled_from(AXES), min_size=1), min_size=1, max_size=4))
    seed = draw(st.integers(0, 10**6))
    return shape, [frozenset(axes) for axes in cuts], seed


@given(livenesses(), st.booleans())
@example(case=((2, 2, 2), [frozenset({"dp", "tp"})], 434), agrees=False)  # none in the second pod
def test_the_sum_of_flags_is_zero_where_holders_agree_alone(case: Any, agrees: bool) -> None:
    shape, cuts, seed = case
    draws = torch.Generator().manual_seed(seed)
    coordinates = [*itertools.product(*map(range, shape))]

    def part(axes: frozenset[str], at: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x for x, name in zip(at, AXES, strict=True) if name in axes)

    def draw(keys: Any) -> dict[Any, bool]:
        return {key: bool(torch.rand((), generator=draws) < 0.7) for key in sorted(set(keys))}

    if agrees:
        tables = [draw(part(axes, at) for at in coordinates) for axes in cuts]
        has = [
            {at: t[part(a, at)] for at in coordinates} for a, t in zip(cuts, tables, strict=True)
        ]
    else:
        has = [draw(coordinates) for _ in cuts]

    def program() -> int:
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=AXES)
        mine: dict[frozenset[str], list[bool]] = {}
        for axes, table in zip(cuts, has, strict=True):
            mine.setdefault(axes, []).append(table[mesh.get_coordinate()])
        return lacking_flag(mine, mesh)

    is_equal = all(
        table[one] == table[other]
        for axes, table in zip(cuts, has, strict=True)
        for one, other in itertools.combinations(coordinates, 2)
        if part(axes, one) == part(axes, other)
    )
    assert (sum(md.simulate(program, math.prod(shape))) == 0) == is_equal


# -- gradients that are not averaged ---------------------------------------------------------------


class Split(nn.Module):
    """A weight that is cut over 'tp', and a bias."""

    def __init__(self, mesh: md.DeviceMesh) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(2, device=mesh.device_type)) for _ in range(2)
        )
        md.annotate(self, {"weight": "f@tp", "bias": "f"}, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x + self.bias).sum()


def wrapped(mesh: md.DeviceMesh) -> tuple[md.DDP, Callable[[], None]]:
    """A model, and its backward of data that differ along 'dp'."""
    model = md.DDP(Split(mesh), device_mesh=mesh["dp"])
    x = torch.full((2,), 1.0 + mesh.get_local_rank("dp"), device=mesh.device_type)
    return model, lambda: model(x).backward()


def local(order: float) -> str:
    mesh = open_mesh()
    model, backward = wrapped(mesh)
    with model.no_sync():
        backward()
        backward()
    return refusal(mesh, model.parameters(), order)


def check_local(texts: list[str]) -> None:
    for rank, text in enumerate(texts):
        first, where, rest = text.split("\n", 2)
        assert first == "clip_grad_norm_ of gradients that are not averaged"
        assert f"rank {rank} (" in where and "DeviceMesh(dp=2, tp=2)" in where
        assert rest == (
            "  expected: gradients after a backward outside no_sync(), which averages them "
            "over 'dp'\n"
            "  found:    parameter 0, float32[2]{V:tp R:dp}, on ranks 0-3\n"
            "            parameter 1, float32[2]{R:dp}, on ranks 0-3\n"
            "  fix:      clip after that backward; for a separate norm per replica, pass "
            "mesh=mesh['tp']"
        )


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_gradients_under_no_sync_are_rejected_on_all_ranks(order: float) -> None:
    check_local(md.simulate(local, 4, (order,)))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_under_no_sync_on_processes(pool: Pool, backend: str) -> None:
    check_local(pool.run(local, 4, 2.0, backend=backend))


def test_one_rank_under_no_sync_is_named_on_all() -> None:
    def program() -> str:
        mesh = open_mesh()
        given = parameters(mesh)
        if mesh.world.rank < 2:  # of a model of their own
            part = mesh["tp"]
            model = md.DDP(nn.Linear(1, 1), device_mesh=part)
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            given += model.parameters()
        else:
            given += [nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))]
            for parameter in given[3:]:
                parameter.grad = torch.ones_like(parameter)
        return refusal(mesh, given)

    for text in md.simulate(program, 4):
        assert "which averages them over 'tp'" in text
        assert "parameter 3, float32[1, 1]{R:tp}, on ranks 0-1\n" in text
        assert "mesh=mesh['dp']" in text


def test_what_follows_no_sync_and_is_right() -> None:
    def program() -> list[float]:
        mesh = open_mesh()
        model, backward = wrapped(mesh)
        norms = []

        def clip(over: md.DeviceMesh = mesh) -> None:
            norms.append(md.clip_grad_norm_(model.parameters(), 1e9, mesh=over).item())
            model.zero_grad(set_to_none=len(norms) % 2 == 0)

        with model.no_sync():
            backward()
        clip(mesh["tp"])  # what the error proposes: each replica's own
        backward()
        clip()
        with model.no_sync():
            backward()
        backward()
        clip()  # the second backward has averaged both
        with model.no_sync():
            backward()
        for parameter in model.parameters():
            md.all_reduce(parameter.grad, md.ReduceOp.AVG, group=mesh["dp"])
        clip()  # the program has averaged
        with model.no_sync():
            backward()
        clip(mesh["tp"])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        clip()  # other gradients
        return norms

    def norm(x: float, times: int = 1) -> float:
        return times * math.sqrt(4 * x**2 + 2)  # two parts of the weight, and the bias

    for rank, norms in enumerate(md.simulate(program, 4)):
        x = 1.0 + rank // 2
        expected = [norm(x), norm(1.5), norm(1.5, 2), norm(1.5), norm(x), norm(1)]
        assert norms == pytest.approx(expected)


def test_where_nothing_is_cut_each_rank_has_its_own_norm() -> None:
    """As in torch, and as programs that average parameters want it."""

    def program() -> float:
        mesh = open_mesh()
        model = md.DDP(nn.Linear(1, 1, bias=False), device_mesh=mesh["dp"])
        with model.no_sync():
            model(torch.full((1, 1), 1.0 + mesh.world.rank)).sum().backward()
        return md.clip_grad_norm_(model.parameters(), 9.0, mesh=mesh).item()

    assert md.simulate(program, 4) == pytest.approx([1.0, 2.0, 3.0, 4.0])


# -- accelerators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_local", [True, False])
def test_on_an_accelerator_the_norm_is_nan(is_local: bool) -> None:
    """As far as a machine without a GPU can show it, by a stand-in."""

    def program() -> tuple[bool, str]:
        mesh = open_mesh("cuda")
        model, backward = wrapped(mesh)
        if is_local:
            with model.no_sync():
                backward()
        else:
            backward()
            if mesh.world.rank == 1:
                model.module.weight.grad = None
        norm = md.clip_grad_norm_(model.parameters(), 1.0, mesh=mesh)
        model.zero_grad()
        backward()
        return bool(norm.isnan()), md.clip_grad_norm_(model.parameters(), 9.0, mesh=mesh).item()

    with pretended_gpu():
        found = md.simulate(program, 4)
    assert found == [(True, pytest.approx(math.sqrt(4 * 1.5**2 + 2)))] * 4
