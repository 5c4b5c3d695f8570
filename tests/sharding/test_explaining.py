"""Steps in words."""

from __future__ import annotations

import pytest

from meshdist.mesh.layout import Layout
from meshdist.sharding.plans import bytes_text, step_text, step_time_s
from meshdist.sharding.routes import Link
from meshdist.sharding.steps import CollectiveStep, Exchange, GroupStep, Pad, Take

MESH = Layout.from_shape((2, 4), ("dp", "tp"))
LINKS = (Link(1e-3, 1e6), Link(1e-6, 1e6))
BOX = ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB")),
        *((3 << 29, "1.5 GiB"), (1 << 40, "1.0 TiB"), (1 << 60, "1024.0 PiB")),
    ],
)
def test_bytes_in_words(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Take((2, 2), BOX), "keep [0:2, 1:3]: 2 x 2; nothing is sent"),
        (Pad((4, 4), BOX), "zeros around [0:2, 1:3]: 4 x 4; nothing is sent"),
        (Pad((4,), None), "zeros: 4; nothing is sent"),
        (
            CollectiveStep((), (0,), 2, 0, "all_reduce", ()),
            "all-reduce over dp, 2 ranks: a scalar; 4 bytes in, 4 bytes out, 2004 us",
        ),
        (
            CollectiveStep((40,), (0, 1), 8, 3, "all_gather_into_tensor", (5,)),
            "all-gather over dp, tp, 8 ranks: 40; 140 bytes in, 140 bytes out, 7140 us",
        ),
        (
            Exchange((2, 3), (1,), 4, 0, (), ((2, BOX),), None),
            "exchange boxes (1 in, none out) over tp, 4 ranks: 2 x 3; "
            "16 bytes in, 0 bytes out, 17 us",
        ),
        (
            Exchange((0,), (1,), 4, 0, ((1, BOX), (2, BOX)), (), None, is_summed=True),
            "exchange and sum boxes (none in, 2 out) over tp, 4 ranks: 0; "
            "0 bytes in, 32 bytes out, 32 us",
        ),
    ],
)
def test_steps_in_words(step, text):
    assert step_text(step, MESH, LINKS, 4) == text
    assert isinstance(step, GroupStep) == (step_time_s(step, LINKS, 4) > 0)


def test_axes_without_names_are_numbers() -> None:
    step = CollectiveStep((8,), (0, 1), 8, 0, "all_reduce", (8,))
    text = step_text(step, Layout.from_shape((2, 4)), LINKS, 1)
    assert text.startswith("all-reduce over 0, 1, 8 ranks: 8; ")
