"""What a user forgets or mistakes: an error on every rank, and nothing is written or changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import (
    AxisTypeError,
    CheckpointError,
    DtypeError,
    KindError,
    MeshError,
    MismatchError,
    ShapeError,
)
from tests.operations.cases import BACKENDS
from tests.pool import Pool


def mesh_of(size: int = 2) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def error_of(program: Callable[..., Any], kind: type[Exception], size: int = 2) -> Any:
    """The error that every simulated rank raises, equal on all."""

    def caught() -> Any:
        with pytest.raises(kind) as found:
            program()
        return found.value

    found = md.simulate(caught, size)
    assert len({(str(error), type(error)) for error in found}) == 1
    return found[0]


def test_the_state_dict_of_a_split_model_has_lost_its_marks(tmp_path: Path) -> None:
    def program() -> None:
        with mesh_of() as mesh:
            md.seed(0)
            model = nn.Sequential(nn.Linear(4, 6))
            md.parallelize(model, mesh["tp"], {"0": "column_whole"})
            md.checkpoint.save({"model": model.state_dict()}, tmp_path / "one")

    error = error_of(program, MismatchError)
    assert error.summary == "checkpoint.save: names, arrays or values differ between ranks"
    assert error.found.startswith("model.0.bias, float32[3]: rank 1 differs from rank 0")
    assert error.fix == (
        "pass the same state on all ranks, for example with "
        "md.distributed.broadcast_object_list; shards of a global array need a spec: "
        "md.checkpoint.State(model=model), or md.annotate(x, spec)"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_values_that_differ(pool: Pool, backend: str, tmp_path: Path) -> None:
    def program(path: str) -> list[str]:
        texts = []
        for state in ({"x": torch.full((500, 400), 1.0 + md.get_rank())}, {"n": md.get_rank()}):
            try:
                md.checkpoint.save(state, path)
            except MismatchError as error:
                texts.append(error.found)
        return texts

    found = pool.run(program, 3, str(tmp_path / "one"), backend=backend)
    assert found[0][0] == (
        "x, float32[500, 400]: ranks 1-2 differ from rank 0, by up to 2 of its largest value"
    )
    assert found[0][1] == "n: rank 0: 0; rank 1: 1; rank 2: 2"
    assert found[0] == found[1] == found[2] and len(found[0]) == 2
    assert list(tmp_path.iterdir()) == []


def test_other_names_and_paths(tmp_path: Path) -> None:
    def names() -> None:
        md.checkpoint.save({f"x{md.get_rank()}": 1}, tmp_path / "one")

    def paths() -> None:
        md.checkpoint.save({"x": 1}, tmp_path / str(md.get_rank()))

    assert error_of(names, MismatchError).found == (
        "x0: rank 0: 1; rank 1: missing\nx1: rank 0: missing; rank 1: 1"
    )
    found = error_of(paths, MismatchError).found
    first, second = (str(tmp_path / name) for name in "01")
    assert found == f"argument path: rank 0: {first!r}; rank 1: {second!r}"
    assert list(tmp_path.iterdir()) == []


def test_an_unreduced_array(tmp_path: Path) -> None:
    def program() -> None:
        mesh = mesh_of()
        x = md.zeros((3,), sharding=md.NamedSharding(mesh, md.P(unreduced={"tp"})))
        md.checkpoint.save({"x": x}, tmp_path / "one")

    error = error_of(program, AxisTypeError)
    assert error.summary == "checkpoint.save: x is unreduced (each rank holds a partial sum)"
    assert error.fix == "reduce it first: x.reshard(P()), or lax.psum"


def test_a_value_that_varies(tmp_path: Path) -> None:
    def program() -> None:
        with mesh_of() as mesh, md.typed(mesh):
            loss = md.lax.pvary(torch.ones(2), "tp") * 2
            md.checkpoint.save({"loss": loss}, tmp_path / "one")

    error = error_of(program, AxisTypeError)
    assert error.summary == ("checkpoint.save: loss is annotated as varying, but has no spec")


def test_specs_without_a_mesh(tmp_path: Path) -> None:
    def program() -> None:
        x = md.shard(torch.ones(4), "d@tp", mesh_of())
        md.checkpoint.save({"x": x}, tmp_path / "one")

    error = error_of(program, MeshError)
    assert error.summary == "checkpoint.save: x is sharded by P('tp',), but there is no mesh"
    assert error.fix == (
        "call checkpoint.save(..., mesh=mesh), or create Checkpointer(root, mesh=mesh), or call it "
        "inside `with mesh:`"
    )


def test_a_checkpointer_without_a_mesh_raises_before_the_training(tmp_path: Path) -> None:
    def program() -> None:
        md.seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
        md.parallelize(model, mesh_of()["tp"], {"0": "column", "1": "row"})
        checkpoints = md.checkpoint.Checkpointer(tmp_path / "root")
        checkpoints.load(md.checkpoint.State(model=model))

    error = error_of(program, MeshError)
    assert error.summary.startswith("Checkpointer.load: model.0.bias is sharded by P('tp',)")
    assert error.fix == "create Checkpointer(root, mesh=mesh), or call it inside `with mesh:`"


def saved(path: Path) -> None:
    state = {"a": {"weight": torch.ones(3, 2), "bias": torch.ones(3)}, "n": 1}
    md.checkpoint.save(state, path)


@pytest.mark.parametrize(
    ("state", "kind", "summary", "field", "text"),
    [
        (
            {"a": {"weight": torch.zeros(2, 2)}},
            ShapeError,
            "checkpoint.load: a.weight has a different shape in the checkpoint",
            "found",
            "shape (3, 2), in the checkpoint",
        ),
        (
            {"a": {"weight": torch.zeros(3, 2).double()}},
            DtypeError,
            "checkpoint.load: a.weight has a different dtype in the checkpoint",
            "expected",
            "float64, as in the state",
        ),
        (
            {"a": {"weigth": torch.zeros(3, 2)}},
            CheckpointError,
            "checkpoint.load: the checkpoint lacks 1 name of the state",
            "found",
            "'a.weight', the name most similar to 'a.weigth'",
        ),
        (
            {"n": torch.zeros(3, 2)},
            CheckpointError,
            "checkpoint.load: n is a leaf in the checkpoint",
            "fix",
            "load it as a leaf, or exclude it with only=",
        ),
        (
            {"a": {"bias": 3}},
            CheckpointError,
            "checkpoint.load: a.bias is an array in the checkpoint",
            "fix",
            "load it as an array, or exclude it with only=",
        ),
        (
            nn.Linear(2, 2),
            KindError,
            "checkpoint.load requires a dict of arrays and JSON values, or a State",
            "fix",
            "pass md.checkpoint.State(model=model)",
        ),
    ],
)
def test_another_state_is_rejected_before_anything_changes(
    state: Any, kind: type[Exception], summary: str, field: str, text: str, tmp_path: Path
) -> None:
    saved(tmp_path / "one")
    kept = torch.zeros(3)
    if isinstance(state, dict) and "bias" not in state.get("a", {}):
        state = {**state, "a": {**state.get("a", {}), "bias": kept}}
    error = error_of(lambda: md.checkpoint.load(state, tmp_path / "one"), kind)
    assert (error.summary, getattr(error, field)) == (summary, text)
    assert kept.tolist() == [0, 0, 0]


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, found in (("none", "nothing"), ("empty", ("a folder without these files"))):
        error = error_of(lambda path=tmp_path / name: md.checkpoint.load({}, path), CheckpointError)
        assert (error.summary, error.found) == ("the path has no checkpoint", found)


@pytest.mark.parametrize("argument", [{"missing": "ignore"}, {"only": "b.*"}])
def test_wrong_arguments(argument: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path / "one")
    state = {"a": {"bias": torch.zeros(3)}}
    with pytest.raises(md.ArgumentError) as caught:
        md.checkpoint.load(state, tmp_path / "one", **argument)
    assert str(next(iter(argument.values()))) in caught.value.summary


def test_names_that_lack_a_prefix(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    md.checkpoint.save(dict(model.named_parameters()), tmp_path / "one")
    for missing in ("error", "keep"):
        state = md.checkpoint.State(model=model, rng=False)
        with pytest.raises(CheckpointError) as caught:
            md.checkpoint.load(state, tmp_path / "one", missing=missing)
        assert caught.value.summary == "checkpoint.load: the checkpoint lacks 2 names of the state"
        assert caught.value.fix == (
            "remove the prefix 'model': load dict(model.state_dict(keep_vars=True))"
        )
    md.checkpoint.load(dict(model.state_dict(keep_vars=True)), tmp_path / "one")


def test_a_root_in_place_of_a_step(tmp_path: Path) -> None:
    md.checkpoint.Checkpointer(tmp_path).save({"x": torch.ones(1)}, 7)
    with pytest.raises(CheckpointError) as caught:
        md.checkpoint.open(tmp_path)
    assert caught.value.fix == (
        f"the path is the root of a Checkpointer: load {str(tmp_path / 'step-7')!r}"
    )


def test_a_name_that_open_does_not_have(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    found = md.checkpoint.open(tmp_path / "one")
    with pytest.raises(CheckpointError) as caught:
        found.read("a.weihgt")
    assert caught.value.fix == "read 'a.weight'"
    with pytest.raises(CheckpointError) as caught:
        found.shape("n")
    assert caught.value.found == "a leaf of this name"


def load_into_tied_arrays(path: Path) -> list[Any]:
    """Load arrays that differ into tied ones; return the errors' fields, and what changed."""
    one, view = torch.zeros(4), torch.zeros(6)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    told = []
    for state in (
        {"a": one, "b": one},
        {"a": view[:4], "b": view[2:]},
        {"model": dict(model.state_dict(keep_vars=True))},
    ):
        with pytest.raises(CheckpointError) as caught:
            md.checkpoint.load(state, path)
        told.append((caught.value.summary, caught.value.found, caught.value.fix))
    changed = bool(one.any() or view.any()) or not torch.equal(model[0].weight.detach(), before)
    md.checkpoint.load({"a": one, "b": one}, path, only="b")
    md.checkpoint.load({"equal": view[:4], "a": view[:4], "first": view[:2]}, path)
    return [*told, changed, one.tolist(), view.tolist()]


@pytest.mark.parametrize("backend", ["simulated", "gloo", "shm"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_values_for_tied_arrays(tmp_path: Path, pool: Pool, backend: str, size: int) -> None:
    a, weight = torch.arange(1.0, 5), torch.ones(4, 4)
    linear = {"weight": weight, "bias": weight[0]}
    model = {"0": linear, "1": {"weight": 2 * weight, "bias": weight[0]}}
    state = {"a": a, "b": a + 1, "equal": a.clone(), "first": a[:2], "model": model}
    md.checkpoint.save(state, tmp_path / "one")
    summary = (
        "checkpoint.load: arrays share memory in the state, but have different values in the "
        "checkpoint"
    )
    fix = "untie them before the load, or exclude {} with only="
    pair, tied = ("a, b", "a"), ("model.0.weight, model.1.weight", "model.0.weight")
    expected = [
        (summary, f"{names}; loading would overwrite {lost}", fix.format(lost))
        for names, lost in (pair, pair, tied)
    ]
    expected += [False, [2.0, 3, 4, 5], [1.0, 2, 3, 4, 0, 0]]
    assert (
        BACKENDS[backend](pool, load_into_tied_arrays, size, tmp_path / "one") == [expected] * size
    )
