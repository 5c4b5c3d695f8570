"""Patterns: print then parse is the identity, and what is no pattern is shown where it fails."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import example, given, strategies as st

from meshdist.errors import ArgumentError, KindError, MeshdistError, PatternError
from meshdist.mesh.pattern import Dim, Pattern, PatternSide, parse

NAMES = ("b", "s", "d", "h", "k", "β_1", "U", "dp")
AXES = ("dp", "tp", "cp", "ep", "R", "axis_7")


@st.composite
def sides(draw: st.DrawFn) -> PatternSide:
    names = list(draw(st.permutations(NAMES)))[: draw(st.integers(0, 6))]
    axes = list(draw(st.permutations(AXES)))
    dims: list[Dim] = []
    while names:
        kind = draw(st.sampled_from(("name", "name", "group", "one")))
        count = draw(st.integers(0, min(2, len(axes))))
        cut, axes = tuple(axes[:count]), axes[count:]
        if kind == "one":
            dims.append(Dim(("1",)))
        size = 1 if kind == "name" else draw(st.integers(1, len(names)))
        dims.append(Dim(tuple(names[:size]), cut))
        names = names[size:]
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), Dim(("...",)))
    both = draw(st.integers(0, len(axes)))
    unreduced, rest = axes[:both], axes[both:]
    return PatternSide(
        tuple(dims), tuple(unreduced), tuple(rest[: draw(st.integers(0, len(rest)))])
    )


PATTERNS = st.builds(
    Pattern,
    st.lists(sides(), min_size=1, max_size=3).map(tuple),
    st.one_of(st.none(), sides()),
)


@given(PATTERNS)
def test_print_then_parse_is_the_identity(pattern: Pattern) -> None:
    text = str(pattern)
    again = parse(text)
    assert again == pattern
    assert hash(again) == hash(pattern)
    assert str(again) == text == again.text
    assert parse(text) is again
    assert eval(repr(pattern), {"Pattern": parse}) == pattern
    for side in (*again.operands, *([again.result] if again.result else [])):
        for dim in side.dims:
            assert text.startswith(("(", *dim.names[:1]), dim.column)


DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(("drop", "double", "put", "swap")),
        st.integers(0, 200),
        st.sampled_from([*"@(){},;:->. 1$2\t\nUbR=", "dp", "...", "->"]),
    ),
    min_size=1,
    max_size=3,
)


def damaged(text: str, damage: list[tuple[str, int, str]]) -> str:
    for kind, at, put in damage:
        at %= len(text) + 1
        left, here, right = text[:at], text[at : at + 1], text[at + 1 :]
        text = {
            "drop": left + right,
            "double": left + here + here + right,
            "put": left + put + here + right,
            "swap": left + right[:1] + here + right[1:],
        }[kind]
    return text


@given(PATTERNS.map(str), DAMAGE)
@example("b@dp s d@tp -> b s@tp d", [("put", 3, "\n")])
def test_damage_raises_one_error_with_a_column_inside(
    text: str, damage: list[tuple[str, int, str]]
) -> None:
    check_outcome(damaged(text, damage))


def check_outcome(text: str) -> None:
    """A text is a pattern, whose print parses to it, or rejected with all that is promised."""
    error = None
    try:
        pattern = parse(text)
    except PatternError as caught:
        error = caught
    if error is None:
        assert parse(str(pattern)) == pattern
        return
    assert error.text == text
    assert 0 <= error.column <= len(text)
    shown, caret = (error.where or "").split("\n")
    assert len(shown) == len(text)
    assert caret == " " * error.column + "^"
    assert error.expected
    assert error.found


@given(st.text(max_size=12))
def test_any_text_is_a_pattern_or_rejected(text: str) -> None:
    check_outcome(text)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", ""),
        (" -> ", " -> "),
        ("b@dp s d@tp", "b@dp s d@tp"),
        ("b@( dp , cp )  s", "b@(dp,cp) s"),
        ("(h@tp k) d", "(h k)@tp d"),
        ("(h)@tp d", "h@tp d"),
        ("b@(dp)(h k)@tp{U:cp}", "b@dp (h k)@tp {U:cp}"),
        ("b d {R:a;U:b,c}", "b d {U:b,c; R:a}"),
        ("... d@tp {U:dp; R:cp}", "... d@tp {U:dp; R:cp}"),
        ("b@dp s d,d f@tp->b@dp s f@tp", "b@dp s d, d f@tp -> b@dp s f@tp"),
        ("b->b 1 1", "b -> b 1 1"),
        ("dp@dp", "dp@dp"),
    ],
)
def test_what_is_printed(text: str, printed: str) -> None:
    assert str(parse(text)) == printed
    assert repr(parse(text)) == f"Pattern({printed!r})"


def test_what_is_parsed() -> None:
    pattern = parse("b@(dp,cp) (h k)@tp 1 ... {U:ep} -> b")
    assert pattern.get_operand() == PatternSide(
        (Dim(("b",), ("dp", "cp")), Dim(("h", "k"), ("tp",)), Dim(("1",)), Dim(("...",))), ("ep",)
    )
    assert [dim.column for dim in pattern.operands[0].dims] == [0, 10, 19, 21]
    assert pattern.operands[0].names == ("b", "h", "k", "...")
    assert pattern.operands[0].axes == ("dp", "cp", "tp", "ep")
    assert [dim.is_one for dim in pattern.operands[0].dims] == [False, False, True, False]
    assert [dim.is_rest for dim in pattern.operands[0].dims] == [False, False, False, True]
    assert pattern.result == PatternSide((Dim(("b",)),))


# text: column of the caret from 1, expected, found
REFUSED = {
    "b @dp s": (2, '"@" right after its dim', "a space"),
    "b@ s": (3, 'the name of a mesh axis right after "@"', "a space"),
    "b@": (3, 'the name of a mesh axis, or several in brackets: "(dp,tp)"', "the end"),
    "b@(dp cp) s": (7, '"," or ")" after a mesh axis', "'cp'"),
    "b@(dp, ) s": (8, "the name of a mesh axis", "')'"),
    "b@dp@tp": (5, "several axes in brackets: b@(dp,...)", "a second '@'"),
    "@tp": (1, 'the name of a dim right before "@"', "'@'"),
    "1@tp": (2, 'the name of a dim before "@"', "'1'"),
    "...@tp": (4, 'the name of a dim before "@"', "'...'"),
    "2 d": (1, "the name of a dim, or 1", "'2'"),
    "b$ d": (2, 'a dim, "@", "{", "," or "->"', "'$'"),
    "b b": (3, "each dim once in an array", "'b' again"),
    "... ...": (5, "each dim once in an array", "'...' again"),
    "b (b k)": (4, "each dim once in an array", "'b' again"),
    "b@tp d@tp": (8, "each mesh axis once in an array", "'tp' again"),
    "b@dp s {R:dp}": (11, "each mesh axis once in an array", "'dp' again"),
    "{U:dp; R:dp}": (10, "each mesh axis once in an array", "'dp' again"),
    "(h k@tp) d": (
        5,
        "axes after the first dim of a group",
        "axes after 'k', whose parts would not be contiguous",
    ),
    "(h@tp k)@dp": (9, "axes inside of a group or after it", "both"),
    "(h (k l))": (4, 'the name of a dim, or ")"', "'('"),
    "()": (2, "the name of a dim in a group", "')'"),
    "(h k": (5, 'the name of a dim, or ")"', "the end"),
    "b)": (2, 'a dim, "{", ",", "->" or the end', "')'"),
    "b {U tp}": (6, '":" and mesh axes', "'tp'"),
    "b {X:tp}": (4, "U (unreduced) or R (reduced)", "'X'"),
    "b {U:tp": (8, '",", ";" or "}"', "the end"),
    "b {U:tp; }": (10, "U (unreduced) or R (reduced)", "'}'"),
    "b {U:tp} d": (10, '",", "->" or the end', "'d'"),
    "b -> c -> d": (8, 'a dim, "{" or the end', "'->'"),
    "b -> c {U:a} {R:b}": (14, "the end", "'{'"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    column, expected, found = REFUSED[text]
    with pytest.raises(PatternError) as caught:
        parse(text)
    error = caught.value
    assert (error.column + 1, error.expected, error.found) == (column, expected, found)


def test_the_whole_text_of_a_refusal() -> None:
    with pytest.raises(PatternError) as caught:
        parse("b@dp s\t-> b s@tp@")
    assert str(caught.value) == (
        "invalid pattern: column 17 of 'b@dp s\\t-> b s@tp@'\n"
        "  where:    b@dp s -> b s@tp@\n"
        "                            ^\n"
        "  expected: several axes in brackets: s@(tp,...)\n"
        "  found:    a second '@'"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.column) == (str(caught.value), 16)
    assert isinstance(again, ArgumentError)


@pytest.mark.parametrize(
    ("text", "column", "fix"),
    [
        ("b@dp,cp s -> b s", 4, "write b@(dp,cp) to cut one dim over several axes"),
        ("x b@(dp,ep), cp s", 11, "write b@(dp,ep,cp) to cut one dim over several axes"),
        ("b d, d f -> b f", 3, None),
        ("b@dp, d@tp", 4, None),
        (",", 0, None),
    ],
)
def test_operands_where_one_is_meant(text: str, column: int, fix: str | None) -> None:
    with pytest.raises(PatternError) as caught:
        parse(text).get_operand()
    assert (caught.value.column, caught.value.fix) == (column, fix)
    assert caught.value.expected == "one array (a comma outside of brackets separates operands)"
    assert caught.value.found == f"{len(parse(text).operands)} operands"


def test_what_is_no_text() -> None:
    with pytest.raises(KindError) as caught:
        parse(("b", "s"))  # type: ignore[arg-type]
    assert isinstance(caught.value, MeshdistError)
    assert "a pattern must be a string" in str(caught.value)
    assert "found:    ('b', 's'), a tuple" in str(caught.value)
