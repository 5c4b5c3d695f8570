"""Jobs that end at one step on all ranks after a signal, and jobs that start again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import meshdist as md
from tests.pool import Pool, places

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resume.py"

PROGRAM = """
import os, signal, sys, threading, time
import torch, meshdist as md
rank, step, number, backend = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
md.init_process_group(backend)
for now in range(1, 60):
    md.all_reduce(torch.ones(3))
    if md.get_rank() == rank and now == step:
        os.kill(os.getpid(), number)
    if md.preempted():
        break
print("ended at", now)
assert md.preempted()
md.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("backend", "rank", "number"),
    [("shm", 0, signal.SIGTERM), ("gloo", 2, signal.SIGUSR1)],
    ids=["first", "last"],
)
def test_all_ranks_stop_at_one_step(pool: Pool, backend: str, rank: int, number: int) -> None:
    step = random.Random(f"{backend}{rank}").randint(2, 50)
    ended = pool.start(
        PROGRAM, places(3), str(rank), str(step), str(int(number)), backend, has_teardown=False
    )
    assert [(done.returncode, done.stdout) for done in ended] == [(0, f"ended at {step}\n")] * 3


def test_alone_and_with_a_handler_that_was_there() -> None:
    called = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    assert not md.preempted()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert md.preempted() and called == [signal.SIGUSR1]


def test_simulated_ranks() -> None:
    assert not md.preempted()  # whoever runs them listens

    def program() -> list[bool]:
        found = [md.preempted()]
        md.barrier()
        if md.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return [*found, md.preempted()]

    assert md.simulate(program, 3) == [[False, True]] * 3


def test_in_another_thread_it_is_rejected() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads, pytest.raises(md.errors.WorldError) as caught:
        threads.submit(md.preempted).result()
    assert caught.value.summary == (
        "preempted() cannot install signal handlers outside the main thread"
    )
    assert caught.value.fix == (
        "call md.preempted() once in the main thread, at the start of the program"
    )


def test_the_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert md.restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert md.restart_count() == 2
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert md.restart_count() == 3


def torchrun(root: Path, kill: str, backend: str) -> subprocess.CompletedProcess[str]:
    """Run the example under torchrun until it ends, and let a rank be killed in its first life."""
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", str(EXAMPLE)]
    words += ["--root", str(root), "--kill", kill, "--backend", backend, "--check"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_torchrun_starts_again_what_has_lost_a_rank(tmp_path: Path) -> None:
    ended = torchrun(tmp_path / "run", "1:7", "shm")
    assert ended.returncode == 0, ended.stderr
    assert "life 1: goes on after step 5" in ended.stdout
    assert "difference from one rank" in ended.stdout
    assert md.checkpoint.Checkpointer(tmp_path / "run").steps() == [10, 15, 20]


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_each_rank_killed_at_random_steps(backend: str, tmp_path: Path) -> None:
    draws = random.Random(backend)
    for number in range(100):
        kill = f"{draws.randrange(2)}:{draws.randint(1, 20)}"
        ended = torchrun(tmp_path / str(number), kill, backend)
        assert ended.returncode == 0, (kill, ended.stderr)
        assert "difference from one rank" in ended.stdout


def test_the_example_goes_on_on_other_ranks(pool: Pool, tmp_path: Path) -> None:
    words = ["--root", str(tmp_path / "run"), "--check", "--simulate"]
    for more in (["4", "--tp", "2", "--steps", "10"], ["3"], ["1", "--steps", "25"]):
        (ended,) = pool.start(EXAMPLE, ({},), *words, *more, has_teardown=False)
        assert ended.returncode == 0, ended.stderr
    assert torch.is_tensor(md.checkpoint.open(tmp_path / "run" / "step-25").read("model.0.bias"))
