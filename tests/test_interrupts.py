"""Ctrl-C shows where each rank is, whichever way the ranks were started."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import meshdist as md

ROOT = Path(__file__).resolve().parents[1]
ENV = dict(os.environ, PYTHONPATH=str(ROOT))

PROGRAM = """
import sys, time, torch
import meshdist as md

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): time.sleep(60)

def load(mode):
    if mode == "loader":
        for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass
    if mode == "deaf":
        sum(range(1 << 60))
    while True: time.sleep(0.01)

def train(mode):
    if mode == "early":
        print("here", flush=True)
        load(mode)
    md.init_process_group()
    x = torch.ones(3)
    md.all_reduce(x)
    print("here", flush=True)
    if md.get_rank() == 1: load(mode)
    md.all_reduce(x)

if __name__ == "__main__":
    if sys.argv[1] == "spawn": md.spawn(train, (sys.argv[2],), nprocs=3)
    else: train(sys.argv[2])
"""


def interrupted(tmp_path: Path, *command: str) -> tuple[list[str], int]:
    """What is shown on stderr by three ranks that Ctrl-C ends, and the exit code."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = [str(script) if word == "train.py" else word for word in command]
    job = subprocess.Popen(
        [sys.executable, "-u", *words],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert job.stdout is not None
        for _ in range(3):
            assert job.stdout.readline() == "here\n"
        time.sleep(0.5)  # on to the next line
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=40)
    finally:
        job.kill()
        job.wait()
    return errors.replace(str(script), "train.py").splitlines(), job.returncode


IN_A_OPERATION = [
    "meshdist: ranks 0, 2 were here:",
    '  File "train.py", line 29, in <module>',
    "    else: train(sys.argv[2])",
    '  File "train.py", line 25, in train',
    "    md.all_reduce(x)",
    "  in call 2 on the world: all_reduce((3,) float32, SUM) at train.py:25 in train",
]
ELSEWHERE = (
    "  last collective: call 1 on the world: all_reduce((3,) float32, SUM) at train.py:22 in train"
)


@pytest.mark.parametrize(
    ("mode", "line"),
    [("busy", 14), pytest.param("loader", 11, marks=pytest.mark.soak)],
)
def test_ranks_of_the_launcher(tmp_path: Path, mode: str, line: int) -> None:
    run = ("-m", "meshdist", "run", "-n", "3", "train.py", "run", mode)
    (first, *lines), code = interrupted(tmp_path, *run)
    assert first.startswith("meshdist: interrupted; stopping 3 rank(s) on this host")
    assert lines[:6] == IN_A_OPERATION
    assert lines[6] == "meshdist: rank 1 was here:"
    assert any(f'  File "train.py", line {line}, in load' in shown for shown in lines[7:])
    assert ELSEWHERE in lines  # behind it finalizers may tell that they were interrupted
    assert code == 130


@pytest.mark.soak
def test_a_rank_in_one_long_call_did_not_answer(tmp_path: Path) -> None:
    run = ("-m", "meshdist", "run", "-n", "3", "train.py", "run", "deaf")
    (_, *lines), code = interrupted(tmp_path, *run)
    assert lines[:6] == IN_A_OPERATION
    assert lines[6:] == [
        "meshdist: rank 1 did not report a stack: stopped, or inside one long call"
    ]
    assert code == 130


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["busy", "early"])
def test_ranks_of_spawn(tmp_path: Path, mode: str) -> None:
    lines, _ = interrupted(tmp_path, "train.py", "spawn", mode)
    if mode == "early":  # no world, so that its traceback tells
        assert lines[0] == "meshdist: ranks 0-2 were here:"
        assert sum("in load" in line for line in lines) == 1
    else:
        assert lines[0] == "meshdist: ranks 0, 2 were here:"
        assert lines.count(IN_A_OPERATION[-1]) == lines.count(ELSEWHERE) == 1
    assert lines[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_simulated_ranks(capfd: pytest.CaptureFixture[str], num_ranks: int) -> None:
    def program() -> None:
        md.barrier()
        if md.get_rank() == num_ranks - 1:
            _thread.interrupt_main()  # what Ctrl-C does
            while True:
                pass

    with pytest.raises(KeyboardInterrupt) as caught:
        md.simulate(program, num_ranks)
    *waiting, busy = capfd.readouterr().err.split("meshdist: ")[1:]
    assert busy.startswith(f"rank {num_ranks - 1} was here:\n")
    assert "\n  last collective: call 1 on the world: barrier() at " in busy
    others = {1: [], 2: ["rank 0 was here:"], 5: ["ranks 0-3 were here:"]}[num_ranks]
    assert [text.splitlines()[0] for text in waiting] == others
    for text in waiting:  # the last rank to come goes on first
        assert "    md.barrier()\n  in call 1 on the world: barrier() at " in text
    assert len(caught.traceback) == 2  # this test's frame, and one of ours


@pytest.mark.soak
def test_a_timeout_says_where_a_rank_is_that_is_in_no_collective(tmp_path: Path) -> None:
    hasty = "hasty = md.new_group(timeout=datetime.timedelta(seconds=2))"
    program = PROGRAM.replace("import meshdist as md", "import meshdist as md, datetime")
    program = program.replace("init_process_group()", f"init_process_group(); {hasty}")
    program = program.replace(
        "load(mode)\n    md.all_reduce(x)", "load(mode)\n    md.all_reduce(x, group=hasty)"
    )
    script = tmp_path / "train.py"
    script.write_text(program)
    done: Any = subprocess.run(
        [sys.executable, "-m", "meshdist", "run", "-n", "2", str(script), "run", "busy"],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = done.stderr.replace(str(script), "train.py")
    assert (
        "rank 1: did not reach this call; "
        "last call 1 on the world: all_reduce((3,) float32, SUM) at "
        "train.py:22 in train; now at train.py:14 in load\n" in found
    )
