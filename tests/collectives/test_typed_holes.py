"""What leaves a typed context unseen by torch's functions, and would part equal parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import DebugLevel, set_debug_level

import meshdist as md
from meshdist import lax
from meshdist.errors import AxisTypeError, GradientError, VaryingNumberWarning
from tests.collectives.typed_cases import in_mesh, varying

F64 = torch.float64


def own(mesh: md.DeviceMesh) -> torch.Tensor:
    """A value that differs along dp."""
    return varying(torch.full((3,), 1.0 + mesh.get_local_rank("dp"), dtype=F64))


def test_memory_that_is_handed_on_keeps_its_type_or_warns() -> None:
    def program(mesh: md.DeviceMesh) -> Any:
        x, found = own(mesh), {}

        class Mine(torch.Tensor):
            pass

        def set_to(*args: Any) -> torch.Tensor:
            return torch.zeros(3, dtype=F64).set_(*args)

        with md.typed(mesh), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name, make in {
                "as_subclass": lambda: x.as_subclass(torch.Tensor),
                "a subclass": lambda: x.as_subclass(Mine),
                "a parameter": lambda: x.as_subclass(torch.nn.Parameter),
                "set_": lambda: set_to(x),
                "set_ of parts": lambda: set_to(x, 0, (2,), (1,)),
            }.items():
                found[name] = make().__dict__.get("_axis_types")
            assert not caught
            set_to(x.untyped_storage(), 0, (3,), (1,))
            torch.zeros(3, dtype=F64).untyped_storage().copy_(x.untyped_storage())
            places = {one.lineno for one in caught if one.category is VaryingNumberWarning}
            with pytest.raises(AxisTypeError, match="set_ would turn what it writes"):
                torch.ones(3, dtype=F64, requires_grad=True).set_(x)
            assert x.as_subclass(torch.Tensor).sum().shape == ()
        text = str(caught[0].message)
        return found, len(places), text.partition("\n")[0]

    found, num_places, line = in_mesh(program, shape=(2,))[0]
    assert set(found.values()) == {"V:dp"}
    assert num_places == 2
    assert line == (
        "untyped_storage of a value that varies over 'dp' gives another number on each rank"
    )


def warned(body: Callable[[torch.Tensor], Any], mesh: md.DeviceMesh) -> str:
    with md.typed(mesh), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body(own(mesh))
    assert {one.category for one in caught} <= {VaryingNumberWarning}
    return str(caught[0].message) if caught else ""


def test_numbers_in_texts_warn_as_item_does() -> None:
    def program(mesh: md.DeviceMesh) -> list[bool]:
        bodies: list[Callable[[torch.Tensor], Any]] = [
            lambda x: f"{x[0]:.3f}",
            lambda x: format(x.sum(), "g"),
            lambda x: f"{x[0]}",
            lambda x: f"{lax.pmean(x, 'dp')[0]:.3f}",
            lambda x: f"{x}",  # which shows it
            repr,
        ]
        return [warned(body, mesh).startswith("__format__ of a value that") for body in bodies]

    assert in_mesh(program, shape=(2,))[0] == [True, True, True, False, False, False]


@pytest.mark.parametrize("hole", ["hook", "hook behind", "rows"])
def test_what_no_context_sees_is_found_behind_the_backward(hole: str) -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        w, x = torch.ones(3, dtype=F64, requires_grad=True), own(mesh)
        if hole == "hook":
            w.register_hook(lambda grad: grad * x)
        elif hole == "hook behind":
            w.register_post_accumulate_grad_hook(lambda w: (w.grad.mul_(x), None)[1])
        with md.typed(mesh):
            scale = len(torch.arange(6)[:3][x > 1]) if hole == "rows" else 1
            (w.sum() * scale).backward()
        assert w.grad is not None
        return w.grad.tolist()

    apart = md.simulate(program, 2)
    assert apart[0] != apart[1]
    with pytest.raises(GradientError, match="rank 1 differs from rank 0"):
        md.simulate(program, 2, compare_gradients=True)
    set_debug_level(DebugLevel.DETAIL)
    try:
        with pytest.raises(GradientError, match=r"the gradient of a leaf|a loss that is invariant"):
            md.simulate(program, 2)
    finally:
        set_debug_level(DebugLevel.OFF)
