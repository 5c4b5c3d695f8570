"""Types of gradients, what may begin a backward, and what may become ``.grad`` and ``.data``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist import lax
from meshdist.annotations.axis_types import change_annotation
from meshdist.errors import AxisTypeError
from meshdist.typed_mode.context import find_context
from tests.typed_mode.typed_cases import F64, in_mesh, kinds, refusal, varying


def leaf(**axes: Any) -> torch.Tensor:
    return md.annotate(torch.ones(3, dtype=F64, requires_grad=True), **axes)


def v() -> torch.Tensor:
    return varying(torch.ones(3, dtype=F64), "dp", "tp")


def test_gradients_have_the_types_of_their_inputs() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        given = [
            leaf(),
            leaf(varying="dp"),
            leaf(reduced="dp"),
            leaf(varying="tp", reduced="dp"),
        ]
        found = []
        with md.typed(mesh):

            def loss() -> torch.Tensor:
                return lax.pmean(sum((w * v()).sum() for w in given), ("dp", "tp"))

            loss().backward()
            found.append([kinds(w.grad) for w in given])
            grads = torch.autograd.grad(loss(), given, create_graph=True)
            found.append([kinds(one) for one in grads])
            inner = leaf() * 2
            found.append([kinds(one) for one in torch.autograd.grad((inner**2).sum(), [inner])])
            x, unused = leaf(), leaf()
            grads = torch.autograd.grad((x**2).sum(), [x, unused], allow_unused=True)
            found.append([kinds(grads[0]), grads[1]])
        return found

    expected = ["", "V:dp", "U:dp", "V:tp U:dp"]
    assert in_mesh(body)[0] == [expected, expected, [""], ["", None]]


def test_what_an_owner_has_reduced_is_invariant() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = leaf(reduced=("dp", "tp"))
        change_annotation(w, owner_axes=("dp",))
        with md.typed(mesh):
            lax.pmean((w * v()).sum(), ("dp", "tp")).backward()
            return kinds(w.grad)

    assert in_mesh(body)[0] == "U:tp"


def test_a_loss_over_an_axis_that_somebody_owns_varies_there() -> None:
    def owned(mesh: md.DeviceMesh, loss: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        w = leaf(reduced="dp")
        find_context().owners["dp"] = "DistributedDataParallel"
        loss((w * v()).sum()).backward()
        return w.grad.tolist()

    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            w = leaf(reduced="dp")
            find_context().owners["dp"] = "DistributedDataParallel"
            lax.pmean((w * v()).sum(), "tp").backward()
        return w.grad.tolist()

    assert in_mesh(body)[0] == [1.0] * 3
    text = refusal(AxisTypeError, lambda mesh: owned(mesh, lambda x: lax.pmean(x, ("dp", "tp"))))
    assert text.startswith(
        "backward cannot start from a loss that is invariant over 'dp': DistributedDataParallel "
        "already averages gradients over this axis\n"
    )
    assert "remove the lax.pmean over 'dp'" in text
    assert "loss: float64[]" in text


def test_an_unreduced_loss_is_a_sum_of_the_ranks_losses() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = leaf()
        with md.typed(mesh):
            loss = lax.pcast(lax.psum((w * v()).sum(), "tp"), "dp", to="unreduced")
            loss.backward()
        return kinds(loss), w.grad.tolist()

    assert in_mesh(body)[0] == ("U:dp", [4.0] * 3)


def test_gradients_that_are_given() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w, x = leaf(), leaf(varying="dp")
        rank = 1.0 + mesh.get_local_rank("dp")
        with md.typed(mesh):
            y = w * x * rank_value(rank)
            ones = torch.ones_like(y)  # of the gradient's shape; cast
            a, b = torch.autograd.grad(y, [w, x], ones, retain_graph=True)
            y.backward(varying(torch.full((3,), 2.0, dtype=F64)))
            types = kinds(a), kinds(b)
        return *types, a.tolist(), b.tolist(), w.grad.tolist()

    def rank_value(rank: float) -> torch.Tensor:
        return varying(torch.full((3,), rank, dtype=F64))

    found = in_mesh(body, shape=(2,))
    assert [one[:3] for one in found] == [("", "V:dp", [3.0] * 3)] * 2
    assert [one[3] for one in found] == [[1.0] * 3, [2.0] * 3]
    assert [one[4] for one in found] == [[6.0] * 3] * 2


def test_a_given_gradient_that_is_differentiated_is_cast() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w, g = leaf(), leaf()
        with md.typed(mesh):
            (a,) = torch.autograd.grad(
                w * varying(torch.ones(3, dtype=F64)), w, g, create_graph=True
            )
            a.sum().backward()
        return g.grad.tolist()

    assert in_mesh(body, shape=(2,)) == [[2.0] * 3] * 2


def test_a_given_gradient_of_another_type() -> None:
    text = refusal(AxisTypeError, lambda mesh: (leaf() * 2).backward(v()))
    assert text.startswith(
        "backward cannot take a gradient whose type does not match its tensor's\n"
    )
    assert "tensor: float64[3]\n" in text
    assert "gradient: float64[3]{V:dp,tp}" in text


def test_what_may_become_grad_and_data() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        found = []
        with md.typed(mesh):
            w, r = leaf(varying="dp"), leaf(reduced="dp")
            w.grad = None
            w.grad = varying(torch.ones(3, dtype=F64))
            w.data = varying(torch.zeros(3, dtype=F64))
            found.append((kinds(w), kinds(w.grad), kinds(w.data)))
            r.grad = md.annotate(torch.ones(3, dtype=F64), unreduced="dp")
            found.append(kinds(r.grad))
            r.grad = lax.psum(r.grad, "dp")  # complete
            found.append(kinds(r.grad))
            del r.grad
            found.append(r.grad)
        return found

    assert in_mesh(body)[0] == [("V:dp", "V:dp", "V:dp"), "U:dp", "", None]
    for name, write in {
        "grad": lambda w: setattr(w, "grad", v()),
        "data": lambda w: setattr(w, "data", v()),
    }.items():
        text = refusal(AxisTypeError, lambda mesh, write=write: write(leaf()))
        assert text.startswith(f"cannot set .{name} to a value of another type\n")
        assert "tensor: float64[3]\n" in text
        assert "value: float64[3]{V:dp,tp}" in text
        assert "lax.pvary, lax.psum" in text


def test_a_gradient_that_was_widened_does_not_reach_a_parameter() -> None:
    """Clipping by a norm that only each rank's shard knows (Megatron-LM#443)."""

    def body(mesh: md.DeviceMesh) -> None:
        whole, part = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        varying(part, "tp")
        optimizer = torch.optim.SGD([whole, part], lr=0.1)
        x = varying(torch.ones(3), "tp")
        lax.psum(((whole + part) * x).sum(), "tp").backward()
        norm = sum(one.grad.square().sum() for one in (whole, part)).sqrt()
        torch.nn.utils.clip_grads_with_norm_([whole, part], 0.1, norm)
        optimizer.step()

    text = refusal(AxisTypeError, body)
    assert "cannot change its target from invariant to varying over 'tp'\n" in text
    assert "which requires a gradient" in text
    assert "for example gradients clipped by md.clip_grad_norm_" in text
    assert "md.annotate(target, varying='tp')" in text


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("is_all_cut", [False, True])
@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_torchs_clipping_of_parts_is_rejected(
    foreach: bool | None, is_all_cut: bool, norm: float
) -> None:
    def body(mesh: md.DeviceMesh) -> None:
        whole, part = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        varying(part, "tp")
        lax.psum(((whole + part) * varying(torch.ones(3), "tp")).sum(), "tp").backward()
        torch.nn.utils.clip_grad_norm_([whole], 0.1, norm, foreach=foreach)  # equal: as it is
        torch.nn.utils.get_total_norm([part.grad], norm, foreach=foreach)  # for a sum of its own
        clipped = [part] if is_all_cut else [whole, part]
        torch.nn.utils.clip_grad_norm_(clipped, 0.1, norm, foreach=foreach)

    text = refusal(AxisTypeError, body)
    assert text.startswith(
        "clip_grad_norm_ cannot clip gradients that vary over 'tp': each rank would compute a "
        "different norm\n"
    )
    assert "float32[3]{V:tp}" in text and "test_gradients.py:" in text
    assert text.endswith(
        "  fix:      call md.clip_grad_norm_(parameters, max_norm), which computes the norm over "
        "all ranks"
    )


@pytest.mark.parametrize("how", ["sgd", "foreach", "fused"])
def test_optimizers_step_each_parameter_by_its_own_type(how: str) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        whole, part = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        varying(part, "tp")
        options = {} if how == "sgd" else {how: True}
        optimizer = torch.optim.AdamW([whole, part], **options)
        x = varying(torch.ones(3), "tp")
        with md.typed(mesh):
            for _ in range(2):
                optimizer.zero_grad()
                lax.psum(((whole + part) * x).sum(), "tp").backward()
                optimizer.step()
        states = [[kinds(one) for one in optimizer.state[p].values()] for p in (whole, part)]
        return kinds(whole), kinds(part), states, whole.tolist() == part.tolist()

    whole, part, states, _ = in_mesh(body)[0]
    assert (whole, part) == ("", "V:tp")
    assert states == [["", "", ""], ["", "V:tp", "V:tp"]]


def test_gradients_of_an_uneven_loop_are_summed_once_behind_it() -> None:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        weight = torch.ones(1, requires_grad=True)
        batches = torch.arange(1.0, 5.0).split(1)[md.get_rank() :: 3]  # two, one and one
        with md.typed(mesh), md.accumulate_gradients([weight], "dp"):
            for x, share in md.uneven(batches, mesh["dp"]):
                lax.psum((weight * md.annotate(x * share, varying="dp")).sum(), "dp").backward()
        return weight.grad.item()

    assert md.simulate(program, 3) == [10.0] * 3
