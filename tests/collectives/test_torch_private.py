"""torch has the private names that are used, and they do what they are used for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad

import meshdist as md
from meshdist.collectives import torch_private
from meshdist.collectives.torch_private import (
    are_transforms_active,
    call_function,
    outside_transforms,
)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * 2 * times

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * 2 * ctx.times, None


def test_torch_has_the_names() -> None:
    assert callable(torch._C._are_functorch_transforms_active)
    assert "apply" in torch._C._FunctionBase.__dict__
    assert callable(torch._C._functorch.unwrap_if_dead)
    with torch._C._DisableFuncTorch():
        pass


def test_a_call_is_that_of_apply() -> None:
    x = torch.ones(2, requires_grad=True)
    for result in (call_function(_Doubled, x, 3), _Doubled.apply(x, 3)):
        assert result.tolist() == [6.0, 6.0]
        assert type(result.grad_fn).__name__ == "_DoubledBackward"
        assert torch.autograd.grad(result.sum(), x)[0].tolist() == [6.0, 6.0]
    with torch.no_grad():
        assert not call_function(_Doubled, x, 3).requires_grad


def test_transforms_are_noticed_and_obeyed() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        assert are_transforms_active()
        return call_function(_Doubled, x, 3).sum()

    assert not are_transforms_active()
    assert grad(f)(torch.ones(2)).tolist() == [6.0, 6.0]


def test_a_value_that_left_its_transform_is_a_plain_one() -> None:
    left = []

    def f(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return x.sum()

    grad(f)(torch.ones(2))
    assert call_function(_Doubled, left[0], 3).tolist() == [6.0, 6.0]


def test_tensors_made_outside_transforms_have_memory() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with outside_transforms():
            assert torch.ones(2).data_ptr()
        with pytest.raises(RuntimeError):
            torch.ones(2).data_ptr()
        return x.sum()

    grad(f)(torch.ones(2))


@pytest.mark.soak  # it imports the compiler
# torch's own, of what lies between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_function_is_cut_at_a_collective_and_keeps_its_derivative() -> None:
    def program() -> Any:
        with md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)):
            x = torch.ones(3, requires_grad=True)
            graphs = []

            def counted(graph: Any, inputs: Any) -> Any:
                graphs.append(graph)
                return graph.forward

            def f(x: torch.Tensor) -> torch.Tensor:
                return (md.lax.psum(md.lax.pvary(x, "tp") * 2, "tp") + 1).sum()

            loss = torch.compile(f, backend=counted)(x)
            loss.backward()
            return loss.item(), x.grad.tolist(), len(graphs)

    assert md.simulate(program, 2)[1] == (15.0, [4.0] * 3, 2)


def test_what_typed_contexts_ask_torch() -> None:
    x = torch.ones(3)
    assert not torch_private.are_transforms_active()
    assert not torch_private.is_wrapped(x)
    assert torch.func.vmap(lambda one: one * torch_private.is_wrapped(one))(x).tolist() == [1] * 3
    assert torch_private.storage_uses(x) == 1
    view = x[0]
    assert torch_private.storage_uses(x) == 2 == torch_private.storage_uses(view)
    before = torch_private.num_modes()
    with torch.device("meta"):
        assert torch_private.is_mode_enabled()
        assert torch_private.num_modes() == before + 1
        assert type(torch_private.mode_at(before)).__name__ == "DeviceContext"
        with torch_private.HiddenFromModes():
            assert torch.empty(1).device.type == "cpu"
            assert not torch_private.is_mode_enabled()
    assert torch_private.has_foreach_support([x], x.device)
    assert not torch_private.has_foreach_support([x], torch.device("meta"))
    assert isinstance(torch.ops.aten.add, torch_private.OverloadPacket)
    assert not isinstance(torch.ops.aten.add.Tensor, torch_private.OverloadPacket)
    assert issubclass(torch.autograd.Function, torch_private.SingleLevelFunction)
    assert issubclass(torch_private.BackwardHookFunction, torch.autograd.Function)
    assert "apply" not in vars(torch_private.SingleLevelFunction)
