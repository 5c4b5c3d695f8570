"""Small drawings are compared line by line; larger ones are read back and compared."""

from __future__ import annotations

import io
import math
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from meshdist.mesh.layout import Layout
from meshdist.mesh.visualize import draw

NAMES = ("a", "b", "c", "d")
quick = settings(max_examples=40)


def picture(text):
    return textwrap.dedent(text).strip("\n")


@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        (
            Layout.from_shape((4,), ("tp",)),
            {},
            """
            ┌──────┬───┬───┬───┬───┐
            │   tp │ 0 │ 1 │ 2 │ 3 │
            ├──────┼───┼───┼───┼───┤
            │ rank │ 0 │ 1 │ 2 │ 3 │
            └──────┴───┴───┴───┴───┘
            """,
        ),
        (
            Layout.from_ranks([3, 12, 0], ("tp",)),
            {"highlight_rank": 12},
            """
            ┌──────┬───┬──────┬───┐
            │   tp │ 0 │    1 │ 2 │
            ├──────┼───┼──────┼───┤
            │ rank │ 3 │ [12] │ 0 │
            └──────┴───┴──────┴───┘
            """,
        ),
        (
            Layout.from_shape((2, 4), ("dp", "tp")),
            {},
            """
            ┌─────────┬───┬───┬───┬───┐
            │ dp \\ tp │ 0 │ 1 │ 2 │ 3 │
            ├─────────┼───┼───┼───┼───┤
            │       0 │ 0 │ 1 │ 2 │ 3 │
            │       1 │ 4 │ 5 │ 6 │ 7 │
            └─────────┴───┴───┴───┴───┘
            """,
        ),
        (
            Layout.from_shape((2, 4), ("dp", "tp")),
            {"hosts": ["north"] * 4 + ["south"] * 4, "highlight_rank": 5},
            """
            ┌─────────┬─────┬───────┬─────┬─────┐
            │ dp \\ tp │   0 │     1 │   2 │   3 │
            ├─────────┼─────┼───────┼─────┼─────┤
            │       0 │ 0 a │   1 a │ 2 a │ 3 a │
            │       1 │ 4 b │ [5] b │ 6 b │ 7 b │
            └─────────┴─────┴───────┴─────┴─────┘
            hosts: a = north, b = south
            """,
        ),
        (
            Layout.from_ranks([[1, 0]]),
            {},
            """
            ┌─────────────────┬───┬───┐
            │ axis 0 \\ axis 1 │ 0 │ 1 │
            ├─────────────────┼───┼───┤
            │               0 │ 1 │ 0 │
            └─────────────────┴───┴───┘
            """,
        ),
        (
            Layout.from_shape((2, 2, 1), ("pp", "dp", "tp")),
            {"ascii_only": True},
            """
            pp=0             pp=1
            +---------+---+  +---------+---+
            | dp \\ tp | 0 |  | dp \\ tp | 0 |
            +---------+---+  +---------+---+
            |       0 | 0 |  |       0 | 2 |
            |       1 | 1 |  |       1 | 3 |
            +---------+---+  +---------+---+
            """,
        ),
        (
            Layout.from_shape((2, 1, 1)),
            {"ascii_only": True},
            """
            [0, :, :]                [1, :, :]
            +-----------------+---+  +-----------------+---+
            | axis 1 \\ axis 2 | 0 |  | axis 1 \\ axis 2 | 0 |
            +-----------------+---+  +-----------------+---+
            |               0 | 0 |  |               0 | 1 |
            +-----------------+---+  +-----------------+---+
            """,
        ),
        (
            Layout.from_shape((2, 2, 1, 2), ("a", "b", "c", "d")),
            {"width": 45},
            """
            a=0, b=0           a=0, b=1
            ┌───────┬───┬───┐  ┌───────┬───┬───┐
            │ c \\ d │ 0 │ 1 │  │ c \\ d │ 0 │ 1 │
            ├───────┼───┼───┤  ├───────┼───┼───┤
            │     0 │ 0 │ 1 │  │     0 │ 2 │ 3 │
            └───────┴───┴───┘  └───────┴───┴───┘
            a=1, b=0           a=1, b=1
            ┌───────┬───┬───┐  ┌───────┬───┬───┐
            │ c \\ d │ 0 │ 1 │  │ c \\ d │ 0 │ 1 │
            ├───────┼───┼───┤  ├───────┼───┼───┤
            │     0 │ 4 │ 5 │  │     0 │ 6 │ 7 │
            └───────┴───┴───┘  └───────┴───┴───┘
            """,
        ),
        (
            Layout.from_shape((64, 256), ("dp", "tp")),
            {"highlight_rank": 9000, "width": 60},
            """
            ┌─────────┬───────┬───┬────────┬───┬───────┐
            │ dp \\ tp │     0 │ … │     40 │ … │   255 │
            ├─────────┼───────┼───┼────────┼───┼───────┤
            │       0 │     0 │ … │     40 │ … │   255 │
            │       1 │   256 │ … │    296 │ … │   511 │
            │       2 │   512 │ … │    552 │ … │   767 │
            │       3 │   768 │ … │    808 │ … │  1023 │
            │       4 │  1024 │ … │   1064 │ … │  1279 │
            │       5 │  1280 │ … │   1320 │ … │  1535 │
            │       6 │  1536 │ … │   1576 │ … │  1791 │
            │       7 │  1792 │ … │   1832 │ … │  2047 │
            │       ⋮ │     ⋮ │ ⋮ │      ⋮ │ ⋮ │     ⋮ │
            │      35 │  8960 │ … │ [9000] │ … │  9215 │
            │       ⋮ │     ⋮ │ ⋮ │      ⋮ │ ⋮ │     ⋮ │
            │      63 │ 16128 │ … │  16168 │ … │ 16383 │
            └─────────┴───────┴───┴────────┴───┴───────┘
            """,
        ),
    ],
)
def test_drawings(layout, options, expected):
    assert draw(layout, **options) == picture(expected)


@st.composite
def small_meshes(draw_from):
    """Permuted ranks, few enough for every one to be shown at any width."""
    inner = draw_from(st.sampled_from([(1,), (3,), (1, 1), (1, 3), (5, 1), (2, 2), (4, 3)]))
    outer = draw_from(st.sampled_from([(), (1,), (2,), (4,), (2, 2), (1, 3)]))
    shape = (*outer, *inner) if len(inner) == 2 else inner
    ranks = np.array(draw_from(st.permutations(range(math.prod(shape))))).reshape(shape)
    names = draw_from(st.sampled_from([None, NAMES[: len(shape)]]))
    return Layout.from_ranks(ranks, names), ranks


@quick
@given(small_meshes())
def test_every_rank_of_a_small_mesh_stands_at_its_coordinate(mesh):
    layout, ranks = mesh
    lines = draw(layout, width=10).split("\n")  # too narrow for two tables side by side
    numbers = [re.findall(r"\d+", line.split("│", 2)[2]) for line in lines if line[0] == "│"]
    num_rows, num_columns = ranks.shape[-2] if ranks.ndim > 1 else 1, ranks.shape[-1]
    tables = np.array(numbers, dtype=int).reshape(-1, 1 + num_rows, num_columns)
    assert (tables[:, 0] == np.arange(num_columns)).all()
    assert np.array_equal(tables[:, 1:].reshape(ranks.shape), ranks)
    labels = [line for line in lines if line[0] not in "┌├│└"]
    outer = list(np.ndindex(ranks.shape[:-2])) if ranks.ndim > 2 else []
    if layout.names is None:
        assert labels == [f"[{', '.join(map(str, at))}, :, :]" for at in outer]
    else:
        named = [zip(layout.names, at, strict=False) for at in outer]
        assert labels == [", ".join(f"{name}={i}" for name, i in pairs) for pairs in named]


@quick
@given(
    st.lists(st.sampled_from([1, 2, 3, 7, 16, 300]), min_size=1, max_size=4).map(tuple),
    st.integers(40, 120),
    st.floats(0, 1, exclude_max=True),
)
def test_large_meshes_fit_and_keep_the_highlighted_rank_in_view(shape, width, place):
    layout = Layout.from_shape(shape, NAMES[: len(shape)])
    rank = int(place * layout.num_ranks)
    text = draw(layout, highlight_rank=rank, width=width)
    assert text.count(f"[{rank}]") == 1
    lines = text.split("\n")
    assert len(lines) <= 90
    # Keeping the highlighted rank in view takes five columns of at most ten characters.
    assert max(map(len, lines)) <= max(width, 70)
    last = str(layout.num_ranks - 1)
    assert re.search(rf"\b{last}\b", text)


@pytest.mark.parametrize("size", [12, 13, 14, 40])
def test_an_ellipsis_stands_exactly_where_rows_are_left_out(size):
    layout = Layout.from_shape((size, 1), ("dp", "tp"))
    for rank in range(size):
        lines = draw(layout, highlight_rank=rank).split("\n")[3:-1]
        labels = [line.split("│")[1].strip() for line in lines]
        assert len(labels) <= 12
        assert str(rank) in labels
        assert labels[0] == "0"
        assert labels[-1] == str(size - 1)
        for before, label, after in zip(labels, labels[1:], labels[2:], strict=False):
            if label == "⋮":
                assert int(after) - int(before) > 2
            elif before != "⋮":
                assert int(label) - int(before) == 1


def test_a_drawing_has_no_colors_unless_asked(monkeypatch):
    layout = Layout.from_shape((2, 2), ("dp", "tp"))
    plain = draw(layout, highlight_rank=1)
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "5"}.items():
        monkeypatch.setenv(name, value)
        assert draw(layout, highlight_rank=1) == plain
    assert "\x1b" not in plain
    colored = draw(layout, highlight_rank=1, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert re.findall(r"\x1b\[1;7m *(.*?) *\x1b", colored) == ["[1]"]
    hosts = draw(layout, hosts=["a", "a", "b", "b"], color=True)
    assert "\x1b[36m" in hosts
    assert "\x1b[35m" in hosts


def test_colors_follow_the_terminal(monkeypatch):
    layout = Layout.from_shape((2,), ("dp",))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert "\x1b[" in draw(layout, color=None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in draw(layout, color=None)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert "\x1b[" not in draw(layout, color=None)


def test_ascii_where_the_stream_has_no_lines_to_draw_with(monkeypatch):
    layout = Layout.from_shape((20, 40), ("dp", "tp"))
    for encoding, is_ascii in [("ascii", True), ("latin-1", True), ("utf-8", False), (None, False)]:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding or "utf-8")
        monkeypatch.setattr(sys, "stdout", stream if encoding else None)
        text = draw(layout)
        assert text.isascii() == is_ascii
        assert text == draw(layout, ascii_only=is_ascii)
    assert "..." in draw(layout, ascii_only=True)


def test_a_long_list_of_hosts_is_shortened():
    layout = Layout.from_shape((40,), ("dp",))
    last = draw(layout, hosts=[f"host{rank:02}" for rank in range(40)], width=70).split("\n")[-1]
    assert last == "hosts: a = host00, b = host01, c = host02, d = host03, …, an = host39"


def test_a_layout_prints_as_its_drawing_and_shows_a_picture_in_notebooks():
    layout = Layout.from_shape((2, 3), ("dp", "tp"))
    assert str(layout) == draw(layout)
    assert layout._repr_svg_().startswith("<svg")
    assert repr(layout) == "Layout.from_shape((2, 3), names=('dp', 'tp'))"


# ------------------------------------------------------------------ the page


def test_the_page_shows_what_its_code_prints(capsys):
    path = Path(__file__).resolve().parents[2] / "docs" / "reference" / "mesh.md"
    page = path.read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    assert capsys.readouterr().out == shown
    assert len(shown) > 500
