"""``md.annotate`` and ``md.typeof``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.annotations.axis_types import find_type
from meshdist.errors import AxisError, AxisTypeError, KindError, MeshdistError, PatternError
from tests.typed_mode.typed_cases import in_mesh, refusal


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
        assert text == (
            "no axis 'ep' in the mesh\n"
            "  where:    annotate(x, varying='ep') on DeviceMesh(dp=2, tp=2)\n"
            "  expected: one of 'dp', 'tp'"
        )
    text = refusal(AxisError, lambda mesh: md.annotate(torch.ones(2), reduced="tpp"))
    assert "annotate(x, reduced='tpp') on" in text
    assert text.endswith("\n  fix:      did you mean 'tp'?")


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (KindError, {"tensor": np.ones(2)}, "annotate takes a tensor"),
        (
            KindError,
            {"tensor": [torch.ones(2)]},
            "annotate each tensor of a nested structure separately",
        ),
        (KindError, {"varying": 3}, "annotate cannot take 3 as varying"),
        (KindError, {"reduced": ("dp", 3)}, "annotate cannot take ('dp', 3) as reduced"),
        (KindError, {"unreduced": "d p"}, "annotate cannot take 'd p' as unreduced"),
        (
            AxisTypeError,
            {"varying": "dp", "reduced": "dp"},
            "annotate cannot give a tensor two types over axis 'dp'",
        ),
    ],
)
def test_refusals(kind: type[MeshdistError], arguments: dict[str, Any], words: str) -> None:
    x = torch.ones(2)
    with pytest.raises(kind) as caught:
        md.annotate(**{"tensor": x, **arguments})
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert find_type(x) is None


def test_subclasses_and_other_objects() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(KindError, match="annotate cannot take an operand of type Odd"):
        md.annotate(torch.ones(2).as_subclass(Odd))
    with pytest.raises(KindError, match="typeof takes a tensor"):
        md.typeof(np.ones(2))  # type: ignore[arg-type]


# -- where a tensor lies --------------------------------------------------------------------------


def test_a_spec_or_a_pattern_says_where_a_tensor_lies() -> None:
    x = torch.zeros(8, 4)
    assert md.annotate(x, "f@tp d {U:dp}") is x
    found = md.typeof(x)
    assert str(found) == "float32[8@tp, 4]{U:dp}"
    assert found.spec == md.P("tp", None, unreduced={"dp"})
    assert (found.varying, found.unreduced, found.reduced) == (("tp",), ("dp",), ())
    assert found.shape == (8, 4)
    md.annotate(x, md.P(None, ("ep", "tp"), reduced={"dp", "cp"}))
    assert str(md.typeof(x)) == "float32[8, 4@(ep,tp)]{R:cp,dp}"
    md.annotate(x, md.NamedSharding(md.Layout.from_shape((2,), ("dp",)), md.P("dp")))
    assert str(md.typeof(x)) == "float32[8@dp, 4]"
    assert md.typeof(x).spec == md.P("dp", None)
    md.annotate(x, "...")
    assert str(md.typeof(x)) == "float32[8, 4]"
    assert md.typeof(x).spec == md.P(None, None)
    assert md.typeof(md.annotate(torch.ones(()), "{U:tp}")).spec == md.P(unreduced={"tp"})


def test_a_dim_is_not_named_as_an_axis() -> None:
    """``"tp"`` would be a whole dim of that name: equal on all ranks, and its gradient summed."""

    def body(mesh: md.DeviceMesh) -> Any:
        texts = []
        x = torch.ones(4)
        for given, mesh_or_none in (("tp", mesh), ("tp", None), ("d {R:tp}", None)):
            try:
                md.annotate(x, given, mesh=mesh_or_none)
            except PatternError as error:
                texts.append(str(error))
            md.annotate(x, varying="tp"), md.annotate(x, "f@tp")
        for call in (
            lambda: md.annotate(torch.ones(4, 4), "dp f@tp"),
            lambda: md.annotate(torch.ones(4, 4), "f (a tp)"),
            lambda: md.shard(torch.ones(4, 4), "tp d", mesh),
            lambda: md.unshard(torch.ones(4, 4), "f@dp tp", mesh),
        ):
            with pytest.raises(
                PatternError, match="this pattern gives an uncut dim the name of an axis"
            ):
                call()
        return texts

    for texts in in_mesh(body):
        assert len(texts) == 2
        for text in texts:
            assert text.startswith(
                "this pattern gives an uncut dim the name of an axis: column 1 of 'tp'\n"
            )
            assert "'tp', an axis of the mesh, as the name of a dim that no axis cuts" in text
            assert 'write "f@tp"' in text and "md.annotate(x, varying='tp')" in text
    md.annotate(torch.ones(4), "tp")  # where there is no mesh it may be a dim's name


def test_kinds_overwrite_a_spec() -> None:
    x = md.annotate(torch.zeros(8, 4), "f@tp d")
    md.annotate(x, varying="tp")
    assert md.typeof(x).spec is None
    assert str(md.typeof(x)) == "float32[8, 4]{V:tp}"


def test_a_spec_in_a_context() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        batch = md.annotate(torch.ones(4, 3), "b@dp d", mesh=mesh)
        weight = md.annotate(torch.ones(3, 2), "d f@tp", mesh=mesh)
        with md.typed(mesh):
            out = batch @ weight
            marked = md.annotate(out, "b@dp f@tp")
            texts = [str(md.typeof(each)) for each in (batch, marked)]
            marked += md.annotate(torch.ones(4, 2), "b@dp f@tp")
            texts.append(str(md.typeof(marked)))
            batch += weight.sum()
        return [*texts, str(md.typeof(batch)), md.typeof(batch).spec]

    assert in_mesh(body)[0] == [
        "float32[4@dp, 3]",
        "float32[4@dp, 2@tp]",
        "float32[4@dp, 2@tp]",
        "float32[4, 3]{V:dp,tp}",  # it varies over more than its spec says
        None,
    ]


def test_results_of_reshard_carry_theirs() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        whole = torch.arange(12.0).reshape(4, 3)
        local = md.shard(whole, "b@dp s", mesh)
        partial_sum = md.reshard(local, "b@dp s -> s b@dp {U:tp}", mesh)
        texts = [str(md.typeof(each)) for each in (local, partial_sum)]
        with md.typed(mesh):
            moved = md.reshard(local, "b@dp s -> b s@(tp,dp)", mesh, s=3)
            texts.append(str(md.typeof(moved)))
            texts.append(str(md.typeof(md.unshard(moved, "b s@(tp,dp)", mesh, s=3))))
        return texts

    assert in_mesh(body)[0] == [
        "float32[2@dp, 3]",
        "float32[3, 2@dp]{U:tp}",
        "float32[4, 1@(tp,dp)]",
        "float32[4, 3]",
    ]


def test_the_mesh_of_a_spec_is_checked() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        texts = []
        other = md.NamedSharding(md.Layout.from_shape((2,), ("dp",)), md.P("dp"))
        for kind, spec in (
            (AxisError, "b@DP d"),
            (AxisError, md.P("DP")),
            (AxisError, md.P("dp", "dp")),
            (md.MeshError, other),
        ):
            with pytest.raises(kind) as caught:
                md.annotate(torch.ones(4, 2), spec, mesh=mesh)
            texts.append(str(caught.value))
        return texts

    pattern, spec, twice, mesh = in_mesh(body)[0]
    assert "column 3 of 'b@DP d'" in pattern
    assert "did you mean 'dp'?" in pattern
    assert "did you mean 'dp'?" in spec
    assert "axis 'dp' is named twice" in twice
    assert mesh.startswith("annotate cannot use a sharding of another mesh than mesh=\n")
    assert "expected: DeviceMesh(dp=2, tp=2)" in mesh
    assert "fix:      omit mesh=, or pass only the spec: sharding.spec" in mesh


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (
            KindError,
            {"spec": "b d", "varying": "dp"},
            "annotate takes either a spec or varying=, reduced= and unreduced=, not both\n"
            "  found:    'b d' with varying='dp', reduced=(), unreduced=()",
        ),
        (KindError, {"spec": ("dp", None)}, "annotate takes a spec or a pattern"),
        (md.PatternError, {"spec": "b@ d"}, "column 3 of 'b@ d'"),
        (md.PatternError, {"spec": "b d -> d b"}, "this pattern has two sides"),
        (md.ShapeError, {"spec": "b d f"}, "the pattern names 3 dims, the array has 2"),
        (
            md.ShapeError,
            {"spec": md.P("a", "b", "c")},
            "fix:      write at most 2 entries; or add a dimension: x[None]",
        ),
        (
            md.ShapeError,
            {"spec": md.P("a"), "tensor": torch.ones(())},
            "fix:      write P() for a scalar",
        ),
        (
            md.DtypeError,
            {"spec": "b d {U:dp}", "tensor": torch.ones(2, 2, dtype=torch.bool)},
            "a bool tensor cannot be unreduced, because bool has no sum",
        ),
    ],
)
def test_refusals_of_specs(
    kind: type[MeshdistError], arguments: dict[str, Any], words: str
) -> None:
    x = torch.ones(2, 2)
    with pytest.raises(kind) as caught:
        md.annotate(**{"tensor": x, **arguments})
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert find_type(x) is None
