"""The table of kinds: it knows every collective, and no other cast than JAX's."""

from __future__ import annotations

import re

import pytest

from meshdist import attention, experts, lax
from meshdist.annotations.axis_types import (
    CASTS,
    GATHERED,
    GRADIENT_KINDS,
    KINDS,
    OPERATION_KINDS,
    find_result_kind,
)


def test_every_collective_has_its_kinds() -> None:
    of_experts = {f"experts.{operation}" for operation in experts.__all__ if operation != "Route"}
    others = {"pcast", "all_gather", "axis_index", "axis_size"}
    of_modules = {*of_experts, "attention.context_parallel"}
    assert {*OPERATION_KINDS, *others} == {*lax.__all__, *of_modules}


def test_kinds_are_the_four() -> None:
    tables = [*OPERATION_KINDS.values(), *CASTS.values(), dict.fromkeys("V", "I")]
    assert {kind for table in tables for kind in (*table, *table.values())} <= set(KINDS)
    assert set(GATHERED.values()) <= set(KINDS)
    assert all(GRADIENT_KINDS[GRADIENT_KINDS[kind]] == kind for kind in KINDS)


@pytest.mark.parametrize(
    ("operation", "to", "found"),
    [
        ("psum", None, {"V": "I", "U": "I"}),
        ("pvary", None, {"I": "V"}),
        ("psum_scatter", None, {"V": "V", "U": "V"}),
        ("pbroadcast", None, {"V": "I"}),
        ("pcast", "varying", {"I": "V", "R": "V"}),
        ("pcast", "reduced", {"I": "R"}),
        ("pcast", "unreduced", {"V": "U"}),
        ("pcast", "invarying", {}),
        ("all_gather", None, {"V": "V"}),
        ("all_gather", "varying", {"V": "V"}),
        ("all_gather", "invarying", {"V": "I"}),
        ("all_gather", "reduced", {"V": "R"}),
    ],
)
def test_what_a_collective_makes_of_each_kind(
    operation: str, to: str | None, found: dict[str, str]
) -> None:
    results = {kind: find_result_kind(operation, kind, to) for kind in KINDS}
    assert {kind: result for kind, result in results.items() if result} == found


@pytest.mark.parametrize("operation", [*OPERATION_KINDS, "pcast", "all_gather"])
def test_docstrings_tell_the_kinds(operation: str) -> None:
    """As in: Varying -> invariant; unreduced -> invariant."""
    home, _, name = operation.rpartition(".")
    module = {"": lax, "attention": attention, "experts": experts}[home]
    doc = " ".join(str(getattr(module, name).__doc__).split())
    tos = {"pcast": list(CASTS), "all_gather": list(GATHERED)}.get(operation, [None])
    told = {
        f"{KINDS[kind]} -> {KINDS[result]}"
        for to in tos
        for kind in KINDS
        if (result := find_result_kind(operation, kind, to))
    }
    words = "|".join(KINDS.values())
    shown = {pair.lower() for pair in re.findall(rf"(?i)(?:{words}) -> (?:{words})", doc)}
    assert shown == told
