"""Jobs are killed at every operation on files: what then loads is the old state or the new, whole.

The next save removes what was left over, and nothing of a job that lives.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

import meshdist as md
from tests.load import is_within
from tests.pool import Failure, Pool

from .file_operations import Act, Operation, watched

SIZE = 3
HANGS_S = 60  # a forked process that takes longer shows its stacks on stderr, and ends with 1


def state_of(step: int, size: int) -> dict[str, Any]:
    """The state of a step, of which each of ``size`` ranks has its part."""
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    rows = md.NamedSharding(mesh, md.P("dp"))
    cut = md.zeros((7, 3), sharding=rows)
    begin = rows.indices_map((7, 3))[md.get_rank()][0].start or 0
    count = cut.local.numel()
    cut.local.copy_((torch.arange(count) + 3 * begin + 100 * step).view_as(cut.local))
    return {"cut": cut, "same": torch.full((2,), float(step)), "step": step}


def is_of_step(state: dict[str, Any], step: int, size: int) -> bool:
    wanted = state_of(step, size)
    return (
        torch.equal(state["cut"].local, wanted["cut"].local)
        and torch.equal(state["same"], wanted["same"])
        and state["step"] == step
    )


def save_step(root: str, step: int, size: int = SIZE, keep: int = 1) -> None:
    def program() -> None:
        md.checkpoint.Checkpointer(root, keep=keep).save(state_of(step, size), step)

    md.simulate(program, size)


def loaded_step(root: str, size: int) -> int | None:
    """Load the newest step on another number of ranks; return it, if all values are its own."""

    def program() -> int | None:
        state = state_of(999, size)
        step = md.checkpoint.Checkpointer(root).load(state, verify=True)
        assert step is None or is_of_step(state, step, size), state
        return step

    (step,) = set(md.simulate(program, size))
    return step


def in_child(body: Callable[[], None], act: Act) -> int:
    """Return how a forked process ends that does something with its operations watched."""
    child = os.fork()
    if child == 0:
        code = 1
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            with watched(act):
                body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def alone(pool: Pool, program: Callable[..., Any], *args: Any) -> Any:
    """Return what a program returns in a process that has no world, and that may be forked."""
    (found,) = pool.outcomes(program, 1, *args, has_world=False, timeout_s=120.0)
    if isinstance(found, Failure):
        raise found.exception
    return found


class KillAt:
    """Kill this process at its operation of a number: before it, or when a file is half written."""

    def __init__(self, number: int, *, is_torn: bool) -> None:
        self._left, self._is_torn = number, is_torn

    def __call__(self, operation: Operation) -> Any:
        self._left -= 1
        if self._left < 0:
            if self._is_torn:
                operation.tear()
            os.kill(os.getpid(), signal.SIGKILL)
        return operation.do()


def names_in(root: str) -> list[str]:
    return sorted(os.listdir(root))


def test_a_job_killed_at_every_operation_leaves_the_old_step_or_the_new(
    pool: Pool, tmp_path: Path
) -> None:
    def program(rank: int, folder: str) -> list[tuple[str, int]]:
        begin = f"{folder}/begin"
        save_step(begin, 0, keep=2)
        save_step(begin, 1, keep=2)
        operations: list[str] = []

        def note(operation: Operation) -> Any:
            operations.append(operation.name)
            return operation.do()

        root = copytree(begin, f"{folder}/counted")
        with watched(note):
            save_step(root, 2)
        kills = [(number, False) for number in range(len(operations))]
        kills += [(number, True) for number, name in enumerate(operations) if name == "write"]
        found = []
        for number, is_torn in kills:
            root = copytree(begin, f"{folder}/{number}{is_torn}")
            act = KillAt(number, is_torn=is_torn)
            assert in_child(lambda root=root: save_step(root, 2), act) == -signal.SIGKILL
            step = loaded_step(root, 1 + number % 2)
            assert step is not None
            found.append((operations[number], step))
            if number % 3 == is_torn:
                save_step(root, 3)
                assert names_in(root) == [".lock", "step-3"]
                assert loaded_step(root, 2) == 3
        return found

    found = alone(pool, program, str(tmp_path))
    before = [operation for operation, step in found if step == 1]
    assert before.count("write") >= SIZE + 1 + SIZE + 1  # each file, whole and torn, and locks
    assert {step for _, step in found} == {1, 2}


def kill_a_rank(
    pool: Pool,
    folder: Path,
    victim: int,
    number: int,
    name: str = "",
    backend: str = "shm",
    *,
    wait: bool = True,
) -> str | None:
    """Kill a rank at an operation of its own; return the operation, None where it has no more.

    Args:
        number: of its operations of a name, or of all.
        wait: whether the save waits.
    """

    def program(root: str, note: str) -> Any:
        def act(operation: Operation) -> Any:
            nonlocal number
            number -= operation.rank == victim and name in ("", operation.name)
            if number < 0:
                Path(note).write_text(operation.name)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation.do()

        checkpoints = md.checkpoint.Checkpointer(root, keep=1)
        checkpoints.save(state_of(1, SIZE), 1)
        begin = time.monotonic()
        try:
            with watched(act):
                pending = checkpoints.save(state_of(2, SIZE), 2, wait=wait)
                if pending is not None:
                    pending.wait()
        except md.MeshdistError as error:
            return time.monotonic() - begin, str(error)
        return time.monotonic() - begin, None

    root, note = str(folder / "root"), folder / "note"
    found = pool.outcomes(program, SIZE, root, str(note), backend=backend, timeout_s=30.0)
    is_killed = note.exists()
    for rank, outcome in enumerate(found):
        if rank == victim and is_killed:
            assert isinstance(outcome, Failure)
        else:
            seconds, text = outcome
            assert is_within(seconds, 5.0)
            assert text is None or f"rank {victim}" in text
    step = loaded_step(root, 2)
    assert step in (1, 2)
    save_step(root, 3)
    assert names_in(root) == [".lock", "step-3"]
    return note.read_text() if is_killed else None


@pytest.mark.parametrize(
    ("victim", "name", "number", "wait"),
    [(0, "mkdir", 0, True), (2, "write", 0, False), (2, "fsync", 0, True), (2, "write", 1, True)],
)
def test_other_ranks_of_a_killed_rank_raise(
    victim: int, name: str, number: int, wait: bool, pool: Pool, tmp_path: Path
) -> None:
    assert kill_a_rank(pool, tmp_path, victim, number, name, wait=wait) == name


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("wait", [True, False])
def test_every_rank_is_killed_at_every_operation(
    wait: bool, victim: int, backend: str, pool: Pool, tmp_path: Path
) -> None:
    number, names = 0, []
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        name = kill_a_rank(pool, folder, victim, number, backend=backend, wait=wait)
        if name is None:
            break
        names.append(name)
        number += 1
    # The last rank to write commits: which rank that is differs from job to job.
    assert names[:4] == ["lock", "write", "fsync", "write"] if victim else len(names) > 5


def is_saved(path: str) -> bool:
    """Save on two ranks; return False where another save was faster."""

    def rank_saves() -> None:
        md.checkpoint.save(state_of(len(path), 2), path)

    try:
        md.simulate(rank_saves, 2)
    except md.CheckpointError as error:
        if "because the path exists" not in str(error):
            raise
        return False
    return True


class PausedSave:
    """A save in a process of its own, which waits before its operation of a number."""

    def __init__(self, path: str, number: int) -> None:
        (self._done, done), (go, self._go) = os.pipe(), os.pipe()

        def act(operation: Operation) -> Any:
            nonlocal number
            number -= 1
            if number == -1:
                os.write(done, b".")
                os.read(go, 1)
            return operation.do()

        self._process = os.fork()
        if self._process == 0:
            code = 1
            try:
                with watched(act):
                    code = 0 if is_saved(path) else 3
            finally:
                os._exit(code)
        os.close(done)
        os.close(go)
        self.is_paused = os.read(self._done, 1) == b"."

    def is_saved(self) -> bool:
        """Let it go on; return whether it has saved."""
        if self.is_paused:
            os.write(self._go, b".")
        code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        os.close(self._done)
        os.close(self._go)
        assert code in (0, 3)
        return code == 0


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["other", "same"])
def test_jobs_that_live_leave_each_other_alone(
    name: str, every: int, pool: Pool, tmp_path: Path
) -> None:
    def program(rank: int, folder: str) -> list[tuple[bool, bool]]:
        found: list[tuple[bool, bool]] = []
        while True:
            root = f"{folder}/{len(found)}"
            os.mkdir(root)
            theirs = PausedSave(f"{root}/same", every * len(found))
            if not theirs.is_paused:
                assert theirs.is_saved()
                return found
            mine = is_saved(f"{root}/{name}")
            found.append((theirs.is_saved(), mine))
            whole = ["other", "same"] if name == "other" else ["same"]
            assert names_in(root) == whole
            for each in whole:
                leaves = md.checkpoint.open(f"{root}/{each}").leaves
                assert leaves == {"step": len(f"{root}/{each}")}

    found = alone(pool, program, str(tmp_path))
    assert len(found) > 8
    if name == "other":
        assert set(found) == {(True, True)}
    else:  # the job that renames first has the name, and the other is told so
        assert set(found) == {(True, False), (False, True)}


def test_a_forked_child_keeps_no_lock_of_a_killed_job(pool: Pool, tmp_path: Path) -> None:
    """Workers that load data live on for seconds, while the job starts again."""

    def program(rank: int, root: str) -> list[int]:
        read, write = os.pipe()
        job = os.fork()
        if job == 0:
            checkpoints = md.checkpoint.Checkpointer(root)
            checkpoints.save({"step": 1}, 1)
            worker = os.fork()
            if worker == 0:
                os.write(write, str(os.getpid()).encode())  # it has closed its copy by now
                time.sleep(60.0)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        worker = int(os.read(read, 20))
        os.waitpid(job, 0)
        try:
            checkpoints = md.checkpoint.Checkpointer(root)
            checkpoints.save({"step": 2}, 2)
            return checkpoints.steps()
        finally:
            os.kill(worker, signal.SIGKILL)

    assert alone(pool, program, str(tmp_path)) == [1, 2]


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("is_async", [False, True])
def test_jobs_killed_at_random_times(
    is_async: bool, backend: str, pool: Pool, tmp_path: Path
) -> None:
    def program(root: str, size: int, victims: list[int], after_s: float) -> int:
        checkpoints = md.checkpoint.Checkpointer(root, keep=2)
        step = checkpoints.load(state_of(999, size)) or 0
        md.barrier()
        if md.get_rank() in victims:
            end = os.kill, (os.getpid(), signal.SIGKILL)
            threading.Timer(after_s, *end).start()
        try:
            while True:
                step += 1
                state = state_of(step, size)
                checkpoints.save(state, step, wait=not is_async)
                state["cut"].local.zero_()
                state["same"].zero_()
        except md.MeshdistError as error:
            if "another run" in str(error):  # the one before has not let the root go
                raise
            if md.get_rank() in victims:
                time.sleep(60.0)  # another rank was killed a moment earlier
            with suppress(md.MeshdistError):  # of a save that does not wait, once more
                md.destroy_process_group()
            return step

    random_numbers = random.Random(f"{is_async} {backend}")
    root, newest, steps = str(tmp_path / "root"), 0, set()
    for _ in range(125):
        size = random_numbers.choice((2, 3))
        victims = random_numbers.choice([[*range(size)], *([rank] for rank in range(size))])
        after_s = random_numbers.uniform(0.0, 0.3)
        found = pool.outcomes(
            program, size, root, size, victims, after_s, backend=backend, timeout_s=30.0
        )
        for rank, outcome in enumerate(found):
            error = outcome.exception if isinstance(outcome, Failure) else None
            assert (error is not None) == (rank in victims), f"rank {rank}: {error}"
        step = loaded_step(root, random_numbers.choice((1, 4, 5)))
        assert newest <= (step or 0)
        newest = step or 0
        steps.add(newest)
    assert len(steps) > 20
    save_step(root, newest + 1)
    assert names_in(root) == [".lock", f"step-{newest + 1}"]
