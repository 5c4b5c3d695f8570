"""States that look bad and are not: every dtype, arrays that lie unusually, leaves of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from tests.stand_in_cupy import StandInCupy

from .damaged import deep, read_only


def round_trip(state: dict[str, Any], path: Path, size: int = 2) -> dict[str, Any]:
    """Save on some ranks; return what is read of all names."""
    md.simulate(lambda: md.checkpoint.save(state, path), size)
    found = md.checkpoint.open(path)
    return {name: found.read(name) for name in found.names}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("bfloat16", shape) for shape in [(), (0,), (0, 3), (1,), (3, 0, 2), (300, 301)]),
        *((dtype, (5, 3)) for dtype in ["float8_e4m3fn", "float8_e5m2", "bool", "uint8", "uint64"]),
        *((dtype, (1,)) for dtype in ["complex64", "float16"]),
    ],
)
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    count = int(np.prod(shape))
    kind = getattr(torch, dtype)
    bits = torch.arange(count * kind.itemsize) % (2 if dtype == "bool" else 251)
    x = bits.to(torch.uint8).view(kind).view(shape)
    found = round_trip({"x": x}, tmp_path / "a", 3)["x"]
    assert found.dtype == kind
    assert found.shape == shape
    assert torch.equal(found.flatten().view(torch.uint8), x.flatten().view(torch.uint8))

    def load() -> bool:
        target = torch.zeros_like(x)
        md.checkpoint.load({"x": target}, tmp_path / "a", verify=True)
        return torch.equal(target.flatten().view(torch.uint8), x.flatten().view(torch.uint8))

    assert all(md.simulate(load, 2))


def test_arrays_that_lie_unusually(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    numbers = np.arange(12.0).reshape(3, 4)
    state = {
        "transposed": x.T,
        "every second": x[:, ::2],
        "expanded": torch.ones(1, 2).expand(3, 2),
        "conjugated": torch.complex(x, -x).conj(),
        "tied": x,
        "a part": x[1:],
        "with a gradient": torch.ones(2, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.ones(2)),
        "numpy": numbers,
        "numpy.T": numbers.T,
        "read only": read_only(numbers.copy()),
        7: torch.ones(1),
        "": torch.ones(2),
        "a\0b\n": torch.ones(3),
    }
    found = round_trip(state, tmp_path / "a")
    for key, value in state.items():
        wanted = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        assert torch.equal(found[str(key)], wanted.detach().resolve_conj())

    targets = {
        "transposed": torch.zeros(3, 4).T,
        "every second": torch.zeros(3, 4)[:, ::2],
        "numpy": np.zeros((3, 4)),
        "numpy.T": np.zeros((3, 4)).T,
        "a parameter": torch.nn.Parameter(torch.zeros(2)),
    }
    md.checkpoint.load(targets, tmp_path / "a")
    for name, target in targets.items():
        assert np.array_equal(np.asarray(target.tolist()), np.asarray(found[name].tolist()))


def test_arrays_of_cupy(tmp_path: Path) -> None:
    with StandInCupy().installed() as cupy:
        md.checkpoint.save({"x": cupy.array([1.0, 2.0])}, tmp_path / "a")
        target = cupy.array([0.0, 0.0])
        md.checkpoint.load({"x": target}, tmp_path / "a")
        md.checkpoint.save({"x": target}, tmp_path / "b")
        assert md.checkpoint.open(tmp_path / "b").read("x").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(0, np.int32),
        lambda: np.zeros((3, 0), np.int32)[0],
        lambda: np.zeros((0, 3), np.float32),
        lambda: np.zeros((3, 0)),
        lambda: torch.from_numpy(np.zeros((0, 3), np.float32)),
        lambda: torch.zeros(1, dtype=torch.int32).expand(0),
        lambda: torch.zeros(1, 1).expand(0, 3),
        lambda: torch.ones(2).as_strided((1,), (0,)),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_empty_arrays_with_strides_of_0_are_saved_and_loaded(
    make: Callable[[], Any], size: int, tmp_path: Path
) -> None:
    def program() -> tuple[int, ...]:
        md.checkpoint.save({"x": make()}, tmp_path / "a")
        target = make()
        md.checkpoint.load({"x": target}, tmp_path / "a", verify=True)
        return tuple(target.shape)

    assert md.simulate(program, size) == [tuple(make().shape)] * size


def test_leaves_come_back_as_they_were(tmp_path: Path) -> None:
    leaves = {
        "none": None,
        "truth": True,
        "whole": -(2**70),
        "number": 0.1,
        "infinite": float("inf"),
        "text": 'ä\n"\0\ud800',
        "list": [1, [2, {"a": None}], "x"],
        "pair": (1, 2),
        "numpy": np.float32(0.1),
        "numpys truth": np.bool_(True),
        "deepest": [[[[1]]]],
        "empty": [],
        "dict": {"empty": {}, 3: {"four": 5}},
    }
    md.checkpoint.save(leaves, tmp_path / "a")
    target: dict[str, Any] = {
        **{name: None for name in leaves if name != "dict"},
        "pair": (),
        "numpy": np.float32(0),
        "dict": {"empty": {}, 3: {"four": 0}},
    }
    md.checkpoint.load(target, tmp_path / "a")
    assert target == leaves
    assert type(target["numpy"]) is np.float32


def test_dicts_as_deep_as_they_may_be(tmp_path: Path) -> None:
    state = deep(99)
    md.checkpoint.save({"a": state}, tmp_path / "a")
    assert list(md.checkpoint.open(tmp_path / "a").leaves.values()) == [1]
    md.simulate(lambda: md.checkpoint.load({"a": deep(99)}, tmp_path / "a"), 2)
