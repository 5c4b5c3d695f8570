"""Paths of a tree's leaves and parts."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import optree
import pytest

from meshdist.ddp.gradient_buckets import LeafPaths
from meshdist.errors import ArgumentError

Layer = namedtuple("Layer", ["weight", "bias"])
TREE = {
    "layers": [Layer(10, 11), Layer(12, 13)],
    "head": OrderedDict(b=14, a=(15,)),
    (0, "key"): 16,
    "none": None,
}


def leaves_at(tree: Any, path: Any) -> list[Any]:
    leaves, paths = optree.tree_leaves(tree), LeafPaths(optree.tree_accessors(tree), "ready")
    return [leaves[place] for place in paths.find(path)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("layers", 1, 0), [12]),
        (("layers", 1, "weight"), [12]),
        (["layers", 1, "bias"], [13]),
        (("layers", 0), [10, 11]),
        ("layers", [10, 11, 12, 13]),
        (("layers",), [10, 11, 12, 13]),
        (("head", "a", 0), [15]),
        (("head",), [14, 15]),
        (((0, "key"),), [16]),
    ],
)
def test_a_path_leads_to_a_leaf_or_to_all_below_a_part(path: Any, expected: list[int]) -> None:
    assert leaves_at(TREE, path) == expected


def test_what_optree_calls_a_path_leads_to_its_leaf() -> None:
    leaves = optree.tree_leaves(TREE)
    paths = LeafPaths(optree.tree_accessors(TREE), "ready")
    for spelling in (optree.tree_paths(TREE), optree.tree_accessors(TREE)):
        assert [paths.find(path) for path in spelling] == [[n] for n in range(len(leaves))]


def test_the_empty_path_is_the_whole_tree() -> None:
    assert leaves_at(TREE, ()) == optree.tree_leaves(TREE)
    assert leaves_at(7, ()) == [7]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("layers", 2), "at ('layers',): 0, 1"),
        (("layers", 0, "scale"), "at ('layers', 0): 0, 'weight', 1, 'bias'"),
        (("head", "a", 0, 0), "at ('head', 'a', 0): a leaf"),
        (("layers", []), "at ('layers',): 0, 1"),
        (("layers", ([],)), "at ('layers',): 0, 1"),
        (("none",), "in the tree: "),
    ],
)
def test_a_path_to_nothing_is_rejected_with_the_keys_that_there_are(path: Any, found: str) -> None:
    with pytest.raises(ArgumentError) as error:
        leaves_at(TREE, path)
    assert error.value.summary == f"ready: the tree has no leaf at path {path!r}"
    assert str(error.value.found).startswith(found)
    assert "pass a path listed by optree.tree_paths(tree, namespace='meshdist')" in str(
        error.value.fix
    )


def test_one_key_that_leads_to_nothing_is_rejected() -> None:
    with pytest.raises(ArgumentError, match="in the tree: 'head', 'layers'\n") as error:
        leaves_at({"layers": [1], "head": 2}, "layer")
    assert error.value.summary == "ready: the tree has no leaf at path ('layer',)"


def test_many_keys_are_listed_in_part() -> None:
    with pytest.raises(ArgumentError, match="0, 1, 2, 3, 4, 5, 6, 7 and 92 more"):
        leaves_at([0] * 100, 100)
