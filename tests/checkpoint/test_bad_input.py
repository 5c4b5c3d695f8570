"""States that cannot be saved or loaded: one error on all ranks, no file, and no change."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import meshdist as md
from meshdist.checkpoint import files

from .damaged import deep, read_only

SIZES = [1, 2, 3, 5]
State = Callable[[md.DeviceMesh], Any]


def errors(program: Callable[[md.DeviceMesh], None], size: int) -> tuple[str, str]:
    """Return the class and the text of the error that all ranks raise, without their numbers."""

    def on_rank() -> tuple[str, str]:
        mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        with pytest.raises(md.MeshdistError) as caught:
            program(mesh)
        kind, text = type(caught.value).__name__, str(caught.value)
        if kind == "MismatchError":  # which says on which rank it stands
            text = text.replace(f"\n  where:    rank {md.get_rank()}\n", "\n")
        return kind, text

    (found,) = set(md.simulate(on_rank, size))
    return found


class Raises:
    """A state, or an object in it, that raises."""

    def to_tree(self, *_: object) -> Any:
        raise ValueError("no state today")


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


def sharded(mesh: md.DeviceMesh, spec: md.P) -> md.ShardedArray:
    return md.ShardedArray(torch.ones(2), md.NamedSharding(mesh, spec))


EVERYWHERE: dict[str, tuple[State, str, tuple[str, ...]]] = {
    "complex128": (
        lambda _: {"a": torch.ones(2, dtype=torch.complex128)},
        "DtypeError",
        (
            "safetensors files do not support complex128",
            "bfloat16",
            "fix:      pass torch.view_as_real(x)",
        ),
    ),
    "complex128 of NumPy": (
        lambda _: {"a": np.ones(2, dtype=np.complex128)},
        "DtypeError",
        ("safetensors files do not support complex128",),
    ),
    "a dtype of few": (
        lambda _: {"a": torch.zeros(2).to(torch.float8_e8m0fnu)},
        "DtypeError",
        (
            "safetensors files do not support float8_e8m0fnu",
            "fix:      convert it first, for example x.to(torch.float32)",
        ),
    ),
    "meta": (
        lambda _: {"a": torch.ones(2, device="meta")},
        "KindError",
        (
            "a has no values because it is on the meta device",
            "call model.to_empty(device=...) first",
        ),
    ),
    "sparse": (
        lambda _: {"a": torch.eye(2).to_sparse()},
        "ArgumentError",
        ("cannot take a sparse tensor as a", "pass a.to_dense()"),
    ),
    "the other byte order": (
        lambda _: {"a": np.ones(2, dtype=">f4")},
        "DtypeError",
        ("it has the wrong byte order (>f4)",),
    ),
    "objects": (
        lambda _: {"a": np.array([object()])},
        "DtypeError",
        ("torch has no dtype object",),
    ),
    "a list of tensors": (
        lambda _: {"b": {"a": [torch.ones(2)]}},
        "KindError",
        ("does not support a leaf of the state", "b.a", "'[tensor([1., 1.])]', a list", "in dicts"),
    ),
    "bytes": (lambda _: {"a": b"12"}, "KindError", ("does not support a leaf", "a bytes")),
    "a set": (lambda _: {"a": {1}}, "KindError", ("does not support a leaf", "'{1}', a set")),
    "numbers as keys in a list": (
        lambda _: {"a": [{1: 2}]},
        "KindError",
        ("does not support a leaf", "'[{1: 2}]', a list"),
    ),
    "a module": (
        lambda _: {"a": torch.nn.Linear(2, 2)},
        "KindError",
        ("requires a dict of arrays and JSON values, or a State", "State(model=model)", "a Linear"),
    ),
    "a module alone": (
        lambda _: torch.nn.Linear(2, 2),
        "KindError",
        ("requires a dict of arrays and JSON values, or a State", "State(model=model)"),
    ),
    "an optimizer": (
        lambda _: {"a": torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)},
        "KindError",
        ("requires a dict of arrays", "State(name=object), or the object's state_dict()"),
    ),
    "a tensor alone": (
        lambda _: torch.ones(2),
        "KindError",
        ("a Tensor", 'fix:      pass {"x": x}'),
    ),
    "a key of another kind": (
        lambda _: {"b": {0.5: 1}},
        "KindError",
        ("does not support a key of the state", "b.0.5", "a str or an int", "a float"),
    ),
    "a truth as a key": (lambda _: {True: 1}, "KindError", ("does not support a key", "a bool")),
    "a key that is no text": (
        lambda _: {"\ud800": torch.ones(2)},
        "KindError",
        ("does not support a key of the state", "'\\ud800'"),
    ),
    "a name that files keep": (
        lambda _: {"__metadata__": torch.ones(2)},
        "KindError",
        (
            "does not support the name of an array",
            "a name that safetensors does not reserve",
            "__metadata__",
        ),
    ),
    "keys with dots that collide": (
        lambda _: {"a.b": 1, "a": {"b": torch.ones(2)}},
        "CheckpointError",
        ("two leaves of the state have the name 'a.b'", "rename one of the keys"),
    ),
    "a number and a text that collide": (
        lambda _: {0: 1, "0": 2},
        "CheckpointError",
        ("two leaves of the state have the name '0'",),
    ),
    "a dict in itself": (
        lambda _: cyclic(),
        "KindError",
        ("dicts of the state are nested too deeply, or contain each other", "again.again.again"),
    ),
    "dicts without end": (lambda _: deep(5000), "KindError", ("nested too deep", "at most 100")),
    "an unreduced array": (
        lambda mesh: {"a": sharded(mesh, md.P(None, unreduced={"dp"}))},
        "AxisTypeError",
        ("a is unreduced (each rank holds a partial sum)", "x.reshard(P()), or lax.psum"),
    ),
    "a state that raises": (
        lambda _: Raises(),
        "CheckpointError",
        ("ValueError: no state today",),
    ),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_states_that_cannot_be_saved(name: str, tmp_path: Path) -> None:
    state, kind, texts = EVERYWHERE[name]
    for size in SIZES:
        for save in (md.checkpoint.save, md.checkpoint.save_async):

            def program(mesh: md.DeviceMesh, save: Any = save) -> None:
                save(state(mesh), tmp_path / "a")

            found, text = errors(program, size)
            assert found == kind
            assert all(each in text for each in texts), text
            assert text.startswith(f"checkpoint.{save.__name__}")
            assert os.listdir(tmp_path) == []


def rows(mesh: md.DeviceMesh) -> dict[str, Any]:
    x = md.zeros((6, 2), sharding=md.NamedSharding(mesh, md.P("dp")))
    return {"x": x, "y": torch.ones(3), "w": torch.ones(3), "step": 1, "large": 300}


LAST: dict[str, tuple[State, str, tuple[str, ...]]] = {
    "raises": (lambda _: Raises(), "CheckpointError", ("ValueError: no state today",)),
    "nothing": (lambda _: {}, "MismatchError", ("step: ", "y: ", "missing")),
    "another name": (
        lambda mesh: {**rows(mesh), "z": torch.ones(1)},
        "MismatchError",
        ("names, arrays or values differ", "z: ", "missing", ": float32[1]"),
    ),
    "another leaf": (
        lambda mesh: {**rows(mesh), "step": 2},
        "MismatchError",
        ("step: ", ": 1", ": 2"),
    ),
    "other values": (
        lambda mesh: {**rows(mesh), "y": torch.zeros(3)},
        "MismatchError",
        ("y, float32[3]: ", "by up to ", "of its largest value"),
    ),
    "another shape": (
        lambda mesh: {**rows(mesh), "y": torch.ones(4)},
        "MismatchError",
        ("y: ", ": float32[3]", ": float32[4]"),
    ),
    "another dtype": (
        lambda mesh: {**rows(mesh), "y": torch.ones(3, dtype=torch.float64)},
        "MismatchError",
        ("y: ", ": float32[3]", ": float64[3]"),
    ),
    "no spec": (
        lambda mesh: {**rows(mesh), "x": torch.zeros(6, 2)},
        "MismatchError",
        ("x: ", ": float32[6@dp, 2]", ": float32[6, 2]"),
    ),
    "what cannot be saved": (
        lambda mesh: {**rows(mesh), "y": torch.ones(3, device="meta")},
        "KindError",
        ("y has no values because it is on the meta device",),
    ),
}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", LAST)
def test_a_rank_that_saves_otherwise(name: str, size: int, tmp_path: Path) -> None:
    state, kind, texts = LAST[name]
    for who in {0, size - 1}:

        def program(mesh: md.DeviceMesh, who: int = who) -> None:
            mine = state(mesh) if md.get_rank() == who else rows(mesh)
            md.checkpoint.save(mine, tmp_path / "a")

        found, text = errors(program, size)
        assert found == kind
        assert all(each in text for each in texts), text
        assert f"rank {who}" in text
        if kind == "MismatchError":
            first = 1 if who == 0 else 0
            others = f"rank {first}" if size == 2 else f"ranks {first}-{first + size - 2}"
            assert others in text
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        (None, "KindError", "requires the path of a folder"),
        ("other", "MismatchError", "/other'"),
    ],
)
def test_a_rank_with_another_path(
    path: Any, kind: str, text: str, size: int, tmp_path: Path
) -> None:
    whole = tmp_path / "a"

    def program(mesh: md.DeviceMesh) -> None:
        mine = path if path is None else tmp_path / path
        md.checkpoint.save(rows(mesh), mine if md.get_rank() else whole)

    found, error = errors(program, size)
    assert found == kind
    assert text in error
    assert os.listdir(tmp_path) == []
    md.simulate(lambda: md.checkpoint.save({"y": torch.ones(3)}, whole), 2)

    def load(mesh: md.DeviceMesh) -> None:
        mine = path if path is None else tmp_path / path
        md.checkpoint.load({"y": torch.ones(3)}, mine if md.get_rank() else whole)

    found, error = errors(load, size)
    assert found == kind
    assert text in error


LOADS: dict[str, tuple[State, dict[str, Any], str, tuple[str, ...]]] = {
    "another shape": (
        lambda _: {"y": torch.zeros(4)},
        {},
        "ShapeError",
        (
            "y has a different shape in the checkpoint",
            "shape (4,), as in the state",
            "shape (3,), in the",
        ),
    ),
    "another shape of the whole": (
        lambda mesh: {"x": md.zeros((7, 2), sharding=md.NamedSharding(mesh, md.P("dp")))},
        {},
        "ShapeError",
        ("shape (7, 2), as in the state", "shape (6, 2), in the checkpoint"),
    ),
    "another dtype": (
        lambda _: {"y": torch.zeros(3, dtype=torch.bfloat16)},
        {},
        "DtypeError",
        ("bfloat16, as in the state", "float32, in the checkpoint", "load it as float32"),
    ),
    "a number that is too large": (
        lambda _: {"large": np.int8(1)},
        {},
        "CheckpointError",
        (
            "the value of large does not fit the state's type",
            "an int8, as in the state",
            "found:    300, in the",
        ),
    ),
    "an unknown name": (
        lambda _: {"yy": torch.zeros(3)},
        {},
        "CheckpointError",
        ("lacks 1 name of the state", "'y', the name most similar to 'yy'", 'missing="keep"'),
    ),
    "a leaf as an array": (
        lambda _: {"step": torch.zeros(3)},
        {},
        "CheckpointError",
        ("step is a leaf in the checkpoint", "load it as a leaf, or exclude it with only="),
    ),
    "an array as a leaf": (
        lambda _: {"y": 1},
        {},
        "CheckpointError",
        ("y is an array in the checkpoint", "load it as an array, or exclude it with only="),
    ),
    "an array that shares memory with itself": (
        lambda _: {"y": torch.zeros(1).expand(3)},
        {},
        "ArgumentError",
        ("cannot load into y: several elements share memory", "stride (0,)", "x.clone()"),
    ),
    "an array that is read-only": (
        lambda _: {"y": read_only(np.zeros(3, dtype=np.float32))},
        {},
        "ArgumentError",
        ("cannot write into y: the array is read-only",),
    ),
    "an array without memory": (
        lambda _: {"y": torch.zeros(3, device="meta")},
        {},
        "KindError",
        ("y has no values because it is on the meta device",),
    ),
    "a partial sum": (
        lambda mesh: {"y": sharded(mesh, md.P(None, unreduced={"dp"}))},
        {},
        "AxisTypeError",
        ("y is unreduced",),
    ),
    "a pattern that fits nothing": (
        lambda _: {"y": torch.zeros(3)},
        {"only": "z.*"},
        "ArgumentError",
        ("only='z.*' matches no name of the state", "fix:      pass 'y'"),
    ),
    "a pattern that is a number": (
        lambda _: {"y": torch.zeros(3)},
        {"only": 3},
        "KindError",
        ("only= must be a name pattern", "3, an int"),
    ),
    "another word": (
        lambda _: {"y": torch.zeros(3)},
        {"missing": "none"},
        "ArgumentError",
        ("missing='none'", '"error" or "keep"'),
    ),
    "a mesh that is a name": (
        lambda _: {"y": torch.zeros(3)},
        {"mesh": "dp"},
        "KindError",
        ("mesh= must be a DeviceMesh", "'dp', a str"),
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_states_that_cannot_be_loaded(name: str, tmp_path: Path) -> None:
    state, more, kind, texts = LOADS[name]
    path = tmp_path / "a"

    def save() -> None:
        md.checkpoint.save(rows(md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))), path)

    md.simulate(save, 2)
    for size in SIZES:

        def program(mesh: md.DeviceMesh) -> None:
            whole = {"step": 7, "w": torch.full((3,), 7.0), **state(mesh)}
            before = dict(whole)
            try:
                md.checkpoint.load(whole, path, **more)
            finally:
                assert whole.keys() == before.keys()
                assert all(whole[name] is value for name, value in before.items())
                assert before["w"].tolist() == [7.0] * 3

        found, text = errors(program, size)
        assert found == kind
        assert all(each in text for each in texts), text


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_loads_otherwise(size: int, tmp_path: Path) -> None:
    md.checkpoint.save({"y": torch.ones(3), "z": torch.ones(2), "step": 1}, tmp_path / "a")
    others: list[tuple[Any, str, str]] = [
        ({"y": torch.zeros(3)}, "MismatchError", ": float32[2]"),
        ({"y": torch.zeros(4), "z": torch.zeros(2)}, "MismatchError", ": float32[4]"),
        (Raises(), "CheckpointError", "ValueError: no state today"),
    ]
    for other, kind, part in others:
        for who in {0, size - 1}:

            def program(_: md.DeviceMesh, who: int = who, other: Any = other) -> None:
                state = {"y": torch.zeros(3), "z": torch.zeros(2)}
                try:
                    md.checkpoint.load(other if md.get_rank() == who else state, tmp_path / "a")
                finally:
                    assert not any(map(torch.any, state.values()))

            found, text = errors(program, size)
            assert found == kind
            assert part in text


def test_a_folder_that_each_host_has_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank has a disk of its own, with another checkpoint under the same path, or none."""
    for host in ("here", "there"):
        md.checkpoint.save({"y": torch.full((3,), float(len(host)))}, tmp_path / host)

    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "manifest.json").touch()

    def seen(path: str) -> str:
        return path if md.get_rank() < 2 else path.replace("/here", f"/{on_last}")

    def open_seen(path: str, mode: str) -> Any:
        return builtins.open(seen(path), mode)

    def safe_open_seen(path: str, framework: str) -> Any:
        return safe_open(seen(path), framework)

    monkeypatch.setattr(files, "open", open_seen, raising=False)
    monkeypatch.setattr(files, "safe_open", safe_open_seen)
    for on_last, text in (
        ("there", "this rank sees a different checkpoint at this path than the first rank"),
        ("empty", "this rank sees a different checkpoint at this path than the first rank"),
        ("nowhere", "a disk or file system error"),
    ):
        kind, found = errors(
            lambda _: md.checkpoint.load({"y": torch.zeros(3)}, tmp_path / "here"), 3
        )
        assert kind == "CheckpointError"
        assert text in found
        assert "where:    rank 2, " in found
        if on_last == "there":
            assert "expected: one folder shared by all ranks, or copies of it" in found
            assert "copy the checkpoint to each host" in found
    on_last = "here"
    md.simulate(lambda: md.checkpoint.load({"y": torch.zeros(3)}, tmp_path / "here"), 3)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_keep_other_steps(size: int, tmp_path: Path) -> None:
    checkpoints = md.checkpoint.Checkpointer

    def program(_: md.DeviceMesh) -> None:
        checkpoints(tmp_path).save({"y": torch.ones(3)}, 4 + (md.get_rank() == size - 1))

    kind, text = errors(program, size)
    assert kind == "MismatchError"
    assert "/step-4'" in text
    assert "/step-5'" in text
    assert os.listdir(tmp_path) == [".lock"]
