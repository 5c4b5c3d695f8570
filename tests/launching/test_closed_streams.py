"""Programs started by a daemon, whose standard streams are closed, run as others do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import sys, torch, meshdist as md
x = torch.ones(300_000)
md.all_reduce(x)
model = md.DDP(torch.nn.Linear(3, 3))
model(torch.ones(1, 3)).sum().backward()
print("shown", file=sys.stderr)
with open(sys.argv[1] + str(md.get_rank()), "w") as file:
    file.write(str(x[-1].item()))
md.destroy_process_group()
"""
CALL = """
import sys, torch, meshdist as md
def add(value):
    x = torch.full((2,), value)
    md.all_reduce(x)
    return x[0].item()
if __name__ == "__main__":
    for rank, found in enumerate(md.{how}(add, args=(1.0,), {nprocs})):
        with open(sys.argv[1] + str(rank), "w") as file:
            file.write(str(found))
"""
PROGRAMS = {
    "run": RUN,
    "spawn": CALL.format(how="spawn", nprocs="nprocs=2"),
    "simulate": CALL.format(how="simulate", nprocs="ranks=2"),
}


@pytest.mark.parametrize(
    ("how", "closed"),
    [
        pytest.param("run", ">&-", marks=pytest.mark.soak),
        pytest.param("run", "2>&-", marks=pytest.mark.soak),
        ("run", "<&- >&- 2>&-"),
        pytest.param("spawn", "<&-", marks=pytest.mark.soak),
        ("spawn", "<&- >&- 2>&-"),
        ("simulate", "<&- >&- 2>&-"),
    ],
)
def test_closed_streams_do_not_matter(how: str, closed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[how])
    launch = "-m meshdist run -n 2 " if how == "run" else ""
    command = f"{sys.executable} {launch}{program} {tmp_path}/found {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert [(tmp_path / f"found{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
