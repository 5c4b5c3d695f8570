"""Saves that do not wait: what was there is saved, failures reach every rank, no rank waits."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checkpoint import files
from meshdist.errors import CheckpointError, MismatchError
from tests.load import is_within
from tests.pool import Failure, Pool, places

BACKENDS = ["shm", "gloo"]


def mesh_of(size: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def rows_of(mesh: md.DeviceMesh, value: float) -> md.ShardedArray:
    return md.full((30, 20), value, sharding=md.NamedSharding(mesh, md.P("dp")))


@contextmanager
def writing(rank: int, write: Callable[..., Any]) -> Iterator[None]:
    """Let ``write`` write the files of a rank in the block."""
    original = files.save_file
    if md.get_rank() == rank:
        files.save_file = write
    try:
        yield
    finally:
        files.save_file = original


def fail(*_args: Any, **_kwargs: Any) -> Any:
    raise OSError(28, "No space left on device", "rank.safetensors")


def await_path(path: str) -> None:
    """Wait until something is at ``path``, a minute at most."""
    for _ in range(6000):
        if os.path.lexists(path):
            return
        time.sleep(0.01)
    raise TimeoutError(path)


def await_own_part(pending: Any) -> None:
    while not pending.done:
        time.sleep(0.01)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("backend", "size"), [("simulated", 3), ("shm", 1), ("shm", 5), ("gloo", 2), ("gloo", 3)]
)
def test_what_was_there_is_saved_while_it_changes(
    pool: Pool, backend: str, size: int, tmp_path: Path
) -> None:
    def program(root: str) -> list[bool]:
        mesh = mesh_of(md.get_world_size())
        x, y = rows_of(mesh, 0.0), torch.zeros(500, 500)
        told: list[int] = []
        pending: list[Any] = []
        for step in range(5):
            x.local.fill_(step)
            y.fill_(step)
            told.append(step)
            state = {"x": x, "y": y[: 100 * step], "told": told}
            pending.append(md.checkpoint.save_async(state, f"{root}/{step}"))
            x.local.fill_(-1)
            y.fill_(-1)
            told.append(-1)
            md.all_reduce(torch.ones(3))  # the program's groups are the program's
            told.pop()
        for each in pending:
            each.wait()
            each.wait()
        return [each.done for each in pending]

    root = str(tmp_path)
    if backend == "simulated":
        found = md.simulate(program, size, args=(root,))
    else:
        found = pool.run(program, size, root, backend=backend)
    assert found == [[True] * 5] * size
    for step in range(5):
        opened = md.checkpoint.open(tmp_path / str(step))
        assert opened.leaves == {"told": [*range(step + 1)]}
        assert opened.shape("y") == (100 * step, 500)
        assert bool((opened.read("x") == step).all()) and bool((opened.read("y") == step).all())
        assert len(os.listdir(tmp_path / str(step))) == size + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == list("01234")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_is_raised_on_every_rank_once(
    pool: Pool, backend: str, rank: int, tmp_path: Path
) -> None:
    def program(root: str) -> list[str]:
        x = rows_of(mesh_of(3), 1.0)

        def failing(name: str) -> Any:
            with writing(rank, fail):
                pending = md.checkpoint.save_async({"x": x}, f"{root}/{name}")
                await_own_part(pending)
                return pending

        def save(name: str) -> str:
            return error_of(lambda: md.checkpoint.save({"x": x}, f"{root}/{name}"))

        def save_async(name: str) -> str:
            return error_of(lambda: md.checkpoint.save_async({"x": x}, f"{root}/{name}").wait())

        found = []
        pending = failing("one")
        found += [error_of(pending.wait), error_of(pending.wait), save("two")]
        pending = failing("three")
        found += [save("four"), error_of(pending.wait), save("five")]
        failing("six")
        found += [save_async("seven"), save_async("eight")]
        failing("nine")
        load = error_of(lambda: md.checkpoint.load({"x": x}, f"{root}/two"))
        found += [load, save("ten")]
        return found

    found = pool.run(program, 3, str(tmp_path), backend=backend)
    assert found[0] == found[1] == found[2]
    failure, *others = found[0]
    assert failure.splitlines() == [
        "checkpoint.save_async failed because of a disk or file system error",
        f"  where:    rank {rank}, rank.safetensors",
        "  found:    OSError: [Errno 28] No space left on device: 'rank.safetensors'",
        "  fix:      correct the path, its permissions or the free space, then try again",
    ]
    saved = "nothing"
    assert others == [
        *(failure, saved),
        *(failure, failure, saved),
        *(failure, saved),
        *(failure, saved),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"two", "five", "eight", "ten"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_to_wait_on_one_rank_alone_is_an_error_that_names_the_save(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    def program(root: str) -> str:
        x = rows_of(mesh_of(3), 1.0)
        pending = md.checkpoint.save_async({"x": x}, f"{root}/one")
        others = partial(md.all_reduce, torch.ones(1))
        with pytest.raises(MismatchError) as caught:
            (pending.wait if md.get_rank() == 1 else others)()
        return str(caught.value)

    for error in pool.run(program, 3, str(tmp_path), backend=backend):
        assert error.startswith("collective mismatch: ranks made different calls as call")
        assert "rank 1: all_reduce((2,) int64, MAX) of checkpoint.save_async at " in error
        assert "ranks 0, 2: all_reduce((1,) float32, SUM) at " in error
    assert (
        md.checkpoint.open(tmp_path / "one").read("x").shape[0] > 0
    )  # it is complete all the same


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_of_the_world_raises_on_the_rank_that_failed(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    def program(root: str) -> str:
        x = rows_of(mesh_of(3), 1.0)
        with writing(1, fail):
            md.checkpoint.save_async({"x": x}, f"{root}/one")
            return error_of(md.destroy_process_group)

    first, failed, last = pool.run(program, 3, str(tmp_path), backend=backend)
    assert first == last == "nothing"
    assert failed.startswith("checkpoint.save_async failed because of a disk or file system error")
    md.checkpoint.save({"x": torch.ones(1)}, tmp_path / "two")
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_alone_it_does_not_wait_and_on_simulated_ranks_it_does(
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


def test_a_load_finds_what_is_being_saved(pool: Pool, tmp_path: Path) -> None:
    def program(root: str) -> list[Any]:
        x = rows_of(mesh_of(3), 3.0)

        def write(*args: Any) -> None:
            time.sleep(0.3)
            save_file(*args)

        save_file, found = files.save_file, []
        with writing(1, write):
            md.checkpoint.save_async({"x": x}, f"{root}/one")
            x.local.zero_()
            md.checkpoint.load({"x": x}, f"{root}/one")
            found.append(x.local.unique().tolist())
            checkpoints = md.checkpoint.Checkpointer(f"{root}/run")
            checkpoints.save({"x": x}, 1)
            x.local.fill_(4.0)
            checkpoints.save({"x": x}, 2, wait=False)
            x.local.zero_()
            found += [checkpoints.load({"x": x}), x.local.unique().tolist()]
        return found

    assert pool.run(program, 3, str(tmp_path), backend="shm") == [[[3.0], 2, [4.0]]] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_killed_before_it_waits_has_saved_what_all_ranks_wrote(
    pool: Pool, backend: str, tmp_path: Path
) -> None:
    def program(root: str) -> None:
        md.checkpoint.save_async({"x": rows_of(mesh_of(3), 5.0)}, f"{root}/one")
        await_path(f"{root}/one")
        os.kill(os.getpid(), signal.SIGKILL)

    found = pool.outcomes(program, 3, str(tmp_path), backend=backend)
    assert all(isinstance(outcome, Failure) for outcome in found)
    opened = md.checkpoint.open(tmp_path / "one")
    assert bool((opened.read("x") == 5).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_ranks_of_a_killed_rank_raise(pool: Pool, backend: str, tmp_path: Path) -> None:
    def program(root: str) -> str:
        def die(*_args: Any, **_kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        x = rows_of(mesh_of(3), 1.0)
        md.checkpoint.save({"x": x}, f"{root}/one")
        with writing(1, die):
            pending = md.checkpoint.save_async({"x": x}, f"{root}/two")
            try:
                pending.wait()
            except md.MeshdistError as error:
                return str(error)
        return "nothing"

    found = pool.outcomes(program, 3, str(tmp_path), backend=backend)
    assert isinstance(found[1], Failure)
    assert "rank 1" in found[0] and "rank 1" in found[2]
    md.checkpoint.save({"x": torch.ones(1)}, tmp_path / "three")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "three"}


PROGRAM = """
import os, signal, sys, time
import torch, meshdist as md
from meshdist.checkpoint import files
root, how = sys.argv[1:]
save_file = files.save_file

def await_path(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def write(*args):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise OSError(28, "No space left on device", "here")
    save_file(*args)
    if how == "late":
        time.sleep(1.0)
        os.mkdir(root + ".ask")
        await_path(root + "/other")

if "RANK" not in os.environ:  # another job, which removes what no process writes
    await_path(root + ".ask")
    md.checkpoint.save({}, root + "/other")
    sys.exit()
mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
x = md.full((30, 20), 2.0, sharding=md.NamedSharding(mesh, md.P("dp")))
if md.get_rank() == 2:
    files.save_file = write
md.checkpoint.save_async({"x": x}, root + "/one")
if how == "late" and md.get_rank() == 0:
    md.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["at once", "late", "fails", "killed"])
def test_a_program_that_ends_without_waiting(pool: Pool, how: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    others = [{}] if how == "late" else []
    begin = time.monotonic()
    ended = pool.start(PROGRAM, [*places(3), *others], str(root), how, has_teardown=False)
    assert is_within(time.monotonic() - begin, 20.0)
    codes = [done.returncode for done in ended]
    killed = -signal.SIGKILL if how == "killed" else 0
    assert codes == [0, 0, killed, *(0 for _ in others)], [done.stderr for done in ended]
    if how in ("at once", "late"):
        opened = md.checkpoint.open(root / "one")
        assert bool((opened.read("x") == 2).all())
        assert {*os.listdir(root)} == {"one", *("other" for _ in others)}
    else:
        assert not (root / "one").exists()
    if how == "fails":
        said = ended[2].stderr
        assert "meshdist: rank 2 could not save its part: checkpoint.save_async failed" in said
        assert "No space left on device" in said


def test_a_checkpointer_whose_save_has_failed_lets_its_root_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = {"x": torch.ones(3)}
    gc.disable()  # it is let go with the last name of it, not with the next search for cycles
    try:
        for step, wait in enumerate((False, True)):
            checkpoints = md.checkpoint.Checkpointer(tmp_path)
            with monkeypatch.context() as patched:
                patched.setattr(files, "write_arrays", fail)
                if not wait:
                    checkpoints.save(state, 10, wait=False)
                with pytest.raises(
                    CheckpointError, match="failed because of a disk or file system error"
                ):
                    checkpoints.save(state, 20)
            del checkpoints
            md.checkpoint.Checkpointer(tmp_path).save(state, step)
    finally:
        gc.enable()


def test_a_part_of_the_world_saves_while_another_writes(pool: Pool, tmp_path: Path) -> None:
    def program(root: str) -> list[str]:
        x = rows_of(mesh_of(3), 1.0)
        pair = md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))

        def write(*args: Any) -> None:
            await_path(f"{root}/two")
            save_file(*args)

        save_file = files.save_file
        with writing(2, write):
            pending = md.checkpoint.save_async({"x": x}, f"{root}/one")
            if md.get_rank() != 2:
                md.checkpoint.save({"y": torch.ones(2)}, f"{root}/two", mesh=pair)
            pending.wait()
        return sorted(os.listdir(root))

    assert pool.run(program, 3, str(tmp_path), backend="shm") == [["one", "two"]] * 3
