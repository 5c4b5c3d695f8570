"""Asks JAX what its ``shard_map`` gives for programs of its tutorial, and what it rejects.

    pip install jax==0.10.2        # into an environment of its own
    python tests/sharding/make_shard_map_answers.py > tests/sharding/shard_map_answers.json

``test_shard_map_as_jax.py`` runs the same bodies, and compares. Where that JAX is installed it also
runs this file, and the answers must be those of the table. Imports NumPy, and JAX in ``main``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

SIZES, AXES = (2, 2), ("i", "j")
BOTH = ("i", "j")
# A library is what a body needs besides operators: its lax, and block(x, index, count, dim): the
# part with this number of a dim that is cut into so many.
Library = Any


def relu(x: Any) -> Any:
    return x * (x > 0)


def ring(lax: Any, axis: Any) -> list[tuple[int, int]]:
    size = lax.axis_size(axis)
    return [(place, (place + 1) % size) for place in range(size)]


# -- bodies: of the tutorial's sections, on the axes of one mesh (i=2, j=2) -----------------------


def squares(of: Library, x: Any) -> Any:
    """Rank-preserving: a function of elements, under any sharding."""
    return x * x - 3 * x


def tiled(of: Library, x: Any) -> Any:
    """Replicated in, mentioned in out_specs: copies are laid side by side."""
    return 2 * x


def product(of: Library, a: Any, b: Any) -> Any:
    """The first example: blocks of rows and columns times rows, summed."""
    return of.lax.psum(a @ b, "j")


def sums(of: Library, x: Any) -> Any:
    """Sums over one axis and over both."""
    return {"j": of.lax.psum(x, "j"), "both": (of.lax.psum(x, BOTH), of.lax.pmean(x, "i"))}


def gathered(of: Library, x: Any) -> Any:
    """Own rows times all rows."""
    return x * of.lax.all_gather(x, "i", tiled=True).sum()


def scattered(of: Library, x: Any) -> Any:
    return of.lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True)


def shifted(of: Library, x: Any) -> Any:
    return of.lax.ppermute(x, BOTH, ring(of.lax, BOTH)) - x


def transposed(of: Library, x: Any) -> Any:
    return of.lax.all_to_all(x, "i", 1, 0, tiled=True)


def gathered_product(of: Library, a: Any, b: Any) -> Any:
    """All-gather of the right matrix, overlapped: it goes round in a ring."""
    size, place = of.lax.axis_size("i"), of.lax.axis_index("i")
    out = of.block(a, place, size, 1) @ b
    for step in range(1, size):
        b = of.lax.ppermute(b, "i", ring(of.lax, "i"))
        out = out + of.block(a, (place - step) % size, size, 1) @ b
    return out


def scattered_product(of: Library, a: Any, b: Any) -> Any:
    """Product, summed and scattered, overlapped: sums go round in a ring."""
    size, place = of.lax.axis_size("j"), of.lax.axis_index("j")
    out = of.block(a, (place - 1) % size, size, 0) @ b
    for step in range(2, size + 1):
        out = of.lax.ppermute(out, "j", ring(of.lax, "j"))
        out = out + of.block(a, (place - step) % size, size, 0) @ b
    return out


def sharded_loss(of: Library, params: Any, batch: Any) -> Any:
    """Data over i, weights sharded over i and gathered, hidden features over j."""
    x, y = batch
    for up, down in params:
        up, down = (of.lax.all_gather(w, "i", tiled=True) for w in (up, down))
        x = of.lax.psum(relu(x @ up) @ down, "j")
    return of.lax.psum(((x - y) * (x - y)).sum(), "i")


def pipeline(of: Library, w: Any, x: Any) -> Any:
    """Two stages along i: rank 0's weight, then rank 1's; one microbatch after the other."""
    size, place = of.lax.axis_size("i"), of.lax.axis_index("i")
    is_first, is_last = of.flag(place == 0), of.flag(place == size - 1)
    count = x.shape[0]
    state, out = of.lax.pcast(0 * x[0], "i", to="varying"), 0
    for step in range(count + size - 1):
        state = is_first * x[min(step, count - 1)] + (1 - is_first) * state
        state = relu(state @ w[0])
        if step >= size - 1:
            out = out + is_last * state * (step - size + 2)
        state = of.lax.ppermute(state, "i", ring(of.lax, "i"))
    return of.lax.psum(out, "i")


Specs = Callable[[Any], tuple[Any, Any]]
# By name: the body, its in_specs and out_specs made of P, and the shapes of its arguments.
PROGRAMS: dict[str, tuple[Any, Specs, Any]] = {
    "squares": (squares, lambda P: (P("i", "j"), P("i", "j")), ((4, 6),)),
    "tiled": (tiled, lambda P: (P(), P(("j", "i"))), ((2, 3),)),
    "product": (product, lambda P: ((P("i", "j"), P("j", None)), P("i", None)), ((4, 8), (8, 2))),
    "sums": (
        sums,
        lambda P: (P("i", "j"), {"j": P("i"), "both": (P(), P(None, "j"))}),
        ((4, 6),),
    ),
    "gathered": (gathered, lambda P: (P("i"), P("i")), ((4, 2),)),
    "scattered": (scattered, lambda P: (P("i"), P(None, "i")), ((4, 4),)),
    "shifted": (shifted, lambda P: (P(BOTH), P(BOTH)), ((8, 2),)),
    "transposed": (transposed, lambda P: (P(None, "i"), P(None, None, "i")), ((4, 4, 2),)),
    "gathered_product": (
        gathered_product,
        lambda P: ((P("i", None), P("i", None)), P("i", None)),
        ((4, 6), (6, 2)),
    ),
    "scattered_product": (
        scattered_product,
        lambda P: ((P(None, "j"), P("j", None)), P("j", None)),
        ((4, 6), (6, 2)),
    ),
    "sharded_loss": (
        sharded_loss,
        # down is cut over j, too: what is gathered over i are the rows of this rank's j.
        lambda P: (([(P("i", "j"), P(("j", "i")))] * 2, P("i")), P()),
        ([((4, 8), (8, 4)), ((4, 8), (8, 4))], ((4, 4), (4, 4))),
    ),
    "pipeline": (pipeline, lambda P: ((P("i"), P()), P()), ((2, 3, 3), (3, 2, 3))),
}


def refusals(P: Any) -> dict[str, dict[str, Any]]:
    """Calls that one of the two may reject: how the arguments lie, and what shard_map is given."""
    rows = {"lies": [P("i")], "in_specs": P("i"), "out_specs": P("i")}
    two = {**rows, "lies": [P("i"), P("i")], "body": lambda of, x, y: x + y}
    summed = {**rows, "body": lambda of, x: of.lax.pcast(x, "i", to="unreduced")}
    return {
        "fits": rows,
        "one spec for two arguments": two,
        "a spec for each argument": {**two, "in_specs": (P("i"), P("i"))},
        "specs for another number": {**two, "in_specs": (P("i"),)},
        "a list of specs": {**two, "in_specs": [P("i"), P("i")]},
        "in_specs is None": {**rows, "in_specs": None},
        "an argument passed as it is": {
            **rows,
            "lies": [P()],
            "in_specs": (None,),
            "out_specs": P(),
        },
        "no such axis": {**rows, "in_specs": P("k")},
        "no such axis in the result": {**rows, "out_specs": P("k")},
        "a spec with too many dims": {**rows, "in_specs": P("i", None, None)},
        "a spec of the result with too many dims": {**rows, "out_specs": P("i", None, None)},
        "an uneven dim": {**rows, "lies": [P()], "shape": (3, 2)},
        "an argument that lies otherwise": {**rows, "lies": [P("j")]},
        "a varying result that leaves its axis out": {**rows, "out_specs": P()},
        "the same, unchecked": {**rows, "out_specs": P(), "check_vma": False},
        "an equal result that mentions an axis": {**rows, "out_specs": P("i", "j")},
        "partial_sums": {**summed, "out_specs": P(unreduced={"i"})},
        "varying values as partial sums": {**rows, "out_specs": P(unreduced={"i"})},
        "equal values as partial sums": {**rows, "out_specs": P("i", unreduced={"j"})},
        "partial sums that are not said": {**summed, "out_specs": P()},
        "partial sums that mention their axis": {**summed, "out_specs": P("i")},
        "reduced and not said": {
            **rows,
            "body": lambda of, x: of.lax.pcast(x, "j", to="reduced"),
        },
        "reduced that mentions its axis": {
            **rows,
            "body": lambda of, x: of.lax.pcast(x, "j", to="reduced"),
            "out_specs": P("i", "j"),
        },
        "equal values as reduced": {**rows, "out_specs": P("i", reduced={"j"})},
        "a result of another structure": {**rows, "out_specs": (P("i"), P())},
        "a result that is None": {**rows, "body": lambda of, x: (x, None)},
        "a spec that is None": {**rows, "out_specs": None},
        "a result that is a number": {**rows, "body": lambda of, x: 2.0, "out_specs": P()},
        "a sum of what is equal": {**rows, "body": lambda of, x: of.lax.psum(x, "j")},
        "inside of itself": {**rows, "is_nested": True},
        "over some axes alone": {**rows, "axis_names": {"i"}},
    }


def numbers(shapes: Any, seed: int = 0) -> Any:
    """A tree of integers as float64, in the place of each shape."""
    if isinstance(shapes, dict):
        return {name: numbers(shapes[name], seed + at) for at, name in enumerate(sorted(shapes))}
    if isinstance(shapes, list) or (shapes and isinstance(shapes[0], (tuple, list))):
        return type(shapes)(numbers(shape, seed + 3 * at) for at, shape in enumerate(shapes))
    count = int(np.prod(shapes))
    return ((np.arange(count) * 5 + seed) % 7 - 3.0).reshape(shapes)


def written(table: dict[str, Any]) -> str:
    """The table as JSON, a line for each answer."""
    parts = []
    for name, value in table.items():
        if isinstance(value, dict):
            lines = [f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()]
            parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}"


def main() -> None:
    """Print the table."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from jax import P, lax

    jax.config.update("jax_enable_x64", True)
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh(SIZES, AXES, axis_types=(explicit, explicit))
    jax.set_mesh(mesh)

    def block(x: Any, index: Any, count: int, dim: int) -> Any:
        size = x.shape[dim] // count
        return lax.dynamic_slice_in_dim(x, index * size, size, dim)

    of = SimpleNamespace(lax=lax, block=block, flag=lambda place: place.astype(float))

    def as_lists(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: as_lists(part) for name, part in tree.items()}
        if isinstance(tree, (list, tuple)):
            return [as_lists(part) for part in tree]
        values = np.asarray(tree)
        whole = values.astype(int)  # which is shorter
        return (whole if (whole == values).all() else values).tolist()

    def program(name: str) -> dict[str, Any]:
        body, make_specs, shapes = PROGRAMS[name]
        in_specs, out_specs = make_specs(P)
        seen: dict[str, Any] = {}

        def noted(*args: Any) -> Any:
            seen["shapes"] = [list(x.shape) for x in jax.tree.leaves(args)]
            return body(of, *args)

        mapped = jax.shard_map(noted, in_specs=in_specs, out_specs=out_specs)
        args = numbers(shapes)
        specs = in_specs if len(args) > 1 else (in_specs,)
        args = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda x: jax.reshard(x, spec), part), specs, args
        )
        value, back = jax.vjp(jax.jit(mapped), *args)
        weights = numbers(jax.tree.map(lambda y: y.shape, value), 1)
        placed = jax.tree.map(lambda y, w: jax.reshard(w, jax.typeof(y).sharding), value, weights)
        return {**seen, "value": as_lists(value), "gradients": as_lists(list(back(placed)))}

    def refusal(
        lies: list[Any],
        shape: tuple[int, ...] = (4, 2),
        body: Any = lambda of, x: x,
        is_nested: bool = False,
        **given: Any,
    ) -> str:
        args = [jax.reshard(numbers(shape), spec) for spec in lies]

        def call(*args: Any) -> Any:
            return body(of, *args)

        def again(*args: Any) -> Any:
            return jax.shard_map(call, **given)(*args)

        try:
            jax.shard_map(again if is_nested else call, **given)(*args)
        except Exception as error:
            return type(error).__name__
        return ""

    table = {
        "jax": jax.__version__,
        "programs": {name: program(name) for name in PROGRAMS},
        "rejected": {name: refusal(**given) for name, given in refusals(P).items()},
    }
    print(written(table))


if __name__ == "__main__":
    main()
