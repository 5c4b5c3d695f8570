"""Sums and means of shards against those of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist import DeviceMesh
from meshdist.errors import ArgumentError, DtypeError, KindError
from meshdist.sharding.array_methods import checked_dims
from tests.sharding.array_cases import assemble, error_on_mesh, held, on_mesh

WHOLE = np.arange(5 * 4 * 3, dtype=np.float64).reshape(5, 4, 3)
SPECS = [
    md.P("dp", "tp"),
    md.P(("tp", "dp")),
    md.P(None, "tp", unreduced={"dp"}),
    md.P("tp", reduced={"dp"}),
    md.P(),
]
DIMS: list[Any] = [None, 0, -1, (0, 1), (1, 2), ()]


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("spec", SPECS)
def test_sums_and_means_of_the_whole(library: Any, spec: md.P) -> None:
    def program(mesh: DeviceMesh) -> list[Any]:
        x = md.device_put(library(WHOLE), md.NamedSharding(mesh, spec))
        return [
            held(made)
            for dim in DIMS
            for made in (x.sum(dim), x.sum(dim, True), x.mean(axis=dim, keepdims=True))
        ]

    expected = [
        whole
        for dim in DIMS
        for whole in (
            WHOLE.sum(dim),
            WHOLE.sum(dim, keepdims=True),
            WHOLE.mean(dim, keepdims=True),
        )
    ]
    for shards, whole in zip(zip(*on_mesh(program), strict=True), expected, strict=True):
        assert np.allclose(assemble(shards), whole, rtol=1e-14)


def test_what_was_spread_becomes_unreduced_and_the_rest_stays() -> None:
    def program(mesh: DeviceMesh) -> list[str]:
        x = md.device_put(WHOLE, md.NamedSharding(mesh, md.P("dp", None, "tp")))
        r = md.device_put(WHOLE, md.NamedSharding(mesh, md.P("dp", reduced={"tp"})))
        made = [x.sum(0), x.sum(0, True), x.sum(1), x.sum(), np.mean(x, axis=(0, 2)), r.sum(0)]
        return [held(one).type for one in made]

    assert on_mesh(program)[0] == [
        "float64[4, 3@tp]{U:dp}",
        "float64[1, 4, 3@tp]{U:dp}",
        "float64[5@dp, 3@tp]",
        "float64[]{U:dp,tp}",
        "float64[4]{U:dp,tp}",
        "float64[4, 3]{R:tp U:dp}",
    ]


def test_dtypes_are_those_of_the_library() -> None:
    def program(mesh: DeviceMesh) -> list[Any]:
        rows = md.NamedSharding(mesh, md.P("dp"))
        half = md.device_put(torch.full((8,), 60000.0, dtype=torch.float16), rows)
        many = md.device_put(np.full(8, 60000.0, dtype=np.float16), rows)
        bits = md.device_put(np.array([True, False, True, True]), rows)
        ints = md.device_put(torch.arange(8, dtype=torch.int32), rows)
        return [
            half.mean().full(),
            many.mean().full(),
            bits.sum().full(),
            bits.mean().full(),
            ints.sum().full(),
            ints.sum(dtype=torch.float32).full(),
            ints.mean(dtype=torch.float64).full(),
            torch.mean(half, 0).full(),
            torch.sum(ints, dim=0, keepdim=True).full(),
        ]

    found = on_mesh(program)[0]
    assert [str(one.dtype).removeprefix("torch.") for one in found] == [
        "float16", "float16", "int64", "float64", "int64", "float32", "float64", "float16", "int64",
    ]  # fmt: skip
    assert [float(one) for one in found] == [60000, 60000, 3, 0.75, 28, 28, 3.5, 60000, 28]


def test_the_mean_of_nothing_is_no_number() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = md.device_put(torch.zeros(0, 3), md.NamedSharding(mesh, md.P("dp")))
        return x.sum(0).full().tolist(), x.mean(0).full().isnan().all().item()

    assert on_mesh(program)[0] == ([0.0, 0.0, 0.0], True)


def test_gradients_of_a_mean_over_uneven_shards() -> None:
    def program(mesh: DeviceMesh) -> Any:
        whole = torch.arange(5.0, requires_grad=True)
        md.device_put(whole, md.NamedSharding(mesh, md.P("dp"))).mean().full().backward()
        return whole.grad

    assert all(torch.allclose(one, torch.full((5,), 0.2)) for one in on_mesh(program))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: x.sum(2), ArgumentError, ["sum over dims 2 of an array of 2 dims", "-2 to 1"]),
        (lambda x: x.sum((0, -2)), ArgumentError, ["different numbers"]),
        (lambda x: x.sum("tp"), KindError, ["sum takes dims as integers", "'tp'"]),
        (lambda x: x.mean(0, axis=1), ArgumentError, ["are the same argument: pass one of them"]),
        (lambda x: x.sum(out=3), ArgumentError, ["does not support out=: it must be None"]),
        (lambda x: x.mean(), DtypeError, ["mean of int64", "x.mean(dtype=torch.float32)"]),
    ],
)
def test_what_is_rejected(call: Any, kind: type[Exception], words: list[str]) -> None:
    def program(mesh: DeviceMesh) -> None:
        call(md.device_put(torch.zeros(4, 4, dtype=torch.int64), md.NamedSharding(mesh, md.P())))

    text = error_on_mesh(program, kind)
    for word in words:
        assert word in text, text


def test_dims_are_sorted() -> None:
    assert checked_dims([-1, 0], 3, "sum") == (0, 2)
