"""Trees with dataclasses in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import pytest

from meshdist.ddp.gradient_buckets import flattened


@dataclass
class Layer:
    weight: Any
    bias: Any = None


@dataclass(frozen=True)
class Frozen:
    head: Layer
    rest: list[Layer]


@dataclass(slots=True)
class Checked:
    size: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.size * 2.0


class Pair(NamedTuple):
    left: Any
    right: Any


MADE: list[Callable[[], Any]] = [
    lambda: Layer(1.0, 2.0),
    lambda: {"a": Layer(1.0), "b": 3.0},
    lambda: Frozen(Layer(1.0, 2.0), [Layer(3.0), Layer(4.0, 5.0)]),
    lambda: Pair(Checked(1.0), (Layer(Checked(2.0)),)),
    lambda: [1.0, {"x": (2.0, None)}],
]


@pytest.mark.parametrize("make", MADE)
def test_a_tree_comes_back_with_other_leaves(make: Callable[[], Any]) -> None:
    tree = make()
    accessors, leaves, structure = flattened(tree)
    assert all(type(leaf) is float for leaf in leaves)
    assert [accessor(tree) for accessor in accessors] == leaves
    other = structure.unflatten([leaf + 10.0 for leaf in leaves])
    assert tree == make()
    assert type(other) is type(tree)
    assert [accessor(other) for accessor in accessors] == [leaf + 10.0 for leaf in leaves]
    assert structure.unflatten(leaves) == tree


def test_names_are_as_the_program_writes_them() -> None:
    accessors, _, _ = flattened({"net": Frozen(Layer(1.0), [Layer(2.0)])})
    names = [accessor.codify("tree") for accessor in accessors]
    assert names == ["tree['net'].head.weight", "tree['net'].rest[0].weight"]


def test_optree_lists_their_paths_under_our_name() -> None:
    tree = {"net": Layer(1.0, 2.0)}
    flattened(tree)
    paths = optree.tree_paths(tree, namespace="meshdist")
    assert paths == [("net", "weight"), ("net", "bias")]


def test_for_others_dataclasses_stay_what_they_were() -> None:
    flattened(Layer(1.0))
    assert optree.tree_leaves(Layer(1.0)) == [Layer(1.0)]
