"""JAX's answers, asked once and kept in a table: values, kinds and gradients are the same here.

The table also says what JAX does not answer. ``make_jax_answers.py`` makes it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist import lax
from meshdist.annotations.axis_types import GRADIENT_KINDS, KINDS, find_result_kind
from tests.functional.operation_cases import groups_of
from tests.inner import reductions
from tests.lax.make_jax_answers import CASES, SIZES, TUTORIAL, keywords, named, numbers

SCRIPT = Path(__file__).with_name("make_jax_answers.py")
TABLE = json.loads(Path(__file__).with_name("jax_answers.json").read_text(encoding="utf-8"))


def on_mesh(body: Any) -> list[Any]:
    """What ``body(rank)`` returns on each of the four ranks of the mesh (i=2, j=2)."""

    def program() -> Any:
        with md.init_device_mesh("cpu", SIZES, mesh_dim_names=("i", "j")):
            return body(md.get_rank())

    return md.simulate(program, 4)


def as_jax_shows(found: list[np.ndarray], kind: str, axis: Any) -> np.ndarray:
    """What the ranks hold; of an unreduced value, what the ranks along the axis sum up to."""
    names = [{"i": "dp", "j": "tp"}[name] for name in axis]
    shown: list[Any] = list(found)
    if kind == "U":
        for members in groups_of(np.arange(4).reshape(SIZES), names):
            for member in members:
                shown[member] = sum(found[other] for other in members)
    return np.stack(shown)


def call(one: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    if one["operation"] == "pcast":  # the kind of a tensor is not written on it
        group = md.get_current_mesh()[tuple(one["axis"])].open_group()
        return reductions.pcast(x, group, **one["options"], source=KINDS[one["source"]])
    operation = getattr(lax, one["operation"])
    result: torch.Tensor = operation(x, one["axis"], *one["arguments"], **keywords(one))
    return result


@pytest.mark.parametrize("one", CASES, ids=named)
def test_values_kinds_and_gradients(one: dict[str, Any]) -> None:
    told = TABLE["cases"][named(one)]
    kind = find_result_kind(one["operation"], one["source"], one["options"].get("to"))
    assert kind == told["kind"]
    xs = numbers(one["source"], one["shape"], one["axis"], 1)

    def body(rank: int) -> Any:
        x = torch.tensor(xs[rank], requires_grad=True)
        value = call(one, x)
        if not one["differentiable"]:
            return value.detach().numpy(), None
        ys = numbers(GRADIENT_KINDS[told["kind"]], tuple(value.shape), one["axis"], 2)
        value.backward(torch.tensor(ys[rank]))
        return value.detach().numpy(), x.grad.numpy()

    values, gradients = zip(*on_mesh(body), strict=True)
    assert as_jax_shows(values, told["kind"], one["axis"]).tolist() == told["value"]
    if one["differentiable"]:
        assert GRADIENT_KINDS[one["source"]] == told["gradient_kind"]
        shown = as_jax_shows(gradients, told["gradient_kind"], one["axis"])
        assert shown.tolist() == told["gradient"]


def test_the_table_answers_every_case_and_says_what_is_missing() -> None:
    assert list(TABLE["cases"]) == [named(one) for one in CASES]
    asked = {one["operation"] for one in CASES}
    missing = {"pbroadcast", "ragged_all_to_all"}
    assert missing <= set(TABLE["missing"])
    assert asked | missing | {"pvary", "axis_index", "axis_size"} == set(lax.__all__)


# -- the tutorial on shard_map --------------------------------------------------------------------

# Its final results, as it prints them.
PRINTED: dict[str, list[list[Any]]] = {
    "f1": [[22, 20, 12, 17]] * 4,
    "f2": [[[8, 4], [14, 16]], [[9, 9], [3, 8]]] * 2,
    "f3": [[[17, 13], [17, 24]]] * 4,
    "f4": [[3, 9, 5, 2]] * 4,
    "f5": [[[3], [9], [5], [2]]] * 4,
    "f6": [[22], [20], [12], [17]],
    "f7": [[6, 7], [0, 1], [2, 3], [4, 5]],
    "f8": [[3, 5, 5, 9], [1, 9, 3, 7], [4, 2, 5, 1], [1, 6, 8, 2]],
}


@pytest.mark.parametrize("name", TUTORIAL)
def test_numbers_of_the_tutorial(name: str) -> None:
    one = dict(TUTORIAL[name])
    blocks, axis, operation = one.pop("blocks"), one.pop("axis"), one.pop("operation")
    found = on_mesh(
        lambda rank: getattr(lax, operation)(np.array(blocks[rank]), axis, **one).tolist()
    )
    assert found == PRINTED[name] == TABLE["tutorial"][name]


def test_the_products_of_matrices_of_the_tutorial() -> None:
    """Split over rows and columns, summed, summed and scattered, or gathered before."""
    a = torch.arange(8 * 16.0).view(8, 16)
    b = torch.arange(16 * 4.0).view(16, 4)

    def body(rank: int) -> Any:
        i, j = divmod(rank, 2)
        mine = a.chunk(2, 0)[i].chunk(2, 1)[j], b.chunk(2, 0)[j]
        whole = lax.psum(mine[0] @ mine[1], "j")
        part = lax.psum_scatter(mine[0] @ mine[1], "j", scatter_dimension=1, tiled=True)
        gathered = lax.all_gather(b.chunk(4, 0)[rank], ("i", "j"), tiled=True)
        return whole, part, a.chunk(4, 0)[rank] @ gathered

    results = on_mesh(body)
    product = a @ b
    for rank, (whole, part, rows) in enumerate(results):
        i, j = divmod(rank, 2)
        assert torch.equal(whole, product.chunk(2, 0)[i])
        assert torch.equal(part, product.chunk(2, 0)[i].chunk(2, 1)[j])
        assert torch.equal(rows, product.chunk(4, 0)[rank])


# -- the table made anew --------------------------------------------------------------------------


def test_jax_still_answers_so() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    if importlib.metadata.version("jax") != TABLE["jax"]:
        pytest.skip(f"the table is made by JAX {TABLE['jax']}")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == TABLE
