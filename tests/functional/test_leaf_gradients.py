"""``simulate(..., compare_gradients=True)``: forgotten casts are named, right programs pass."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import GradientError
from meshdist.functional.value_checks import GradientNotes
from tests.inner import get_world


def mesh_of(**sizes: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def refused(program: Callable[..., Any], ranks: int, *args: Any) -> GradientError:
    """The error of a program that runs through where nothing is compared."""
    md.simulate(program, ranks, args)
    with pytest.raises(GradientError) as caught:
        md.simulate(program, ranks, args, compare_gradients=True)
    return caught.value


def passes(program: Callable[..., Any], ranks: int, *args: Any) -> None:
    """The results are those of a run where nothing is compared."""
    compared = md.simulate(program, ranks, args, compare_gradients=True)
    torch.testing.assert_close(compared, md.simulate(program, ranks, args), rtol=0, atol=0)


def leaves_of(error: GradientError) -> list[str]:
    return [line.partition(",")[0] for line in str(error.found).splitlines()]


class Split(nn.Module):
    """A norm, and two layers split over tp; ``is_cast`` says whether the cast is there."""

    def __init__(self, tp: md.DeviceMesh, is_cast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.tp, self.is_cast = tp, is_cast
        part = tp.get_local_rank()
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(2, 0)[part].clone())
        self.up.bias = nn.Parameter(self.up.bias.detach().chunk(2, 0)[part].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(2, 1)[part].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.is_cast:
            h = md.lax.pvary(h, self.tp)
        h = torch.relu(self.up(h)) @ self.down.weight.t()
        return md.lax.psum(h, self.tp) + self.down.bias


def split_layers(is_cast: bool, way: str = "backward") -> Any:
    mesh = mesh_of(dp=2, tp=2)
    model = Split(mesh["tp"], is_cast)
    batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    if way == "checkpoint":
        loss = checkpoint(model, batch, use_reentrant=False).square().mean()
    elif way == "ddp":
        loss = md.DDP(model, device_mesh=mesh["dp"])(batch).square().mean()
    else:
        loss = model(batch).square().mean()
    parameters = list(model.parameters())
    if way in ("grad", "create_graph"):
        return torch.autograd.grad(loss, parameters, create_graph=way == "create_graph")
    loss.backward()
    return [parameter.grad for parameter in parameters]


WAYS = ["backward", "grad", "create_graph", "checkpoint", "ddp"]


# Where a rank is left inside torch's checkpoint, torch up to 2.12 raises in a generator's end.
@pytest.mark.filterwarnings("ignore:.*_checkpoint_without_reentrant_generator")
@pytest.mark.parametrize("way", WAYS)
def test_a_norm_before_split_layers_lacks_its_cast(way: str) -> None:
    names = leaves_of(refused(split_layers, 4, False, way))
    gc.collect()
    assert names == ["model.norm.weight", "model.norm.bias"]


@pytest.mark.parametrize("way", WAYS)
def test_with_the_cast_the_program_passes(way: str) -> None:
    passes(split_layers, 4, True, way)


def by_hand(is_cast: bool) -> Any:
    mesh = mesh_of(dp=3)
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    mine = torch.tensor([1.0, 1.0 + md.get_rank()])
    with mesh:
        there = md.lax.pvary(weight, "dp") if is_cast else weight
        md.lax.pmean((there * mine).sum(), "dp").backward()
    return weight.grad


def test_the_whole_text() -> None:
    error = refused(by_hand, 3, False)
    lines = str(error).splitlines()
    assert lines[0] == (
        "leaves that are equal over axis 'dp' of DeviceMesh(dp=3) have gradients that are not"
    )
    assert lines[1].startswith("  where:    behind the backward at ")
    assert "test_leaf_gradients.py:" in lines[1]
    assert lines[2:] == [
        "  expected: equal gradients, as leaves that are equal along an axis are invariant there",
        "  found:    weight, shape (2,), float32: ranks 1-2 differ from rank 0, by up to 2 of its "
        "largest value",
        "  fix:      cast where it meets values that vary: lax.pvary(weight, 'dp')",
        "            or, where equal numbers are chance, as zeros of a shard: "
        "md.annotate(weight, varying='dp')",
        "            or, where gradients are summed later: md.annotate(weight, reduced='dp')",
    ]
    passes(by_hand, 3, True)


@pytest.mark.parametrize("verb", ["psum", "pmean", "pmax", "pmin", "all_gather", "pbroadcast"])
def test_every_verb_with_an_invariant_result(verb: str) -> None:
    def program(is_cast: bool) -> Any:
        mesh = mesh_of(tp=2)
        weight = torch.tensor([3.0], requires_grad=True)
        there = md.lax.pvary(weight, "tp", mesh=mesh) if is_cast else weight
        mine = there * (1.0 + md.get_rank())
        if verb == "all_gather":
            result = md.lax.all_gather(mine, "tp", to="invarying", mesh=mesh)
        elif verb == "pbroadcast":
            result = md.lax.pbroadcast(mine, "tp", 0, mesh=mesh)
        else:
            result = getattr(md.lax, verb)(mine, "tp", mesh=mesh)
        result.sum().backward()
        return weight.grad

    assert leaves_of(refused(program, 2, False)) == ["weight"]
    passes(program, 2, True)


def test_axes_together_compare_the_ranks_with_equal_values() -> None:
    def program(is_cast: bool) -> Any:
        mesh = mesh_of(dp=2, tp=2)
        shard = torch.tensor([1.0 + mesh.get_local_rank("tp")], requires_grad=True)
        with mesh:
            there = md.lax.pvary(shard, "dp") if is_cast else shard
            md.lax.psum(there * (1.0 + md.get_rank()), ("dp", "tp")).backward()
        return shard.grad

    error = refused(program, 4, False)
    assert leaves_of(error) == ["shard", "shard"]
    assert "rank 2 differs from rank 0" in str(error) and "rank 3 differs from" in str(error)
    assert "lax.pvary(shard, ('dp', 'tp'))" in str(error)
    passes(program, 4, True)


def test_a_gradient_that_a_rank_lacks_is_zeros() -> None:
    def program() -> None:
        mesh = mesh_of(tp=2)
        used, other = (torch.ones(1, requires_grad=True) for _ in range(2))
        mine = used * 2 + (other.detach() if md.get_rank() else other)
        md.lax.psum(mine + 0 * other.clone().detach(), "tp", mesh=mesh).backward()

    passes(program, 2)  # `other` is a leaf of one rank's graph alone: nothing to compare

    class KeepNothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    def lacking() -> None:
        mesh = mesh_of(tp=2)
        weight = torch.ones(1, requires_grad=True)
        mine = weight * 2 if md.get_rank() == 0 else KeepNothing.apply(weight)
        md.lax.psum(mine, "tp", mesh=mesh).backward()

    assert "rank 1 differs from rank 0, by up to 1 of" in str(refused(lacking, 2))


@pytest.mark.parametrize("kind", ["varying", "reduced"])
def test_what_is_annotated_may_differ(kind: str) -> None:
    def program(axis: str) -> Any:
        mesh = mesh_of(dp=1, tp=2)
        bias = md.annotate(torch.zeros(2, requires_grad=True), **{kind: axis})
        md.lax.psum(bias * md.get_rank(), "tp", mesh=mesh).sum().backward()
        return bias.grad

    passes(program, 2, "tp")
    assert leaves_of(refused(program, 2, "dp")) == ["bias"]


def test_sums_behind_the_backward_need_no_verb_of_lax() -> None:
    def averaged_by_hand() -> Any:
        mesh_of(dp=2)
        weight = torch.ones(2, requires_grad=True)
        (weight * md.get_rank()).sum().backward()
        md.all_reduce(weight.grad)
        return weight.grad

    passes(averaged_by_hand, 2)


def test_statistics_over_the_axis_of_a_wrapper_are_right() -> None:
    def program() -> Any:
        mesh = mesh_of(dp=2)

        class Centred(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x)
                return y - md.lax.pvary(md.lax.pmean(y.mean(), mesh["dp"]), mesh["dp"])

        torch.manual_seed(0)
        model = md.DDP(Centred(2, 2), device_mesh=mesh["dp"])
        model(torch.eye(2) * (1 + md.get_rank())).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    passes(program, 2)


def test_inside_typed_contexts_programs_pass() -> None:
    def program() -> Any:
        mesh = mesh_of(dp=2)
        weight = torch.ones(2, requires_grad=True)
        batch = md.annotate(torch.ones(2) * md.get_rank(), varying="dp")
        with md.typed(mesh):
            md.lax.pmean((weight * batch).sum(), "dp").backward()
            with md.accumulate_gradients([weight], "dp"):
                md.lax.pmean((weight * batch).sum(), "dp").backward()
        return weight.grad

    passes(program, 2)


def test_later_backwards_are_compared_as_well() -> None:
    def program() -> None:
        mesh = mesh_of(tp=2)
        weight = torch.ones(1, requires_grad=True)
        for step in range(3):
            there = md.lax.pvary(weight, "tp", mesh=mesh) if step < 2 else weight
            md.lax.psum(there * md.get_rank(), "tp", mesh=mesh).backward()
            with torch.no_grad():
                weight -= weight.grad
            weight.grad = None

    assert leaves_of(refused(program, 2)) == ["weight"]


def test_a_rank_that_runs_no_backward_is_not_waited_for() -> None:
    def program() -> Any:
        mesh = mesh_of(tp=2)
        weight = torch.ones(1, requires_grad=True)
        for _ in range(20):
            loss = md.lax.psum(weight * md.get_rank(), "tp", mesh=mesh)
            if md.get_rank() == 0:
                loss.backward()
        compared = get_world().compared
        assert compared is not None
        return weight.grad, len(compared.of(GradientNotes).ended)

    ended, _ = md.simulate(program, 2, compare_gradients=True)
    torch.testing.assert_close(ended, (torch.zeros(1), 8))  # of the last ones alone


def test_many_leaves_are_counted_and_nameless_ones_numbered() -> None:
    def program() -> None:
        mesh = mesh_of(tp=2)

        def mine() -> torch.Tensor:
            return sum(torch.ones(1, requires_grad=True) * md.get_rank() for _ in range(11))  # type: ignore[return-value]

        md.lax.psum(mine(), "tp", mesh=mesh).backward()

    names = leaves_of(refused(program, 2))
    assert len(names) == 9 and names[-1] == "and 3 more"
    assert names[0] == "leaf 0 of the graph"


def test_transforms_are_left_alone() -> None:
    def program() -> Any:
        mesh = mesh_of(tp=2)

        def loss(w: torch.Tensor) -> torch.Tensor:
            return md.lax.psum(w * md.get_rank(), "tp", mesh=mesh)

        return torch.func.grad(loss)(torch.tensor(1.0))

    passes(program, 2)


# -- typed contexts: a batch without its annotation ----------------------------------------------


def unmarked_batch(is_marked: bool, way: str) -> Any:
    mesh = mesh_of(dp=2, tp=2)
    weight = torch.ones(2, requires_grad=True)
    shard = md.annotate(torch.full((2,), 1.0 + mesh.get_local_rank("tp")), varying="tp")
    shard.requires_grad_()
    batch = torch.ones(2) * (1 + mesh.get_local_rank("dp"))
    if is_marked:
        md.annotate(batch, varying="dp")
    with md.typed(mesh):
        loss = (weight * batch).sum()
        if way == "shard":
            loss = md.lax.psum((weight * batch * shard).sum(), "tp")
        if is_marked:
            loss = md.lax.psum(loss, "dp")
        if way == "grad":
            return torch.autograd.grad(loss, [weight])
        loss.backward()
    return weight.grad, shard.grad


@pytest.mark.parametrize("way", ["backward", "grad", "shard"])
def test_a_batch_that_nobody_annotated_is_found_in_typed_contexts(way: str) -> None:
    error = refused(unmarked_batch, 4, False, way)
    assert set(leaves_of(error)) == ({"weight", "shard"} if way == "shard" else {"weight"})
    lines = str(error).splitlines()
    assert lines[0] == (
        "leaves that are equal over axis 'dp' of DeviceMesh(dp=2, tp=2) have gradients that are not"
    )
    assert "differs from rank" in lines[3] and "by up to 1 of" in lines[3]
    assert "say which data differ, where they enter: md.annotate(batch, varying='dp')" in str(error)
    assert "lax.pvary" not in str(error)
    passes(unmarked_batch, 4, True, way)


# -- leaves that part behind a backward -----------------------------------------------------------


def clipped(is_typed: bool, way: str, lr: float = 0.1) -> Any:
    mesh = mesh_of(dp=1, tp=2)
    model = Split(mesh["tp"], is_cast=not is_typed)
    for one in (model.up.weight, model.up.bias, model.down.weight):
        md.annotate(one, varying="tp")
    data = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(2):
        if way != "accumulated":
            optimizer.zero_grad(set_to_none=way != "zeroed")
        with md.typed(mesh) if is_typed else nullcontext():
            model(data).square().sum().backward()
        if way != "whole":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if way != "accumulated":
            optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["", "zeroed", "accumulated", "small"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_clip_by_each_ranks_own_norm_is_told_as_such(is_typed: bool, way: str) -> None:
    text = str(refused(clipped, 2, is_typed, way, 1e-5 if way == "small" else 0.1))
    lines = text.splitlines()
    assert lines[0] == (
        "leaves that were equal over axis 'tp' of DeviceMesh(dp=1, tp=2) when the last backward "
        "ended have parted"
    )
    assert lines[3].startswith("  found:    model.")
    if way != "accumulated":
        assert "rank 1 differs from rank 0, by up to" in lines[3]
    by = "ranks 0-1: 1 of" if way == "zeroed" else "rank 0: 0."
    assert f"its gradient changed since by {by}" in lines[3]
    assert "torch's clip_grad_norm_ takes the norm of its own gradients, md.clip_grad_" in text
    assert "pvary" not in text


@pytest.mark.parametrize("is_typed", [True, False])
def test_steps_without_a_clip_pass(is_typed: bool) -> None:
    passes(clipped, 2, is_typed, "whole")


def test_clipping_by_the_norm_of_all_ranks_passes() -> None:
    def program() -> Any:
        mesh = mesh_of(dp=2, tp=2)
        model = Split(mesh["tp"], is_cast=True)
        for one in (model.up.weight, model.up.bias, model.down.weight):
            md.annotate(one, varying="tp")
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
            md.lax.pmean(model(torch.randn(3, 6, generator=generator)).square().sum(), mesh["dp"])
            loss = model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step)))
            loss.square().sum().backward()
            md.clip_grad_norm_(model.parameters(), 0.1, mesh=mesh)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    passes(program, 4)


def test_weights_that_one_rank_loads_have_parted() -> None:
    def program() -> None:
        mesh = mesh_of(dp=2)
        weight = torch.ones(2, requires_grad=True)
        for _ in range(2):
            weight.grad = None
            there = md.lax.pvary(weight, "dp", mesh=mesh)
            md.lax.psum((there * (1 + md.get_rank())).sum(), "dp", mesh=mesh).backward()
            if md.get_rank():
                with torch.no_grad():
                    weight += 5

    error = refused(program, 2)
    assert str(error.found) == (
        "weight, shape (2,), float32: rank 1 differs from rank 0, by up to 5 of its largest value; "
        "its gradient changed since by ranks 0-1: 0 of its largest value"
    )
