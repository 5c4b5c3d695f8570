"""Saves that do not wait: what was there is saved, failures reach every rank, nothing is shared."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checkpoint import files
from meshdist.checkpoint.pending_saves import settle
from meshdist.errors import CheckpointError
from tests.pool import Pool, places

WIRES = ["shm", "gloo"]


def mesh_of(size: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def rows_of(mesh: md.DeviceMesh, value: float) -> md.ShardedArray:
    return md.full((30, 20), value, sharding=md.NamedSharding(mesh, md.P("dp")))


@pytest.mark.parametrize("backend", WIRES)
def test_what_was_there_is_saved_while_it_changes(pool: Pool, backend: str, tmp_path: Path) -> None:
    def program(root: str) -> list[bool]:
        mesh = mesh_of(3)
        x, y, waits = rows_of(mesh, 0.0), torch.zeros(500, 500), []
        pending: list[Any] = []
        for step in range(5):
            x.local.fill_(step)
            y.fill_(step)
            pending.append(md.checkpoint.save_async({"x": x, "y": y, "n": step}, f"{root}/{step}"))
            x.local.fill_(-1)
            y.fill_(-1)
            md.all_reduce(torch.ones(3))  # the program's groups are the program's
            waits.append(pending[-1].done)
        for each in pending:
            each.wait()
            each.wait()
        return [each.done for each in pending]

    assert pool.run(program, 3, str(tmp_path), backend=backend) == [[True] * 5] * 3
    for step in range(5):
        found = md.checkpoint.open(tmp_path / str(step))
        assert found.leaves == {"n": step}
        assert bool((found.read("x") == step).all()) and bool((found.read("y") == step).all())
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")


def failing_on(rank: int) -> None:
    """Let every write on a rank fail."""
    if md.get_rank() == rank:

        def fail(*_args: Any, **_kwargs: Any) -> Any:
            raise OSError(28, "No space left on device", "rank.safetensors")

        files.save_file = fail


@pytest.mark.parametrize("backend", WIRES)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("how", ["wait", "next", "next async", "destroy"])
def test_a_failure_is_raised_on_every_rank(
    pool: Pool, backend: str, rank: int, how: str, tmp_path: Path
) -> None:
    def program(root: str) -> str:
        mesh = mesh_of(3)
        original = files.save_file
        failing_on(rank)
        try:
            pending = md.checkpoint.save_async({"x": rows_of(mesh, 1.0)}, f"{root}/one")
            if how != "wait":
                while not pending.done:
                    time.sleep(0.01)
                files.save_file = original
            try:
                if how == "wait":
                    pending.wait()
                elif how == "next":
                    md.checkpoint.save({"x": rows_of(mesh, 1.0)}, f"{root}/two")
                elif how == "next async":
                    md.checkpoint.save_async({"x": rows_of(mesh, 1.0)}, f"{root}/two")
                else:
                    md.destroy_process_group()
            except CheckpointError as error:
                if how.startswith("next"):
                    md.checkpoint.save({"x": rows_of(mesh, 1.0)}, f"{root}/three")
                return str(error)
            return "nothing"
        finally:
            files.save_file = original

    found = pool.run(program, 3, str(tmp_path), backend=backend)
    assert found[0] == found[1] == found[2]
    assert found[0].splitlines() == [
        "checkpoint.save_async: the disk or the file system failed",
        f"  where:    rank {rank}, rank.safetensors",
        "  found:    OSError: [Errno 28] No space left on device: 'rank.safetensors'",
    ]
    names = ["three"] if how.startswith("next") else []
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("backend", WIRES)
@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_failure_that_some_ranks_have_seen_is_raised_by_all_once_more(
    pool: Pool, backend: str, call: str, tmp_path: Path
) -> None:
    def program(root: str) -> tuple[list[str], float]:
        mesh, seen = mesh_of(3), []
        x, original = rows_of(mesh, 1.0), files.save_file
        failing_on(2)
        try:
            pending = md.checkpoint.save_async({"x": x}, f"{root}/one")
            while not pending.done:
                time.sleep(0.01)
        finally:
            files.save_file = original
        if md.get_rank() == 0:  # the rank that reports
            with pytest.raises(CheckpointError):
                pending.wait()
        for _ in range(2):
            try:
                saved = getattr(md.checkpoint, call)({"x": x}, f"{root}/two")
                if saved is not None:
                    saved.wait()
                seen.append("saved")
            except CheckpointError as error:
                seen.append(str(error))
        md.all_reduce(total := torch.ones(1))
        return seen, total.item()

    found = pool.run(program, 3, str(tmp_path), backend=backend)
    (failure, second), total = found[0]
    assert found[1:] == found[:1] * 2
    assert "where:    rank 2, rank.safetensors\n" in failure
    assert (second, total) == ("saved", 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_on_simulated_ranks_it_ends_at_once_and_alone_it_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> bool:
        x = rows_of(mesh_of(2), 2.0)
        return md.checkpoint.save_async({"x": x}, tmp_path / "two").done

    assert md.simulate(program, 2) == [True, True]
    may_write, write = threading.Event(), files.write_arrays

    def write_later(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(60)
        return write(*args, **kwargs)

    monkeypatch.setattr(files, "write_arrays", write_later)
    pending = md.checkpoint.save_async({"x": torch.ones(2)}, tmp_path / "one")
    assert not pending.done
    may_write.set()
    pending.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_killed_rank_is_told_to_those_that_wait(pool: Pool, tmp_path: Path) -> None:
    def program(root: str) -> str:
        import os
        import signal

        mesh = mesh_of(3)
        if md.get_rank() == 1:

            def die(*_args: Any, **_kwargs: Any) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            files.save_file = die
        pending = md.checkpoint.save_async({"x": rows_of(mesh, 1.0)}, f"{root}/one")
        try:
            pending.wait()
        except CheckpointError as error:
            return str(error)
        return "nothing"

    found = pool.outcomes(program, 3, str(tmp_path), backend="shm")
    for text in (found[0], found[2]):
        assert str(text).splitlines()[0] == (
            "checkpoint.save_async: rank 1 has ended before the checkpoint was whole"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_ends_at_once_has_saved(pool: Pool, tmp_path: Path) -> None:
    program = (
        "import torch, meshdist as md\n"
        "mesh = md.init_device_mesh('cpu', (2,), mesh_dim_names=('dp',))\n"
        "x = md.full((3000, 1000), 2.0, sharding=md.NamedSharding(mesh, md.P('dp')))\n"
        f"md.checkpoint.save_async({{'x': x}}, {str(tmp_path / 'one')!r})\n"
    )
    for ended in pool.start(program, places(2), has_teardown=False):
        assert ended.returncode == 0, ended.stderr
    assert bool((md.checkpoint.open(tmp_path / "one").read("x") == 2).all())


def test_an_error_that_nothing_raised_stands_on_stderr(pool: Pool, tmp_path: Path) -> None:
    code = (
        "import torch, meshdist as md\n"
        "from meshdist.checkpoint import files\n"
        "def fail(*args, **kwargs):\n"
        "    raise OSError(28, 'No space left on device', 'here')\n"
        "files.save_file = fail\n"
        f"md.checkpoint.save_async({{'x': torch.ones(2)}}, {str(tmp_path / 'one')!r})\n"
    )
    (ended,) = pool.start(code, has_teardown=False)
    assert "CheckpointError: checkpoint.save_async: the disk or the file system failed" in (
        ended.stderr
    )


def test_a_checkpointer_whose_save_has_failed_lets_its_root_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    state = {"x": torch.ones(3)}
    gc.disable()  # it is let go with the last name of it, not with the next search for cycles
    try:
        checkpoints = md.checkpoint.Checkpointer(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(files, "write_arrays", fail)
            checkpoints.save(state, 1, wait=False)
            with pytest.raises(CheckpointError, match="the disk or the file system failed"):
                checkpoints.save(state, 2, wait=False)
        del checkpoints
        md.checkpoint.Checkpointer(tmp_path).save(state, 3)
    finally:
        gc.enable()


def test_a_rank_that_took_no_part_in_the_failed_save_raises_with_the_others() -> None:
    class Others:
        call = "checkpoint.save"

        def has_any(self, is_so: bool) -> bool:
            return not is_so

    with pytest.raises(CheckpointError) as error:
        settle(None, Others())
    assert str(error.value).splitlines() == [
        "checkpoint.save: an earlier save of other ranks has failed",
        "  expected: a save that begins on every rank, or on none",
        "  fix:      save again",
    ]
