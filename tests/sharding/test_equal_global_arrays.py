"""``shard``, ``device_put`` and ``reshard`` compare what ranks shall hold alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import DebugLevel

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool

CALLS: dict[str, Callable[..., Any]] = {
    "shard": lambda x, mesh, **check: md.shard(x, "b@dp", mesh, **check),
    "device_put": lambda x, mesh, **check: (
        md.device_put(x, md.NamedSharding(mesh, md.P("dp")), **check).local
    ),
    "reshard": lambda x, mesh, **check: md.reshard(x, "b -> b@dp", mesh, **check),
    "sharded": lambda x, mesh, **check: (
        md.reshard(md.ShardedArray(x, md.NamedSharding(mesh, md.P())), md.P("dp"), **check).local
    ),
    "put again": lambda x, mesh, **check: (
        md.device_put(
            md.ShardedArray(x, md.NamedSharding(mesh, md.P())),
            md.NamedSharding(mesh, md.P("dp")),
            **check,
        ).local
    ),
}


def mesh_of(**sizes: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except md.UnequalError as error:
        return str(error)
    return ""


def checked(size: int) -> list[str]:
    """The errors of unequal wholes, whose parts equal ones give without an error."""
    mesh = mesh_of(dp=size)
    rank = md.get_rank()
    texts = []
    for call in CALLS.values():
        whole = torch.arange(5.0)
        part = call(whole, mesh, check=True)
        assert torch.equal(part, whole.tensor_split(size)[rank])
        texts.append(told(lambda call=call: call(torch.arange(5.0) + rank, mesh, check=True)))
        part = call(torch.arange(5.0) + rank, mesh, check=False)
        assert torch.equal(part, (whole + rank).tensor_split(size)[rank])
    return texts


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param(
            backend,
            size,
            marks=[]
            if backend == "simulated" or (size == 3 and backend != "mpi")
            else [pytest.mark.soak],
        )
        for backend in BACKENDS
        for size in (1, 2, 3, 5)
    ],
)
def test_check_compares_on_every_backend(backend: str, size: int, pool: Pool) -> None:
    texts = BACKENDS[backend](pool, checked, size, size)
    if size == 1:
        assert texts == [[""] * len(CALLS)]
        return
    for name, of_ranks in zip(CALLS, zip(*texts, strict=True), strict=True):
        assert len({text.partition(", called at")[0] for text in of_ranks}) == 1, name
        (lines, *_) = map(str.splitlines, of_ranks)
        others = "rank 1 differs" if size == 2 else f"ranks 1-{size - 1} differ"
        assert lines[0] == (
            f"the array is not the same on every rank over axis 'dp' of DeviceMesh(dp={size})"
        )
        assert lines[3].startswith(f"  found:    {others} from rank 0, by up")
        assert "md.seed(0) on every rank" in lines[4]


def test_unseeded_wholes_are_found_at_detail_and_on_simulated_ranks(pool: Pool) -> None:
    def program(level: Any) -> list[str]:
        mesh = mesh_of(dp=2)
        torch.manual_seed(md.get_rank())
        if level is not None:
            md.set_debug_level(level)
        try:
            return [
                told(lambda call=call: call(torch.randn(4), mesh)).partition("\n")[0]
                for call in [CALLS[name] for name in ("shard", "device_put", "reshard")]
            ]
        finally:
            md.set_debug_level(DebugLevel.OFF)

    line = "the array is not the same on every rank over axis 'dp' of DeviceMesh(dp=2)"
    assert md.simulate(program, 2, (None,)) == [[line] * 3] * 2
    assert pool.run(program, 2, DebugLevel.DETAIL) == [[line] * 3] * 2
    assert pool.run(program, 2, DebugLevel.OFF) == [[""] * 3] * 2


def test_ranks_are_compared_along_axes_that_the_right_side_alone_cuts_or_sums() -> None:
    def program() -> list[str]:
        mesh = mesh_of(dp=2, tp=2)
        dp, tp = (torch.full((2, 2), float(mesh.get_local_rank(axis))) for axis in ("dp", "tp"))
        return [
            told(call).partition("\n")[0]
            for call in (
                lambda: md.reshard(dp, "b@dp d -> b d", mesh),
                lambda: md.reshard(tp, "b@dp d -> b d", mesh),  # each tp rank gathers its own
                lambda: md.reshard(tp, "b@dp d -> b d@tp", mesh),
                lambda: md.reshard(dp, "b d {U:tp} -> b@dp d", mesh),
                lambda: md.reshard(tp, "b d {R:dp} -> b@tp d {R:dp}", mesh),
                lambda: md.reshard(dp, "b d -> b d {U:dp}", mesh),
                lambda: md.reshard(dp, "b d {R:dp} -> b d", mesh),
                lambda: md.shard(tp, "b@dp d", mesh),  # as in a pipeline's stages
                lambda: md.device_put(tp, md.NamedSharding(mesh, md.P("dp"))),
            )
        ]

    over = "the array is not the same on every rank over {} of DeviceMesh(dp=2, tp=2)".format
    for texts in md.simulate(program, 4):
        dp, tp, both = over("axis 'dp'"), over("axis 'tp'"), over("axes 'dp', 'tp'")
        assert texts == ["", "", tp, dp, tp, dp, "", "", both]


def test_values_that_agree_in_half_of_their_digits_pass_and_other_types_are_shown() -> None:
    def program(case: str) -> str:
        mesh, rank = mesh_of(dp=3), md.get_rank()
        wholes: dict[str, Any] = {
            "rounded": torch.ones(3) * (1 + 1e-7 * rank),
            "signs of zero and NaN": torch.tensor([0.0 * (-1) ** rank, torch.nan]),
            "bfloat16": torch.ones(3, dtype=torch.bfloat16),
            "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
            "strided": torch.ones(3, 2).T,
            "scalar": torch.ones(()),
            "empty": torch.ones(0),
            "numpy": np.arange(3),
            "trained": torch.ones(3, requires_grad=True),
            "dtype": torch.ones(3, dtype=torch.float64 if rank == 2 else torch.float32),
            "bool": torch.tensor([rank == 0]),
        }
        return told(lambda: md.device_put(wholes[case], md.NamedSharding(mesh, md.P()), check=True))

    for case in ("rounded", "signs of zero and NaN", "bfloat16", "conjugate", "strided"):
        assert md.simulate(program, 3, (case,)) == [""] * 3
    for case in ("scalar", "empty", "numpy", "trained"):
        assert md.simulate(program, 3, (case,)) == [""] * 3
    for text in md.simulate(program, 3, ("dtype",)):
        assert "found:    ranks 0-1: shape (3,), float32; rank 2: shape (3,), float64" in text
    for text in md.simulate(program, 3, ("bool",)):
        assert "found:    rank 0 differs from ranks 1-2" in text


def test_inside_typed_contexts_and_transforms() -> None:
    def program() -> tuple[str, list[float]]:
        mesh = mesh_of(dp=2)
        with md.typed(mesh):
            text = told(lambda: md.shard(torch.ones(2) * md.get_rank(), "b@dp", mesh))
            md.shard(torch.ones(2), "b@dp", mesh)
        slope = torch.func.grad(lambda x: md.shard(x, "b@dp", mesh).square().sum())
        return text.partition("\n")[0], slope(torch.ones(2)).tolist()

    line = "the array is not the same on every rank over axis 'dp' of DeviceMesh(dp=2)"
    assert md.simulate(program, 2) == [(line, [2.0, 2.0])] * 2


def test_the_fixes_work() -> None:
    def program() -> None:
        mesh = mesh_of(dp=2)
        rows = md.NamedSharding(mesh, md.P("dp"))
        with pytest.raises(md.UnequalError, match="the same on every rank") as caught:
            md.device_put(torch.randn(4), rows)
        assert "call md.seed(0) on every rank before you draw it" in str(caught.value)
        assert "md.device_put(x, sharding, root=0)" in str(caught.value)
        assert "check=False" in str(caught.value)
        md.seed(0)
        md.device_put(torch.randn(4), rows)
        torch.manual_seed(md.get_rank())
        md.device_put(torch.randn(4), rows, root=0)
        md.device_put(torch.randn(4), rows, check=False)
        md.reshard(torch.randn(2), "b@dp -> b", mesh)

    md.simulate(program, 2)
