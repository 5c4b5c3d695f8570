"""JAX's answers, asked once and kept in a table: values, shapes, gradients, and what is rejected.

``make_shard_map_answers.py`` makes the table, and has the programs, which run here as they are.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest
import torch

import meshdist as md
from meshdist.errors import MeshdistError
from tests.sharding.make_shard_map_answers import AXES, PROGRAMS, SIZES, numbers, refusals

SCRIPT = Path(__file__).with_name("make_shard_map_answers.py")
TABLE = json.loads(Path(__file__).with_name("shard_map_answers.json").read_text(encoding="utf-8"))


def block(x: Any, index: int, count: int, dim: int) -> Any:
    size = x.shape[dim] // count
    return x[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]


def flag(is_set: bool) -> torch.Tensor:
    """A number of this rank's own: ``axis_index`` is a Python int, of which types know nothing."""
    return md.annotate(torch.tensor(float(is_set), dtype=torch.float64), varying="i")


LIBRARY = SimpleNamespace(lax=md.lax, block=block, flag=flag)


def on_mesh(body: Any) -> list[Any]:
    def program() -> Any:
        with md.init_device_mesh("cpu", SIZES, mesh_dim_names=AXES) as mesh:
            return body(mesh)

    return md.simulate(program, 4)


def as_lists(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: as_lists(part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_lists(part) for part in tree]
    return tree.tolist()


def map_leaves(function: Any, tree: Any, *more: Any) -> Any:
    return optree.tree_map(function, tree, *more)


def specs_of(name: str) -> tuple[Any, Any, Any]:
    """The program's in_specs, the same as a tuple with an entry for each argument, out_specs."""
    _, make_specs, shapes = PROGRAMS[name]
    in_specs, out_specs = make_specs(md.P)
    return (
        in_specs,
        in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(shapes),
        (out_specs),
    )


def mapped(name: str, shapes: list[Any], in_specs: Any) -> Any:
    def noted(*args: Any) -> Any:
        shapes.extend(list(x.shape) for x in optree.tree_leaves(args))
        return PROGRAMS[name][0](LIBRARY, *args)

    return md.shard_map(noted, in_specs=in_specs, out_specs=specs_of(name)[2])


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_shapes_and_gradients_of_wholes(name: str) -> None:
    def body(mesh: Any) -> Any:
        shapes: list[Any] = []
        wholes = map_leaves(torch.tensor, numbers(PROGRAMS[name][2]))
        leaves = [x.requires_grad_() for x in optree.tree_leaves(wholes)]
        value = mapped(name, shapes, specs_of(name)[0])(*wholes)
        full = map_leaves(lambda y: y.full(), value)
        weights = numbers(map_leaves(lambda y: y.shape, value), 1)
        losses = map_leaves(lambda y, w: (y * torch.tensor(w)).sum(), full, weights)
        gradients = torch.autograd.grad(sum(optree.tree_leaves(losses)), leaves)
        again = optree.tree_unflatten(optree.tree_structure(wholes), gradients)
        return {"shapes": shapes, "value": as_lists(full), "gradients": as_lists(again)}

    assert on_mesh(body) == [TABLE["programs"][name]] * 4


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_sharded_arrays_lie_as_they_do(name: str) -> None:
    def body(mesh: Any) -> Any:
        specs = specs_of(name)[1]
        args = numbers(PROGRAMS[name][2])
        each = optree.broadcast_prefix(specs, args)
        values, tree = optree.tree_flatten(args)
        placed = [
            md.device_put(torch.tensor(x), spec) for x, spec in zip(values, each, strict=True)
        ]
        leaves = [x.local.requires_grad_() for x in placed]
        value = mapped(name, [], md.shard_map.Infer)(*tree.unflatten(placed))
        full = map_leaves(lambda y: y.full(), value)
        weights = numbers(map_leaves(lambda y: y.shape, value), 1)
        losses = map_leaves(lambda y, w: (y * torch.tensor(w)).sum(), full, weights)
        gradients = torch.autograd.grad(sum(optree.tree_leaves(losses)), leaves)
        whole = [
            md.ShardedArray(gradient, x.sharding, x.shape).full()
            for gradient, x in zip(gradients, placed, strict=True)
        ]
        return {"value": as_lists(full), "gradients": as_lists(tree.unflatten(whole))}

    told = {key: TABLE["programs"][name][key] for key in ("value", "gradients")}
    assert on_mesh(body) == [told] * 4


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"pipeline"}))
def test_numpy_arrays_have_the_same_values(name: str) -> None:
    def body(mesh: Any) -> Any:
        value = mapped(name, [], specs_of(name)[0])(*numbers(PROGRAMS[name][2]))
        assert all(isinstance(y.local, np.ndarray | np.generic) for y in optree.tree_leaves(value))
        return as_lists(map_leaves(lambda y: y.full(), value))

    assert on_mesh(body) == [TABLE["programs"][name]["value"]] * 4


# -- what is rejected ------------------------------------------------------------------------------

DIFFERENT = {
    "an uneven dim": "dims need not divide",
    "a result that is a number": "numbers have no types",
    "a sum of what is equal": "psum takes no value that is invariant over its axis",
    "over some axes alone": "no other part of a program cuts arrays by itself",
}
"""Why the two differ, by rejection; ``docs/how-to/shard_map.md`` says so."""


def is_rejected(
    mesh: Any,
    lies: list[Any],
    shape: tuple[int, ...] = (4, 2),
    body: Any = lambda of, x: x,
    is_nested: bool = False,
    **given: Any,
) -> bool:
    whole = torch.tensor(numbers(shape))
    args = [whole if spec == md.P() else md.device_put(whole, spec) for spec in lies]

    def call(*args: Any) -> Any:
        return body(LIBRARY, *args)

    def again(*args: Any) -> Any:
        return md.shard_map(call, **given)(*args)

    try:
        md.shard_map(again if is_nested else call, **given)(*args)
    except MeshdistError:
        return True
    return False


def test_the_same_calls_are_rejected() -> None:
    def body(mesh: Any) -> dict[str, bool]:
        return {name: is_rejected(mesh, **given) for name, given in refusals(md.P).items()}

    expected = {
        name: bool(error) != (name in DIFFERENT) for name, error in TABLE["rejected"].items()
    }
    assert on_mesh(body) == [expected] * 4


# -- the table made anew --------------------------------------------------------------------------


def test_jax_still_answers_so() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    if importlib.metadata.version("jax") != TABLE["jax"]:
        pytest.skip(f"the table is made by JAX {TABLE['jax']}")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == TABLE
