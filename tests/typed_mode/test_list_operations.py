"""torch's functions on lists: each item has its own type, cast and rejection."""

from __future__ import annotations

from typing import Any

import torch

import meshdist as md
from meshdist import lax
from meshdist.errors import AxisTypeError
from tests.typed_mode.typed_cases import F64, in_mesh, kinds, refusal, varying


def test_items_have_types_of_their_own() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        i, v = torch.ones(2), varying(torch.ones(2))
        t = varying(torch.ones(2), "tp")
        with md.typed(mesh):
            return [
                [kinds(one) for one in result]
                for result in (
                    torch._foreach_add([i, v], [t, t]),
                    torch._foreach_mul([i, v], 2.0),
                    torch._foreach_mul([i, t], v[0]),
                    torch._foreach_norm([i, v]),
                    torch._foreach_addcmul([i, i], [i, v], [t, i]),
                )
            ]

    assert in_mesh(body)[0] == [
        ["V:tp", "V:dp,tp"],
        ["", "V:dp"],
        ["V:dp", "V:dp,tp"],
        ["", "V:dp"],
        ["V:tp", "V:dp"],
    ]


def test_items_are_cast_and_differentiated_one_by_one() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w, u = (torch.ones(2, dtype=F64, requires_grad=True) for _ in range(2))
        x = varying(torch.full((2,), 1.0 + mesh.get_local_rank("dp"), dtype=F64))
        with md.typed(mesh):
            first, second = torch._foreach_mul([w, u], [x, torch.ones(2, dtype=F64)])
            (lax.psum(first.sum(), "dp") + second.sum()).backward()
        return w.grad.tolist(), u.grad.tolist()

    assert in_mesh(body)[0] == ([3.0, 3.0], [1.0, 1.0])


def test_writes_in_place() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        a, b, v = torch.zeros(2), torch.zeros(2), varying(torch.ones(2))
        with md.typed(mesh):
            torch._foreach_add_([a, b], [v, torch.ones(2)])
            torch._foreach_copy_([b], [torch.ones(2)])
            return kinds(a), kinds(b)

    assert in_mesh(body)[0] == ("V:dp", "")

    def rejected(mesh: md.DeviceMesh) -> None:
        p = torch.nn.Parameter(torch.ones(2))
        with torch.no_grad():
            torch._foreach_add_([p], [varying(torch.ones(2))])

    text = refusal(AxisTypeError, rejected)
    assert text.startswith(
        "_foreach_add_ cannot change its target from invariant to varying over 'dp'"
    )


def test_unreduced_items() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        u = md.annotate(torch.ones(2), unreduced="dp")
        with md.typed(mesh):
            return [kinds(one) for one in torch._foreach_mul([u, torch.ones(2)], 2.0)]

    assert in_mesh(body)[0] == ["U:dp", ""]

    def rejected(mesh: md.DeviceMesh) -> None:
        p = torch.nn.Parameter(torch.ones(2))
        with torch.no_grad():
            torch._foreach_add_([p], [md.annotate(torch.ones(2), unreduced="dp")])

    text = refusal(AxisTypeError, rejected)
    assert text.startswith("_foreach_add_ cannot apply an unreduced gradient to a parameter\n")


def test_fused_steps() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        weights = [torch.ones(2), torch.ones(2)]
        with md.typed(mesh):
            torch._fused_sgd_(
                weights, [varying(torch.ones(2)), torch.ones(2)], [], lr=0.1, momentum=0.0,
                weight_decay=0.0, dampening=0.0, nesterov=False, maximize=False,
                is_first_step=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
        return [kinds(one) for one in weights]

    assert in_mesh(body)[0] == ["V:dp", ""]


def test_a_gradient_scaler_finds_that_shards_may_overflow_on_some_ranks() -> None:
    """One number says whether any gradient overflowed; over 'tp' it differs (Megatron-LM#1446)."""

    def body(mesh: md.DeviceMesh) -> Any:
        grads = [torch.ones(2), varying(torch.ones(2), "tp")]
        found = torch.zeros(1)
        with md.typed(mesh):
            for _ in range(2):
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(1))
        return [kinds(one) for one in grads], kinds(found)

    assert in_mesh(body)[0] == (["", "V:tp"], "V:tp")
