"""The lint of docstrings' form and of names finds what it should, and no more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging"))

from lint_docstrings import ROOT, faults_of, public_names


def texts_of(source: str, *public: str) -> list[str]:
    """Return the faults of a source, without lines."""
    return [fault for _, fault in faults_of(source, set(public))]


def function(docstring: str, name: str = "send_part") -> str:
    """Return a source with one function that has this docstring."""
    return f'def {name}(x):\n    """{docstring}"""\n'


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the ranks that wait for a part.",
        "Ranks that wait, and one rank that does not.",
        "Send ``torch.ones(2)``, the 'one' of a pair, e.g. to rank 1.",
        "Send at least one of them.",
        "`send` and its wait.",
        "Send it to its owner.\n\n    Args:\n        x: the part, which no one rank holds.\n    ",
        "Send it to its owner.\n\n    >>> for one in [1]: print(one)\n    1\n    ",
    ],
)
def test_a_good_docstring_has_no_fault(docstring: str) -> None:
    assert texts_of(function(docstring)) == []


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("What is sent.", 'begins with "What"'),
        ("Whether it is sent.", "begins with 'whether'"),
        ("Of the sender's.", "begins with 'of'"),
        ("Send it. The others wait.", "more than one sentence"),
        ("Send it.\n\n    The others wait.\n    ", "more than one sentence"),
        ("Send " + "a part and " * 9 + "wait.", "109 characters, at most 100"),
        ("Sends the parts.", "says no more than the name"),
        ("Return a part to send.", "says no more than the name"),
    ],
)
def test_each_fault_is_found(docstring: str, fault: str) -> None:
    assert any(fault in text for text in texts_of(function(docstring))), texts_of(
        function(docstring)
    )


@pytest.mark.parametrize(
    "source",
    [
        "one = 1",
        "for ones in x: pass",
        "def f(one): pass",
        "lambda one: 1",
        "x.one = 1",
        "[0 for one in x]",
        "class A:\n    one: int = 1",
        "with x as one: pass",
    ],
)
def test_no_name_is_one(source: str) -> None:
    assert texts_of(source)[0].startswith("the name 'one")


def test_a_name_that_is_read_is_no_fault() -> None:
    assert texts_of("print(torch.ones(2), numbers.one)") == []


def test_public_docstrings_have_any_length() -> None:
    long = function("Send it. " + "The others wait. " * 10)
    assert texts_of(long, "send_part") == []
    assert len(texts_of(long)) == 1
    method = "class A:\n    '''Parts.'''\n" + "".join(
        f"    def {name}(self):\n        '''Send it. The others wait.'''\n"
        for name in ("send", "_send", "__call__")
    )
    assert [text.split(":")[0] for text in texts_of(method, "A")] == ["_send"]


def test_no_public_docstring_begins_with_what() -> None:
    assert texts_of(function("What is sent."), "send_part") == ['send_part: begins with "What"']


def test_the_doors_are_read() -> None:
    public = {(str(file.relative_to(ROOT)), name) for file, name in public_names()}
    for known in [
        ("mesh/device_mesh.py", "DeviceMesh"),
        ("lax/reductions.py", "psum"),
        ("ddp/comm_hooks/bucket.py", "GradBucket"),
        ("sharding/elementwise.py", "ElementwiseArray"),  # a base of ShardedArray
    ]:
        assert known in public
    assert ("groups/device_group.py", "DeviceGroup") not in public
