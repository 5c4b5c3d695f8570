"""JAX's collectives inside contexts: each takes and gives the kinds of the table, whatever is
around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist import lax
from meshdist.annotations.axis_types import CASTS, GATHERED, KINDS, OPERATION_KINDS
from meshdist.errors import ArgumentError, AxisTypeError
from meshdist.typed_mode.collective_calls import kinds_over
from tests.typed_mode.typed_cases import in_mesh, kinds, refusal, varying

PLACES = torch.tensor([[0], [1]])  # a token for the expert of each of two ranks


def route() -> md.experts.Route:
    tokens = md.annotate(torch.ones(2), varying="dp")
    return md.experts.dispatch(tokens, PLACES, "dp", 2)[1]


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "psum": lambda x: lax.psum(x, "dp"),
    "pmean": lambda x: lax.pmean(x, "dp"),
    "pmax": lambda x: lax.pmax(x, "dp"),
    "pmin": lambda x: lax.pmin(x, "dp"),
    "pvary": lambda x: lax.pvary(x, "dp"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "dp"),
    "all_to_all": lambda x: lax.all_to_all(x, "dp", 0, 0),
    "ragged_all_to_all": lambda x: lax.ragged_all_to_all(
        x, torch.zeros(2), [0, 1], [1, 1], [md.lax.axis_index("dp")] * 2, [1, 1], axis_name="dp"
    ),
    "ppermute": lambda x: lax.ppermute(x, "dp", [(0, 1), (1, 0)]),
    "pshuffle": lambda x: lax.pshuffle(x, "dp", [1, 0]),
    "pswapaxes": lambda x: lax.pswapaxes(x, "dp", 0),
    "pbroadcast": lambda x: lax.pbroadcast(x, "dp", 1),
    "experts.dispatch": lambda x: md.experts.dispatch(x, PLACES, "dp", 2)[0],
    "experts.combine": lambda x: md.experts.combine(x, route()),
    "attention.context_parallel": lambda x: md.attention.context_parallel(
        *[x.view(1, 1, 2, 1)] * 3, md.get_current_mesh()["dp"]
    ),
}


def of_kind(kind: str) -> torch.Tensor:
    x = torch.ones(2)
    return x if kind == "I" else md.annotate(x, **{KINDS[kind]: "dp"})


def outcomes(call: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, str]:
    """The kind that a call gives for each kind that it takes; all others are rejected."""

    def body(mesh: md.DeviceMesh) -> dict[str, str]:
        found = {}
        with md.typed(mesh):
            for kind in "IVRU":
                try:
                    found[kind] = kinds(call(of_kind(kind))).partition(":")[0] or "I"
                except AxisTypeError as error:
                    texts.append(str(error))
        return found

    texts: list[str] = []
    found = in_mesh(body)
    assert all("over axis 'dp' cannot take a value that is" in text for text in texts)
    assert all("test_collective_calls.py" in text for text in texts)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("operation", OPERATION_KINDS)
def test_each_collective_takes_and_gives_the_kinds_of_the_table(operation: str) -> None:
    assert outcomes(CALLS[operation]) == OPERATION_KINDS[operation]


@pytest.mark.parametrize("to", CASTS)
def test_casts(to: str) -> None:
    assert outcomes(lambda x: lax.pcast(x, "dp", to=to)) == CASTS[to]


@pytest.mark.parametrize("to", GATHERED)
def test_gathers(to: str) -> None:
    assert outcomes(lambda x: lax.all_gather(x, "dp", to=to)) == {"V": GATHERED[to]}


def test_casts_and_gathers_that_do_not_exist() -> None:
    for call in (
        lambda x: lax.pcast(x, "dp", to="invarying"),
        lambda x: lax.all_gather(x, "dp", to="U"),
    ):
        text = refusal(ArgumentError, lambda mesh, call=call: call(of_kind("V")))
        assert "invarying" in text or "'U'" in text


def test_other_axes_stay_as_they_are() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        x = md.annotate(torch.ones(2), varying=("dp", "tp"))
        with md.typed(mesh):
            return [
                kinds(one)
                for one in (
                    lax.psum(x, "dp"),
                    lax.psum(x, ("tp", "dp")),
                    lax.psum(x, mesh["tp"]),
                    lax.all_gather(x, "tp", to="reduced"),
                    lax.psum(md.annotate(torch.ones(2), varying="dp", unreduced="tp"), "dp"),
                    lax.psum(
                        md.annotate(torch.ones(2), varying="dp", unreduced="tp"), mesh.axis_names
                    ),
                )
            ]

    assert in_mesh(body)[0] == ["V:tp", "", "V:dp", "V:dp R:tp", "U:tp", ""]


def test_a_cast_over_axes_of_two_kinds() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = md.annotate(torch.ones(2, requires_grad=True), reduced="tp")
        with md.typed(mesh):
            x = lax.pcast(w, ("dp", "tp"), to="varying")
            lax.psum((x * (1.0 + md.get_rank())).sum(), ("dp", "tp")).backward()
            found = kinds(x), kinds(w.grad)
        return *found, w.grad.tolist()

    # Summed over 'dp' (ranks 0 and 2, 1 and 3), a partial sum over 'tp'.
    found = in_mesh(body)
    assert [one[:2] for one in found] == [("V:dp,tp", "U:tp")] * 4
    assert [one[2][0] for one in found] == [4.0, 6.0, 4.0, 6.0]


def test_meshes_that_are_parts_of_the_contexts() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        x = md.annotate(torch.ones(2), varying=("dp", "tp"))
        whole = mesh.flatten(("dp", "tp"), "all")
        with md.typed(mesh):
            first = kinds(lax.psum(x, "all", mesh=whole)), kinds(lax.psum(x, "tp", mesh=mesh["tp"]))
            with mesh["dp"]:
                return *first, kinds(lax.psum(x, "dp"))

    assert in_mesh(body)[0] == ("", "V:dp", "V:tp")

    def other(mesh: md.DeviceMesh) -> None:
        square = md.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))
        lax.psum(varying(torch.ones(2)), "b", mesh=square)

    text = refusal(AxisTypeError, other)
    assert text.startswith("psum cannot use 'b' of a mesh that is not part of the md.typed mesh\n")
    assert "axes of DeviceMesh(dp=2, tp=2), of a slice of it, or flattened axes" in text


def test_pytrees_are_rejected_before_anything_is_sent_and_name_the_leaf() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        lax.psum({"a": varying(torch.ones(2)), "b": [torch.ones(2)]}, "dp")

    assert "x['b'][0]: float32[2]" in refusal(AxisTypeError, body)


def test_numbers_are_constants_and_arrays_of_other_libraries_have_no_type() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            x = varying(torch.ones(2))
            tree = lax.psum({"x": x, "n": 3, "a": np.ones(2)}, "dp")
            return kinds(tree["x"]), tree["n"], tree["a"].tolist(), lax.axis_size("dp")

    assert in_mesh(body)[0] == ("", 6, [2.0, 2.0], 2)


def test_ragged_exchange_joins_its_operands() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        place = lax.axis_index("dp", mesh=mesh)
        rows = md.annotate(torch.ones(2, requires_grad=True), varying="dp")
        initial = torch.zeros(2, requires_grad=True)
        sizes = torch.tensor([1, 1])
        with md.typed(mesh):
            result = lax.ragged_all_to_all(
                rows, initial, [0, 1], sizes, [place] * 2, sizes, axis_name="dp"
            )
            lax.psum((result * (1.0 + place)).sum(), "dp").backward()
        return kinds(result), rows.grad.tolist(), initial.grad.tolist()

    assert in_mesh(body)[0] == ("V:dp", [1.0, 2.0], [0.0, 0.0])


def test_the_collectives_of_a_checkpoint_are_plain_when_it_recomputes() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        w = torch.ones(2, requires_grad=True)

        def part(x: torch.Tensor) -> torch.Tensor:
            return lax.psum(x * w, "dp").sin()

        with md.typed(mesh):
            x = varying(torch.ones(2) * md.get_rank())
            y = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
            y.sum().backward()
            return kinds(y), w.grad.tolist()

    found = in_mesh(body, shape=(4,))
    assert all(one == found[0] for one in found)
    assert found[0][0] == ""
    assert found[0][1] == pytest.approx([6 * np.cos(6.0)] * 2, rel=1e-5)


def test_a_group_that_is_no_axis_makes_nothing_invariant() -> None:
    def program() -> tuple[dict[str, str], dict[str, str]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        diagonals = [md.distributed.new_group(ranks) for ranks in ([0, 3], [1, 2])]
        mine = diagonals[0 if md.get_rank() in (0, 3) else 1]
        return kinds_over(mesh, mine, "I"), kinds_over(mesh, mesh["tp"].get_group(), "I")

    assert md.simulate(program, 4) == [({"dp": "V", "tp": "V"}, {"tp": "I"})] * 4
