"""The shape of every message."""

from __future__ import annotations

import pickle

import pytest

from meshdist import errors
from meshdist.error_text import explain, grouped_text, ranks_text


def test_fields_stand_aligned_and_in_order() -> None:
    text = explain("it broke", fix="mend it", where="here", found="one\ntwo", expected="three")
    assert text == (
        "it broke\n"
        "  where:    here\n"
        "  expected: three\n"
        "  found:    one\n"
        "            two\n"
        "  fix:      mend it"
    )


def test_absent_fields_leave_no_line() -> None:
    assert explain("it broke") == "it broke"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        ([2, 0], "ranks 2, 0"),
        ([4, 5], "ranks 4-5"),
    ],
)
def test_ranks_are_named_shortly(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


KINDS = [
    kind
    for name in errors.__all__
    if issubclass(kind := getattr(errors, name), errors.MeshdistError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_prints_plainly_keeps_its_fields_and_pickles(kind: type) -> None:
    error = kind("it broke", fix="mend it")
    error.rank = 3
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert type(each) is kind
        assert str(each) == "it broke\n  fix:      mend it"
        assert (each.summary, each.fix, each.where, each.rank) == ("it broke", "mend it", None, 3)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.BackendError, errors.DistBackendError),
        (errors.RendezvousError, errors.DistNetworkError),
        (errors.StoreError, errors.DistStoreError),
        (errors.CollectiveTimeoutError, TimeoutError),
        (errors.MismatchError, errors.DistBackendError),
        (errors.AxisError, KeyError),
        (errors.MeshError, RuntimeError),
        (errors.ShapeError, ValueError),
        (errors.KindError, TypeError),
        (errors.NotInitializedError, ValueError),
    ],
)
def test_errors_are_caught_as_torchs_or_the_builtin(kind: type, base: type) -> None:
    with pytest.raises(base):
        raise kind("it broke")


def test_ranks_that_say_the_same_are_told_together_in_the_order_of_the_first() -> None:
    told = [(3, "b"), (0, "a"), (1, "a"), (4, "b")]
    assert grouped_text(told) == "ranks 3-4: b\nranks 0-1: a"
    assert grouped_text(told, "; ") == "ranks 3-4: b; ranks 0-1: a"
    assert grouped_text([]) == ""
