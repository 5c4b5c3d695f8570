"""Draws of split models: ``md.fork_rng``, the styles of draws, and dropout that a plan omits."""

from __future__ import annotations

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    KindError,
    MeshError,
    NotInGroupError,
    UnequalError,
)
from tests.pool import Pool

from .split_models import copied

MESHES = [(1,), (2,), (3,), (2, 2), (2, 1, 2)]


def mesh_of(*shape: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp", "tp")[-len(shape) :])


# -- fork_rng -------------------------------------------------------------------------------------


def forked(shape: tuple[int, ...]) -> tuple[list[float], list[float], tuple[int, ...]]:
    """Return what is drawn outside and inside of two forks, and the rank's coordinate."""
    mesh = mesh_of(*shape)
    md.seed(5, differ_over=mesh.axis_names[0] if len(shape) > 1 else (), mesh=mesh)
    seed = torch.initial_seed()
    outside, inside = [], []
    for _ in range(2):
        numpy_state: Any = np.random.get_state()
        others = random.getstate(), numpy_state[1].tolist()
        with md.fork_rng("tp", mesh=mesh):
            inside += torch.rand(2).tolist()
        with mesh, md.fork_rng(differ_over=("tp",)):
            inside.append(torch.rand(1).item())
        numpy_state = np.random.get_state()
        assert (random.getstate(), numpy_state[1].tolist()) == others
        assert torch.initial_seed() == seed
        outside.append(torch.rand(1).item())
    with pytest.raises(KeyError), md.fork_rng("tp", mesh=mesh):
        raise KeyError
    outside.append(torch.rand(1).item())
    coordinate: Any = mesh.get_coordinate()
    return outside, inside, tuple(coordinate)


def check_forked(found: list[Any]) -> None:
    for outside, inside, coordinate in found:
        assert len({*outside, *inside}) == len(outside) + len(inside)
        for other_outside, other_inside, other in found:
            same_seed = len(coordinate) == 1 or coordinate[0] == other[0]
            assert (outside == other_outside) == same_seed
            assert (inside == other_inside) == (same_seed and coordinate[-1] == other[-1])
            if inside != other_inside:
                assert {*inside}.isdisjoint(other_inside)


@pytest.mark.parametrize("shape", MESHES)
def test_draws_differ_inside_and_are_equal_after(shape: tuple[int, ...]) -> None:
    check_forked(md.simulate(forked, math.prod(shape), args=(shape,)))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_forks_over_processes(pool: Pool, backend: str) -> None:
    check_forked(pool.run(forked, 2, (2,), backend=backend))


def test_draws_have_the_types_of_both_seeds() -> None:
    def program() -> list[str]:
        mesh = mesh_of(2, 2)
        x = torch.ones(4)
        md.seed(0, differ_over="dp", mesh=mesh)
        with md.typed(mesh):
            found = [torch.rand(1)]
            with md.fork_rng("tp"):
                found += [torch.rand(1), F.dropout(x)]
                with md.fork_rng("dp"):
                    found.append(torch.rand(1))
            found.append(torch.rand(1))
            md.seed(0)
            with md.fork_rng("tp", mesh=mesh["tp"]):
                found.append(torch.rand(1))
            found.append(torch.rand(1))
        return [str(md.typeof(each)).partition("]")[2] for each in found]

    assert (
        md.simulate(program, 4)
        == [["{V:dp}", "{V:dp,tp}", "{V:dp,tp}", "{V:dp,tp}", "{V:dp}", "{V:tp}", ""]] * 4
    )


@pytest.mark.parametrize("how", ["never", "later", "inside"])
def test_other_seeds_stay_unknown_in_a_fork(how: str) -> None:
    def program() -> None:
        mesh = mesh_of(2)
        if how != "never":
            md.seed(0)
        if how == "later":
            torch.manual_seed(3)
        with md.typed(mesh), md.fork_rng("tp"):
            if how == "inside":
                torch.manual_seed(3)
            with pytest.raises(AxisTypeError, match=r"md\.seed did not seed"):
                torch.rand(1)
        if how == "inside":
            with md.typed(mesh):
                torch.rand(1)

    md.simulate(program, 2)


def test_a_fork_in_a_transform_and_under_a_default_device() -> None:
    def program() -> list[float]:
        mesh = mesh_of(2)
        md.seed(0)

        def drop(x: torch.Tensor) -> torch.Tensor:
            with md.fork_rng("tp", mesh=mesh):
                return F.dropout(x)

        found = torch.vmap(drop, randomness="same")(torch.ones(2, 32))
        with torch.device("meta"), md.fork_rng("tp", mesh=mesh):
            pass
        return found[0].tolist()  # type: ignore[no-any-return]

    first, second = md.simulate(program, 2)
    assert first != second


def test_the_current_accelerator_is_forked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        mesh = mesh_of(1)
        md.seed(5)
        devices = tuple(torch.Generator().manual_seed(5) for _ in range(2))
        before = [x.get_state() for x in devices]
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: 1)
            patch.setattr(torch.cuda, "default_generators", devices)
            with md.fork_rng("tp", mesh=mesh):
                assert devices[1].initial_seed() == torch.initial_seed() != 5
                assert devices[0].initial_seed() == 5
        assert all(torch.equal(x.get_state(), y) for x, y in zip(devices, before, strict=True))

    md.simulate(program, 1)


def test_bad_arguments_of_fork_rng() -> None:
    def program() -> None:
        mesh = mesh_of(1, 2)
        half = md.DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
        wrong: list[tuple[Any, Any, type[Exception], str]] = [
            (1, mesh, KindError, r"md\.fork_rng cannot take 1 as differ_over"),
            ("tp", "tp", KindError, r"md\.fork_rng takes a mesh"),
            ("tp", None, MeshError, r"md\.fork_rng(.|\n)*there is no current mesh"),
            ("ep", mesh, AxisError, "ep"),
            (
                (),
                mesh,
                ArgumentError,
                r"md\.fork_rng takes the axes along which ranks draw different numbers\n"
                r"  found:    differ_over=\(\)\n  fix:      pass for example differ_over='tp'",
            ),
        ]
        if md.get_rank() == 1:
            wrong.append(("tp", half, NotInGroupError, "does not contain this rank"))
        state = torch.get_rng_state()
        for axes, given, kind, text in wrong:
            with pytest.raises(kind, match=text), md.fork_rng(axes, mesh=given):
                raise AssertionError
        assert torch.equal(torch.get_rng_state(), state)

    md.simulate(program, 2)


# -- styles of draws ------------------------------------------------------------------------------


class Block(nn.Module):
    """Dropout on hidden features, which are split, and on features that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.hidden, self.residual = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(torch.relu(self.up(self.norm(x))) + 1)
        self.masks.append(h.detach() != 0)
        return x + self.residual(self.down(h))  # type: ignore[no-any-return]


PLAN = {"up": "column", "down": "row", "hidden": "own_draws", "residual": "whole_draws"}


def trained(shape: tuple[int, ...], recomputes: bool, is_typed: bool) -> Any:
    """Return the losses of three steps, the masks of the first, and the weights of the norm."""
    mesh = mesh_of(*shape)
    md.seed(0)
    model, x = Block().double(), torch.randn(64, 8, dtype=torch.float64)
    md.parallelize(model, mesh["tp"], PLAN)
    model = copied(model)
    data = mesh.axis_names[:-1]
    wrapped = md.DDP(model, device_mesh=mesh[data]) if data else model
    md.seed(1, differ_over=data, mesh=mesh)
    if data:
        md.annotate(x, varying=data)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        with md.typed(mesh) if is_typed else md.untyped():
            y = checkpoint(wrapped, x, use_reentrant=False) if recomputes else wrapped(x)
            loss = y.square().mean()
            loss.backward()
        losses.append(loss.item() if not (is_typed and data) else loss.detach().tolist())
        optimizer.step()
        optimizer.zero_grad()
    md.assert_equal(list(model.norm.parameters()), mesh["tp"])
    if recomputes:
        assert torch.equal(model.masks[0], model.masks[1])
    return losses, model.masks[0].tolist(), mesh.get_local_rank("tp"), mesh.get_coordinate()[:-1]


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("shape", MESHES)
def test_losses_are_equal_along_the_axis_and_masks_differ(
    shape: tuple[int, ...], is_typed: bool
) -> None:
    plain, again = (
        md.simulate(trained, math.prod(shape), args=(shape, recomputes, is_typed))
        for recomputes in (False, True)
    )
    assert [each[0] for each in plain] == [each[0] for each in again]
    for losses, mask, tp, data in plain:
        for other_losses, other_mask, other_tp, other_data in plain:
            if data == other_data:
                assert losses == other_losses
                assert (mask == other_mask) == (tp == other_tp)


def test_an_attention_that_drops_weights_runs_in_a_fork() -> None:
    def program(style: str | None) -> list[float]:
        mesh = mesh_of(2)
        md.seed(0)
        model = nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.5), nn.Linear(4, 4))
        plan = {"1": "column"} | ({} if style is None else {"0": style})
        md.parallelize(model, mesh, plan)
        x = torch.ones(6, 4)
        y, _ = model[0](x, x, x)
        torch.testing.assert_close(model[0].eval()(x, x, x)[0], copied(model[0])(x, x, x)[0])
        return y.flatten().tolist()  # type: ignore[no-any-return]

    first, second = md.simulate(program, 2, args=("own_draws",))
    assert first != second
    first, second = md.simulate(program, 2, args=("whole_draws",))
    assert first == second
    with pytest.warns(UserWarning, match="active dropout"):
        md.simulate(program, 2, args=(None,))


@pytest.mark.parametrize("how", ["seed", "fork"])
def test_whole_draws_from_generators_that_differ_are_rejected(how: str) -> None:
    def program() -> str:
        mesh = mesh_of(1, 2)
        md.seed(0)
        model = md.parallelize(Block(), mesh["tp"], PLAN)
        x = torch.ones(2, 8)
        model(x)
        if how == "seed":
            md.seed(1, differ_over=("dp", "tp"), mesh=mesh)
            with pytest.raises(UnequalError) as raised:
                model(x)
        else:
            with md.fork_rng("tp", mesh=mesh), pytest.raises(UnequalError) as raised:
                model(x)
        for seeded in (mesh, mesh["dp"]):
            md.seed(1, differ_over="dp", mesh=seeded)
            model(x)
        with md.fork_rng("tp", mesh=mesh), pytest.raises(UnequalError):
            model(x)
        return str(raised.value)

    assert md.simulate(program, 2)[1] == (
        "whole_draws: the random generators differ over 'tp'\n"
        "  where:    rank 1\n"
        "  expected: seeds that are equal along 'tp'\n"
        "  fix:      leave 'tp' out of differ_over= of md.seed; or use 'own_draws' for this "
        "module, if it draws for split features"
    )


def test_draws_on_a_split_layer_are_rejected() -> None:
    def program() -> None:
        mesh = mesh_of(2)
        md.seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        both = {"0": "column", "[0]": "own_draws"}
        with pytest.raises(ArgumentError, match="two patterns of the plan match 0"):
            md.parallelize(model, mesh, both)
        md.parallelize(model, mesh, {"0": "column", "1": "own_draws"})
        for name in ("0", "1"):
            with pytest.raises(ArgumentError, match=f"{name} is parallelized already"):
                md.parallelize(model, mesh, {name: "own_draws"})

    md.simulate(program, 2)


# -- dropout that a plan omits --------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.q, self.dropout_p, self.heads = nn.Linear(4, 4), rate, 2


def warnings_of(model: nn.Module, plan: dict[str, str], size: int = 2) -> list[str]:
    def program() -> None:
        md.seed(0)
        md.parallelize(copied(model), mesh_of(size), plan)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        md.simulate(program, size)
    return sorted({str(each.message) for each in caught})


def test_active_dropout_next_to_a_split_layer_is_warned_of() -> None:
    split = {"up": "column", "down": "row"}
    (text,) = warnings_of(Block(), split)
    assert text == (
        "parallelize: the plan omits active dropout next to split layers\n"
        "  expected: 'own_draws' for dropout on split features or heads, whose masks must differ "
        "between ranks, and 'whole_draws' for all other dropout\n"
        "  found:    hidden, residual\n"
        "  fix:      add them to the plan"
    )
    assert "found:    residual\n" in warnings_of(Block(), {**split, "hidden": "own_draws"})[0]
    (text,) = warnings_of(nn.ModuleDict({"a": Attention(0.5)}), {"a.q": "column"})
    assert "found:    a\n" in text
    assert "found:    Attention\n" in warnings_of(Attention(0.5), {"q": "column"})[0]


@pytest.mark.parametrize(
    ("model", "plan", "size"),
    [
        (Block(), PLAN, 2),
        (Block(), {"up": "column", "down": "row"}, 1),
        (Block().eval(), {"up": "column", "down": "row"}, 2),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), {"0": "column"}, 2),
        (Attention(0.0), {"q": "column"}, 2),
        (nn.ModuleDict({"a": Attention(0.5)}), {"a.q": "column", "a": "own_draws"}, 2),
        (nn.ModuleDict({"a": Block()}), {"a.up": "column", "a": "own_draws"}, 2),
        (nn.ModuleDict({"a": Attention(0.0), "b": nn.ModuleList([Block()])}), {"a.q": "column"}, 2),
    ],
)
def test_other_dropout_is_not_warned_of(model: nn.Module, plan: Any, size: int) -> None:
    assert warnings_of(model, plan, size) == []


def test_masks_of_a_function_are_equal_unless_its_module_has_a_style() -> None:
    class Functional(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(input), 0.5)

    def program(is_named: bool) -> list[bool]:
        md.seed(0)
        plan = {"0": "column"} | ({"": "own_draws"} if is_named else {})
        model = md.parallelize(Functional(nn.Linear(4, 64)), mesh_of(2), plan)
        return (model(torch.ones(4)) == 0).tolist()  # type: ignore[no-any-return]

    first, second = md.simulate(program, 2, args=(False,))
    assert first == second
    first, second = md.simulate(program, 2, args=(True,))
    assert first != second
