"""Custom Functions, module hooks and checkpoints inside contexts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist import lax
from meshdist.annotations.axis_types import find_type
from meshdist.errors import AxisTypeError
from tests.inner import SingleLevelFunction, is_apply_bare
from tests.typed_mode.typed_cases import F64, in_mesh, kinds, refusal, varying


class Product(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


captured = Product.apply


class Both(Function):
    """In the newer form; gives two results, of which one is its argument."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return first, first + second


def data(mesh: md.DeviceMesh) -> torch.Tensor:
    return varying(torch.tensor(1.0 + mesh.get_local_rank("dp"), dtype=F64))


def product() -> Any:
    """The function as a program has it: on a torch that shows it to us, captured before."""
    return Product.apply if is_apply_bare else captured


def test_operands_are_cast_and_results_marked_by_an_apply_that_was_captured_too() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.tensor(2.0, dtype=F64, requires_grad=True)
        with md.typed(mesh):
            y = product()(w, data(mesh))
            first, second = Both.apply(w, data(mesh))
            found = kinds(y), kinds(first), kinds(second), kinds(Product.apply(w, w))
            lax.psum(y + first, "dp").backward()
        return *found, w.grad.item()

    assert in_mesh(body, shape=(4,)) == [("V:dp", "V:dp", "V:dp", "", 1.0 + 2 + 3 + 4 + 4)] * 4


@pytest.mark.skipif(not is_apply_bare, reason="this torch shows us a captured apply")
def test_a_captured_apply_that_is_not_seen_is_rejected() -> None:
    text = refusal(AxisTypeError, lambda mesh: captured(torch.ones((), dtype=F64), data(mesh)))
    assert text.startswith(
        "Product.apply cannot run inside md.typed: it was looked up before the context\n"
    )
    assert "fix:      call Product.apply(...) itself" in text


def test_double_backward_through_casts() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.tensor(2.0, dtype=F64, requires_grad=True)
        with md.typed(mesh):
            x = data(mesh)
            loss = lax.psum((w * x).sin() + product()(w, w) * x, "dp")
            (grad,) = torch.autograd.grad(loss, w, create_graph=True)
            assert kinds(grad) == ""
            ((grad * w) ** 2).backward()
        return grad.item(), w.grad.item()

    w, xs = torch.tensor(2.0, dtype=F64, requires_grad=True), torch.arange(1.0, 5, dtype=F64)
    (grad,) = torch.autograd.grad(((w * xs).sin() + w**2 * xs).sum(), w, create_graph=True)
    ((grad * w) ** 2).backward()
    for found in in_mesh(body, shape=(4,)):
        assert found == pytest.approx((grad.item(), w.grad.item()), rel=1e-12)


def test_a_function_that_returns_its_argument_leaves_that_as_it_was() -> None:
    class Second(Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return b

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, grad

    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(2, requires_grad=True)
        with md.typed(mesh), torch.no_grad():
            y = Second.apply(data(mesh), w)
            return kinds(y), kinds(w), y.data_ptr() == w.data_ptr()

    assert in_mesh(body)[0] == ("V:dp", "", True)


def test_backward_hooks_of_modules_keep_each_arguments_kinds() -> None:
    class Scaled(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a * 2, b * 2

    def body(mesh: md.DeviceMesh) -> Any:
        seen: list[Any] = []
        module = Scaled()
        module.register_full_backward_hook(lambda _, given, taken: seen.append(len(given)))
        w = torch.ones(2, dtype=F64, requires_grad=True)
        v = varying(torch.ones(2, dtype=F64, requires_grad=True))
        with md.typed(mesh):
            a, b = module(w, v)
            found = kinds(a), kinds(b)
            (a.sum() + lax.psum(b.sum(), "dp")).backward()
        return *found, seen, w.grad.tolist(), v.grad.tolist()

    assert in_mesh(body)[0] == ("", "V:dp", [2], [2.0, 2.0], [2.0, 2.0])


def test_a_reentrant_checkpoint_is_rejected() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        w = torch.ones(2, requires_grad=True)
        checkpoint(lambda x: x * w, w * 2, use_reentrant=True)

    text = refusal(AxisTypeError, body)
    assert text.startswith("a reentrant torch.utils.checkpoint cannot run inside md.typed\n")
    assert "fix:      call checkpoint(..., use_reentrant=False)" in text


def test_apply_is_torchs_own_outside_and_while_only_other_threads_have_contexts() -> None:
    holder, name = (
        (type(Function), "__getattribute__") if is_apply_bare else (SingleLevelFunction, "apply")
    )
    assert name not in vars(holder)

    def body(mesh: md.DeviceMesh) -> Any:
        found: list[Any] = []

        def other() -> None:
            x = varying(torch.ones(2))
            found.append(name in vars(holder))
            found.append(kinds(captured(x, torch.ones(2))))

        with md.typed(mesh):
            with md.typed(mesh):
                pass
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            found.append(kinds(product()(data(mesh), data(mesh))))
        return found

    assert in_mesh(body, shape=(1,)) == [[True, "", "V:dp"]]
    assert name not in vars(holder)


def test_functions_inside_functions_see_no_context() -> None:
    class Outer(Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = Product.apply(a.detach().requires_grad_(), torch.ones(2))
            assert find_type(inner) is None
            return inner.detach() * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    def body(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh):
            return kinds(Outer.apply(varying(torch.ones(2))))

    assert in_mesh(body)[0] == "V:dp"
