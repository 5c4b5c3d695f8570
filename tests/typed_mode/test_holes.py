"""What leaves a typed context unseen by torch's functions, and would part equal parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist import lax
from meshdist.errors import AxisTypeError, VaryingNumberWarning
from tests.typed_mode.typed_cases import in_mesh, kinds, varying

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
                found[name] = kinds(make())
            assert not caught
            set_to(x.untyped_storage(), 0, (3,), (1,))
            torch.zeros(3, dtype=F64).untyped_storage().copy_(x.untyped_storage())
            places = {one.lineno for one in caught if one.category is VaryingNumberWarning}
            with pytest.raises(AxisTypeError, match="set_ cannot change its target"):
                torch.ones(3, dtype=F64, requires_grad=True).set_(x)
            assert x.as_subclass(torch.Tensor).sum().shape == ()
        text = str(caught[0].message)
        return found, len(places), text.partition("\n")[0]

    found, num_places, line = in_mesh(program, shape=(2,))[0]
    assert set(found.values()) == {"V:dp"}
    assert num_places == 2
    assert line == (
        "untyped_storage of a value that varies over 'dp' returns a different number on each rank"
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


def leave_context(mesh: md.DeviceMesh) -> None:
    """After a first backward contexts take no notes."""
    with md.typed(mesh):
        torch.ones(1, requires_grad=True).sum().backward()


def set_inside(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = w * 2
    y.register_hook(lambda grad: grad * x)
    return y


HOOKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "before": lambda w, x: w.register_hook(lambda grad: grad * x),
    "in place": lambda w, x: w.register_hook(lambda grad: (grad.mul_(x), None)[1]),
    "behind": lambda w, x: w.register_post_accumulate_grad_hook(
        lambda w: (w.grad.mul_(x), None)[1]
    ),
    "inside": set_inside,
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_by_which_an_equal_gradient_would_part_is_rejected(
    hook: str, is_first: bool
) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if not is_first:
            leave_context(mesh)
        w, x = torch.ones(3, dtype=F64, requires_grad=True), own(mesh)
        if hook != "inside":
            HOOKS[hook](w, x)
        with md.typed(mesh), pytest.raises(AxisTypeError) as rejected:
            (HOOKS[hook](w, x) if hook == "inside" else w * w).sum().backward()
        return str(rejected.value)

    text = md.simulate(program, 2)[0]
    assert "<lambda> cannot change the type of a gradient" in text
    assert "rank 0 (dp=0) of DeviceMesh(dp=2); axis 'dp' (size 2); " in text
    assert "expected: float64[3]\n" in text
    assert "found:    float64[3]{V:dp}" in text
    assert "make the factors that it uses equal first: lax.pmean(factor, 'dp')" in text


@pytest.mark.parametrize("is_first", [True, False])
def test_a_hook_on_a_shard_may_not_part_it_over_another_axis(is_first: bool) -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if not is_first:
            leave_context(mesh)
        shard = md.annotate(torch.ones(3, dtype=F64), varying="tp").requires_grad_()
        x = own(mesh)
        shard.register_hook(lambda grad: grad * x)
        with md.typed(mesh):
            lax.psum((shard * shard).sum(), "tp").backward()

    with pytest.raises(AxisTypeError, match=r"float64\[3\]\{V:dp,tp\}"):
        md.simulate(program, 4)


def test_hooks_that_keep_types_run_on() -> None:
    def program() -> list[Any]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        w, x = torch.ones(3, dtype=F64, requires_grad=True), own(mesh)
        seen = []
        w.register_hook(lambda grad: grad * lax.pmean(x, "dp"))  # the proposed fix
        w.register_hook(lambda grad: seen.append(str(md.typeof(grad))))
        w.register_hook([].append)  # a function without a module
        shard = varying(torch.ones(3, dtype=F64)).requires_grad_()
        shard.register_hook(lambda grad: grad * x)
        with md.typed(mesh):
            y = shard * w
            y.register_hook(lambda grad: grad * x)
            lax.psum(y.sum(), "dp").backward()
        with mesh:
            (w * 1).sum().backward()
        assert shard.grad is not None and w.grad is not None
        return [seen, w.grad.tolist(), shard.grad.tolist()]

    first, *_, last = md.simulate(program, 4)
    assert first[0] == ["float64[3]", "float64[3]"]
    assert first[1] == last[1] == [(1 + 2) * 1.5 + 1.5] * 3
    assert (first[2], last[2]) == ([1.0] * 3, [4.0] * 3)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_number_of_rows_that_a_varying_mask_keeps_warns_as_item_does(is_first: bool) -> None:
    def program(mesh: md.DeviceMesh) -> list[str]:
        if not is_first:
            leave_context(mesh)
        bodies: list[Callable[[torch.Tensor], Any]] = [
            lambda x: len(torch.arange(3)[x > 1]),
            lambda x: x[x > 1].shape[0],
            lambda x: x[None, x > 1].size(1),
            lambda x: (x > 1).nonzero().size(0),
            lambda x: torch.nonzero(x > 1, as_tuple=True)[0].numel(),
            lambda x: torch.argwhere(x > 1).shape,
            lambda x: torch.numel(torch.masked_select(x, x > 1)),
            lambda x: torch.where(x > 1)[0].shape,
            lambda x: torch.unique(x).shape,
            lambda x: x.unique_consecutive(return_counts=True)[1].shape,
            lambda x: len(torch.bincount(x.long())),
            lambda x: len(torch.repeat_interleave(x.long())),
            lambda x: x[:2].shape[0] + x[[0, 1]].shape[0] + x[x.long() - 1].numel(),
            lambda x: torch.where(x > 1, x, x).shape,
            lambda x: x[x > 1].sum(),
            lambda x: torch.ones(3)[torch.ones(3) > 0].shape,
        ]
        lines = [warned(body, mesh).partition("\n")[0] for body in bodies]
        with md.untyped():
            assert not warned(lambda x: x.sum(), mesh)
        return lines

    lines = in_mesh(program, shape=(2,))[0]
    assert set(lines[:12]) == {
        "the number of rows of a value that varies over 'dp' returns a different number on each "
        "rank"
    }
    assert lines[12:] == [""] * 4
