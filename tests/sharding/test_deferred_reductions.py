"""Operands of ``md.einsum`` that are made of a wrapper's parameters: no sum is made twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import AxisTypeError

TEXT = "b@dp d, d f -> b@dp f"


class Layer(torch.nn.Module):
    """A layer whose weight ``make`` makes of three parameters; ``mesh`` is None on one device."""

    def __init__(self, make: Callable[[Any, Any], torch.Tensor], mesh: Any, text: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w, self.a, self.b = (
            torch.nn.Parameter(torch.rand(2, 2, generator=generator, dtype=torch.float64))
            for _ in range(3)
        )
        self.make, self.mesh, self.text = make, mesh, text

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.make(self, self.mesh)
        if self.mesh is None:
            return x @ weight
        return md.einsum(self.text, x, weight, mesh=self.mesh)


def product_of_two(it: Any, mesh: Any) -> torch.Tensor:
    text = "d r, r f -> d f {R:dp}"
    return it.w @ it.a if mesh is None else md.einsum(text, it.w, it.a, mesh=mesh)


MADE: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "itself": lambda it, mesh: it.w,
    "transposed": lambda it, mesh: it.w.T,
    "of low rank": lambda it, mesh: it.w + it.a @ it.b,
    "parts of several": lambda it, mesh: torch.cat([it.w[:1], it.a[1:]]),
    "checkpointed": lambda it, mesh: checkpoint(torch.tanh, it.w, use_reentrant=False),
    "checkpointed, reentrant": lambda it, mesh: checkpoint(torch.tanh, it.w, use_reentrant=True),
    "an einsum of two": product_of_two,
    "an einsum of two, scaled": lambda it, mesh: 2 * product_of_two(it, mesh),
}


@pytest.mark.parametrize("wrapper", ["axis", "group", "world"])
@pytest.mark.parametrize("made", MADE)
def test_what_is_made_of_parameters_leaves_their_gradients_to_the_wrapper(
    made: str, wrapper: str
) -> None:
    def program() -> bool:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        options: Any = {"axis": {"device_mesh": mesh["dp"]}, "group": {}, "world": {}}[wrapper]
        if wrapper == "group":
            options = {"process_group": mesh.get_group("dp")}
        layer, alone = Layer(MADE[made], mesh, TEXT), Layer(MADE[made], None, TEXT)
        x = torch.arange(8, dtype=torch.float64).view(4, 2)
        md.DDP(layer, **options)(md.shard(x, "b@dp d", mesh)).square().sum().backward()
        alone(x).square().sum().backward()
        return all(
            torch.allclose(mine.grad * 2, whole.grad)  # a wrapper takes the mean
            for mine, whole in zip(layer.parameters(), alone.parameters(), strict=True)
            if whole.grad is not None
        )

    assert md.simulate(program, 2) == [True] * 2


@pytest.mark.parametrize("axes", [("tp",), ("dp", "tp")])
def test_a_weight_that_is_cut_in_the_forward(axes: tuple[str, ...]) -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layer = Layer(
            lambda it, mesh: md.shard(it.w, "d f@tp", mesh[axes]),
            mesh,
            "b@dp d, d f@tp -> b@dp f@tp",
        )
        x = torch.full((1, 2), 1.0 + mesh.get_local_rank("dp"), dtype=torch.float64)
        md.DDP(layer, device_mesh=mesh["dp"])(x).sum().backward()
        return layer.w.grad.unique().tolist()

    assert md.simulate(program, 4) == [[1.5]] * 4


def test_what_a_collective_gives_is_summed_as_any_operand() -> None:
    def program() -> bool:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        v = torch.ones(2, dtype=torch.float64, requires_grad=True)
        md.DDP(torch.nn.Linear(2, 2), device_mesh=mesh)  # averages over dp
        x = torch.full((1, 2), 1.0 + md.get_rank(), dtype=torch.float64)
        mean = md.lax.pmean(v * x[0], mesh)
        md.einsum("b@dp d, d -> b@dp", x, mean, mesh=mesh).sum().backward()
        return torch.equal(v.grad, 3 * x[0] / 2)

    assert md.simulate(program, 2) == [True] * 2


def test_leaves_of_both_kinds_are_rejected() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        own = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        layer = Layer(lambda it, mesh: it.w * own, mesh, TEXT)
        with pytest.raises(AxisTypeError) as caught:
            md.DDP(layer, device_mesh=mesh)(torch.ones(1, 2, dtype=torch.float64))
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert "mixes parameters that a wrapper averages over axis 'dp' with leaves" in text
        assert "float64[2, 2]{R:dp}, averaged over 'dp'" in text
        assert "float64[2, 2], not averaged there" in text
        assert "operand 1 of einsum 'b@dp d, d f -> b@dp f'" in text
        assert "call einsum once for each of them" in text
