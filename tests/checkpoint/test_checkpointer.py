"""The last few steps of a run."""

from __future__ import annotations

import errno
import fcntl
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checkpoint import files
from meshdist.errors import CheckpointError
from tests.pool import Pool


def program(root: str, steps: list[int], keep: int | None, wait: bool) -> tuple[Any, Any]:
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = md.zeros((4,), sharding=md.NamedSharding(mesh, md.P("dp")))
    checkpoints = md.checkpoint.Checkpointer(root, keep=keep)
    state = {"x": x, "step": 0}
    before = checkpoints.load(state)
    assert before in (None, state["step"])
    for step in steps:
        x.local.fill_(step)
        state["step"] = step
        checkpoints.save(state, step, wait=wait)
    if not wait:
        state["step"] = 1000
        checkpoints.save(state, 1000)
    x.local.zero_()
    after = checkpoints.load(state)
    assert after == state["step"] == checkpoints.latest()
    return before, (after, x.local.tolist())


@pytest.mark.parametrize("backend", ["shm", "gloo", "simulated"])
def test_the_newest_stay(pool: Pool, backend: str, tmp_path: Path) -> None:
    root = str(tmp_path / "runs" / "first")
    if backend == "simulated":
        found = md.simulate(program, 2, args=(root, [1, 2, 10, 9], 3, True))
    else:
        found = pool.run(program, 2, root, [1, 2, 10, 9], 3, True, backend=backend)
    assert found == [(None, (10, [10.0, 10.0]))] * 2
    names = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert names == {".lock", "step-2", "step-9", "step-10"}
    again = md.simulate(program, 2, args=(root, [11], 1, True))
    assert again == [(10, (11, [11.0, 11.0]))] * 2
    assert md.checkpoint.Checkpointer(root).steps() == [11]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_without_waiting(pool: Pool, backend: str, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    found = pool.run(program, 2, root, [1, 2, 3, 4], 2, False, backend=backend)
    assert found == [(None, (1000, [4.0, 4.0]))] * 2
    assert md.checkpoint.Checkpointer(root).steps() == [4, 1000]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_without_waiting_one_more_step_than_keep_stays(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    def program(root: str, keep: int) -> list[list[int]]:
        found, state = [], {"x": torch.ones(1000)}
        checkpoints = md.checkpoint.Checkpointer(root, keep=keep)
        for step in range(5):
            pending = checkpoints.save(state, step, wait=False)
            found.append([each for each in checkpoints.steps() if each != step])
            md.distributed.barrier()
        assert pending is not None
        pending.wait()
        return [*found, checkpoints.steps()]

    for keep in (1, 2):
        found = pool.run(program, 2, str(tmp_path / f"{keep}"), keep, backend=backend)
        before = [[*range(max(step - keep, 0), step)] for step in range(5)]
        for *during, after in found:
            # A step that is already complete counts among the newest.
            assert all(mine in (all_, all_[1:]) for mine, all_ in zip(during, before, strict=True))
            assert after in ([*range(4 - keep, 5)], [*range(5 - keep, 5)])


def test_all_stay(tmp_path: Path) -> None:
    checkpoints = md.checkpoint.Checkpointer(tmp_path, keep=None)
    for step in range(5):
        checkpoints.save({"x": torch.ones(1)}, step)
    assert checkpoints.steps() == [0, 1, 2, 3, 4]


def test_foreign_names_and_folders_without_a_manifest_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-7", "step-x", "step-08", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-9").write_text("a file")
    checkpoints = md.checkpoint.Checkpointer(tmp_path, keep=1)
    assert checkpoints.latest() is None and checkpoints.load({"x": torch.ones(1)}) is None
    checkpoints.save({"x": torch.ones(1)}, 1)
    checkpoints.save({"x": torch.ones(1)}, 2)
    assert checkpoints.steps() == [2]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "step-2", "step-7", "step-9", "step-x", "step-08", "other"}


def test_a_step_that_is_there_is_rejected(tmp_path: Path) -> None:
    md.checkpoint.save({"x": torch.ones(1)}, tmp_path / "step-1")
    with pytest.raises(CheckpointError) as caught:
        md.checkpoint.Checkpointer(tmp_path).save({"x": torch.zeros(1)}, 1)
    assert caught.value.summary == "cannot save a checkpoint because the path exists"
    assert md.checkpoint.open(tmp_path / "step-1").read("x").tolist() == [1]


def test_the_step_that_was_saved_or_loaded_last_is_there(tmp_path: Path) -> None:
    checkpoints = md.checkpoint.Checkpointer(tmp_path)
    checkpoints.save({"x": torch.ones(1)}, 5)
    checkpoints.save({"x": torch.zeros(1)}, 5)
    assert md.checkpoint.open(tmp_path / "step-5").read("x").tolist() == [1]
    del checkpoints
    gc.collect()
    again = md.checkpoint.Checkpointer(tmp_path)
    assert again.load({"x": torch.zeros(1)}) == 5
    again.save({"x": torch.zeros(1)}, 5)
    pending = again.save({"x": torch.zeros(1)}, 6, wait=False)
    repeated = again.save({"x": torch.zeros(1)}, 6, wait=False)
    assert pending is not None and repeated is not None
    repeated.wait()
    assert pending.done and repeated.done
    again.save({"x": torch.zeros(1)}, 6)
    assert again.steps() == [5, 6]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_step_whose_failure_was_raised_is_saved_again(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    def program(root: str) -> list[Any]:
        def fail(*_args: Any, **_kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        state, checkpoints = {"x": torch.ones(3)}, md.checkpoint.Checkpointer(root)

        def failing(step: int) -> Any:
            original = files.save_file
            if md.get_rank() == 0:  # which writes what is equal on all ranks
                files.save_file = fail
            try:
                pending = checkpoints.save(state, step, wait=False)
                while not pending.done:
                    time.sleep(0.01)
                return pending
            finally:
                files.save_file = original

        def raises(call: Any) -> None:
            with pytest.raises(CheckpointError, match="No space left"):
                call()

        found = []
        raises(failing(1).wait)
        checkpoints.save(state, 1)
        failing(2)
        raises(lambda: checkpoints.save(state, 2))
        checkpoints.save(state, 2)
        failing(3)
        raises(lambda: checkpoints.save(state, 4))
        raises(lambda: checkpoints.save(state, 3))
        checkpoints.save(state, 3, wait=False)
        checkpoints.save(state, 3)  # which waits, as a program does that is to end
        found.append(checkpoints.latest())
        failing(5)
        raises(lambda: checkpoints.load(state))
        found.append(checkpoints.load(state))
        return [*found, checkpoints.steps()]

    assert pool.run(program, 3, str(tmp_path), backend=backend) == [[3, 3, [1, 2, 3]]] * 3


def test_an_older_step_is_loaded_and_what_is_saved_then_stays(tmp_path: Path) -> None:
    checkpoints = md.checkpoint.Checkpointer(tmp_path, keep=2)
    for step in (10, 20):
        checkpoints.save({"x": torch.full((1,), float(step))}, step)
    state = {"x": torch.zeros(1)}
    assert checkpoints.load(state, 10) == 10 and state["x"] == 10
    checkpoints.save(state, 5)
    assert checkpoints.steps() == [5, 10, 20]
    with pytest.raises(CheckpointError, match="the path has no checkpoint"):
        checkpoints.load(state, 7)


def test_two_that_save_under_a_root(tmp_path: Path) -> None:
    first, second = (md.checkpoint.Checkpointer(tmp_path) for _ in range(2))
    first.save({"x": torch.ones(1)}, 1)
    target = {"x": torch.zeros(1)}
    assert second.load(target) == 1 and target["x"] == 1
    with pytest.raises(CheckpointError) as caught:
        second.save({"x": torch.ones(1)}, 2)
    assert caught.value.summary == (
        "Checkpointer.save failed because another run or Checkpointer saves under this root"
    )
    assert caught.value.fix == (
        "stop the other run, delete the other object, or use a separate root for each"
    )
    del first
    gc.collect()
    second.save({"x": torch.ones(1)}, 2)
    assert second.steps() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "text"), [((0,), "keep"), ((True,), "keep"), (("x",), "keep")]
)
def test_wrong_numbers(arguments: tuple[Any, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(md.ArgumentError, match=text):
        md.checkpoint.Checkpointer(tmp_path, *arguments)
    with pytest.raises(md.ArgumentError, match="step"):
        md.checkpoint.Checkpointer(tmp_path).save({}, -1)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    for steps in ([1, 2], [3]):
        checkpoints = md.checkpoint.Checkpointer(tmp_path, keep=2)
        for step in steps:
            checkpoints.save({"x": torch.ones(2)}, step)
    assert checkpoints.steps() == [2, 3]


def test_a_part_of_the_world_saves_under_its_mesh(tmp_path: Path) -> None:
    def on_part() -> int | None:
        part = md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        if md.get_rank() == 2:
            return None
        with part:
            checkpoints = md.checkpoint.Checkpointer(tmp_path)
            checkpoints.save({"x": torch.ones(2)}, 4)
            return checkpoints.load({"x": torch.zeros(2)})

    assert md.simulate(on_part, 3) == [4, 4, None]


def test_the_ranks_of_the_arrays_take_part_alone(tmp_path: Path) -> None:
    def program() -> tuple[int | None, Any] | None:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        pair = md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        if mesh.get_rank() == 2:
            return None  # it calls nothing
        x = md.full((4,), 3.0, sharding=md.NamedSharding(pair, md.P("tp")))
        checkpoints = md.checkpoint.Checkpointer(tmp_path)
        checkpoints.save({"x": x}, 1)
        state = md.checkpoint.State(x=x)
        checkpoints.save(state, 2)
        x.local.zero_()
        return checkpoints.load(state), x.local.tolist()

    assert md.simulate(program, 3) == [(2, [3.0, 3.0])] * 2 + [None]
