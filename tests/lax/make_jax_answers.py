"""Asks JAX what the collectives of ``meshdist.lax`` share with it: values, kinds and gradients.

    pip install jax==0.10.2        # into an environment of its own
    python tests/lax/make_jax_answers.py > tests/lax/jax_answers.json

``tests/lax/test_lax_as_jax.py`` compares. Where that JAX is installed it also runs this file, and
the answers must be those of the table. Imports NumPy alone, and JAX in ``main``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

MISSING = {
    "pbroadcast": "no lowering on the CPU",
    "ragged_all_to_all": "no lowering on the CPU",
    "gradients of pmax and pmin": "no rule",
    "gradients of all_to_all, not tiled, along two dims": "its rule raises: a gradient's shape",
}

AXES = ("i", "j")


def case(
    operation: str,
    source: str,
    shape: tuple[int, ...] = (4, 8),
    *,
    axis: str | tuple[str, ...] = "i",
    arguments: tuple[int, ...] = (),
    differentiable: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """One call: of which collective, on a value of which kind along ``axis``, with what
    arguments."""
    return {
        "operation": operation,
        "source": source,
        "shape": shape,
        "axis": axis,
        "arguments": arguments,
        "options": options,
        "differentiable": differentiable,
    }


def named(one: dict[str, Any]) -> str:
    words = [one["operation"], one["source"], *("".join(one["axis"]),)]
    words += [str(argument) for argument in one["arguments"]]
    words += [f"{name}={value}" for name, value in one["options"].items()]
    return " ".join(words)


BOTH = ("i", "j")
CASES = [
    case("psum", "V"),
    case("psum", "U"),
    case("psum", "V", axis=BOTH),
    case("pmean", "V"),
    case("pmax", "V", differentiable=False),
    case("pmin", "V", differentiable=False),
    case("pcast", "I", to="varying"),
    case("pcast", "I", to="reduced"),
    case("pcast", "V", to="unreduced"),
    case("pcast", "R", to="varying"),
    case("pcast", "I", axis=BOTH, to="varying"),
    *[
        case("all_gather", "V", (2, 3), axis=axis, to=to, tiled=tiled, axis_=dim)
        for axis in ("i", ("j", "i"))
        for to in ("varying", "invarying", "reduced")
        for dim, tiled in ((0, False), (1, False), (2, False), (0, True), (1, True))
    ],
    *[
        case("psum_scatter", source, (4, 8), axis=axis, scatter_dimension=dim, tiled=tiled)
        for source in ("V", "U")
        for axis in ("i", ("j", "i"))
        for dim, tiled in ((0, False), (0, True), (1, True))
        if axis == ("j", "i") or tiled
    ],
    *[
        case(
            "all_to_all",
            "V",
            (4, 4),
            axis=BOTH,
            arguments=dims,
            differentiable=tiled or dims[0] == dims[1],
            tiled=tiled,
        )
        for dims in ((0, 0), (0, 1), (1, 0), (1, 1))
        for tiled in (False, True)
    ],
    case("all_to_all", "V", (2, 4), arguments=(1, 0), tiled=True),
    case("pswapaxes", "V", (3, 2), arguments=(1,)),
    case("pswapaxes", "V", (4, 3), axis=("j", "i"), arguments=(0,)),
    case("ppermute", "V", axis=BOTH, perm=[[0, 1], [1, 2], [2, 3], [3, 0]]),
    case("ppermute", "V", axis=BOTH, perm=[[0, 3], [2, 0]]),
    case("ppermute", "V", perm=[[1, 0]]),
    case("pshuffle", "V", axis=BOTH, perm=[2, 0, 3, 1]),
]

# The numbers of JAX's tutorial on shard_map, by rank of four, on a line unless two axes are named.
DIGITS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 1, 2]
ROWS = np.array(DIGITS).reshape(4, 4)
LINE = [DIGITS[start : start + 4] for start in (0, 4, 8, 12)]
SQUARE = [ROWS[i : i + 2, j : j + 2].tolist() for i in (0, 2) for j in (0, 2)]
SHIFT = [[place, (place + 1) % 4] for place in range(4)]
TUTORIAL: dict[str, dict[str, Any]] = {
    "f1": {"blocks": LINE, "axis": BOTH, "operation": "psum"},
    "f2": {"blocks": SQUARE, "axis": "i", "operation": "psum"},
    "f3": {"blocks": SQUARE, "axis": BOTH, "operation": "psum"},
    "f4": {"blocks": [[3], [9], [5], [2]], "axis": BOTH, "operation": "all_gather", "tiled": True},
    "f5": {"blocks": [[3], [9], [5], [2]], "axis": BOTH, "operation": "all_gather", "tiled": False},
    "f6": {"blocks": LINE, "axis": BOTH, "operation": "psum_scatter", "tiled": True},
    "f7": {
        "blocks": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "axis": BOTH,
        "operation": "ppermute",
        "perm": SHIFT,
    },
    "f8": {
        "blocks": LINE,
        "axis": BOTH,
        "operation": "all_to_all",
        "split_axis": 0,
        "concat_axis": 0,
        "tiled": True,
    },
}


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


SIZES = (2, 2)  # of the mesh, axes i and j


def numbers(kind: str, shape: tuple[int, ...], axis: str | tuple[str, ...], seed: int) -> Any:
    """Integers by rank: equal along ``axis`` where the kind says so."""
    found = []
    for i, j in np.ndindex(SIZES):
        places = {"i": i, "j": j}
        if kind in "IR":
            places.update(dict.fromkeys(axis, 0))
        start = seed + 5 * places["i"] + 3 * places["j"]
        found.append((np.arange(np.prod(shape)) * 7 + start) % 11 - 5.0)
    return np.stack(found).reshape(4, *shape)


def keywords(one: dict[str, Any]) -> dict[str, Any]:
    """The collective's own keywords; ``axis`` is the name of two things in ``all_gather``."""
    return {name.rstrip("_"): value for name, value in one["options"].items()}


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
    words = {"V": "varying", "R": "reduced", "U": "unreduced"}
    gradient_kinds = {"V": "V", "I": "I", "U": "R", "R": "U"}

    def on_ranks(body: Any, *arrays: Any) -> Any:
        spec = P(BOTH)
        placed = [jax.reshard(one, spec) for one in arrays]
        specs = tuple(spec for _ in arrays)
        run = jax.jit(jax.shard_map(body, in_specs=specs, out_specs=spec))
        return jax.tree.map(as_lists, run(*placed))

    def as_lists(one: Any) -> Any:
        values = np.asarray(one)
        whole = values.astype(int)  # which is shorter
        return (whole if (whole == values).all() else values).tolist()

    def kind_of(value: Any, names: tuple[str, ...]) -> str:
        axes = jax.typeof(value).manual_axis_type
        kinds = {
            next((k for k, word in words.items() if name in getattr(axes, word)), "I")
            for name in names
        }
        (kind,) = kinds
        return kind

    def made(kind: str, block: Any, names: tuple[str, ...]) -> Any:
        """A value of a kind, of numbers that vary but are what the kind asks for."""
        if kind == "V":
            return block
        if kind == "U":
            return lax.pcast(block, names, to="unreduced")
        equal = lax.pmax(block, names)
        return equal if kind == "I" else lax.pcast(equal, names, to="reduced")

    def shown(value: Any) -> Any:
        """The numbers of each rank; of an unreduced value, what they sum up to."""
        for name in AXES:
            kind = kind_of(value, (name,))
            if kind == "U":
                value = lax.psum(value, name)
            if kind != "V":
                value = lax.pcast(value, name, to="varying")
        return value[None]

    def answer(one: dict[str, Any]) -> dict[str, Any]:
        names = (one["axis"],) if isinstance(one["axis"], str) else one["axis"]
        kinds: dict[str, Any] = {}

        def call(x: Any) -> Any:
            return getattr(lax, one["operation"])(x, names, *one["arguments"], **keywords(one))

        def body(xs: Any, ys: Any) -> Any:
            x = made(one["source"], xs[0], names)
            if not one["differentiable"]:
                value = call(x)
                kinds["kind"] = kind_of(value, names)
                return (shown(value),)
            value, back = jax.vjp(call, x)
            kinds["kind"] = kind_of(value, names)
            (gradient,) = back(made(gradient_kinds[kinds["kind"]], ys[0], names))
            kinds["gradient_kind"] = kind_of(gradient, names)
            return shown(value), shown(gradient)

        def only_value(xs: Any) -> Any:
            value = call(made(one["source"], xs[0], names))
            kinds["kind"], kinds["shape"] = kind_of(value, names), value.shape
            return shown(value)

        xs = numbers(one["source"], one["shape"], names, 1)
        on_ranks(only_value, xs)
        ys = numbers(gradient_kinds[kinds["kind"]], kinds.pop("shape"), names, 2)
        found = on_ranks(body, xs, ys)
        return {**kinds, **dict(zip(("value", "gradient"), found, strict=False))}

    def tutorial(one: dict[str, Any]) -> Any:
        options = {k: v for k, v in one.items() if k not in ("blocks", "axis", "operation")}

        def body(xs: Any) -> Any:
            return shown(getattr(lax, one["operation"])(xs[0], one["axis"], **options))

        return on_ranks(body, np.array(one["blocks"]))

    table = {
        "jax": jax.__version__,
        "missing": MISSING,
        "cases": {named(one): answer(one) for one in CASES},
        "tutorial": {name: tutorial(one) for name, one in TUTORIAL.items()},
    }
    print(written(table))


if __name__ == "__main__":
    main()
