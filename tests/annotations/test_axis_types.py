"""The text of types, and their join against JAX's rules, kind by kind."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from meshdist.annotations.axis_types import (
    Annotation,
    JoinedType,
    Refusal,
    annotation_of,
    axes_of_kind,
    change_annotation,
    find_type,
    gradient_type,
    join_types,
    kinds_in,
    set_spec,
    set_type,
    shown,
    type_of,
    type_text,
    with_kinds,
)

KINDS = st.dictionaries(st.sampled_from(["dp", "tp", "pp", "ep"]), st.sampled_from("IVRU"))


@given(KINDS)
def test_the_text_has_all_kinds_but_invariant(kinds: dict[str, str]) -> None:
    text = type_text(kinds)
    named = {axis: kind for axis, kind in kinds.items() if kind != "I"}
    assert kinds_in(text) == named
    assert type_text(dict(reversed(kinds.items()))) == text  # equal types are equal strings
    assert gradient_type(gradient_type(text)) == text
    assert {axis for kind in "VRU" for axis in axes_of_kind(text, kind)} == set(named)


def test_the_text() -> None:
    assert type_text({}) == ""
    assert type_text({"tp": "V", "ep": "U", "dp": "V", "pp": "I"}) == "V:dp,tp U:ep"
    assert with_kinds("V:dp,tp U:ep", {"tp": "I", "pp": "R"}) == "V:dp R:pp U:ep"
    assert gradient_type("V:dp R:ep U:tp") == "V:dp R:tp U:ep"
    assert shown(["dp", "tp"]) == "'dp', 'tp'"


@pytest.mark.parametrize(
    ("kinds", "result", "missing"),
    [
        ("II", "I", "--"),
        ("IV", "V", "V-"),
        ("VV", "V", "--"),
        ("IR", "R", "R-"),
        ("RR", "R", "--"),
        ("RV", "V", "--"),
        ("IRV", "V", "V--"),
    ],
)
def test_joins_without_unreduced_operands(kinds: str, result: str, missing: str) -> None:
    texts = [type_text({"x": kind}) for kind in kinds]
    wanted = tuple(type_text({"x": kind}) if kind != "-" else "" for kind in missing)
    for linearity in ("", "add", "multiply", "first"):
        assert join_types(texts, linearity) == JoinedType(type_text({"x": result}), wanted)


# By linearity, the kinds that join where one is unreduced; all others with a U are rejected.
LINEAR = {
    "": set(),
    "add": {"U", "UU", "UUU"},
    "multiply": {"U", "UI", "IU", "UR", "RU", "UII", "IUI", "IIU", "UIR", "URR", "RUR", "RRU"}
    | {"URI", "RUI", "IUR", "RIU", "IRU"},
    "first": {"U", "UI", "UR", "UII", "UIR", "URI", "URR"},
    "multiply add": {"U", "UI", "IU", "UR", "RU", "UIU", "IUU", "URU", "RUU"},
    "add multiply": {"UUI", "UIU", "UUR", "URU", "UU"},
}


@pytest.mark.parametrize("linearity", LINEAR)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_unreduced_operands_pass_where_the_operation_is_linear(length: int, linearity: str) -> None:
    for number in range(4**length):
        kinds = "".join("IVRU"[number // 4**place % 4] for place in range(length))
        if "U" not in kinds:
            continue
        found = join_types([type_text({"x": kind}) for kind in kinds], linearity)
        if kinds in LINEAR[linearity]:
            missing = tuple("R:x" if kind == "I" else "" for kind in kinds)
            assert found == JoinedType("U:x", missing), kinds
        else:
            assert found == Refusal("x", kinds.index("U")), kinds


def test_axes_join_each_by_itself() -> None:
    found = join_types(["V:dp", "", "R:tp", "U:ep"], "multiply")
    assert found == JoinedType(
        "V:dp R:tp U:ep", ("R:ep,tp", "V:dp R:ep,tp", "V:dp R:ep", "V:dp R:tp")
    )


# -- annotations ----------------------------------------------------------------------------------


class PlanExecutor:
    """An object with attributes, as a tensor is."""


def test_an_annotation_is_one_plain_attribute_of_which_each_setter_keeps_the_rest() -> None:
    x = PlanExecutor()
    assert annotation_of(x) == Annotation()
    assert (find_type(x), type_of(x), vars(x)) == (None, "", {})
    change_annotation(x, owner_ranks=(0, 1), summed_axes=("tp",))
    assert (find_type(x), type_of(x)) == (None, "")
    set_spec(x, "V:tp", "4@tp, 6")
    set_type(x, "R:dp V:tp")
    kept = Annotation("R:dp V:tp", "4@tp, 6", None, (0, 1), ("tp",))
    assert annotation_of(x) == kept and kept.has_owner
    change_annotation(x, owner_ranks=(), kinds=None, dims=None)
    assert annotation_of(x) == Annotation(summed_axes=("tp",))
    assert [type(value) for value in vars(x).values()] == [tuple]


def test_equal_types_share_one_annotation() -> None:
    executors = PlanExecutor(), PlanExecutor()
    for x in executors:
        set_type(x, "V:dp")
    first, second = (value for x in executors for value in vars(x).values())
    assert first is second
    assert annotation_of(executors[0]) is annotation_of(executors[1])


@pytest.mark.parametrize(
    ("fields", "has_owner"),
    [
        ({}, False),
        ({"owner_axes": ()}, True),
        ({"owner_ranks": (0,)}, True),
        ({"kinds": ""}, False),
    ],
)
def test_an_owner_may_reduce_over_no_axes(fields: dict[str, object], has_owner: bool) -> None:
    x = PlanExecutor()
    change_annotation(x, **fields)
    assert annotation_of(x).has_owner is has_owner
