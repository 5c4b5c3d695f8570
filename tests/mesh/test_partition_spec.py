"""``P``: JAX's rules. What JAX 0.10.2 answers to each expression stands beside it."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
from hypothesis import given, strategies as st

from meshdist.errors import AxisError, KindError, MeshdistError
from meshdist.mesh.partition_spec import P, PartitionSpec, axes_of

# What JAX prints.
ANSWERS = {
    "P()": "P()",
    "P(None)": "P(None,)",
    "P('a', None, 'b')": "P('a', None, 'b')",
    "P(('a',), 'b')": "P('a', 'b')",
    "P((), 'b')": "P(None, 'b')",
    "P('')": "P(None,)",
    "P(('a', 'b'))": "P(('a', 'b'),)",
    "P(['a', 'b'])": "P(('a', 'b'),)",
    "P('a', 'a')": "P('a', 'a')",
    "P('a', unreduced={'b'})": "P('a', unreduced={'b'})",
    "P(unreduced={'b'}, reduced=frozenset({'c'}))": "P(unreduced={'b'}, reduced={'c'})",
    "P('a', None, reduced={'c'})": "P('a', None, reduced={'c'})",
    "P('a') == P(('a',))": "True",
    "P('a') == P('a', None)": "False",
    "P('a') == ('a',)": "False",
    "hash(P('a')) == hash(P(('a',)))": "True",
    "P('a') + P('b')": "P('a', 'b')",
    "P('a') + ('b',)": "P('a', 'b')",
    "('a',) + P('b')": "P('a', 'b')",
    "P('a', unreduced={'x'}) + P(reduced={'y'})": "P('a', unreduced={'x'}, reduced={'y'})",
    "P('a', None)[0]": "'a'",
    "P('a', 'b')[0:1]": "('a',)",
    "P('a', 'b')[-1]": "'b'",
    "list(P('a', None))": "['a', None]",
    "'a' in P('a')": "True",
    "len(P('a', None, unreduced={'b'}))": "2",
    "P('a', None, 'b').index(None)": "1",
    "P('a', ('b',)).index('b')": "1",
    "P('a', 'b', ('b',)).count('b')": "2",
    "P('a').update(unreduced={'b'})": "P('a', unreduced={'b'})",
    "P('a', unreduced={'b'}).update(partitions=(None,))": "P(None, unreduced={'b'})",
    "P('a', None).partitions": "('a', None)",
    "isinstance(P('a'), tuple)": "False",
    "copy.copy(P('a'))": "P('a',)",
    "pickle.loads(pickle.dumps(P('a', unreduced={'b'})))": "P('a', unreduced={'b'})",
}

# What JAX raises; ours derives from it, and says this.
ERRORS = {
    "P(('a', ('b',)))": (ValueError, "('b',) inside it, a tuple"),
    "P('a', unreduced=['b'])": (TypeError, "fix:      write unreduced={'b'}"),
    "P('a', unreduced='b')": (TypeError, "fix:      write unreduced={'b'}"),
    "P('a', unreduced=True)": (TypeError, "found:    True, a bool"),
    "P('a', reduced=None)": (TypeError, "takes a set of axis names as reduced"),
    "P('a', unreduced={'a'})": (ValueError, "partitions and unreduced cannot share an axis"),
    "P('a', reduced={'a'})": (ValueError, "partitions and reduced cannot share an axis"),
    "P(unreduced={'a'}, reduced={'a'})": (ValueError, "fix:      leave 'a' in only one of them"),
    "P(unreduced={None})": (ValueError, "found:    {None}, a set"),
    "P('a', unreduced={'x'})[0]": (ValueError, "write spec.partitions[...]"),
    "list(P('a', unreduced={'x'}))": (ValueError, "write *spec.partitions"),
    "P('a', unreduced={'x'}) + ('b',)": (TypeError, "write P('b',) for the tuple"),
    "('b',) + P('a', reduced={'x'})": (TypeError, "write P('b',) for the tuple"),
    "P({'a'})": (TypeError, "cannot take {'a'} as a dim's entry"),
}

# JAX takes these as entries, and rejects or ignores them later; here each is rejected at once.
REFUSED = {
    "P(1)": "found:    an int",
    "P(True)": "cannot take True as a dim's entry",
    "P(('a', None))": "None inside it, a NoneType",
}


@pytest.mark.parametrize("expression", ANSWERS)
def test_it_answers_as_jax_does(expression: str) -> None:
    found = eval(expression, {"P": P, "copy": copy, "pickle": pickle})
    assert repr(found) == ANSWERS[expression]


@pytest.mark.parametrize("expression", ERRORS)
def test_it_raises_what_jax_raises(expression: str) -> None:
    kind, words = ERRORS[expression]
    with pytest.raises(MeshdistError) as caught:
        eval(expression, {"P": P})
    assert isinstance(caught.value, kind)
    assert words in str(caught.value)


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_no_entry(expression: str) -> None:
    with pytest.raises(KindError) as caught:
        eval(expression, {"P": P})
    assert REFUSED[expression] in str(caught.value)


def test_an_axis_in_two_places() -> None:
    with pytest.raises(AxisError) as caught:
        P("a", ("b", "c"), unreduced={"c"})
    assert str(caught.value) == (
        "PartitionSpec: partitions and unreduced cannot share an axis\n"
        "  expected: each axis at most once\n"
        "  found:    partitions ('a', ('b', 'c')), unreduced={'c'}, reduced={}\n"
        "  fix:      leave 'c' in only one of them"
    )


def test_a_spec_never_changes() -> None:
    spec = P("a")
    with pytest.raises(AttributeError, match="'unreduced' cannot be set or deleted"):
        spec.unreduced = frozenset("b")  # type: ignore[misc]
    with pytest.raises(AttributeError, match="update"):
        del spec.partitions
    with pytest.raises(KindError, match="cannot be subclassed"):
        type("Own", (PartitionSpec,), {})
    with pytest.raises(TypeError):
        operator.add(P("a"), ["b"])
    with pytest.raises(TypeError):
        operator.add(["b"], P("a"))
    with pytest.raises(ValueError, match="not in tuple"):
        P("a").index("z")


NAMES = st.sampled_from("abcdef")


@given(st.lists(st.one_of(st.none(), NAMES, st.lists(NAMES, max_size=3).map(tuple)), max_size=4))
def test_equal_entries_make_equal_specs(entries: list[str | tuple[str, ...] | None]) -> None:
    spec = P(*entries)
    written_out = [axes_of(entry) for entry in entries]
    assert P(*written_out) == spec
    assert hash(P(*written_out)) == hash(spec)
    assert [axes_of(entry) for entry in spec] == written_out
    assert eval(repr(spec), {"P": P}) == spec == P(*spec) == pickle.loads(pickle.dumps(spec))
    free = {"g", "h"}
    assert eval(repr(spec.update(unreduced=free)), {"P": P}) == P(*entries, unreduced=free) != spec
