"""``md.annotate`` and ``md.typeof``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.collectives.axis_types import ATTRIBUTE
from meshdist.errors import AxisError, AxisTypeError, KindError, MeshdistError
from tests.collectives.typed_cases import in_mesh, refusal


def test_it_returns_the_tensor_and_overwrites_its_type() -> None:
    x = torch.zeros(8, 4)
    assert md.annotate(x, varying="dp") is x
    assert str(md.typeof(x)) == repr(md.typeof(x)) == "float32[8, 4]{V:dp}"
    md.annotate(x, reduced=("tp", "ep"), unreduced="pp")
    found = md.typeof(x)
    assert str(found) == "float32[8, 4]{R:ep,tp U:pp}"
    assert (found.varying, found.reduced, found.unreduced) == ((), ("ep", "tp"), ("pp",))
    assert (found.shape, found.dtype) == ((8, 4), torch.float32)
    md.annotate(x)
    assert str(md.typeof(x)) == "float32[8, 4]"
    assert found != md.typeof(x) == md.typeof(torch.ones(8, 4))


def test_axes_are_checked_where_there_is_a_mesh() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        texts = []
        for given in ({"mesh": mesh}, {}):
            with pytest.raises(AxisError) as caught, mesh:
                md.annotate(torch.ones(2), varying="ep", **given)
            texts.append(str(caught.value))
        return texts

    for text in in_mesh(body)[0]:
        assert text.startswith("annotate: axis 'ep' is not in the mesh\n")
        assert "DeviceMesh(dp=2, tp=2)" in text
        assert "some of 'dp', 'tp'" in text
    text = refusal(AxisError, lambda mesh: md.annotate(torch.ones(2), reduced="ep"))
    assert "found:    reduced='ep'" in text


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (KindError, {"tensor": np.ones(2)}, "annotate takes a tensor"),
        (KindError, {"tensor": [torch.ones(2)]}, "annotate each tensor of a nesting by itself"),
        (KindError, {"varying": 3}, "annotate cannot take 3 as varying"),
        (KindError, {"reduced": ("dp", 3)}, "annotate cannot take ('dp', 3) as reduced"),
        (KindError, {"unreduced": "d p"}, "annotate cannot take 'd p' as unreduced"),
        (
            AxisTypeError,
            {"varying": "dp", "reduced": "dp"},
            "a value is of one kind over axis 'dp'",
        ),
    ],
)
def test_refusals(kind: type[MeshdistError], arguments: dict[str, Any], words: str) -> None:
    x = torch.ones(2)
    with pytest.raises(kind) as caught:
        md.annotate(**{"tensor": x, **arguments})
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert ATTRIBUTE not in x.__dict__


def test_subclasses_and_other_objects() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(KindError, match="annotate in a typed context has an operand of type Odd"):
        md.annotate(torch.ones(2).as_subclass(Odd))
    with pytest.raises(KindError, match="typeof takes a tensor"):
        md.typeof(np.ones(2))  # type: ignore[arg-type]
